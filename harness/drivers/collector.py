"""Takes requests that are over and writes them down, between due times and never in their way.

`take` is called in the event loop and only appends. `work` runs in a greenlet: it reads one answer at a time, when the
schedule leaves room for it, and lets the sockets have their turn before a millisecond is over.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.drivers.connection import Exchange
from harness.drivers.health import Health
from harness.drivers.stream import observe, read_answer
from harness.drivers.timer import Slices
from harness.log import Log, ObservationLog
from harness.model import Event, Observation, Outcome, Reading, Request

BACKLOG = 10_000  # answers that wait to be read: some 150 MB of streams
FIRST_GAP_S = 0.004  # what the gap between tokens is taken to be until an answer has shown it
FORGOTTEN = 0.01  # of the fastest stream, with each that is slower
ANSWER_COST_S, PIECE_COST_S = 50e-6, 10e-6  # of reading an answer
SAMPLES = 5  # of each outcome and status: enough to see what went wrong, few enough to read
SAMPLE_BYTES = 300
SHAPES = 200  # told in full: a server whose answers have ids for names could go on for ever
_AS_PLANNED = (Outcome.OK, Outcome.REJECTED_AS_EXPECTED, Outcome.CANCELLED_BY_US, Outcome.OPEN)


class Collector:
    """Writes worker `worker`'s logs in the run directory. `seen`, if any, is told of every observation.

    `gap_s` is how far apart the tokens of the fastest stream of late came, on average.
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
        self._shapes = {0}  # that were told, and that of an answer without any
        self._health = Health()
        self._origin_s, self.gap_s = 0.0, FIRST_GAP_S
        self.take = self._over.append

    def begin(self, origin_s: float) -> None:
        self._origin_s, self._health = origin_s, Health()

    def work(self, slices: Slices, limit_s: float) -> None:
        """Read and write what is over, for `limit_s` at most while traffic flows: the rest waits for a quieter time.

        A backlog past its bound is worked off whatever it costs: the player is then too busy, and its lags say so.
        """
        end_s = time.monotonic() + limit_s
        while self._over and (time.monotonic() < end_s or len(self._over) > BACKLOG):
            slices.cut(ANSWER_COST_S + PIECE_COST_S * len(self._over[0].reply.pieces))
            self._write(self._over.popleft())

    def _write(self, exchange: Exchange) -> None:
        request, reply = exchange.request, exchange.reply
        observation = observe(request, reply, self._origin_s, self._worker)
        self._observations.append(observation)
        if gaps := len(observation.gaps_s):
            gap_s = (observation.last_token_s - observation.first_token_s) / gaps
            self.gap_s = min(gap_s, self.gap_s * (1 + FORGOTTEN))
        if self._seen is not None:
            self._seen(request, observation, sum(len(piece) for _, piece in reply.pieces))
        if observation.shape not in self._shapes and len(self._shapes) <= SHAPES:
            self._tell_shape(exchange, observation.shape)
        kind = (observation.outcome, observation.status)
        if observation.outcome not in _AS_PLANNED and self._samples[kind] < SAMPLES:
            self._samples[kind] += 1
            body = b"".join(piece for _, piece in reply.pieces)[:SAMPLE_BYTES]
            detail = {"index": request.index, "status": observation.status, "body": body.decode(errors="replace")}
            self.log.event(Event(self._now_s(), "error_sample", observation.outcome.name.lower(), detail))

    def _tell_shape(self, exchange: Exchange, shape: int) -> None:
        """What a checksum of members stands for, the first time that it is met."""
        self._shapes.add(shape)
        members = read_answer(exchange.request, exchange.reply).shape or ()
        self.log.event(Event(self._now_s(), "shape", str(shape), {"members": sorted(members)}))

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
