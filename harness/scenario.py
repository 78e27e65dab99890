"""A scenario file <-> one frozen Scenario. Alone knows the file's shape.

A scenario is a claim, the traffic that puts it to the test, and the gates that hold if it is true. What cannot be
judged as written is refused here, with the line, before anything is sent: unknown keys, classes and windows, no gates
at all, a gate that nothing in the traffic or nothing in the target's configuration can meet.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from harness import document
from harness.document import OneOf, Place
from harness.judge import resilience
from harness.judge.against_capture import LatencyAgainstCapture, SameAnswers
from harness.judge.gates import GATES, Gate, Rejections, unknown_names
from harness.judge.gpu import GpuMemory
from harness.model import UsageError
from harness.targets.base import Target
from harness.traffic.plan import Traffic
from harness.traffic.replay import Replay
from harness.units import Duration, Part, Period, spec

GREATEST_SEED = 2**63 - 1  # what JSON readers and 64-bit integers hold


def _some(gates: list[Any]) -> list[Any]:
    if not gates:
        raise ValueError("a scenario without gates judges nothing")
    return gates


@spec
class Planned:
    """An experiment, a Chaos Toolkit document, and when it begins, in seconds from the run's origin."""

    experiment: Path
    at_s: Duration


@spec
class Abort:
    """A run is stopped, and what is broken is mended, when this share of the requests of the last `for` failed, or when
    a GPU has this share of its memory taken."""

    bad_share: Part | None = None
    for_s: Period = 10.0
    gpu_memory: Part | None = None

    def __post_init__(self) -> None:
        if self.bad_share is None and self.gpu_memory is None:
            raise ValueError("abort needs a limit: bad_share (of requests) or gpu_memory")


@spec
class _File:
    """The keys that every scenario file has."""

    claim: str
    seed: Annotated[int, Field(ge=0, le=GREATEST_SEED)] = 0
    chaos: list[Planned] = field(default_factory=list)
    abort: Abort | None = None
    gates: Annotated[list[Annotated[Any, OneOf(GATES)]], AfterValidator(_some)]
    on_inconclusive: Literal["", "fail", "warn", "extend"] = ""


@spec
class ScenarioFile(_File):
    """A scenario whose traffic is composed."""

    traffic: Traffic


@spec
class ReplayFile(_File):
    """A scenario whose traffic was captured: `traffic` has the key `replay`."""

    traffic: Replay


@dataclass(frozen=True, slots=True)
class Scenario:
    """A claim that a run can prove or refute. `on_inconclusive` says what thin evidence means: "" leaves it so."""

    path: Path
    claim: str
    seed: int
    traffic: Traffic | Replay
    gates: tuple[Gate, ...]
    on_inconclusive: str
    chaos: tuple[Planned, ...] = ()
    abort: Abort | None = None

    @property
    def extendable(self) -> bool:
        """Whether thin evidence is met with as much traffic again."""
        return self.on_inconclusive == "extend"


def load(path: Path, to_plan: bool = True, recording: Path | None = None) -> Scenario:
    """Read a scenario. Raises UsageError, with `file:line`, on the first thing that is wrong with it.

    Without `to_plan` it is read to judge a run that is over: the files its plan was made from need not be here.
    `recording` is played instead of the one that the scenario names.
    """
    written = document.read(path)
    file: ReplayFile | ScenarioFile
    file = written.parse(ReplayFile) if _replays(written.value) else written.parse(ScenarioFile)
    if recording and not isinstance(file.traffic, Replay):
        raise UsageError("this scenario plays no recording", written.where(("traffic",)))
    if recording and isinstance(file, ReplayFile):
        file = replace(file, traffic=replace(file.traffic, replay=recording))
    gates = tuple(
        Gate(id=next(iter(key)), line=written.lines["gates", k, next(iter(key))], spec=each)
        for k, (key, each) in enumerate(zip(written.value["gates"], file.gates, strict=True))
    )
    complaints = chain(_of_traffic(file.traffic, to_plan), _of_gates(gates, file), _of_chaos(file, to_plan))
    if isinstance(file.traffic, Replay) and to_plan:
        complaints = chain(complaints, _of_recording(file.traffic, gates, file.on_inconclusive))
    if wrong := next(complaints, None):
        place, complaint = wrong
        raise UsageError(complaint, written.where(place))
    return Scenario(
        path, file.claim, file.seed, file.traffic, gates, file.on_inconclusive, tuple(file.chaos), file.abort
    )


