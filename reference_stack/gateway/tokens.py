"""How long is a prompt? Counted as the engine counts it: special tokens and chat template included.

A byte-level BPE tokenizer never makes more tokens than there are UTF-8 bytes, so most prompts are known to fit without
being tokenised. It refuses to guess: what the bytes do not settle is counted exactly, with the model's own tokenizer.
"""

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

CHARS_PER_TOKEN = (
    15  # vLLM's own bound: a text of more characters than this per token of the limit is refused uncounted
)


class TooManyTokensError(Exception):
    """The prompts of one request hold more tokens than the limit."""


class Tokens:
    """The token counts of one model, from the directory that holds its tokenizer.json."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._added = len(self._tokenizer.encode("").ids)
        config_file = directory / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config_file.read_text()) if config_file.exists() else {}
        template_file = directory / "chat_template.jinja"
        template = template_file.read_text() if template_file.exists() else self._config.get("chat_template")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(template) if template else None

    def check_texts(self, texts: list[str], limit: int) -> None:
        """Raise TooManyTokensError when one of `texts`, with the engine's special tokens, has more than `limit`.

        Together they may hold no more characters than a single one, or a long list would cost what no text may.
        """
        characters = sum(map(len, texts))
        if characters > CHARS_PER_TOKEN * limit:
            raise TooManyTokensError(f"The prompt has {characters} characters; at most {limit} tokens are allowed.")
        for text in texts:
            if len(text.encode()) + self._added > limit:
                self._count(text, limit, special=True)

    def check_chat(self, messages: list[dict[str, Any]], tools: Any, limit: int) -> None:
        """Raise TooManyTokensError when `messages`, as the chat template writes them, have more than `limit` tokens."""
        flat = [{**message, "content": _text(message.get("content"))} for message in messages]
        characters = sum(len(message["content"]) for message in flat)
        if characters > CHARS_PER_TOKEN * limit:
            raise TooManyTokensError(f"The messages have {characters} characters; at most {limit} tokens are allowed.")
        rendered = self._render(flat, tools)
        if len(rendered.encode()) > limit:
            self._count(rendered, limit, special=False)

    def _render(self, messages: list[dict[str, Any]], tools: Any) -> str:
        bare = "\n".join(message["content"] for message in messages)
        if self._template is None:
            return bare
        words = {name: _word(self._config.get(name)) for name in ("bos_token", "eos_token")}
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=True, **words)
        except TemplateError:
            # The engine will refuse these messages in its own words; what they hold is bounded all the same.
            return bare

    def _count(self, text: str, limit: int, special: bool) -> None:
        # The batch call, unlike the single one, lets other threads run while it works.
        count = len(self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        if count > limit:
            raise TooManyTokensError(f"The prompt has {count} tokens; at most {limit} are allowed.")


def _text(content: Any) -> str:
    """A message's content as the engine flattens it: a string, or the text parts of a list, one a line."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _word(token: Any) -> str:
    """A special token as tokenizer_config.json writes it: a string, or an object with its content."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
