"""A fault is there while it is said to be, and gone after."""

import psutil
import pytest

from benchmarks.faults import blocked_loop, hog

pytestmark = pytest.mark.e2e  # starts real processes


def test_blocked_loop_blocks_and_lets_go() -> None:
    """The process is seen stopped while the fault lasts, and runs again after it."""
    process = psutil.Popen(["sleep", "60"])
    try:
        with blocked_loop(process.pid):
            seen = {process.status() for _ in range(20_000)}
        assert psutil.STATUS_STOPPED in seen
        assert process.status() != psutil.STATUS_STOPPED
    finally:
        process.kill()
        process.wait()


def test_hog_leaves() -> None:
    """The burners run while the fault lasts and are gone after it."""
    with hog(0):
        burners = psutil.Process().children()
        assert len(burners) == 2
    assert not any(burner.is_running() for burner in burners)
