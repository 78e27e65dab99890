"""A chat request as it came: read within bounds, and the fields that the orchestrator itself must understand.

It refuses what would cost without being a question: too large, too slow to arrive, nested like a trap (INC-13), no
JSON, no messages; with the statuses that the gateway has for them. What the engine alone can judge it leaves to it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson

from reference_stack.orchestrator.config import Answers
from reference_stack.orchestrator.refusal import Refusal

ARRIVAL_LIMIT_S = 30.0


async def read_body(chunks: AsyncIterator[bytes], limit_bytes: int) -> bytes:
    """A request's body. Refusal: 413 when it is over the limit, 408 when it does not arrive."""
    body = bytearray()
    try:
        async with asyncio.timeout(ARRIVAL_LIMIT_S):
            async for chunk in chunks:
                body += chunk
                if len(body) > limit_bytes:
                    raise Refusal(413, "body_too_large", f"The request body is over {limit_bytes} bytes.")
    except TimeoutError:
        raise Refusal(408, "body_too_slow", f"The request body took over {ARRIVAL_LIMIT_S:g} s.") from None
    return bytes(body)


def read_chat(body: bytes, content_type: str, depth_limit: int) -> dict[str, Any]:
    """The request's document, with at least one message. Refusal: 400, 415 or 422."""
    if not body.strip():
        raise Refusal(400, "empty_body", "The request body is empty.")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "wrong_content_type", "The content type must be application/json.")
    try:
        document = orjson.loads(body)  # gives up by itself at a depth of 1,024
    except orjson.JSONDecodeError as error:
        raise Refusal(400, "bad_json", f"The request body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise Refusal(400, "bad_json", "The request body must be a JSON object.")
    if body.count(b"[") + body.count(b"{") > depth_limit and _deeper(document, depth_limit):
        raise Refusal(400, "too_deep", f"The request is nested deeper than {depth_limit} levels.")
    if "messages" not in document:
        raise Refusal(422, "missing_prompt", "The request has no messages.", "messages")
    messages = document["messages"]
    if not messages:
        raise Refusal(400, "empty_prompt", "messages is empty.", "messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise Refusal(400, "bad_messages", "messages must be a list of objects.", "messages")
    return document


def _deeper(document: Any, limit: int) -> bool:
    """Whether it is nested deeper than `limit`; level by level, so that its own depth is not ours."""
    level = [document]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def answer_tokens(document: dict[str, Any], answers: Answers) -> int:
    """How long the answer may become. Refusal (400): not a number, too large, or several answers are wanted."""
    if document.get("n", 1) != 1:
        raise Refusal(400, "unsupported", "n must be 1.", "n")
    for field in ("max_completion_tokens", "max_tokens"):
        wanted = document.get(field)
        if wanted is None:
            continue
        if not isinstance(wanted, int) or isinstance(wanted, bool) or not 0 < wanted <= answers.at_most:
            raise Refusal(400, f"bad_{field}", f"{field} must be a whole number up to {answers.at_most}.", field)
        return wanted
    return answers.default
