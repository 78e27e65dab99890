"""What a worker says of itself: that it was busy when it was, and idle when it was."""

import time

from harness.drivers.health import Health


def test_work_shows_as_a_share_of_one_core_and_sleep_does_not() -> None:
    """A loop of a fifth of a CPU second is seen as that much of the wall time that it took."""
    health, began_s, used_s = Health(), time.monotonic(), time.process_time()
    while time.process_time() - used_s < 0.2:
        pass
    shares = health.shares()
    expected = 0.2 / (time.monotonic() - began_s)
    assert abs(shares["player.cpu_share"] - expected) < 0.2 * expected
    assert 0.0 <= shares["player.steal_share"] <= 1.0
    assert shares["player.run_delay_share"] >= 0.0
