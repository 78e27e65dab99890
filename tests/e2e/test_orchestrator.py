"""The orchestrator as its users meet it: its workers, a real Redis, and engines behind it."""

import contextlib
import gzip
import hashlib
import http.client
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import yaml
from running import ROOT, answers, process, simulated_engine

from tests.support.serving import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
LONG = HELLO | {"max_tokens": 400, "stream": True}
TRACE = "0af7651916cd43dd8448eb211c80319c"


def key(name: str, tier: str) -> dict[str, str]:
    return {"name": name, "user": name, "tier": tier, "sha256": hashlib.sha256(name.encode()).hexdigest()}


def write(folder: Path, engine: str, redis_url: str, **changed: Any) -> Path:
    """A configuration in front of one engine. Each test asks with a key of its own, made from its tier and its name."""
    pool = {"url": engine, "model": "tiny"}
    tiers = {
        "free": {"requests_per_min": 100_000, "tokens_per_min": 10_000_000, "tokens_per_h": 100_000_000},
        "packed": {"requests_per_min": 1000, "tokens_per_min": 1_000_000, "stream": "packed"},
        "few": {"requests_per_min": 10, "tokens_per_min": 1_000_000},
        "poor": {"requests_per_min": 1000, "tokens_per_min": 60, "tokens_per_h": 400},
    }
    names = [(f"{tier}-{number}", tier) for tier in tiers for number in range(6)]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": [key(*one) for one in names]}))
    document = {
        "port": free_port(),
        "keys": str(folder / "keys.yaml"),
        "tokenizer": str(ROOT / ".cache/tiny"),
        "model": "auto",
        "pools": {"small": pool, "large": pool, "long": pool},
        "routing": {"small_talk": "small", "expert": "large", "long_session": "long", "over_budget": "small"},
        "tiers": tiers,
        "redis": {"url": redis_url, "when_down": "open", "timeout_s": 5},  # a busy machine is not a dead Redis
    } | changed
    document["routing"]["session_limit_s"] = 1.0
    path = folder / "orchestrator.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


