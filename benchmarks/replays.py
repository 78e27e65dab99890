"""How true a replay is to its captured times: `harness run` with a recording, against the timed server.

    python -m benchmarks.replays [--minutes 10]

The recording is made up: Poisson arrivals of streamed chat requests on keep-alive connections. It is played at x1 for
so many minutes, and at x2 and x0.5 for a fifth of them. The errors are told by the server's clock, the kernel's stamps
of what arrived, against the moments in the recording; only the send lag is what the harness says of itself.
"""

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import yaml

from benchmarks.goals import INCONCLUSIVE, MET, NOISE_LIMIT, NOT_MET, Goal
from benchmarks.machine import SERVER_CORE, have_two_cores
from benchmarks.ours import Ours, target
from benchmarks.peers import ROOT
from benchmarks.server import TimedServer, Timing
from benchmarks.tables import table
from benchmarks.trial import FailedError, Load, Trial, run, spread
from harness.model import Finish
from harness.traffic import recording
from harness.traffic.recording import Answered, Recorded, RecordingHeader

FOLDER = ROOT / ".cache" / "bench" / "replays"
RESULTS = ROOT / "benchmarks" / "results"
RATE_PER_S = 20.0
SPEEDS = {1.0: 1.0, 2.0: 0.2, 0.5: 0.2}  # and the share of the minutes that each is played for
CONNECTIONS = 40
GAP_ERROR_LIMIT_S, DRIFT_LIMIT = 0.005, 0.001

_BODY = b'{"model":"sim","messages":[{"role":"user","content":"hello"}],"max_tokens":32,"stream":true}'
_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: prod.example\r\nX-Request-Id: %d\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def moments_s(load: Load, speed: float) -> np.ndarray:
    """When each request of the recording was captured, from its first: at `speed` it is played as the load says."""
    rng = random.Random(load.seed)
    last_s = load.seconds * speed
    found = np.array([0.0, *sorted(rng.uniform(0, last_s) for _ in range(load.requests - 1))])
    return np.round(found, 6)


def write(path: Path, at_s: Sequence[float] | np.ndarray, timing: Timing) -> None:
    """The recording of these moments, each request answered as the timed server answers."""
    last_s = timing.ttft_s + timing.itl_s * (timing.chunks - 1)
    answer = Answered(
        status=200,
        first_byte_s=timing.ttft_s,
        first_token_s=timing.ttft_s,
        last_token_s=last_s,
        ended_s=last_s,
        gaps_s=(timing.itl_s,) * (timing.chunks - 1),
        tokens_in=5,
        tokens_out=timing.chunks,
        finish=Finish.LENGTH,
        whole=True,
    )
    header = RecordingHeader(("made up",), len(at_s), min(CONNECTIONS, len(at_s)), float(at_s[-1]))

    def recorded() -> Iterator[Recorded]:
        for index, moment_s in enumerate(at_s):
            raw = _HEAD % (index, len(_BODY)) + _BODY
            turn, connection = divmod(index, CONNECTIONS)
            yield Recorded(float(moment_s), connection, turn, "POST", "/v1/chat/completions", raw, answer, stream=True)

    recording.write(path, header, recorded())


def scenario(speed: float) -> str:
    return yaml.safe_dump(
        {
            "claim": "Captured requests are sent at their captured times.",
            "traffic": {"replay": "recording.jsonl", "speed": f"{speed:g}x"},
            "gates": [{"same_answers": {"accepted_then_rejected": 0}}],
        },
        sort_keys=False,
    )