def _replays(value: Any) -> bool:
    traffic = value.get("traffic") if isinstance(value, dict) else None
    return isinstance(traffic, dict) and "replay" in traffic


def _of_traffic(traffic: Traffic | Replay, to_plan: bool) -> Iterator[tuple[Place, str]]:
    for kind in traffic.never_judged:
        yield ("traffic", "misbehaving", kind, "every"), f"{kind} never comes in the steady state: the run is too short"
    for place, named in traffic.files.items():
        if to_plan and not named.is_file():
            yield ("traffic", *place), f"there is no file {named}"


def _of_chaos(file: ScenarioFile | ReplayFile, to_plan: bool) -> Iterator[tuple[Place, str]]:
    if file.chaos and file.on_inconclusive == "extend":
        yield ("on_inconclusive",), "a run with experiments is not extended: what broke the stack would not be repeated"
    for k, planned in enumerate(file.chaos):
        if to_plan and not planned.experiment.is_file():
            yield ("chaos", k, "experiment"), f"there is no file {planned.experiment}"
        if isinstance(file.traffic, Traffic) and planned.at_s >= file.traffic.windows[-1].end_s:
            yield ("chaos", k, "at"), "the experiment begins when the traffic is over: nobody would feel it"


def _of_gates(gates: tuple[Gate, ...], file: ScenarioFile | ReplayFile) -> Iterator[tuple[Place, str]]:
    traffic, windows = file.traffic, (*file.traffic.window_names, *(resilience.WINDOWS if file.chaos else ()))
    for k, gate in enumerate(gates):
        place = ("gates", k, gate.id)
        if complaint := unknown_names(gate.spec, traffic.classes, windows):
            yield place, f"{gate.id}: {complaint}"
        if isinstance(gate.spec, Rejections) and not traffic.refusable:
            yield place, f"{gate.id} judges nothing: the traffic has no request that is to be refused"
        if isinstance(gate.spec, SameAnswers | LatencyAgainstCapture) and not isinstance(traffic, Replay):
            yield place, f"{gate.id} compares with a capture: it needs `traffic: {{replay: FILE}}`"
        if isinstance(gate.spec, resilience.OfFaults) and not file.chaos:
            yield place, f"{gate.id} judges what a fault does: it needs `chaos: [{{experiment: FILE, at: 40s}}]`"


def _of_recording(replay: Replay, gates: tuple[Gate, ...], on_inconclusive: str) -> Iterator[tuple[Place, str]]:
    """What only a look into the recording can tell."""
    if on_inconclusive == "extend":
        yield ("on_inconclusive",), "a recording cannot be extended: play it more than once with `loop: 2`"
    try:
        held = replay.look()
    except UsageError as mistake:
        yield ("traffic", "replay"), str(mistake)
        return
    for k, gate in enumerate(gates):
        place = ("gates", k, gate.id)
        for name in gate.spec.classes:
            if name not in held.classes:
                there = ", ".join(held.classes)
                yield place, f"{gate.id}: {replay.replay} has no request of class `{name}`; there are: {there}"
        if isinstance(gate.spec, Rejections) and not held.refused:
            yield place, f"{gate.id} judges nothing: no request of {replay.replay} was refused"
        if isinstance(gate.spec, SameAnswers | LatencyAgainstCapture) and not held.answered:
            yield place, f"{gate.id} compares with captured answers, and {replay.replay} holds times and lengths only"


def refuse_impossible(scenario: Scenario, target: Target, serving: Mapping[str, Any]) -> None:
    """Raise UsageError for a gate or a limit that cannot hold on this target, whatever the traffic does.

    `serving` is what the target said of itself before the run (`targets.url.preflight`).
    """
    if scenario.abort and scenario.abort.gpu_memory is not None and target.gpu == "none":
        raise UsageError("abort: the target has no GPU whose memory could end the run (gpu: none)", str(scenario.path))
    for gate in scenario.gates:
        if isinstance(gate.spec, GpuMemory) and target.gpu != "none":
            for configured in serving["gpu_memory_utilization"].values():
                if refusal := gate.spec.refusal(configured):
                    raise UsageError(refusal, f"{scenario.path}:{gate.line}")


def json_schema() -> dict[str, Any]:
    """The JSON schema of scenario files, for editors."""
    kinds: TypeAdapter[Any] = TypeAdapter(ScenarioFile | ReplayFile)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **kinds.json_schema()}
