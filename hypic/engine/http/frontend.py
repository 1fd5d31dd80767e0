"""The HTTP process's half of the plugin: what a client marked becomes spans on the wire to the scheduler.

A request's way: an OpenAI handler converts it (:meth:`Frontend.convert_chat`, :meth:`Frontend.convert_completion`) and
hands over what it knows; ``TokenizerManager.generate_request``, which every endpoint and the in-process engine pass
through, completes the plan (:meth:`Frontend.generate`), and takes the report out of the outputs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, NamedTuple

from hypic.config import HypicConfig
from hypic.engine.http import chat
from hypic.engine.http.deliver import Delivery, shared_prompts, uses_hypic
from hypic.engine.http.insert import Use, cut_at, has_named_parts, splice, stand_ins, words_of
from hypic.engine.http.intake import answerable, attach, item, late_refusal, refusal, reject_reserved, samples
from hypic.engine.http.marks import Marks
from hypic.engine.http.models import GenerateReqInput, Handover
from hypic.engine.http.options import BadRequest, Options
from hypic.engine.http.registry import UnknownSegment
from hypic.engine.http.segments import segments_of
from hypic.engine.http.trusted import is_router
from hypic.segment import Bounds, Declined, Piece, RequestSpans, SegmentTokenizer, split_at


class _Prompt(NamedTuple):
    """One prompt of a request: its length where it is tokenised (else 0), and its segments."""

    tokens: int
    cached: tuple[Bounds, ...] = ()
    declined: tuple[Declined, ...] = ()


class Frontend:
    """Hooks on SGLang's HTTP process, with what they share: the configuration and a tokenizer that remembers."""

    def __init__(self, config: HypicConfig) -> None:
        self._config = config
        self._tokenizer: tuple[Any, SegmentTokenizer] | None = None

    def convert_chat(self, original: Any, handler: Any, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
        """Around ``OpenAIServingChat._convert_to_internal_request``. Raises BadRequest, HTTPException."""
        options = _options(handler.tokenizer_manager, request.hypic)
        ids, use = request.input_ids, _use(handler.tokenizer_manager, request.cache_salt)
        words: Mapping[str, Sequence[int]] = {}
        if ids is None:
            options.refuse_segments("mark content parts with cache_control instead, or send input_ids")
            options.refuse_insert('send content parts {"type": "segment", "id": ...} instead, or input_ids')
            with answered_404():
                request, words = stand_ins(request, use)
        else:
            options.refuse_separator()
            if has_named_parts(request):
                raise BadRequest("segment parts: messages are not rendered beside input_ids; use hypic.insert")
        marks = Marks.of(request, self._separator(options) if ids is None else "")
        uses_hypic.set(bool(marks) or bool(words) or request.hypic is not None)
        if ids is not None:
            (bounds,) = options.bounds([len(ids)], batch=False)
            with answered_404():
                request.input_ids, cached = splice(ids, bounds, options.insert, use, "hypic.insert")
            adapted, processed = original(handler, request, raw_request)
            tokens = tuple(cached), (Declined(-1, -1, "token_ids"),) * marks.count
        elif not marks and not words:
            adapted, processed = original(handler, request, raw_request)
            tokens = (), ()
        else:
            tokenizer = self._tokenizer_of(handler.tokenizer_manager)
            done = chat.convert(original, handler, request, raw_request, marks, words, tokenizer)
            adapted, processed = done.adapted, done.processed
            tokens = done.tokens.cached if done.tokens else (), done.declined
        adapted.handover = Handover(options, request.cache_salt, tokens)
        return adapted, processed

    def convert_completion(self, original: Any, handler: Any, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
        """Around ``OpenAIServingCompletion._convert_to_internal_request``. Raises BadRequest, HTTPException."""
        options = _options(handler.tokenizer_manager, request.hypic)
        if options.insert is not None:
            if request.echo:
                raise BadRequest("hypic.insert: its segments cannot be echoed; leave out echo")
            with answered_404():
                for name in options.inserted():
                    segments_of(handler.tokenizer_manager).registry.get(request.cache_salt or "", name)
        adapted, processed = original(handler, request, raw_request)
        adapted.handover = Handover(options, request.cache_salt)
        separator = self._separator(options)
        uses_hypic.set(bool(separator) or request.hypic is not None)
        if separator and processed.echo:  # the prompt that is echoed, adapted.text is still to be cut
            processed.prompt = _without(processed.prompt, separator)
        return adapted, processed

    async def generate(self, original: Any, manager: Any, obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        """Around ``TokenizerManager.generate_request``. Raises BadRequest before anything is sent."""
        shared_prompts.set(None)
        try:
            if isinstance(obj, GenerateReqInput) and obj.plans is not None:
                attach(obj, obj.plans)
                delivery = Delivery(True, len(obj.plans))
            elif is_router(request) and isinstance(obj, GenerateReqInput):
                delivery = _planned(obj)
            else:
                reject_reserved(obj, request)
                delivery = self._admit(manager, obj) if isinstance(obj, GenerateReqInput) else Delivery(wanted=False)
        except BadRequest as e:
            with suppress(ValueError):  # SGLang aborts streams that end early by ids that this fills in
                obj.normalize_batch_and_arguments()
            raise answerable(e, request) from None
        async with aclosing(original(manager, obj, request)) as outputs:
            async for out in outputs:
                yield delivery.publish(out)

    def _admit(self, manager: Any, obj: GenerateReqInput) -> Delivery:
        """Plan the request where anything is to be planned, and write the plans into its sampling parameters."""
        handover = obj.handover or Handover(_options(manager, obj.hypic), obj.extra_key)
        options = handover.options
        reason = refusal(manager, obj)
        prompts = self._prompts(manager, obj, handover, reason)
        plans = []
        for i, (tokens, cached, declined) in enumerate(prompts):
            salt = item(handover.salt, i) or ""
            plan = RequestSpans(
                cached=cached, declined=declined, salt=salt, report=options.report, method=options.method or ""
            )
            if why := reason or late_refusal(manager, obj, i, plan, tokens):
                plan = plan.declining_all(why)
            plans.append(plan if plan.cached or plan.declined or plan.report else None)
        attach(obj, plans)
        obj.delivery = Delivery(options.report, len(plans), samples(obj))
        if any(plans):
            shared_prompts.set(obj.delivery)
        return obj.delivery

    def _prompts(self, manager: Any, obj: GenerateReqInput, handover: Handover, reason: str | None) -> list[_Prompt]:
        """The prompts of a request, text cut and tokenised where it holds a separator or named segments."""
        options = handover.options
        if obj.input_ids is not None:
            batch = bool(obj.input_ids) and isinstance(obj.input_ids[0], list)
            prompts = obj.input_ids if batch else [obj.input_ids]
            if handover.tokens is not None:
                return [_Prompt(len(prompts[0]), *handover.tokens)]
            options.refuse_separator()
            bounds = options.bounds([len(ids) for ids in prompts], batch)
            return self._splice(manager, obj, prompts, bounds, handover, batch)
        if handover.tokens is not None:
            return [_Prompt(0, *handover.tokens)]
        options.refuse_segments("send input_ids, or cut the text with hypic.separator")
        if obj.text is None:
            options.refuse_insert("send text or input_ids")
            return [_Prompt(0)] * _embedded(obj.input_embeds)
        return self._cut(manager, obj, handover, reason)

    def _splice(
        self,
        manager: Any,
        obj: GenerateReqInput,
        prompts: list[list[int]],
        bounds: Sequence[Sequence[Bounds]],
        handover: Handover,
        batch: bool,
    ) -> list[_Prompt]:
        """Put named segments into prompts of token ids."""
        done = []
        for i, ids in enumerate(prompts):
            use = _use(manager, item(handover.salt, i))
            raw, where = handover.options.insert_of(i, len(prompts), batch)
            done.append(splice(ids, bounds[i], raw, use, where))
        if handover.options.insert is not None:
            obj.input_ids = [ids for ids, _ in done] if batch else done[0][0]
        return [_Prompt(len(ids), tuple(cached)) for ids, cached in done]

    def _cut(self, manager: Any, obj: GenerateReqInput, handover: Handover, reason: str | None) -> list[_Prompt]:
        """Cut texts at separators and named segments. The request then holds token ids, or text where it has neither or is
        refused."""
        texts = [obj.text] if isinstance(obj.text, str) else list(obj.text or ())
        separator, insert = self._separator(handover.options), handover.options.insert
        cuts = bool(separator) and any(separator in t for t in texts)
        if not cuts and insert is None:
            return [_Prompt(0)] * len(texts)
        pieces = [split_at(t, separator) if cuts else [Piece(t, False)] for t in texts]
        if not all(pieces):
            raise BadRequest(f"the prompt is empty without its separators {separator!r}; send text beside them")
        single = isinstance(obj.text, str)
        if insert is not None:
            if reason == "multimodal" or manager.tokenizer is None:
                raise BadRequest("hypic.insert: needs a prompt of text alone, and a tokenizer; or send input_ids")
            uses = [_use(manager, item(handover.salt, i)) for i in range(len(texts))]
            pieces = [cut_at(p, words_of(insert, texts, use)) for p, use in zip(pieces, uses, strict=True)]
        elif reason or manager.tokenizer is None:
            whole = ["".join(p.text for p in ps) for ps in pieces]
            obj.text = whole[0] if single else whole
            return [_Prompt(0, (), tuple(Declined(-1, -1, reason or "") for p in ps if p.segment)) for ps in pieces]
        tokenizer = self._tokenizer_of(manager)
        tokens = [tokenizer.tokenize(ps) for ps in pieces]
        obj.text, obj.input_ids = None, tokens[0].ids if single else [t.ids for t in tokens]
        return [_Prompt(len(t.ids), t.cached) for t in tokens]

    def _separator(self, options: Options) -> str:
        return self._config.separator if options.separator is None else options.separator

    def _tokenizer_of(self, manager: Any) -> SegmentTokenizer:
        if self._tokenizer is None or self._tokenizer[0] is not manager.tokenizer:
            self._tokenizer = manager.tokenizer, SegmentTokenizer(manager.tokenizer)
        return self._tokenizer[1]


def _use(manager: Any, salt: str | None) -> Use:
    """How a request of that tenant gets at the tokens of named segments."""
    return lambda name: segments_of(manager).use(salt or "", name)


def _options(manager: Any, raw: Any) -> Options:
    """The ``hypic`` object of a request. Raises BadRequest."""
    options = Options.parse(raw)
    options.method_of(segments_of(manager).methods)
    return options


@contextmanager
def answered_404() -> Iterator[None]:
    """Inside of the OpenAI handlers, which answer 400 to any ValueError."""
    from fastapi import HTTPException

    try:
        yield
    except UnknownSegment as e:
        raise HTTPException(e.status_code, str(e)) from None


def _planned(obj: GenerateReqInput) -> Delivery:
    """The router's plan is in the request already, one prompt at a time."""
    params = obj.sampling_params if isinstance(obj.sampling_params, dict) else {}
    plan = RequestSpans.from_params(params.get("custom_params"))
    return Delivery(wanted=plan is not None and plan.report)


def _embedded(embeds: Any) -> int:
    """Number of prompts in ``input_embeds``, [tokens, width] or a list of such."""
    return len(embeds) if embeds and embeds[0] and isinstance(embeds[0][0], list) else 1


def _without(prompt: Any, separator: str) -> Any:
    if isinstance(prompt, str):
        return prompt.replace(separator, "")
    return [p.replace(separator, "") if isinstance(p, str) else p for p in prompt]
