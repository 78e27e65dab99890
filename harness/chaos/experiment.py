"""Chaos Toolkit's door, and the only importer of chaoslib: its experiments call these functions, and a run plays them.

An experiment is a document that `chaos validate` and `chaos run` take too. What its activities do is ours: `inject`
puts a fault of the catalogue under guard, `hold` leaves it in force, `heal` takes back whatever is. Chaos Toolkit's own
verdict is kept as a journal and judges nothing: it calls an experiment whose fault never came about completed.
"""

import importlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness import document, parent, scenario, units
from harness.chaos.catalogue import FAULTS
from harness.chaos.discipline import Injection
from harness.chaos.fault import Absent, Aim, Refused
from harness.log import Log, read_run_json
from harness.model import Event, UsageError
from harness.targets import base, url
from harness.targets.base import Target
from harness.units import Period

TTL_S = 300.0  # after which a guard takes a fault back though nobody asked: no experiment holds as long
BARRIER_POLL_S = 0.02


class _Session:
    """What the activities of one process share: where it notes what it does, what is in force, whether it is over."""

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        self.log: Log | None = None
        self.open: list[Injection] = []
        self.force = False
        self.over = threading.Event()

    @contextmanager
    def step(self) -> Iterator[None]:
        """What ends a step from outside ends the session: Chaos Toolkit would go on with the next activity."""
        try:
            yield
        except BaseException:
            self.over.set()
            raise


_session = _Session()


