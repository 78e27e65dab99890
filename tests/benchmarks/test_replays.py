"""The benchmark of replays: its recording, and what it makes of the server's log."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.goals import INCONCLUSIVE, MET, NOT_MET
from benchmarks.replays import Played, judged, moments_s, punctuality, write
from benchmarks.server import TRUTH, Timing
from benchmarks.trial import FailedError, Load
from harness.traffic import recording

AT_S = moments_s(Load(20, 30), 2.0)


def log(late_s: np.ndarray) -> np.ndarray:
    """What the server logs when each request comes so much later than at x2, in the order of their arrival."""
    table = np.zeros(len(AT_S), dtype=TRUTH)
    table["id"], table["read_s"] = np.arange(len(AT_S)).astype("U"), 1000.0 + AT_S / 2 + late_s
    return table[np.argsort(table["read_s"], kind="stable")]


def test_the_recording_is_one(tmp_path: Path) -> None:
    """It holds every moment, in order, and lasts as long at its speed as the load does."""
    write(tmp_path / "recording.jsonl", AT_S, Timing())
    header, ones = recording.read(tmp_path / "recording.jsonl")
    assert [one.at_s for one in ones] == AT_S.tolist()
    assert header.requests == len(AT_S) == 600
    assert header.lasts_s / 2 == pytest.approx(30, rel=0.05)


def test_a_constant_lateness_is_no_error() -> None:
    """Whatever the origin of the server's clock: gaps are right, and nothing drifts."""
    seen = punctuality(log(np.full(len(AT_S), 0.2)), AT_S, 2.0)
    assert seen.gap_error_s.max() < 1e-9
    assert seen.drift < 1e-9


def test_one_late_request_spoils_two_gaps() -> None:
    """However late, and though others overtake it."""
    late_s = np.zeros(len(AT_S))
    late_s[300] = 1.0
    seen = punctuality(log(late_s), AT_S, 2.0)
    assert np.flatnonzero(seen.gap_error_s > 1e-6).tolist() == [299, 300]
    assert seen.drift < 1e-9


def test_a_slow_clock_drifts() -> None:
    """A thousandth too slow is a drift of a thousandth, less the tenths at both ends that it is measured between."""
    seen = punctuality(log(0.001 * AT_S / 2), AT_S, 2.0)
    assert seen.drift == pytest.approx(0.0009, rel=0.05)


def test_a_lost_request_is_no_replay() -> None:
    """Figures of what is left would flatter."""
    with pytest.raises(FailedError, match="599 requests arrived, and 600 were recorded"):
        punctuality(log(np.zeros(len(AT_S)))[1:], AT_S, 2.0)


@pytest.mark.parametrize(
    ("gap_s", "drift", "others_share", "outcomes"),
    [
        (0.004, 0.0, 1.0, [MET, MET]),
        (0.006, 0.002, 0.0, [NOT_MET, NOT_MET]),
        (0.006, 0.0, 0.2, [INCONCLUSIVE, MET]),
        (float("nan"), 0.0, 0.0, [NOT_MET, MET]),
    ],
)
def test_goals(gap_s: float, drift: float, others_share: float, outcomes: list[str]) -> None:
    """A goal that is missed on a busy machine is inconclusive; what was not measured is not met."""
    one = Played(2.0, 60.0, 1200, [0.0, 0.0, 0.0], [0.0, gap_s, 1.0], drift, others_share)
    assert [goal.outcome for goal in judged([one])] == outcomes
