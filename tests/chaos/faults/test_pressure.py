"""Pressure on this machine, in small doses: taken for real, and given back for real."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.chaos.fault import Refused, Unproven
from harness.chaos.faults import pressure
from harness.chaos.faults.pressure import CpuPressure, DiskFull, MemoryPressure
from harness.targets import base
from harness.targets.base import Target
from tests.chaos.faults.steps import broken, mended
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

SIZE_BYTES = 100 * 2**20
LIMIT_S = 30.0


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target.yaml").write_text("kind: local\nurl: http://127.0.0.1:9\nmodel: m\ntokenizer: t\ngpu: none\n")
    yield base.load("target.yaml")
    assert pressing(tmp_path) == []


def pressing(folder: Path) -> list[int]:
    """Living processes with a permit in this folder."""
    return [
        one.pid
        for one in psutil.process_iter(["cmdline", "status"])
        if one.info["status"] != psutil.STATUS_ZOMBIE and any(str(folder) in word for word in one.info["cmdline"] or [])
    ]


def test_cpu(target: Target) -> None:
    """Two busy processes get time of the cores until the undo."""
    fault = CpuPressure(cores=2)
    state, evidence = broken(fault, target)
    assert evidence["cores_taken"] > 0.1
    assert len(set(evidence["pids"])) == 2
    with pytest.raises(Unproven, match="permits"):
        fault.undone(target, state)
    assert mended(fault, target, state)["ended"] == 2


def test_cpu_ends_by_itself(target: Target, tmp_path: Path) -> None:
    """Without an undo it ends when its time is over."""
    fault = CpuPressure(for_s=3.0)
    state, _ = broken(fault, target)
    until(lambda: not pressing(tmp_path), "nothing presses any more", LIMIT_S)
    mended(fault, target, state)


def test_memory(target: Target) -> None:
    """The memory is resident until the undo."""
    fault = MemoryPressure(size_bytes=SIZE_BYTES)
    state, evidence = broken(fault, target)
    assert evidence["resident_bytes"] >= pressure.PROVEN * SIZE_BYTES
    assert psutil.pid_exists(evidence["pid"])
    mended(fault, target, state)


def test_memory_leaves_enough(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would not leave enough is refused, and not taken when it turns out so only later."""
    available_bytes = psutil.virtual_memory().available
    greedy = MemoryPressure(size_bytes=SIZE_BYTES, leave_bytes=2 * available_bytes)
    with pytest.raises(Refused, match="cannot be taken"):
        greedy.resolve(target)
    monkeypatch.setattr(pressure, "APPLIED_LIMIT_S", 3.0)
    state = MemoryPressure(size_bytes=SIZE_BYTES).resolve(target).state
    greedy.inject(target, state)
    with pytest.raises(Unproven, match="would not leave"):
        greedy.applied(target, state)
    mended(greedy, target, state)


def test_disk(target: Target, tmp_path: Path) -> None:
    """The file takes what it should and is gone after the undo."""
    fault = DiskFull(path=str(tmp_path), leave_bytes=pressure._free_bytes(tmp_path) - SIZE_BYTES)
    state, evidence = broken(fault, target)
    assert Path(state["file"]).stat().st_blocks * 512 >= 0.5 * SIZE_BYTES
    assert evidence["taken_bytes"] == state["size_bytes"]
    with pytest.raises(Unproven, match="still there"):
        fault.undone(target, state)
    mended(fault, target, state)
    assert not Path(state["file"]).exists()


def test_disk_that_is_full(target: Target, tmp_path: Path) -> None:
    """No room, no fault."""
    with pytest.raises(Refused, match="cannot be left"):
        DiskFull(leave_bytes=pressure._free_bytes(tmp_path) * 2).resolve(target)
    with pytest.raises(Refused, match="no directory"):
        DiskFull(path="nowhere").resolve(target)
