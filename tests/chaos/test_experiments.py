"""Every experiment and every chaos scenario that ships is what Chaos Toolkit and the harness accept."""

from pathlib import Path

import pytest
from chaoslib.experiment import ensure_experiment_is_valid

from harness import document, scenario
from harness.chaos import experiment
from harness.model import UsageError
from harness.targets import base

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


@pytest.mark.parametrize("more", ["pauses: {after: 60}", "background: true"])
def test_what_nobody_can_end_at_once_is_refused(more: str, tmp_path: Path) -> None:
    """Chaos Toolkit would pause, or go on in the background, in a run that is over."""
    path, text = tmp_path / "experiment.yaml", (ROOT / "experiments/process/freeze_engine.yaml").read_text()
    path.write_text(text.replace("name: hold,", f"name: hold, {more},"))
    target = base.load("reference_stack/local/target.yaml")
    with pytest.raises(UsageError, match=f"`hold` has `{more.partition(':')[0]}`, which nobody can end at once"):
        next(experiment.aims(path, target))


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        (
            "pressure/cpu",
            "lasts: 20s",
            "lasts: 61s",
            "cpu_pressure ends by itself after 60 s and is to be held for 61 s",
        ),
        ("gpu/leak", "share: 2%", "share: 2%, ttl: 30s", "the guard of gpu_leak ends it after 30 s of the 30 s"),
    ],
)
def test_a_fault_that_ends_too_early_is_refused(name: str, old: str, new: str, why: str, tmp_path: Path) -> None:
    """A run would believe it in force when it is over."""
    path, text = tmp_path / "experiment.yaml", (ROOT / f"experiments/{name}.yaml").read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=why):
        next(experiment.aims(path, base.load("reference_stack/local/target.yaml")))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_is_valid(path: Path) -> None:
    """It loads, breaks something, and is short enough to be read at a glance."""
    assert scenario.load(path).chaos
    assert len(path.read_text().splitlines()) < 40
