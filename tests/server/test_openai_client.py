"""The newest OpenAI client against the real server: marks pass its types, options are extra_body, the report comes back."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from tests.cases.driving import Writer
from tests.server import requests
from tests.server.serving import PATIENCE, Server, TextWriter

FOLDER = Path(sys.prefix) / "openai"
SCRIPT = Path(__file__).with_name("openai_client.py")


def pinned() -> Version:
    """The release of the client that SGLang asks for."""
    for requirement in importlib.metadata.requires("sglang") or ():
        if found := re.match(r"openai==([\d.]+)$", requirement):
            return Version(found[1])
    raise AssertionError("SGLang pins no openai any more: this folder is not needed")


def test_the_newest_openai_client(server: Server, write: Writer, text: TextWriter) -> None:
    assert (FOLDER / "openai").is_dir(), f"no OpenAI client in {FOLDER}: `make setup` puts the newest there"
    documents, document = [text.document(), text.document()], write.document(80)
    requests.know(server, write, document)
    prompt = write.prompt(5, document, 7)
    sent = {"documents": documents, "question": text.words(5), "ids": prompt.ids, "segments": prompt.segments}
    command = [sys.executable, str(SCRIPT), str(FOLDER), server.url]
    done = subprocess.run(
        command, input=json.dumps(sent), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)

    assert seen["file"].startswith(str(FOLDER))
    assert Version(seen["version"]) > pinned()
    tokens = sum(server.token_count(d) - requests.SEAM for d in documents)
    cold, warm, stream, completion = seen["cold"], seen["warm"], seen["stream"], seen["completion"]
    assert requests.outcomes(cold["reports"][0]) == ["compiled", "compiled"] and cold["cached_tokens"] == 0
    assert requests.outcomes(warm["reports"][0]) == ["hit_device", "hit_device"] and warm["cached_tokens"] == tokens
    assert [requests.outcomes(r) for r in stream["reports"]] == [["hit_device", "hit_device"]]
    assert stream["cached_tokens"] == [tokens] and tokens < warm["prompt_tokens"] == cold["prompt_tokens"]
    assert cold["text"] == warm["text"] == stream["text"] != ""
    assert requests.outcomes(completion["reports"][0]) == ["hit_device"] and completion["text"]
    assert completion["cached_tokens"] == requests.interior(document)
    assert seen["responses"]
    assert "unknown key 'seperator'; valid keys are insert, method, report, segments, separator" in seen["error"]
