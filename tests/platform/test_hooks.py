"""CPU mode does nothing unless asked, fits the installed SGLang, and says so loudly when it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hypic import platform_cpu
from hypic.engine.hook import SUPPORTED_SGLANG, Hook, HookTable, UnsupportedSGLang, find_problem, is_applied
from hypic.platform_cpu import defaults, hooks


@pytest.fixture
def plugins_loaded() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def serve_with(plugins_loaded: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[HookTable], None]:
    """What SGLang does with CPU mode's platform while it builds its ServerArgs, under another hook table."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "register", lambda *args, **kwargs: None)

    def serve(table: HookTable) -> None:
        monkeypatch.setattr("hypic.platform_cpu.platform.TABLE", table)
        current_platform.apply_server_args_defaults(server_args=None)

    return serve


def test_inactive_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(platform_cpu.CPU_MODE)
    monkeypatch.setattr(hooks, "register", lambda: pytest.fail("registered hooks"))
    assert platform_cpu.activate_platform() is None
    platform_cpu.activate_hooks()


def test_table_fits_the_installed_sglang(plugins_loaded: None) -> None:
    assert [p for hook in hooks.TABLE.hooks if (p := find_problem(hook))] == []
    hooks.TABLE.require_applied()


def test_what_is_in_force_is_not_handed_over_again(plugins_loaded: None) -> None:
    """A scheduler is forked from a process that has applied CPU mode's hooks, and loads plugins like any other."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = {target: len(HookRegistry._hooks[target]) for target in HookRegistry._hooks}
    hooks.register()
    assert {target: len(HookRegistry._hooks[target]) for target in HookRegistry._hooks} == before
    hooks.TABLE.require_applied()


def test_every_hook_gives_a_reason() -> None:
    assert all(hook.reason for hook in hooks.TABLE.hooks)
    assert len({hook.target for hook in hooks.TABLE.hooks}) == len(hooks.TABLE.hooks)


@pytest.mark.parametrize(
    ("target", "params", "complaint"),
    [
        ("sglang.srt.no_such_module.function", (), "not found"),
        ("sglang.srt.server_args.ServerArgs.no_such_method", (), "not found"),
        ("sglang.srt.utils.common.get_device_name", ("gadget",), r"expected arguments \(gadget"),
    ],
)
def test_unfit_target_stops_the_server(
    target: str, params: tuple[str, ...], complaint: str, serve_with: Callable[[HookTable], None]
) -> None:
    table = HookTable("hypic_cpu", [Hook(target, "replace", len, "a test", params)])
    table.register()
    with pytest.raises(UnsupportedSGLang, match=complaint) as error:
        serve_with(table)
    assert SUPPORTED_SGLANG in str(error.value) and target in str(error.value)


def test_hook_that_sglang_did_not_apply_stops_the_server(serve_with: Callable[[HookTable], None]) -> None:
    hook = Hook("sglang.srt.utils.common.is_cuda", "replace", len, "a test")
    assert not is_applied(hook)
    table = HookTable("hypic_cpu", [*hooks.TABLE.hooks, hook])
    table.register()
    with pytest.raises(UnsupportedSGLang, match="not applied"):
        serve_with(table)


def test_plugin_that_never_ran_stops_the_server(serve_with: Callable[[HookTable], None]) -> None:
    with pytest.raises(UnsupportedSGLang, match="did not run the plugin"):
        serve_with(HookTable("hypic_cpu", hooks.TABLE.hooks))


def test_defaults_fill_only_what_the_user_left_open() -> None:
    from sglang.srt.server_args import ServerArgs

    args: Any = ServerArgs.__new__(ServerArgs)
    for name in ServerArgs.__dataclass_fields__:
        setattr(args, name, ServerArgs.__dataclass_fields__[name].default)
    args.dtype, args.max_total_tokens = "bfloat16", 100
    defaults.fill_server_args(args)
    assert (args.dtype, args.max_total_tokens) == ("bfloat16", 100)
    assert (args.device, args.attention_backend) == ("cpu", "torch_native")
    assert 10_000 <= args.nccl_port < 30_000, "not one that the system gives away"
    port = args.nccl_port
    defaults.fill_server_args(args)
    assert args.nccl_port == port


def test_environment_keeps_what_is_set() -> None:
    environ = {"OMP_NUM_THREADS": "8"}
    defaults.set_environment(environ)
    assert environ["OMP_NUM_THREADS"] == "8" and environ["TORCHDYNAMO_DISABLE"] == "1"


def test_convolution_windows_take_the_type_of_the_model() -> None:
    environ = dict(defaults.ENVIRONMENT)
    defaults.set_environment(environ, "bfloat16")
    assert environ == {**defaults.ENVIRONMENT, "SGLANG_MAMBA_CONV_DTYPE": "bfloat16"}
    defaults.set_environment(environ, "float32")
    assert environ["SGLANG_MAMBA_CONV_DTYPE"] == "bfloat16", "what is set is kept"
