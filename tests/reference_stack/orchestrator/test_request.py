"""Requests within bounds: what is refused before anything is spent on it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from reference_stack.orchestrator.config import Answers
from reference_stack.orchestrator.refusal import Refusal
from reference_stack.orchestrator.request import answer_tokens, read_body, read_chat

JSON = "application/json; charset=utf-8"
HELLO = b'{"messages":[{"role":"user","content":"hello"}]}'


def nested(depth: int) -> bytes:
    return b'{"messages":[{"role":"user","content":"x","a":' + b"[" * depth + b"]" * depth + b"}]}"


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code"),
    [
        (b" ", JSON, 400, "empty_body"),
        (HELLO, "text/plain", 415, "wrong_content_type"),
        (b"{", JSON, 400, "bad_json"),
        (b"[]", JSON, 400, "bad_json"),
        (b'{"prompt":"x"}', JSON, 422, "missing_prompt"),
        (b'{"messages":[]}', JSON, 400, "empty_prompt"),
        (b'{"messages":["x"]}', JSON, 400, "bad_messages"),
        (b'{"messages":"x"}', JSON, 400, "bad_messages"),
        (nested(30), JSON, 400, "too_deep"),
        (nested(100_000), JSON, 400, "bad_json"),
    ],
)
def test_refused(body: bytes, content_type: str, status: int, code: str) -> None:
    """Each wrong request has its status and its word; a trap of brackets is one of them (INC-13)."""
    with pytest.raises(Refusal) as caught:
        read_chat(body, content_type, 32)
    assert (caught.value.status, caught.value.code) == (status, code)


def test_many_brackets_are_no_depth() -> None:
    """A long conversation is wide, not deep."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "[{"}]}] * 50
    assert read_chat(orjson.dumps({"messages": messages}), JSON, 32)["messages"] == messages
    assert read_chat(nested(29), JSON, 32)


async def pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * 10


def test_body_limit() -> None:
    """A body ends at its limit, however it comes."""
    assert len(asyncio.run(read_body(pieces(10), 100))) == 100
    with pytest.raises(Refusal, match="over 99 bytes"):
        asyncio.run(read_body(pieces(10**9), 99))


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 8, "max_tokens": 7}, 8)],
)
def test_answer_tokens(fields: dict[str, Any], tokens: int) -> None:
    """An answer's length is the client's, or the default."""
    assert answer_tokens(fields, Answers(default=16, at_most=64)) == tokens


@pytest.mark.parametrize("fields", [{"max_tokens": 65}, {"max_tokens": 0}, {"max_tokens": True}, {"n": 2}])
def test_too_much_is_refused(fields: dict[str, Any]) -> None:
    """An answer has an end that the budget can know before (ORC-2)."""
    with pytest.raises(Refusal):
        answer_tokens(fields, Answers(default=16, at_most=64))