class Replayed(Ours):
    """`harness run` of a recording that is played at a speed; the load says how the server is to see it."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.speed = speed
        self.name = f"harness, replay x{speed:g}"

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        write(folder / "recording.jsonl", moments_s(load, self.speed), Timing())
        (folder / "scenario.yaml").write_text(scenario(self.speed))
        (folder / "target.yaml").write_text(target(url))
        return [str(ROOT / ".venv" / "bin" / "harness"), "run", "scenario.yaml", "--target", "target.yaml"]


@dataclass(frozen=True)
class Punctuality:
    """The error of each gap between arrivals (all but the first), in seconds; and how far they drifted in all, as a
    share of the time that they took: the median of the last tenth against that of the first."""

    gap_error_s: np.ndarray
    drift: float


def punctuality(truth: np.ndarray, at_s: np.ndarray, speed: float) -> Punctuality:
    """What the server's log says of a replay. Raises FailedError unless every request arrived once."""
    order = np.argsort(truth["id"].astype(int))
    if not np.array_equal(truth["id"][order].astype(int), np.arange(len(at_s))):
        raise FailedError(f"{len(truth)} requests arrived, and {len(at_s)} were recorded")
    due_s = at_s / speed
    late_s = truth["read_s"][order] - due_s
    tenth = max(1, len(late_s) // 10)
    drift_s = np.median(late_s[-tenth:]) - np.median(late_s[:tenth])
    return Punctuality(np.abs(np.diff(late_s)), float(abs(drift_s) / (due_s[-1] - due_s[0])))


@dataclass(frozen=True)
class Played:
    """One replay, measured. `others_share` is the time that strangers and the hypervisor took of the two cores."""

    speed: float
    seconds: float
    requests: int
    send_lag_s: list[float] | None
    gap_error_s: list[float] | None
    drift: float
    others_share: float

    @classmethod
    def of(cls, trial: Trial, speed: float) -> "Played":
        seen = punctuality(trial.truth, moments_s(trial.load, speed), speed)
        others_share = trial.usage.noise_s / trial.usage.wall_s
        lag_s, gap_s = spread(trial.send_lag_s), spread(seen.gap_error_s)
        return cls(speed, trial.load.seconds, len(trial.truth), lag_s, gap_s, seen.drift, others_share)

    def goals(self) -> list[tuple[str, str, bool]]:
        """What is promised, what was measured, and whether it holds."""
        gap_s = self.gap_error_s[1] if self.gap_error_s else float("nan")
        name = f"x{self.speed:g}, {self.seconds / 60:.3g} min"
        return [
            (f"{name}: p99 inter-arrival error < 5 ms", f"{1e3 * gap_s:.2f} ms", gap_s < GAP_ERROR_LIMIT_S),
            (f"{name}: total drift < 0.1 %", f"{100 * self.drift:.5f} %", self.drift < DRIFT_LIMIT),
        ]


def measured(minutes: float) -> list[Played]:
    """A replay at each speed, one after another. Raises FailedError when one is not played to its end."""
    played = []
    with TimedServer(core=SERVER_CORE, life_s=240 * minutes + 600) as server:
        for speed, share in SPEEDS.items():
            load = Load(RATE_PER_S, 60 * minutes * share)
            print(f"replay x{speed:g} for {load.seconds:g} s", file=sys.stderr, flush=True)
            played.append(Played.of(run(Replayed(speed), load, server, FOLDER / f"x{speed:g}"), speed))
    return played


def judged(played: Sequence[Played]) -> list[Goal]:
    goals = []
    for one in played:
        missed = INCONCLUSIVE if one.others_share > NOISE_LIMIT else NOT_MET
        for text, measured, holds in one.goals():
            goals.append(Goal(len(goals) + 1, text, measured, MET if holds else missed))
    return goals


def told(played: Sequence[Played], goals: Sequence[Goal]) -> str:
    """Everything as Markdown: a row for each replay, times in milliseconds as P50 / P99 / max; the goals."""
    rows = [
        (
            f"x{one.speed:g}",
            f"{one.seconds:g}",
            str(one.requests),
            _ms(one.send_lag_s),
            _ms(one.gap_error_s),
            f"{100 * one.drift:.5f} %",
            f"{100 * one.others_share:.1f} %",
        )
        for one in played
    ]
    head = ("speed", "seconds", "requests", "send lag ms", "inter-arrival error ms", "drift", "others' time")
    verdicts = [(str(goal.number), goal.text, goal.measured, f"**{goal.outcome}**") for goal in goals]
    return table(head, rows) + "\n" + table(("#", "goal", "measured", ""), verdicts)


def _ms(figures_s: list[float] | None) -> str:
    return " / ".join(f"{1e3 * value:.2f}" for value in figures_s or ())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replays", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long it is played at x1")
    asked = parser.parse_args()
    if not have_two_cores():
        print("server and client need a core each", file=sys.stderr)
        return 2
    os.chdir(ROOT)
    os.sched_setaffinity(0, {SERVER_CORE})
    shutil.rmtree(FOLDER, ignore_errors=True)
    begun = datetime.now(UTC)
    try:
        played = measured(asked.minutes)
    except FailedError as failure:
        print(failure, file=sys.stderr)
        return 1
    goals = judged(played)
    print(f"# Replays, {begun:%Y-%m-%d %H:%M} UTC: load {os.getloadavg()[2]:.1f}\n")
    print(told(played, goals))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"replays-{begun:%Y%m%dT%H%M%SZ}.json"
    value = {"begun": begun.isoformat(), "played": [asdict(one) for one in played]}
    path.write_text(json.dumps(value | {"goals": [asdict(goal) for goal in goals]}, indent=1) + "\n")
    print(f"Results: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
