"""The front's process: ``python -m hypic.router.front MODEL FLAGS``, as ``hypic launch`` starts it.

Flags are those of ``hypic serve``. The rest comes through the environment:

| variable | |
| --- | --- |
| HYPIC_ROUTER_BIND | address of the control socket |
| HYPIC_ROUTER_TOKEN | the secret that workers know their router by |
| HYPIC_ROUTER_POLICY | ``lpt`` or ``round_robin`` |
| HYPIC_ROUTER_COSTS | file of measured costs |
| HYPIC_ROUTER_STATUS | file in which the launcher says what it knows of the processes |
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any, cast

from hypic.commands.flags import take_hypic_flags
from hypic.commands.serve import (
    ServeError,
    flag_value,
    prepare_environment,
    read_server_args,
    sglang_argv,
    wants_cpu,
)
from hypic.config import ConfigError, HypicConfig, from_env
from hypic.engine.http.trusted import VARIABLE as TOKEN
from hypic.router.costs import CostsError, read_costs
from hypic.router.measured import BUILT_IN
from hypic.router.schedule import Policy
from hypic.router.transport.security import InsecureError

ADDRESS, POLICY, COSTS, STATUS = (
    "HYPIC_ROUTER_BIND",
    "HYPIC_ROUTER_POLICY",
    "HYPIC_ROUTER_COSTS",
    "HYPIC_ROUTER_STATUS",
)
QUIET = "--uvicorn-access-log-exclude-prefixes"


def main(args: list[str]) -> int:
    try:
        argv, config = take_hypic_flags(sglang_argv(args), from_env())
        cpu = wants_cpu(argv, os.environ)
        prepare_environment(config, argv, cpu=cpu, environ=os.environ)
        serve(argv, config)
    except (ConfigError, CostsError, InsecureError, ServeError) as error:
        print(f"hypic launch: {error}", file=sys.stderr)
        return 2
    return 0


def serve(argv: list[str], config: HypicConfig) -> None:
    """Serve until stopped."""
    from sglang.srt.plugins import load_plugins

    from hypic.engine.hook import UnsupportedSGLang
    from hypic.engine.support import Unsupported

    load_plugins()  # before http_server is imported: its request models are extended
    # SGLang's metrics are its workers'; ours are always there. There is nothing here to warm up.
    argv = [*(word for word in argv if word != "--enable-metrics"), "--skip-server-warmup"]
    if flag_value(argv, QUIET) is None:
        argv += [QUIET, "/workers", "/health", "/metrics"]
    try:
        server_args = read_server_args(argv)
    except (UnsupportedSGLang, Unsupported) as error:
        raise ServeError(str(error)) from error
    run(server_args, config)


def run(server_args: Any, config: HypicConfig) -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.utils import configure_logger

    from hypic.router.front.app import extend
    from hypic.router.front.manager import RouterManager
    from hypic.router.front.workers import Workers
    from hypic.router.service import Router
    from hypic.router.transport.security import curve_of

    configure_logger(server_args, prefix=" router")
    costs = read_costs(Path(os.environ[COSTS])) if os.environ.get(COSTS) else BUILT_IN
    workers = Workers(os.environ.get(TOKEN, ""), server_args.api_key or "")
    policy = cast(Policy, os.environ.get(POLICY) or "lpt")
    router = Router(costs, os.environ[ADDRESS], policy, curve=curve_of(config))
    make = functools.partial(RouterManager, router=router, workers=workers, config=config)
    manager, templates = init_tokenizer_manager(server_args, None, make)
    manager.max_req_input_len = manager.context_len - 1
    status = os.environ.get(STATUS)
    extend(http_server.app, cast(RouterManager, manager), Path(status) if status else None)
    http_server._setup_and_run_http_server(
        server_args,
        manager,
        templates,
        None,
        [{"status": "ready"}],
        None,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
