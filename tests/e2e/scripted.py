"""A server that misbehaves as the path asks, and run directories that ask it to.

It runs in a thread of the test, on a port of its own, and tells what it was sent: `server.seen`.
"""

import asyncio
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import orjson

from harness import plan_file
from harness.log import write_beside
from harness.model import Request, Window
from tests.support.serving import Serving

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKENS = [
    b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
    b'{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}',
    b'{"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}',
    b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}',
]


def event(data: bytes) -> bytes:
    return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


def sized(status: int, body: bytes, *headers: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (status, b"".join(headers), len(body), body)


PLAIN = sized(
    200,
    orjson.dumps(
        {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
    ),
)


class Scripted(Serving):
    """The server as a context manager. `answers` adds to what its paths do; others answer with a short stream."""

    def __init__(self, tls: ssl.SSLContext | None = None, token_s: float = 0.01) -> None:
        super().__init__(tls)
        self.seen: Counter[str] = Counter()  # requests by x-request-id
        self.bytes_read = 0
        self.hung_up = 0
        self.connections = 0
        self.token_s = token_s

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not writer.is_closing():
                await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except asyncio.CancelledError:
            return
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        path = head.split(b" ")[1].decode()
        self.seen[headers[b"x-request-id"].decode()] += 1
        if path != "/early_413":
            body = await reader.readexactly(int(headers[b"content-length"]))
            self.bytes_read += len(body)
        await getattr(self, path.strip("/"), self.stream)(reader, writer)
        await writer.drain()

    # What the paths do ------------------------------------------------------------------------------------------

    async def tokens(self, writer: asyncio.StreamWriter, count: int = 4) -> None:
        writer.write(STREAM)
        for token in TOKENS[:count]:
            writer.write(event(token))
            await writer.drain()
            await asyncio.sleep(self.token_s)

    async def stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.tokens(writer)
        writer.write(event(b"[DONE]") + b"0\r\n\r\n")

    async def plain(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PLAIN)

    async def plain_close(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PLAIN.replace(b"X\r\n", b"X\r\nconnection: close\r\n"))
        writer.close()

    async def to_the_close(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + PLAIN.partition(b"\r\n\r\n")[2])
        writer.close()

    async def interim(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await self.stream(reader, writer)

    async def done_and_open(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.tokens(writer)
        writer.write(event(b"[DONE]"))
        await reader.read()
        self.hung_up += 1

    async def reset_before(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def reset_inside(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.tokens(writer, 2)
        await self.reset_before(reader, writer)

    async def close_before(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def stalls(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.tokens(writer, 2)
        await reader.read()

    async def cut(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.tokens(writer, 2)
        writer.close()

    async def no_done(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.tokens(writer)
        writer.write(b"0\r\n\r\n")

    async def error_inside(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.tokens(writer, 2)
        writer.write(event(b'{"error":{"message":"engine died"}}') + event(b"[DONE]") + b"0\r\n\r\n")

    async def empty(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + event(b"[DONE]") + b"0\r\n\r\n")

    async def html(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sized(200, b"<html><body>hello</body></html>"))

    async def no_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")

    async def drips(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        while True:
            writer.write(b"e\r\n: keep-alive\n\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.1)

    async def slow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read() == b"":
            self.hung_up += 1

    async def early_413(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sized(413, b'{"error":"too large"}', b"connection: close\r\n"))
        await writer.drain()
        writer.close()

    async def status_429(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sized(429, b'{"error":"slow down"}'))

    async def status_503(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sized(503, b"no healthy upstream"))

    async def status_422(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sized(422, b'{"error":"too long"}'))


def lay_out(run_dir: Path, url: str, requests: Sequence[Request], limit_s: float = 1.0, text: bytes = b"hello") -> Path:
    """A run directory that is ready to be played."""
    run_dir.mkdir()
    header = plan_file.PlanHeader("scripted", 0, len(requests), (Window("steady", 0.0, 1e9),), limit_s)
    (run_dir / "plan.jsonl").write_bytes(b"".join(plan_file.lines(header, requests)))
    (run_dir / "corpus.bin").write_bytes(text)
    (run_dir / "target.yaml").write_text(f"kind: url\nurl: {url}\nmodel: tiny\ntokenizer: .cache/tiny\ngpu: none\n")
    (run_dir / "run.json").write_text("{}")
    return run_dir


def set_origin(run_dir: Path) -> None:
    """What the conductor does when every child is ready."""
    told = {"origin_monotonic_s": time.monotonic() + 0.3}
    write_beside(run_dir / "run.json", orjson.dumps(told))
