"""The canary's findings, against an engine made of one asyncio server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from reference_stack.gateway import canary
from reference_stack.gateway.canary import Canary, Health

pytestmark = pytest.mark.e2e  # in real time


class Engine:
    """Answers, or holds its answers back; its tokens are what the test says."""

    def __init__(self) -> None:
        self.status = 200
        self.holds = False
        self.metrics_hold = False
        self.tokens = 0
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One exchange."""
        metrics = (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /metrics")
        self.asked += not metrics
        if self.metrics_hold if metrics else self.holds:
            await reader.read(-1)  # until the canary gives up
        else:
            labels = b'{model_name="tiny",engine="0"}'
            writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\n\r\n" % self.status)
            writer.write(b"vllm:generation_tokens_total%s %d.0\nvllm:prompt_tokens_total 3.0\n" % (labels, self.tokens))
        writer.close()


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Canary]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield Canary(f"http://127.0.0.1:{port}", "tiny")
    server.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "DEADLINE_S", 0.2)
    monkeypatch.setattr(canary, "METRICS_DEADLINE_S", 0.2)
    monkeypatch.setattr(canary, "INTERVAL_S", 0.0)


def found(engine: Engine, steps: Callable[[Canary], Awaitable[list[Health]]]) -> list[Health]:
    async def main() -> list[Health]:
        async with running(engine) as one:
            return await steps(one)

    return asyncio.run(main())


def test_alive() -> None:
    """A replica that completes one token is alive."""

    async def steps(one: Canary) -> list[Health]:
        return [await one.health()]

    assert found(Engine(), steps) == [Health.ALIVE]


def test_engine_error_is_dead() -> None:
    """A replica that answers the canary with an error is dead."""
    engine = Engine()
    engine.status = 500

    async def steps(one: Canary) -> list[Health]:
        return [await one.health()]

    assert found(engine, steps) == [Health.DEAD]


def test_nobody_there_is_dead() -> None:
    """A refused connection is dead, at once."""

    async def main() -> Health:
        server = await asyncio.start_server(Engine().serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await Canary(f"http://127.0.0.1:{port}", "tiny").health()

    assert asyncio.run(main()) is Health.DEAD


@pytest.mark.parametrize("metrics_hold", [True, False])
def test_frozen_is_late_each_time(metrics_hold: bool) -> None:
    """No token and no progress is late, whether the metrics still answer or not."""
    engine = Engine()
    engine.holds = True
    engine.metrics_hold = metrics_hold

    async def steps(one: Canary) -> list[Health]:
        return [await one.health() for _ in range(3)]

    assert found(engine, steps) == [Health.LATE] * 3


def test_busy_is_not_late() -> None:
    """A replica too slow for the canary, but making tokens for others, is busy from the second look on."""
    engine = Engine()
    engine.holds = True

    async def steps(one: Canary) -> list[Health]:
        first = await one.health()
        engine.tokens += 10
        second = await one.health()
        third = await one.health()
        engine.holds = False
        return [first, second, third, await one.health()]

    assert found(engine, steps) == [Health.LATE, Health.BUSY, Health.LATE, Health.ALIVE]


def test_asks_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many want to know within the interval, the replica is asked once."""
    monkeypatch.setattr(canary, "INTERVAL_S", 60.0)
    engine = Engine()

    async def steps(one: Canary) -> list[Health]:
        together = await asyncio.gather(*(one.health() for _ in range(5)))
        return [*together, await one.health()]

    assert found(engine, steps) == [Health.ALIVE] * 6
    assert engine.asked == 1
