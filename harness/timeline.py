"""The log and the plan as files: how a run is written, and how a finished or a broken one is read.

A run directory holds `run.json` (provenance, and the origin of its clock), `plan.jsonl` (a header, then one request a
line), `log.NAME.jsonl` (events and readings, a flushed line each) and `log.NAME.bin` (observations in blocks, each
with its checksum). All are written append-only or beside-and-renamed, so that whatever dies leaves files that are
readable up to the last whole line or block. What cannot be read is named in `Timeline.damage`, never skipped silently.

Nothing here judges, and nothing is summed: a timeline is what was seen.
"""

import contextlib
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from harness import provenance
from harness.model import NEVER, Event, Observation, Outcome, Reading, Request, Tag, Window

MAGIC = b"harness observations 1\n"
_BLOCK = struct.Struct("<4sIII")  # marker, records, bytes of payload, crc32 of payload
_MARKER = b"OBS1"
_RECORD = struct.Struct("<I6d2IHBBHffI")
RECORD = np.dtype(
    [
        ("index", "<u4"),
        *((name, "<f8") for name in ("due_s", "sent_s", "first_byte_s", "first_token_s", "last_token_s", "ended_s")),
        ("tokens_in", "<u4"),
        ("tokens_out", "<u4"),
        ("status", "<u2"),
        ("outcome", "u1"),
        ("tags", "u1"),
        ("worker", "<u2"),
        ("receive_lag_s", "<f4"),
        ("connect_s", "<f4"),
        ("gaps", "<u4"),
    ]
)
BLOCK_BYTES = 1 << 18
EXTENSION = "extension"  # the window that is played only when the evidence is too thin, and the scenario says so


class ObservationLog:
    """Spools observations to `path` in blocks; `flush` makes the block at hand readable by others.

    Costs about 2 us an observation. Raises OSError when the disk takes no more: what was flushed stays readable.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._records, self._gaps, self._count = bytearray(), array("f"), 0
        if os.fstat(self._fd).st_size == 0:
            _write_all(self._fd, MAGIC)

    def append(self, seen: Observation) -> None:
        self._records += _RECORD.pack(*seen[:-1], len(seen.gaps_s))
        self._gaps.extend(seen.gaps_s)
        self._count += 1
        if len(self._records) + 4 * len(self._gaps) >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._count:
            block = self.take()
            _write_all(self._fd, block)

    def take(self) -> bytes:
        """The block at hand as bytes, for a worker on another machine; empty when nothing waits."""
        if not self._count:
            return b""
        payload = bytes(self._records) + self._gaps.tobytes()
        block = _BLOCK.pack(_MARKER, self._count, len(payload), zlib.crc32(payload)) + payload
        self._records, self._gaps, self._count = bytearray(), array("f"), 0
        return block

    def write_block(self, block: bytes) -> None:
        """Add a block that another worker's `take` made."""
        _write_all(self._fd, block)

    def close(self) -> None:
        self.flush()
        os.close(self._fd)


class Log:
    """Events and readings of one process, a line each, on disk when the call returns."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def event(self, event: Event) -> None:
        self._line({"at_s": event.at_s, "event": event.kind, "name": event.name, "detail": event.detail})

    def reading(self, reading: Reading) -> None:
        self._line(
            {"at_s": reading.at_s, "reading": reading.name, "value": reading.value, "labels": dict(reading.labels)}
        )

    def _line(self, value: Mapping[str, Any]) -> None:
        _write_all(self._fd, orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_beside(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: beside, synced, then renamed."""
    beside = path.with_name(f".{path.name}.part")
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


