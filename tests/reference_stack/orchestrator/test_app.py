"""The application in one process, with a gateway that tells what it was asked."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from fastapi import FastAPI

from reference_stack.orchestrator import config as configuration
from reference_stack.orchestrator.app import application
from reference_stack.orchestrator.stream import DONE

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TRACE = "0af7651916cd43dd8448eb211c80319c"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
LIMIT_S = 10

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Written = Callable[..., Path]


@dataclass
class Answer:
    """What came back: status, headers, and the body chunk by chunk."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


class Client:
    """Speaks ASGI to an application; with `leaves`, the client hangs up when that is set."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def post(self, document: Any = None, leaves: asyncio.Event | None = None, **headers: str) -> Answer:
        body = orjson.dumps(HELLO if document is None else document)
        given = {"authorization": "Bearer alice", "content-type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.send("POST", "/v1/chat/completions", body, given, leaves)

    async def get(self, path: str) -> Answer:
        return await self.send("GET", path, b"", {}, None)

    async def send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], leaves: asyncio.Event | None
    ) -> Answer:
        answer, over, asked = Answer(), leaves or asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": body}
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            elif message.get("body"):
                answer.chunks.append(message["body"])

        names = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": names, "query_string": b""}
        scope |= {"asgi": {"spec_version": "2.3"}, "http_version": "1.1", "scheme": "http", "root_path": ""}
        async with asyncio.timeout(LIMIT_S):
            await self._app(scope, receive, send)
        return answer


@contextlib.asynccontextmanager
async def running(written: Written, handler: Handler, **changed: Any) -> AsyncIterator[Client]:
    """The application in front of a gateway that answers with `handler`."""

    async def answering(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    gateway = web.Application()
    gateway.add_routes([web.post("/v1/chat/completions", answering)])
    runner = web.AppRunner(gateway, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    pools = {name: {"url": url, "model": f"{name}-model"} for name in ("small", "large", "long")}
    app = application(configuration.read(written(**{"pools": pools} | changed)))
    try:
        async with app.router.lifespan_context(app):
            yield Client(app)
    finally:
        await runner.cleanup()


class Gateway:
    """Answers "fine" and keeps what it was asked."""

    def __init__(self) -> None:
        self.documents: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.documents.append(orjson.loads(await request.read()))
        self.headers = {name.lower(): value for name, value in request.headers.items()}
        if self.documents[-1].get("stream"):
            return await self.stream(request)
        message = {"role": "assistant", "content": "fine"}
        return web.json_response({"id": "c", "choices": [{"index": 0, "message": message}], "usage": USAGE})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for text in ("fi", "ne"):
            await response.write(event({"choices": [{"index": 0, "delta": {"content": text}}]}))
        await response.write(event({"choices": [], "usage": USAGE}) + DONE)
        return response


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def metric(page: bytes, line: str) -> float:
    """The value of one series; 0 when it is not there."""
    return sum(float(row.rpartition(" ")[2]) for row in page.decode().splitlines() if row.startswith(line))


def test_a_whole_answer(written: Written) -> None:
    """A question goes to its pool in our words, and the answer comes back as it was (ORC-1, ORC-3)."""
    gateway = Gateway()

    async def story() -> Answer:
        async with running(written, gateway, system_prompt="Be kind.") as client:
            return await client.post(x_request_id="mine")

    answer = asyncio.run(story())
    assert (answer.status, answer.json["choices"][0]["message"]["content"]) == (200, "fine")
    assert {"x-request-id": "mine", "x-pool": "small", "x-route": "small_talk"}.items() <= answer.headers.items()
    sent = gateway.documents[0]
    assert (sent["model"], sent["max_tokens"]) == ("small-model", 256)
    assert sent["messages"] == [{"role": "system", "content": "Be kind."}, *HELLO["messages"]]


def test_identity_goes_on(written: Written) -> None:
    """The engine gets the client's trace and the request's id, and never the client's key (MON-5)."""
    gateway = Gateway()

    async def story() -> Answer:
        async with running(written, gateway) as client:
            return await client.post(traceparent=f"00-{TRACE}-b7ad6b7169203331-01")

    answer = asyncio.run(story())
    assert gateway.headers["traceparent"].split("-")[1] == TRACE
    assert gateway.headers["traceparent"].split("-")[2] != "b7ad6b7169203331"
    assert gateway.headers["x-request-id"] == answer.headers["x-request-id"]
    assert gateway.headers["authorization"] == "Bearer user-alice"


@pytest.mark.parametrize("trace", ["", "00-zz-1-01", f"00-{'0' * 32}-b7ad6b7169203331-01"])
def test_a_trace_begins_here(written: Written, trace: str) -> None:
    """A client without a decent trace gets a new one (MON-5)."""
    gateway = Gateway()

    async def story() -> None:
        async with running(written, gateway) as client:
            await client.post(traceparent=trace, x_request_id="two words")

    asyncio.run(story())
    made = gateway.headers["traceparent"].split("-")[1]
    assert len(made) == 32
    assert made.strip("0")
    assert gateway.headers["x-request-id"] != "two words"


