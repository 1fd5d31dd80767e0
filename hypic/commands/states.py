"""``hypic states``: what a link leaves in the recurrent states, layer by layer, beside the last segment alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def states(
    model: Annotated[str, typer.Argument(help="Folder of a hybrid model in Hugging Face's format.")],
    segments: Annotated[int, typer.Option(min=1, help="Segments of a prompt.")] = 4,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a segment.")] = 200,
    seam_window: Annotated[int, typer.Option(min=0, help="Tokens of a segment that are recomputed.")] = 8,
    prompts: Annotated[int, typer.Option(min=1, help="Random prompts to take the mean of.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Errors of recurrent states behind linked segments against full recompute, in float32 on the CPU, without SGLang.

    Composing (h T + S, what hypic serves) is exact at the first layer; further up it pays for interiors that were compiled
    without their prefix. "Last segment only" drops the states before each segment and keeps K and V. Tokens are random:
    what answers are worth, `hypic eval` says.
    """
    import msgspec

    from hypic.check.oracle import OracleError
    from hypic.check.states import state_errors

    try:
        found = state_errors(Path(model), segments=segments, length=length, w=seam_window, prompts=prompts, seed=seed)
    except OracleError as e:
        raise typer.BadParameter(str(e)) from None
    if as_json:
        print(msgspec.json.encode(found._asdict()).decode())
        return
    table = Table(title=f"{model}: relative error of states behind {segments} segments of {length} tokens")
    table.add_column("")
    for layer in found.layers:
        table.add_column(f"layer {layer}", justify="right")
    table.add_column("KL of the next token", justify="right")
    for method, errors in found.states.items():
        table.add_row(method, *(f"{e:.3f}" for e in errors), f"{found.kl[method]:.4f}")
    Console().print(table)
