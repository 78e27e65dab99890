"""Does a replica still answer? One token asked of it, with a deadline.

/health says 200 while the engine behind it is frozen, so the question is a real completion. Late is not dead: a replica
that goes on producing tokens for others is busy, and to take it out would kill the next one. It asks at most once a
second, whoever wants to know.
"""

import asyncio
import enum
import re
import time
from urllib.parse import urlsplit

import orjson

INTERVAL_S = 1.0
DEADLINE_S = 1.5
METRICS_DEADLINE_S = 1.0  # with the other, less than Envoy waits

_TOKENS = re.compile(rb"^vllm:(?:prompt|generation)_tokens_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)


class Health(enum.Enum):
    """What the canary found; the value is the HTTP status that tells Envoy."""

    ALIVE = 200
    BUSY = 202
    DEAD = 503
    LATE = 504


class Canary:
    """The canary of one replica, at `url`, serving `model`."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._question = orjson.dumps({"model": model, "prompt": "canary", "max_tokens": 1, "temperature": 0})
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[Health] | None = None
        self._tokens_when_late: float | None = None

    async def health(self) -> Health:
        """How the replica is now, or was less than a second ago."""
        now_s = time.monotonic()
        if self._asking is None or now_s - self._asked_s >= INTERVAL_S:
            self._asked_s = now_s
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Health:
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await self._fetch(b"POST /v1/completions", self._question)
        except TimeoutError:
            return await self._busy_or_late()
        except OSError:
            return Health.DEAD
        self._tokens_when_late = None
        return Health.ALIVE if answer.startswith(b"HTTP/1.1 200 ") else Health.DEAD

    async def _busy_or_late(self) -> Health:
        """Busy when tokens were made since the last time it was late; the first time nothing can be said for it."""
        before, self._tokens_when_late = self._tokens_when_late, await self._tokens()
        if before is None or self._tokens_when_late is None:
            return Health.LATE
        return Health.BUSY if self._tokens_when_late != before else Health.LATE

    async def _tokens(self) -> float | None:
        try:
            async with asyncio.timeout(METRICS_DEADLINE_S):
                found = _TOKENS.findall(await self._fetch(b"GET /metrics", b""))
        except OSError:
            return None
        return sum(map(float, found)) if found else None

    async def _fetch(self, line: bytes, body: bytes) -> bytes:
        """One exchange on a connection of its own; the answer, head and all."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = b"%s HTTP/1.1\r\nHost: canary\r\nConnection: close\r\nX-Request-Id: canary\r\n" % line
            writer.write(head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            return await reader.read(-1)
        finally:
            # Closing tells the engine to drop what it has not answered.
            writer.close()
