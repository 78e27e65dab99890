"""The GPU memory gate: every raw sample of every GPU stays below a limit, and the samples are enough to say so.

The ratio is `1 - free / total`, which counts what the driver reserves as used. Its evidence comes first: as many GPUs
as the watcher announced, samples through the whole window, no hole, no `nan`, no zero while requests are served,
no series that is frozen. Short of that the finding is INVALID, whatever the samples that did come say. A maximum of
samples is a lower bound of the peak, and says how long a peak it can miss. A GPU that shows no load while another does
is spare: its memory is held against the limit, and it may well read zero and never change.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from harness.judge import faults
from harness.judge.counts import percent, seconds
from harness.model import Finding, Judgement, Outcome, Window
from harness.timeline import Timeline
from harness.units import Share, spec

FORMULA = "1 - free / total"
LONGEST_HOLE = 2.5  # sampling intervals
FROZEN_SAMPLES = 30  # memory alone may well be flat: vLLM takes it at start. Utilisation that never moves is not


@dataclass(frozen=True, slots=True)
class Series:
    """One GPU's samples inside a window; `used` is the ratio."""

    gpu: str
    at_s: np.ndarray
    free: np.ndarray
    total: np.ndarray
    utilisation: np.ndarray

    @property
    def worked(self) -> bool:
        return bool((self.utilisation > 0).any())

    @property
    def used(self) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(1 - self.free / self.total)

    def hole_s(self, window: Window) -> float:
        """The longest time without a sample, the window's edges included."""
        return float(np.diff(np.concatenate([[window.start_s], self.at_s, [window.end_s]])).max())

    def coverage(self, window: Window, interval_s: float) -> float:
        expected = max(1, math.floor((window.end_s - window.start_s) / interval_s))
        return min(1.0, len(self.at_s) / expected)


@dataclass(frozen=True, slots=True)
class Watching:
    """What the watcher announced before the run: how many GPUs, how often, by whom; `why` there are none."""

    series: int
    interval_s: float
    source: str
    simulated: bool
    why: str = ""


@spec
class GpuMemory:
    """Device memory in use stays below a share of the card, at every sample of every GPU."""

    below: Share
    stat: Literal["max"] = "max"
    coverage: Share = 0.95
    window: str = "steady"

    @property
    def classes(self) -> tuple[str, ...]:
        return ()

    def refusal(self, configured: float) -> str:
        """Why this gate cannot hold on an engine that takes `configured` of each GPU at start; empty when it can."""
        if configured < self.below:
            return ""
        return (
            f"gpu_memory cannot stay below {percent(self.below)}: the engine takes {percent(configured)} of each GPU "
            f"at its start (gpu_memory_utilization); start it with {percent(max(0.0, self.below - 0.03))} or less"
        )

    def seen(self, timeline: Timeline, window: Window) -> Finding:
        limit = f"< {percent(self.below)}"
        watching = _watching(timeline)
        if watching is None:
            return Finding("", Judgement.INVALID, "nothing watched the GPUs", limit=limit)
        series = gpus(timeline, window)
        figures = _figures(series, watching, window)
        if trouble := next(self._troubles(timeline, series, watching, window), ""):
            return Finding("", Judgement.INVALID, trouble, limit=limit, figures=figures)
        measured = figures["measured"]
        told = f"{figures['per']} reached {percent(round(measured, 4))} of its memory at {figures['at_s']:.0f} s"
        judgement = Judgement.PASS if measured < self.below else Judgement.FAIL
        return Finding("", judgement, f"{told}; the limit is {percent(self.below)}", limit=limit, figures=figures)

    def _troubles(self, timeline: Timeline, series: list[Series], watching: Watching, window: Window) -> Iterator[str]:
        """The reasons for which these samples decide nothing."""
        interval_s = watching.interval_s
        if not watching.series:
            nobody = f"the target has GPUs but {watching.source or 'its source'} gave no series of them"
            yield f"{nobody}: {watching.why}" if watching.why else nobody
        if len(series) != watching.series:
            yield f"samples of {len(series)} GPUs in this window; {watching.series} were announced at the start"
        spare = _spare(series)
        for one in series:
            broken = faults.in_force(timeline, one.at_s, interval_s)  # a dead engine holds no memory
            if (one.total <= 0).any() or (one.gpu not in spare and (~broken & (one.free >= one.total)).any()):
                yield f"{one.gpu}: memory in use reads 0 while the engine is up: the exporter has no data"
            if math.isnan(float(one.used.sum())):
                yield f"{one.gpu}: {int(np.isnan(one.used).sum())} of {len(one.used)} samples are not numbers"
            if (hole_s := one.hole_s(window)) > LONGEST_HOLE * interval_s:
                yield f"{one.gpu}: no sample for {seconds(hole_s)}; one every {seconds(interval_s)} was expected"
            if (coverage := one.coverage(window, interval_s)) < self.coverage:
                yield f"{one.gpu}: {percent(round(coverage, 3))} of the expected samples are there"
            if one.gpu not in spare and _frozen(one, timeline):
                yield f"{one.gpu}: memory and utilisation did not change in {len(one.used)} samples under load: frozen"


