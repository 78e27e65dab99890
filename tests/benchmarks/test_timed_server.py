"""The ruler is checked first: what the timed server says of itself is what a plain client sees."""

import http.client
import json
from collections.abc import Iterator

import pytest

from benchmarks.server import TimedServer, Timing

pytestmark = pytest.mark.e2e  # starts real processes


TIMING = Timing(ttft_s=0.020, itl_s=0.002, chunks=8, plain_s=0.010, stall_s=0.3)
DUE_LAST_S = TIMING.ttft_s + 7 * TIMING.itl_s


@pytest.fixture
def server() -> Iterator[TimedServer]:
    with TimedServer(TIMING, life_s=60) as running:
        yield running


def post(
    server: TimedServer, body: dict[str, object], path: str = "/v1/chat/completions", request_id: str = "7"
) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", path, json.dumps(body), {"X-Request-Id": request_id})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == 200
    return text


def test_stream_is_whole(server: TimedServer) -> None:
    """A chat stream has its chunks, a finish reason, the usage that was asked for, and [DONE], in that order."""
    text = post(server, {"stream": True, "stream_options": {"include_usage": True}})
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    chunks = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * 8 + [False]
    assert chunks[7]["choices"][0]["finish_reason"] == "length"
    assert chunks[8]["usage"]["completion_tokens"] == 8


def test_usage_only_when_asked(server: TimedServer) -> None:
    """Without include_usage the last event before [DONE] is the last content chunk."""
    events = [line for line in post(server, {"stream": True}, "/v1/completions").splitlines() if line]
    assert len(events) == 9
    assert json.loads(events[7].removeprefix("data: "))["choices"][0]["text"]


def test_log_keeps_the_timing(server: TimedServer) -> None:
    """The log shows no chunk before its time, under the id that the client sent."""
    post(server, {"stream": True}, request_id="abc")
    (row,) = server.log()
    assert (row["id"], row["chunks"], row["streamed"]) == ("abc", 8, True)
    assert row["first_s"] - row["read_s"] >= TIMING.ttft_s
    assert row["last_s"] - row["read_s"] >= DUE_LAST_S


def test_plain_answer(server: TimedServer) -> None:
    """A request without stream gets one JSON answer with usage, when it is due."""
    assert json.loads(post(server, {"stream": False}))["usage"]["completion_tokens"] == 8
    (row,) = server.log()
    assert not row["streamed"]
    assert row["first_s"] == row["last_s"] >= row["read_s"] + TIMING.plain_s


def test_prompt_that_speaks_of_stream(server: TimedServer) -> None:
    """The word "stream" inside a prompt does not make a request a streamed one."""
    text = post(server, {"messages": [{"role": "user", "content": '"stream": true'}]})
    assert json.loads(text)["object"] == "chat.completion"


def test_large_body_on_a_kept_connection(server: TimedServer) -> None:
    """Bodies of 250 kB are taken one after the other on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for _ in range(3):
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a" * 250_000}))
        assert connection.getresponse().read()
    connection.close()
    assert len(server.log()) == 3
    assert server.stats()["peak_connections"] <= 2


def test_stall_shifts_what_was_under_way(server: TimedServer) -> None:
    """A freeze delays a request under way by its whole length, and the next request not at all."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", "/v1/completions", json.dumps({"stream": True}))
    answer = connection.getresponse()  # its first chunk was written
    server.stall()
    answer.read()
    connection.request("POST", "/v1/completions", json.dumps({"stream": True}))
    connection.getresponse().read()
    frozen, after = server.log()
    assert frozen["last_s"] - frozen["read_s"] >= DUE_LAST_S + TIMING.stall_s
    assert after["last_s"] - after["read_s"] < frozen["last_s"] - frozen["read_s"]


def test_scheduled_stall_comes_once() -> None:
    """A stall on schedule hits one request, until a reset arms it again."""
    with TimedServer(Timing(plain_s=0.001, stall_at_s=0.0, stall_s=0.2), life_s=30) as server:
        for _ in range(3):
            post(server, {})
        slow = server.log()
        server.reset()
        post(server, {})
        again = server.log()
    assert ((slow["last_s"] - slow["read_s"]) >= 0.2).sum() == 1
    assert ((again["last_s"] - again["read_s"]) >= 0.2).sum() == 1


def test_other_doors(server: TimedServer) -> None:
    """It names its model, is healthy, forgets on reset, and knows no other path."""
    assert json.loads(server.get("/v1/models"))["data"][0]["id"] == "sim"
    assert server.get("/health") == b""
    post(server, {})
    server.reset()
    assert len(server.log()) == 0
    assert server.stats()["begun"] == 0
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/metrics")
    assert connection.getresponse().status == 404
    connection.close()


def test_life_ends() -> None:
    """It leaves by itself when its life is over."""
    with TimedServer(life_s=0.2) as server:
        assert server.process.wait(timeout=10) == 0


def test_port_in_use(server: TimedServer) -> None:
    """A port that is taken is an error of one sentence, not a server that nobody reaches."""
    with pytest.raises(RuntimeError, match=f"is port {server.port} in use"):
        TimedServer(port=server.port)
