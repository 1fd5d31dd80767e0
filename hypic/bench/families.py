"""The families' table of docs/BENCHMARKS.md: what an artifact of each shape takes, and what `hypic bench` found of it.

    python -m hypic.bench.families [BENCH_JSON ...]         # prints it; by default with what is in benchmarks/results/families
    python -m hypic.bench.families --into docs/BENCHMARKS.md    # writes it between the page's marks

Sizes are read off the shapes' configs (models/shapes), as `hypic doctor` does; they need no GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from hypic.bench.result import BenchResult
from hypic.commands.serve import flag_value

if TYPE_CHECKING:
    from hypic.doctor.findings import ModelFinding

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "families"
SHAPES = (
    "qwen3.5-35b-a3b", "kimi-linear-48b-a3b", "nemotron-3-nano-30b-a3b", "granite-4.0-h-small", "ring-mini-linear-2.0",
)  # fmt: skip
"""Those that one GPU of 141 GB holds in bfloat16."""
TOKENS = 2048
"""Of the segment whose artifact is shown."""
CASES = (("stock", "cold"), ("stock", "prefix hit"), ("hypic", "cold"), ("hypic", "warm"), ("hypic", "turn"))
BEGIN, END = "<!-- python -m hypic.bench.families", "<!-- end of families -->"
_HEAD = (
    f"| shape | linear layers | T, MiB | S, MiB | (T + S) / S | artifact of {TOKENS:,} tokens, MiB "
    "| stock: cold | prefix hit | hypic: cold | warm | turn | stock cold / warm | artifacts, of cold - warm |",
    "|" + " --- |" * 13,
)


def size_cells(finding: ModelFinding) -> list[str]:
    """Shape, kind of linear layers, MiB of T and S, what T makes of S's bytes, and MiB of the artifact of a segment."""
    (whole,) = (s.bytes for s in finding.segments if s.tokens == TOKENS)
    linear, t, s = finding.families[0], finding.transition_bytes, finding.state_bytes
    t_mib, s_mib, artifact = (f"{n / 2**20:.3g}" for n in (t, s, whole))
    return [
        Path(finding.path).name,
        f"{linear.layers} of {linear.family}",
        t_mib,
        s_mib,
        f"{(t + s) / s:.1f}",
        artifact,
    ]


def time_cells(result: BenchResult | None) -> list[str]:
    """Median ms of CASES, what a warm link saves, and the share of building artifacts in what a cold prompt takes longer than
    a warm one; empty where there is no figure."""
    found = {
        (e.name, t.case): t.median for e in (result.engines if result else ()) for t in e.timings if t.suite == "ttft"
    }
    cold, warm = found.get(("stock", "cold")), found.get(("hypic", "warm"))
    share = result.artifact_share if result else None
    return [
        *(f"{found[case]:.0f}" if case in found else "" for case in CASES),
        f"{cold / warm:.1f}" if cold and warm else "",
        f"{share:.1%}" if share is not None else "",
    ]


def table(findings: Iterable[ModelFinding], results: dict[str, BenchResult]) -> str:
    rows = [[*size_cells(f), *time_cells(results.get(Path(f.path).name))] for f in findings]
    return "\n".join([*_HEAD, *(f"| {' | '.join(cells)} |" for cells in rows)])


def read(files: Iterable[Path]) -> dict[str, BenchResult]:
    """Results by the name of the shape's folder; of several on one shape the last."""
    found = {}
    for file in files:
        result = msgspec.json.decode(file.read_bytes(), type=BenchResult)
        for engine in result.engines[:1]:
            found[Path(flag_value(engine.flags, "--model-path") or "").name] = result
    return found


def examined(shapes: Sequence[str] = SHAPES) -> list[ModelFinding]:
    """What `hypic doctor` says of the shapes in bfloat16. Changes this process's environment."""
    from hypic.commands.doctor import examine
    from hypic.config import HypicConfig

    config = HypicConfig(enabled=True, memory=8 << 30)
    models = []
    for shape in shapes:
        found = examine([str(ROOT / "models" / "shapes" / shape), "--dtype", "bfloat16"], config)
        if found.model is None or found.model.problems:
            raise SystemExit(f"{shape}: {'; '.join(found.problems)}")
        models.append(found.model)
    return models


def main(
    files: Annotated[list[Path] | None, typer.Argument(metavar="[BENCH_JSON ...]")] = None,
    into: Annotated[Path | None, typer.Option(help="A page with the marks of the table.")] = None,
) -> None:
    """Print the table, or write it into a page."""
    with contextlib.redirect_stdout(sys.stderr):  # SGLang prints, too
        found = table(examined(), read(files if files else sorted(RESULTS.glob("*.json"))))
    if into is None:
        print(found)
        return
    before, begin, rest = into.read_text().partition(BEGIN)
    mark, _, rest = rest.partition("\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{into} has no {BEGIN} ... {END}")
    into.write_text(f"{before}{begin}{mark}\n\n{found}\n\n{end}{after}")


if __name__ == "__main__":
    typer.run(main)
