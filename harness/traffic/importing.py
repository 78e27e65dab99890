"""Captures, and other records of traffic -> a recording, scrubbed and with an account that adds up.

The rooms below each do one thing; here they are put in a row. Memory does not grow with the capture: exchanges end in
another order than they began, so they wait in a file without a name until their order is known. Nothing half written is
ever left, and a source that holds nothing to replay is refused with what was seen in it and what to do.
"""

import gc
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any

from harness.model import UsageError
from harness.traffic import recording
from harness.traffic.capture import columns, diagnosis, messages, personal, records, runs
from harness.traffic.capture.account import Account
from harness.traffic.capture.exchanges import SESSION_HEADERS, Reader
from harness.traffic.capture.filters import Filters
from harness.traffic.capture.messages import Exchange
from harness.traffic.capture.records import Block
from harness.traffic.capture.scrub import Scrubber, Unscrubbable
from harness.traffic.recording import Recorded, RecordingHeader
from harness.traffic.synthetic import Synthetic
from harness.traffic.traces import azure, burstgpt, har, mooncake, nginx

_OPENING_PACKETS = 8  # the salt is made of them: nobody without the capture can try addresses against a name
_OPENING_REQUESTS = 64  # as much, of what is no capture
_SHELF_BYTES = 1 << 20  # written at once
_TRIED_BLOCKS = 32  # read again to tell which ports carry HTTP, when the given ones do not


@dataclass(frozen=True, slots=True)
class Choices:
    """What a user wants of an import. `ports` are the servers'; `fields` are further JSON members to scrub; with a
    `tokenizer`, the directory of one, prompts are replaced by made-up ones of as many of its tokens."""

    ports: frozenset[int] = frozenset()
    keep_secrets: bool = False
    filters: Filters = field(default_factory=Filters)
    session_headers: tuple[str, ...] = SESSION_HEADERS
    fields: tuple[str, ...] = ()
    tokenizer: Path | None = None


@dataclass(slots=True)
class _Tally:
    """What became of the requests seen: `kept`, `lost` by reason, or `filtered`; together all of them."""

    kept: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    filtered: int = 0
    scrubbed: Counter[str] = field(default_factory=Counter)
    connections: set[int] = field(default_factory=set)

    @property
    def seen(self) -> int:
        return self.kept + self.lost.total() + self.filtered

    @property
    def lost_share(self) -> float:
        """Of the requests that the filters would have kept."""
        lost = self.lost.total()
        return lost / (self.kept + lost) if lost else 0.0


def choices(
    ports: Sequence[int] | None,
    keep_secrets: bool,
    filters: Filters,
    session_headers: Sequence[str] | None,
    fields: Sequence[str] | None,
    tokenizer: Path | None = None,
) -> Choices:
    """What was chosen on a command line; None where nothing was."""
    headers = tuple(session_headers or SESSION_HEADERS)
    return Choices(frozenset(ports or ()), keep_secrets, filters, headers, tuple(fields or ()), tokenizer)


class Source(StrEnum):
    """What can be imported."""

    CAPTURE = "capture"
    RECORDING = "recording"
    HAR = "har"
    MOONCAKE = "mooncake"
    BURSTGPT = "burstgpt"
    AZURE = "azure"
    NGINX = "nginx"


Found = Iterator[tuple[Recorded, str]]  # requests, each with why it is lost: "" when it is not
_TIMES_ONLY: Mapping[Source, Callable[[Path], Found]] = {
    Source.MOONCAKE: mooncake.read,
    Source.BURSTGPT: burstgpt.read,
    Source.AZURE: azure.read,
    Source.NGINX: nginx.read,
}


def import_from(source: Source, paths: Sequence[Path], out: Path, choices: Choices) -> RecordingHeader:
    """Import files of one kind into one recording; returns its header. Raises UsageError when that cannot be.

    Several are laid over each other: by their dates where the source has some, else each from its own beginning.
    """
    _refuse_target(paths, out)
    names = tuple(path.name for path in paths)
    if source == Source.CAPTURE:
        return import_captures(paths, out, choices)
    if source == Source.RECORDING:
        read = [recording.read(path) for path in paths]
        header, found = headers_joined([header for header, _ in read]), [_none_lost(ones) for _, ones in read]
    elif source == Source.HAR:
        reader = Reader(0, Account(), choices.session_headers)
        header = RecordingHeader(names, 0, 0, 0.0, shapes=reader.shapes)  # filled while the archives are read
        found = [har.read(path, reader) for path in paths]
    else:
        header = RecordingHeader(names, 0, 0, 0.0, timing_only=True)
        found = [_TIMES_ONLY[source](path) for path in paths]
    return import_recorded(header, _laid_over(found), out, choices)


