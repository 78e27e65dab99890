"""The conductor: lays out a run, starts its children, sets the origin of its clock, waits, stops, and has it judged.

    scenario + target -> run directory -> plan -> [watch, player] ready -> origin -> ... -> stopped -> verdict

It moves no traffic and measures nothing: children do, each into its own log, so that the conductor may die at any
moment and the run directory stays readable. Children live in sessions of their own (a terminal's Ctrl-C reaches the
conductor alone, which stops them in order) and stop by themselves when the conductor is gone.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import orjson

from harness import budget, evidence, parent, provenance, timeline
from harness import scenario as scenarios
from harness.chaos import discipline, experiment, observation, undo
from harness.chaos.fault import Absent, Aim
from harness.drivers import process
from harness.judge import verdict as verdicts
from harness.judge.counts import Latency
from harness.log import Log, read_log, write_beside
from harness.model import EXIT_INTERRUPTED, EXIT_UNSAFE, Event, UsageError, Verdict, Window
from harness.report.panel import LiveState, Panel
from harness.scenario import Planned, Scenario
from harness.targets import base, local, url
from harness.targets.base import Target
from harness.traffic import plan

READY_LIMIT_S = 60.0  # imports and connection warm-up of every child, on a busy machine
DISTANT_READY_LIMIT_S = 600.0  # people start the workers on other machines
ORIGIN_AHEAD_S = 0.5  # the origin lies this far ahead when it is told, so that no child learns of it late
STOP_LIMIT_S = 10.0
HEAL_LIMIT_S = 180.0  # for an experiment to take back what it broke: a replica on a busy machine starts in minutes
FLUSHED_S = 2.5  # players flush once a second: what is over is on disk by then
TICK_S = 0.2
_PRODUCTION = re.compile(r"(?<![a-z0-9])prod(uction)?(?![a-z0-9])", re.IGNORECASE)
_RAISED = re.compile(r"[\w.]*(Error|Exception)\b.*:")  # the line of a traceback that says what went wrong


@dataclass(frozen=True, slots=True)
class Order:
    """What the user asked for on the command line: scenarios in turn, against one target."""

    scenarios: tuple[Path, ...]
    target: str = "local"
    engine: str | None = None
    workers: int = 1
    seed: int | None = None
    runs: Path = Path("runs")
    stage: int = 0
    web_port: int | None = None
    master_port: int | None = None
    recording: Path | None = None
    force: bool = False


def run(
    order: Order, panel: Callable[[LiveState], Panel], tell: Callable[[Path, Verdict], None]
) -> tuple[Path, Verdict]:
    """Run each scenario in turn and tell each verdict; the run directory and the verdict that stand for all.

    A local stack that this call brought up is taken down again. A run that was interrupted, or has left the stack
    unsafe, is the last. Raises UsageError before anything is sent, KeyboardInterrupt when the user interrupted before
    there was a run.
    """
    loaded = [_loaded(path, order) for path in order.scenarios]
    target = base.load(order.target, order.engine)
    done: list[tuple[Path, Verdict]] = []
    with _Signals() as signals, evidence.only_run(order.runs):
        if stale := undo.stale():
            raise UsageError(stale)
        stage_dir = evidence.begin_stage(order.runs, order.stage) if order.stage else None
        with _serving(target):
            for scenario in _to_play(order, loaded, target, stage_dir):
                if signals.count and not done:
                    raise KeyboardInterrupt
                done.append(_run_one(order, scenario, target, panel, signals))  # after a signal it says so, and ends
                tell(*done[-1])
                if done[-1][1].exit_code in (EXIT_INTERRUPTED, EXIT_UNSAFE):
                    break
        if stage_dir:
            return stage_dir, evidence.settle_stage(stage_dir, order.stage, [run_dir for run_dir, _ in done])
    return done[-1][0], evidence.worst([verdict for _, verdict in done])


def preview(order: Order) -> Iterator[str]:
    """What the experiments of each scenario would hit, line by line; the stack must be up, and stays as it is.

    Raises UsageError for what a run would refuse.
    """
    target = base.load(order.target, order.engine)
    if stale := undo.stale():
        raise UsageError(stale)
    for path in order.scenarios:
        scenario = _loaded(path, order)
        if not scenario.chaos:
            yield f"{path} breaks nothing"
        try:
            for planned, name, aim in _aims(order, scenario, target):
                yield f"{path}: {planned.experiment} at {planned.at_s:g} s"
                yield from discipline.told(name, aim)
        except Absent as nothing:
            yield f"{path} has nothing to break: {nothing}"


def _to_play(order: Order, loaded: list[Scenario], target: Target, stage_dir: Path | None) -> list[Scenario]:
    """The scenarios that this target can be put to. A stage goes on without one that is about something which the
    target does not have, and says so.

    Raises UsageError where the target does not serve, nothing may be broken, a gate cannot hold or nothing is left.
    """
    serving, left_out = url.preflight(target), dict[Path, str]()
    for scenario in loaded:
        scenarios.refuse_impossible(scenario, target, serving)
        try:
            for _ in _aims(order, scenario, target):
                pass
        except Absent as nothing:
            left_out[scenario.path] = str(nothing)
    played = [scenario for scenario in loaded if scenario.path not in left_out]
    if left_out and not (stage_dir and played):
        path, why = next(iter(left_out.items()))
        raise UsageError(f"there is nothing to break here: {why}", str(path))
    if stage_dir and left_out:
        evidence.leave_out(stage_dir, {path.stem: why for path, why in left_out.items()})
    return played


def _aims(order: Order, scenario: Scenario, target: Target) -> Iterator[tuple[Planned, str, Aim]]:
    """Every fault of a scenario and what it would hit. Raises UsageError where nothing may be broken, and Absent."""
    if scenario.chaos and target.kind == "url":
        raise UsageError("a target of kind url is out of reach: nothing of it can be broken", target.where("kind"))
    if scenario.chaos and target.chaos != "allowed" and (named := _PRODUCTION.search(target.url)):
        raise UsageError(
            f"{target.url} is called {named[0]}: nothing is broken there, unless its file says `chaos: allowed`",
            target.where("url"),
        )
    for planned in scenario.chaos:
        for name, aim in experiment.aims(planned.experiment, target, order.force):
            yield planned, name, aim
    if isinstance(scenario.traffic, plan.Traffic):  # how long a recording lasts, its plan will tell
        observation.refuse_too_short(scenario, scenario.traffic.windows[-1].end_s)


def _loaded(path: Path, order: Order) -> Scenario:
    scenario = scenarios.load(path, recording=order.recording)
    return scenario if order.seed is None else replace(scenario, seed=order.seed)


@contextlib.contextmanager
def _serving(target: Target) -> Iterator[None]:
    started = target.kind == "local" and local.up(target.path)
    try:
        yield
    finally:
        if started:
            local.down()


class _Signals:
    """Ctrl-C, SIGTERM and SIGHUP are counted, from before the stack comes up until it is down; loops look at the count.

    So nothing is left half done by an exception in the wrong place.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "_Signals":
        self._handlers = {
            number: signal.signal(number, self._noted) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _noted(self, number: int, _: FrameType | None) -> None:
        self.count += 1


def _run_one(
    order: Order, scenario: Scenario, target: Target, panel: Callable[[LiveState], Panel], signals: _Signals
) -> tuple[Path, Verdict]:
    run_dir = evidence.create(order.runs, scenario.path.stem)
    shutil.copyfile(scenario.path, run_dir / "scenario.yaml")
    shutil.copyfile(target.path, run_dir / "target.yaml")
    for number, planned in enumerate(scenario.chaos):
        shutil.copyfile(planned.experiment, run_dir / f"experiment-{number}.yaml")
    header, plan_sha256 = plan.write(
        run_dir, scenario.path, scenario.traffic, target, scenario.seed, scenario.extendable
    )
    observation.refuse_too_short(scenario, header.windows[-1].end_s)
    facts = _run_facts(order, scenario, target, run_dir, plan_sha256)
    _write_run_json(run_dir, facts)
    look = _Look(scenario, target, header.windows) if scenario.extendable else None
    overdue_s = max(window.end_s for window in header.windows) + 3 * header.time_limit_s + STOP_LIMIT_S
    show = panel(LiveState.begin(header, scenario.gates))
    spent = budget.Budget(scenario.abort, run_dir) if scenario.abort else None
    with _Conductor(run_dir, facts, show, signals, look, overdue_s, spent) as conductor:
        conductor.conduct(order, bool(scenario.chaos))
    return run_dir, evidence.settle(run_dir)


def _run_facts(order: Order, scenario: Scenario, target: Target, run_dir: Path, plan_sha256: str) -> dict[str, Any]:
    served = f"{target.engine}/{target.profile}" if target.engine == "sim" else target.engine
    return {
        "run": run_dir.name,
        "scenario": str(scenario.path),
        "claim": scenario.claim,
        "stage": order.stage,
        "seed": scenario.seed,
        "plan_sha256": plan_sha256,
        "workers": order.workers,
        "target": target.url,
        "engine": served or "unknown",
        "simulated": target.engine == "sim",
        "chaos": [{"experiment": str(planned.experiment), "at_s": planned.at_s} for planned in scenario.chaos],
        "force": order.force,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance.facts(Path.cwd()),
    }


def _write_run_json(run_dir: Path, facts: dict[str, Any]) -> None:
    write_beside(run_dir / "run.json", orjson.dumps(facts, option=orjson.OPT_INDENT_2))


class _Child:
    """One process of the run, its output beside its log."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], run_dir: Path) -> None:
        self.name = name
        self.output = run_dir / f"{name}.out"
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment, parent.CONDUCTOR: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def farewell(self) -> dict[str, Any]:
        """How it ended; with its last words when it did not end well."""
        if not self.code:
            return {"code": self.code}
        lines = self.output.read_text(errors="replace").strip().splitlines() or ["nothing"]
        said = next((line for line in reversed(lines) if _RAISED.match(line)), lines[-1])
        return {"code": self.code, "said": said[:300]}

    def ask_to_stop(self) -> None:
        if self.code is None:
            self.process.terminate()

    def end(self) -> None:
        """Kill its whole group: workers that a dead master left behind die too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class _Look:
    """The one look at a run that may be extended: once every request due in the steady state has had its time."""

    def __init__(self, scenario: Scenario, target: Target, windows: Sequence[Window]) -> None:
        self.scenario, self.target = scenario, target
        steady = next(window for window in windows if window.name == "steady")
        limits_s = [gate.spec.below_s for gate in scenario.gates if isinstance(gate.spec, Latency)]
        self.at_s = steady.end_s + max(limits_s, default=scenario.traffic.time_limit_s) + FLUSHED_S

    def event(self, run_dir: Path, now_s: float) -> Event:
        """`extended` when the evidence is too thin, `decided` when the rest of the plan need not be played."""
        thin = verdicts.undecided(timeline.read(run_dir), self.scenario.gates, self.target.gpu)
        return Event(now_s, "extended" if thin else "decided")


class _Conductor:
    """One run in progress: its children, and the log of what was done with them."""

    def __init__(
        self,
        run_dir: Path,
        facts: dict[str, Any],
        panel: Panel,
        signals: _Signals,
        look: _Look | None,
        overdue_s: float,
        spent: budget.Budget | None,
    ) -> None:
        self.run_dir, self.facts, self.panel, self.signals = run_dir, facts, panel, signals
        self.look, self.overdue_s, self.budget, self._budget_at_s = look, overdue_s, spent, 0.0
        self.log = Log(run_dir / "log.conductor.jsonl")
        self.children: list[_Child] = []
        self.origin_s: float | None = None

    def __enter__(self) -> "_Conductor":
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.end()
        self.log.close()

    def conduct(self, order: Order, chaos: bool) -> None:
        """Play the plan from ready to stopped, and break the stack meanwhile if the scenario says so."""
        watch = self._start("watch", [sys.executable, "-m", "harness.watch", str(self.run_dir)], {})
        player = self._start(
            "player",
            process.command(self.run_dir, order.workers, order.web_port, order.master_port),
            process.environment(self.run_dir),
        )
        if chaos:
            self._start("chaos", [sys.executable, "-m", "harness.chaos", str(self.run_dir)], {})
        if self._wait_until_ready(DISTANT_READY_LIMIT_S if order.master_port else READY_LIMIT_S):
            self._set_origin()
            self._wait_for(player)
        self._stop(*(child for child in reversed(self.children) if child is not watch), watch)
        asked = self.signals.count
        undo.await_guards(self.run_dir, HEAL_LIMIT_S, lambda: self.signals.count > asked)
        for child in self.children:
            self._note("exited", child.name, child.farewell())

    def _start(self, name: str, command: list[str], environment: dict[str, str]) -> _Child:
        child = _Child(name, command, environment, self.run_dir)
        self.children.append(child)
        return child

    def _now_s(self) -> float:
        return time.monotonic() - self.origin_s if self.origin_s is not None else 0.0

    def _note(self, kind: str, name: str = "", detail: dict[str, Any] | None = None) -> None:
        self.log.event(Event(self._now_s(), kind, name, detail or {}))

    def _wait_until_ready(self, limit_s: float) -> bool:
        """The start barrier. False when a child is gone or never ready, or the user has had enough."""
        limit = time.monotonic() + limit_s
        while not self.signals.count and not self._gone():
            ready = {event.name for event in self._events() if event.kind == "ready"}
            waiting = [child.name for child in self.children if child.name not in ready]
            if not waiting:
                return True
            if time.monotonic() > limit:
                self._note("never_ready", ", ".join(waiting), {"limit_s": limit_s})
                return False
            time.sleep(0.05)
        return False

    def _events(self) -> Iterator[Event]:
        for path in self.run_dir.glob("log.*.jsonl"):
            yield from (entry for entry in read_log(path, []) if isinstance(entry, Event))

    def _set_origin(self) -> None:
        self.origin_s = time.monotonic() + ORIGIN_AHEAD_S
        wall_s = datetime.now(UTC).timestamp() + (self.origin_s - time.monotonic())
        _write_run_json(self.run_dir, {**self.facts, "origin_monotonic_s": self.origin_s, "origin_wall_s": wall_s})
        self.log.event(Event(0.0, "origin"))

    def _gone(self) -> bool:
        """Whether a child has ended that the run needs to its end: an experiment may be over long before."""
        return any(child.code is not None and (child.name != "chaos" or child.code) for child in self.children)

    def _wait_for(self, player: _Child) -> None:
        """Until the player is done or dead, the user interrupts, a look has seen enough, or it takes too long."""
        with self.panel:
            while not self.signals.count and not self._gone():
                self.panel.show(self._now_s(), self.run_dir)
                if self.look and self._now_s() >= self.look.at_s and self._looked() == "decided":
                    break
                if self._overspent():
                    break
                if self._now_s() > self.overdue_s:
                    self._note("overdue", "player", {"limit_s": self.overdue_s})
                    break
                time.sleep(TICK_S)  # waiting for the child would wake twenty times a second while traffic flows
            if self.look and player.code == 0:  # the plan ended before the look was due
                self._looked()
            self.panel.show(self._now_s(), self.run_dir)

    def _overspent(self) -> bool:
        """Whether the run must end for safety; looked at once a second."""
        now_s = self._now_s()
        if self.budget is None or now_s < self._budget_at_s:
            return False
        self._budget_at_s = now_s + 1.0
        if why := self.budget.spent(now_s):
            self._note("aborted", detail={"why": why})
        return bool(why)

    def _looked(self) -> str:
        if self.look is None:
            return ""
        event, self.look = self.look.event(self.run_dir, self._now_s()), None
        self.log.event(event)
        return event.kind

    def _stop(self, *children: _Child) -> None:
        """Stop what still runs, in this order: faults are undone first, and open requests are watched to the end. A
        second signal kills; what a killed experiment has broken is undone by its guard."""
        if self.signals.count:
            self._note("interrupted")
        asked = self.signals.count
        for child in children:
            limit_s = HEAL_LIMIT_S if child.name == "chaos" else STOP_LIMIT_S
            child.ask_to_stop()
            limit = time.monotonic() + limit_s
            while child.code is None and time.monotonic() < limit and self.signals.count == asked:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(TICK_S)
            if child.code is None:
                self._note("note", f"{child.name} did not stop and was killed")
                child.end()
