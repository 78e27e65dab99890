"""Every experiment and every chaos scenario that ships is what Chaos Toolkit and the harness accept."""

from pathlib import Path

import pytest
from chaoslib.experiment import ensure_experiment_is_valid

from harness import document, scenario
from harness.chaos import experiment

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.yaml"))
SCENARIOS = sorted((ROOT / "scenarios/chaos").rglob("*.yaml"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_is_valid(path: Path) -> None:
    """Chaos Toolkit finds nothing wrong with it, and every fault it names exists and takes its arguments."""
    written = document.read(path).value
    ensure_experiment_is_valid(written)
    assert list(experiment.faults(written)), "it breaks nothing"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_is_valid(path: Path) -> None:
    """It loads, breaks something, and is short enough to be read at a glance."""
    assert scenario.load(path).chaos
    assert len(path.read_text().splitlines()) < 40
