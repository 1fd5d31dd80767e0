"""Drives a server with the OpenAI client of the folder that comes first on sys.path; prints what it saw as JSON.

    python openai_client.py FOLDER URL < request.json

A process of its own: SGLang, in the tests' process, pins an old release of the client.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def drive(url: str, documents: list[str], question: str, ids: list[int], segments: list[list[int]]) -> dict[str, Any]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    seen: dict[str, Any] = {"version": openai.__version__, "file": openai.__file__}

    parts: list[Any] = [{"type": "text", "text": d, "cache_control": {"type": "segment"}} for d in documents]
    parts.append({"type": "text", "text": question})
    chat: dict[str, Any] = dict(
        model="m",
        messages=[{"role": "user", "content": parts}],
        max_tokens=5,
        temperature=0,
        extra_body={"hypic": {"report": True}},
    )
    for name in ("cold", "warm"):
        answer = client.chat.completions.create(**chat)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        seen[name] = {
            "text": answer.choices[0].message.content,
            "prompt_tokens": answer.usage.prompt_tokens,
            "cached_tokens": answer.usage.prompt_tokens_details.cached_tokens,
            "reports": answer.model_extra["sglext"]["hypic"] if answer.model_extra else None,
        }

    text, usages, reports = "", [], []
    for chunk in client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}):
        text += "".join(c.delta.content or "" for c in chunk.choices)
        reports += (chunk.model_extra or {}).get("sglext", {}).get("hypic", [])
        if chunk.usage is not None:
            assert chunk.usage.prompt_tokens_details is not None
            usages.append(chunk.usage.prompt_tokens_details.cached_tokens)
    seen["stream"] = {"text": text, "cached_tokens": usages, "reports": reports}

    hypic = {"segments": segments, "report": True}
    done = client.completions.create(model="m", prompt=ids, max_tokens=5, temperature=0, extra_body={"hypic": hypic})
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    seen["completion"] = {
        "text": done.choices[0].text,
        "cached_tokens": done.usage.prompt_tokens_details.cached_tokens,
        "reports": done.model_extra["sglext"]["hypic"] if done.model_extra else None,
    }

    seen["responses"] = client.responses.create(model="m", input=question, max_output_tokens=5).output_text

    try:
        client.chat.completions.create(**{**chat, "extra_body": {"hypic": {"seperator": "|"}}})
    except openai.BadRequestError as e:
        seen["error"] = str(e)
    return seen


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    print(json.dumps(drive(sys.argv[2], **json.load(sys.stdin))))
