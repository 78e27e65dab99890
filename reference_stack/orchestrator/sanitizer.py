"""A prompt without what a person cannot see in it, and without orders to the house. Pure.

It takes out control and invisible characters, which hide words from whoever reads a log, and system messages that only
the house may write. What is forbidden it refuses; it does not try to understand a prompt.
"""

import unicodedata
from collections.abc import Sequence
from typing import Any

from reference_stack.orchestrator.config import Sanitizer
from reference_stack.orchestrator.prompt import Message
from reference_stack.orchestrator.refusal import Refusal

_KEPT = "\n\t\r\u200c\u200d"  # the joiners make words in Persian and Hindi, and faces in emoji


def sanitize(messages: Sequence[Message], rules: Sanitizer) -> list[Message]:
    """The messages, cleaned. Refusal (400) when one says what is forbidden, or when none are left."""
    clean = [
        {**message, "content": _clean(message["content"])} if "content" in message else message
        for message in messages
        if not (rules.drop_system_messages and message.get("role") == "system")
    ]
    if not clean:
        raise Refusal(400, "empty_prompt", "messages holds nothing but system messages.", "messages")
    said = "\n".join(_texts(message.get("content")) for message in clean).casefold()
    if any(phrase.casefold() in said for phrase in rules.forbidden):
        raise Refusal(400, "forbidden_prompt", "The prompt says what it must not.", "messages")
    return clean


def _clean(content: Any) -> Any:
    if isinstance(content, str):
        return visible(content)
    if isinstance(content, list):
        return [
            {**part, "text": visible(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    return content


def _texts(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return content if isinstance(content, str) else ""


def visible(text: str) -> str:
    """A text without its control (Cc) and format (Cf) characters; most texts have none and come back as they are."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(sign for sign in text if sign in _KEPT or unicodedata.category(sign) not in ("Cc", "Cf"))
