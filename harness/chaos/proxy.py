"""A TCP proxy that stands between a gateway and its engines and makes the way between them worse.

    python -m harness.chaos.proxy --way 8181=127.0.0.1:8081 --way 8182=127.0.0.1:8082 --worse 8181 \
        --delay 100ms --jitter 20ms --for 60s --permit FILE

Ways that are not to be worse pass everything on. So do the others when the time is over: a proxy that ended while
traffic still comes through it would do more harm. It runs by a permit, and ends with that.

Delay holds for every chunk in both directions, half of it each way, so that a round trip takes that much longer and a
stream does not slow down. A rate holds for each connection's answers. A reset comes so long after a connection's first
bytes. A black hole takes connections and bytes, and gives nothing back.
"""

import argparse
import asyncio
import contextlib
import random
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness import units
from harness.chaos import permit

CHUNK_BYTES, PIECE_BYTES = 65_536, 1_024  # pieces where a rate holds
_END_WITH_RESET = struct.pack("ii", 1, 0)  # SO_LINGER without waiting: close sends a reset


@dataclass(frozen=True, slots=True)
class Harm:
    """What a way does to its connections; nothing of it after `until_s` (time.monotonic())."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    rate_bytes: int = 0
    reset_after_s: float | None = None
    blackhole: bool = False
    until_s: float = 0.0

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until_s

    def one_way_s(self) -> float:
        """How long a chunk is held."""
        if self.over:
            return 0.0
        return max(0.0, self.delay_s + random.uniform(-self.jitter_s, self.jitter_s)) / 2


class Way:
    """Connections to one port, passed on to one address."""

    def __init__(self, host: str, port: int, harm: Harm) -> None:
        self._host, self._port, self._harm = host, port, harm

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        with contextlib.suppress(OSError):
            if self._harm.blackhole and not self._harm.over:
                await self._swallow(reader)
            else:
                await self._pass_on(reader, writer)
        with contextlib.suppress(OSError):
            writer.close()

    async def _swallow(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._harm.until_s - time.monotonic()):
                while await reader.read(CHUNK_BYTES):
                    pass

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(CHUNK_BYTES)
        there, back = await asyncio.open_connection(self._host, self._port)
        try:
            async with asyncio.timeout(self._reset_s()):
                await self._both_ways(reader, writer, there, back, first)
        except TimeoutError:
            peer = writer.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _END_WITH_RESET)
            writer.transport.abort()
        finally:
            back.close()

    async def _both_ways(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there: asyncio.StreamReader,
        back: asyncio.StreamWriter,
        first: bytes,
    ) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, back, first))
                both.create_task(self._carry(there, writer, b"", self._harm.rate_bytes))
        except* OSError:
            pass  # one side is gone, and so is the other then

    def _reset_s(self) -> float | None:
        return None if self._harm.over else self._harm.reset_after_s

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, first: bytes, rate_bytes: int = 0
    ) -> None:
        """Every chunk in its order, each held for its time, not for that of those before it."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)

        async def take() -> None:
            size_bytes = PIECE_BYTES if rate_bytes else CHUNK_BYTES
            chunk = first or await source.read(size_bytes)
            while chunk:
                await held.put((time.monotonic() + self._harm.one_way_s(), chunk))
                chunk = await source.read(size_bytes)
            await held.put((time.monotonic(), b""))

        async def give() -> None:
            while chunk := await self._due(held):
                if rate_bytes and not self._harm.over:
                    await asyncio.sleep(len(chunk) / rate_bytes)
                sink.write(chunk)
                await sink.drain()
            if sink.can_write_eof():
                sink.write_eof()

        async with asyncio.TaskGroup() as both:
            both.create_task(take())
            both.create_task(give())

    @staticmethod
    async def _due(held: "asyncio.Queue[tuple[float, bytes]]") -> bytes:
        due_s, chunk = await held.get()
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        return chunk


async def serve(ways: dict[int, tuple[str, int]], worse: set[int], harm: Harm) -> None:
    """Listen on 127.0.0.1 until killed."""
    for port, (host, to) in ways.items():
        way = Way(host, to, harm if port in worse else Harm())
        await asyncio.start_server(way.connected, "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


def main() -> int:
    """Pass on until killed; 1 when there is no permit, or a port is taken."""
    asked = _parse()
    harm = Harm(asked.delay, asked.jitter, asked.rate, asked.reset, asked.blackhole, time.monotonic() + asked.for_s)
    try:
        permit.claim(asked.permit)
        asyncio.run(serve(dict(asked.way), set(asked.worse), harm))
    except (permit.Revoked, OSError) as error:
        sys.stderr.write(f"{str(error) or 'there is no permit'}\n")
    return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.chaos.proxy", description="Make a way worse.")
    parser.add_argument("--way", type=_way, action="append", required=True, metavar="PORT=HOST:PORT", help="listen, to")
    parser.add_argument("--worse", type=int, action="append", default=[], metavar="PORT", help="the ways to make worse")
    parser.add_argument("--delay", type=units.duration, default=0.0, help="of a round trip")
    parser.add_argument("--jitter", type=units.duration, default=0.0, help="more or less than that, at random")
    parser.add_argument("--rate", type=units.size, default=0, help="of answers, a second")
    parser.add_argument("--reset", type=units.duration, help="when connections are reset, from their first bytes on")
    parser.add_argument("--blackhole", action="store_true", help="answer nothing")
    parser.add_argument("--for", dest="for_s", type=units.duration, required=True, help="how long")
    parser.add_argument("--permit", type=Path, required=True, help="a permit, without which it does not begin")
    return parser.parse_args()


def _way(text: str) -> tuple[int, tuple[str, int]]:
    port, _, to = text.partition("=")
    host, _, to_port = to.rpartition(":")
    return int(port), (host, int(to_port))


if __name__ == "__main__":
    sys.exit(main())
