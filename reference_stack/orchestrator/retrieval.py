"""Notes for a question: the documents nearest to it, from a Qdrant in this process or a server of it.

Texts become vectors by hashing their words: no model, no download, the same numbers everywhere. It finds documents that
share words with a question, and that is all it claims. Without an answer in time a question goes on without notes.
"""

import asyncio
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from reference_stack.orchestrator.config import Retrieval, UsageError

if TYPE_CHECKING:
    from qdrant_client import AsyncQdrantClient

DIMENSIONS = 384
READ_CHARS = 4096  # of a text: enough to know what it is about, and a bound on the work

_WORDS = re.compile(r"[^\W_]+")
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")  # scripts without blanks: pairs of signs are words


class LibraryDownError(Exception):
    """Qdrant did not answer, or not in time."""


def embed(text: str) -> list[float]:
    """A text as a vector of length 1 (0 for a text without words)."""
    vector = [0.0] * DIMENSIONS
    for word in _words(text[:READ_CHARS].casefold()):
        number = zlib.crc32(word.encode())
        vector[(number >> 1) % DIMENSIONS] += 1.0 if number & 1 else -1.0
    length = math.sqrt(sum(value * value for value in vector))
    return [value / length for value in vector] if length else vector


def _words(text: str) -> list[str]:
    words: list[str] = []
    for word in _WORDS.findall(text):
        if len(word) > 1 and _UNSPACED.search(word):
            words += [word[start : start + 2] for start in range(len(word) - 1)]
        else:
            words.append(word)
    return words


def read_documents(path: Path) -> list[str]:
    """The texts in a file with one JSON object with a `text` a line. UsageError when it is not one."""
    texts = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        try:
            text = orjson.loads(line)["text"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise UsageError(f'{path}:{number}: must be a JSON object with a text: {{"text": "..."}}.')
        texts.append(text)
    return texts


class Library:
    """The documents of one worker."""

    def __init__(self, config: Retrieval) -> None:
        self._config = config
        self._client = _client(config)

    async def load(self, texts: Sequence[str]) -> None:
        """Put documents into the Qdrant of this process."""
        from qdrant_client import models

        vectors = models.VectorParams(size=DIMENSIONS, distance=models.Distance.COSINE)
        await self._client.create_collection(self._config.collection, vectors_config=vectors)
        points = [
            models.PointStruct(id=number, vector=embed(text), payload={"text": text})
            for number, text in enumerate(texts)
        ]
        if points:
            await self._client.upsert(self._config.collection, points)

    async def find(self, question: str) -> list[str]:
        """The texts nearest to a question, nearest first; none for a question without words. LibraryDownError."""
        vector = embed(question)
        if not any(vector):
            return []
        try:
            async with asyncio.timeout(self._config.timeout_s):
                found = await self._client.query_points(
                    self._config.collection,
                    query=vector,
                    limit=self._config.limit,
                    score_threshold=self._config.at_least,
                )
        except Exception as error:  # the client lets through what its HTTP library and its parser raise
            raise LibraryDownError(f"{type(error).__name__}: {error}") from None
        texts = [(point.payload or {}).get("text") for point in found.points]
        return [text for text in texts if isinstance(text, str)]

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()


def _client(config: Retrieval) -> "AsyncQdrantClient":
    from qdrant_client import AsyncQdrantClient

    if config.url:
        # It asks for the server's version when it is made, and warns when nobody answers: not our way to find out.
        return AsyncQdrantClient(url=config.url, timeout=math.ceil(config.timeout_s), check_compatibility=False)
    return AsyncQdrantClient(":memory:")
