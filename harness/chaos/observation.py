"""Whether a scenario looks on for long enough after its faults: what its gates promise takes time to be seen.

A gate whose fault comes too late in the traffic could not say anything, or could say one thing only. The plan alone
shows it, so it is refused before anything is sent. Time that a fault takes to come about is not known before, and is
not counted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import document
from harness.chaos import experiment
from harness.judge.counts import seconds
from harness.judge.resilience import OfFaults
from harness.model import UsageError
from harness.scenario import Scenario


def refuse_too_short(scenario: Scenario, end_s: float) -> None:
    """Raise UsageError, with its line, for a gate that needs to see more than the traffic shows until `end_s`."""
    for gate in scenario.gates:
        if not isinstance(gate.spec, OfFaults):
            continue
        for planned in scenario.chaos:
            written = document.read(planned.experiment).value
            needs_s = gate.spec.needs_s(_held_s(planned.experiment, written))
            if concerns(gate.spec, written) and planned.at_s + needs_s > end_s:
                raise UsageError(
                    f"{gate.id} needs {seconds(needs_s)} of traffic from the beginning of {planned.experiment} on, and "
                    f"has {seconds(max(0.0, end_s - planned.at_s))}: let it begin earlier, or the traffic last longer",
                    f"{scenario.path}:{gate.line}",
                )


def concerns(spec: OfFaults, written: Mapping[str, Any]) -> bool:
    """Whether a gate is about a fault of this experiment."""
    return any(spec.fault in ("", given.get("fault")) for given in experiment.faults(written))


def _held_s(path: Path, written: Mapping[str, Any]) -> float:
    try:
        return experiment.held_s(written.get("method", ()))
    except ValueError as error:
        raise UsageError(f"hold: {error}", str(path)) from None
