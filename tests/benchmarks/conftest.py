"""What the benchmarks need of a machine."""

import pytest

from benchmarks.machine import have_two_cores


@pytest.fixture(scope="session")
def two_cores() -> None:
    """Server and client have a core each. Fewer is no reason to pass."""
    if not have_two_cores():
        pytest.fail("the benchmarks need cores 0 and 1: this process may not use both")
