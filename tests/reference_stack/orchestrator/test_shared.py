"""What Redis keeps for all workers, in a real one and on a clock of the test's own: limits, sessions, budgets."""

import asyncio
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import redis

from reference_stack.orchestrator import budget, limit, session
from reference_stack.orchestrator.budget import Standing
from reference_stack.orchestrator.config import Redis, Tier
from reference_stack.orchestrator.store import Store, StoreDownError

pytestmark = pytest.mark.e2e

T = TypeVar("T")
START_S = 1_800_000_000.0
TIER = Tier()  # 2,000 tokens a minute, two minutes' worth at once, 50,000 an hour


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real Redis, on a Unix socket of its own."""
    folder = tmp_path_factory.mktemp("redis")
    path = folder / "r.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        client = redis.Redis(
            unix_socket_path=str(path), retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 100)
        )
        assert client.ping()
        yield path
        server.terminate()


@pytest.fixture
def clock(socket_path: Path) -> Clock:
    redis.Redis(unix_socket_path=str(socket_path)).flushall()
    return Clock()


@pytest.fixture
def asks(socket_path: Path, clock: Clock) -> Callable[[Callable[[Store], Awaitable[T]]], T]:
    """Do something with a store that is on the test's clock."""

    def ask(story: Callable[[Store], Awaitable[T]]) -> T:
        async def told() -> T:
            store = Store(Redis(url=f"unix://{socket_path}", when_down="open", timeout_s=5), clock)
            try:
                return await story(store)
            finally:
                await store.close()

        return asyncio.run(told())

    return ask


Asks = Callable[[Callable[[Store], Awaitable[T]]], T]


def test_no_window_holds_more(asks: Asks[list[float]], clock: Clock) -> None:
    """However requests come, no minute has more than its limit, and who was refused is told when (ORC-1)."""

    async def story(store: Store) -> list[float]:
        passed = []
        for step in range(1200):  # ten a second at the start of each half minute, and some between
            clock.now_s = START_S + step * 0.25
            if step % 120 < 40 or step % 7 == 0:
                wait_s = await limit.take(store, "alice", 20)
                if wait_s == 0:
                    passed.append(clock.now_s)
                else:
                    assert passed[-20] + 60 - clock.now_s == pytest.approx(wait_s, abs=0.01)
        return passed

    passed = asks(story)
    assert len(passed) >= 5 * 20
    assert all(later - earlier >= 60 for earlier, later in zip(passed, passed[20:], strict=False))


def test_steady_users_are_never_blocked(asks: Asks[list[float]], clock: Clock) -> None:
    """A user just under the limit passes for ever: windows end (the documents' limiter had none that did)."""

    async def story(store: Store) -> list[float]:
        waits = []
        for step in range(300):
            clock.now_s = START_S + step * 3.001
            waits.append(await limit.take(store, "alice", 20))
        return waits

    assert set(asks(story)) == {0.0}


def test_at_once(asks: Asks[list[float]]) -> None:
    """Of many requests in one moment exactly the limit passes, and users do not share it."""

    async def story(store: Store) -> list[float]:
        return await asyncio.gather(*(limit.take(store, user, 100) for user in ("a", "b") * 300))

    assert sum(wait_s == 0 for wait_s in asks(story)) == 200


def test_session_age(asks: Asks[list[float]], clock: Clock) -> None:
    """A session's age counts from its first request, for its user alone (ORC-3)."""

    async def story(store: Store) -> list[float]:
        ages = []
        for user, later_s in (("alice", 0), ("alice", 181.5), ("bob", 181.5)):
            clock.now_s = START_S + later_s
            ages.append(await session.age_s(store, user, "s"))
        return ages

    assert asks(story) == [0.0, 181.5, 0.0]


def test_burst_of_two_minutes(asks: Asks[int], clock: Clock) -> None:
    """Two minutes' tokens can be had within 5 s, and no more than those and what the seconds added (ORC-2)."""

    async def story(store: Store) -> int:
        had = 0
        for step in range(500):
            clock.now_s = START_S + step * 0.01
            had += 100 * ((await budget.reserve(store, "k", TIER, 100)).standing is Standing.WITHIN)
        return had

    assert 4000 <= asks(story) <= 4000 + 5 * 2000 / 60