def inject(
    fault: str, ttl: str = f"{TTL_S:g}s", configuration: Mapping[str, Any] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Put a fault in force, under guard, and prove it. Raises as `Injection.begin`; UsageError for wrong arguments."""
    if _session.over.is_set():
        raise UsageError("the run is over: nothing more is broken")
    injection = Injection(
        fault,
        made(fault, arguments, ttl, _session.force),
        _target(configuration),
        _session.log,
        ttl_s=units.duration(ttl),
        run_dir=_session.run_dir,
    )
    with _session.step():
        aim = injection.begin()
    _session.open.append(injection)
    return {"targets": list(aim.targets), "radius": aim.radius, "undo": aim.undo}


def hold(lasts: str) -> bool:
    """Leave what is in force for that long, or until the run is over: it is taken back then, and told to be cut short.

    Raises as `Injection.hold`.
    """
    for_s = units.duration(lasts)
    with _session.step():
        if _session.open:
            _session.open[-1].hold(for_s, _session.over.is_set)
        else:
            _session.over.wait(for_s)
    if _session.over.is_set():
        for injection in reversed(_session.open):
            injection.abort("the run is over")
    return True


def heal(fault: str = "") -> bool:
    """Take back whatever is in force, or is of that name, the last first, all of it whatever becomes of one.

    Raises the first failure.
    """
    failures: list[Exception] = []
    for injection in [one for one in reversed(_session.open) if fault in ("", one.name)]:
        _session.open.remove(injection)
        try:
            injection.end()
        except Exception as error:  # the others are to be taken back all the same
            failures.append(error)
        if injection.signals:
            _session.over.set()
    if failures:
        raise failures[0]
    return True


def canary_answers(configuration: Mapping[str, Any] | None = None) -> bool:
    """Whether the target serves one token through its gateway."""
    return url.serves(_target(configuration))


def made(fault: str, arguments: Mapping[str, Any], ttl: str = f"{TTL_S:g}s", force: bool = False) -> Any:
    """A fault of the catalogue from what a user wrote. Raises UsageError with the nearest name, or what is wrong.

    By `force` it may hit the last replica. What can end by itself does so when its guard would end it, after `ttl`.
    """
    if fault not in FAULTS:
        raise UsageError(f"there is no fault `{fault}`; {document.suggestion(fault, list(FAULTS))}")
    chosen = getattr(FAULTS[fault], "__dataclass_fields__", {})
    given = {**arguments, **({"ttl": ttl} if "ttl_s" in chosen else {})}
    if force and "leave" in chosen:
        given["leave"] = 0
    try:
        TypeAdapter(Period).validate_python(ttl)
        return TypeAdapter(FAULTS[fault]).validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{fault}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _target(configuration: Mapping[str, Any] | None) -> Target:
    named = (configuration or {}).get("target") or os.environ.get("HARNESS_TARGET") or "local"
    return base.load(str(named))


# Before a run -----------------------------------------------------------------------------------------------------


def faults(written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of each `inject` of an experiment, in turn."""
    yield from (given for given, _ in _injected(written))


def _injected(written: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    """The arguments of each `inject`, and for how long `hold` then leaves it in force, as far as that is written."""
    method = written.get("method", [])
    for number, activity in enumerate(method):
        if (given := _asked(activity, "inject")) is not None:
            yield given, held_s(method[number:])


def held_s(activities: Sequence[Mapping[str, Any]]) -> float:
    """For how long they leave in force what was broken before, at least: what the environment fills in is not known.

    Raises ValueError for what is no time.
    """
    holds = [given.get("lasts") for each in activities if (given := _asked(each, "hold")) is not None]
    return sum(units.duration(lasts) for lasts in holds if "${" not in str(lasts))


def _asked(activity: Mapping[str, Any], func: str) -> dict[str, Any] | None:
    """What an activity asks one of our functions for; None when it calls another."""
    provider = activity.get("provider", {})
    mine = (provider.get("module"), provider.get("func")) == (__name__, func)
    return dict(provider.get("arguments", {})) if mine else None


def _ends_early(name: str, fault: Any, ttl: str, for_s: float) -> str:
    """Why a fault would not be in force for as long as it is held; "" when it would."""
    itself_s, guarded_s = getattr(fault, "for_s", math.inf), units.duration(ttl)
    if for_s > itself_s:
        return f"{name} ends by itself after {itself_s:g} s and is to be held for {for_s:g} s: make `for` longer"
    if for_s >= guarded_s:
        return (
            f"the guard of {name} ends it after {guarded_s:g} s of the {for_s:g} s that it is held: make `ttl` longer"
        )
    return ""


def _not_ended_at_once(written: Mapping[str, Any]) -> str:
    """What Chaos Toolkit would do in its own time, deaf to a run that is over; "" when there is nothing."""
    for activity in (*written.get("method", ()), *written.get("rollbacks", ())):
        for key in ("pauses", "background"):
            if activity.get(key):
                return f"the activity `{activity['name']}` has `{key}`"
    return ""


def aims(path: Path, target: Target, force: bool = False) -> Iterator[tuple[str, Aim]]:
    """What each fault of an experiment would hit now; nothing is broken.

    Raises UsageError for a document that is no experiment, and for a fault that is wrong or would be refused; Absent
    when it is about something that the target does not have.
    """
    for given, for_s in _injected(_read(path)):
        name, ttl = str(given.pop("fault", "")), str(given.pop("ttl", f"{TTL_S:g}s"))
        fault = made(name, given, ttl, force)
        if early := _ends_early(name, fault, ttl, for_s):
            raise UsageError(early, str(path))
        try:
            yield name, Injection(name, fault, target, None, ttl_s=0.0, run_dir=None, dry_run=True).begin()
        except Absent:
            raise
        except Refused as refusal:
            forced = "; --force goes on" if getattr(fault, "leave", 0) else ""
            raise UsageError(f"{name} is refused: {refusal}{forced}", str(path)) from None


def _read(path: Path) -> dict[str, Any]:
    """An experiment that a run can play. Raises UsageError."""
    from chaoslib.exceptions import InvalidExperiment  # half a second, and only where something is to be broken
    from chaoslib.experiment import ensure_experiment_is_valid

    written: dict[str, Any] = document.read(path).value
    try:
        ensure_experiment_is_valid(written)
        held_s(written["method"])
    except (InvalidExperiment, ValueError) as error:
        raise UsageError(f"this is no experiment: {error}", str(path)) from None
    if longer := _not_ended_at_once(written):
        raise UsageError(f"{longer}, which nobody can end at once: let it `hold` instead", str(path))
    return written


# A run's child ----------------------------------------------------------------------------------------------------


def play(run_dir: Path) -> int:
    """Play the experiments of a run at their moments; every fault is taken back before this returns."""
    parent.die_with(parent.conductor())
    signal.signal(signal.SIGTERM, _enough)
    os.environ["HARNESS_TARGET"] = str(run_dir / "target.yaml")
    _session.run_dir, _session.log = run_dir, Log(run_dir / "log.chaos.jsonl")
    _session.force = bool(read_run_json(run_dir).get("force"))
    planned = scenario.load(run_dir / "scenario.yaml", to_plan=False).chaos
    chaoslib_run = importlib.import_module("chaoslib.run")  # half a second, which no experiment is to begin late by
    chaoslib_run.exit_signals = nullcontext  # type: ignore[attr-defined]  # its SIGTERM is swallowed by an activity
    _session.log.event(Event(0.0, "ready", "chaos"))
    try:
        origin_s = _origin(run_dir)
        for number, each in enumerate(planned):
            if origin_s is not None and not _session.over.wait(max(0.0, origin_s + each.at_s - time.monotonic())):
                _run(run_dir, number)
    finally:
        heal()
        _session.log.close()
    return 0


def _enough(number: int, _: FrameType | None) -> None:
    _session.over.set()


def _origin(run_dir: Path) -> float | None:
    while not _session.over.wait(BARRIER_POLL_S):
        if "origin_monotonic_s" in (run := read_run_json(run_dir)):
            return float(run["origin_monotonic_s"])
    return None


def _run(run_dir: Path, number: int) -> None:
    """One experiment, its rollbacks always done, and Chaos Toolkit's journal of it beside the log."""
    from chaoslib.experiment import run_experiment

    written = document.read(run_dir / f"experiment-{number}.yaml").value
    settings = {"runtime": {"rollbacks": {"strategy": "always"}}}
    journal = run_experiment(written, settings=settings)
    if not _met(journal) and _session.log:
        origin_s = read_run_json(run_dir)["origin_monotonic_s"]
        why = f"the steady state was not met: {journal['experiment']['steady-state-hypothesis']['title']}"
        _session.log.event(Event(time.monotonic() - origin_s, "refused", written["title"], {"why": why}))
    path = run_dir / f"experiment-{number}.journal.json"
    path.write_text(json.dumps(journal, indent=1, default=str) + "\n")


def _met(journal: Mapping[str, Any]) -> bool:
    """Whether all was well before the experiment; Chaos Toolkit breaks nothing where it was not."""
    before = (journal.get("steady_states") or {}).get("before")
    return not before or bool(before["steady_state_met"])
