"""Who asks? API keys from a file that holds only their hashes.

A key is looked at once, when its request comes: an answer that has begun goes on, whatever becomes of the key. The file
is read when a worker starts; SIGHUP to the orchestrator replaces the workers one by one and cuts no stream.
"""

import datetime
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import pydantic
from pydantic import Field

from reference_stack.orchestrator.config import UsageError, document
from reference_stack.orchestrator.refusal import Refusal

Name = Annotated[str, Field(pattern=r"^[\w.@-]{1,64}$")]


class Key(pydantic.BaseModel):
    """One API key: its name, whose it is, what it may have, the SHA-256 of its text in hex, and until when it holds."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: Name
    user: Name
    tier: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    expires: datetime.datetime | None = None


class _File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    keys: list[Key]


class Keys:
    """The keys of an orchestrator; `clock` gives Unix time."""

    def __init__(self, keys: Sequence[Key], clock: Callable[[], float] = time.time) -> None:
        self._by_hash = {key.sha256: key for key in keys}
        self._clock = clock

    def find(self, authorization: str) -> Key:
        """The key in an Authorization header. Refusal (401) when it is none of ours, or no longer."""
        scheme, _, text = authorization.partition(" ")
        # Looked up by its hash, so how long a wrong key takes tells nothing about the right ones.
        key = self._by_hash.get(hashlib.sha256(text.strip().encode()).hexdigest())
        if scheme.lower() != "bearer" or key is None:
            raise Refusal(401, "invalid_api_key", "An API key is needed: Authorization: Bearer KEY.")
        if key.expires and self._clock() >= key.expires.timestamp():
            raise Refusal(401, "expired_api_key", "The API key has expired.")
        return key


def read(path: Path, tiers: Sequence[str]) -> list[Key]:
    """The keys in a file. UsageError when it is not one, or a key is there twice or of no known tier."""
    keys = document(path, _File).keys
    for key in keys:
        if key.tier not in tiers:
            raise UsageError(f"{path}: the key {key.name} is of the tier {key.tier}, which is not in tiers.")
        if key.expires and key.expires.tzinfo is None:
            raise UsageError(f"{path}: the key {key.name} expires at a time without a zone: write ...Z.")
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if len(set(values)) < len(values):
            raise UsageError(f"{path}: two keys have the same {field}.")
    return keys