def test_over_budget_and_back(asks: Asks[list[Standing]], clock: Clock) -> None:
    """Over its budget a key is told so, and is within it again when its minute has refilled (ORC-2)."""

    async def story(store: Store) -> list[Standing]:
        found = []
        for later_s, tokens in ((0, 4000), (0, 1), (29, 1000), (30, 1000), (150, 4000)):
            clock.now_s = START_S + later_s
            found.append((await budget.reserve(store, "k", TIER, tokens)).standing)
        return found

    assert [one.value for one in asks(story)] == ["within", "over", "over", "within", "within"]


def test_hard_stop(asks: Asks[list[budget.Reservation]], clock: Clock) -> None:
    """No hour has more than 50,000 tokens, on whatever model, and the wait that is told is enough for some (ORC-2)."""

    async def story(store: Store) -> list[budget.Reservation]:
        found = [await budget.reserve(store, "k", TIER, 5000) for _ in range(11)]
        clock.now_s = START_S + 3599
        found.append(await budget.reserve(store, "k", TIER, 1))
        clock.now_s = START_S + found[10].wait_s
        found.append(await budget.reserve(store, "k", TIER, 5000))
        return found

    found = asks(story)
    assert [one.standing.value for one in found] == ["over"] * 10 + ["stop"] * 2 + ["over"]
    assert 3600 <= found[10].wait_s <= 3600 + budget.SLOT_S


def test_settling(asks: Asks[list[Standing]], clock: Clock) -> None:
    """What was not used comes back, to the minute and to the hour; what nobody settles stays spent (ORC-2)."""

    async def story(store: Store) -> list[Standing]:
        tier = Tier(tokens_per_h=6000)
        first = await budget.reserve(store, "k", tier, 4000)
        await budget.settle(store, first, tier, 1000)
        second = await budget.reserve(store, "k", tier, 3000)
        third = await budget.reserve(store, "k", tier, 2000)
        fourth = await budget.reserve(store, "k", tier, 1)
        return [first.standing, second.standing, third.standing, fourth.standing]

    assert [one.value for one in asks(story)] == ["within", "within", "over", "stop"]


def test_settling_at_once(asks: Asks[Standing]) -> None:
    """Many requests reserve and settle at once, and the account is right to the token."""

    async def story(store: Store) -> Standing:
        async def one() -> None:
            await budget.settle(store, await budget.reserve(store, "k", TIER, 300), TIER, 7)

        await asyncio.gather(*(one() for _ in range(100)))
        await budget.reserve(store, "k", TIER, 50_000 - 100 * 7)
        return (await budget.reserve(store, "k", TIER, 1)).standing

    assert asks(story) is Standing.STOP


def test_everything_has_an_end(asks: Asks[None], socket_path: Path) -> None:
    """No key stays in Redis for ever."""

    async def story(store: Store) -> None:
        await limit.take(store, "u", 5)
        await session.age_s(store, "u", "s")
        await budget.settle(store, await budget.reserve(store, "k", TIER, 500), TIER, 400)

    asks(story)
    client = redis.Redis(unix_socket_path=str(socket_path))
    ends = {name.decode(): client.ttl(name) for name in client.scan_iter()}
    assert len(ends) == 4
    assert all(0 < end <= 3610 for end in ends.values()), ends


def test_a_redis_that_hangs(socket_path: Path) -> None:
    """A Redis that is stopped in its tracks is down after its time, not waited for."""

    async def story() -> None:
        store = Store(Redis(url=f"unix://{socket_path}", when_down="open", timeout_s=0.1))
        client = redis.asyncio.Redis(unix_socket_path=str(socket_path))
        try:
            await client.execute_command("CLIENT", "PAUSE", 1500)
            with pytest.raises(StoreDownError):
                async with asyncio.timeout(1):
                    await limit.take(store, "u", 5)
            await client.execute_command("CLIENT", "UNPAUSE")
            assert await limit.take(store, "u", 5) == 0.0
        finally:
            await client.aclose()
            await store.close()

    asyncio.run(story())
