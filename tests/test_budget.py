"""When a run is stopped for safety."""

import math
from pathlib import Path

import pytest

from harness.budget import LEAST, Budget
from harness.log import Log, ObservationLog
from harness.model import Observation, Outcome, Reading
from harness.scenario import Abort

LIMIT = Abort(bad_share=0.6, for_s=10.0)


def played(run_dir: Path, *spans: tuple[int, float, Outcome], name: str = "log.player-0.bin") -> None:
    """Answers in a log: so many a span, the moment at which they ended, and how."""
    log = ObservationLog(run_dir / name)
    for number, ended_s, outcome in spans:
        for k in range(number):
            log.append(Observation(k, ended_s, ended_s=ended_s, outcome=outcome))
    log.flush()


def test_enough_failures_stop_a_run(tmp_path: Path) -> None:
    """At the share, over the whole time, of all players; what is older does not count."""
    played(tmp_path, (1000, 2.0, Outcome.OK), (12, 15.0, Outcome.RESET))
    played(tmp_path, (8, 16.0, Outcome.OK), name="log.player-1.bin")
    assert Budget(LIMIT, tmp_path).spent(20.0) == "12 of 20 requests of the last 10 s failed"
    assert not Budget(LIMIT, tmp_path).spent(11.0)


def test_what_does_not_stop_a_run(tmp_path: Path) -> None:
    """Too short a time, too few requests, and endings that were planned."""
    played(tmp_path, (LEAST - 1, 15.0, Outcome.RESET))
    assert not Budget(LIMIT, tmp_path).spent(20.0)
    played(tmp_path, (1, 15.0, Outcome.RESET), name="log.player-1.bin")
    assert Budget(LIMIT, tmp_path).spent(20.0)
    assert not Budget(Abort(bad_share=0.6, for_s=21.0), tmp_path).spent(20.0)
    planned = (Outcome.REJECTED_AS_EXPECTED, Outcome.CANCELLED_BY_US, Outcome.OPEN)
    played(tmp_path, *((LEAST, 16.0, outcome) for outcome in planned), name="log.player-2.bin")
    assert not Budget(LIMIT, tmp_path).spent(20.0)


def test_what_is_new_is_read_as_it_comes(tmp_path: Path) -> None:
    """A budget that is looked at again sees what has come since, and forgets what has aged."""
    budget = Budget(LIMIT, tmp_path)
    assert not budget.spent(10.0)
    played(tmp_path, (LEAST, 12.0, Outcome.HTTP_5XX))
    assert budget.spent(13.0) and budget.spent(22.0) and not budget.spent(23.0)


def test_a_full_gpu_stops_a_run(tmp_path: Path) -> None:
    """At the share, of any GPU, by what was read of it last; without a reading, or by half a one, nothing is known."""
    budget = Budget(Abort(gpu_memory=0.95), tmp_path)
    assert not budget.spent(20.0)
    log = Log(tmp_path / "log.watch.jsonl")

    def read(gpu: str, name: str, value: float) -> None:
        log.reading(Reading(1.0, f"gpu.{name}", value, {"gpu": gpu}))

    read("GPU-0", "free_bytes", 10.0)
    assert not budget.spent(20.0)
    read("GPU-0", "total_bytes", 100.0)
    read("GPU-1", "free_bytes", math.nan)
    read("GPU-1", "total_bytes", 100.0)
    assert not budget.spent(21.0)
    read("GPU-1", "free_bytes", 5.0)
    assert budget.spent(22.0) == "95.0% of the memory of GPU-1 was taken; from 95% on, a run ends"
    read("GPU-1", "free_bytes", 6.0)
    assert not budget.spent(23.0)


def test_a_limit_is_needed() -> None:
    """An abort that nothing could bring about is a mistake."""
    with pytest.raises(ValueError, match="bad_share"):
        Abort()
