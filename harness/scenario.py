"""A scenario file <-> one frozen Scenario. Alone knows the file's shape.

A scenario is a claim, the traffic that puts it to the test, and the gates that hold if it is true. What cannot be
judged as written is refused here, with the line, before anything is sent: unknown keys, classes and windows, no gates
at all, a gate that the target's configuration cannot meet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, TypeAdapter

from harness import document
from harness.document import OneOf
from harness.judge.gates import GATES, Gate, unknown_names
from harness.judge.gpu import GpuMemory
from harness.model import UsageError
from harness.targets.base import Target
from harness.traffic.plan import Traffic
from harness.units import spec


def _some(gates: list[Any]) -> list[Any]:
    if not gates:
        raise ValueError("a scenario without gates judges nothing")
    return gates


@spec
class ScenarioFile:
    """The keys of a scenario file."""

    claim: str
    seed: int = 0
    traffic: Traffic
    gates: Annotated[list[Annotated[Any, OneOf(GATES)]], AfterValidator(_some)]
    on_inconclusive: Literal["", "fail", "warn", "extend"] = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A claim that a run can prove or refute. `on_inconclusive` says what thin evidence means: "" leaves it so."""

    path: Path
    claim: str
    seed: int
    traffic: Traffic
    gates: tuple[Gate, ...]
    on_inconclusive: str

    @property
    def extendable(self) -> bool:
        """Whether thin evidence is met with as much traffic again."""
        return self.on_inconclusive == "extend"


def load(path: Path) -> Scenario:
    """Read a scenario. Raises UsageError, with `file:line`, on the first thing that is wrong with it."""
    written = document.read(path)
    file = written.parse(ScenarioFile)
    gates = tuple(
        Gate(id=next(iter(key)), line=written.lines["gates", k, next(iter(key))], spec=each)
        for k, (key, each) in enumerate(zip(written.value["gates"], file.gates, strict=True))
    )
    windows = [window.name for window in file.traffic.windows]
    for gate in gates:
        if complaint := unknown_names(gate.spec, file.traffic.classes, windows):
            raise UsageError(f"{gate.id}: {complaint}", f"{path}:{gate.line}")
    return Scenario(path, file.claim, file.seed, file.traffic, gates, file.on_inconclusive)


def refuse_impossible(scenario: Scenario, target: Target, serving: Mapping[str, Any]) -> None:
    """Raise UsageError for a gate that cannot hold on this target, whatever the traffic does.

    `serving` is what the target said of itself before the run (`targets.url.preflight`).
    """
    for gate in scenario.gates:
        if isinstance(gate.spec, GpuMemory) and target.gpu != "none":
            for configured in serving["gpu_memory_utilization"].values():
                if refusal := gate.spec.refusal(configured):
                    raise UsageError(refusal, f"{scenario.path}:{gate.line}")


def json_schema() -> dict[str, Any]:
    """The JSON schema of scenario files, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **TypeAdapter(ScenarioFile).json_schema()}