def headers_joined(headers: Sequence[RecordingHeader]) -> RecordingHeader:
    """What recordings say of themselves, taken together. Raises UsageError where some have bytes and some have none."""
    if len({header.timing_only for header in headers}) > 1:
        raise UsageError("some of these recordings hold requests and some hold times only: they cannot be one")
    weights = [header.requests / (1 - header.lost_share) if header.lost_share < 1 else 1.0 for header in headers]
    lost = sum(header.lost_share * weight for header, weight in zip(headers, weights, strict=True))
    return RecordingHeader(
        sources=tuple(dict.fromkeys(name for header in headers for name in header.sources)),
        requests=0,
        connections=0,
        lasts_s=0.0,
        lost_share=lost / sum(weights) if lost else 0.0,
        account=_added([header.account for header in headers]),
        scrubbed=_added([header.scrubbed for header in headers]),
        shapes={key: members for header in headers for key, members in header.shapes.items()},
        timing_only=headers[0].timing_only,
    )


def _added(accounts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts are summed, also those by reason; words are put in a row."""
    total: dict[str, Any] = {}
    for name, value in (item for account in accounts for item in account.items()):
        before = total.get(name)
        if before is None:
            total[name] = value
        else:
            total[name] = _added([before, value]) if isinstance(value, Mapping) else before + value
    return total


def _none_lost(found: Iterable[Recorded]) -> Found:
    return ((one, "") for one in found)


def _laid_over(files: Sequence[Found]) -> Found:
    """Moments count from the first request that is read; connections and blocks of different files stay different."""
    first_s = None
    for place, found in enumerate(files):
        for one, lost in found:
            first_s = one.at_s if first_s is None else first_s
            blocks = tuple(block * len(files) + place for block in one.blocks)
            number = one.connection * len(files) + place
            yield replace(one, at_s=one.at_s - first_s, connection=number, blocks=blocks), lost


def import_captures(paths: Sequence[Path], out: Path, choices: Choices = Choices()) -> RecordingHeader:
    """Import capture files (`-` is standard input) and write the recording; returns its header.

    Raises UsageError when a file is no capture, or there is nothing in it to replay.
    """
    account, tally = Account(), _Tally()
    found = records.blocks(paths, account)
    first = next(found, None)
    if first is None:
        raise UsageError(f"{_named(paths)}: the capture holds no packet: was there traffic while it ran?")
    scrub = _scrub(_salt(first), choices)
    reader = Reader(int(first.at_ns[0]), account, choices.session_headers)
    with _Shelf(out.parent) as shelf, _cycles_sought_seldom():
        for exchange in _exchanges(chain([first], found), account, choices.ports):
            _keep(reader.recorded(exchange), _lost(exchange), choices.filters, scrub, tally, shelf)
        if refusal := _refusal(account, tally, paths, choices.ports):
            raise UsageError(f"{_named(paths)}: {refusal}")
        header = RecordingHeader(
            sources=tuple(path.name for path in paths),
            requests=0,
            connections=0,
            lasts_s=0.0,
            lost_share=tally.lost_share,
            account=account.as_dict(),
            shapes=_shapes(reader.shapes, choices.keep_secrets),
        )
        return _written(out, header, tally, shelf)


@contextmanager
def _cycles_sought_seldom() -> Iterator[None]:
    """Nearly all that is made for a packet or an exchange goes with it, without a search for cycles. By default Python
    makes one each few hundred objects, also through what the program itself is made of: a fifth of an import."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def import_recorded(
    header: RecordingHeader,
    found: Iterable[tuple[Recorded, str]],
    out: Path,
    choices: Choices = Choices(),
) -> RecordingHeader:
    """Import requests that another reader found, each with why it is lost, if it is; `header` is what it knows of its
    source. Returns the header written.

    What the source lost stays lost: its `lost_share` and account are carried on. Raises UsageError when nothing is
    kept.
    """
    tally, digest = _Tally(), sha256(repr(header).encode())
    found = iter(found)
    opening = list(islice(found, _OPENING_REQUESTS))
    for one, _ in opening:
        digest.update(recording.line(one))
    scrub = _scrub(digest.digest(), choices)
    with _Shelf(out.parent) as shelf:
        for one, lost in chain(opening, found):
            _keep(one, lost, choices.filters, scrub, tally, shelf)
        if not tally.kept:
            seen = f"nothing is left of its {tally.seen} requests" if tally.seen else "no request in it"
            raise UsageError(f"{', '.join(header.sources)}: {seen}{_why_none(tally)}")
        header = replace(
            header,
            lost_share=1 - (1 - header.lost_share) * (1 - tally.lost_share),
            account={"requests_seen": tally.seen} | dict(header.account),
            shapes=_shapes(header.shapes, choices.keep_secrets),
        )
        return _written(out, header, tally, shelf)


