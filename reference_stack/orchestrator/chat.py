"""One chat request from key to last byte: who asks, may they, what is sent where, and what it has cost.

The steps stand in `_prepare` in their order, cheapest refusal first. However a request ends, `_over` is reached once:
there the budget is settled, the end is counted and the trace is closed. It keeps nothing between requests.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from opentelemetry.trace import Span
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from reference_stack.orchestrator import budget, guardrail, limit, prompt, request, routing, sanitizer, session, stream
from reference_stack.orchestrator.budget import Reservation, Standing
from reference_stack.orchestrator.config import Config, Tier
from reference_stack.orchestrator.counts import Counts
from reference_stack.orchestrator.keys import Key, Keys
from reference_stack.orchestrator.refusal import Refusal
from reference_stack.orchestrator.retrieval import Library, LibraryDownError
from reference_stack.orchestrator.routing import Route
from reference_stack.orchestrator.store import Store, StoreDownError
from reference_stack.orchestrator.tokens import Tokens
from reference_stack.orchestrator.trace import Tracer, trace_id
from reference_stack.orchestrator.upstream import Answer, Upstream, UpstreamError

PASSED_BACK = ("content-type", "retry-after", "x-envoy-overloaded")

log = logging.getLogger(__name__)
_SESSION = re.compile(r"[\w.:-]{1,128}", re.ASCII)
T = TypeVar("T")

NOWHERE = Route("", "")
NOTHING = Reservation(Standing.UNKNOWN, "", 0, 0.0)


@dataclass
class Call:
    """One request under way."""

    request_id: str
    span: Span
    key: Key
    tier: Tier
    began_s: float = field(default_factory=time.monotonic)
    document: dict[str, Any] = field(default_factory=dict)
    route: Route = NOWHERE
    reservation: Reservation = NOTHING
    meter: stream.Meter = field(default_factory=lambda: stream.Meter(0, hide_usage=False))
    degraded: list[str] = field(default_factory=list)

    def headers(self) -> dict[str, str]:
        """What the client is told besides the answer."""
        told = {"x-pool": self.route.pool, "x-route": self.route.reason, "cache-control": "no-store"}
        return told | ({"x-degraded": ", ".join(self.degraded)} if self.degraded else {})


class Chat:
    """The chats of one worker; `library` is None when retrieval is off."""

    def __init__(
        self,
        config: Config,
        keys: Keys,
        store: Store,
        library: Library | None,
        upstream: Upstream,
        tokens: Tokens,
        tracer: Tracer,
        counts: Counts,
    ) -> None:
        self._config = config
        self._keys = keys
        self._store = store
        self._library = library
        self._upstream = upstream
        self._tokens = tokens
        self._tracer = tracer
        self._counts = counts
        self._settling: set[asyncio.Task[None]] = set()

    async def answer(self, http: Request) -> Response:
        """The answer to one request. Refusal when there is none."""
        try:
            key = self._keys.find(http.headers.get("authorization", ""))
        except Refusal as refusal:
            self._counts.requests.labels(refusal.status, refusal.code).inc()
            raise
        span = self._tracer.begin(http.headers)
        call = Call(http.state.request_id, span, key, self._config.tiers[key.tier])
        try:
            await self._prepare(call, http)
            return await self._send(call)
        except Refusal as refusal:
            self._over(call, refusal.status, refusal.code)
            raise
        except asyncio.CancelledError:
            self._over(call, 499, "client_gone")
            raise
        except Exception:  # whatever it is: counted as ours, its budget settled, and raised on
            self._over(call, 500, "internal_error")
            raise

    async def close(self) -> None:
        """Wait for the budgets that are still being settled."""
        await asyncio.gather(*self._settling)

    async def _prepare(self, call: Call, http: Request) -> None:
        """Everything up to a document to send, and the tokens it may cost."""
        await self._limit(call)
        body = await request.read_body(http.stream(), self._config.body_limit_bytes)
        document = request.read_chat(body, http.headers.get("content-type", ""), self._config.depth_limit)
        answer_tokens = request.answer_tokens(document, self._config.answer_tokens)
        messages = document["messages"]
        if self._config.sanitizer:
            clean = sanitizer.sanitize(messages, self._config.sanitizer)
            if clean != messages:
                self._counts.modules.labels("sanitizer", "cleaned").inc()
            messages = clean
        question = prompt.question(messages)
        age_s = await self._session_age_s(call, http.headers.get("x-session-id", ""))
        call.route = routing.route(self._config, str(document.get("model") or self._config.model), question, age_s)
        messages = prompt.build(messages, self._config.system_prompt, await self._notes(call, question))
        prompt_tokens = await self._tokens.count(messages)
        await self._reserve(call, prompt_tokens + answer_tokens)
        call.document = self._document(call, document, messages, answer_tokens, prompt_tokens)

    async def _limit(self, call: Call) -> None:
        per_min = call.tier.requests_per_min
        wait_s = await self._shared(call, lambda: limit.take(self._store, call.key.user, per_min), 0.0)
        if wait_s > 0:
            raise Refusal(429, "rate_limited", f"More than {per_min} requests a minute.", retry_after_s=wait_s)

    async def _session_age_s(self, call: Call, name: str) -> float:
        if not name:
            return 0.0
        if not _SESSION.fullmatch(name):
            raise Refusal(400, "bad_session_id", "X-Session-Id must be up to 128 letters, digits or ._:- .")
        return await self._shared(call, lambda: session.age_s(self._store, call.key.user, name), 0.0)

    async def _reserve(self, call: Call, tokens: int) -> None:
        reserving = lambda: budget.reserve(self._store, call.key.name, call.tier, tokens)  # noqa: E731
        call.reservation = await self._shared(call, reserving, NOTHING)
        if call.reservation.standing is Standing.STOP:
            raise Refusal(
                429,
                "hourly_budget_spent",
                f"This key has spent its {call.tier.tokens_per_h} tokens an hour.",
                retry_after_s=call.reservation.wait_s,
            )
        if call.reservation.standing is Standing.OVER:
            call.route = routing.over_budget(self._config)

    async def _shared(self, call: Call, question: Callable[[], Awaitable[T]], otherwise: T) -> T:
        """What Redis says; while it is down `otherwise` (open) or a refusal (closed). A request finds that out once."""
        if "limits" in call.degraded:
            return otherwise
        try:
            return await question()
        except StoreDownError as error:
            policy = self._config.redis.when_down
            self._counts.dependency_failures.labels("redis", policy).inc()
            log.warning("redis does not answer (%s): %s", policy, error)
            if policy == "closed":
                raise Refusal(503, "limits_unavailable", "Limits cannot be checked now.", retry_after_s=1) from None
            call.degraded.append("limits")
            return otherwise

    async def _notes(self, call: Call, question: str) -> list[str]:
        if self._library is None:
            return []
        span = self._tracer.within(call.span, "retrieval")
        try:
            return await self._library.find(question)
        except LibraryDownError as error:
            self._counts.dependency_failures.labels("qdrant", "without").inc()
            log.warning("qdrant does not answer: %s", error)
            call.degraded.append("retrieval")
            return []
        finally:
            span.end()

    def _document(
        self,
        call: Call,
        document: dict[str, Any],
        messages: list[prompt.Message],
        answer_tokens: int,
        prompt_tokens: int,
    ) -> dict[str, Any]:
        """The request as it goes on: our messages, the pool's model, an end to the answer, and its price at the end."""
        changed: dict[str, Any] = {"model": self._config.pools[call.route.pool].model, "messages": messages}
        if document.get("max_completion_tokens") is None:
            changed["max_tokens"] = answer_tokens
        wants_usage = True
        if document.get("stream"):
            options = document.get("stream_options")
            options = options if isinstance(options, dict) else {}
            wants_usage = bool(options.get("include_usage"))
            changed["stream_options"] = {**options, "include_usage": True}
        call.meter = stream.Meter(prompt_tokens, hide_usage=not wants_usage)
        return document | changed

    async def _send(self, call: Call) -> Response:
        pool = self._config.pools[call.route.pool]
        self._counts.routed.labels(call.route.pool, call.route.reason).inc()
        headers = {
            "content-type": "application/json",
            "x-request-id": call.request_id,
            # The gateway has limits per client; to it a user of ours is one. Keys stay here.
            "authorization": f"Bearer user-{call.key.user}",
            **self._tracer.headers(call.span),
        }
        try:
            answer = await self._upstream.ask(pool.url, orjson.dumps(call.document), headers)
        except UpstreamError as error:
            raise self._no_answer(call, error) from None
        self._counts.first_byte.observe(time.monotonic() - call.began_s)
        if answer.status == 200 and answer.is_stream:
            return Streamed(self._stream(call, answer), call.headers(), lambda: self._stream_over(call, answer))
        try:
            return self._whole(call, answer, await answer.whole())
        except UpstreamError as error:
            raise self._no_answer(call, error) from None
        finally:
            answer.close()

    def _no_answer(self, call: Call, error: UpstreamError) -> Refusal:
        call.meter.take({})
        log.warning("%s: the gateway did not answer: %s", call.request_id, error)
        status, code = (504, "upstream_timeout") if error.late else (502, "upstream_unavailable")
        return Refusal(status, code, "The model does not answer.", retry_after_s=1)

    def _whole(self, call: Call, answer: Answer, body: bytes) -> Response:
        passed = {name: answer.headers[name] for name in PASSED_BACK if name in answer.headers}
        if answer.status != 200:
            call.meter.take({})
            self._over(call, answer.status, "upstream_refused")
            return Response(body, answer.status, call.headers() | passed)
        try:
            document = orjson.loads(body)
            call.meter.take(document["usage"])
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise UpstreamError("the answer is not one") from None
        guard = self._guard(call)
        if guard and guard.breaks(guardrail.whole_text(document)):
            self._counts.modules.labels("guardrail", "blocked").inc()
            body = orjson.dumps(guardrail.blocked_answer(document))
        self._over(call, 200, "ok")
        return Response(body, 200, call.headers() | passed)

    def _guard(self, call: Call) -> guardrail.Guardrail | None:
        rules = self._config.guardrail
        return guardrail.Guardrail(rules.phrases) if rules and (rules.everyone or call.tier.guarded) else None

    def _stream(self, call: Call, answer: Answer) -> AsyncGenerator[bytes, None]:
        chunks = self._events(call, answer)
        return stream.packed(chunks, self._config.pack_s) if call.tier.stream == "packed" else chunks

    async def _events(self, call: Call, answer: Answer) -> AsyncGenerator[bytes, None]:
        """The answer's events to the end, or to where it broke, and then an event that says so."""
        guard = self._guard(call)
        try:
            async for chunk in stream.relay(answer.chunks(), call.meter, guard):
                yield chunk
            if not call.meter.done:
                raise UpstreamError("the stream ended without [DONE]")
        except (UpstreamError, stream.StreamError) as error:
            log.warning("%s: the stream broke: %s", call.request_id, error)
            call.meter.failed = True
            yield stream.error_event("upstream_failed", "The answer broke off.")
        if guard and guard.blocked:
            self._counts.modules.labels("guardrail", "blocked").inc()

    def _stream_over(self, call: Call, answer: Answer) -> None:
        answer.close()
        if call.meter.failed:
            self._over(call, 200, "broke_off")
        elif call.meter.done:
            self._over(call, 200, "ok")
        else:
            self._over(call, 499, "client_gone")

    def _over(self, call: Call, status: int, reason: str) -> None:
        """The request has ended, one way or another."""
        took_s = time.monotonic() - call.began_s
        meter = call.meter
        self._counts.requests.labels(status, reason).inc()
        if status == 200:
            self._counts.whole.observe(took_s)
        for kind, tokens in (("prompt", meter.prompt_tokens), ("answer", meter.answer_tokens)):
            if tokens:
                self._counts.tokens.labels(call.route.pool, kind, call.reservation.standing.value).inc(tokens)
        self._settle(call)
        call.span.set_attribute("http.response.status_code", status)
        call.span.end()
        log.info(
            "%s trace=%s key=%s pool=%s route=%s status=%d %s tokens=%d+%d %.3fs",
            *(call.request_id, trace_id(call.span), call.key.name, call.route.pool or "-", call.route.reason or "-"),
            *(status, reason, meter.prompt_tokens, meter.answer_tokens, took_s),
        )

    def _settle(self, call: Call) -> None:
        """Put the budget right, in a task of its own: the request's may be a cancelled one."""

        async def settle() -> None:
            used = call.meter.prompt_tokens + call.meter.answer_tokens
            try:
                await budget.settle(self._store, call.reservation, call.tier, used)
            except StoreDownError:
                self._counts.dependency_failures.labels("redis", "unsettled").inc()

        task = asyncio.create_task(settle())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)


class Streamed(StreamingResponse):
    """A stream whose end is known, even when it never began: `over` is called once, after the last byte or instead."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], headers: dict[str, str], over: Callable[[], None]) -> None:
        super().__init__(chunks, headers=headers, media_type="text/event-stream")
        self._chunks = chunks
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await self.stream_response(send)
        finally:
            try:
                await self._chunks.aclose()
            finally:
                self._over()
