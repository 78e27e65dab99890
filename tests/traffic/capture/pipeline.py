"""A capture file through the importer's own stages, and what came of it held against the truth."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from harness.traffic.capture.account import Account
from harness.traffic.capture.columns import columns
from harness.traffic.capture.messages import Exchange, exchanges
from harness.traffic.capture.records import BLOCK_BYTES, blocks
from harness.traffic.capture.runs import steps
from tests.traffic.capture.links import ETHERNET, Frame, Tcp, ethernet, frames, pcap
from tests.traffic.capture.material import Material, Truth, base

BROKEN_FRAMING = ("two_lengths", "bad_chunk", "short_body")  # what their body is, nobody can say


@dataclass
class Found:
    """What an import found. `wrong` is what was said to be whole and is not what was sent, in words."""

    exchanges: list[Exchange]
    account: Account
    requests: dict[str, Truth] = field(default_factory=dict)  # whole, by name
    answers: dict[str, Truth] = field(default_factory=dict)
    paired: list[tuple[Truth, Exchange]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@cache
def material() -> Material:
    """The base, made once for all tests of a process."""
    return base()


def imported(paths: Sequence[Path], block_bytes: int = BLOCK_BYTES) -> tuple[list[Exchange], Account]:
    account = Account()
    told = exchanges(steps(columns(blocks(paths, account, block_bytes), account), account), account)
    return list(told), account


def found(folder: Path, captured: bytes, truths: Iterable[Truth]) -> Found:
    """Import one capture file and compare: requests are known by all their bytes, which no two share."""
    (folder / "capture").write_bytes(captured)
    return compared(*imported([folder / "capture"]), truths)


def compared(told: list[Exchange], account: Account, truths: Iterable[Truth]) -> Found:
    result = Found(told, account)
    unfound = {truth.request.raw: truth for truth in truths}
    for exchange in told:
        if exchange.request.lost:
            continue
        truth = unfound.pop(exchange.request.raw, None)
        if truth is None:
            result.wrong.append(f"no such request, or twice: {exchange.request.raw[:200]!r}")
        else:
            result.paired.append((truth, exchange))
            _compare(result, truth, exchange)
    return result


def _compare(result: Found, truth: Truth, exchange: Exchange) -> None:
    name = truth.name
    said = (exchange.method, exchange.target)
    if said != (truth.method, truth.target):
        result.wrong.append(f"{name}: {said}")
    if truth.kind not in BROKEN_FRAMING and exchange.request.body != truth.request.body:
        result.wrong.append(f"{name}: body of {len(exchange.request.body)}, not {len(truth.request.body)} bytes")
    result.requests[name] = truth
    answer = exchange.answer
    if answer is None or answer.lost != ("" if truth.whole else "closed"):
        return
    if (exchange.status, answer.body) != (truth.status, truth.answer.body):
        result.wrong.append(f"{name}: answer {exchange.status} of {len(answer.body)} bytes")
    result.answers[name] = truth


def plain(packets_: Iterable[Tcp]) -> bytes:
    """The everyday capture: Ethernet, microseconds, little endian."""
    return pcap(frames(packets_, ethernet), ETHERNET)


def adds_up(account: Account) -> bool:
    """Whether everything that was seen is somewhere."""
    packets_ = account.segments + account.not_tcp + account.other_ports + account.fragments_held + account.unreadable
    connections = account.http + account.not_http + account.tls + account.http2 + account.empty
    requests = account.complete + sum(account.incomplete.values())
    return (packets_, connections, requests) == (account.packets, account.connections, account.requests_seen)


def shifted(captured: Iterable[Frame], by_ns: int) -> list[Frame]:
    return [frame._replace(at_ns=frame.at_ns + by_ns) for frame in captured]