def _why_none(tally: _Tally) -> str:
    parts = [f"the filters left out {tally.filtered}"] if tally.filtered else []
    parts += [f"lost: {_counted(tally.lost)}"] if tally.lost else []
    return f": {', '.join(parts)}" if parts else ""


def _exchanges(found: Iterable[Block], account: Account, ports: frozenset[int]) -> Iterator[Exchange]:
    return messages.exchanges(runs.steps(columns.columns(found, account, ports), account), account, ports)


def _lost(exchange: Exchange) -> str:
    return exchange.request.lost or ("goes on with another protocol" if exchange.upgraded else "")


Scrub = Callable[[Recorded], tuple[Recorded, Counter[str]]]


def _scrub(salt: bytes, choices: Choices) -> Scrub:
    """Made-up prompts first: whatever else is in a body is scrubbed as ever."""
    scrub: Scrub = lambda one: (one, Counter())  # noqa: E731
    if not choices.keep_secrets:
        scrub = Scrubber(salt, choices.fields, choices.session_headers).recorded
    if choices.tokenizer is None:
        return scrub
    made_up = Synthetic(salt, choices.tokenizer)

    def both(one: Recorded) -> tuple[Recorded, Counter[str]]:
        one, replaced = made_up.recorded(one)
        one, found = scrub(one)
        return one, replaced + found

    return both


def _keep(one: Recorded, lost: str, filters: Filters, scrub: Scrub, tally: _Tally, shelf: "_Shelf") -> None:
    """Filters see a request as it was; whatever is written has been scrubbed."""
    if not filters.keeps(one):
        tally.filtered += 1
        return
    if lost:
        tally.lost[lost] += 1
        return
    try:
        one, found = scrub(one)
    except Unscrubbable:
        tally.lost["could not be scrubbed"] += 1
        return
    tally.kept += 1
    tally.scrubbed += found
    tally.connections.add(one.connection)
    shelf.put(one)


def _written(out: Path, header: RecordingHeader, tally: _Tally, shelf: "_Shelf") -> RecordingHeader:
    account: dict[str, Any] = {**header.account, "kept": tally.kept}
    if tally.filtered:
        account["filtered"] = account.get("filtered", 0) + tally.filtered
    if tally.lost:
        account["lost"] = dict(sorted((Counter(account.get("lost", {})) + tally.lost).items()))
    header = replace(
        header,
        requests=tally.kept,
        connections=len(tally.connections),
        lasts_s=shelf.lasts_s,
        account=account,
        scrubbed=dict(sorted((Counter(header.scrubbed) + tally.scrubbed).items())),
    )
    recording.write_lines(out, header, shelf.in_order())
    return header


