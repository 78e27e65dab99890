"""Whole blocks at once say the same as packet by packet, of every connection, however the blocks fall."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.traffic.capture import columns, flows, messages, packets, records, runs
from harness.traffic.capture.account import Account
from harness.traffic.capture.flows import Kind, Limits, Run, Step
from harness.traffic.capture.framing import chunk_leads
from harness.traffic.importing import import_captures
from tests.traffic.capture import mutations
from tests.traffic.capture.links import ETHERNET, FRAMINGS, Tcp, ethernet, frames, pcap, pcapng
from tests.traffic.capture.pipeline import imported, material, plain

Told = dict[int, list[Step]]
A_FEW = [1, 4, 8, 15]  # connections: endings of all kinds, and a pipelined triple


def singles(run: Run) -> list[Step]:
    told = zip(run.at_ns, run.data, strict=True)
    return [Step(at_ns, run.connection, run.flow, Kind.DATA, data) for at_ns, data in told]


def by_connection(found: Iterable[Step | Run]) -> Told:
    told: Told = defaultdict(list)
    for one in found:
        told[one.connection] += singles(one) if isinstance(one, Run) else [one]
    return dict(told)


def singly(paths: list[Path], account: Account, limits: Limits | None = None) -> Told:
    return by_connection(flows.steps(packets.segments(records.packets(paths, account), account), account, limits))


def at_once(paths: list[Path], account: Account, block_bytes: int, limits: Limits | None = None) -> Told:
    blocks = records.blocks(paths, account, block_bytes)
    return by_connection(runs.steps(columns.columns(blocks, account), account, limits))


def same_however_read(path: Path, captured: bytes, sizes: Iterable[int] = (20_000, 1 << 20)) -> None:
    path.write_bytes(captured)
    account = Account()
    told = singly([path], account)
    for block_bytes in sizes:
        seen = Account()
        assert at_once([path], seen, block_bytes) == told, block_bytes
        assert seen.as_dict() == account.as_dict(), block_bytes


def few() -> list[Tcp]:
    return [packet for packet in material().packets if packet.connection in A_FEW]


@pytest.mark.e2e  # for its time
@pytest.mark.parametrize("mutation", [*mutations.LOSSLESS, *mutations.LOSSY], ids=lambda mutation: mutation.__name__)
def test_every_mutation_gives_the_same_steps(mutation: mutations.Mutation, tmp_path: Path) -> None:
    """Steps with their moments, and all counts, whatever the size of the blocks."""
    same_however_read(tmp_path / "capture", plain(mutation(material().packets)))


@pytest.mark.e2e  # for its time
@pytest.mark.parametrize("name", FRAMINGS)
@pytest.mark.parametrize("write", [pcap, pcapng])
def test_every_link_and_format_gives_the_same_steps(name: str, write: Callable[..., bytes], tmp_path: Path) -> None:
    """Shapes that are taken apart in columns and those that are not, among each other."""
    link, shape = FRAMINGS[name]
    same_however_read(tmp_path / "capture", write(frames(few()[:600], shape), link), (3_000, 1 << 20))


@pytest.mark.parametrize("block_bytes", [500, 5_000, 50_000])
def test_exchanges_do_not_depend_on_where_blocks_end(block_bytes: int, tmp_path: Path) -> None:
    """Blocks of a packet or of hundreds give the same requests and answers."""
    (tmp_path / "capture").write_bytes(plain(few()))
    whole, account = imported([tmp_path / "capture"])
    parts, seen = imported([tmp_path / "capture"], block_bytes)
    assert sorted(parts, key=_turn) == sorted(whole, key=_turn)
    assert seen.as_dict() == account.as_dict()
    assert len(whole) == account.requests_seen == 40


def test_flows_are_forgotten_and_met_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for a flow in a block means nothing in the next."""
    monkeypatch.setattr(columns, "FLOWS_KEPT", 3)
    same_however_read(tmp_path / "capture", plain(few()), [50_000])


def _turn(exchange: messages.Exchange) -> tuple[int, int]:
    return exchange.connection, exchange.turn


