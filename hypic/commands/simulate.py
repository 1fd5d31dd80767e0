"""``hypic simulate``: what a cluster of workers would make of a cold prompt, from measured costs, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from hypic.router.costs import CostsError, read_costs
from hypic.router.schedule import Policy
from hypic.router.simulate import Outcome, Request, read_segments
from hypic.router.simulate import simulate as run

WORKERS = "1,2,4,8,16,32,64"


def simulate(
    costs: Annotated[Path, typer.Argument(help="Measured costs, TOML or JSON (see benchmarks/costs).")],
    segments: Annotated[str, typer.Option(help="Tokens of the segments, such as 16x2048 or 8192,10x512.")] = "16x2048",
    plain: Annotated[int, typer.Option(min=1, help="Plain tokens of the prompt.")] = 96,
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = WORKERS,
    policies: Annotated[str, typer.Option(help="Which of lpt, round_robin.")] = "lpt,round_robin",
    transfer_gb_s: Annotated[float | None, typer.Option(help="Another transport than that of the costs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Predict the cold time to first token of one prompt for several numbers of workers, and say what bounds each.

    The placement is the router's own code; see docs/ROUTER.md for what the model leaves out.
    """
    try:
        measured = read_costs(costs)
        if transfer_gb_s is not None:
            measured = msgspec.convert(
                {**msgspec.to_builtins(measured), "transfer_gb_s": transfer_gb_s}, type(measured)
            )
        request = Request(read_segments(segments), plain)
        counts = [int(n) for n in workers.split(",")]
        names = policies.split(",")
        if min(counts) < 1 or not set(names) <= set(get_args(Policy)):
            raise ValueError(f"--workers {workers} --policies {policies}: numbers from 1, and {get_args(Policy)}")
    except (CostsError, ValueError) as e:
        raise typer.BadParameter(str(e)) from None
    outcomes = {(n, p): run(measured, n, [request], p)[0] for p in names for n in counts}  # type: ignore[arg-type]
    alone = run(measured, 1, [request])[0].ttft
    if as_json:
        rows = [{"workers": n, "policy": p, **_row(o, alone)} for (n, p), o in outcomes.items()]
        print(msgspec.json.encode({"costs": measured, "segments": request.segments, "rows": rows}).decode())
        return
    title = f"cold, {segments} + {plain} tokens; one worker {1e3 * alone:.0f} ms"
    table = Table(title=title, caption=measured.source or None)
    for column in ("policy", "workers", "TTFT ms", "speed-up", "compile", "transfer", "link", "of ideal", "bound by"):
        table.add_column(column, justify="left" if column in ("policy", "bound by") else "right")
    for (n, p), o in outcomes.items():
        ms = (f"{1e3 * t:.1f}" for t in (o.compile, o.transfer, o.link))
        share = f"{100 * o.ideal / o.ttft:.0f}%"
        table.add_row(p, str(n), f"{1e3 * o.ttft:.1f}", f"{alone / o.ttft:.2f}", *ms, share, o.bound)
    Console().print(table)


def _row(o: Outcome, alone: float) -> dict[str, Any]:
    terms = {name: getattr(o, name) for name in ("messages", "waiting", "compile", "transfer", "link")}
    return {"ttft": o.ttft, "speed_up": alone / o.ttft, **terms, "ideal": o.ideal, "bound": o.bound}
