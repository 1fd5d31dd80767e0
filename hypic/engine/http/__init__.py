"""The HTTP process's half of the plugin: marks and options in, spans to the scheduler, reports out.

:func:`prepare` and :func:`hooks` are what the plugin's activation calls; both import SGLang.
"""

from __future__ import annotations

from hypic.config import HypicConfig, from_env
from hypic.engine.hook import Hook

__all__ = ["hooks", "prepare"]

_OPENAI = "sglang.srt.entrypoints.openai"
_CHAT = f"{_OPENAI}.serving_chat.OpenAIServingChat"
_COMPLETION = f"{_OPENAI}.serving_completions.OpenAIServingCompletion"


def prepare() -> None:
    """Extend SGLang's request models and routes; before ``http_server`` is imported. Safe to call again.

    Raises:
        UnsupportedSGLang: too late, or the installed SGLang or pydantic is not as expected.
    """
    from hypic.engine.http.models import extend_openai_models

    extend_openai_models()
    from hypic.engine.http import segment_routes

    segment_routes.serve()


def hooks(config: HypicConfig | None = None) -> list[Hook]:
    """The hook table of the HTTP process; empty if the plugin is off. ``config`` defaults to the environment."""
    config = config or from_env()
    if not config.enabled:
        return []
    from hypic.engine.http import deliver, models, segments
    from hypic.engine.http.frontend import Frontend

    frontend = Frontend(config)
    converted = ("self", "request", "raw_request")
    streamed = ("self", "adapted_request", "request", "raw_request")
    built = ("self", "request", "ret", "created")
    return [
        Hook(
            "sglang.srt.managers.io_struct.GenerateReqInput",
            "replace",
            models.GenerateReqInput,
            "/generate must keep the 'hypic' object of a request",
        ),
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__",
            "after",
            segments.attach,
            "remembers named segments, and the settings of the server that it belongs to",
            ("self", "server_args", "port_args"),
        ),
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
            "around",
            frontend.generate,
            "every endpoint passes here: reserved fields are rejected, text is cut, plans go in and reports come out",
            ("self", "obj", "request"),
        ),
        Hook(
            f"{_CHAT}._convert_to_internal_request",
            "around",
            frontend.convert_chat,
            "marked content must be found in the rendered prompt and tokenised by itself",
            converted,
        ),
        Hook(
            f"{_COMPLETION}._convert_to_internal_request",
            "around",
            frontend.convert_completion,
            "the 'hypic' object and cache_salt alone are lost here",
            converted,
        ),
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response",
            "around",
            deliver.prompt_run,
            "with n > 1 a run that the client never sees computes the prompt: its counts are those of the request",
            ("self", "obj", "request"),
        ),
        Hook(
            f"{_OPENAI}.usage_processor.UsageProcessor._details_if_cached",
            "around",
            deliver.cached_details,
            "a cold request with segments has 0 cached tokens, which SGLang would leave out",
            ("count",),
        ),
        Hook(f"{_CHAT}._build_chat_response", "after", deliver.into_response, "the report goes into sglext", built),
        Hook(
            f"{_COMPLETION}._build_completion_response",
            "after",
            deliver.into_response,
            "the report goes into sglext",
            built,
        ),
        Hook(
            f"{_CHAT}._generate_chat_stream",
            "around",
            deliver.into_stream,
            "the report goes into sglext of the last chunk",
            streamed,
        ),
        Hook(
            f"{_COMPLETION}._generate_completion_stream",
            "around",
            deliver.into_stream,
            "the report goes into sglext of the last chunk",
            streamed,
        ),
    ]