# The plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """The first line of a plan: what holds for every request of it.

    `windows` are cut from the scenario: `warm_up`, `steady`, and the `extension` that is played only when the steady
    state's evidence is too thin and the scenario says to extend; `time_limit_s` is when a client gives an answer up for
    lost; `corpus_sha256` names the text that the requests' spans point into.
    """

    scenario: str
    seed: int
    requests: int
    windows: tuple[Window, ...]
    time_limit_s: float
    corpus_sha256: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def played(windows: Sequence[Window], extended: bool) -> tuple[Window, ...]:
    """The windows as they were played: the `extension` joins the steady state when the run was extended.

    When it was not, the extension was never due; a plan without one is played as it stands.
    """
    kept = tuple(window for window in windows if window.name != EXTENSION)
    if not extended or len(kept) == len(windows):
        return kept
    end_s = max(window.end_s for window in windows)
    return tuple(replace(window, end_s=end_s) if window.name == "steady" else window for window in kept)


def plan_lines(header: PlanHeader, requests: Iterable[Request]) -> Iterator[bytes]:
    """The plan's file, line by line. Fields at their defaults are left out: a line stays near 150 bytes."""
    windows = [[w.name, w.start_s, w.end_s] for w in header.windows]
    yield (
        orjson.dumps(
            {
                "plan": 1,
                "scenario": header.scenario,
                "seed": header.seed,
                "requests": header.requests,
                "windows": windows,
                "time_limit_s": header.time_limit_s,
                "corpus_sha256": header.corpus_sha256,
                "facts": header.facts,
            },
            option=orjson.OPT_SORT_KEYS,
        )
        + b"\n"
    )
    for r in requests:
        line: dict[str, Any] = {"i": r.index, "due_s": round(r.due_s, 9), "class": r.class_name, "path": r.path}
        if r.text != (0, 0):
            line["text"] = r.text
        for key, value, default in (
            ("prompt_tokens", r.prompt_tokens, 0),
            ("max_tokens", r.max_tokens, 0),
            ("stream", r.stream, False),
            ("flaw", r.flaw, ""),
            ("give_up_s", r.give_up_s, None),
            ("headers", r.headers, ()),
        ):
            if value != default:
                line[key] = value
        if r.expect != ("2xx",):
            line["expect"] = r.expect
        yield orjson.dumps(line) + b"\n"


