"""What holds for every request, before and after it is understood: an id, and an end when its client has gone.

Plain ASGI, so that a stream passes through it chunk by chunk. It reads no body and knows no route.
"""

import asyncio
import re
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class RequestId:
    """Every request has an id: its client's if that is a decent one, else one of ours. It goes back with the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else str(uuid.uuid4())
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        return await self._app(scope, receive, send_with_id)


class Hangup:
    """A request whose client has gone is cancelled, wherever it waits: for a limit, a first token or the next one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        inbox: asyncio.Queue[Message] = asyncio.Queue(1)

        async def listen() -> None:
            while (message := await receive())["type"] != "http.disconnect":
                await inbox.put(message)

        # asyncio calls it a coroutine; ASGI says no more than awaitable.
        working = asyncio.ensure_future(self._app(scope, inbox.get, send))
        listening = asyncio.create_task(listen())
        try:
            await asyncio.wait({working, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = working.done()
            for task in (working, listening):
                task.cancel()
            await asyncio.wait({working, listening})
        if ended:
            working.result()
        return None
