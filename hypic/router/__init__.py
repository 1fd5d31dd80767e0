"""Segment parallelism: one endpoint over several workers that compile the segments of a cold prompt side by side.

docs/PROTOCOL.md is the map: processes, sockets, messages, the life of a request; docs/ROUTER.md has what it is for, and
faults. Nothing in this package needs an engine, a device or torch, with the exception of :mod:`hypic.router.front`, which is
SGLang's HTTP server; the engine's side of the exchange lives in :mod:`hypic.engine.cluster`.
"""
