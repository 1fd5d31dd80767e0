"""The ``hypic`` command: assembles the subcommands of :mod:`hypic.commands`."""

from __future__ import annotations

import typer

from hypic.commands.bench import bench
from hypic.commands.demo import demo
from hypic.commands.doctor import doctor
from hypic.commands.eval import evaluate, list_methods
from hypic.commands.launch import launch
from hypic.commands.replay import replay
from hypic.commands.selfcheck import selfcheck
from hypic.commands.serve import PASS_FLAGS_ON, serve
from hypic.commands.simulate import simulate
from hypic.commands.states import states
from hypic.commands.top import top

app = typer.Typer(
    name="hypic",
    help="Position-independent caching for hybrid-attention LLMs, on stock SGLang.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("serve", context_settings=PASS_FLAGS_ON)(serve)
app.command("launch", context_settings=PASS_FLAGS_ON)(launch)
app.command("top")(top)
app.command("selfcheck", context_settings=PASS_FLAGS_ON)(selfcheck)
app.command("bench", context_settings=PASS_FLAGS_ON)(bench)
app.command("replay", context_settings=PASS_FLAGS_ON)(replay)
app.command("eval", context_settings=PASS_FLAGS_ON)(evaluate)
app.command("methods")(list_methods)
app.command("demo", context_settings=PASS_FLAGS_ON)(demo)
app.command("doctor", context_settings=PASS_FLAGS_ON)(doctor)
app.command("simulate")(simulate)
app.command("states")(states)


def main() -> None:
    """Entry point of the ``hypic`` script."""
    app()
