"""A tokenizer with real merges, and SGLang's real HTTP application on a real engine.

The scheduler's half of the plugin is not needed here: plans ride along, and :func:`_stand_in` answers for it with the
payload that SGLang's output streamer would send.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from hypic.config import HypicConfig, from_env
from hypic.engine.http import hooks, prepare
from hypic.engine.http.frontend import Frontend
from hypic.report import Report, SpanReport
from hypic.segment import RequestSpans, span_id

sys.path.insert(0, str(Path(__file__).parent))  # chat_templates
load_plugins()  # the CPU platform
prepare()  # before any test imports the HTTP server


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Callable[[str], Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model("llama"))


@pytest.fixture(scope="session")
def bos_tokenizer(tokenizer: Any) -> Any:
    """The same, but it puts a BOS before every text it encodes, as Llama's does."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = type(tokenizer._tokenizer).from_str(tokenizer._tokenizer.to_str())
    bos = "<|endoftext|>"
    backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="<|im_end|>")
    assert (
        fast.encode("a")[0] == fast.bos_token_id and fast.encode("a", add_special_tokens=False)[0] != fast.bos_token_id
    )
    return fast


@pytest.fixture(scope="session")
def sent() -> list[tuple[Any, RequestSpans | None]]:
    """What went to the scheduler: (tokenised request, its plan)."""
    return []


@pytest.fixture(scope="session")
def hooked(sent: list[Any]) -> Frontend:
    """Our hooks on this process, and the stand-in for the scheduler."""

    def record(manager: Any, obj: Any) -> None:
        for one in getattr(obj, "batch", None) or [obj]:
            if hasattr(one, "sampling_params"):
                sent.append((one, RequestSpans.from_params(one.sampling_params.custom_params, len(one.input_ids))))

    if from_env().enabled:  # other tests need the whole plugin in this process
        from hypic.engine.plugin import table as plugin_table

        table = plugin_table().hooks
    else:
        table = tuple(hooks(HypicConfig(enabled=True)))
        for hook in table:
            HookRegistry.register(hook.target, hook.fn, HookType(hook.kind))
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    HookRegistry.register(f"{manager}._dispatch_to_scheduler", record, HookType.BEFORE)
    HookRegistry.register(f"{manager}._handle_batch_output", _stand_in, HookType.BEFORE)
    HookRegistry.apply_hooks()
    return next(h.fn.__self__ for h in table if h.target.endswith("generate_request"))  # type: ignore[attr-defined]


def _stand_in(manager: Any, payload: Any) -> None:
    """Put reports into a payload as the output streamer does: sliced by output token, None for other requests."""
    values, reporting = [], False
    for i, rid in enumerate(payload.rids):
        state = manager.rid_to_state.get(rid)
        params = state.obj.sampling_params.get("custom_params") if state else None
        plan = RequestSpans.from_params(params)
        new = len(payload.output_ids[i]) if payload.output_ids else 0
        if plan is None or not plan.report:
            values.append([None] * new)
        else:
            values.append([] if state.output_ids else [_report(plan, state.obj, payload.prompt_tokens[i]).to_json()])
            reporting = True
    if reporting and payload.customized_info is None:
        payload.customized_info = {"hypic": values}


def _report(plan: RequestSpans, obj: Any, tokens: int) -> Report:
    spans = [
        SpanReport(
            kind="segment",
            start=s,
            tokens=e - s,
            outcome="compiled",
            id=span_id(obj.input_ids[s:e]) if obj.input_ids else None,
        )
        for s, e in plan.cached
    ]
    spans += [
        SpanReport(kind="segment", start=s, tokens=max(e - s, 0), outcome="declined", reason=r)
        for s, e, r in plan.declined
    ]
    return Report(spans=spans, prompt_tokens=tokens, seam_window=8, method="test")


class Server:
    """SGLang's FastAPI application on an engine, called without a socket."""

    def __init__(self, engine: Any) -> None:
        import httpx
        from sglang.srt.entrypoints import http_server
        from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
        from sglang.srt.entrypoints.ollama.serving import OllamaServing
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
        from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

        self.engine, app = engine, http_server.app
        both = engine.tokenizer_manager, engine.template_manager
        http_server.set_global_state(http_server._GlobalState(*both, {}))
        app.state.openai_serving_chat = OpenAIServingChat(*both)
        app.state.openai_serving_completion = OpenAIServingCompletion(*both)
        app.state.anthropic_serving = AnthropicServing(app.state.openai_serving_chat)
        app.state.ollama_serving = OllamaServing(both[0])
        self.transport = httpx.ASGITransport(app=app)
        self.http = httpx.AsyncClient(transport=self.transport, base_url="http://test", timeout=60)

    def run(self, coroutine: Any) -> Any:
        return self.engine.loop.run_until_complete(coroutine)

    def post(self, path: str, body: dict[str, Any]) -> SimpleNamespace:
        """Status, decoded body; for a stream the decoded chunks."""
        response = self.run(self.http.post(path, json=body))
        if not response.headers["content-type"].startswith("text/event-stream"):
            return SimpleNamespace(status=response.status_code, body=response.json())
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return SimpleNamespace(status=response.status_code, chunks=[json.loads(line) for line in lines[:-1]])


@pytest.fixture(scope="session")
def server(hooked: Frontend, tiny_model: Callable[[str], Path]) -> Iterator[Server]:
    """Qwen3.5, which SGLang registers as a vision model."""
    from hypic.check.engines import running_engine

    args = {"enable_cache_report": True, "tool_call_parser": "qwen25"}
    with running_engine(tiny_model("qwen35"), env={"HYPIC_ENABLED": "0"}, **args) as engine:
        yield Server(engine)
