"""An answer on its way: server-sent events metered, watched, and handed on as they come or in packs.

Nothing here asks who the user is: that was settled when the request came (INC-11). Events pass as the bytes they were;
a chunk that comes in is a chunk that goes out. Pure but for the waiting in `packed`.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson

from reference_stack.orchestrator import guardrail

EVENT_LIMIT_BYTES = 1024 * 1024
DONE = b"data: [DONE]\n\n"

_USAGE = re.compile(rb'"usage":\s*\{')
_COUNTED = b"data: {"


class StreamError(Exception):
    """What comes is no stream of events."""


class Events:
    """Cuts bytes into whole events, however they were cut on the way."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that are whole now. StreamError when one has no end."""
        *whole, self._rest = (self._rest + chunk).split(b"\n\n")
        if len(self._rest) > EVENT_LIMIT_BYTES:
            raise StreamError("an event has no end")
        return [event + b"\n\n" for event in whole]


class Meter:
    """What an answer has used so far: the engine's own numbers once it gives them, until then its events.

    `hide_usage`: the closing event with the numbers was asked for by us, not by the client.
    """

    def __init__(self, prompt_tokens: int, hide_usage: bool) -> None:
        self.prompt_tokens = prompt_tokens
        self.answer_tokens = 0
        self.done = False
        self.failed = False
        self._hide_usage = hide_usage
        self._told = False

    def see(self, event: bytes) -> bool:
        """Take note of an event; whether the client is to have it."""
        if event == DONE:
            self.done = True
        elif _USAGE.search(event):
            document = orjson.loads(event.removeprefix(guardrail.PREFIX))
            self._told = True
            self.take(document["usage"])
            return bool(document.get("choices")) or not self._hide_usage
        elif event.startswith(b'data: {"error"'):
            self.failed = True
        elif not self._told and event.startswith(_COUNTED):
            self.answer_tokens += 1
        return True

    def take(self, usage: dict[str, Any]) -> None:
        """The engine's own numbers."""
        self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        self.answer_tokens = int(usage.get("completion_tokens") or 0)


async def relay(
    chunks: AsyncIterator[bytes], meter: Meter, guard: guardrail.Guardrail | None
) -> AsyncGenerator[bytes, None]:
    """An engine's stream for the client: metered, watched by `guard` if there is one, ended early if it must be."""
    events = Events()
    async for chunk in chunks:
        passed = [event for event in events.feed(chunk) if meter.see(event)]
        if guard:
            passed = _watched(passed, guard)
        if passed:
            yield b"".join(passed)
        if guard and guard.blocked:
            meter.done = True
            return
    if guard and (held := guard.rest()):
        yield b"".join(held)


def _watched(events: list[bytes], guard: guardrail.Guardrail) -> list[bytes]:
    passed: list[bytes] = []
    for event in events:
        if event == DONE:
            passed += [*guard.rest(), event]
            continue
        passed += guard.pass_on(event)
        if guard.blocked:
            return [*passed, guardrail.closing(event), DONE]
    return passed


async def packed(chunks: AsyncGenerator[bytes, None], pack_s: float) -> AsyncGenerator[bytes, None]:
    """The same bytes in packs: what came within `pack_s` of a pack's first byte goes out as one; the end waits not."""
    loop = asyncio.get_running_loop()
    coming = asyncio.ensure_future(_next(chunks))
    try:
        while (chunk := await coming) is not None:
            pack, until_s = [chunk], loop.time() + pack_s
            coming = asyncio.ensure_future(_next(chunks))
            while (await asyncio.wait({coming}, timeout=max(0.0, until_s - loop.time())))[0]:
                if (chunk := coming.result()) is None:
                    break
                pack.append(chunk)
                coming = asyncio.ensure_future(_next(chunks))
            yield b"".join(pack)
    finally:
        coming.cancel()
        await asyncio.wait({coming})
        await chunks.aclose()


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


def error_event(code: str, message: str) -> bytes:
    """What ends a stream that broke: an error where the rest should be, and no [DONE] after it."""
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return guardrail.PREFIX + orjson.dumps({"error": error}) + b"\n\n"