def test_most_of_a_capture_is_told_in_runs(tmp_path: Path) -> None:
    """Nearly every piece of data comes in a run, and a run has several as a rule: or it would be no gain."""
    (tmp_path / "capture").write_bytes(plain(few()))
    account = Account()
    blocks = records.blocks([tmp_path / "capture"], account)
    found = list(runs.steps(columns.columns(blocks, account), account))
    in_runs = [run for run in found if isinstance(run, Run)]
    alone = [step for step in found if isinstance(step, Step) and step.kind is Kind.DATA]
    assert sum(len(run.data) for run in in_runs) > 20 * len(alone)
    assert sum(len(run.data) for run in in_runs) > 5 * len(in_runs)


@st.composite
def captures(draw: st.DrawFn) -> list[Tcp]:
    """A few connections that talk in order, as a rule, but for anything: numbers off by a little, flags, silences."""
    at_ns, next_ = 10**18, {(connection, side): draw(NUMBERS) for connection in range(3) for side in (True, False)}
    said = []
    for _ in range(draw(st.integers(1, 50))):
        connection, side = draw(st.integers(0, 2)), draw(st.booleans())
        mine, other = (connection, side), (connection, not side)
        payload, flags = draw(st.binary(max_size=6)), draw(st.sampled_from([16] * 12 + [24, 2, 18, 17, 4, 20, 0]))
        off, ahead = draw(st.sampled_from([0] * 12 + [-1, 1, -5, 5])), draw(st.sampled_from([0] * 12 + [-3, 3]))
        at_ns += draw(st.sampled_from([1_000, 1_000, 1_000, 10_000_000, 60_000_000, 40 * 10**9, 700 * 10**9, -1_000]))
        seq, ack = (next_[mine] + off) % 2**32, (next_[other] + ahead) % 2**32
        said.append(Tcp(at_ns, connection, side, (7, 40_000 + connection), seq, ack, flags, payload))
        if off == 0 or draw(st.booleans()):
            next_[mine] += len(payload) + (flags & 3 != 0)
    return said


NUMBERS = st.integers(2**32 - 60, 2**32 - 1) | st.integers(0, 2**32 - 1)


@given(captures(), st.sampled_from([300, 1_000, 1 << 20]), st.sampled_from([None, Limits(connections=2)]))
def test_anything_said_gives_the_same_steps(
    tmp_path_factory: pytest.TempPathFactory, said: list[Tcp], block_bytes: int, limits: Limits | None
) -> None:
    """Streams with surprises of all kinds, one by one and in blocks: the same steps and the same counts."""
    path = tmp_path_factory.getbasetemp() / "said"
    path.write_bytes(pcap(frames(said, ethernet), ETHERNET))
    account, seen = Account(), Account()
    assert at_once([path], seen, block_bytes, limits) == singly([path], account, limits)
    assert seen.as_dict() == account.as_dict()


PIECES = st.lists(
    st.builds(lambda data: b"%x\r\n%b\r\n" % (len(data), data), st.binary(max_size=300))
    | st.sampled_from([b"5\r\nabcde\r", b"5\r\nabcd\r\n", b"5;x\r\nabcde\r\n", b"0\r\n\r\n", b"A\r\n0123456789\r\n"])
    | st.binary(max_size=12),
    max_size=8,
)


@given(PIECES)
def test_leads_are_those_of_whole_chunks(pieces: list[bytes]) -> None:
    """A lead stands where a piece is one chunk with its size and its line end, and nowhere else."""
    sizes = np.array(list(map(len, pieces)), np.int64)
    leads = chunk_leads(b"".join(pieces), np.cumsum(sizes) - sizes, sizes).tolist()
    for piece, lead in zip(pieces, leads, strict=True):
        line, _, rest = piece.partition(b"\r\n")
        whole = len(line) < 4 and line.isalnum() and rest.endswith(b"\r\n") and _size(line) == len(rest) - 2 > 0
        assert lead == (len(line) + 2 if whole else 0), piece


def _size(line: bytes) -> int:
    try:
        return int(line, 16)
    except ValueError:
        return -1


def test_the_recording_is_the_same_bytes_however_the_blocks_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanges are found in another order, and nothing of a recording depends on it."""
    (tmp_path / "capture").write_bytes(plain(few()))
    written = []
    for block_bytes in (20_000, 1 << 20):
        monkeypatch.setattr(records, "BLOCK_BYTES", block_bytes)
        import_captures([tmp_path / "capture"], tmp_path / "out.jsonl")
        written.append((tmp_path / "out.jsonl").read_bytes())
    assert written[0] == written[1]
