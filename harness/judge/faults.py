"""What was broken during a run, when, and whether that is proven: the events of chaos, read as injections.

    injecting -> injected (with evidence) -> healing -> healed (with evidence); or refused, unproven, aborted

A fault without evidence was not applied, and one without evidence of its end is still there: both are said, and neither
is ever taken for granted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.model import Event, Finding, Judgement
from harness.timeline import Timeline

_KINDS = ("injecting", "injected", "healing", "healed", "unproven", "refused", "aborted")


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault. Moments in seconds of the run, None for what never came; `trouble` is why it is not proven."""

    name: str
    injecting_s: float | None = None
    injected_s: float | None = None
    healing_s: float | None = None
    healed_s: float | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)  # targets, radius, undo, arguments
    evidence: Mapping[str, Any] = field(default_factory=dict)
    undone: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""
    doubted: bool = False  # it was in force, but not as long as it should, or nobody can tell

    @property
    def left(self) -> bool:
        """Whether it was begun and nothing shows that it is over."""
        return self.injecting_s is not None and self.healed_s is None

    @property
    def complaint(self) -> str:
        """What is not proven, in one sentence; "" when all is."""
        because = f": {self.trouble}" if self.trouble else ""
        if self.injecting_s is None or self.injected_s is None:
            return f"no evidence that the fault was applied ({self.name}){because}"
        if self.left:
            return f"no evidence that the fault was undone ({self.name}){because}"
        return f"the fault was cut short ({self.name}){because}" if self.doubted else ""


def of(timeline: Timeline) -> list[Injection]:
    """Every fault of the run in the order of time."""
    found: list[Injection] = []
    for event in timeline.events:
        if event.kind not in _KINDS:
            continue
        named = [k for k, one in enumerate(found) if one.name == event.name]
        awaiting = [k for k in named if _awaits(found[k], event.kind)]
        if event.kind == "injecting" or (event.kind == "refused" and not awaiting):
            awaiting = [len(found)]
            found.append(Injection(event.name))
        for at in (awaiting or named)[-1:]:  # several of a name may be in force: the last is taken back first
            found[at] = _told(found[at], event)
    return found


def _awaits(injection: Injection, kind: str) -> bool:
    """Whether an event of this kind can be the next of a fault's story."""
    if kind in ("injected", "refused"):
        return injection.left and injection.injected_s is None
    if kind == "healing":
        return injection.left and injection.healing_s is None
    return injection.left


def _told(injection: Injection, event: Event) -> Injection:
    """The injection with what one more event says of it. Nothing counts as proven without evidence."""
    detail, at_s = event.detail, event.at_s
    evidence = detail.get("evidence")
    if event.kind == "injecting":
        return replace(injection, injecting_s=at_s, plan=detail)
    if event.kind == "injected" and evidence and injection.injected_s is None:
        return replace(injection, injected_s=at_s, evidence=evidence)
    if event.kind == "healing" and injection.healing_s is None:
        return replace(injection, healing_s=at_s)
    if event.kind == "healed" and evidence and injection.healed_s is None:
        return replace(injection, healed_s=at_s, undone=evidence)
    if event.kind in ("unproven", "refused", "aborted"):
        told = dict.fromkeys((injection.trouble, str(detail.get("why", event.kind))))
        doubted = injection.doubted or event.kind == "aborted" or detail.get("step") == "hold"
        return replace(injection, trouble="; ".join(filter(None, told)), doubted=doubted)
    return injection


def planned(timeline: Timeline) -> bool:
    """Whether the run was to have faults, by its own record or by what happened."""
    return bool(timeline.run.get("chaos")) or any(event.kind in _KINDS for event in timeline.events)


def in_force(timeline: Timeline, at_s: np.ndarray, slack_s: float) -> np.ndarray:
    """Mask of the moments at which a proven fault was in force; its end is seen up to `slack_s` late."""
    mask = np.zeros(len(at_s), dtype=bool)
    for one in of(timeline):
        if one.injecting_s is not None and one.injected_s is not None:
            end_s = np.inf if one.healed_s is None else one.healed_s + slack_s
            mask |= (at_s >= one.injecting_s) & (at_s <= end_s)
    return mask


def left(timeline: Timeline) -> list[Injection]:
    """The faults that nothing shows to be over."""
    return [injection for injection in of(timeline) if injection.left]


def safety_stop(timeline: Timeline) -> str:
    """Why all experiments were stopped for safety; "" when they were not. An `aborted` with a name is of one fault."""
    stops = [event for event in timeline.events if event.kind == "aborted" and not event.name]
    return str(stops[0].detail.get("why", "aborted")) if stops else ""


def finding(timeline: Timeline) -> Finding:
    """Whether the run's faults may be believed: each was applied and undone, and shows both."""
    injections = of(timeline)
    complaints = [complaint for injection in injections if (complaint := injection.complaint)]
    if not injections:
        complaints = ["no evidence that the fault was applied: nothing was injected"]
    if why := safety_stop(timeline):
        complaints.append(f"the experiments were stopped for safety: {why}")
    told = "; ".join(complaints) or f"{_several(injections)} applied and undone, with evidence of both"
    figures = {
        "n": len(injections),
        "applied": sum(injection.injected_s is not None for injection in injections),
        "undone": sum(injection.healed_s is not None for injection in injections),
    }
    judgement = Judgement.INVALID if complaints else Judgement.PASS
    return Finding("fault", judgement, told, limit="proven", figures=figures)


def _several(injections: Sequence[Injection]) -> str:
    return f"{injections[0].name} was" if len(injections) == 1 else f"all {len(injections)} faults were"


def table(timeline: Timeline) -> list[dict[str, Any]]:
    """A row for each fault: what, where, when, and what shows it."""
    return [
        {
            "fault": injection.name,
            "targets": list(injection.plan.get("targets", ())),
            "injected_s": injection.injected_s,
            "evidence": dict(injection.evidence) or injection.complaint,
            "lasted_s": _lasted_s(injection),
            "healed_s": injection.healed_s,
            "undone": dict(injection.undone) or injection.trouble or "not shown",
        }
        for injection in of(timeline)
    ]


def _lasted_s(injection: Injection) -> float | None:
    if injection.injected_s is None or injection.healed_s is None:
        return None
    return injection.healed_s - injection.injected_s
