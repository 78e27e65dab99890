"""A run while it goes: phase, rates, the latency gate so far, GPU memory, and what happened last.

`LiveState` is a value that grows by `advance`; every figure is a function of it, and `line` and `render` draw it. The
counts are exact and by the judge's own arithmetic, of the answers that have reached the disk; requests that are still
open are shown as in flight, not guessed at. Nothing here is a verdict, and nothing here delays the run.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel as Frame
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness import plan_file
from harness.judge import statistics
from harness.judge.counts import Latency
from harness.judge.gates import Gate
from harness.judge.verdict import for_two_looks
from harness.log import Blocks, Lines
from harness.model import Event, Outcome, Reading, Request, Window
from harness.plan_file import EXTENSION, PlanHeader, played

TERMINAL_PERIOD_S, PLAIN_PERIOD_S = 0.5, 5.0
RATE_READINGS = 11  # one a second: rates are over the last ten seconds
_NONE = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Promise:
    """The latency gate that is followed while the run goes."""

    name: str
    limit_s: float
    quantile: float
    confidence: float
    window: str
    classes: tuple[str, ...] = ()

    def counts(self, request: Request) -> bool:
        """Whether a request due in the window is of those that the gate is about; hang-ups are left to the judge."""
        of_class = not self.classes or request.class_name in self.classes
        return of_class and request.good and request.give_up_s is None


@dataclass(frozen=True, slots=True, eq=False)
class LiveState:
    """What is known so far. `due_s` and `counted` go by the plan's index, `answered_due_s`, `latency_s` by answer.

    A plan that may be extended holds the extension from the start, and it is played until the run's look decides: its
    answers are kept, and count once the extension has become part of the steady state.
    """

    windows: tuple[Window, ...]
    promise: Promise | None = None
    due_s: np.ndarray = field(default_factory=lambda: _NONE)
    counted: np.ndarray = field(default_factory=lambda: _NONE.astype(bool))
    now_s: float = 0.0
    answered_due_s: np.ndarray = field(default_factory=lambda: _NONE)
    latency_s: np.ndarray = field(default_factory=lambda: _NONE)  # a failure took for ever
    sent: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    in_flight: Mapping[str, float] = field(default_factory=dict)
    gpu_free: Mapping[str, float] = field(default_factory=dict)
    gpu_total: Mapping[str, float] = field(default_factory=dict)
    last: Event | None = None

    @classmethod
    def begin(cls, header: PlanHeader, judged: Sequence[Gate]) -> "LiveState":
        """A run that has not started, following the scenario's first gate of response latency."""
        may_extend = any(window.name == EXTENSION for window in header.windows)
        return cls(header.windows, next(_promises(for_two_looks(judged) if may_extend else judged), None))

    def with_plan(self, requests: Iterable[Request]) -> "LiveState":
        """The same, knowing what is due when and which requests the gate counts."""
        promise = self.promise
        rows = [(r.due_s, promise is not None and promise.counts(r)) for r in requests]
        due_s, counted = zip(*rows, strict=True) if rows else ((), ())
        return replace(self, due_s=np.array(due_s, dtype=float), counted=np.array(counted, dtype=bool))

    def advance(
        self, now_s: float, blocks: Iterable[np.ndarray] = (), entries: Iterable[Event | Reading] = ()
    ) -> "LiveState":
        """The state at `now_s`, after the observations and the log entries that are new since the last."""
        due_s, latency_s = [self.answered_due_s], [self.latency_s]
        for seen in blocks:
            counted = seen[self.counted[seen["index"]] & (seen["outcome"] != Outcome.REJECTED_AS_EXPECTED)]
            due_s.append(counted["due_s"])
            latency_s.append(np.where(counted["outcome"] == Outcome.OK, counted["ended_s"] - counted["due_s"], np.inf))
        state = replace(self, now_s=now_s, answered_due_s=np.concatenate(due_s), latency_s=np.concatenate(latency_s))
        for entry in entries:
            state = state._heard(entry)
        return state

    def _heard(self, entry: Event | Reading) -> "LiveState":
        if isinstance(entry, Event):
            state = self
            if entry.kind in ("extended", "decided"):
                state = replace(self, windows=played(self.windows, entry.kind == "extended"))
            return state if self.last and self.last.at_s > entry.at_s else replace(state, last=entry)
        worker, gpu = entry.labels.get("worker", ""), entry.labels.get("gpu", "")
        match entry.name:
            case "player.sent":
                readings = (*self.sent.get(worker, ()), (entry.at_s, entry.value))[-RATE_READINGS:]
                return replace(self, sent={**self.sent, worker: readings})
            case "player.in_flight":
                return replace(self, in_flight={**self.in_flight, worker: entry.value})
            case "gpu.free_bytes":
                return replace(self, gpu_free={**self.gpu_free, gpu: entry.value})
            case "gpu.total_bytes":
                return replace(self, gpu_total={**self.gpu_total, gpu: entry.value})
        return self

    @property
    def phase(self) -> str:
        """The window at hand; before the first and after the last one there is nothing to send."""
        if self.now_s < 0:
            return "starting"
        inside = (w.name for w in self.windows if w.start_s <= self.now_s < w.end_s)
        return next(inside, "draining").replace("_", "-")

    @property
    def end_s(self) -> float:
        """When the traffic ends, as far as that is decided."""
        return max((w.end_s for w in self.windows if w.name != EXTENSION), default=0.0)

    @property
    def promised(self) -> tuple[Promise, Window] | None:
        """The gate that is followed, and its window as it stands; None where there is no such window."""
        windows = {window.name: window for window in self.windows}
        promise = self.promise
        return (promise, windows[promise.window]) if promise and promise.window in windows else None

    @property
    def rates_per_s(self) -> tuple[float, float]:
        """Achieved and planned over the same last seconds; `nan` until two readings are there."""
        spans = [(readings[0], readings[-1]) for readings in self.sent.values() if len(readings) > 1]
        if not spans:
            return math.nan, math.nan
        start_s, end_s = min(first[0] for first, _ in spans), max(last[0] for _, last in spans)
        due = int(((self.due_s >= start_s) & (self.due_s < end_s)).sum())
        achieved = sum((last[1] - first[1]) / (last[0] - first[0]) for first, last in spans)
        return achieved, due / (end_s - start_s)

    @property
    def gpu_memory(self) -> dict[str, float]:
        """1 - free/total of each GPU, by its latest readings."""
        return {gpu: 1 - free / self.gpu_total[gpu] for gpu, free in self.gpu_free.items() if self.gpu_total.get(gpu)}


