"""One worker's part of a run: from the files of a run directory to the start barrier, and on to the last answer.

Worker k of W plays the plan's requests i with i mod W == k, wherever it runs; those of a group g go together, to the
worker with g mod W == k.
"""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import gevent
import orjson

from harness import plan_file
from harness.drivers.collector import Collector
from harness.drivers.connection import Endpoint
from harness.drivers.player import Played, Player
from harness.log import read_run_json
from harness.model import Event, Observation, Request
from harness.targets import base
from harness.traffic.prompts import Composer

FILES = ("plan.jsonl", "corpus.bin", "target.yaml")  # all that a worker needs
BARRIER_POLL_S = 0.02
AUTOGROUP = Path("/proc/self/autogroup")  # Linux shares cores among sessions first, then inside each by niceness
NICE = -10  # a busy engine on this machine then delays no send; light work, so it takes little from the engine


class Part:
    """A player with its log, at niceness `nice`. `seen` is told of every observation.

    Raises UsageError when the target's host has no address, OSError on a missing file.
    """

    def __init__(
        self, run_dir: Path, worker: int, workers: int, seen: Callable[[Request, Observation, int], None] | None
    ) -> None:
        with open(run_dir / "plan.jsonl", "rb") as file:
            header = plan_file.read_header(file.readline())
            lines = [line for number, line in enumerate(file) if _dealt_by(number, line) % workers == worker]
        target = base.load(str(run_dir / "target.yaml"))
        corpus = (run_dir / "corpus.bin").read_bytes()
        exact = header.facts.get("exact_answers", True)
        replay = header.facts.get("replay", {})
        composer = Composer(
            corpus,
            target.model,
            target.host,
            target.sent_headers(os.environ),
            exact=exact,
            rewrite=replay.get("rewrite"),
        )
        self._collector = Collector(run_dir, worker, seen)
        endpoints = Endpoint.of(target.url)
        cap = share(replay.get("in_flight_cap"), worker, workers)
        self._player = Player(lines, composer.wire, endpoints, header.time_limit_s, self._collector, cap)
        self.stop = self._player.stop
        self.nice = self._hurry()

    def warm(self) -> None:
        """Open connections. From here on nothing old is looked at by the garbage collector, which pauses for 9 ms."""
        self._player.warm()
        gc.collect()
        gc.freeze()
        gc.disable()

    def _hurry(self) -> int:
        """Raise this process's priority where that is allowed; the niceness that it has then."""
        try:
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
            if AUTOGROUP.exists():
                AUTOGROUP.write_text(str(NICE))
        except OSError as error:
            why = f"a busy neighbour on this machine may delay the player, whose priority stays as it is: {error}"
            self.note(Event(0.0, "note", "priority", {"why": why}))
        return os.getpriority(os.PRIO_PROCESS, 0)

    def note(self, event: Event) -> None:
        self._collector.log.event(event)

    def play(self, origin_s: float) -> Played:
        played = self._player.play(origin_s)
        gc.enable()
        return played

    def close(self) -> None:
        self._collector.close()


def _dealt_by(number: int, line: bytes) -> int:
    """What says which worker plays a line of the plan: its group, or else its index."""
    group = orjson.loads(line).get("group") if b'"group":' in line else None
    return number if group is None else int(group)


def share(in_flight_cap: int | None, worker: int, workers: int) -> float:
    """What one worker may have in flight, of what all together may; one request at least."""
    return float("inf") if in_flight_cap is None else max(1, (in_flight_cap + workers - 1 - worker) // workers)


def origin(run_dir: Path, asked: Callable[[], bool]) -> float | None:
    """The start barrier: the run's origin on this machine's monotonic clock, or None when asked to stop before."""
    while not asked():
        origin_s = read_run_json(run_dir).get("origin_monotonic_s")
        if origin_s is not None:
            return float(origin_s)
        gevent.sleep(BARRIER_POLL_S)
    return None
