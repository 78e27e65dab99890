"""Events on their way: cut, metered, packed."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_stack.orchestrator.guardrail import Guardrail
from reference_stack.orchestrator.stream import DONE, EVENT_LIMIT_BYTES, Events, Meter, StreamError, packed, relay


def event(text: str) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"delta": {"content": text}}]}) + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
ANSWER = event("one") + event('two "usage":{') + USAGE + DONE


@given(st.lists(st.integers(0, len(ANSWER)), max_size=12))
def test_any_cut(cuts: list[int]) -> None:
    """However the bytes are cut, the events are the same."""
    edges = [0, *sorted(cuts), len(ANSWER)]
    events = Events()
    found = [one for start, end in itertools.pairwise(edges) for one in events.feed(ANSWER[start:end])]
    assert found == [event("one"), event('two "usage":{'), USAGE, DONE]


def test_an_event_without_end() -> None:
    """What never ends is no event."""
    with pytest.raises(StreamError):
        Events().feed(b"x" * (EVENT_LIMIT_BYTES + 1))


async def cut(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def all_of(chunks: AsyncIterator[bytes]) -> list[bytes]:
    return [chunk async for chunk in chunks]


def test_meter_takes_the_engines_numbers() -> None:
    """The engine's own counts replace ours; the event with them is the client's only if it asked (ORC-2)."""
    meter = Meter(5, hide_usage=True)
    assert b"".join(asyncio.run(all_of(relay(cut(ANSWER), meter, None)))) == ANSWER.replace(USAGE, b"")
    assert (meter.prompt_tokens, meter.answer_tokens, meter.done) == (7, 2, True)
    asked = Meter(5, hide_usage=False)
    assert asyncio.run(all_of(relay(cut(ANSWER), asked, None))) == [ANSWER]


def test_meter_counts_events_until_then() -> None:
    """A stream that is left early has cost what came of it."""
    meter = Meter(5, hide_usage=True)
    asyncio.run(all_of(relay(cut(event("a"), event("b")), meter, None)))
    assert (meter.prompt_tokens, meter.answer_tokens, meter.done) == (5, 2, False)


def test_guarded_stream() -> None:
    """A stream that says a phrase ends there, with a reason and [DONE] (ORC-4)."""
    meter = Meter(5, hide_usage=True)
    chunks = cut(event("fine "), event("top se"), event("cret stuff"), event("more"), DONE)
    sent = b"".join(asyncio.run(all_of(relay(chunks, meter, Guardrail(["top secret"])))))
    assert b"top" not in sent
    assert b"more" not in sent
    assert b'"content_filter"' in sent
    assert sent.endswith(DONE)


def test_chunk_in_chunk_out() -> None:
    """A stream that nobody guards passes chunk by chunk, as it came."""
    chunks = [event("a") + event("b"), event("c"), DONE]
    assert asyncio.run(all_of(relay(cut(*chunks), Meter(0, hide_usage=True), None))) == chunks


def test_packs() -> None:
    """What comes within the time of a pack goes out as one; the end does not wait for it (S1-6)."""

    async def story() -> tuple[list[bytes], float]:
        gate = asyncio.Event()

        async def source() -> AsyncGenerator[bytes, None]:
            yield b"a"
            yield b"b"
            await gate.wait()
            yield b"c"
            yield b"d"

        began = asyncio.get_running_loop().time()
        packs = packed(source(), 0.1)
        first = await anext(packs)
        gate.set()
        return [first, *await all_of(packs)], asyncio.get_running_loop().time() - began

    packs, took_s = asyncio.run(story())
    assert packs == [b"ab", b"cd"]
    assert took_s < 10 * 0.1


def test_a_pack_that_nobody_waits_for() -> None:
    """Leaving a packed stream ends what feeds it."""

    async def story() -> bool:
        ended = asyncio.Event()

        async def source() -> AsyncGenerator[bytes, None]:
            try:
                yield b"a"
                await asyncio.Event().wait()
            finally:
                ended.set()

        packs = packed(source(), 0.01)
        await anext(packs)
        await packs.aclose()
        return ended.is_set()

    assert asyncio.run(story())
