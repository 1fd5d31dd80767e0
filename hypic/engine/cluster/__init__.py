"""A worker's part in a cluster (docs/ROUTER.md): artifacts made for others, and artifacts received from them.

:mod:`exchange` is a thread that speaks to the router and to other workers; :mod:`sharing` is the scheduler's side.
"""
