"""A plain torch reference that runs every method, also those that an engine has no reason to serve.

Documents are run in isolation and leave records: K before RoPE and V; conv inputs, k, v, log decay and write strength. A
prompt is then computed at each layer with the records of interior tokens in the place of what they would have been. So
nothing of the engine is used: no artifacts, no T and S, no relocation of a rotated K. It differs from ``hypic/check/oracle.py``,
the judge, in being fast (recurrences by chunks, states kept across tokens, records kept across prompts) and in knowing all
methods; ``tests/eval/test_reference.py`` holds the two against each other.
"""

from hypic.eval.reference.model import Model, ModelError
from hypic.eval.reference.runner import Answer, Reference

__all__ = ["Answer", "Model", "ModelError", "Reference"]