def read_header(line: bytes) -> PlanHeader:
    """The plan's header. Raises ValueError when the line is none of this version."""
    try:
        value = orjson.loads(line)
        if value["plan"] != 1:
            raise ValueError("it is of another version")
        return PlanHeader(
            scenario=value["scenario"],
            seed=value["seed"],
            requests=int(value["requests"]),
            windows=tuple(Window(str(name), float(start_s), float(end_s)) for name, start_s, end_s in value["windows"]),
            time_limit_s=value["time_limit_s"],
            corpus_sha256=value["corpus_sha256"],
            facts=value["facts"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a plan: {line[:60]!r} ({error})") from error


def read_request(line: bytes) -> Request:
    value = orjson.loads(line)
    return Request(
        index=value["i"],
        due_s=value["due_s"],
        class_name=value["class"],
        path=value["path"],
        text=tuple(value.get("text", (0, 0))),
        prompt_tokens=value.get("prompt_tokens", 0),
        max_tokens=value.get("max_tokens", 0),
        stream=value.get("stream", False),
        flaw=value.get("flaw", ""),
        expect=tuple(value.get("expect", ("2xx",))),
        give_up_s=value.get("give_up_s"),
        headers=tuple((k, v) for k, v in value.get("headers", ())),
    )


def read_plan(path: Path) -> tuple[PlanHeader, Iterator[Request]]:
    """The header, and the requests as they are read. Raises ValueError on a file that is no plan."""
    file = open(path, "rb")  # noqa: SIM115 - the iterator below owns and closes it
    header = read_header(file.readline())

    def requests() -> Iterator[Request]:
        with file:
            for line in file:
                yield read_request(line)

    return header, requests()


# A run, read -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timeline:
    """A run as arrays. Row k of every column is the plan's request k, so that columns join by position.

    `classes`/`flaws` are the names that `class_code`/`flaw_code` index. `seen[k]` is False when no observation of
    request k was ever written (a crash); its row of `observations` then holds `nan` and OPEN.
    `gaps_s` holds all gaps between content events, those of row k at `gap_start[k] : gap_start[k + 1]`.
    """

    run: Mapping[str, Any]
    header: PlanHeader
    classes: Sequence[str]
    class_code: np.ndarray
    flaws: Sequence[str]
    flaw_code: np.ndarray
    expects: Sequence[tuple[str, ...]]
    expect_code: np.ndarray
    good: np.ndarray
    streamed: np.ndarray
    gives_up: np.ndarray
    prompt_tokens: np.ndarray
    due_s: np.ndarray
    observations: np.ndarray
    seen: np.ndarray
    gaps_s: np.ndarray
    gap_start: np.ndarray
    events: Sequence[Event]
    readings: Sequence[Reading]
    damage: Sequence[str]

    @property
    def windows(self) -> dict[str, Window]:
        return {window.name: window for window in self.header.windows}

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


def read_run_json(run_dir: Path, damage: list[str] | None = None) -> dict[str, Any]:
    """Provenance of a run; {} when the run died before it was written. With `damage`, says that it is not readable."""
    try:
        return dict(orjson.loads((run_dir / "run.json").read_bytes()).items())
    except FileNotFoundError:
        return {}
    except (orjson.JSONDecodeError, AttributeError):
        if damage is not None:
            damage.append("run.json: not readable")
        return {}


def log_files(run_dir: Path) -> list[Path]:
    """The files that a verdict rests on, in a fixed order."""
    names = ["run.json", "scenario.yaml", "target.yaml", "plan.jsonl", "corpus.bin"]
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
    observations, seen, gaps_s, gap_start = _read_observations(run_dir, columns["due_s"], damage)
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
    return _as_played(timeline)


def _as_played(timeline: Timeline) -> Timeline:
    """A plan that may be extended without the extension's requests when they were never due."""
    extension = timeline.windows.get(EXTENSION)
    if extension is None:
        return timeline
    extended = any(event.kind == "extended" for event in timeline.events)
    header = replace(timeline.header, windows=played(timeline.header.windows, extended))
    if extended:
        return replace(timeline, header=header)
    due = int(np.searchsorted(timeline.due_s, extension.start_s))
    by_request = ("class_code", "flaw_code", "expect_code", "good", "streamed", "gives_up", "prompt_tokens", "due_s")
    cut = {name: getattr(timeline, name)[:due] for name in (*by_request, "observations", "seen")}
    cut |= {"gap_start": timeline.gap_start[: due + 1], "gaps_s": timeline.gaps_s[: timeline.gap_start[due]]}
    return replace(timeline, header=header, **cut)


class _Names:
    """Distinct values in the order they were met, and the number of each."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


_PLANNED = struct.Struct("<HHHdI??")
_PLANNED_ROW = np.dtype(
    [
        ("class_code", "<u2"),
        ("flaw_code", "<u2"),
        ("expect_code", "<u2"),
        ("due_s", "<f8"),
        ("prompt_tokens", "<u4"),
        ("streamed", "?"),
        ("gives_up", "?"),
    ]
)


def _read_plan_columns(path: Path, damage: list[str]) -> dict[str, Any]:
    classes, flaws, expects, rows = _Names(), _Names(), _Names(), bytearray()
    with open(path, "rb") as file:
        header = read_header(file.readline())
        for number, line in enumerate(file):
            try:
                value = orjson.loads(line)
                index = value["i"]
                rows += _PLANNED.pack(
                    classes.number(str(value["class"])),
                    flaws.number(str(value.get("flaw", ""))),
                    expects.number(tuple(map(str, value.get("expect", ("2xx",))))),
                    value["due_s"],
                    value.get("prompt_tokens", 0),
                    value.get("stream", False),
                    value.get("give_up_s") is not None,
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
        "expects": tuple(expects.numbers),
        "good": good_of[planned["expect_code"]],
        **{name: planned[name].copy() for name in _PLANNED_ROW.names or ()},
    }


def _read_observations(
    run_dir: Path, due_s: np.ndarray, damage: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    table = np.zeros(len(due_s), dtype=RECORD)
    table["index"], table["due_s"], table["outcome"] = np.arange(len(due_s)), due_s, Outcome.OPEN
    for name in ("sent_s", "first_byte_s", "first_token_s", "last_token_s", "ended_s"):
        table[name] = NEVER
    seen = np.zeros(len(due_s), dtype=bool)
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    for path in sorted(run_dir.glob("log.*.bin")):
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


class Blocks:
    """Reads the whole blocks added to a file since the last call: for live views and for wrecks alike."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new(self, damage: list[str] | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (records, gaps) of each new whole block. With `damage`, says what could not be read."""
        with open(self.path, "rb") as file:
            file.seek(self._at)
            if self._at == 0:
                if (start := file.read(len(MAGIC))) != MAGIC:
                    if damage is not None:
                        damage.append(f"{self.path.name}: does not begin as a log of observations ({start[:16]!r})")
                    return
                self._at = len(MAGIC)
            while head := file.read(_BLOCK.size):
                block = self._block(head, file.read, damage)
                if block is None:
                    return
                self._at = file.tell()
                yield block

    def _block(self, head: bytes, read: Any, damage: list[str] | None) -> tuple[np.ndarray, np.ndarray] | None:
        trouble = "ends inside a block"
        if len(head) == _BLOCK.size:
            marker, count, size, crc = _BLOCK.unpack(head)
            if marker != _MARKER or size < count * RECORD.itemsize:
                trouble = "holds something that is no block"
            elif len(payload := read(size)) == size:
                if zlib.crc32(payload) == crc:
                    records = np.frombuffer(payload, dtype=RECORD, count=count)
                    return records, np.frombuffer(payload, dtype="<f4", offset=count * RECORD.itemsize)
                trouble = "holds a block whose checksum differs"
        if damage is not None:
            damage.append(f"{self.path.name}: {trouble} at byte {self._at}")
        return None


def _read_lines(run_dir: Path, damage: list[str]) -> tuple[list[Event], list[Reading]]:
    events: list[Event] = []
    readings: list[Reading] = []
    for path in sorted(run_dir.glob("log.*.jsonl")):
        for entry in read_log(path, damage):
            (events if isinstance(entry, Event) else readings).append(entry)  # type: ignore[arg-type]
    events.sort(key=lambda event: event.at_s)
    readings.sort(key=lambda reading: reading.at_s)
    return events, readings


def read_log(path: Path, damage: list[str]) -> Iterator[Event | Reading]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _entry(line)
            except _NO_ENTRY:
                damage.append(f"{path.name}:{number}: not an entry")


_NO_ENTRY = (ValueError, KeyError, TypeError, AttributeError)


def _entry(line: bytes) -> Event | Reading:
    """One line of a log. Raises ValueError, KeyError, TypeError or AttributeError when it is damaged."""
    value = orjson.loads(line)
    at_s = float(value["at_s"])
    if "event" in value:
        return Event(at_s, str(value["event"]), str(value["name"]), dict(value["detail"].items()))
    measured = NEVER if value["value"] is None else float(value["value"])
    return Reading(at_s, str(value["reading"]), measured, {key: str(label) for key, label in value["labels"].items()})


class Lines:
    """Reads the whole lines added to a log since the last call: for live views, which leave damage to the judge."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new(self) -> Iterator[Event | Reading]:
        with open(self.path, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                with contextlib.suppress(*_NO_ENTRY):
                    yield _entry(line)


def observations_of(timeline: Timeline) -> Iterator[Observation]:
    """The observations one by one, for exports and tests; arrays are the way to judge them."""
    for row, seen in zip(timeline.observations, timeline.seen, strict=True):
        if seen:
            start, end = timeline.gap_start[row["index"]], timeline.gap_start[row["index"] + 1]
            value = dict(zip(RECORD.names or (), row.item(), strict=True))
            del value["gaps"]
            value |= {"outcome": Outcome(value["outcome"]), "tags": Tag(value["tags"])}
            yield Observation(**value, gaps_s=tuple(timeline.gaps_s[start:end].tolist()))
