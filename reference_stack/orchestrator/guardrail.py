"""What an answer must not say is not sent, however its text is cut into events. Pure.

It looks for phrases, whatever their case, in the text that a user would read. An event is held back while its text
could be the beginning of a phrase, so nothing of one ever leaves. It refuses to judge meaning, and it rewrites nothing:
an answer that breaks the rule ends, with the finish reason "content_filter".
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import orjson

PREFIX = b"data: "


class Guardrail:
    """The watch over one answer."""

    def __init__(self, phrases: Sequence[str]) -> None:
        self._phrases = [phrase.casefold() for phrase in phrases]
        self._reach = max(map(len, self._phrases)) - 1  # characters that may belong to a phrase not yet whole
        self._held: deque[tuple[bytes, int]] = deque()
        self._text = ""  # of the events held
        self.blocked = False

    def breaks(self, text: str) -> bool:
        """Whether a whole text says a phrase."""
        folded = text.casefold()
        return any(phrase in folded for phrase in self._phrases)

    def pass_on(self, event: bytes) -> list[bytes]:
        """The events that may leave now that this one came; none any more once `blocked`."""
        if self.blocked:
            return []
        said = _said(event).casefold()  # letter by letter, so that it does not matter where a text is cut
        self._text += said
        if any(phrase in self._text for phrase in self._phrases):
            self.blocked = True
            self._held.clear()
            return []
        self._held.append((event, len(said)))
        return self._release()

    def rest(self) -> list[bytes]:
        """What is still held when the answer is over and clean."""
        events = [event for event, _ in self._held]
        self._held.clear()
        return events

    def _release(self) -> list[bytes]:
        """Events with so much text after them that a phrase which began in one would be whole, and found."""
        left: list[bytes] = []
        while self._held and len(self._text) - self._held[0][1] >= self._reach:
            event, length = self._held.popleft()
            left.append(event)
            self._text = self._text[length:]
        return left


def closing(event: bytes) -> bytes:
    """The event that ends a blocked answer, made from one of its own for the sake of its id and model."""
    document = _document(event) or {}
    document["choices"] = [{"index": 0, "delta": {}, "finish_reason": "content_filter"}]
    document.pop("usage", None)
    return PREFIX + orjson.dumps(document) + b"\n\n"


def blocked_answer(document: dict[str, Any]) -> dict[str, Any]:
    """A whole answer with nothing said."""
    choices = [
        {**choice, "message": {"role": "assistant", "content": ""}, "finish_reason": "content_filter", "logprobs": None}
        for choice in document.get("choices", [])
    ]
    return {**document, "choices": choices}


def whole_text(document: dict[str, Any]) -> str:
    """The text of a whole answer."""
    return "".join(_words(choice.get("message")) for choice in document.get("choices", []) if isinstance(choice, dict))


def _said(event: bytes) -> str:
    """The text that an event adds to its answer."""
    choices = (_document(event) or {}).get("choices") or []
    return "".join(_words(choice.get("delta")) for choice in choices if isinstance(choice, dict))


def _words(part: Any) -> str:
    if not isinstance(part, dict):
        return ""
    return "".join(word for name in ("reasoning_content", "content") if isinstance(word := part.get(name), str))


def _document(event: bytes) -> dict[str, Any] | None:
    try:
        document = orjson.loads(event.removeprefix(PREFIX))
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None
