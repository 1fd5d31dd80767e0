"""``hypic demo``: the product in one minute, on a CPU."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer


def demo(
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] [SGLANG FLAGS]",
            help="Model to serve, then flags of SGLang's server. By default models/almanac of the checkout; without one, "
            "a tiny model with random weights.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Serve a small hybrid model on the CPU and ask it about documents: cold, again, reordered, with a new head, next turn.

    Prints its answers, right or wrong, beside those of full recompute; times, reused tokens and the difference of every warm
    answer to the cold one, with P1 (full recompute) and P4 (the oracle) measured on the same documents. Ends with exit code
    1 if a hit is missing or a warm answer is not the cold one.
    """
    began = time.monotonic()
    argv = list(args or [])
    model = None if not argv or argv[0].startswith("-") else argv.pop(0)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr, flush=True)

    from hypic.demo import DemoError
    from hypic.demo.run import run

    try:
        result = run(model, argv, say)
    except DemoError as error:
        typer.secho(f"hypic demo: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    result.seconds = time.monotonic() - began
    if as_json:
        import msgspec

        print(msgspec.json.encode(result).decode())
    else:
        from rich.console import Console

        from hypic.demo.show import show

        show(result, Console())
    raise typer.Exit(1 if result.problems else 0)
