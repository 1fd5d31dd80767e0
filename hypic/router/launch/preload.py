"""What the processes of a cluster have in common: imported once, in the nursery."""

from sglang.srt.plugins import load_plugins

load_plugins()  # before http_server: its request models are extended

import sglang.srt.entrypoints.http_server  # noqa: E402, F401

import hypic.platform_cpu.preload  # noqa: E402  # model classes, and the targets of hooks
import hypic.router.front.manager  # noqa: E402, F401
