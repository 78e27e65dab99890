"""The proxy between a gateway and its engines: what it does to a connection, and that it stops."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from harness.chaos.proxy import Harm, Way

HELD_S = 0.2
LONG_S = 600.0


def through(harm: Harm, client: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[float]]) -> float:
    """What a client measures that talks to an echo by way of a proxy."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65_536):
            writer.write(chunk)
        writer.close()

    async def scene() -> float:
        behind = await asyncio.start_server(echo, "127.0.0.1", 0)
        way = Way("127.0.0.1", behind.sockets[0].getsockname()[1], harm)
        before = await asyncio.start_server(way.connected, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", before.sockets[0].getsockname()[1])
        async with asyncio.timeout(30):
            try:
                return await client(reader, writer)
            finally:
                writer.close()

    return asyncio.run(scene())


def now_and(for_s: float = LONG_S) -> float:
    return time.monotonic() + for_s


async def one_turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    """Seconds from a question to its answer."""
    start_s = time.monotonic()
    writer.write(b"question")
    assert await reader.readexactly(8) == b"question"
    return time.monotonic() - start_s


async def twenty_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    """Seconds for twenty chunks that do not wait for each other."""
    start_s = time.monotonic()
    for number in range(20):
        writer.write(b"%7d." % number)
        await writer.drain()
        await asyncio.sleep(0.001)
    assert await reader.readexactly(160) == b"".join(b"%7d." % number for number in range(20))
    return time.monotonic() - start_s


def test_nothing_happens_by_itself() -> None:
    """A way without harm passes everything on, at once and in order."""
    assert through(Harm(until_s=now_and()), twenty_chunks) < 20 * HELD_S


def test_delay_is_of_a_round_trip() -> None:
    """A turn takes the delay longer, and a stream of chunks no more than that, in order also with jitter."""
    assert through(Harm(delay_s=HELD_S, until_s=now_and()), one_turn) >= HELD_S
    took_s = through(Harm(delay_s=HELD_S, jitter_s=HELD_S / 2, until_s=now_and()), twenty_chunks)
    assert HELD_S / 2 <= took_s < 10 * HELD_S


def test_rate() -> None:
    """Answers take as long as the rate lets them."""
    assert through(Harm(rate_bytes=400, until_s=now_and()), twenty_chunks) >= 160 / 400


def test_reset() -> None:
    """The connection is reset after its time, not before."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
        start_s = time.monotonic()
        await one_turn(reader, writer)
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        return time.monotonic() - start_s

    assert through(Harm(reset_after_s=HELD_S, until_s=now_and()), client) >= HELD_S


def test_blackhole_ends_with_its_time() -> None:
    """Nothing comes back; when the time is over, the connection ends, and the next one is passed on."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
        start_s = time.monotonic()
        writer.write(b"question")
        assert await reader.read(1) == b""
        return time.monotonic() - start_s

    assert through(Harm(blackhole=True, until_s=now_and(HELD_S)), client) >= HELD_S / 2
    assert through(Harm(blackhole=True, until_s=now_and(0)), one_turn) < 20 * HELD_S


def test_harm_that_is_over() -> None:
    """After its time a proxy only passes on."""
    over = Harm(delay_s=LONG_S, rate_bytes=1, reset_after_s=0.0, until_s=now_and(0))
    assert through(over, one_turn) < 20 * HELD_S


def test_no_engine() -> None:
    """Where nobody listens, the connection ends, as it would without a proxy."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
        writer.write(b"question")
        assert await reader.read(1) == b""
        return 0.0

    async def scene() -> None:
        server = await asyncio.start_server(Way("127.0.0.1", 9, Harm()).connected, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        async with asyncio.timeout(30):
            await client(reader, writer)

    asyncio.run(scene())


@pytest.mark.e2e
def test_no_permit(tmp_path: Path) -> None:
    """Without a permit it does not begin."""
    command = [sys.executable, "-m", "harness.chaos.proxy", "--way", "0=127.0.0.1:9", "--for", "1s"]
    done = subprocess.run(
        [*command, "--permit", str(tmp_path / "none")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "there is no permit\n")
