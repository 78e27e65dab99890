"""A server that keeps every byte it is sent, by connection, and answers as each request asks it to.

A request says in one header, `x-do: WHAT SIZE`, what is to be done when so many bytes of it are there: nothing else of
it is understood, so it may be as broken as it likes. The server runs in a thread of the test, on a port of its own.
"""

import asyncio
import re
import time
from dataclasses import dataclass, field

from scripted import PLAIN, STREAM, TOKENS, event, sized

from tests.support.serving import Serving

POST = b"POST /v1/chat/completions HTTP/1.1"
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hello"}]}'
_DO = re.compile(rb"x-do: ([a-z_]+)([0-9.]*) +(\d+)\r\n")


def wire(
    do: str = "plain",
    line: bytes = POST,
    body: bytes = BODY,
    headers: bytes | None = None,
    host: bytes = b"captured",
) -> bytes:
    """The bytes of a request; `headers` are whole lines, the right Content-Length unless given."""
    own = b"content-length: %d\r\n" % len(body) if headers is None else headers
    head = b"%b\r\nhost: %b\r\n%bx-do: %b %%9d\r\n\r\n" % (line, host, own, do.encode())
    return head.replace(b"%9d", b"%9d" % (len(head) - 3 + 9 + len(body))) + body


@dataclass
class Heard:
    """One connection: all its bytes, each request with its moment, and how and when the client ended it."""

    data: bytearray = field(default_factory=bytearray)
    requests: list[tuple[float, bytes]] = field(default_factory=list)
    ended: str = ""
    ended_s: float = 0.0
    owed: bytes = b""  # the answer that waits for the client's FIN


class Recorder(Serving):
    """The server as a context manager; `heard` are the connections that said something, in the order of their first
    byte. Once it is left, all that clients sent has been read."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Heard] = []
        self._talking: set[asyncio.Task[None]] = set()

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._hear_out(), self.loop).result(10)
        super().__exit__()

    async def _hear_out(self) -> None:
        if self._talking:
            await asyncio.wait(self._talking, timeout=5)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talking.add(task)
        heard, unread = Heard(), b""
        try:
            while data := await reader.read(1 << 16):
                if not heard.data:
                    self.heard.append(heard)
                heard.data += data
                unread = await self._take(heard, unread + data, writer)
            heard.ended = "fin"
            writer.write(heard.owed)
            await writer.drain()
        except ConnectionError:
            heard.ended = "reset"
        finally:
            heard.ended_s = time.monotonic()
            writer.close()
            self._talking.discard(task)

    async def _take(self, heard: Heard, unread: bytes, writer: asyncio.StreamWriter) -> bytes:
        """Answer the requests that are there; the rest of the bytes."""
        while (found := _DO.search(unread)) and len(unread) >= (size := int(found[3])):
            heard.requests.append((time.monotonic(), unread[:size]))
            unread = unread[size:]
            await getattr(self, f"_{found[1].decode()}")(heard, writer, float(found[2] or 0))
            await writer.drain()
        return unread

    # What requests ask for --------------------------------------------------------------------------------------

    async def _plain(self, heard: Heard, writer: asyncio.StreamWriter, number: float) -> None:
        writer.write(PLAIN)

    async def _wait(self, heard: Heard, writer: asyncio.StreamWriter, number: float) -> None:
        await asyncio.sleep(number)
        writer.write(PLAIN)

    async def _status(self, heard: Heard, writer: asyncio.StreamWriter, number: float) -> None:
        writer.write(sized(int(number), b"" if number == 204 else b"{}"))

    async def _text(self, heard: Heard, writer: asyncio.StreamWriter, number: float) -> None:
        writer.write(sized(200, b"ready"))

    async def _head(self, heard: Heard, writer: asyncio.StreamWriter, number: float) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")

    async def _stream(self, heard: Heard, writer: asyncio.StreamWriter, number: float) -> None:
        """The end of the message comes later than its [DONE]."""
        writer.write(STREAM + b"".join(map(event, TOKENS)) + event(b"[DONE]"))
        await writer.drain()
        await asyncio.sleep(number)
        writer.write(b"0\r\n\r\n")

    async def _drip(self, heard: Heard, writer: asyncio.StreamWriter, number: float) -> None:
        """Comments for so many seconds."""
        writer.write(STREAM)
        for _ in range(int(number / 0.05)):
            writer.write(b"e\r\n: keep-alive\n\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)

    async def _never(self, heard: Heard, writer: asyncio.StreamWriter, number: float) -> None:
        pass

    async def _close(self, heard: Heard, writer: asyncio.StreamWriter, number: float) -> None:
        writer.close()

    async def _fin(self, heard: Heard, writer: asyncio.StreamWriter, number: float) -> None:
        """The answer waits for the client to close its sending side; a number is the status of a refusal."""
        heard.owed = sized(int(number), b"{}") if number else PLAIN
