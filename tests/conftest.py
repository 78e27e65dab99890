"""What holds for every test.

A shared machine may be slow at any moment, so no property has a deadline. Tests that start real processes, or take as
long, carry the marker `e2e`, wherever they stand: whole folders of them get it here.
"""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

REAL_PROCESSES = [Path(__file__).parent / folder for folder in ("e2e", "contract", "vllm")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in item.path.parents for folder in REAL_PROCESSES):
            item.add_marker(pytest.mark.e2e)
