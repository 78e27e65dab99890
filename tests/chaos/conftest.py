import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "toys"))

from scene import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A toy fault in processes of its own; nothing of it outlives the test."""
    scene = Scene(tmp_path)
    yield scene
    scene.close()