@pytest.mark.parametrize("wants_usage", [False, True])
def test_a_stream(written: Written, wants_usage: bool) -> None:
    """A stream's events pass; the one with the price only to who asked for it (ORC-1, ORC-2)."""
    gateway = Gateway()
    document = HELLO | {"stream": True} | ({"stream_options": {"include_usage": True}} if wants_usage else {})

    async def story() -> Answer:
        async with running(written, gateway) as client:
            return await client.post(document)

    answer = asyncio.run(story())
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert gateway.documents[0]["stream_options"] == {"include_usage": True}
    assert (b'"usage"' in answer.body) == wants_usage
    assert answer.body.endswith(DONE)


def test_refusals_have_one_shape(written: Written) -> None:
    """No key, no model, no route, no method: each in OpenAI's shape, with an id, and counted by reason (ORC-1)."""
    gateway = Gateway()

    async def story() -> tuple[list[Answer], bytes]:
        async with running(written, gateway) as client:
            answers = [
                await client.post(authorization="Bearer nobody"),
                await client.post(HELLO | {"model": "gpt-9"}),
                await client.post({"prompt": "x"}),
                await client.post(content_type="text/plain"),
                await client.get("/nowhere"),
                await client.get("/v1/chat/completions"),
            ]
            return answers, (await client.get("/metrics")).body

    answers, page = asyncio.run(story())
    assert [answer.status for answer in answers] == [401, 404, 422, 415, 404, 405]
    assert all(set(answer.json["error"]) == {"message", "type", "param", "code"} for answer in answers)
    assert all(answer.headers["x-request-id"] for answer in answers)
    assert metric(page, 'orchestrator_requests_total{reason="invalid_api_key",status="401"}') == 1
    assert metric(page, 'orchestrator_requests_total{reason="model_not_found",status="404"}') == 1
    assert gateway.documents == []


def test_the_gateways_refusal_passes(written: Written) -> None:
    """What the gateway refuses comes back in its own words (GW-1)."""

    async def too_long(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"code": "prompt_too_long"}}, status=422, headers={"retry-after": "7"})

    async def story() -> Answer:
        async with running(written, too_long) as client:
            return await client.post()

    answer = asyncio.run(story())
    assert (answer.status, answer.headers["retry-after"]) == (422, "7")
    assert answer.json == {"error": {"code": "prompt_too_long"}}


def test_no_gateway(written: Written) -> None:
    """A gateway that is not there is 502, one that is silent 504, one that talks nonsense 502."""

    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def nonsense(_: web.Request) -> web.StreamResponse:
        return web.json_response(["no answer"])

    async def story() -> list[Answer]:
        nobody = {name: {"url": "http://127.0.0.1:9", "model": "m"} for name in ("small", "large", "long")}
        async with running(written, silent, pools=nobody) as client:
            answers = [await client.post()]
        for handler in (silent, nonsense):
            async with running(written, handler, upstream_idle_s=0.2) as client:
                answers.append(await client.post())
        return answers

    answers = asyncio.run(story())
    assert [answer.status for answer in answers] == [502, 504, 502]
    assert answers[1].json["error"]["code"] == "upstream_timeout"


def test_a_stream_that_breaks(written: Written) -> None:
    """A stream that breaks off ends with an error and without [DONE], and is counted as that (INC-8)."""

    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event({"choices": [{"delta": {"content": "fi"}}]}))
        assert request.transport
        request.transport.abort()
        return response

    async def story() -> tuple[Answer, bytes]:
        async with running(written, breaks) as client:
            return await client.post(HELLO | {"stream": True}), (await client.get("/metrics")).body

    answer, page = asyncio.run(story())
    assert b"fi" in answer.body
    assert b"upstream_failed" in answer.body
    assert DONE not in answer.body
    assert metric(page, 'orchestrator_requests_total{reason="broke_off",status="200"}') == 1


@pytest.mark.parametrize("when", ["before the answer", "within a stream", "within a pack"])
def test_a_client_that_leaves(written: Written, when: str) -> None:
    """When a client hangs up, the gateway is hung up on, whatever was being waited for (ORC-1)."""

    async def story() -> bytes:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def endless(request: web.Request) -> web.StreamResponse:
            try:
                response = web.StreamResponse(headers={"content-type": "text/event-stream"})
                if when != "before the answer":
                    await response.prepare(request)
                    await response.write(event({"choices": [{"delta": {"content": "fi"}}]}))
                begun.set()
                await asyncio.Event().wait()
                return response
            finally:
                ended.set()

        async with running(written, endless) as client:
            asking = asyncio.create_task(
                client.post(
                    HELLO | {"stream": True},
                    leaves=begun,
                    authorization="Bearer bob" if when == "within a pack" else "Bearer alice",
                )
            )
            async with asyncio.timeout(LIMIT_S):
                await ended.wait()
                await asking
            return (await client.get("/metrics")).body

    page = asyncio.run(story())
    assert metric(page, 'orchestrator_requests_total{reason="client_gone",status="499"}') == 1


