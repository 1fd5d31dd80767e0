"""What a linked request means: independent straight-line code on Hugging Face weights (docs/SEMANTICS.md, check P4).

The oracle walks the prompt in natural order. Plain spans and seams are computed under everything that stands before
them; for an interior it replays the record that an isolated run of the segment left (K before RoPE and V; what the
recurrence takes of each token, and its conv inputs). It shares no idea with the engine beyond that: no transition
operator, no zero-start end-state, no relocation, no chunked kernels. Everything is float32 on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from hypic.check import bailing
from hypic.check.hf_mamba import one_chunk_scans
from hypic.check.kimi_linear import KimiLinear
from hypic.check.oracle_blocks import block_of
from hypic.check.oracle_kimi import PairedRope, Rope
from hypic.check.oracle_mixers import RopeTable, interior

DELTA_AND_ATTENTION = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
ARCHITECTURES = (
    *DELTA_AND_ATTENTION, "FalconH1ForCausalLM", "NemotronHForCausalLM", "DeepseekV2ForCausalLM", "MiniMaxForCausalLM",
)  # fmt: skip
"""Names as in config.json, and of the transformers classes that load them."""
_OURS: dict[str, Any] = {
    "KimiLinearForCausalLM": KimiLinear,
    "BailingMoeLinearV2ForCausalLM": bailing.BailingMoeLinearV2ForCausalLM,
    "BailingMoeV2_5ForCausalLM": bailing.BailingMoeV2_5ForCausalLM,
}
"""What transformers has no class for."""


class OracleError(ValueError):
    """A model or a request that the oracle cannot answer for; the text says which and why."""


class OracleResult(NamedTuple):
    """A continuation and the distributions it was chosen from.

    Attributes:
        ids: the greedy continuation, or ``forced``.
        logprobs: [n_new, vocab] float32; row i is the log-softmax that ``ids[i]`` was chosen from.
        linked: the spans whose interiors were replayed; () for a full recompute.
    """

    ids: list[int]
    logprobs: Tensor
    linked: tuple[tuple[int, int], ...] = ()


class Oracle:
    """A model and its two answers: :meth:`link` (docs/SEMANTICS.md) and :meth:`full` (Hugging Face's own forward).

    Args:
        model_dir: a local model folder as ``save_pretrained`` writes it.
        vocab_limit: look at the first so many logits only, where the served model does (padded embeddings).
    Raises:
        OracleError: no config.json, or an architecture or layer kind that is not covered.
    """

    def __init__(self, model_dir: Path | str, *, vocab_limit: int | None = None) -> None:
        self.model = _load(Path(model_dir))
        self._vocab_limit = vocab_limit
        self._text: Any = getattr(self.model.model, "language_model", self.model.model)
        rope = getattr(self._text, "rotary_emb", None)
        if rope is not None and rope.rope_type in ("dynamic", "longrope"):
            raise OracleError(f"rope_type {rope.rope_type!r}: K at a position also depends on the length of the prompt")
        paired = self.model.config.model_type == "deepseek_v2" if rope is not None else False
        table: Rope | None = None
        if rope is not None:
            table = PairedRope(rope) if paired else RopeTable(rope)
        self._embed = self._text.get_input_embeddings()
        self._norm = next(m for n in ("norm", "norm_f", "final_layernorm") if (m := getattr(self._text, n, None)))
        try:
            self._blocks = [block_of(layer, table) for layer in self._text.layers]
        except NotImplementedError as e:
            raise OracleError(f"{model_dir}: {e}") from None
        self._compiled: dict[tuple[int, ...], list[Any]] = {}

    @property
    def text_config(self) -> Any:
        """Of the language model."""
        return self._text.config

    @torch.inference_mode()
    def link(
        self,
        ids: Sequence[int],
        cached: Sequence[tuple[int, int]],
        *,
        w: int,
        n_new: int,
        forced: Sequence[int] | None = None,
        dummies: Sequence[int] = (),
    ) -> OracleResult:
        """Answer ``ids`` with the segments ``cached`` linked from artifacts and everything else plain.

        Args:
            ids: the prompt.
            cached: [start, end) of each cached segment, in natural order. As in docs/SEMANTICS.md, a segment of at most
                ``w`` tokens and one that ends the prompt are plain. ``--hypic-min-segment`` is the caller's business.
            w: the seam window; 0 replays whole segments.
            n_new: tokens to answer, at least 1.
            forced: take these instead of the most likely tokens (same length as ``n_new``).
            dummies: tokens that segments are compiled behind (LegoLink-0); their records are dropped.
        Raises:
            OracleError: an empty prompt, spans out of order or out of range, a bad ``w``, ``n_new`` or ``forced``.
        """
        linked = _linked_spans(len(ids), cached, w)
        states = [block.start() for block in self._blocks]
        done = 0
        for start, end in linked:
            _, states, _ = self._run(ids[done : start + w], states)
            records = self._compile((*dummies, *ids[start:end]))
            first = len(dummies) + w
            states = [b.replay(s, interior(r, first)) for b, s, r in zip(self._blocks, states, records, strict=True)]
            done = end
        hidden, states, _ = self._run(ids[done:], states)

        def step(token: int) -> Tensor:
            nonlocal states
            hidden, states, _ = self._run([token], states)
            return self._logits(hidden)

        return self._answer(self._logits(hidden), step, n_new, forced)._replace(linked=linked)

    @torch.inference_mode()
    def full(self, ids: Sequence[int], *, n_new: int, forced: Sequence[int] | None = None) -> OracleResult:
        """Full recompute: Hugging Face's own forward, with its own cache. Arguments as in :meth:`link`.

        Kimi-Linear, which has none: a link of no segment.
        """
        if isinstance(self.model, KimiLinear):
            return self.link(ids, (), w=0, n_new=n_new, forced=forced)
        _linked_spans(len(ids), (), 0)
        cache, seen = _cache(self._text.config), 0

        def step(*tokens: int) -> Tensor:
            nonlocal seen
            where: dict[str, Any] = {}
            if self._text.config.model_type == "minimax":  # its cache counts tokens in layer 0, which may be linear
                where["position_ids"] = torch.arange(seen, seen := seen + len(tokens))[None]
            out = self._text(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, **where)
            return self._head(out.last_hidden_state[0, -1])

        return self._answer(step(*ids), step, n_new, forced)

    def _compile(self, tokens: tuple[int, ...]) -> list[Any]:
        """Records of ``tokens`` run in isolation, one per layer, covering all of them; kept for the oracle's life."""
        if tokens not in self._compiled:
            _, _, self._compiled[tokens] = self._run(tokens, [block.start() for block in self._blocks])
        return self._compiled[tokens]

    def _run(self, tokens: Sequence[int], states: list[Any]) -> tuple[Tensor, list[Any], list[Any]]:
        """Run contiguous tokens through all layers: hidden states [n, d], the states after them, their records."""
        if not tokens:
            return torch.empty(0), states, []
        after, records = [], []
        x = self._embed(torch.tensor(tokens)) * getattr(self._text, "embedding_multiplier", 1.0)
        for block, state in zip(self._blocks, states, strict=True):
            x, state, record = block.run(x, state)
            after.append(state)
            records.append(record)
        return x, after, records

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [vocab] after the last of the hidden states [n, d]."""
        return self._head(self._norm(hidden[-1]))

    def _head(self, normed: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(normed) * getattr(self._text, "lm_head_multiplier", 1.0)
        return logits

    def _answer(
        self, logits: Tensor, step: Callable[[int], Tensor], n_new: int, forced: Sequence[int] | None
    ) -> OracleResult:
        """Take ``n_new`` tokens, the first from ``logits`` [vocab], the others from what ``step`` says after each."""
        if n_new < 1:
            raise OracleError(f"n_new = {n_new}: must be at least 1")
        if forced is not None and len(forced) != n_new:
            raise OracleError(f"forced has {len(forced)} tokens, n_new = {n_new}")
        taken: list[int] = []
        rows: list[Tensor] = []
        for i in range(n_new):
            if i:
                logits = step(taken[-1])
            rows.append(logits[: self._vocab_limit].float().log_softmax(-1))
            taken.append(int(rows[-1].argmax()) if forced is None else forced[i])
        return OracleResult(taken, torch.stack(rows))


def _cache(config: Any) -> Any:
    """What transformers' model keeps of the tokens so far."""
    if config.model_type != "minimax":
        return transformers.DynamicCache(config=config)
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return MiniMaxCache()


def _load(model_dir: Path) -> Any:
    """The model, float32, in eval mode, from local files only."""
    try:
        names = json.loads((model_dir / "config.json").read_text()).get("architectures") or []
    except (OSError, ValueError) as e:
        raise OracleError(f"cannot read {model_dir / 'config.json'}: {e}") from None
    name = next((n for n in names if n in (*ARCHITECTURES, *_OURS)), None)
    if name is None:
        known = [*ARCHITECTURES, *_OURS]
        raise OracleError(f"{model_dir}: architectures {names} unknown to the oracle, which has {known}")
    if name in _OURS:
        return _OURS[name].from_pretrained(model_dir).float().eval()
    cls = getattr(transformers, name)
    return one_chunk_scans(cls.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)).eval()


def _linked_spans(n: int, cached: Sequence[tuple[int, int]], w: int) -> tuple[tuple[int, int], ...]:
    """The spans of ``cached`` whose interiors are replayed in a prompt of ``n`` tokens. Raises OracleError."""
    if n < 1:
        raise OracleError("the prompt is empty")
    if w < 0:
        raise OracleError(f"w = {w}: must not be negative")
    done = 0
    for start, end in cached:
        if not done <= start <= end <= n:
            raise OracleError(f"span [{start}, {end}) overlaps, is out of order, or leaves the prompt of {n} tokens")
        done = end
    return tuple((start, end) for start, end in cached if end - start > w and end < n)
