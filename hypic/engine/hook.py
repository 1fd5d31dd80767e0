"""One row of the hook table: what of SGLang is hooked, how, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

HookKind = Literal["before", "after", "around", "replace"]


class Hook(NamedTuple):
    """A hook on SGLang.

    Attributes:
        target: dotted path of a function, method or class inside the installed SGLang.
        kind: as SGLang's HookRegistry has them: before(fn args) -> (args, kwargs) | None, after(result, *args),
            around(original, *args), replace(*args) or a class.
        fn: the hook.
        reason: why stock SGLang is not enough here; shown by ``hypic doctor``.
        params: leading parameter names the target must have ("" accepts any); the start-up check compares them.
    """

    target: str
    kind: HookKind
    fn: Callable[..., Any]
    reason: str
    params: tuple[str, ...] = ()
