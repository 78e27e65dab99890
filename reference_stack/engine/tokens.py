"""The model's own tokenizer: counts prompts as vLLM counts them, and lends its words to the simulated answers.

The tokenizer and the chat template are read from a Hugging Face model directory. Nothing is approximated: what is
counted here is what real vLLM counts with the same directory.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

ROLE_LINES = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Tokens:
    """A tokenizer and a chat template; without a template of its own a chat is rendered as role lines."""

    tokenizer: Tokenizer
    config: dict[str, Any]

    @classmethod
    def read(cls, directory: Path) -> "Tokens":
        """Read tokenizer.json and tokenizer_config.json. Raises FileNotFoundError when the first is missing."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"There is no tokenizer at {path}.")
        config = directory / "tokenizer_config.json"
        return cls(Tokenizer.from_file(str(path)), json.loads(config.read_text()) if config.is_file() else {})

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The token ids of a text, with the tokenizer's special tokens (BOS) or without.

        Raises UnicodeEncodeError for a text that is none: half of a surrogate pair, which JSON can carry.
        """
        if not text.isascii():
            text.encode()
        # The batch call, unlike the single one, lets other threads run while it works.
        return list(self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """A chat as the prompt that the model sees."""
        named = {name: self.config.get(name, "") for name in ("bos_token", "eos_token")}
        return str(self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **named))

    @cached_property
    def _template(self) -> Any:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(self.config.get("chat_template", ROLE_LINES))

    @cached_property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return int(self.tokenizer.get_vocab_size())

    @cached_property
    def max_chars_per_token(self) -> int:
        """The longest token; a text longer than that many characters per allowed token is refused uncounted."""
        return max(len(token) for token in self.tokenizer.get_vocab())

    @cached_property
    def words(self) -> list[str]:
        """The tokens that are a blank and a whole word of letters, in the order of their ids."""
        pieces = (self.tokenizer.decode([token]) for token in range(self.vocabulary_size))
        return [piece for piece in pieces if piece.startswith(" ") and piece[1:].isalpha()]
