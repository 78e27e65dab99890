"""Whatever a file holds, importing it ends in bounded memory, with an account or the user's error; never a crash."""

import signal
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.model import UsageError
from tests.traffic.capture.links import ETHERNET, FRAMINGS, frames, pcap, pcapng, squeezed
from tests.traffic.capture.pipeline import adds_up, imported, material

LIMIT_S = 60
LIMIT_BYTES = 24 << 20  # a few read blocks and what the connections of a small file hold
KINDS = ("ethernet", "sll2", "vlan", "vxlan", "gre", "extended6", "fragments", "fragments6", "options", "null6")
HEADS = (
    *(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, link) for link in (0, 1, 101, 113, 276)),
    b"\x0a\x0d\x0d\x0a",
)


@cache
def small(kind: str, pcapng_: bool) -> bytes:
    """Parts of two connections under some link layer: a client that gives up, and one that pipelines."""
    made = material().packets
    packets = [p for p in made if p.connection == 1][-80:] + [p for p in made if p.connection == 8][:120]
    link, shape = FRAMINGS[kind]
    return (
        pcapng(frames(packets, shape), link)
        if pcapng_
        else pcap(frames(packets, shape), ETHERNET if link == 1 else link)
    )


captures = st.builds(small, st.sampled_from(KINDS), st.booleans())


@contextmanager
def bounded() -> Iterator[None]:
    """No longer than the limit, which is for a hang, and no more memory than the bound."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"not over after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_S)
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert peak <= LIMIT_BYTES


def survives(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with bounded():
        try:
            _, account = imported([path])
        except UsageError as error:
            assert str(path) in error.sentence or "link" in error.sentence
        else:
            assert adds_up(account), account.as_dict()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "capture"


few = settings(max_examples=max(4, settings().max_examples // 12), suppress_health_check=[HealthCheck.too_slow])


@few
@given(st.sampled_from((b"", *HEADS)), st.binary(max_size=4000), st.booleans())
def test_random_bytes(path: Path, head: bytes, data: bytes, zipped: bool) -> None:
    """Noise, with and without the beginning of a capture, zipped or not."""
    survives(path, squeezed(head + data) if zipped else head + data)


@few
@given(captures, st.floats(0, 1), st.booleans())
def test_cut_off(path: Path, data: bytes, share: float, zipped: bool) -> None:
    """A file that ends anywhere, in the middle of a gzip stream too."""
    data = squeezed(data) if zipped else data
    survives(path, data[: int(len(data) * share)])


@few
@given(captures, st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=200))
def test_flipped_bits(path: Path, data: bytes, flips: list[tuple[float, int]]) -> None:
    """Bits that changed anywhere: in lengths, numbers, addresses, heads and bodies."""
    spoiled = bytearray(data)
    for share, bit in flips:
        spoiled[int(len(data) * share)] ^= 1 << bit
    survives(path, bytes(spoiled))


@few
@given(captures, st.data())
def test_swapped_parts(path: Path, data: bytes, draw: st.DataObject) -> None:
    """Parts of the file in another place, or twice."""
    a, b, c = sorted(draw.draw(st.integers(0, len(data))) for _ in range(3))
    survives(path, data[:a] + data[b:c] + data[a:b] + data[b:])
