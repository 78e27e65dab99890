"""Capture files -> packets: every form of file, and every way in which one can be broken."""

import gzip
import io
import struct
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.model import UsageError
from harness.traffic.capture.account import Account
from harness.traffic.capture.records import LARGEST_BYTES, STDIN, Packet, packets

FRAMES = [bytes([n]) * (n * 7 % 300) for n in range(1, 60)]
ONCE_S = 1_700_000_000


def pcap(frames: list[bytes], order: str = "<", nano: bool = False, link: int = 1, start_s: int = ONCE_S) -> bytes:
    magic = 0xA1B23C4D if nano else 0xA1B2C3D4
    records = [
        struct.pack(order + "IIII", start_s + n, 123456 + n, len(frame), len(frame) + n) + frame
        for n, frame in enumerate(frames)
    ]
    return struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 262144, link) + b"".join(records)


def block(kind: int, body: bytes, order: str = "<") -> bytes:
    body += bytes(-len(body) % 4)
    size = struct.pack(order + "I", 12 + len(body))
    return struct.pack(order + "I", kind) + size + body + size


def section(order: str = "<") -> bytes:
    return block(0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1), order)


def interface(link: int = 1, order: str = "<", options: dict[int, bytes] | None = None) -> bytes:
    coded = b"".join(
        struct.pack(order + "HH", code, len(value)) + value + bytes(-len(value) % 4)
        for code, value in (options or {}).items()
    )
    return block(1, struct.pack(order + "HHI", link, 0, 0) + coded + bytes(4), order)


def enhanced(frame: bytes, ticks: int, which: int = 0, order: str = "<") -> bytes:
    head = struct.pack(order + "IIIII", which, ticks >> 32, ticks & 0xFFFFFFFF, len(frame), len(frame))
    return block(6, head + frame + bytes(-len(frame) % 4), order)


def read(tmp_path: Path, *contents: bytes) -> tuple[list[Packet], Account]:
    paths = [tmp_path / f"{n}.pcap" for n in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    account = Account()
    return list(packets(paths, account)), account


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("nano", [False, True])
def test_classic_captures_of_both_orders_and_resolutions(tmp_path: Path, order: str, nano: bool) -> None:
    """The same frames come out, with their moments to the tick and their length on the wire."""
    seen, account = read(tmp_path, pcap(FRAMES, order, nano, link=113))
    tick_ns = 1 if nano else 1000
    assert seen == [
        Packet((ONCE_S + n) * 10**9 + (123456 + n) * tick_ns, 113, frame, len(frame) + n)
        for n, frame in enumerate(FRAMES)
    ]
    assert (account.files, account.packets, account.bytes) == (1, len(FRAMES), sum(map(len, FRAMES)))
    assert not account.damage


def test_the_checksum_length_above_the_link_type_is_no_part_of_it(tmp_path: Path) -> None:
    """Some writers note there how many bytes of checksum a frame ends with."""
    seen, _ = read(tmp_path, pcap(FRAMES[:1], link=1 | 0x2400_0000))
    assert seen[0].link == 1


@pytest.mark.parametrize("order", ["<", ">"])
def test_sections_and_interfaces_of_pcapng(tmp_path: Path, order: str) -> None:
    """Each packet has the link type and the clock of its interface, each section its own byte order."""
    other = ">" if order == "<" else "<"
    content = section(order) + interface(1, order)
    content += interface(276, order, {2: b"eth1", 9: b"\x09", 14: struct.pack(order + "q", -5)})
    content += interface(101, order, {9: bytes([0x80 | 10])})
    content += block(4, b"names of hosts", order) + enhanced(b"micro", 7_000_001, 0, order)
    content += enhanced(b"nano!", 9_000_000_002, 1, order) + enhanced(b"binary", 3 << 9, 2, order)
    content += section(other) + interface(0, other) + enhanced(b"again", 1, 0, other)
    seen, account = read(tmp_path, content)
    assert seen == [
        Packet(7_000_001_000, 1, b"micro", 5),
        Packet(4_000_000_002, 276, b"nano!", 5),
        Packet(1_500_000_000, 101, b"binary", 6),
        Packet(1000, 0, b"again", 5),
    ]
    assert account.packets == 4 and not account.damage


def test_packets_without_a_time_and_drops_are_counted(tmp_path: Path) -> None:
    """A simple packet block cannot be placed in time; an interface's statistics say what its capture dropped."""
    drops = struct.pack("<III", 0, 0, 0) + struct.pack("<HHQHHQ", 5, 8, 40, 7, 8, 2)
    seen, account = read(tmp_path, section() + interface() + block(3, struct.pack("<I", 4) + b"data") + block(5, drops))
    assert not seen
    assert (account.packets, account.unreadable, account.dropped) == (1, 1, 42)


def test_gzip_is_known_by_its_magic(tmp_path: Path) -> None:
    """The name says nothing; captures of either form are unpacked."""
    plain, _ = read(tmp_path, pcap(FRAMES))
    zipped, account = read(tmp_path, gzip.compress(pcap(FRAMES)))
    assert zipped == plain and not account.damage
    assert len(read(tmp_path, gzip.compress(section() + interface() + enhanced(b"x", 1)))[0]) == 1


@pytest.mark.parametrize("wrap", [bytes, gzip.compress])
def test_standard_input(monkeypatch: pytest.MonkeyPatch, wrap: type[bytes]) -> None:
    """A pipe that gives a few bytes at a time is read like a file."""

    class Pipe(io.RawIOBase):
        left = io.BytesIO(wrap(pcap(FRAMES)))

        def readable(self) -> bool:
            return True

        def readinto(self, room: memoryview) -> int:  # type: ignore[override]
            few = self.left.read(min(11, len(room)))
            room[: len(few)] = few
            return len(few)

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Pipe(), 64)))
    account = Account()
    assert [packet.data for packet in packets([STDIN], account)] == FRAMES
    assert not account.damage


