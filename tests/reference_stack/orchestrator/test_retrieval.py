"""Notes for a question, from documents that share its words (ORC-1)."""

import asyncio
import math
from pathlib import Path

import pytest

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
