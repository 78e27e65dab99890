"""Notes for a question, from documents that share its words (ORC-1)."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from reference_stack.orchestrator.config import Retrieval
from reference_stack.orchestrator.retrieval import Library, LibraryDownError, embed

TEXTS = ["Refunds are paid within 14 days.", "The office is open on weekdays.", "退款将在十四天内支付"]


def likeness(one: str, other: str) -> float:
    return sum(a * b for a, b in zip(embed(one), embed(other), strict=True))


def test_embedding() -> None:
    """A text is like itself whatever its case, more like one that shares words, and its vector is always the same."""
    assert math.isclose(likeness(TEXTS[0], TEXTS[0].upper()), 1.0)
    assert likeness("when are refunds paid", TEXTS[0]) > 0.4 > likeness("when are refunds paid", TEXTS[1])
    assert likeness("退款多久", TEXTS[2]) > 0.15
    assert [number for number, value in enumerate(embed("hello")) if value] == [323]
    assert not any(embed(" !? "))


def test_embedded_qdrant() -> None:
    """The documents nearest to a question come back, and none for a question without words."""

    async def story() -> list[list[str]]:
        library = Library(Retrieval(documents=Path("unused"), limit=2, at_least=0.3))
        await library.load(TEXTS)
        try:
            return [await library.find(question) for question in ("when are refunds paid?", "!!!", "bananas")]
        finally:
            await library.close()

    assert asyncio.run(story()) == [[TEXTS[0]], [], []]


@pytest.mark.parametrize("late", [False, True])
def test_a_server(late: bool) -> None:
    """A Qdrant server is asked for the nearest points of the collection; one that is late is as good as none."""
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if late:
            await asyncio.sleep(30)
        point = {"id": 1, "version": 0, "score": 0.9, "payload": {"text": TEXTS[0]}}
        return web.json_response({"result": {"points": [point]}, "status": "ok", "time": 0.001})

    async def story() -> list[str]:
        app = web.Application()
        app.add_routes([web.post("/collections/shop/points/query", answer)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        config = Retrieval(
            url=f"http://127.0.0.1:{runner.addresses[0][1]}", collection="shop", limit=2, timeout_s=0.2 if late else 10
        )
        library = Library(config)
        try:
            return await library.find("refunds")
        finally:
            await library.close()
            await runner.cleanup()

    if late:
        with pytest.raises(LibraryDownError):
            asyncio.run(story())
    else:
        assert asyncio.run(story()) == [TEXTS[0]]
    assert (asked[0]["limit"], asked[0]["score_threshold"]) == (2, 0.2)
    assert asked[0]["query"] == {"nearest": pytest.approx(embed("refunds"))}


def test_a_server_that_is_not_there() -> None:
    """A Qdrant that does not answer is told as that."""

    async def story() -> None:
        library = Library(Retrieval(url="http://127.0.0.1:9"))
        try:
            await library.find("hello")
        finally:
            await library.close()

    with pytest.raises(LibraryDownError):
        asyncio.run(story())