def test_several_files_come_in_the_order_of_their_first_packets(tmp_path: Path) -> None:
    """Whatever order a shell's glob gave them, and a file without packets among them."""
    late, early = pcap([b"late"], start_s=ONCE_S + 9), pcap([b"early", b"next"])
    seen, account = read(tmp_path, late, pcap([]), early)
    assert [packet.data for packet in seen] == [b"early", b"next", b"late"]
    assert (account.files, account.packets) == (3, 3)
    with pytest.raises(UsageError, match="standard input is read alone"):
        list(packets([STDIN, tmp_path / "0.pcap"], Account()))


def test_a_file_that_ends_inside_a_record_keeps_what_was_whole(tmp_path: Path) -> None:
    """As a capture does that is still being written, or whose disk was full."""
    for content in (pcap(FRAMES), section() + interface() + b"".join(map(enhanced, FRAMES, range(99)))):
        seen, account = read(tmp_path, content[:-3])
        assert [packet.data for packet in seen] == FRAMES[:-1]
        assert account.truncated_files == 1 and "ends inside a record" in account.damage[0]


def test_gzip_that_breaks_off_keeps_what_was_whole(tmp_path: Path) -> None:
    """The packets before the break come out, and the break is told."""
    frames = [bytes((n * k) % 251 for k in range(200)) for n in range(300)]
    seen, account = read(tmp_path, gzip.compress(pcap(frames))[:-4000])
    assert 0 < len(seen) < 300 and [packet.data for packet in seen] == frames[: len(seen)]
    assert account.truncated_files == 1 and account.damage


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (pcap([])[:10], "ends inside the header of a capture, after 10 bytes"),
        (section()[:9], "ends inside the header of a capture, after 9 bytes"),
        (b'{"recording": 1}', "is no capture: it begins with b'{\"recording\": 1}'"),
        (gzip.compress(b"hello there, this is text", mtime=0), "is no capture: it begins with b'hello there, thi'"),
        (b"\x1f\x8b\x08\x00\x00", "cannot be unpacked"),
        (b"\x1f\x8bno gzip at all", "cannot be unpacked"),
    ],
)
def test_what_is_no_capture_is_the_users_error(tmp_path: Path, content: bytes, said: str) -> None:
    """The sentence says what was seen, and no packet was made up."""
    with pytest.raises(UsageError) as told:
        read(tmp_path, content)
    assert said in told.value.sentence and str(tmp_path) in told.value.sentence