class Orchestrator:
    """A running orchestrator."""

    def __init__(self, port: int, parent: subprocess.Popen[str]) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.parent = parent

    def post(self, document: Any, user: str = "free-0", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """One exchange on a connection of its own: status, headers, body."""
        connection = self.begin(document, user, **headers)
        response = connection.getresponse()
        try:
            return response.status, {name.lower(): value for name, value in response.headers.items()}, response.read()
        finally:
            connection.close()

    def begin(self, document: Any, user: str = "free-0", **headers: str) -> http.client.HTTPConnection:
        """Send a request and do not wait for its answer."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        names = {"authorization": f"Bearer {user}", "content-type": "application/json"}
        names |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("POST", "/v1/chat/completions", body, names)
        return connection

    def metric(self, start: str) -> float:
        """The sum of the series whose line begins so."""
        page = urllib.request.urlopen(f"{self.url}/metrics", timeout=5).read().decode()
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(start))

    def workers(self) -> set[int]:
        """Its worker processes (Python's helper for shared resources is none)."""
        children = psutil.Process(self.parent.pid).children()
        return {child.pid for child in children if "spawn_main" in " ".join(child.cmdline())}


@contextlib.contextmanager
def orchestrator(path: Path) -> Iterator[Orchestrator]:
    """The orchestrator of a configuration, with all its workers there."""
    config = yaml.safe_load(path.read_text())
    with (
        open(path.parent / "orchestrator.log", "w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "reference_stack.orchestrator", str(path)],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as parent,
    ):
        try:
            running = Orchestrator(config["port"], parent)
            until(lambda: answers(f"{running.url}/health"), "the orchestrator answers", 60)
            until(lambda: log_says(path.parent, "ready") >= config.get("workers", 2), "all workers are ready", 60)
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)


def log_says(folder: Path, word: str) -> int:
    return len(re.findall(rf"\b{word}\b", (folder / "orchestrator.log").read_text()))


@contextlib.contextmanager
def redis_server(port: int) -> Iterator[subprocess.Popen[str]]:
    """A real Redis."""
    with process(["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]) as server:
        until(lambda: listens(port), "redis answers", 10)
        yield server


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def in_flight(engine: str) -> float:
    page = urllib.request.urlopen(f"{engine}/metrics", timeout=5).read().decode()
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("vllm:num_requests_running"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with simulated_engine(tmp_path_factory.mktemp("engine")) as (url, _):
        yield url


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[Orchestrator]:
    """Two workers, a Redis, and one simulated engine."""
    port = free_port()
    with (
        redis_server(port),
        orchestrator(write(tmp_path_factory.mktemp("served"), engine, f"redis://127.0.0.1:{port}")) as running,
    ):
        yield running


def test_an_answer(served: Orchestrator) -> None:
    """A chat comes back whole and streamed, through to the engine (ORC-1)."""
    status, headers, body = served.post(HELLO)
    assert (status, headers["x-pool"], json.loads(body)["usage"]["completion_tokens"]) == (200, "small", 8)
    status, _, body = served.post(HELLO | {"stream": True})
    assert status == 200
    assert body.count(b'"content"') >= 8
    assert body.endswith(b"data: [DONE]\n\n")


def test_one_limit_over_all_workers(served: Orchestrator) -> None:
    """Of thirty requests at once ten pass, whichever worker takes them (ORC-1)."""
    with ThreadPoolExecutor(30) as pool:
        found = list(pool.map(lambda _: served.post(HELLO, "few-0"), range(30)))
    assert sorted(status for status, _, _ in found) == [200] * 10 + [429] * 20
    refused = next(headers for status, headers, _ in found if status == 429)
    assert 0 < int(refused["retry-after"]) <= 60


def test_budget_burst(served: Orchestrator) -> None:
    """A key spends its burst on the model it asked for, then gets the cheaper one, then none (ORC-2)."""
    expert = HELLO | {"model": "large", "max_tokens": 30}
    reasons, last = [], 200
    while last == 200 and len(reasons) < 40:
        last, headers, body = served.post(expert, "poor-0")
        reasons.append(headers.get("x-route", json.loads(body).get("error", {}).get("code")))
    asked, over = reasons.count("asked"), reasons.count("over_budget")
    assert reasons == ["asked"] * asked + ["over_budget"] * over + ["hourly_budget_spent"]
    assert 2 <= asked <= 4  # 120 tokens at once, some 45 a time, and what comes in meanwhile
    assert over >= 2
    assert last == 429
    assert served.metric('orchestrator_tokens_total{budget="over"') > 0


def test_a_long_session_moves(served: Orchestrator) -> None:
    """A session that has lasted goes to its own pool, and a new one does not (ORC-3)."""
    assert served.post(HELLO, x_session_id="one")[1]["x-pool"] == "small"
    moved = lambda: served.post(HELLO, x_session_id="one")[1]["x-pool"] == "long"  # noqa: E731
    until(moved, "the session moves", 10)
    assert served.post(HELLO, x_session_id="two")[1]["x-pool"] == "small"


def test_a_client_that_leaves(served: Orchestrator, engine: str) -> None:
    """A client that hangs up within a stream ends the engine's work on it (ORC-1)."""
    connection = served.begin(LONG)
    connection.getresponse().read(10)
    assert in_flight(engine) >= 1
    connection.close()
    until(lambda: in_flight(engine) == 0, "the engine is idle", 5)
    gone = 'orchestrator_requests_total{reason="client_gone",status="499"}'
    until(lambda: served.metric(gone) >= 1, "it is counted", 5)


def arrivals(served: Orchestrator, user: str) -> tuple[int, float, bytes]:
    """How many reads a stream took, over how long, and what it said."""
    connection = served.begin(LONG, user)
    response = connection.getresponse()
    reads, body, began_s = 0, b"", time.monotonic()
    while part := response.read1(1 << 20):
        reads += 1
        body += part
    connection.close()
    return reads, time.monotonic() - began_s, body


def test_packs(served: Orchestrator) -> None:
    """The same stream comes at once or in packs of half a second, as the key's tier says; nothing is lost (S1-6)."""
    many, _, plain = arrivals(served, "free-1")
    few, took_s, packed = arrivals(served, "packed-0")
    assert packed.count(b"\n\n") == plain.count(b"\n\n")
    assert few <= took_s / 0.5 + 3
    assert many > 5 * few


def test_poisoned_uploads(served: Orchestrator) -> None:
    """Traps of depth and of size are refused, and no worker dies of them (INC-13)."""
    before = served.workers()
    deep = b'{"messages":[{"role":"user","content":' + b"[" * 400_000 + b"]" * 400_000 + b"}]}"
    wide = b'{"messages":' + b"[" + b"{}," * 300_000 + b"{}]}"
    assert served.post(deep)[0] == 400
    assert 400 <= served.post(wide)[0] < 500
    with contextlib.suppress(OSError):  # it may hang up before it has read everything
        assert served.post(b"[" * 20_000_000)[0] == 413
    assert served.post(HELLO)[0] == 200
    assert served.workers() == before
    for worker in before:
        limits = Path(f"/proc/{worker}/limits").read_text()
        assert re.search(rf"Max data size\s+{2048 * 1024 * 1024}\s", limits)


def test_a_worker_that_dies(served: Orchestrator) -> None:
    """A worker that is killed takes its own requests along and no others, and is replaced (INC-13)."""
    before = served.workers()
    os.kill(next(iter(before)), signal.SIGKILL)
    for _ in range(10):
        with contextlib.suppress(ConnectionError):  # the dead one's connections
            assert served.post(HELLO)[0] == 200
    until(lambda: len(served.workers() - before) == 1, "a new worker is there", 30)
    assert len(served.workers() & before) == 1


def test_a_key_that_goes_while_its_stream_runs(tmp_path: Path, engine: str) -> None:
    """A stream goes on to its end when its key is taken away; the next request is refused (INC-11)."""
    path = write(tmp_path, engine, "redis://127.0.0.1:9", workers=1)
    with orchestrator(path) as running:
        connection = running.begin(LONG)
        response = connection.getresponse()
        response.read(10)
        document = yaml.safe_load((tmp_path / "keys.yaml").read_text())
        document["keys"] = [one for one in document["keys"] if one["name"] != "free-0"]
        (tmp_path / "keys.yaml").write_text(yaml.safe_dump(document))
        os.kill(running.parent.pid, signal.SIGHUP)
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        until(lambda: running.post(HELLO)[0] == 401, "the key is refused", 30)
        assert running.post(HELLO, "free-1")[0] == 200


@pytest.mark.parametrize(("when_down", "status"), [("open", 200), ("closed", 503)])
def test_redis_killed_under_traffic(tmp_path: Path, engine: str, when_down: str, status: int) -> None:
    """Redis is killed while requests run: they pass or are refused as configured, and are well again after (S3-6)."""
    port = free_port()
    redis = {"url": f"redis://127.0.0.1:{port}", "when_down": when_down, "timeout_s": 5}
    seen: list[tuple[int, str | None]] = []
    over = threading.Event()

    def traffic(running: Orchestrator) -> None:
        while not over.is_set():
            found, headers, _ = running.post(HELLO)
            seen.append((found, headers.get("x-degraded")))

    def ask(found: tuple[int, str | None]) -> Callable[[], bool]:
        seen.clear()
        return lambda: found in seen

    with redis_server(port) as server, orchestrator(write(tmp_path, engine, "", redis=redis, workers=1)) as running:
        asking = threading.Thread(target=traffic, args=(running,))
        asking.start()
        try:
            until(ask((200, None)), "requests pass", 10)
            server.kill()
            without = (status, "limits" if when_down == "open" else None)
            until(ask(without), "requests meet a dead Redis", 10)
            with redis_server(port):
                until(ask((200, None)), "limits are back", 10)
        finally:
            over.set()
            asking.join()
        assert {found for found, _ in seen} <= {200, status}
        failures = f'orchestrator_dependency_failures_total{{dependency="redis",policy="{when_down}"}}'
        assert running.metric(failures) > 0


class Recorder(http.server.BaseHTTPRequestHandler):
    """An engine and a collector of traces that keep what they are sent: path, headers, body."""

    seen: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append((self.path, dict(self.headers), body))
        message = {"role": "assistant", "content": "fine"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        answer = json.dumps({"choices": [{"index": 0, "message": message}], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


def test_one_trace(tmp_path: Path) -> None:
    """The engine, the log and the collector see the client's trace, and the engine the request's id (MON-5)."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    path = write(tmp_path, url, "redis://127.0.0.1:9", workers=1, tracing={"otlp": f"{url}/v1/traces"})
    try:
        with orchestrator(path) as running:
            status, _, _ = running.post(HELLO, traceparent=f"00-{TRACE}-b7ad6b7169203331-01", x_request_id="mine")
            assert status == 200
            asked = next(headers for path, headers, _ in Recorder.seen if path == "/v1/chat/completions")
            assert asked["traceparent"].split("-")[1] == TRACE
            assert asked["x-request-id"] == "mine"
            assert log_says(tmp_path, TRACE) == 1
            spans = lambda: [body for path, _, body in Recorder.seen if path == "/v1/traces"]  # noqa: E731
            until(spans, "spans reach the collector", 20)
            assert any(bytes.fromhex(TRACE) in unpacked(body) for body in spans())
    finally:
        server.shutdown()


def unpacked(body: bytes) -> bytes:
    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body


def test_the_end(tmp_path: Path, engine: str) -> None:
    """SIGTERM ends every process; killed, the parent takes its workers along."""
    path = write(tmp_path, engine, "redis://127.0.0.1:9")
    for number in (signal.SIGTERM, signal.SIGKILL):
        with orchestrator(path) as running:
            workers = running.workers()
            assert len(workers) == 2
            os.kill(running.parent.pid, number)
            until(lambda: not any(map(alive, workers)), "the workers end", 15)  # noqa: B023
            running.parent.wait(10)


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_mistakes_end_before_anything_starts(tmp_path: Path, engine: str) -> None:
    """A wrong configuration, or a port that is taken, is one sentence and exit 2."""
    path = write(tmp_path, engine, "redis://127.0.0.1:9", prot=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for mistake in ({"prot": 1}, {"port": taken.getsockname()[1]}, {"keys": str(tmp_path / "none.yaml")}):
            path = write(tmp_path, engine, "redis://127.0.0.1:9", **mistake)
            command = [sys.executable, "-m", "reference_stack.orchestrator", str(path)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
