"""The plan as a file: a header, then one request a line, each near 150 bytes.

It is written before the run and read by every worker while it plays, by the judge after it. A line that is no part of
a plan is refused, never guessed at.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from harness.model import Request, Window

EXTENSION = "extension"  # the window that is played only when the evidence is too thin, and the scenario says so


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


def lines(header: PlanHeader, requests: Iterable[Request]) -> Iterator[bytes]:
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
            ("raw", r.raw, False),
            ("group", r.group, None),
            ("after", r.after, None),
            ("think_s", r.think_s, 0.0),
            ("half_close_s", r.half_close_s, None),
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
        raw=value.get("raw", False),
        group=value.get("group"),
        after=value.get("after"),
        think_s=value.get("think_s", 0.0),
        half_close_s=value.get("half_close_s"),
    )


def read(path: Path) -> tuple[PlanHeader, Iterator[Request]]:
    """The header, and the requests as they are read. Raises ValueError on a file that is no plan."""
    file = open(path, "rb")  # noqa: SIM115 - the iterator below owns and closes it
    header = read_header(file.readline())

    def requests() -> Iterator[Request]:
        with file:
            for line in file:
                yield read_request(line)

    return header, requests()
