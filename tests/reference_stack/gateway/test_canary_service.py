"""The canary beside its engine, as kubelet and Envoy ask it."""

import asyncio
from collections.abc import Coroutine

import pytest

from reference_stack.gateway.canary import Canary, Health
from reference_stack.gateway.canary_service import CanaryService
from reference_stack.gateway.server import Answer


class Found(Canary):
    """A canary that has found this."""

    def __init__(self, health: Health) -> None:
        super().__init__("http://127.0.0.1:1", "tiny")
        self._found = health

    async def health(self) -> Health:
        return self._found


def status(health: Health, path: str) -> int:
    answer: Answer | Coroutine[None, None, Answer] = CanaryService(Found(health)).handle(path, {}, b"")
    return (answer if isinstance(answer, Answer) else asyncio.run(_awaited(answer))).status


async def _awaited(answer: Coroutine[None, None, Answer]) -> Answer:
    return await answer


@pytest.mark.parametrize(
    ("health", "expected"), [(Health.ALIVE, 200), (Health.BUSY, 200), (Health.DEAD, 503), (Health.LATE, 504)]
)
def test_canary(health: Health, expected: int) -> None:
    """A busy replica is well; a dead one and a late one are not, each in its own way."""
    assert status(health, "/canary") == expected


def test_health_is_its_own() -> None:
    """The service runs, whatever its engine does, and knows no other page."""
    assert status(Health.DEAD, "/health") == 200
    assert status(Health.ALIVE, "/metrics") == 404
