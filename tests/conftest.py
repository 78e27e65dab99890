"""What holds for every test.

A shared machine may be slow at any moment, so no property has a deadline. `make check` tries twenty examples of each,
other ones every time, and `make test` many more with `--hypothesis-profile thorough`. Tests that start real processes,
or take as long, carry the marker `e2e`, wherever they stand: whole folders of them get it here.
"""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("quick")

REAL_PROCESSES = [Path(__file__).parent / folder for folder in ("e2e", "contract", "vllm")]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders of which no test is to be run are not even read: that takes as long as many tests."""
    return True if collection_path in REAL_PROCESSES and "not e2e" in config.option.markexpr else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in item.path.parents for folder in REAL_PROCESSES):
            item.add_marker(pytest.mark.e2e)
