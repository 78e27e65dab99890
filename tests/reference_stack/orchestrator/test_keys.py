"""Who may ask, and until when."""

import hashlib

import pytest

from reference_stack.orchestrator.keys import Key, Keys
from reference_stack.orchestrator.refusal import Refusal


def keys(now_s: float) -> Keys:
    sha256 = hashlib.sha256(b"secret").hexdigest()
    key = Key.model_validate(
        {"name": "a", "user": "u", "tier": "t", "sha256": sha256, "expires": "2026-12-01T00:00:00Z"}
    )
    return Keys([key], clock=lambda: now_s)


EXPIRES_S = 1_796_083_200.0


def test_found_by_its_hash() -> None:
    """A key is known by its text's hash (ORC-1)."""
    assert keys(EXPIRES_S - 1).find("Bearer secret").name == "a"


@pytest.mark.parametrize("header", ["", "Bearer ", "Bearer wrong", "Basic secret", "secret", "Bearer secret x"])
def test_others_are_refused(header: str) -> None:
    """What is no key of ours gets 401 and no hint."""
    with pytest.raises(Refusal) as caught:
        keys(0).find(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_expired() -> None:
    """A key holds until its time (INC-11)."""
    with pytest.raises(Refusal) as caught:
        keys(EXPIRES_S).find("Bearer secret")
    assert caught.value.code == "expired_api_key"
