import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.drivers import player

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))


@pytest.fixture(scope="module", autouse=True)
def hurry() -> Iterator[None]:
    """A player sees that all is over at its next round: nobody wants to wait a quarter of a second for that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(player, "TICK_S", 0.05)
        yield
