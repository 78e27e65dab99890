"""The token bucket, on a clock of the test's own."""

import pytest

from reference_stack.gateway.limits import RateLimit


def test_burst_then_rate() -> None:
    """After a rest `burst` requests pass at once, then one each interval."""
    limit = RateLimit(rate_per_s=100, burst=200)
    assert [limit.take(b"a", 5.0) for _ in range(200)] == [0.0] * 200
    assert limit.take(b"a", 5.0) == pytest.approx(0.01)
    assert limit.take(b"a", 5.01) == 0.0
    assert limit.take(b"a", 5.01) == pytest.approx(0.01)


def test_steady_rate_never_waits() -> None:
    """A client at exactly the rate is never refused, even after spending its burst."""
    limit = RateLimit(rate_per_s=100, burst=200)
    for _ in range(200):
        limit.take(b"a", 0.0)
    assert all(limit.take(b"a", number / 100) == 0.0 for number in range(1, 2000))


def test_refused_requests_cost_nothing() -> None:
    """A client that keeps asking while refused is let in as soon as one that waited."""
    limit = RateLimit(rate_per_s=10, burst=1)
    limit.take(b"a", 0.0)
    assert all(limit.take(b"a", 0.01) > 0 for _ in range(50))
    assert limit.take(b"a", 0.1) == 0.0


def test_clients_do_not_share() -> None:
    """One client's excess is not another's."""
    limit = RateLimit(rate_per_s=1, burst=1)
    assert limit.take(b"a", 0.0) == 0.0
    assert limit.take(b"a", 0.0) > 0
    assert limit.take(b"b", 0.0) == 0.0


def test_rested_clients_are_forgotten() -> None:
    """A hundred thousand names a client invents one after the other leave only the recent ones in memory."""
    limit = RateLimit(rate_per_s=100, burst=200)
    for number in range(100_000):
        limit.take(b"%d" % number, number / 1000)
    assert len(limit) < 5000
