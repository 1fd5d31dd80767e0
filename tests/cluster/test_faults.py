"""Workers, clients and the router die, and strangers knock. Requests end well, and nothing is left over."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import zmq
from safetensors.torch import load_file, save_file

from hypic.router import messages as m
from tests.cases.driving import Writer
from tests.cluster.asking import ANEW, drained, generate, long_prompt, pinned, same_answer, segments
from tests.cluster.launched import WORKERS, Cluster
from tests.server.naming import Names
from tests.server.requests import REPORT, native
from tests.server.serving import CHAT, GENERATE, Reply

RESTART = 240.0
"""Seconds for processes to come up again on a busy machine."""


class Call(threading.Thread):
    """A request under way."""

    def __init__(self, cluster: Cluster, body: dict[str, Any]) -> None:
        super().__init__()
        self._ask: Callable[[], Reply] = lambda: cluster.post(GENERATE, body)
        self.reply: Reply | None = None
        self.start()

    def run(self) -> None:
        self.reply = self._ask()

    def answer(self) -> Any:
        self.join()
        assert self.reply is not None and self.reply.status == 200, self.reply
        return self.reply.body


class Stream(threading.Thread):
    """An answer under way."""

    def __init__(self, cluster: Cluster, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._url, self._body = cluster.url + path, body
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.lines.append(line.removeprefix("data: "))

    def end(self) -> Any:
        """What comes before "[DONE]"."""
        self.join()
        assert self.lines[-1] == "[DONE]"
        return json.loads(self.lines[-2])


def test_strangers_on_the_control_socket(cluster: Cluster, write: Writer) -> None:
    """Garbage, other versions, names of others: dropped and counted; the cluster goes on."""
    assert cluster.folder.stat().st_mode & 0o777 == 0o700
    (folder,) = cluster.folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(cluster.control)
    try:
        frame = m.encode(m.Bye())
        for raw in (b"", b"x" * 1000, frame[:3] + b"\x99" + frame[4:], frame + b"more", m.encode(m.Resync())):
            stranger.send(raw)
        stranger.send_multipart([frame, frame])
        thief = m.Hello(
            worker="w0", epoch=b"thief", identity=b"x", data="ipc:///x", http="http://x", capacity=1, free=1
        )
        stranger.send(m.encode(thief))
        stranger.send(m.encode(m.Evicted(seq=1, keys=(bytes(24),))))
        reasons = {"garbage": 2, "version": 1, "trailing": 1, "unexpected": 1, "frames": 1}
        cluster.wait(
            lambda: all(cluster.router_metric("frames_dropped_total", reason=r) == n for r, n in reasons.items()),
            "dropped and counted",
        )
        assert stranger.poll(5000)
        assert isinstance(m.decode(stranger.recv(), m.ToWorker), m.Welcome), "an Evicted of nobody: introduce yourself"
    finally:
        stranger.close()
        context.term()
    outcomes = segments(cluster.ask(GENERATE, generate(long_prompt(write, n=4)))["meta_info"])
    assert "received" in {s["outcome"] for s in outcomes}, "scattered as ever"
    assert cluster.all_alive()


def test_a_client_leaves(cluster: Cluster, write: Writer) -> None:
    """In the middle of its stream: its worker stops at once, and does not serve to the end."""
    before = cluster.metrics()
    body = generate(long_prompt(write, n=4), stream=True)
    body["sampling_params"] |= {"max_new_tokens": 8000, "ignore_eos": True}
    with httpx.stream("POST", cluster.url + GENERATE, json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                assert any(w["running"] for w in cluster.workers().values()), line
                break  # which closes the connection
    cluster.wait(lambda: not any(w["running"] for w in cluster.workers().values()), "idle")
    cluster.wait(lambda: cluster.router_metric("running") == 0, "told by its worker that it was aborted")
    assert cluster.last_request()["outcome"] == "cancelled"
    assert not any(name.startswith("router_retries") for name in cluster.metrics().since(before))


def test_workers_and_the_router_die(cluster: Cluster, names: Names, write: Writer, adapter: Path) -> None:
    """CASES 23: kill -9 of a worker that compiles for another, of one that combines, before its first token and in the middle
    of a stream, and of the router. In the end all are back, and the audit of every worker is exact."""
    (kept,) = names.register(write.tokens(80), pin=True)
    cluster.ask("/load_lora_adapter", {"lora_name": "a", "lora_path": str(adapter)})
    warm, other = (generate(long_prompt(write, n=6, length=800)) for _ in range(2))
    first = cluster.ask(GENERATE, warm)
    combine = first["meta_info"]["hypic"]["router"]["worker"]
    others = sorted({"w0", "w1", "w2"} - {combine})

    def ordered() -> list[str]:
        return [w for w in others if cluster.workers()[w].get("compiling")]

    # A scatter worker, in the middle: it has its orders and does not get on with them.
    for _ in range(8):
        for w in others:
            cluster.signal(w, signal.SIGSTOP)
        call = Call(cluster, generate(long_prompt(write, n=6, length=800)))
        cluster.wait(lambda c=call: ordered() or not c.is_alive(), "ordered from a stopped worker, or served by one")
        if stopped := ordered():
            break
        for w in others:
            cluster.signal(w, signal.SIGCONT)
    scatter = stopped[0]
    cluster.signal(scatter, signal.SIGKILL)
    for w in others:
        cluster.signal(w, signal.SIGCONT)
    answer = call.answer()
    lines = answer["meta_info"]["hypic"]["router"]["timeline"]["segments"]
    assert any(line["rerouted"] for line in lines) and scatter not in {line["worker"] for line in lines}

    # The combine worker, before its first token: the client sees nothing of it.
    by_one = Call(cluster, warm).answer()
    same_answer(first, by_one)
    combine = by_one["meta_info"]["hypic"]["router"]["worker"]
    retries = cluster.router_metric("retries_total")
    cluster.signal(combine, signal.SIGSTOP)
    call = Call(cluster, warm)  # goes where its artifacts are
    cluster.wait(
        lambda: cluster.last_request()["forwarded"] and cluster.last_request()["combine"] == combine, "forwarded"
    )
    cluster.signal(combine, signal.SIGKILL)
    again = call.answer()
    same_answer(first, again)
    assert again["meta_info"]["hypic"]["router"]["worker"] != combine
    assert cluster.router_metric("retries_total") == retries + 1

    # The combine worker, in the middle of a stream: an error that says so, in the stream.
    # All are back: one that came back later would be drained by nobody, take the chat, and go on with it.
    cluster.wait(lambda: len(cluster.alive()) == WORKERS, "back", RESTART)
    body = {**other, "stream": True}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 8000, "ignore_eos": True}
    messages = [{"role": "user", "content": "Go on."}]
    chat = {
        "model": "m",
        "messages": messages,
        "stream": True,
        "max_tokens": 8000,
        "ignore_eos": True,
        "temperature": 0,
    }
    last, *others = cluster.alive()
    with drained(cluster, *others):
        streams = [Stream(cluster, GENERATE, body), Stream(cluster, CHAT, chat)]
        cluster.wait(lambda: all(s.lines for s in streams), "streaming")
        cluster.signal(last, signal.SIGKILL)
        ends = [s.end() for s in streams]
    reason, error = ends[0]["meta_info"]["finish_reason"], ends[1]["error"]
    assert (reason["type"], reason["status_code"], error["code"]) == ("abort", 500, 500)
    for message in (reason["message"], error["message"]):
        assert f"worker {last} was lost after" in message

    # The router: its clients see an error, the workers stay, and come back to the new one with all that they hold.
    cluster.wait(lambda: len(cluster.alive()) == WORKERS, "all back", RESTART)
    assert sum(w["restarts"] for w in cluster.workers().values()) == 3
    used = {"input_ids": write.tokens(9), "extra_key": names.tenant, "sampling_params": native()}
    for name in cluster.alive():  # those that were started again, too
        with drained(cluster, *(cluster.workers().keys() - {name})):
            answer = cluster.ask(GENERATE, {**used, "hypic": {"insert": [[4, kept["id"]]], **REPORT}})
        assert answer["meta_info"]["hypic"]["router"]["worker"] == name
        assert cluster.worker(name).post(GENERATE, {**used, "lora_path": "a"}).status == 200, "loaded again"
    cluster.wait(lambda: pinned(cluster).keys() == cluster.workers().keys(), "pinned everywhere, as everyone has it")
    held = {name: w["artifacts"] for name, w in cluster.workers().items()}
    cluster.kill_router()
    cluster.wait(lambda: cluster.all_alive(), "all known to the new router", RESTART)
    cluster.wait(lambda: {n: w["artifacts"] for n, w in cluster.workers().items()} == held, "announced again")
    assert names.call("GET", kept["id"]).status == 404
    cluster.wait(lambda: not pinned(cluster), "no pins of ids that nobody knows any more")
    answer = cluster.ask(GENERATE, warm)
    assert {s["outcome"] for s in segments(answer["meta_info"])} <= {"hit_device", "hit_remote", "hit_radix"}
    same_answer(first, answer)


def test_new_weights_are_those_of_all_workers(
    cluster: Cluster, names: Names, write: Writer, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """All of them leave, and come back as another model that holds nothing; names stay. A worker that is started again is given
    the same weights before it serves."""
    asked = generate(long_prompt(write, n=2, length=128))
    (kept,) = names.register(write.tokens(80), pin=True)
    first = cluster.ask(GENERATE, asked)
    folder = shutil.copytree(tiny_model("qwen35"), tmp_path / "other")
    (file,) = folder.glob("*.safetensors")
    weights = {name: 0.5 * w if name.endswith("norm.weight") else w for name, w in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    done = cluster.ask("/update_weights_from_disk", {"model_path": str(folder)})
    assert done["success"], done
    cluster.wait(cluster.all_alive, "back with new weights")
    assert not any(w["artifacts"] for w in cluster.workers().values())
    again = cluster.ask(GENERATE, asked)
    assert {s["outcome"] for s in segments(again["meta_info"])} <= ANEW
    assert again["output_ids"] != first["output_ids"]
    found = names.get(kept["id"])
    assert (found["status"], found["pinned"]) == ("absent", True)
    used = {"input_ids": write.tokens(9), "extra_key": names.tenant, "sampling_params": native()}
    cluster.ask(GENERATE, {**used, "hypic": {"insert": [[4, kept["id"]]]}})
    assert names.get(kept["id"])["status"] == "ready" and pinned(cluster)
    restarts = cluster.workers()["w1"]["restarts"]
    cluster.signal("w1", signal.SIGKILL)
    cluster.wait(lambda: cluster.workers()["w1"]["restarts"] > restarts and cluster.all_alive(), "back", RESTART)
    same_answer(again, cluster.worker("w1").ask(GENERATE, asked))
    assert cluster.ask("/update_weights_from_disk", {"model_path": str(tiny_model("qwen35"))})["success"]
    cluster.wait(cluster.all_alive, "back with those of the launch")
    same_answer(first, cluster.ask(GENERATE, asked))
