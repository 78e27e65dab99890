"""One run at a time."""

import os
from pathlib import Path

import pytest

from harness import evidence
from harness.model import UsageError


def test_a_second_run_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    """Two would load, break and judge each other's stack; afterwards there is room for the next."""
    with (
        evidence.only_run(tmp_path),
        pytest.raises(UsageError, match=rf"another run is going on under .*\(pid {os.getpid()}\)"),
        evidence.only_run(tmp_path),
    ):
        pytest.fail("two runs at once")
    with evidence.only_run(tmp_path):
        pass
