"""The guard's HTTP, and the guard behind it, over real sockets in one event loop."""

import asyncio
from collections.abc import Coroutine

from reference_stack.gateway.canary import Canary, Health
from reference_stack.gateway.guard import BURST, Guard, client_of
from reference_stack.gateway.server import Answer, Exchange, Handler, Headers
from reference_stack.gateway.tokens import Tokens


def exchange(handler: Handler, *pieces: bytes) -> bytes:
    """What comes back for bytes sent piece by piece on one connection, until the last answer's body `end`."""

    async def main() -> bytes:
        server = await asyncio.get_running_loop().create_server(lambda: Exchange(handler), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"GET /end HTTP/1.1\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"the end"), 10)
        writer.close()
        server.close()
        return answer

    return asyncio.run(main())


def echo(path: str, _: Headers, body: bytes) -> Answer:
    return Answer(200, b"the end") if path == "/end" else Answer(200, path.encode() + b" " + body)


def test_pieces_make_no_difference() -> None:
    """A request cut anywhere gets the answer it gets whole, and the connection serves the next one."""
    request = b"POST /a/b HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
    whole = exchange(echo, request, request)
    assert whole == exchange(echo, *(bytes([byte]) for byte in request + request))
    assert whole.count(b"/a/b hello") == 2


def test_chunked_body() -> None:
    """A body without a length is put together from its chunks."""
    request = b"POST /c HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
    assert b"/c hello" in exchange(echo, request)


def test_failure_is_an_answer() -> None:
    """A handler that fails, at once or later, answers 500 and leaves the connection usable."""

    def fail(path: str, _: Headers, __: bytes) -> Answer | Coroutine[None, None, Answer]:
        async def later() -> Answer:
            raise RuntimeError("later")

        if path == "/later":
            return later()
        if path == "/now":
            raise RuntimeError("now")
        return Answer(200, b"the end")

    assert b"HTTP/1.1 500 " in exchange(fail, b"GET /now HTTP/1.1\r\n\r\n")

    async def main() -> bytes:
        server = await asyncio.get_running_loop().create_server(lambda: Exchange(fail), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET /later HTTP/1.1\r\n\r\n")
        return await asyncio.wait_for(reader.readline(), 10)

    assert asyncio.run(main()).startswith(b"HTTP/1.1 500 ")


def test_client_is_key_or_address() -> None:
    """A client is its key; without one, the last address in X-Forwarded-For, which Envoy wrote."""
    assert client_of({b"authorization": b"Bearer k", b"x-forwarded-for": b"1.1.1.1"}) == b"key Bearer k"
    assert client_of({b"x-forwarded-for": b"6.6.6.6, 1.1.1.1"}) == client_of({b"x-forwarded-for": b"1.1.1.1"})
    assert client_of({b"authorization": b"1.1.1.1"}) != client_of({b"x-forwarded-for": b"1.1.1.1"})


def test_rate_comes_before_reading(tokens: Tokens) -> None:
    """Over its rate a client gets 429 and a time to wait, whatever it sent."""
    guard = Guard(tokens, 50, {})
    answers = [guard.handle("/decide/v1/completions", {}, b"") for _ in range(BURST + 50)]
    statuses = [answer.status for answer in answers if isinstance(answer, Answer)]
    assert statuses[:BURST] == [400] * BURST
    assert statuses[-1] == 429
    last = answers[-1]
    assert isinstance(last, Answer)
    assert last.headers == {b"retry-after": b"1"}


def test_large_body_is_decided_in_a_thread(tokens: Tokens) -> None:
    """A body that may need counting does not hold up the event loop; the decision is the same."""
    guard = Guard(tokens, 50, {})
    body = b'{"prompt":"' + b"x y " * 50 + b'"}'
    later = guard.handle("/decide/v1/completions", {b"content-type": b"application/json"}, body)
    assert not isinstance(later, Answer)
    assert asyncio.run(_finish(later)).status == 422


async def _finish(answer: Coroutine[None, None, Answer]) -> Answer:
    return await answer


class Told(Canary):
    """A canary that finds what it is told."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", "tiny")
        self.found = Health.ALIVE

    async def health(self) -> Health:
        return self.found


def test_the_last_replica_is_not_taken_out_for_being_late(tokens: Tokens) -> None:
    """Late ones go while another is in use, and the last stays; a dead one goes, and a late one does not come back."""
    canaries = {"engine-0": Told(), "engine-1": Told()}
    guard = Guard(tokens, 50, dict(canaries))

    def asked(*found: Health) -> list[int]:
        answers = []
        for (name, canary), health in zip(canaries.items(), found, strict=True):
            canary.found = health
            answer = guard.handle(f"/canary/{name}", {}, b"")
            assert not isinstance(answer, Answer)
            answers.append(asyncio.run(_finish(answer)).status)
        return answers

    assert asked(Health.LATE, Health.LATE) == [504, 504]  # neither has ever been in use
    assert asked(Health.ALIVE, Health.BUSY) == [200, 200]
    assert asked(Health.LATE, Health.LATE) == [504, 200]
    assert asked(Health.LATE, Health.LATE) == [504, 200]
    assert asked(Health.LATE, Health.DEAD) == [504, 503]
    assert asked(Health.LATE, Health.LATE) == [504, 504]


def test_counts_and_unknown_paths(tokens: Tokens) -> None:
    """Decisions are counted by reason; a replica nobody knows is 404."""
    guard = Guard(tokens, 50, {})
    guard.handle("/decide/v1/completions", {}, b"{}")
    metrics = guard.handle("/metrics", {}, b"")
    assert isinstance(metrics, Answer)
    assert b'gateway_requests_total{decision="rejected",reason="wrong_content_type"} 1.0' in metrics.body
    unknown = guard.handle("/canary/engine-9", {}, b"")
    assert not isinstance(unknown, Answer)
    assert asyncio.run(_finish(unknown)).status == 404
    assert guard.handle("/nowhere", {}, b"") == Answer(404)
