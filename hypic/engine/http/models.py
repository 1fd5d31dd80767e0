"""SGLang's request and response models with our fields.

pydantic drops fields it does not know, silently. So ``cache_control`` and ``hypic`` are added to SGLang's own models
(:func:`extend_openai_models`, the one change to SGLang that no hook can make), and ``hypic`` to ``GenerateReqInput`` by
a subclass that replaces it through the hook table. Both must happen before the HTTP server's routes are made.

The added request fields take any value and are left out of every dump: a dump is what chat templates see.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.managers import io_struct

from hypic.engine.hook import SUPPORTED_SGLANG, UnsupportedSGLang

if TYPE_CHECKING:
    from hypic.engine.http.deliver import Delivery
    from hypic.engine.http.options import Options
    from hypic.segment import Bounds, Declined, RequestSpans

HTTP_SERVER = "sglang.srt.entrypoints.http_server"

# Field, and the models that get it. Leaves first: a model holds a copy of the schemas it is made of.
_CACHE_CONTROL = (
    "ChatCompletionMessageContentTextPart",
    "ChatCompletionMessageContentThinkingPart",
    "ChatCompletionMessageContentImagePart",
    "ChatCompletionMessageContentVideoPart",
    "ChatCompletionMessageContentAudioPart",
    "ChatCompletionMessageContentToolReferenceBlock",
    "Tool",
    "ChatCompletionMessageGenericParam",
    "ChatCompletionMessageUserParam",
)
_OPTIONS = ("ChatCompletionRequest", "CompletionRequest")
_REPORT = ("SglExt",)
_REPORT_HOLDERS = (
    "ChatCompletionResponse",
    "ChatCompletionStreamResponse",
    "CompletionResponse",
    "CompletionStreamResponse",
)


class ChatCompletionMessageContentSegmentPart(BaseModel):
    """A content part that stands for a named segment."""

    type: Literal["segment"]
    id: str


_PARTS = list[protocol.ChatCompletionMessageContentPart | ChatCompletionMessageContentSegmentPart]
_CONTENTS: dict[str, Any] = {
    "ChatCompletionMessageGenericParam": str | _PARTS | None,
    "ChatCompletionMessageUserParam": str | _PARTS,
}


def extend_openai_models() -> None:
    """Add ``cache_control``, ``hypic``, segment parts and ``sglext.hypic`` to SGLang's OpenAI models. Safe to call again.

    Raises:
        UnsupportedSGLang: the HTTP server's routes exist already, a model is missing, or a field does not survive.
    """
    if _survives():
        return
    if HTTP_SERVER in sys.modules:
        raise UnsupportedSGLang(
            f"{HTTP_SERVER} was imported before hypic was activated, so its routes would drop our request fields: "
            "start the server with `hypic serve`, `sglang serve` or `python -m sglang.launch_server`, or call "
            "sglang.srt.plugins.load_plugins() before importing it"
        )
    missing = [n for n in (*_CACHE_CONTROL, *_OPTIONS, *_REPORT, *_REPORT_HOLDERS) if not hasattr(protocol, n)]
    if missing:
        raise UnsupportedSGLang(
            f"{protocol.__name__} has no {', '.join(missing)}: hypic supports SGLang {SUPPORTED_SGLANG}"
        )
    for name, content in _CONTENTS.items():
        cls = getattr(protocol, name)
        default: Any = Field() if cls.model_fields["content"].is_required() else Field(default=None)
        cls.model_fields["content"] = FieldInfo.from_annotated_attribute(content, default)
        cls.__annotations__["content"] = content
    for name in _CACHE_CONTROL:
        _add_field(name, "cache_control", exclude=True)
    for name in _OPTIONS:
        _add_field(name, "hypic", exclude=True)
    for name in _REPORT:
        _add_field(name, "hypic", exclude=False)
    for name in _REPORT_HOLDERS:
        getattr(protocol, name).model_rebuild(force=True)
    if not _survives():
        raise UnsupportedSGLang("the installed pydantic does not let us extend SGLang's request models")


def _add_field(model: str, field: str, exclude: bool) -> None:
    cls = getattr(protocol, model)
    cls.model_fields[field] = FieldInfo.from_annotated_attribute(Any, Field(default=None, exclude=exclude))
    cls.__annotations__[field] = Any
    cls.model_rebuild(force=True)


def _survives() -> bool:
    """Whether marks get through validation, and the report through serialisation."""
    mark = {"cache_control": {"type": "segment"}}
    content = [{"type": "text", "text": "a", **mark}, {"type": "segment", "id": "a"}]
    raw: dict[str, Any] = {
        "messages": [{"role": "user", "content": content, **mark}, {"role": "system", "content": content, **mark}],
        "tools": [{"type": "function", "function": {"name": "f"}, **mark}],
        "hypic": {"report": True},
    }
    try:
        chat = protocol.ChatCompletionRequest.model_validate(raw)
    except ValidationError:
        return False
    text = protocol.CompletionRequest.model_validate({"prompt": "a", "hypic": {"report": True}})
    holders = [*chat.messages, *(m.content[0] for m in chat.messages), *chat.tools]
    response = protocol.CompletionStreamResponse.model_validate(
        {"id": "", "model": "", "choices": [], "sglext": {"hypic": [1]}}
    )
    return (
        all(getattr(h, "cache_control", None) == mark["cache_control"] for h in holders)
        and getattr(chat, "hypic", None) == getattr(text, "hypic", None) == raw["hypic"]
        and all(m.content[1].type == "segment" for m in chat.messages)
        and "cache_control" not in repr(chat.model_dump())
        and response.model_dump().get("sglext") == {"hypic": [1]}
    )


@dataclasses.dataclass
class Handover:
    """What the OpenAI handlers know about a request and :meth:`Frontend.generate` needs.

    Attributes:
        options: the request's ``hypic`` object.
        salt: its ``cache_salt`` (``extra_key`` of /generate, which knows no other), one for each prompt if a list.
        tokens: segments found and declined by the chat handler; None where the prompt is still to be cut.
    """

    options: Options
    salt: str | list[str] | None
    tokens: tuple[tuple[Bounds, ...], tuple[Declined, ...]] | None = None


@dataclasses.dataclass
class GenerateReqInput(io_struct.GenerateReqInput):
    """SGLang's request with the client's ``hypic`` object.

    Attributes:
        hypic: as the client sent it.
        handover: from the OpenAI handlers to the intake.
        delivery: from the intake to the OpenAI handlers.
        plans: one for each prompt, made by the plugin itself.
    """

    hypic: Any = None

    # Not annotated, hence no fields: SGLang neither parses, copies, logs nor exports them.
    handover = cast("Handover | None", None)
    delivery = cast("Delivery | None", None)
    plans = cast("list[RequestSpans] | None", None)


# SGLang pickles requests into its request dumps: they must be readable where the plugin is not installed.
GenerateReqInput.__module__ = io_struct.__name__
GenerateReqInput.__qualname__ = "GenerateReqInput"
