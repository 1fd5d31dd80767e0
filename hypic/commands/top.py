"""``hypic top``: what the workers of a cluster are doing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from hypic.router.launch.supervisor import get_json
from hypic.router.launch.view import bars, plot, screen

_WIDTH = 120


def top(
    url: Annotated[str, typer.Argument(help="Of a `hypic launch`.")] = "http://127.0.0.1:30000",
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, max=32, help="How many of the last requests.")] = 8,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="Write the Gantt chart of one request to this picture and exit.")
    ] = None,
    rid: Annotated[
        str, typer.Option(help="With --plot: which request, by the start of its id; else the last one.")
    ] = "",
    api_key: Annotated[str, typer.Option(envvar="HYPIC_API_KEY", help="If the server has an --api-key.")] = "",
) -> None:
    """Show workers, their load, and the last requests as bars: scatter, transfer, combine."""
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width to keep to
        console.width = max(console.width, _WIDTH)
    url = url if "://" in url else f"http://{url}"
    first = _look(url, api_key)
    if plot_to is not None:
        _plot(first, rid, plot_to)
        return
    width = max(min(console.width - 12, 120), 24)
    if once:
        console.print(screen(first, requests, width))
        return
    with Live(screen(first, requests, width), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(screen(_look(url, api_key), requests, width), refresh=True)
        except KeyboardInterrupt:
            return


def _look(url: str, api_key: str) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    snapshot = get_json(f"{url.rstrip('/')}/workers", headers)
    if not isinstance(snapshot, dict) or "workers" not in snapshot:
        typer.secho(f"hypic top: {url} is not the endpoint of a hypic launch, or does not answer", fg="red", err=True)
        raise typer.Exit(2)
    return snapshot


def _plot(snapshot: dict[str, Any], rid: str, path: Path) -> None:
    found = [r for r in snapshot["requests"] if r["rid"].startswith(rid) and bars(r)]
    if not found:
        raise typer.BadParameter(f"--rid {rid!r}: no such request among the last {len(snapshot['requests'])}")
    try:
        plot(found[-1], path)
    except ImportError:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'hypic[plot]'") from None
    except (OSError, ValueError) as e:
        raise typer.BadParameter(f"--plot {path}: {e}") from None
