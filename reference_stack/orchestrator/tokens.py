"""How many tokens will a prompt cost? Counted with the model's own tokenizer before it is sent on.

The engine's template adds a few per message, which are estimated: a reservation is put right when the engine has told.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from reference_stack.orchestrator.prompt import Message, text

PER_MESSAGE = 8  # a template's own tokens around a message, generously
ASIDE_CHARS = 4096  # a longer prompt is counted on a thread, so that no other stream waits for it


class Tokens:
    """The tokenizer in a directory with tokenizer.json."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    async def count(self, messages: Sequence[Message]) -> int:
        """About how many tokens `messages` are."""
        said = "\n".join(map(text, messages))
        count = self._count(said) if len(said) <= ASIDE_CHARS else await asyncio.to_thread(self._count, said)
        return count + PER_MESSAGE * len(messages)

    def _count(self, said: str) -> int:
        # The batch call, unlike the single one, lets other threads run while it works.
        return len(self._tokenizer.encode_batch_fast([said])[0].ids)
