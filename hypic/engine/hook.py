"""Hook tables: what of SGLang is hooked, how, why, and the proof that it is in force."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
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


SUPPORTED_SGLANG = "0.5.17"


class UnsupportedSGLang(RuntimeError):
    """The installed SGLang is not the one that a hook table was written for."""


def find_problem(hook: Hook) -> str | None:
    """Why `hook` does not fit the installed SGLang, or None: its target must exist and take `hook.params` first."""
    try:
        target = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError, ValueError) as error:
        return f"{hook.target}: not found ({error})"
    if hook.params:
        found = tuple(inspect.signature(target).parameters)
        if found[: len(hook.params)] != hook.params:
            return f"{hook.target}: expected arguments ({', '.join(hook.params)}, ...), found ({', '.join(found)})"
    return None


def is_applied(hook: Hook) -> bool:
    """Whether SGLang's wrapper around the target, or one further in, holds `hook.fn`."""
    layer = pkgutil.resolve_name(hook.target)
    while layer is not None:
        if layer is hook.fn or any(cell.cell_contents is hook.fn for cell in getattr(layer, "__closure__", None) or ()):
            return True
        layer = getattr(layer, "__wrapped__", None)
    return False


class HookTable:
    """A table of hooks: registered once, then proved to be in force by whoever serves through it.

    SGLang only logs what goes wrong while it loads plugins. So `register` collects problems, and `require_applied`,
    called from something SGLang itself runs at start, stops the server on them.
    """

    def __init__(self, name: str, hooks: Sequence[Hook]):
        self.name, self.hooks = name, tuple(hooks)
        self._problems: list[str] | None = None

    def register(self) -> None:
        """Hand the hooks that fit to SGLang's registry, but for those that are in force: a fork has its parent's."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        self._problems = []
        for hook in self.hooks:
            if problem := find_problem(hook):
                self._problems.append(problem)
            elif not is_applied(hook):
                HookRegistry.register(hook.target, hook.fn, HookType(hook.kind))

    def note(self, problem: str) -> None:
        """Add a problem found outside the table; as good as a hook that does not fit."""
        self._problems = [*(self._problems or []), problem]

    def problems(self) -> list[str]:
        """What keeps the table from being in force in this process; empty if nothing does."""
        if self._problems is None:
            return [f"SGLang did not run the plugin {self.name} (is SGLANG_PLUGINS or SGLANG_PLATFORM set?)"]
        return self._problems or [f"{h.target}: not applied, see SGLang's log" for h in self.hooks if not is_applied(h)]

    def require_applied(self) -> None:
        """Raise UnsupportedSGLang unless every hook is in force in this process."""
        if problems := self.problems():
            from sglang.version import __version__

            listing = "\n  ".join(problems)
            raise UnsupportedSGLang(
                f"{self.name} does not fit the installed SGLang {__version__} (supported: {SUPPORTED_SGLANG}):\n  {listing}"
            )
