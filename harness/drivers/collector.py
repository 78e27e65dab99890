"""Takes requests that are over and writes them down, between due times and never in their way.

`take` is called in the event loop and only appends. `work` runs in a greenlet: it reads one answer at a time, polls
the schedule after each, and lets the sockets have their turn before a millisecond is over.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.drivers.connection import Exchange
from harness.drivers.health import Health
from harness.drivers.stream import observe
from harness.drivers.timer import Slices
from harness.log import Log, ObservationLog
from harness.model import Event, Observation, Outcome, Reading, Request

BACKLOG = 10_000  # answers that wait to be read: some 150 MB of streams
SAMPLES = 5  # of each outcome and status: enough to see what went wrong, few enough to read
SAMPLE_BYTES = 300
_AS_PLANNED = (Outcome.OK, Outcome.REJECTED_AS_EXPECTED, Outcome.CANCELLED_BY_US, Outcome.OPEN)


class Collector:
    """Writes worker `worker`'s logs in the run directory. `seen`, if any, is told of every observation.

    Raises OSError from `work` and `measure` when the disk takes no more.
    """

    def __init__(
        self, run_dir: Path, worker: int, seen: Callable[[Request, Observation, int], None] | None = None
    ) -> None:
        self.log = Log(run_dir / f"log.player-{worker}.jsonl")
        self._observations = ObservationLog(run_dir / f"log.player-{worker}.bin")
        self._worker, self._seen = worker, seen
        self._over: deque[Exchange] = deque()
        self._samples: Counter[tuple[Outcome, int]] = Counter()
        self._health = Health()
        self._origin_s = 0.0
        self.take = self._over.append

    def begin(self, origin_s: float) -> None:
        self._origin_s, self._health = origin_s, Health()

    def work(self, poll: Callable[[], None], limit_s: float) -> None:
        """Read and write what is over, for `limit_s` at most while traffic flows: the rest waits for a quieter time.

        A backlog past its bound is worked off whatever it costs: the player is then too busy, and its lags say so.
        """
        slices, end_s = Slices(), time.monotonic() + limit_s
        while self._over and (time.monotonic() < end_s or len(self._over) > BACKLOG):
            self._write(self._over.popleft())
            poll()
            slices.cut()

    def _write(self, exchange: Exchange) -> None:
        request, reply = exchange.request, exchange.reply
        observation = observe(request, reply, self._origin_s, self._worker)
        self._observations.append(observation)
        if self._seen is not None:
            self._seen(request, observation, sum(len(piece) for _, piece in reply.pieces))
        kind = (observation.outcome, observation.status)
        if observation.outcome not in _AS_PLANNED and self._samples[kind] < SAMPLES:
            self._samples[kind] += 1
            body = b"".join(piece for _, piece in reply.pieces)[:SAMPLE_BYTES]
            detail = {"index": request.index, "status": observation.status, "body": body.decode(errors="replace")}
            self.log.event(Event(self._now_s(), "error_sample", observation.outcome.name.lower(), detail))

    def measure(self, gauges: Mapping[str, float]) -> None:
        """Once a second: what this worker says of itself, and the observations so far onto the disk."""
        at_s, labels = self._now_s(), {"worker": str(self._worker)}
        for name, value in {**self._health.shares(), **gauges}.items():
            self.log.reading(Reading(at_s, name, value, labels))
        self._observations.flush()

    def close(self) -> None:
        self._observations.close()
        self.log.close()

    def _now_s(self) -> float:
        return time.monotonic() - self._origin_s