def _watching(timeline: Timeline) -> Watching | None:
    """The last announcement that can be read; None when nobody made one."""
    for event in reversed(timeline.events):
        if event.kind == "watching" and event.name == "gpu":
            told = event.detail
            try:
                watching = Watching(
                    series=int(told["series"]),
                    interval_s=float(told["interval_s"]),
                    source=str(told.get("source", "")),
                    simulated=bool(told.get("simulated")),
                    why=str(told.get("why", "")),
                )
            except (KeyError, TypeError, ValueError):  # a damaged line
                continue
            if watching.interval_s > 0:
                return watching
    return None


def gpus(timeline: Timeline, window: Window) -> list[Series]:
    """The GPUs that have samples in the window, by name. Free and total count together, at one moment, or not."""
    totals, busy = timeline.series("gpu.total_bytes"), timeline.series("gpu.utilisation")
    found = []
    nothing = (np.zeros(0), np.zeros(0))
    for labels, (free_s, free) in timeline.series("gpu.free_bytes").items():
        total_s, total = totals.get(labels, nothing)
        both_s, of_free, of_total = np.intersect1d(free_s, total_s, return_indices=True)
        inside = (both_s >= window.start_s) & (both_s < window.end_s)
        busy_s, busy_share = busy.get(labels, nothing)
        if inside.any():
            found.append(
                Series(
                    gpu=dict(labels).get("gpu", "GPU"),
                    at_s=both_s[inside],
                    free=free[of_free][inside],
                    total=total[of_total][inside],
                    utilisation=busy_share[(busy_s >= window.start_s) & (busy_s < window.end_s)],
                )
            )
    return found


def _spare(series: list[Series]) -> list[str]:
    """The GPUs that showed no load while another did; one that shows nothing either way is not taken for spare."""
    idle = [one.gpu for one in series if len(one.utilisation) and not one.worked]
    return idle if any(one.worked for one in series) else []


def _frozen(one: Series, timeline: Timeline) -> bool:
    """Whether nothing that a GPU tells moved over many samples that were taken while requests were in flight."""
    if min(_under_load(one.at_s, timeline), len(one.utilisation)) < FROZEN_SAMPLES or one.utilisation[0] >= 1:
        return False
    return bool((one.free == one.free[0]).all() and (one.utilisation == one.utilisation[0]).all())


def _under_load(at_s: np.ndarray, timeline: Timeline) -> int:
    """At how many of these moments a request that was served was on its way."""
    seen = timeline.observations[timeline.observations["outcome"] == Outcome.OK]
    sent, ended = (np.searchsorted(np.sort(seen[name]), at_s, side="right") for name in ("sent_s", "ended_s"))
    return int((sent > ended).sum())


def _figures(series: list[Series], watching: Watching, window: Window) -> dict[str, Any]:
    by_gpu = {
        one.gpu: {
            "max": float(one.used.max()),
            "samples": len(one.used),
            "coverage": one.coverage(window, watching.interval_s),
            "gap_max_s": one.hole_s(window),
        }
        for one in series
    }
    figures: dict[str, Any] = {
        "formula": FORMULA,
        "expected": watching.series,
        "source": watching.source,
        "interval_s": watching.interval_s,
        "simulated": watching.simulated,
        "by_gpu": by_gpu,
        "spare": _spare(series),
    }
    if not series:
        return figures
    highest = max(series, key=lambda one: float(np.nan_to_num(one.used, nan=-math.inf).max()))
    return {
        "measured": float(highest.used.max()),
        "per": highest.gpu,
        "at_s": float(highest.at_s[int(np.argmax(highest.used))]),
        "samples": sum(len(one.used) for one in series),
        "coverage": min(entry["coverage"] for entry in by_gpu.values()),
        "gap_max_s": max(entry["gap_max_s"] for entry in by_gpu.values()),
        **figures,
    }
