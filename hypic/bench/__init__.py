"""Timing of linked prompts against stock SGLang: the same token ids, on one machine, one engine after the other.

`workload` draws prompts, `client` times them in the process of an engine, `suites` says what is timed, `child` is that
process, `runner` starts one per engine, `report` makes tables, fits, JSON and plots of what came back.
"""
