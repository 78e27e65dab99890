"""Scenarios that end too soon after their faults: the plan shows it, and nothing is sent."""

from pathlib import Path

import pytest

from harness import scenario
from harness.chaos import observation
from harness.model import UsageError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "scenarios/chaos").rglob("*.yaml"))
SCENARIO = """\
claim: It comes back.
traffic:
  arrivals: {{poisson: {{rate: 20/s}}}}
  warm_up: 5s
  for: 55s
  prompts: {{mix: {{short: {{share: 100%, tokens: 16..64}}}}, answer_tokens: {{mean: 8, at_most: 16}}}}
chaos:
  - {{experiment: {experiment}, at: {at}}}
gates:
  - success: {{at_least: 90%}}
  - {gate}
"""
EXPERIMENT = """\
title: A leak
description: A leak.
method:
  - {{type: action, name: leak,
     provider: {{type: python, module: harness.chaos.experiment, func: inject, arguments: {{fault: gpu_leak}}}}}}
  - {{type: action, name: hold,
     provider: {{type: python, module: harness.chaos.experiment, func: hold, arguments: {{lasts: {lasts}}}}}}}
"""


def refuse(folder: Path, gate: str, at: str, lasts: str = "15s") -> None:
    """Look at a run of a minute whose fault is held for 15 s."""
    experiment, file = folder / "leak.yaml", folder / "mine.yaml"
    experiment.write_text(EXPERIMENT.format(lasts=lasts))
    file.write_text(SCENARIO.format(experiment=experiment, at=at, gate=gate))
    loaded = scenario.load(file)
    observation.refuse_too_short(loaded, loaded.traffic.windows[-1].end_s)


@pytest.mark.parametrize(
    ("gate", "latest_s"),
    [
        ("recovery: {within: 30s, hold: 10s}", 20),
        ("recovery: {within: 30s, hold: 10s, since: healed}", 5),
        ("alert: {name: High, fires_within: 25s, clears_within: 5s}", 35),
        ("alert: {name: High, fires_within: 5s, clears_within: 25s}", 20),
        ("retry_storm: {at_most: 2x}", 40),
        ("replica_recovery: {within: 5m}", 59),
        ("recovery: {within: 30s, fault: latency}", 59),
    ],
)
def test_the_latest_moment_of_a_fault(gate: str, latest_s: int, tmp_path: Path) -> None:
    """A fault may come so late that its gate can just be told; a second later it is refused, with the gate's line."""
    refuse(tmp_path, gate, f"{latest_s}s")
    if latest_s < 59:
        with pytest.raises(UsageError) as caught:
            refuse(tmp_path, gate, f"{latest_s + 1}s")
        said = str(caught.value)
        assert said.startswith(f"{tmp_path}/mine.yaml:11: {gate.partition(':')[0]} needs ")
        assert f"{60 - latest_s} s of traffic" in said and f"has {59 - latest_s} s" in said


def test_a_time_that_is_not_known(tmp_path: Path) -> None:
    """What the environment fills in counts for nothing; what is no time is refused with the experiment's name."""
    refuse(tmp_path, "recovery: {within: 30s, since: healed}", "20s", lasts="'${lasts}'")
    with pytest.raises(UsageError, match=r"leak\.yaml: hold: 15 is not a time"):
        refuse(tmp_path, "recovery: {within: 30s}", "20s", lasts="15")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_scenarios_observe_long_enough(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is refused."""
    monkeypatch.chdir(ROOT)
    loaded = scenario.load(path)
    observation.refuse_too_short(loaded, loaded.traffic.windows[-1].end_s)
