"""The estimator of recovery on series of known truth: how far it is off, and how often it is wrong."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.judge.recovery import Kind, Recovery, find_dips, measure
from harness.judge.statistics import Sample

WITHIN_S, HOLD_S = 30.0, 10.0


RUNS = pytest.mark.parametrize("runs", [40, pytest.param(200, marks=pytest.mark.e2e)])  # 200 take seconds


@dataclass(frozen=True)
class Truth:
    """A service whose users come at random, and are served badly by chance: `usual` before a fault and from `good_s`
    on, `hurt` in between."""

    good_s: float = 25.0
    hurt: float = 0.6
    usual: float = 0.03
    rate_per_s: float = 20.0
    observed_s: float = 90.0

    def seen(self, seed: int) -> Recovery:
        rng = np.random.default_rng(seed)
        before_s, due_s = self._arrivals(rng, 60.0), self._arrivals(rng, self.observed_s)
        usual = Sample.clustered(before_s, rng.random(len(before_s)) < self.usual, 0.0, 60.0)
        share = np.where(due_s < self.good_s, self.hurt, self.usual)
        return measure(due_s, rng.random(len(due_s)) < share, usual, WITHIN_S, HOLD_S)

    def _arrivals(self, rng: np.random.Generator, until_s: float) -> np.ndarray:
        return np.sort(rng.random(rng.poisson(self.rate_per_s * until_s)) * until_s)


def regular(*spans: tuple[float, bool], rate_per_s: float = 20.0) -> tuple[np.ndarray, np.ndarray]:
    """A request every 50 ms, and whether it is bad: spans of so many seconds each."""
    bad = np.concatenate([np.full(round(lasts_s * rate_per_s), is_bad) for lasts_s, is_bad in spans])
    return (np.arange(len(bad)) + 0.5) / rate_per_s, bad


def seen(*spans: tuple[float, bool], usual: tuple[int, int] = (1000, 0)) -> Recovery:
    n, bad = usual
    return measure(*regular(*spans), Sample(n, bad, independent=n), WITHIN_S, HOLD_S)


@pytest.mark.parametrize("truth", [Truth(), Truth(usual=0.0), Truth(hurt=1.0)], ids=["60_to_3", "60_to_0", "100_to_3"])
@RUNS
def test_runs_at_25_s(truth: Truth, runs: int) -> None:
    """At 20 requests/s no number is off by 1 s, no run at a true 25 s is thought to be over 30 s, and the interval
    holds the truth as often as it says."""
    found = [truth.seen(seed) for seed in range(runs)]
    assert {one.kind for one in found} == {Kind.RECOVERED}
    assert max(abs(one.at_s - truth.good_s) for one in found) < 1.0
    assert all(one.hi_s <= WITHIN_S for one in found)
    assert sum(one.lo_s <= truth.good_s <= one.hi_s for one in found) >= 0.9 * runs


@RUNS
def test_runs_at_35_s(runs: int) -> None:
    """Nor is any run at a true 35 s thought to be within 30 s."""
    found = [Truth(good_s=35.0).seen(seed) for seed in range(runs)]
    assert all(one.kind == Kind.RECOVERED and one.lo_s > WITHIN_S for one in found)


@RUNS
def test_runs_without_impact(runs: int) -> None:
    """A service whose share of bad requests stays what it was is not thought to be hurt."""
    assert {Truth(good_s=0.0).seen(seed).kind for seed in range(runs)} == {Kind.UNHURT}


@RUNS
def test_runs_that_never_recover(runs: int) -> None:
    """A service that stays bad has no number, in any run."""
    found = [Truth(good_s=1e9).seen(seed) for seed in range(runs)]
    assert {one.kind for one in found} == {Kind.NEVER}
    assert all(np.isnan([one.at_s, one.lo_s, one.hi_s]).all() for one in found)


def test_slow_arrivals() -> None:
    """At 5 requests/s the interval is wider, and the number still near."""
    found = [one for seed in range(100) if (one := Truth(rate_per_s=5.0, usual=0.01).seen(seed)).kind == Kind.RECOVERED]
    assert len(found) >= 95
    errors_s = np.abs([one.at_s - 25.0 for one in found])
    assert np.quantile(errors_s, 0.9) < 1.5


def test_what_is_told_of_a_dip() -> None:
    """Onset, end, bad time, failed requests and the worst second of a clear-cut dip."""
    found = seen((4, False), (6, True), (40, False))
    assert (found.kind, found.dips, found.failed, found.n) == (Kind.RECOVERED, 1, 120, 1000)
    assert (found.onset_s, found.at_s, found.bad_s) == pytest.approx((4.025, 10.025, 6.0))
    assert (found.worst_s, found.worst_bad, found.worst_n) == (4.0, 20, 20)


def test_a_second_dip_moves_recovery() -> None:
    """All was well for 20 s, and then not: the service has recovered when the second dip is over."""
    found = seen((2, True), (20, False), (3, True), (60, False))
    assert (found.kind, found.dips) == (Kind.RECOVERED, 2)
    assert (found.at_s, found.bad_s) == pytest.approx((25.025, 5.0), abs=0.06)


def test_a_single_failure_is_no_dip() -> None:
    """One request that failed long after the fault is counted, and is no relapse."""
    found = seen((5, True), (40, False), (0.05, True), (40, False))
    assert (found.kind, found.dips, found.failed) == (Kind.RECOVERED, 1, 101)


@pytest.mark.parametrize(
    ("spans", "kind"),
    [
        ([(60, True)], Kind.NEVER),
        ([(25, True)], Kind.TOO_SHORT),
        ([(20, True), (8, False)], Kind.TOO_SHORT),
        ([(5, True), (20, False)], Kind.TOO_SHORT),
        ([(40, True), (5, False)], Kind.NEVER),
        ([(40, True), (15, False)], Kind.RECOVERED),
        ([(5, True), (40, False), (5, True), (20, False)], Kind.RELAPSED),
        ([(5, True), (40, False), (20, True)], Kind.RELAPSED),
        ([(5, True), (40, False), (5, True), (3, False)], Kind.RELAPSED),
        ([(32, True), (20, False), (5, True), (20, False)], Kind.RECOVERED),
        ([(60, False)], Kind.UNHURT),
        ([(20, False)], Kind.TOO_SHORT),
        ([(1, True)], Kind.TOO_SHORT),
    ],
)
def test_kinds(spans: list[tuple[float, bool]], kind: Kind) -> None:
    """Never, relapsed, too short and recovered are told apart; only what recovered has a number."""
    found = seen(*spans)
    assert found.kind == kind
    held = kind in (Kind.RECOVERED, Kind.UNHURT) or (kind == Kind.RELAPSED and spans[-1] == (20, False))
    assert np.isfinite(found.at_s) == held


def test_a_service_that_was_not_well() -> None:
    """Nothing recovers to a state that was bad itself, and nobody knows what was usual from a few requests."""
    assert seen((5, True), (60, False), usual=(1000, 60)).kind == Kind.ALREADY_BAD
    assert seen((5, True), (60, False), usual=(30, 0)).kind == Kind.TOO_SHORT


@given(st.lists(st.tuples(st.integers(1, 25), st.booleans()), min_size=1, max_size=8), st.integers(0, 20))
def test_any_series(spans: list[tuple[int, bool]], usual_bad: int) -> None:
    """Whatever came when: dips are in order and apart, a number lies in its interval, and never has none."""
    due_s, bad = regular(*((float(lasts_s), is_bad) for lasts_s, is_bad in spans))
    found = measure(due_s, bad, Sample(1000, usual_bad, independent=1000), WITHIN_S, HOLD_S)
    if found.kind in (Kind.RECOVERED, Kind.UNHURT):
        assert 0 <= found.lo_s <= found.at_s <= found.hi_s
    if found.kind in (Kind.NEVER, Kind.TOO_SHORT, Kind.ALREADY_BAD):
        assert np.isnan(found.at_s)
    dips = find_dips(due_s, bad, 0.01)
    moments = [moment_s for dip in dips for moment_s in (dip.starts.at_s, dip.ends.at_s)]
    assert moments == sorted(moments)
    assert {type(moment_s) for moment_s in moments} <= {float}
    for dip in dips:
        assert dip.starts.lo_s <= dip.starts.at_s <= dip.starts.hi_s
        assert dip.ends.lo_s <= dip.ends.at_s <= dip.ends.hi_s
