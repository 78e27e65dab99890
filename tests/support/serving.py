"""Servers of a test's own: an asyncio server in a thread, and ports that nobody listens on."""

import asyncio
import socket
import ssl
import threading
from typing import Self

LIMIT_S = 10.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Serving:
    """A server as a context manager: its subclass says in `talk` what becomes of a connection. `port` is its own."""

    port: int

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self._tls = tls
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        raise NotImplementedError  # what a server says is what its test is about

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LIMIT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(asyncio.start_server(self.talk, "127.0.0.1", 0, ssl=self._tls))
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        self.loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
