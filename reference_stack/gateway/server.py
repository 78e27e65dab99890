"""HTTP/1.1 for the guard: a request in, an answer out, nothing else.

Envoy is its only client and every request passes here, so it is a bare asyncio protocol (tens of microseconds) and no
framework. It refuses to route, to stream and to pipeline.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from http import HTTPStatus

import httptools

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """What goes back: a status, a body, and headers beyond its length and type."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: dict[bytes, bytes] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The answer's bytes on the wire."""
        lines = [
            b"HTTP/1.1 %d %s" % (self.status, HTTPStatus(self.status).phrase.encode()),
            b"content-length: %d" % len(self.body),
        ]
        if self.body:
            lines.append(b"content-type: " + self.content_type)
        lines += [name + b": " + value for name, value in self.headers.items()]
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


Headers = dict[bytes, bytes]
Handler = Callable[[str, Headers, bytes], Answer | Coroutine[None, None, Answer]]


class Exchange(asyncio.Protocol):
    """One connection: requests one after the other, each handed to `handler(path, headers, body)`."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._headers: Headers = {}
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the client is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the client is gone; nobody wants the answer."""
        self._transport = None
        if self._waiting:
            self._waiting.cancel()

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._write(Answer(400))
            if self._transport:
                self._transport.close()

    def on_url(self, url: bytes) -> None:
        """httptools: a piece of the request's target."""
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: one header."""
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        """httptools: a piece of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """httptools: the request is whole."""
        path, headers, body = self._path.decode("latin-1"), self._headers, b"".join(self._body)
        self._path, self._headers, self._body = b"", {}, []
        try:
            answer = self._handler(path, headers, body)
        except Exception:  # a mistake of ours answers one request with 500; the others go on
            log.exception("no answer to %s", path)
            answer = Answer(500)
        if isinstance(answer, Answer):
            self._write(answer)
        else:
            self._waiting = asyncio.create_task(self._write_later(path, answer))

    async def _write_later(self, path: str, answer: Coroutine[None, None, Answer]) -> None:
        try:
            self._write(await answer)
        except Exception:
            log.exception("no answer to %s", path)
            self._write(Answer(500))

    def _write(self, answer: Answer) -> None:
        if self._transport:
            self._transport.write(answer.encode())
