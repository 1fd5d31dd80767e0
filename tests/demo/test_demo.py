"""``make demo``: once for real, and what it says and does when something is wrong."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from typer.testing import CliRunner

from hypic.cli import app
from hypic.demo import DemoError
from hypic.demo import run as demo_run
from hypic.demo.checks import distance
from hypic.demo.client import ChatAnswer, Step
from hypic.demo.pages import QUESTIONS, Question, facts, is_right, load_documents, prompts
from hypic.demo.scenario import HEAD, ORDER, TURN, Contrast, DemoResult, RequestRow
from hypic.demo.scenario import _row as row_of
from hypic.demo.server import ServerError, running
from hypic.ports import free_ports
from hypic.report import Report, SpanReport
from models.task import World

SECONDS = 600
"""A minute on two idle cores; they may be shared with much else."""


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    command = [sys.executable, "-m", "hypic.demo", "--json"]
    out = subprocess.run(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=SECONDS, check=False)
    assert out.returncode == 0, out.stdout.decode()
    return json.loads(out.stdout)


def test_every_request_is_served_as_promised(result: dict[str, Any]) -> None:
    documents = len(load_documents())
    rows = {row["name"]: row for row in result["requests"]}
    full, cold, *warm = list(rows.values())[:6]
    assert [row["name"] for row in warm] == ["the same again", ORDER, HEAD, TURN]
    assert all(row["ttft_ms"] > 0 and not row["problems"] for row in rows.values())
    assert full["recomputed"] == full["prompt_tokens"] > 1500 and not full["outcomes"]
    for row in (cold, *list(rows.values())[6:]):
        assert row["outcomes"] == ["compiled"] * documents
        assert row["cached_tokens"] == row["reused_radix"] == row["reused_artifacts"] == 0
        assert 0.9 * row["prompt_tokens"] < row["compiled"] < row["prompt_tokens"]
    for row in warm:
        place = "radix" if row["name"] == TURN else "artifacts"
        assert (
            row["outcomes"] == ["hit_radix" if place == "radix" else "hit_device"] * documents and row["compiled"] == 0
        )
        assert row["cached_tokens"] == row[f"reused_{place}"] > 0.9 * row["prompt_tokens"]
        assert row["recomputed"] == row["prompt_tokens"] - row["cached_tokens"]


def test_answers_are_those_of_a_cold_server_and_of_the_oracle(result: dict[str, Any]) -> None:
    compared = [row for row in result["requests"] if row["delta"] is not None] + result["checks"]
    assert [c["name"] for c in result["checks"]] == ["P1", "P4"] and len(compared) == 6
    assert all(row["delta"] <= result["tolerance"] == 1e-4 for row in compared)
    assert all(row["compared"] > 100 for row in result["checks"])
    assert all(row["compared"] >= 10 for row in compared), "the first token's at least; more unless the machine is busy"


def test_what_the_method_approximates_is_far_above_the_noise_and_below_another_order(result: dict[str, Any]) -> None:
    contrast = result["contrast"]
    assert 10 * result["tolerance"] < contrast["full"] < contrast["order"]


def test_the_trained_model_answers_from_the_documents_in_their_order(result: dict[str, Any]) -> None:
    assert not result["random_weights"]
    rows = {row["name"]: row["answers"] for row in result["requests"]}
    assert all(
        len(rows[name]) == len(QUESTIONS) for name in ("nothing marked", "cold", "the same again", ORDER, HEAD, TURN)
    )
    for name, answers in rows.items():
        assert [a["text"] for a in answers] == [a["expected"] for a in answers], f"{name}: as full recompute can, too"


def test_without_seams_a_value_is_lost_at_its_border(result: dict[str, Any]) -> None:
    once, _, border = result["contrast"]["without_seams"]
    assert is_right(once["text"], once["expected"]) and border["kind"] == "over a border"
    assert not is_right(border["text"], border["expected"])


# ---------------------------------------------------------------------- the documents


def test_orders_change_what_is_true() -> None:
    documents = load_documents()
    asked = [prompts(documents, question) for question in QUESTIONS]
    orders = [tuple(p.documents) for p in asked[0]]
    assert len(set(orders)) == 3 and {frozenset(o) for o in orders} == {frozenset(documents)}
    once, anew, border = ([p.expected for p in three] for three in asked)
    assert len(set(once)) == 1 and len(set(anew)) == 2 and len(set(border)) == 3
    assert [len(p.documents) for p in asked[0]] == [8, 8, 8]
    first, permuted, other = asked[0]
    assert first.head == permuted.head != other.head


def test_the_last_statement_counts_and_a_fact_may_cross_a_border() -> None:
    pages = ["The mood of Ruth is rose. The drink of Homer is", " pony. Of Ruth: The mood of Ruth is fox.\n"]
    assert facts(pages) == {("mood", "Ruth"): "fox", ("drink", "Homer"): "pony"}
    assert facts(pages[::-1]) == {("mood", "Ruth"): "rose"}
    assert is_right("It is Fox.", "fox") and not is_right("foxes", "fox") and not is_right("", "fox")


def test_pages_fit_at_their_borders_in_every_order() -> None:
    documents = load_documents()
    for prompt in prompts(documents, QUESTIONS[0]):
        for i in range(0, len(documents), 2):
            assert re.search(r" The \w+ of \w+ is$", prompt.documents[i])
            assert re.match(r" \w+\. ", prompt.documents[i + 1]) and prompt.documents[i + 1].endswith(".\n")
        assert len(facts(prompt.documents)) == len(facts(documents)) == 44


def test_prompts_are_what_the_model_was_trained_for() -> None:
    """Ids of every piece, tokenised by itself as hypic does, are those that models/task.py draws."""
    folder = Path(demo_run._trained_model() or "")
    world = World(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        (folder / "chat_template.jinja").read_text()
    )

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    def asked(question: Question) -> list[int]:
        attribute, name = (ids(f" {word}") for word in (question.attribute, question.name))
        return [*world.ask, *attribute, world.of, *name, world.mark, *world.reply]

    documents = load_documents()
    for prompt in prompts(documents, QUESTIONS[2]):
        turns = prompt._replace(before=[(QUESTIONS[0], "amber")])
        text = template.render(messages=turns.messages(), add_generation_prompt=True)
        head, tail = text.split("".join(prompt.documents))
        assert ids(head) in world.heads
        assert ids(tail) == [*asked(QUESTIONS[0]), *ids("amber"), world.end, *world.user, *asked(QUESTIONS[2])]
    stated = {ids(f" {value}")[0] for value in facts(documents).values()}
    assert stated <= set(world.values)
    assert all(64 < len(ids(text)) < 300 for text in documents), "long enough to be segments"
    for (attribute, name), value in facts(documents).items():
        fact = ids(f" The {attribute} of {name} is {value}.")
        assert len(fact) == 7 and fact[1] in {*world.fixed, *world.changing} and fact[3] in world.names


def test_without_a_checkout_a_model_with_random_weights_is_served_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert demo_run._trained_model() == str(Path(__file__).parents[2] / "models" / "almanac")
    monkeypatch.setattr("hypic.__file__", str(tmp_path / "site-packages" / "hypic" / "__init__.py"))
    assert demo_run._trained_model() is None
    said: list[str] = []
    assert Path(demo_run._tiny_model(said.append)).name == "qwen35"
    assert "random weights" in said[0]


# ---------------------------------------------------------------------- judging


def test_distance() -> None:
    a = [{"x": -1.0, "y": -2.0}, {"x": -1.0, "z": -5.0}, {"x": 0.0}]
    assert distance(a, a, [("x", "x")] * 3) == (0.0, 5)
    b = [{"x": -1.5, "y": -2.0}, {"x": -1.0, "w": -4.0}, {"x": -9.0}]
    assert distance(a, b, [("x", "x"), ("x", "y"), ("x", "x")]) == (1.0, 3), (
        "w is above all that a lists; then they part"
    )
    assert distance(a, b, [("x", "y"), ("x", "x"), ("x", "x")]) == (0.5, 2)
    assert distance([{"x": math.nan}], [{"x": 0.0}], [("x", "x")])[0] == math.inf


def answer(outcomes: list[str], cached: int, **totals: int) -> ChatAnswer:
    spans = [SpanReport(kind="segment", start=8 * i, tokens=8, outcome=o) for i, o in enumerate(outcomes)]  # type: ignore[arg-type]
    report = Report(spans=spans, prompt_tokens=80, seam_window=8, method="seam", **totals)
    return ChatAnswer(0.1, "x", [Step("x", {"x": -1.0})], cached, report)


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (answer(["hit_device", "hit_radix"], 70, reused_artifacts=60, reused_radix=10), None),
        (answer(["hit_device", "compiled"], 60, reused_artifacts=60), "1 hit_device, 1 compiled"),
        (answer(["hit_device"], 60, reused_artifacts=60), "not 2 hit_device or hit_radix"),
        (answer(["hit_device"] * 2, 50, reused_artifacts=60), "cached_tokens 50"),
        (answer(["hit_device"] * 2, 60, reused_artifacts=60, compiled=8), "8 compiled"),
        (answer(["hit_device"] * 2, 0), "0 tokens reused"),
    ],
)
def test_warm_request_must_hit(found: ChatAnswer, complaint: str | None) -> None:
    problems = row_of("warm", found, 2, frozenset({"hit_device", "hit_radix"})).problems
    assert (not problems) if complaint is None else any(complaint in p for p in problems)


@pytest.mark.parametrize("outcomes", [{"compiled"}, set()])
def test_cold_request_must_not_hit(outcomes: set[str]) -> None:
    found = answer(["compiled"] * len(outcomes), 10, reused_radix=10)
    assert row_of("cold", found, len(outcomes), frozenset(outcomes)).problems == ["10 tokens reused on an empty cache"]


def outcome_of(monkeypatch: pytest.MonkeyPatch, outcome: DemoResult | Exception, *flags: str) -> Any:
    def instead(*_: object) -> DemoResult:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(demo_run, "run", instead)
    return CliRunner().invoke(app, ["demo", *flags])


def demo_result(problems: list[str]) -> DemoResult:
    counts = dict(prompt_tokens=9, reused_radix=0, reused_artifacts=0, recomputed=9, compiled=0, cached_tokens=0)
    row = RequestRow(name="warm", ttft_ms=1.0, outcomes=["compiled"], problems=problems, **counts)  # type: ignore[arg-type]
    return DemoResult(
        model="m",
        random_weights=True,
        tolerance=1e-4,
        seconds=1.0,
        requests=[row],
        checks=[],
        contrast=Contrast(full=0.1, order=2.0),
    )


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_exit_code_says_whether_all_is_well(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome_of(monkeypatch, demo_result([]), *flags).exit_code == 0
    bad = outcome_of(monkeypatch, demo_result(["a hit is missing"]), *flags)
    assert bad.exit_code == 1 and "a hit is missing" in bad.stdout


def test_what_goes_wrong_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = outcome_of(monkeypatch, DemoError("no server today"))
    assert bad.exit_code == 2 and "hypic demo: no server today" in bad.output and "Traceback" not in bad.output
    monkeypatch.undo()
    bad = CliRunner().invoke(app, ["demo", "/nowhere"])
    assert bad.exit_code == 2 and "/nowhere is not the folder of a model" in bad.output


# ---------------------------------------------------------------------- the server's end

STUBBORN = """\
import http.server, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(f"{os.getpid()} {child.pid}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Shells start what runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("number", "ends"),
    [
        (None, nullcontext()),
        (signal.SIGTERM, pytest.raises(SystemExit)),
        (signal.SIGINT, pytest.raises(KeyboardInterrupt)),
    ],
    ids=["done", "SIGTERM", "Ctrl-C"],
)
def test_server_and_its_children_are_stopped(
    number: int | None, ends: AbstractContextManager[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a server that ignores being asked."""
    monkeypatch.setattr("hypic.demo.server.STOP_SECONDS", 0.5)
    (port,), pids, before = free_ports(1), tmp_path / "pids", signal.getsignal(signal.SIGTERM)
    command = [sys.executable, "-c", STUBBORN, str(port), str(pids)]
    with ends, running(command, port, tmp_path / "log") as server:
        server.wait_until_ready()
        mine = [int(pid) for pid in pids.read_text().split()]
        assert len(mine) == 2 and all(alive(pid) for pid in mine)
        if number is not None:
            os.kill(os.getpid(), number)
            time.sleep(5)
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in mine) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in mine)
    assert signal.getsignal(signal.SIGTERM) is before


def test_server_that_dies_shows_its_log(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", "import sys; sys.exit('no memory left')"]
    with (
        pytest.raises(ServerError, match=r"exit code 1(.|\n)*no memory left"),
        running(command, port, tmp_path / "log") as server,
    ):
        server.wait_until_ready()
