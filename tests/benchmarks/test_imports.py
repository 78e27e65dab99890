"""Importers are compared by CPU per MB, net of the start, within each round."""

import sys
from pathlib import Path

import pytest

from benchmarks import imports
from benchmarks.goals import MET, NOT_MET, NOT_RUN
from benchmarks.imports import OURS, OURS_HALF, Cost, Reader, judged, ratios, told

ABSENT = {"tshark": "not installed: needs the package tshark"}


def costs(ours_s: float = 2.0, peak_mb: float = 60.0) -> list[Cost]:
    """Two rounds: ours takes 10 ms a MB and dpkt 50, each after half a second of start."""
    return [
        cost
        for number in range(2)
        for cost in (
            Cost(OURS, number, 200.5, ours_s + 0.5, peak_mb, 0.5, 0.5),
            Cost("dpkt dissect", number, 50.5, 3.0, 30.0, 0.5, 0.5),
            Cost(OURS_HALF, number, 100.5, 1.5, 55.0, 0.5, 0.5),
        )
    ]


def test_the_start_counts_for_nobody() -> None:
    """What the same command takes for next to nothing is subtracted, on both sides of a ratio."""
    assert ratios(costs(), "dpkt dissect") == pytest.approx([5.0, 5.0])


@pytest.mark.parametrize(("ours_s", "outcome"), [(2.0, MET), (3.0, NOT_MET)])
def test_a_ratio_decides(ours_s: float, outcome: str) -> None:
    assert {goal.text: goal.outcome for goal in judged(costs(ours_s), ABSENT)}[
        "dpkt dissect's CPU per MB / ours >= 4"
    ] == outcome


@pytest.mark.parametrize(
    ("peak_mb", "outcomes"), [(60.0, [MET, MET]), (90.0, [MET, NOT_MET]), (110.0, [NOT_MET, NOT_MET])]
)
def test_memory_decides(peak_mb: float, outcomes: list[str]) -> None:
    """Its height, and what a file twice as large adds."""
    assert [goal.outcome for goal in judged(costs(peak_mb=peak_mb), ABSENT)[-2:]] == outcomes


def test_what_is_absent_is_named_and_meets_nothing() -> None:
    """In the table and in the goals, with what to install."""
    goals = judged(costs(), ABSENT)
    assert (goals[0].measured, goals[0].outcome) == (ABSENT["tshark"], NOT_RUN)
    assert ABSENT["tshark"] in told(costs(), ABSENT, goals)
    assert {goal.outcome for goal in judged([], {})} == {NOT_RUN}


@pytest.mark.e2e
def test_a_run_is_metered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU and memory are the command's own, whatever the bench itself holds; a failure is an error."""
    monkeypatch.setattr(imports, "FOLDER", tmp_path)
    ballast = bytearray(200 << 20)
    busy = Reader(
        "busy", 1.0, "", lambda capture, folder: [sys.executable, "-c", "sum(range(10**7)); b = b'x' * (50 << 20)"]
    )
    cpu_s, peak_mb = imports.ran(busy, tmp_path)
    assert cpu_s > 0.01
    assert 50 < peak_mb < 150 < len(ballast) / 1e6
    with pytest.raises(RuntimeError, match="ended with 1: nothing"):
        imports.ran(Reader("bad", 1.0, "", lambda capture, folder: ["sh", "-c", "printf nothing; exit 1"]), tmp_path)
