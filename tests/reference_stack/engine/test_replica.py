"""The replica in real time: pace, aborts, memory and utilisation."""

import asyncio
import time
from pathlib import Path

import pytest

from reference_stack.engine import replica
from reference_stack.engine.answers import Answer
from reference_stack.engine.replica import Replica
from reference_stack.gpu.device import Device, OutOfDeviceMemory
from reference_stack.profiles import profile

pytestmark = pytest.mark.e2e  # in real time

CARD = profile.load("h100-8b", max_model_len=2304)
STEP_S = CARD.cost(1, 100, 100).step_s


def answer_of(tokens: int) -> Answer:
    """An answer of that many tokens."""
    return Answer([" a"] * tokens, "length")


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """The card of the profile."""
    device = Device(tmp_path / "GPU-0.json")
    device.create(CARD.card.name, CARD.card.memory_bytes)
    return device


@pytest.fixture
def served(device: Device) -> Replica:
    """A replica on it; its loop is started by the test."""
    return Replica("tiny", CARD, device)


async def receive(served: Replica, tokens: int) -> list[float]:
    """Ask for so many tokens; the times at which they came."""
    times = []
    with served.admitted(10, answer_of(tokens), tokens) as ready:
        for _ in range(tokens):
            await ready.acquire()
            times.append(time.monotonic())
    return times


def test_tokens_keep_the_schedule(served: Replica) -> None:
    """Tokens come no faster than the profile's arithmetic allows, and late wake-ups do not add up."""

    async def scenario() -> list[float]:
        loop = asyncio.create_task(served.run())
        times = await receive(served, 100)
        loop.cancel()
        return times

    times = asyncio.run(scenario())
    assert times[-1] - times[0] > 99 * STEP_S - replica.STANDSTILL_S
    assert served.scheduler.kv_usage == 0


def test_standstill_is_not_made_up_for(served: Replica) -> None:
    """After a standstill the engine goes on where it was: the time is lost, and no burst of tokens follows."""

    async def scenario() -> list[float]:
        loop = asyncio.create_task(served.run())
        with served.admitted(10, answer_of(100), 100) as ready:
            for _ in range(10):
                await ready.acquire()
            time.sleep(2 * replica.STANDSTILL_S)  # the standstill itself: nothing in this process runs
            times = []
            for _ in range(90):
                await ready.acquire()
                times.append(time.monotonic())
        loop.cancel()
        return times

    times = asyncio.run(scenario())
    assert times[-1] - times[0] > 88 * STEP_S - replica.STANDSTILL_S


def test_leaving_aborts(served: Replica) -> None:
    """A request that is left is gone from the batch and the cache at once, and is not counted as served."""

    async def scenario() -> None:
        loop = asyncio.create_task(served.run())
        with served.admitted(1000, answer_of(1000), 1000) as ready:
            await ready.acquire()
            assert served.scheduler.kv_usage > 0
            assert len(served.scheduler.running) == 1
            with pytest.raises(ConnectionResetError), served.admitted(10, answer_of(5), 5):
                raise ConnectionResetError
        loop.cancel()

    asyncio.run(scenario())
    assert not served.scheduler.running
    assert not served.scheduler.waiting
    assert served.scheduler.kv_usage == 0
    assert b'finished_reason="length",model_name="tiny"} 1.0' in served.metrics.page()


def test_memory_is_taken_whole(served: Replica, device: Device) -> None:
    """A replica holds weights, KV cache and activations: gpu_memory_utilization of the card within 1 %."""
    state = device.read()
    assert [allocation.name for allocation in state.allocations] == ["weights", "kv_cache", "activations"]
    assert state.used_bytes / state.total_bytes == pytest.approx(CARD.vllm.gpu_memory_utilization, rel=0.01)


def test_second_replica_does_not_fit(served: Replica, device: Device) -> None:
    """Another replica on the same device fails as vLLM does, and takes nothing."""
    before = device.read().used_bytes
    with pytest.raises(OutOfDeviceMemory, match="less than desired GPU memory utilization"):
        Replica("tiny", CARD, device)
    assert device.read().used_bytes == before


def test_utilisation_is_reported(served: Replica, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode shows as a busy device with its memory interface more active than its tensor cores."""
    monkeypatch.setattr(replica, "REPORT_PERIOD_S", 0.1)
    report = Device.report

    async def scenario() -> None:
        reported = asyncio.Event()

        def told(self: Device, *shares: float) -> None:
            report(self, *shares)
            if any(shares):
                reported.set()

        monkeypatch.setattr(Device, "report", told)
        async with asyncio.timeout(10):
            tasks = [asyncio.create_task(served.run()), asyncio.create_task(served.report())]
            asking = asyncio.create_task(receive(served, 100))
            await reported.wait()
            seen = device.read().utilisation
            await asking
            for task in tasks:
                task.cancel()
            assert seen
            assert 0 < seen.tensor_active < seen.dram_active <= seen.busy <= 1

    asyncio.run(scenario())
