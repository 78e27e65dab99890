"""The gateway, as the orchestrator asks it: one request, its answer chunk by chunk, closed as soon as nobody reads.

It does not retry: the gateway does, and two that retry make a storm (INC-12). A connection that is closed early tells
the gateway, and through it the engine, that nobody wants the rest.
"""

from collections.abc import AsyncIterator, Mapping

import aiohttp

ANSWER_LIMIT_BYTES = 16 * 1024 * 1024


class UpstreamError(Exception):
    """The gateway did not answer, or not to the end; `late` when it took too long."""

    def __init__(self, message: str, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Answer:
    """An answer that has begun."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = response.headers

    @property
    def is_stream(self) -> bool:
        """Whether it comes as events."""
        return self._response.content_type == "text/event-stream"

    async def chunks(self) -> AsyncIterator[bytes]:
        """Its bytes as they come. UpstreamError when they end too early."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failed(error) from None

    async def whole(self) -> bytes:
        """All of it. UpstreamError when it ends too early or has no end."""
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > ANSWER_LIMIT_BYTES:
                raise UpstreamError("the answer has no end")
        return bytes(body)

    def close(self) -> None:
        """Give the connection back when the answer is whole, and cut it when it is not."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Upstream:
    """The connections of one worker."""

    def __init__(self, idle_s: float) -> None:
        """`idle_s`: how long it may be silent, before an answer and within one."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=2, sock_read=idle_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def ask(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Post `body` and return when the answer begins. UpstreamError when none does."""
        try:
            response = await self._session.post(
                f"{url.rstrip('/')}/v1/chat/completions", data=body, headers=dict(headers), allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failed(error) from None
        return Answer(response)

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()


def _failed(error: Exception) -> UpstreamError:
    return UpstreamError(f"{type(error).__name__}: {error}", late=isinstance(error, TimeoutError))
