"""The gateway's guard: Envoy asks it about every request that costs something, and about every replica.

  any /decide/PATH   may this request pass? 200, or the refusal that the client gets
  GET /canary        is the replica that the Host header names well? (Envoy can vary the host, not the path)
  GET /canary/NAME   the same, for people
  GET /metrics       what was decided, by reason
  GET /health        200

It holds no request: a large body is read in a thread, so that nobody waits for somebody else's ten megabytes.
"""

import argparse
import asyncio
import math
import os
import signal
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import prometheus_client

from reference_stack.gateway.canary import Canary, Health
from reference_stack.gateway.decision import Decision, Request, decide
from reference_stack.gateway.limits import RateLimit
from reference_stack.gateway.server import Answer, Exchange, Headers
from reference_stack.gateway.tokens import Tokens

RATE_PER_S = 100.0
BURST = 200


class Guard:
    """The decisions of one gateway: its tokenizer, its clients' buckets, its canaries and its counts."""

    def __init__(self, tokens: Tokens, prompt_limit: int, canaries: dict[str, Canary]) -> None:
        self._tokens = tokens
        self._prompt_limit = prompt_limit
        self._canaries = canaries
        self._well: set[str] = set()  # the replicas that Envoy was last told to use
        self._rate = RateLimit(RATE_PER_S, BURST)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="decide")
        self._registry = prometheus_client.CollectorRegistry()
        self._decided = prometheus_client.Counter(
            "gateway_requests_total", "Requests decided.", ["decision", "reason"], registry=self._registry
        )
        self._checked = prometheus_client.Counter(
            "gateway_canary_total", "Canaries sent, by what they found.", ["replica", "result"], registry=self._registry
        )

    def handle(self, path: str, headers: Headers, body: bytes) -> Answer | Coroutine[None, None, Answer]:
        """The answer to one request of Envoy's, or of a person's."""
        if path.startswith("/decide/"):
            return self._decide(path.removeprefix("/decide"), headers, body)
        if path == "/canary":
            return self._canary(headers.get(b"host", b"").decode("latin-1"))
        if path.startswith("/canary/"):
            return self._canary(path.removeprefix("/canary/"))
        if path == "/metrics":
            return Answer(200, prometheus_client.generate_latest(self._registry), b"text/plain; version=0.0.4")
        return Answer(200) if path == "/health" else Answer(404)

    def _decide(self, path: str, headers: Headers, body: bytes) -> Answer | Coroutine[None, None, Answer]:
        wait_s = self._rate.take(client_of(headers), time.monotonic())
        if wait_s > 0:
            message = f"More than {RATE_PER_S:g} requests a second: try again later."
            return self._counted(Decision(429, "rate_limited", message, retry_after_s=math.ceil(wait_s)))
        request = Request(path, headers.get(b"content-type", b"").decode("latin-1"), body)
        # A body of no more bytes than the limit has tokens cannot need the exact count: cheap enough to decide here.
        if len(body) <= self._prompt_limit:
            return self._counted(decide(request, self._tokens, self._prompt_limit))
        return self._decide_in_thread(request)

    async def _decide_in_thread(self, request: Request) -> Answer:
        loop = asyncio.get_running_loop()
        return self._counted(
            await loop.run_in_executor(self._threads, decide, request, self._tokens, self._prompt_limit)
        )

    def _counted(self, decision: Decision) -> Answer:
        self._decided.labels("allowed" if decision.allowed else "rejected", decision.reason).inc()
        wait = {} if decision.retry_after_s is None else {b"retry-after": b"%d" % decision.retry_after_s}
        return Answer(decision.status, decision.body(), headers=wait)

    async def _canary(self, replica: str) -> Answer:
        """How a replica is. The last one in use stays in use while it is only late: to take it out would cut what it
        serves, and nobody else could take what comes."""
        canary = self._canaries.get(replica)
        if canary is None:
            return Answer(404)
        health = await canary.health()
        self._checked.labels(replica, health.name.lower()).inc()
        if health in (Health.ALIVE, Health.BUSY) or (health is Health.LATE and self._well == {replica}):
            self._well.add(replica)
            return Answer(200)
        self._well.discard(replica)
        return Answer(health.value)


def client_of(headers: Headers) -> bytes:
    """Who asks: its key if it shows one, else the address Envoy saw (the last of X-Forwarded-For; Envoy wrote it)."""
    key = headers.get(b"authorization")
    return b"key " + key if key else b"address " + headers.get(b"x-forwarded-for", b"").rpartition(b",")[2].strip()


async def serve(guard: Guard, port: int) -> None:
    """Answer on 127.0.0.1:`port` until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: Exchange(guard.handle), "127.0.0.1", port, backlog=1024)
    await stop.wait()
    server.close()


def main() -> None:
    """The door: python -m reference_stack.gateway.guard."""
    parser = argparse.ArgumentParser(prog="guard", description="Decide which requests reach an engine.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with tokenizer.json")
    parser.add_argument("--prompt-limit", type=int, required=True, help="tokens")
    parser.add_argument("--model", required=True, help="the name the engines serve")
    parser.add_argument("--engine", action="append", default=[], help="URL of a replica; repeat for each")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a count is one prompt: no threads of its own
    canaries = {f"engine-{number}": Canary(url, options.model) for number, url in enumerate(options.engine)}
    asyncio.run(serve(Guard(Tokens(options.tokenizer), options.prompt_limit, canaries), options.port))


if __name__ == "__main__":
    main()
