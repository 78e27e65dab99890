"""A relay that writes down what passes as a capture would show it: packets to replay where tcpdump may not run.

It stands in front of a server, takes the moment of every piece that either side says, and makes of each connection the
segments of it: handshake, data, the end in peace or by a reset.
"""

import asyncio
import random
import time
from pathlib import Path

from tests.support.serving import Serving
from tests.traffic.capture import links
from tests.traffic.capture.links import ACK, FIN, PSH, RST
from tests.traffic.capture.material import MSS, Talk


def write_capture(path: Path, talks: list[Talk]) -> Path:
    """The connections as a capture file, their packets in the order of their moments."""
    packets = sorted((packet for talk in talks for packet in talk.packets), key=lambda packet: packet.at_ns)
    path.write_bytes(links.pcap(links.frames(packets, links.ethernet), links.ETHERNET))
    return path


class Tap(Serving):
    """The relay as a context manager; `url` is what clients call, `capture` writes what was said so far."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._server_port = port
        self._talks: list[Talk] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def capture(self, path: Path) -> Path:
        return write_capture(path, self._talks)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = Talk(len(self._talks), time.time_ns(), random.Random(len(self._talks)))
        talk.open()
        self._talks.append(talk)
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        await asyncio.gather(
            _pass_on(talk, True, reader, their_writer),
            _pass_on(talk, False, their_reader, writer),
        )
        writer.close()
        their_writer.close()


async def _pass_on(talk: Talk, from_client: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction of a connection, until its end; a reset goes on as one."""
    try:
        while data := await reader.read(1 << 16):
            talk.now_ns = max(time.time_ns(), talk.packets[-1].at_ns)
            for at in range(0, len(data), MSS):
                talk.put(from_client, ACK | PSH, data[at : at + MSS])
            writer.write(data)
            await writer.drain()
        talk.now_ns = time.time_ns()
        talk.put(from_client, ACK | FIN)
        writer.write_eof()
    except (ConnectionError, OSError):
        talk.now_ns = time.time_ns()
        talk.put(from_client, ACK | RST)
        writer.transport.abort()
