"""What the meter reads is what was done."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.machine import Meter, busiest, tree
from tests.support.waiting import until

BURN_S = 5.0  # at most: a test ends it as soon as it has seen enough
BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass\ntime.sleep(60)"
pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("two_cores")]


@pytest.fixture
def burner() -> Iterator[subprocess.Popen[bytes]]:
    """A shell whose child burns CPU and then sleeps."""
    process = subprocess.Popen(["sh", "-c", f"'{sys.executable}' -c '{BURN}'; true"], start_new_session=True)
    yield process
    for pid in tree(process.pid):
        subprocess.run(["kill", "-9", str(pid)], check=False)
    process.wait()


def test_cpu_of_the_whole_tree(burner: subprocess.Popen[bytes]) -> None:
    """CPU that a child of the client burns is the client's, and what was used before the span is not."""
    meter = Meter(burner.pid, [])
    start = (time.monotonic(), 0.0, 0.0, 0.0, 0.0)
    until(lambda: meter.between(start, meter.read()).cpu_s >= 0.3, "the child burnt CPU")
    now = meter.read()
    assert meter.between(now, now).cpu_s == 0


def test_busiest_is_who_works(burner: subprocess.Popen[bytes]) -> None:
    """In a tree of a waiting parent and a working child the child is the busiest."""
    until(lambda: len(tree(burner.pid)) >= 2, "the child is there")
    assert busiest(burner.pid, over_s=0.2) != burner.pid


def test_a_process_that_is_gone() -> None:
    """A tree whose root has ended is empty, and measuring it is no error."""
    process = subprocess.Popen(["true"])
    process.wait()
    meter = Meter(process.pid, [])
    assert tree(process.pid) == []
    assert meter.between(meter.read(), meter.read()).cpu_s == 0
