"""A run directory, finished or broken, read as one value: every request of the plan and what became of it.

What cannot be read is named in `Timeline.damage`, never skipped silently. Nothing here judges, and nothing is summed: a
timeline is what was seen.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from harness import plan_file, provenance
from harness.log import RECORD, Blocks, read_log, read_run_json
from harness.model import NEVER, Event, Finish, Observation, Outcome, Reading, Tag, Window

CAPTURED = "captured.bin"  # the answers of the recording that is replayed, a row for every request of the plan


@dataclass(frozen=True)
class Timeline:
    """A run as arrays. Row k of every column is the plan's request k, so that columns join by position.

    `classes`/`flaws` are the names that `class_code`/`flaw_code` index. `seen[k]` is False when no observation of
    request k was ever written (a crash); its row of `observations` then holds `nan` and OPEN.
    `gaps_s` holds all gaps between content events, those of row k at `gap_start[k] : gap_start[k + 1]`.

    A request that `follows` another falls due when that one is over: its `due_s` is the moment at which it really did,
    and the planned one where nobody saw it. `captured` is the same plan with the answers that were captured in place of
    the run's own, its `due_s` the captured moments: rows join, windows do not. None when nothing was replayed.
    """

    run: Mapping[str, Any]
    header: plan_file.PlanHeader
    classes: Sequence[str]
    class_code: np.ndarray
    flaws: Sequence[str]
    flaw_code: np.ndarray
    paths: Sequence[str]
    path_code: np.ndarray
    expects: Sequence[tuple[str, ...]]
    expect_code: np.ndarray
    good: np.ndarray
    streamed: np.ndarray
    gives_up: np.ndarray
    follows: np.ndarray
    prompt_tokens: np.ndarray
    due_s: np.ndarray
    observations: np.ndarray
    seen: np.ndarray
    gaps_s: np.ndarray
    gap_start: np.ndarray
    events: Sequence[Event]
    readings: Sequence[Reading]
    damage: Sequence[str]
    captured: "Timeline | None" = None

    @property
    def windows(self) -> dict[str, Window]:
        return {window.name: window for window in self.header.windows}

    @property
    def replay(self) -> Mapping[str, Any]:
        """What the plan says of the recording that it replays; empty when it replays none."""
        told = self.header.facts.get("replay") if isinstance(self.header.facts, Mapping) else None
        return told if isinstance(told, Mapping) else {}

    def within(self, window: Window) -> np.ndarray:
        """Mask of the requests due in the window."""
        mask: np.ndarray = (self.due_s >= window.start_s) & (self.due_s < window.end_s)
        return mask

    def gaps_of(self, mask: np.ndarray) -> np.ndarray:
        """All gaps of the requests that the mask picks, in seconds."""
        picked: np.ndarray = self.gaps_s[np.repeat(mask, np.diff(self.gap_start))]
        return picked

    def series(self, name: str) -> dict[tuple[tuple[str, str], ...], tuple[np.ndarray, np.ndarray]]:
        """Every series of one reading: labels -> (moments, values), in the order of time."""
        found: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for reading in self.readings:
            if reading.name == name:
                found.setdefault(tuple(sorted(reading.labels.items())), []).append((reading.at_s, reading.value))
        return {
            labels: (np.array([t for t, _ in sorted(points)]), np.array([v for _, v in sorted(points)]))
            for labels, points in sorted(found.items())
        }


def log_files(run_dir: Path) -> list[Path]:
    """The files that a verdict rests on, in a fixed order."""
    names = ["run.json", "scenario.yaml", "target.yaml", "plan.jsonl", "corpus.bin", CAPTURED]
    names += sorted(path.name for path in run_dir.glob("experiment-*.yaml"))
    logs = sorted(p.name for p in run_dir.glob("log.*") if p.suffix in (".jsonl", ".bin"))
    return [run_dir / name for name in names + logs if (run_dir / name).exists()]


def read(run_dir: Path) -> Timeline:
    """Read a run directory, finished or broken.

    Raises FileNotFoundError when it holds no plan, ValueError when the plan's first line is none.
    """
    damage: list[str] = []
    run = read_run_json(run_dir, damage)
    if run.get("plan_sha256") not in (None, provenance.sha256(run_dir / "plan.jsonl")):
        damage.append("plan.jsonl: not the plan that was made for this run (sha256)")
    columns = _read_plan_columns(run_dir / "plan.jsonl", damage)
    logs = sorted(run_dir.glob("log.*.bin"))
    observations, seen, gaps_s, gap_start = _read_observations(logs, columns["due_s"], damage)
    events, readings = _read_lines(run_dir, damage)
    timeline = Timeline(
        run=run,
        observations=observations,
        seen=seen,
        gaps_s=gaps_s,
        gap_start=gap_start,
        events=events,
        readings=readings,
        damage=damage,
        **columns,
    )
    captured = _captured(run_dir / CAPTURED, timeline, damage)
    played = _really_due(_as_played(timeline))
    return replace(played, captured=_as_played(captured)) if captured else played


def _as_played(timeline: Timeline) -> Timeline:
    """A plan that may be extended without the extension's requests when they were never due."""
    extension = timeline.windows.get(plan_file.EXTENSION)
    if extension is None:
        return timeline
    extended = any(event.kind == "extended" for event in timeline.events)
    header = replace(timeline.header, windows=plan_file.played(timeline.header.windows, extended))
    if extended:
        return replace(timeline, header=header)
    due = int(np.searchsorted(timeline.due_s, extension.start_s))
    by_request = ("good", *(_PLANNED_ROW.names or ()), "observations", "seen")
    cut = {name: getattr(timeline, name)[:due] for name in by_request}
    cut |= {"gap_start": timeline.gap_start[: due + 1], "gaps_s": timeline.gaps_s[: timeline.gap_start[due]]}
    return replace(timeline, header=header, **cut)


