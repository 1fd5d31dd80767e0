"""The subcommands of ``hypic``, one module each.

``hypic --help`` imports them all: at module level they import the standard library and typer, nothing heavier.
"""
