"""What all workers must agree on lives in Redis, and changes there in one step: a script per question.

It refuses to wait: a Redis that does not answer within its time is down, for this request, and what then holds is the
configuration's to say. It keeps nothing that is dear: every key has an end.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from reference_stack.orchestrator.config import Redis


class StoreDownError(Exception):
    """Redis did not answer, or not in time."""


class Store:
    """The Redis of one worker. `clock` gives Unix time: scripts are told the time, so that they can be tested in it."""

    def __init__(self, config: Redis, clock: Callable[[], float] = time.time) -> None:
        self._timeout_s = config.timeout_s
        self.clock = clock
        self._pool = redis.asyncio.BlockingConnectionPool.from_url(
            config.url,
            max_connections=config.connections,
            timeout=config.timeout_s,
            retry=Retry(NoBackoff(), 1),  # a connection of before a restart of Redis is no failure
        )
        self._redis = redis.asyncio.Redis(connection_pool=self._pool)

    async def run(self, script: str, keys: Sequence[str], *values: float | str) -> Any:
        """What a Lua script answers; its first value is the time. StoreDownError when nothing comes in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._redis.register_script(script)(keys=keys, args=[repr(self.clock()), *values])
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise StoreDownError(str(error) or "timed out") from None

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose()
        await self._pool.aclose()