class _Shelf:
    """Requests on disk, until all are there and their order is known."""

    def __init__(self, folder: Path) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=_SHELF_BYTES)  # noqa: SIM115 - closed on leaving
        except OSError as error:
            raise UsageError(f"nothing can be written to {folder}: {error.strerror}") from None
        self._at_s, self._turns, self._offsets = array("d"), array("q"), array("q", [0])

    def __enter__(self) -> "_Shelf":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self, one: Recorded) -> None:
        self._at_s.append(one.at_s)
        self._turns.append(one.connection << 32 | one.turn)
        self._offsets.append(self._offsets[-1] + self._file.write(recording.line(one)))

    @property
    def lasts_s(self) -> float:
        return max(self._at_s) - min(self._at_s)

    def in_order(self) -> Iterator[bytes]:
        """The lines of all of them by their moments, which count from the first from here on. Those of one moment come
        by their connection and turn: nothing depends on the order in which they were found."""
        first_s, offsets = min(self._at_s), self._offsets
        self._file.flush()
        for k in sorted(range(len(self._at_s)), key=lambda k: (self._at_s[k], self._turns[k])):
            line = os.pread(self._file.fileno(), offsets[k + 1] - offsets[k], offsets[k])
            yield recording.moved(line, round(self._at_s[k] - first_s, 9))


def _salt(first: Block) -> bytes:
    digest = sha256()
    for place in range(min(len(first.sizes), _OPENING_PACKETS)):
        packet = first.packet(place)
        digest.update(b"%d" % packet.at_ns + packet.data)
    return digest.digest()


def _shapes(shapes: Mapping[str, list[str]], keep_secrets: bool) -> dict[str, list[str]]:
    """Names of members are the server's words, but some servers answer with data for names."""
    if keep_secrets:
        return dict(sorted(shapes.items()))
    return {
        key: [personal.masked(each.encode(), Counter()).decode(errors="replace") for each in members]
        for key, members in sorted(shapes.items())
    }


def _named(paths: Iterable[Path]) -> str:
    return ", ".join("standard input" if str(path) == "-" else str(path) for path in paths)


def _refuse_target(paths: Iterable[Path], out: Path) -> None:
    if any(out.exists() and path.exists() and out.samefile(path) for path in paths):
        raise UsageError(f"{out} is what would be read: give the recording another name")
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give the recording a name in it")


def _refusal(account: Account, tally: _Tally, paths: Sequence[Path], ports: frozenset[int]) -> str:
    """Why nothing of a capture can be replayed and compared; "" when something can."""
    if tally.kept and account.answers_seen:
        return ""
    if account.requests_seen:
        return diagnosis.why_none_kept(account, tally.lost, tally.filtered)
    return diagnosis.why_no_requests(account, sorted(ports), lambda: _ports_with_http(paths))


def _ports_with_http(paths: Sequence[Path]) -> list[int]:
    """Looks again, at all ports; standard input cannot be read twice."""
    if any(str(path) == "-" for path in paths):
        return []
    account = Account()
    for _ in _exchanges(islice(records.blocks(paths, account), _TRIED_BLOCKS), account, frozenset()):
        pass
    return [port for port, _ in account.ports.most_common(5)]


_TOLD = {
    "packets": "packets",
    "dropped": "packets dropped by the kernel",
    "cut_packets": "packets cut by the snap length",
    "connections": "connections",
    "tls": "connections of TLS, not read",
    "http2": "connections of HTTP/2, not read",
    "not_http": "connections of something else",
    "gaps": "gaps in what they said",
    "requests_seen": "requests seen",
    "filtered": "left out by the filters",
    "aborted": "given up by the client",
    "unanswered": "without an answer",
    "unread_answers": "answers that could not be decoded",
}


def told(header: RecordingHeader) -> Iterator[tuple[str, str]]:
    """The account in a few lines, each with what it is about."""
    account = header.account
    for name, what in _TOLD.items():
        if count := account.get(name):
            yield what, str(count)
    for damage in account.get("damage", ()):
        yield "damage", damage
    if header.scrubbed:
        yield "scrubbed", _counted(header.scrubbed)
    answers = {why: count for why, count in account.get("answers_lost", {}).items() if why != "closed"}
    if answers:  # closed ones are whole as far as anybody saw
        yield "answers not captured whole", _counted(answers)
    if lost := account.get("lost"):
        yield "requests lost", f"{header.lost_share:.2%}: {_counted(lost)}"
    yield "requests kept", f"{header.requests} on {header.connections} connections over {header.lasts_s:.1f} s"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())
