"""The arithmetic of arrivals: rates, burstiness, curves, and that a split over workers changes nothing."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from harness.model import UsageError
from harness.traffic.arrivals import ARRIVALS, Arrivals


def process(kind: str, settings: Any) -> Arrivals:
    made: Arrivals = TypeAdapter(ARRIVALS[kind]).validate_python(settings)
    return made


def moments(arrivals: Arrivals, until_s: float, seed: int = 1) -> np.ndarray:
    return np.array(list(itertools.takewhile(lambda at: at < until_s, arrivals.due_s(random.Random(seed)))))


def dispersion(at_s: np.ndarray, window_s: float = 0.25) -> float:
    counts = np.bincount((at_s / window_s).astype(int))[:-1]
    return float(counts.var() / counts.mean())


def cv(at_s: np.ndarray) -> float:
    gaps = np.diff(at_s)
    return float(gaps.std() / gaps.mean())


EVERY_KIND = {
    "constant": {"rate": "20/s"},
    "poisson": {"rate": "20/s"},
    "gamma": {"rate": "20/s", "cv": 2},
    "ramp": {"from": "10/s", "to": "30/s", "over": "100s"},
    "steps": [{"rate": "10/s", "for": "50s"}, {"rate": "30/s", "for": "50s"}],
    "bursts": {"quiet": "15/s", "size": 25, "every": "5s"},
    "clients": {"rate": "20/s", "count": 40},
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_mean_rate_is_the_stated_one(kind: str) -> None:
    """Every process here is written for a mean of 20/s over 100 s, and keeps it within five standard deviations."""
    counts = [len(moments(process(kind, EVERY_KIND[kind]), 100.0, seed)) for seed in range(20)]
    spread = max(float(np.std(counts)), 1.0)
    assert abs(float(np.mean(counts)) - 2000) < 5 * spread / 20**0.5 + 6  # a burst or step may end on the edge


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_moments_ascend_and_come_from_the_seed_alone(kind: str) -> None:
    """The same seed gives the same moments, another seed others, all in order."""
    arrivals = process(kind, EVERY_KIND[kind])
    once = moments(arrivals, 50.0)
    assert (np.diff(once) >= 0).all()
    assert once[0] >= 0
    assert np.array_equal(once, moments(arrivals, 50.0))
    assert kind == "constant" or not np.array_equal(once, moments(arrivals, 50.0, seed=2))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_load_factor_scales_the_rate(kind: str) -> None:
    """At a factor of 0.2 a fifth of the requests come."""
    arrivals = process(kind, EVERY_KIND[kind])
    few = [len(moments(arrivals.scaled(0.2), 100.0, seed)) for seed in range(20)]
    assert 360 < float(np.mean(few)) < 440


@pytest.mark.e2e  # not for its processes, for its time
def test_poisson_gaps_are_exponential() -> None:
    """The gaps pass a Kolmogorov-Smirnov test against the exponential law, and their CV is 1."""
    at_s = moments(process("poisson", {"rate": "50/s"}), 400.0)
    from scipy import stats  # two seconds, which no other test is to wait for

    assert stats.kstest(np.diff(at_s), "expon", args=(0, 1 / 50)).pvalue > 0.01
    assert abs(cv(at_s) - 1) < 0.05


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_union_of_workers_is_the_one_process(workers: int) -> None:
    """Thinned to i mod W and put together again, 200/s stay Poisson: dispersion at 250 ms within 0.8 and 1.2."""
    at_s = moments(process("poisson", {"rate": "200/s"}), 300.0)
    union = np.sort(np.concatenate([at_s[k::workers] for k in range(workers)]))
    assert np.array_equal(union, at_s)
    assert 0.8 < dispersion(union) < 1.2


def test_gamma_gaps_have_the_stated_cv() -> None:
    """A CV of 2 is burstier than Poisson, one of 0.5 is more even; the rate is right from the first second."""
    assert abs(cv(moments(process("gamma", {"rate": "50/s", "cv": 2}), 1000.0)) - 2) < 0.1
    assert abs(cv(moments(process("gamma", {"rate": "50/s", "cv": 0.5}), 400.0)) - 0.5) < 0.03
    first = [len(moments(process("gamma", {"rate": "5/s", "cv": 3}), 1.0, seed)) for seed in range(1000)]
    assert abs(float(np.mean(first)) - 5) < 5 * float(np.std(first)) / 1000**0.5


def test_a_ramp_rises_in_a_straight_line_and_stays() -> None:
    """From 10/s to 50/s over 100 s: a quarter of the way in it sends 20/s, afterwards 50/s."""
    ramp = process("ramp", {"from": "10/s", "to": "50/s", "over": "100s"})
    at_s = np.concatenate([moments(ramp, 200.0, seed) for seed in range(20)])
    for begin, end, rate in ((20.0, 30.0, 20.0), (70.0, 80.0, 40.0), (150.0, 200.0, 50.0)):
        seen = ((at_s >= begin) & (at_s < end)).sum() / (end - begin) / 20
        assert abs(seen - rate) < 2
    falling = moments(process("ramp", {"from": "50/s", "to": "0/s", "over": "10s"}), 1e9)
    assert falling.max() < 10


def test_steps_hold_each_rate_for_its_time() -> None:
    """Two levels, 10/s and 40/s: each second belongs to its level, and the last level stays."""
    steps = process(
        "steps", [{"rate": "10/s", "for": "20s"}, {"rate": "0/s", "for": "5s"}, {"rate": "40/s", "for": "5s"}]
    )
    at_s = np.concatenate([moments(steps, 60.0, seed) for seed in range(20)])
    assert abs((at_s < 20).sum() / 400 - 10) < 1
    assert not ((at_s >= 20) & (at_s < 25)).any()
    assert abs((at_s >= 25).sum() / 700 - 40) < 1.5


def test_bursts_come_all_at_once() -> None:
    """Every 5 s `size` requests share one moment."""
    at_s = moments(process("bursts", {"quiet": "2/s", "size": 30, "every": "5s"}), 21.0)
    assert [int((at_s == k).sum()) for k in (5, 10, 15, 20)] == [30, 30, 30, 30]


def test_clients_are_unequal_and_bursty() -> None:
    """The sum of gamma clients is over-dispersed, and a client's own stream does not depend on how many follow it."""
    assert dispersion(moments(process("clients", {"rate": "40/s", "count": 10, "cv": 3}), 500.0)) > 1.5
    alone = process("clients", {"rate": "20/s", "count": 1, "skew": 0})
    both = process("clients", {"rate": "40/s", "count": 2, "skew": 0})
    assert set(moments(alone, 20.0)) <= set(moments(both, 20.0))


def test_a_recording_is_played_from_its_first_moment(tmp_path: Path) -> None:
    """Seconds or objects with at_s, one a line; a load factor plays it faster; it ends with the file."""
    path = tmp_path / "moments.jsonl"
    path.write_text('100.5\n{"at_s": 101}\n101\n104.5\n')
    recorded = process("recorded", {"file": str(path)})
    assert list(recorded.due_s(random.Random(0))) == [0, 0.5, 0.5, 4]
    assert list(recorded.scaled(2).due_s(random.Random(0))) == [0, 0.25, 0.25, 2]


@pytest.mark.parametrize(("text", "line"), [("1\n2\nx\n", 3), ("1\n0.5\n", 2), ('{"t": 1}\n', 1), ("0\nNaN\n", 2)])
def test_a_wrong_recording_is_told_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    """A line that is no moment, or goes back in time, is the user's mistake, told with file and line."""
    path = tmp_path / "moments"
    path.write_text(text)
    with pytest.raises(UsageError, match=f":{line}:"):
        list(process("recorded", {"file": str(path)}).due_s(random.Random(0)))
