"""One simulated replica: the batching model run in real time on a simulated device.

Steps follow each other on an absolute schedule, so late wake-ups do not add up; after a real standstill (a stopped
process, a machine without time) the schedule starts afresh from now, and what was lost stays lost, as on a GPU.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from reference_stack.engine.answers import Answer
from reference_stack.engine.batching import Scheduler, Sequence, Step
from reference_stack.engine.metrics import Metrics
from reference_stack.gpu.device import Device, OutOfDeviceMemory
from reference_stack.profiles.memory import GIB
from reference_stack.profiles.profile import Profile

STANDSTILL_S = 0.25
REPORT_PERIOD_S = 0.5


class Replica:
    """Takes requests, computes their tokens in time, and keeps the device and the metrics informed."""

    def __init__(self, model: str, profile: Profile, device: Device) -> None:
        """A replica that has its memory: weights, KV cache and activations are allocated for the life of the process.

        Raises OutOfDeviceMemory when the device has less free than gpu_memory_utilization asks for.
        """
        self.profile = profile
        self.scheduler = Scheduler(profile)
        self.metrics = Metrics(model, self.scheduler)
        self._device = device
        self._tokens: dict[Sequence, asyncio.Semaphore] = {}
        self._work = asyncio.Event()
        self._kernels_s = self._tensor_s = self._dram_s = 0.0
        self._allocate()

    @contextmanager
    def admitted(self, prompt_tokens: int, answered: Answer, max_tokens: int) -> Iterator[asyncio.Semaphore]:
        """Serve a request inside a `with`: acquire the semaphore once for each token of the answer.

        Leaving early, for whatever reason, aborts the request at once.
        """
        loop = asyncio.get_running_loop()
        sequence = Sequence(prompt_tokens, len(answered.pieces), loop.time())
        self._tokens[sequence] = asyncio.Semaphore(0)
        self.scheduler.add(sequence)
        self._work.set()
        try:
            yield self._tokens[sequence]
            self.metrics.finished(sequence, answered.finish_reason, max_tokens)
        finally:
            self.scheduler.abort(sequence)
            del self._tokens[sequence]

    async def run(self) -> None:
        """Compute steps as long as the process lives."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            step = self.scheduler.step(due_s)
            if step is None:
                self._work.clear()
                await self._work.wait()
                due_s = loop.time()
                continue
            await asyncio.sleep(step.ended_s - loop.time())
            self._deliver(step)
            late_s = loop.time() - step.ended_s
            due_s = step.ended_s if late_s < STANDSTILL_S else loop.time()

    async def report(self) -> None:
        """Tell the device how busy it is, as long as the process lives."""
        loop = asyncio.get_running_loop()
        last_s, idle = loop.time(), False
        while True:
            await asyncio.sleep(REPORT_PERIOD_S)
            elapsed_s = loop.time() - last_s
            shares = [min(1.0, spent / elapsed_s) for spent in (self._kernels_s, self._tensor_s, self._dram_s)]
            self._kernels_s = self._tensor_s = self._dram_s = 0.0
            last_s += elapsed_s
            if any(shares) or not idle:
                self._device.report(*shares)
            idle = not any(shares)

    def _deliver(self, step: Step) -> None:
        """Hand out the tokens of a step that is over."""
        self.metrics.stepped(step)
        self._kernels_s += step.cost.kernels_s
        self._tensor_s += step.cost.tensor_s
        self._dram_s += step.cost.dram_s
        for sequence in step.sampled:
            if sequence in self._tokens:
                self._tokens[sequence].release()

    def _allocate(self) -> None:
        """Take the memory as vLLM does at start: all of it, or none with vLLM's complaint."""
        state, profile = self._device.read(), self.profile
        wanted = profile.budget_bytes
        if state.free_bytes < wanted:
            raise OutOfDeviceMemory(
                f"Free memory on device {self._device.uuid} ({state.free_bytes / GIB:.2f}/"
                f"{state.total_bytes / GIB:.2f} GiB) on startup is less than desired GPU memory utilization "
                f"({profile.vllm.gpu_memory_utilization}, {wanted / GIB:.2f} GiB)."
            )
        self._device.allocate("weights", profile.weights_bytes)
        self._device.allocate("kv_cache", profile.kv_pool_bytes)
        self._device.allocate("activations", profile.overhead_bytes)