def _captured(path: Path, timeline: Timeline, damage: list[str]) -> Timeline | None:
    """The same plan as it was answered when it was captured; None for a run that replays no answers."""
    if not timeline.replay or timeline.replay.get("timing_only"):
        return None
    if not path.exists():
        damage.append(f"{path.name}: not there, though the run replays a capture")
        return None
    observations, seen, gaps_s, gap_start = _read_observations([path], timeline.due_s, damage)
    if not seen.all():
        damage.append(f"{path.name}: {int((~seen).sum())} of {len(seen)} requests have no captured answer")
    own: dict[str, Any] = {"observations": observations, "seen": seen, "gaps_s": gaps_s, "gap_start": gap_start}
    return replace(timeline, **own, due_s=observations["due_s"].copy(), events=(), readings=())


def _really_due(timeline: Timeline) -> Timeline:
    """A request that waits for another is due when that one is over, which no plan can know."""
    real_s = timeline.observations["due_s"]
    known = timeline.follows & timeline.seen & ~np.isnan(real_s)
    return replace(timeline, due_s=np.where(known, real_s, timeline.due_s)) if known.any() else timeline


class _Names:
    """Distinct values in the order they were met, and the number of each."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


_PLANNED = struct.Struct("<HHIHdI???")
_PLANNED_ROW = np.dtype(
    [
        ("class_code", "<u2"),
        ("flaw_code", "<u2"),
        ("path_code", "<u4"),
        ("expect_code", "<u2"),
        ("due_s", "<f8"),
        ("prompt_tokens", "<u4"),
        ("streamed", "?"),
        ("gives_up", "?"),
        ("follows", "?"),
    ]
)


def _read_plan_columns(path: Path, damage: list[str]) -> dict[str, Any]:
    classes, flaws, paths, expects, rows = _Names(), _Names(), _Names(), _Names(), bytearray()
    with open(path, "rb") as file:
        header = plan_file.read_header(file.readline())
        for number, line in enumerate(file):
            try:
                value = orjson.loads(line)
                index = value["i"]
                rows += _PLANNED.pack(
                    classes.number(str(value["class"])),
                    flaws.number(str(value.get("flaw", ""))),
                    paths.number(str(value["path"]).partition("?")[0]),
                    expects.number(tuple(map(str, value.get("expect", ("2xx",))))),
                    value["due_s"],
                    value.get("prompt_tokens", 0),
                    value.get("stream", False),
                    value.get("give_up_s") is not None,
                    value.get("after") is not None,
                )
            except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, struct.error):
                damage.append(f"{path.name}:{number + 2}: not a request")
                break
            if index != number:
                damage.append(f"{path.name}:{number + 2}: request {index} stands where {number} belongs")
    planned = np.frombuffer(rows, dtype=_PLANNED_ROW)
    if len(planned) != header.requests:
        damage.append(f"{path.name}: {len(planned)} of {header.requests} requests are there")
    good_of = np.array(["2xx" in expect for expect in expects.numbers] or [True])
    return {
        "header": header,
        "classes": tuple(classes.numbers),
        "flaws": tuple(flaws.numbers),
        "paths": tuple(paths.numbers),
        "expects": tuple(expects.numbers),
        "good": good_of[planned["expect_code"]],
        **{name: planned[name].copy() for name in _PLANNED_ROW.names or ()},
    }


def _read_observations(
    paths: Sequence[Path], due_s: np.ndarray, damage: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    table = np.zeros(len(due_s), dtype=RECORD)
    table["index"], table["due_s"], table["outcome"] = np.arange(len(due_s)), due_s, Outcome.OPEN
    for name in ("sent_s", "first_byte_s", "first_token_s", "last_token_s", "ended_s"):
        table[name] = NEVER
    seen = np.zeros(len(due_s), dtype=bool)
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    for path in paths:
        for records, gaps in Blocks(path).new(damage):
            inside = records["index"] < len(due_s)
            if not inside.all():
                damage.append(f"{path.name}: {int((~inside).sum())} observations of requests that the plan has not")
                gaps = gaps[np.repeat(inside, records["gaps"])]
                records = records[inside]
            twice = seen[records["index"]]
            if twice.any() or len(np.unique(records["index"])) != len(records):
                damage.append(f"{path.name}: requests observed twice")
            table[records["index"]] = records
            seen[records["index"]] = True
            kept.append((records, gaps))
    gap_start = np.concatenate([[0], np.cumsum(table["gaps"], dtype=np.int64)])
    gaps_s = np.zeros(int(gap_start[-1]), dtype=np.float32)
    for records, gaps in kept:
        counts = records["gaps"].astype(np.int64)
        within = np.arange(len(gaps)) - np.repeat(np.cumsum(counts) - counts, counts)
        place = np.repeat(gap_start[records["index"]], counts) + within
        gaps_s[place[place < len(gaps_s)]] = gaps[place < len(gaps_s)]
    return table, seen, gaps_s, gap_start


def _read_lines(run_dir: Path, damage: list[str]) -> tuple[list[Event], list[Reading]]:
    events: list[Event] = []
    readings: list[Reading] = []
    for path in sorted(run_dir.glob("log.*.jsonl")):
        for entry in read_log(path, damage):
            (events if isinstance(entry, Event) else readings).append(entry)  # type: ignore[arg-type]
    events.sort(key=lambda event: event.at_s)
    readings.sort(key=lambda reading: reading.at_s)
    return events, readings


def observations_of(timeline: Timeline) -> Iterator[Observation]:
    """The observations one by one, for exports and tests; arrays are the way to judge them."""
    for row, seen in zip(timeline.observations, timeline.seen, strict=True):
        if seen:
            start, end = timeline.gap_start[row["index"]], timeline.gap_start[row["index"] + 1]
            value = dict(zip(RECORD.names or (), row.item(), strict=True))
            del value["gaps"]
            value |= {
                "outcome": Outcome(value["outcome"]),
                "tags": Tag(value["tags"]),
                "finish": Finish(value["finish"]),
            }
            yield Observation(**value, gaps_s=tuple(timeline.gaps_s[start:end].tolist()))
