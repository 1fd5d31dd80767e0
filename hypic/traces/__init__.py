"""Traces of requests: the format, readers of public ones, a generator, what a cache could save, and an open-loop replay.

`format` and `readers` read files, `spec` and `generate` write them, `summary` says what caches could save at best.
`prompts` makes token ids of a request, `play` sends requests when they are due, `figures` makes percentiles of what came back,
`search` looks for the highest rate under an SLO. `targets` are what is asked: an engine of this process, or a URL. `child`
is the process of one engine, `runner` starts one per engine, `report` makes tables and plots.
"""
