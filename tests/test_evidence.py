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


def test_a_stage_says_what_it_went_on_without(tmp_path: Path) -> None:
    """The note is part of the verdict, also when that is judged again."""
    stage_dir = evidence.begin_stage(tmp_path, 3)
    run_dir = evidence.create(tmp_path, "kill_replica")
    (run_dir / "run.json").write_text("{}")
    evidence.leave_out(stage_dir, {"gpu_leak": "the target has no GPU (gpu: none)"})
    told = ("gpu_leak was left out: the target has no GPU (gpu: none)",)
    assert evidence.settle_stage(stage_dir, 3, [run_dir]).notes == told
    assert evidence.settle(stage_dir).notes == told == evidence.read_verdict(stage_dir).notes
