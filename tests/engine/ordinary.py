"""What ordinary requests are answered, to the last bit.

As a program (``python ordinary.py OUT NAME=MODEL ...``): by engines without the plugin, into OUT/NAME.json for each model.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

FLAGS: dict[str, Any] = {"chunked_prefill_size": 64, "random_seed": 3}
"""Small chunks: prompts of a few hundred tokens are prefilled in several, some of them beside other rows."""

PATIENCE = 60.0
GREEDY = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3}
_VOCAB = range(10, 1500)


def first_phase(engine: Any) -> list[dict[str, Any]]:
    """New prompts, alone and in batches."""
    asked = prompts("first", (5, 150, 63, 64, 65, 200))
    answers = [alone(engine, ids) for ids in asked[:2]]
    answers += together(engine, asked[2:])
    return answers + together(engine, prompts("sampled", (30, 90)), SAMPLED)


def second_phase(engine: Any, first: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The next turn of what the first phase asked, in one batch with new prompts, then all of it again."""
    known = prompts("first", (5, 150, 63, 64, 65, 200))
    turns = [ids + answer["output_ids"] for ids, answer in zip(known[1:], first[1:6], strict=True)]
    turns = [ids + more for ids, more in zip(turns, prompts("turns", (7, 70, 1, 20, 8)), strict=True)]
    batch = [*turns, *prompts("second", (40, 130))]
    answers = together(engine, batch)
    answers.append(alone(engine, batch[-1]))
    return answers + together(engine, batch)


def prompts(seed: str, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.choice(_VOCAB) for _ in range(n)] for n in lengths]


def alone(engine: Any, ids: list[int]) -> dict[str, Any]:
    """With the logprobs of the whole prompt."""
    return _recorded(_run(engine, _ask(engine, ids, GREEDY, 0)))


def together(engine: Any, batch: list[list[int]], params: dict[str, Any] = GREEDY) -> list[dict[str, Any]]:
    """Answers to prompts that all wait in the queue before the scheduler takes the first: its batches are always the same."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    manager = engine.tokenizer_manager

    async def scene() -> list[Any]:
        # Only the scheduler is paused: the tokenizer manager would keep the requests to itself.
        await manager._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="in_place"))
        tasks = []
        for ids in batch:
            rid = f"{len(manager.rid_to_state)}"
            tasks.append(asyncio.ensure_future(_ask(engine, ids, params, -1, rid)))
            while not _sent(manager, rid):
                assert not tasks[-1].done(), tasks[-1].exception()
                await asyncio.sleep(0)
        await manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())
        return await asyncio.gather(*tasks)

    return [_recorded(out) for out in _run(engine, scene())]


def _sent(manager: Any, rid: str) -> bool:
    state = manager.rid_to_state.get(rid)
    return state is not None and bool(state.time_stats.api_server_dispatch_finish_time)


async def _ask(engine: Any, ids: list[int], params: dict[str, Any], logprob_start_len: int, rid: str = "alone") -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        rid=rid,
        input_ids=ids,
        sampling_params=dict(params),
        return_logprob=True,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=5,
        token_ids_logprob=list(range(0, 1500, 7)),
    )
    return await engine.tokenizer_manager.generate_request(request, None).__anext__()


def _run(engine: Any, work: Any) -> Any:
    return engine.loop.run_until_complete(asyncio.wait_for(work, PATIENCE))


def _recorded(out: dict[str, Any]) -> dict[str, Any]:
    """Ids, counts and every logprob; JSON keeps the floats as they are."""
    meta = out["meta_info"]
    logprobs = {name: value for name, value in meta.items() if name.endswith("logprobs")}
    assert meta["completion_tokens"] == len(logprobs["output_token_logprobs"]) == 12
    counts = {name: meta[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
    return json.loads(json.dumps({"output_ids": out["output_ids"], **counts, **logprobs}))


def main(out: str, *models: str) -> None:
    assert os.environ.get("HYPIC_ENABLED", "0") == "0"
    from hypic.check.engines import running_engine
    from hypic.engine.plugin import table

    for model in models:
        name, _, path = model.partition("=")
        with running_engine(path, **FLAGS) as engine:
            assert len(table().problems()) == 1 and "did not run the plugin" in table().problems()[0]
            first = first_phase(engine)
            answers = first, second_phase(engine, first)
        part = Path(out) / f"{name}.part"
        part.write_text(json.dumps(answers))
        part.rename(part.with_suffix(".json"))  # whole as soon as it is there


if __name__ == "__main__":
    main(*sys.argv[1:])
