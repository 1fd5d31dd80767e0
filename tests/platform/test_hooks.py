"""CPU mode does nothing unless asked, fits the installed SGLang, and says so loudly when it does not."""

from __future__ import annotations

from typing import Any

import pytest

from hypic import platform_cpu
from hypic.engine.hook import Hook
from hypic.platform_cpu import defaults, hooks


@pytest.fixture
def plugins_loaded() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def fresh_registration(plugins_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test call ``register``: what it hands to SGLang and what it finds is forgotten afterwards."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "register", lambda *args, **kwargs: None)
    monkeypatch.setattr(hooks, "_problems", None)


def test_inactive_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(platform_cpu.CPU_MODE)
    monkeypatch.setattr(hooks, "register", lambda: pytest.fail("registered hooks"))
    assert platform_cpu.activate_platform() is None
    platform_cpu.activate_hooks()


def test_table_fits_the_installed_sglang(plugins_loaded: None) -> None:
    assert [p for hook in hooks.TABLE if (p := hooks.find_problem(hook))] == []
    hooks.require_applied()


def test_every_hook_gives_a_reason() -> None:
    assert all(hook.reason for hook in hooks.TABLE)
    assert len({hook.target for hook in hooks.TABLE}) == len(hooks.TABLE)


@pytest.mark.parametrize(
    ("target", "params", "complaint"),
    [
        ("sglang.srt.no_such_module.function", (), "not found"),
        ("sglang.srt.server_args.ServerArgs.no_such_method", (), "not found"),
        ("sglang.srt.utils.common.device_context", ("gadget",), r"expected arguments \(gadget"),
    ],
)
def test_unfit_target_stops_the_server(
    target: str, params: tuple[str, ...], complaint: str, fresh_registration: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the method of the platform that SGLang calls while it builds its ServerArgs."""
    from sglang.srt.platforms import current_platform

    hooks.register([Hook(target, "replace", len, "a test", params)])
    with pytest.raises(hooks.UnsupportedSGLang, match=complaint) as error:
        current_platform.apply_server_args_defaults(server_args=None)
    assert hooks.SUPPORTED_SGLANG in str(error.value) and target in str(error.value)


def test_hook_that_sglang_did_not_apply_stops_the_server(plugins_loaded: None) -> None:
    hook = Hook("sglang.srt.utils.common.is_cuda", "replace", len, "a test")
    assert not hooks.is_applied(hook)
    with pytest.raises(hooks.UnsupportedSGLang, match="not applied"):
        hooks.require_applied([*hooks.TABLE, hook])


def test_plugin_that_never_ran_stops_the_server(fresh_registration: None) -> None:
    with pytest.raises(hooks.UnsupportedSGLang, match="did not run the plugin"):
        hooks.require_applied()


def test_defaults_fill_only_what_the_user_left_open() -> None:
    from sglang.srt.server_args import ServerArgs

    args: Any = ServerArgs.__new__(ServerArgs)
    for name in ServerArgs.__dataclass_fields__:
        setattr(args, name, ServerArgs.__dataclass_fields__[name].default)
    args.dtype, args.max_total_tokens = "bfloat16", 100
    defaults.fill_server_args(args)
    assert (args.dtype, args.max_total_tokens) == ("bfloat16", 100)
    assert (args.device, args.attention_backend) == ("cpu", "torch_native")


def test_environment_keeps_what_is_set() -> None:
    environ = {"OMP_NUM_THREADS": "8"}
    defaults.set_environment(environ)
    assert environ["OMP_NUM_THREADS"] == "8" and environ["TORCHDYNAMO_DISABLE"] == "1"