def test_what_cannot_be_opened_is_the_users_error(tmp_path: Path) -> None:
    """A path that is not there, or a folder."""
    for path in (tmp_path / "missing.pcap", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            list(packets([path], Account()))


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        (struct.pack("<IIII", 0, 0, LARGEST_BYTES + 1, 9), "a record claims 4194305 bytes"),
        (struct.pack("<IIII", 0, 0, 0xFFFFFFFF, 9), "a record claims 4294967295 bytes"),
    ],
)
def test_absurd_lengths_end_a_classic_capture(tmp_path: Path, tail: bytes, said: str) -> None:
    """Nothing is allocated for them; what came before is kept, and the reason told."""
    seen, account = read(tmp_path, pcap(FRAMES) + tail + bytes(100))
    assert len(seen) == len(FRAMES) == account.packets
    assert account.damaged_files == 1 and said in account.damage[0]


@pytest.mark.parametrize(
    "tail",
    [
        struct.pack("<II", 6, 11) + bytes(20),
        struct.pack("<II", 6, 34) + bytes(40),
        struct.pack("<II", 6, 0xFFFFFFFC) + bytes(40),
        block(6, struct.pack("<IIIII", 5, 0, 0, 0, 0)),
        block(6, struct.pack("<IIIII", 0, 0, 0, 9999, 9999)),
        block(6, b""),
        block(1, b""),
        block(0x0A0D0D0A, b"nonsense"),
    ],
)
def test_blocks_that_make_no_sense_end_a_pcapng_capture(tmp_path: Path, tail: bytes) -> None:
    """A length that cannot be, an interface nobody described, a packet longer than its block."""
    seen, account = read(tmp_path, section() + interface() + enhanced(b"good", 1) + tail)
    assert [packet.data for packet in seen] == [b"good"]
    assert account.damaged_files == 1 and len(account.damage) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.sampled_from([*map(pcap, ([b"one"], [])), section() + interface() + enhanced(b"one", 1), section(">")]),
    rest=st.binary(max_size=400),
    zipped=st.booleans(),
)
def test_random_bytes_never_crash(tmp_path: Path, start: bytes, rest: bytes, zipped: bool) -> None:
    """Whatever follows the header, packets come out or the reason is told, and the count is true."""
    content = start + rest
    seen, account = read(tmp_path, gzip.compress(content) if zipped else content)
    assert account.packets == len(seen) + account.unreadable
    assert account.bytes == sum(len(packet.data) for packet in seen)
    assert len(account.damage) == account.truncated_files + account.damaged_files <= 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=20), at=st.integers(0, 4000))
def test_flipped_and_cut_captures_never_crash(tmp_path: Path, flips: list[tuple[int, int]], at: int) -> None:
    """A damaged capture ends in packets, in a reason, or in the user's error."""
    for whole in (pcap(FRAMES), section() + interface() + b"".join(map(enhanced, FRAMES, range(99)))):
        content = bytearray(whole)
        for where, value in flips:
            content[where] = value
        try:
            seen, account = read(tmp_path, bytes(content[:at]))
        except UsageError:
            continue
        assert account.packets == len(seen) + account.unreadable


@pytest.mark.e2e  # not for its processes, for its time
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Packets are handed on as they are read: a few blocks are held, whatever the size."""
    path = tmp_path / "big.pcap"
    path.write_bytes(pcap([bytes(1400)] * 20_000))
    tracemalloc.start()
    try:
        count = sum(1 for _ in packets([path], Account()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 20_000
    assert peak < 8 << 20
