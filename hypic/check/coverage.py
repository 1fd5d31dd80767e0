"""Which architectures hypic's tests cover, and with which checks: read by the tests, and by ``hypic doctor --models``.

The tests run what stands here, on the reduced model of each row: a row cannot claim a check that no test makes.
"""

from __future__ import annotations

from typing import NamedTuple


class Covered(NamedTuple):
    """A reduced model of ``check.tiny_models`` and what the tests do with it.

    Attributes:
        model: its name. architecture: as in its config.json. published: models that have it.
        linear: title of the family of its linear layers, or None. attention: how its full-attention layers know positions.
        checks: of docs/SEMANTICS.md, by tests/engine/test_selfcheck.py on a running engine.
        transformers: tests/platform/test_engine_matches_hf.py: the CPU platform generates what transformers generates.
        note: what else there is to say.
    """

    model: str
    architecture: str
    published: str
    linear: str | None
    attention: str
    checks: tuple[str, ...]
    transformers: bool = True
    note: str = ""


ALL = ("P1", "P2", "P3", "P4", "P5", "P6")
_GDN = "gated delta network"
COVERAGE = (
    Covered("qwen3next", "Qwen3NextForCausalLM", "Qwen3-Next", _GDN, "partial RoPE", ALL),
    Covered("qwen35", "Qwen3_5ForConditionalGeneration", "Qwen3.5, dense", _GDN, "partial mrope", ALL),
    Covered("qwen35moe", "Qwen3_5MoeForConditionalGeneration", "Qwen3.5, MoE", _GDN, "partial mrope", ()),
    Covered("nemotronh", "NemotronHForCausalLM", "Nemotron-H, Nemotron-3", "Mamba2", "none", ("P1", "P3", "P4", "P6")),
    Covered(
        "falconh1", "FalconH1ForCausalLM", "Falcon-H1", "Mamba2", "RoPE", ("P1", "P4"), False,
        "attention and Mamba2 in every layer; one rank",
    ),
    Covered(
        "granite4h", "GraniteMoeHybridForCausalLM", "Granite-4-H", "Mamba2", "none", ("P1",), False,
        "SGLang 0.5.17 differs from transformers",
    ),
    Covered(
        "kimi", "KimiLinearForCausalLM", "Kimi-Linear", "Kimi delta attention", "latent, none",
        ("P1", "P4", "P6"), False, "transformers does not have it: P1 and P4 on the same engine",
    ),
    Covered("deepseekv2", "DeepseekV2ForCausalLM", "DeepSeek-V2", None, "latent, RoPE", ("P1", "P4")),
    Covered(
        "ringlinear", "BailingMoeLinearV2ForCausalLM", "Ring-mini-linear-2.0, Ring-flash-linear-2.0", "Lightning",
        "partial RoPE, in linear layers too", ("P1", "P4"), False, "P4's oracle as our plain-torch model; MoE: see Ring-2.5",
    ),
    Covered(
        "ring25", "BailingMoeV2_5ForCausalLM", "Ring-2.5, Ling-2.5", "Lightning",
        "latent, RoPE; partial RoPE in linear layers", ("P1", "P3", "P4", "P6"), False,
        "P4's oracle as our plain-torch model, MoE included",
    ),
    Covered(
        "minimax", "MiniMaxForCausalLM", "MiniMax-Text-01, MiniMax-M1", "Lightning", "RoPE; none in linear layers",
        ("P1", "P4"), False, "P4's oracle as transformers; as published: `MiniMaxText01ForCausalLM`, `MiniMaxM1ForCausalLM`",
    ),
    Covered("llama", "LlamaForCausalLM", "Llama 2, 3", None, "RoPE", ALL),
    Covered("qwen3", "Qwen3ForCausalLM", "Qwen3", None, "RoPE", ()),
)  # fmt: skip
"""Every architecture of a reduced model; variants of one (``qwen35_dk``, ``kimi_dense``) have no row of their own."""


class Refused(NamedTuple):
    """An architecture of SGLang that hypic's server and `hypic doctor` refuse.

    Attributes:
        architecture: as in its config.json. config: transformers' class of it. published: models that have it.
        reason: how the refusal begins.
    """

    architecture: str
    config: str
    published: str
    reason: str


_WINDOWS = "sliding-window attention"
REFUSED = (
    Refused("Gemma2ForCausalLM", "Gemma2Config", "Gemma 2", _WINDOWS),
    Refused("Gemma3ForCausalLM", "Gemma3TextConfig", "Gemma 3, text", _WINDOWS),
    Refused("Gemma3ForConditionalGeneration", "Gemma3Config", "Gemma 3", _WINDOWS),
    Refused("GptOssForCausalLM", "GptOssConfig", "gpt-oss", _WINDOWS),
    Refused("Llama4ForConditionalGeneration", "Llama4Config", "Llama 4", _WINDOWS),
    Refused("Cohere2ForCausalLM", "Cohere2Config", "Command R7B", _WINDOWS),
    Refused("Exaone4ForCausalLM", "Exaone4Config", "EXAONE 4", _WINDOWS),
    Refused("Olmo3ForCausalLM", "Olmo3Config", "OLMo 3", _WINDOWS),
    Refused(
        "Lfm2ForCausalLM", "Lfm2Config", "LFM2", "linear attention of Mamba2AttnBackend of another mixer, or a short convolution"
    ),
)  # fmt: skip
"""tests/commands/test_doctor.py makes these configs and sees them refused."""


def table() -> str:
    """The coverage in Markdown, as docs/FAMILIES.md has it: what is tested, then what is refused."""
    return f"{_tested()}\n\n{_refused()}"


def _refused() -> str:
    rows = [("refused", "architecture in SGLang", "because"), ("---",) * 3]
    rows += [(r.published, f"`{r.architecture}`", r.reason) for r in REFUSED]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _tested() -> str:
    columns = ("models", "architecture in SGLang", "linear layers", "positions in attention", "checks in CI", "")
    rows = [columns, ("---",) * len(columns)]
    for c in COVERAGE:
        checks = ["as transformers"] * c.transformers + [", ".join(c.checks) if c.checks != ALL else "P1 to P6"]
        rows.append(
            (
                c.published,
                f"`{c.architecture}`",
                c.linear or "none",
                c.attention,
                "; ".join(filter(None, checks)),
                c.note,
            )
        )
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)