def _promises(judged: Sequence[Gate]) -> Iterator[Promise]:
    for gate in judged:
        spec = gate.spec
        if isinstance(spec, Latency) and spec.of == "e2e":
            yield Promise(gate.id, spec.below_s, spec.quantile, spec.confidence, spec.window, spec.classes)


# Drawing ---------------------------------------------------------------------------------------------------------


def line(state: LiveState) -> str:
    """The state as one plain line."""
    return " | ".join(f"{label} {text}" if label else text for label, text in _cells(state))


def render(state: LiveState) -> RenderableType:
    """The state as a panel for a terminal."""
    table = Table.grid(padding=(0, 2))
    for label, text in _cells(state):
        table.add_row(Text(label or "phase", style="dim"), Text(text))
    done = min(max(state.now_s, 0.0), state.end_s)
    table.add_row("", ProgressBar(total=state.end_s or 1.0, completed=done, width=60))
    return Frame(table, title="harness", title_align="left", width=100)


def _cells(state: LiveState) -> Iterator[tuple[str, str]]:
    yield "", f"{state.phase}, {_clock(state.end_s - max(state.now_s, 0.0))} left"
    achieved, planned = state.rates_per_s
    yield "rate", f"{_known(achieved, '.1f')} of {_known(planned, '.1f')}/s"
    yield from _latency_cells(state)
    for gpu, used in sorted(state.gpu_memory.items()):
        yield gpu, f"{used:.1%}"
    yield "in flight", f"{sum(state.in_flight.values()):.0f}"
    if state.last:
        yield "last", f"{state.last.kind} {state.last.name}".strip()


def _latency_cells(state: LiveState) -> Iterator[tuple[str, str]]:
    """The gate's quantile, its upper bound by the judge's arithmetic, and its count."""
    if state.promised is None:
        return
    promise, window = state.promised
    inside = (state.answered_due_s >= window.start_s) & (state.answered_due_s < window.end_s)
    due_s, latency_s = state.answered_due_s[inside], state.latency_s[inside]
    n, is_bad = len(latency_s), latency_s >= promise.limit_s
    sample = statistics.Sample.clustered(due_s, is_bad, window.start_s, window.end_s)
    measured_s = statistics.nearest_rank(latency_s, promise.quantile)
    rank = sample.bound_rank(1 - promise.quantile, promise.confidence)
    bound_s = math.nan if rank is None else float(np.partition(latency_s, rank - 1)[rank - 1])
    shown = f"{_seconds(measured_s)}, bound {_seconds(bound_s)}, limit {promise.limit_s:g} s"
    yield f"P{100 * promise.quantile:g}", shown
    yield "bad", f"{int(is_bad.sum())} of {statistics.allowed(n, promise.quantile)} allowed in {n}"


def _known(value: float, form: str) -> str:
    return "?" if math.isnan(value) else format(value, form)


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else f"{_known(value, '.3f')} s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, math.ceil(seconds)), 60)
    return f"{minutes}:{rest:02d}"


# Showing ---------------------------------------------------------------------------------------------------------


class Panel(Protocol):
    """Somebody who shows a run while it goes; open while traffic flows."""

    def __enter__(self) -> "Panel": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def show(self, now_s: float, run_dir: Path) -> None:
        """Look at what is new in the run directory, and show it when it is time to."""


class LivePanel:
    """A panel in place on a terminal, one plain line every five seconds anywhere else."""

    def __init__(self, state: LiveState, console: Console | None = None) -> None:
        self._state, self._console = state, console or Console()
        in_place = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if in_place else None
        self._period_s = TERMINAL_PERIOD_S if in_place else PLAIN_PERIOD_S
        self._next_s, self._planned = -math.inf, False
        self._logs: dict[Path, Lines] = {}
        self._blocks: dict[Path, Blocks] = {}

    def __enter__(self) -> "LivePanel":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def show(self, now_s: float, run_dir: Path) -> None:
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._period_s
        if not self._planned:
            self._state, self._planned = self._state.with_plan(plan_file.read(run_dir / "plan.jsonl")[1]), True
        self._state = self._state.advance(now_s, self._new_blocks(run_dir), self._new_entries(run_dir))
        if self._live:
            self._live.update(render(self._state), refresh=True)
        else:
            self._console.out(line(self._state), highlight=False)

    def _new_blocks(self, run_dir: Path) -> Iterator[np.ndarray]:
        for path in sorted(run_dir.glob("log.*.bin")):
            for records, _ in self._blocks.setdefault(path, Blocks(path)).new():
                yield records

    def _new_entries(self, run_dir: Path) -> Iterator[Event | Reading]:
        for path in sorted(run_dir.glob("log.*.jsonl")):
            yield from self._logs.setdefault(path, Lines(path)).new()