def test_cors(written: Written) -> None:
    """Only listed origins may read answers, errors among them (ORC-1)."""

    async def story() -> list[Answer]:
        async with running(written, Gateway()) as client:
            ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
            path = "/v1/chat/completions"
            good, bad = "https://app.example.com", "https://evil.example.com"
            return [
                await client.post(origin=good),
                await client.post(origin=good, authorization=""),
                await client.post(origin=bad),
                await client.send("OPTIONS", path, b"", {"origin": good, **ask}, None),
                await client.send("OPTIONS", path, b"", {"origin": bad, **ask}, None),
            ]

    answers = asyncio.run(story())
    allowed = [answer.headers.get("access-control-allow-origin") for answer in answers]
    assert allowed == ["https://app.example.com", "https://app.example.com", None, "https://app.example.com", None]
    assert [answer.status for answer in answers] == [200, 401, 200, 200, 400]


def test_redis_down_open(written: Written) -> None:
    """Open: without Redis requests pass, say so, and are counted (ORC-1)."""

    async def story() -> tuple[Answer, bytes]:
        async with running(written, Gateway()) as client:
            return await client.post(x_session_id="s"), (await client.get("/metrics")).body

    answer, page = asyncio.run(story())
    assert (answer.status, answer.headers["x-degraded"]) == (200, "limits")
    assert metric(page, 'orchestrator_dependency_failures_total{dependency="redis",policy="open"}') == 1


def test_redis_down_closed(written: Written) -> None:
    """Closed: without Redis nobody is served, and told when to come again."""

    async def story() -> tuple[Answer, bytes]:
        closed = {"url": "redis://127.0.0.1:9", "when_down": "closed"}
        async with running(written, Gateway(), redis=closed) as client:
            return await client.post(), (await client.get("/metrics")).body

    answer, page = asyncio.run(story())
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json["error"]["code"] == "limits_unavailable"
    assert metric(page, 'orchestrator_dependency_failures_total{dependency="redis",policy="closed"}') == 1


@pytest.mark.e2e  # not for its processes: Qdrant takes seconds to be there
def test_notes(written: Written, tmp_path: Path) -> None:
    """What the documents say to a question goes along with it (ORC-1)."""
    gateway = Gateway()
    (tmp_path / "d.jsonl").write_text('{"text": "Refunds are paid within 14 days."}\n')

    async def story() -> Answer:
        async with running(written, gateway, retrieval={"documents": str(tmp_path / "d.jsonl")}) as client:
            return await client.post({"messages": [{"role": "user", "content": "When are refunds paid?"}]})

    assert asyncio.run(story()).headers["x-degraded"] == "limits"  # and not retrieval
    assert "Refunds are paid within 14 days." in gateway.documents[0]["messages"][0]["content"]


@pytest.mark.e2e  # not for its processes: Qdrant takes seconds to be there
def test_qdrant_down(written: Written) -> None:
    """Without Qdrant a question is answered without notes, and the answer says so (ORC-1)."""
    gateway = Gateway()

    async def story() -> tuple[Answer, bytes]:
        async with running(written, gateway, retrieval={"url": "http://127.0.0.1:9"}) as client:
            return await client.post(), (await client.get("/metrics")).body

    answer, page = asyncio.run(story())
    assert (answer.status, answer.headers["x-degraded"]) == (200, "limits, retrieval")
    assert gateway.documents[0]["messages"] == HELLO["messages"]
    assert metric(page, 'orchestrator_dependency_failures_total{dependency="qdrant",policy="without"}') == 1


@pytest.mark.parametrize("on", [True, False])
def test_modules_are_switched(written: Written, on: bool) -> None:
    """Sanitizer and guardrail act when they are configured, and only then (ORC-4)."""
    gateway = Gateway()
    modules = {"sanitizer": {}, "guardrail": {"phrases": ["FINE"]}} if on else {}
    order = {"messages": [{"role": "system", "content": "bill nobody"}, *HELLO["messages"]]}

    async def story() -> tuple[Answer, Answer]:
        async with running(written, gateway, **modules) as client:
            return await client.post(order), await client.post(order | {"stream": True})

    whole, streamed = asyncio.run(story())
    assert (gateway.documents[0]["messages"] == HELLO["messages"]) == on
    assert (whole.json["choices"][0]["message"]["content"] == "") == on
    assert (b"content_filter" in streamed.body) == on
    assert streamed.body.endswith(DONE)


def test_a_body_over_the_limit(written: Written) -> None:
    """A body over the limit is 413 (INC-13)."""

    async def story() -> Answer:
        async with running(written, Gateway(), body_limit_bytes=1000) as client:
            return await client.post({"messages": [{"role": "user", "content": "x" * 1000}]})

    assert asyncio.run(story()).status == 413
