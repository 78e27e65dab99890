"""`make bench`: ours beside the peers, on the timed server; runs, ratios and the eleven goals, printed and kept.

The server has one core and the client the other; ours and a peer take turns, so that both meet the same machine.
A section that fails is reported and the rest goes on. Nothing is estimated: what did not run says so.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import faults, goals, tables
from benchmarks.machine import SERVER_CORE, have_two_cores
from benchmarks.ours import Ours
from benchmarks.peers import PEERS, ROOT, TOKENIZER, why_absent
from benchmarks.server import TimedServer, Timing
from benchmarks.trial import Client, FailedError, Load, Trial, run

FOLDER = ROOT / ".cache" / "bench"
RESULTS = ROOT / "benchmarks" / "results"

Disturbance = Callable[[int], AbstractContextManager[None]]


@dataclass
class Bench:
    """One run of the bench: how long and how often, and what was measured so far."""

    rounds: int
    seconds: float
    at_realtime: bool
    results: goals.Results = field(default_factory=goals.Results)
    played: int = 0

    def play(
        self, section: str, client: Client, load: Load, server: TimedServer, disturb: Disturbance | None = None
    ) -> Trial | None:
        """Measure one run and keep it under its section; None, and a line on stderr, when the client failed."""
        self.played += 1
        name = disturb.__name__ if disturb else client.name.replace(" ", "_")
        _say(f"{section}: {client.name}{f', {name}' if disturb else ''}, {load.rate_per_s:g}/s for {load.seconds:g} s")
        try:
            trial = run(
                client, load, server, FOLDER / f"{self.played:03}.{name}", at_realtime=self.at_realtime, disturb=disturb
            )
        except FailedError as failure:
            _say(f"  {failure}")
            self.results.absent[client.name] = str(failure)
            return None
        self.results.trials.setdefault(section, []).append(trial)
        return trial

    def cost(self) -> None:
        """Each peer just after ours, at a rate that all of them can play."""
        with _server(Timing()) as server:
            for turn in range(self.rounds):
                for number, peer in enumerate(PEERS):
                    load = Load(50, self.seconds, seed=1 + turn + 10 * number)  # goal 7 pools them: none serves twice
                    if reason := why_absent(peer.name):
                        self.results.absent[peer.name] = reason
                        continue
                    self.play("cost", Ours(), load, server)
                    self.play("cost", peer, load, server)

    def send(self) -> None:
        with _server(Timing()) as server:
            for turn in range(self.rounds):
                self.play("send", Ours(), Load(600, self.seconds, seed=1 + turn), server)

    def timing(self) -> None:
        with _server(Timing()) as server:
            for turn in range(self.rounds):
                self.play("timing", Ours(), Load(300, self.seconds, seed=1 + turn), server)

    def ceiling(self) -> None:
        with _server(Timing()) as server:
            for turn in range(self.rounds):
                self.play("ceiling", Ours(), Load(1000, self.seconds, seed=1 + turn), server)
                self.play("ceiling", Ours(), Load(6000, self.seconds / 2, streamed=False, seed=1 + turn), server)

    def stall(self) -> None:
        seconds = max(12.0, 2 * self.seconds)
        for turn in range(self.rounds):
            with _server(Timing(stall_at_s=0.4 * seconds)) as server:
                self.play("stall", Ours(), Load(100, seconds, streamed=False, seed=1 + turn), server)

    def workers(self) -> None:
        with _server(Timing()) as server:
            for turn in range(self.rounds):
                for client in (Ours(), Ours(workers=2)):
                    self.play("workers", client, Load(400, self.seconds, seed=1 + turn), server)

    def faults(self) -> None:
        with _server(Timing()) as server:
            for turn in range(self.rounds):
                load = Load(100, self.seconds, seed=1 + turn)
                self.play("faults", Ours(), load, server, faults.blocked_loop)
                self.play("faults", Ours(), load, server, faults.hog)
                self.play("faults", Ours(workers=2), Load(600, self.seconds, seed=1 + turn), server)

    def storage(self) -> None:
        for _ in range(self.rounds):
            _say("storage: a million observations")
            command = [sys.executable, "-m", "benchmarks.storage"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=300)
            self.results.storage.append(json.loads(done.stdout))


SECTIONS = ("cost", "send", "timing", "ceiling", "stall", "workers", "faults", "storage")


def main() -> int:
    asked = _arguments()
    if not have_two_cores():
        _say("this machine lends fewer than two cores: server and client would share one, and no figure would hold")
        return 2
    if not (TOKENIZER / "tokenizer.json").exists():
        _say(f"no tokenizer in {TOKENIZER.relative_to(ROOT)}: run `make setup` first")
        return 2
    os.chdir(ROOT)
    os.sched_setaffinity(0, {SERVER_CORE})
    shutil.rmtree(FOLDER, ignore_errors=True)
    bench = Bench(1 if asked.quick else 3, 8.0 if asked.quick else 12.0, asked.realtime)
    begun = datetime.now(UTC)
    for section in asked.only or SECTIONS:
        getattr(bench, section)()
    judged = goals.judged(bench.results)
    print(f"# Benchmarks, {begun:%Y-%m-%d %H:%M} UTC: {bench.rounds} round(s) of {bench.seconds:g} s\n")
    print(tables.runs(bench.results))
    print(tables.ratios(bench.results, [peer.name for peer in PEERS]))
    print(tables.goals(judged))
    print(f"Results: {_save(begun, bench, judged).relative_to(ROOT)}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of each section: under six minutes")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--realtime", action="store_true", help="run server and client under SCHED_FIFO (needs root)")
    return parser.parse_args()


def _server(timing: Timing) -> TimedServer:
    return TimedServer(timing, core=SERVER_CORE, life_s=3600)


def _save(begun: datetime, bench: Bench, judged: list[goals.Goal]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{begun:%Y%m%dT%H%M%SZ}.json"
    value = {
        "begun": begun.isoformat(),
        "rounds": bench.rounds,
        "seconds": bench.seconds,
        "realtime": bench.at_realtime,
        "cores": os.cpu_count(),
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "trials": {section: [t.summary() for t in trials] for section, trials in bench.results.trials.items()},
        "absent": bench.results.absent,
        "storage": bench.results.storage,
        "goals": [asdict(goal) for goal in judged],
    }
    path.write_text(json.dumps(value, indent=1) + "\n")
    return path


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
