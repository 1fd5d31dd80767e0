"""Transition operators of linear-attention layers as a monoid: the algebra that makes artifacts compose.

A stretch of tokens changes the state h [..., V, K] (SGLang's layout) of a head by ``h <- h T + S``. The pairs (T, S)
form a monoid, (T1, S1)(T2, S2) = (T1 T2, S1 T2 + S2), so chunked compile, linking of artifacts and parallel scans are
one operation. HYPIC (arXiv 2607.01299) and fla write the state as [K, V]; their operator is the transpose, on the left.
"""

from hypic.algebra.monoid import DenseTransition, DiagonalTransition, ScalarTransition, Transition, compose, fold

__all__ = ["DenseTransition", "DiagonalTransition", "ScalarTransition", "Transition", "compose", "fold"]
