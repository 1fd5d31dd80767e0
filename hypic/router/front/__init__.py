"""The router's HTTP side: SGLang's own server module without a scheduler behind it.

This folder needs SGLang, the rest of :mod:`hypic.router` does not.
"""
