import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from running import ROOT, harness, simulated_engine


@pytest.fixture(scope="module")
def stack() -> Iterator[None]:
    """The local stack with the simulated engine, up for the tests of one module."""
    up = harness("stack", "up")
    assert up.returncode == 0, up.stdout + up.stderr
    yield
    harness("stack", "down")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[str, int]]:
    with simulated_engine(tmp_path) as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def tiny() -> None:
    assert (ROOT / ".cache/tiny/tokenizer.json").exists(), "the tiny tokenizer is missing: run `make setup`"
