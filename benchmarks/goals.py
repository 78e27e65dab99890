"""The eleven goals of the load generator, each a function of what was measured.

A goal is met or not met; one that was missed while others took the machine is inconclusive, never not met (a client
that is kept waiting is late, and reads several events at once, which makes it look cheap); one whose measurement did
not run says so. Nothing here measures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from benchmarks.arrivals import KS_LIMIT, regularity
from benchmarks.ours import FLAGGED, run_of
from benchmarks.trial import Trial, spread

MET, NOT_MET, INCONCLUSIVE, NOT_RUN = "met", "not met", "inconclusive", "not run"
NOISE_LIMIT = 0.005  # steal and strangers' CPU as a share of the span: above it, one request in a hundred can be theirs
CLEAN_RUNS = 20
TTFT_MOVED = 0.05


@dataclass
class Results:
    """All that was measured: trials by section, in the order they were played; why a peer is absent."""

    trials: dict[str, list[Trial]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    storage: list[dict[str, float]] = field(default_factory=list)

    def of(self, section: str, client: str = "harness") -> list[Trial]:
        return [trial for trial in self.trials.get(section, ()) if trial.client == client]

    def ratios(self, peer: str) -> list[float]:
        """CPU of each run of a peer over that of our run just before it."""
        played = self.trials.get("cost", [])
        return [
            b.cpu_s_per_1000 / a.cpu_s_per_1000
            for a, b in pairwise(played)
            if a.client == "harness" and b.client == peer
        ]


@dataclass(frozen=True)
class Goal:
    number: int
    text: str
    measured: str
    outcome: str


def noisy(trials: Sequence[Trial]) -> bool:
    """Whether the hypervisor or strangers took enough time to explain a late percentile."""
    return any(trial.usage.noise_s > NOISE_LIMIT * trial.usage.wall_s for trial in trials)


def judged(results: Results) -> list[Goal]:
    """All goals, in their order."""
    goals = []
    for number, (text, judge) in enumerate(GOALS, start=1):
        measured, outcome = judge(results)
        goals.append(Goal(number, text, measured, outcome))
    return goals


Judged = tuple[str, str]


def _cheaper_than_peers(results: Results) -> Judged:
    return _ratios(results, {"inference-perf": 3, "aiperf": 4, "guidellm": 4})


def _cheaper_than_locust(results: Results) -> Judged:
    return _ratios(results, {"locust FastHttpUser": 2})


def _ratios(results: Results, least: dict[str, float]) -> Judged:
    found = {peer: results.ratios(peer) for peer in least}
    said = [
        f"1/{median(ratios):.1f} of {peer}"
        if (ratios := found[peer])
        else f"{peer}: {results.absent.get(peer, NOT_RUN)}"
        for peer in least
    ]
    if any(ratios and median(ratios) < least[peer] for peer, ratios in found.items()):
        outcome = _missed(results.trials["cost"])
    else:
        outcome = MET if all(found.values()) else NOT_RUN
    return "; ".join(said), outcome


def _sends_on_time(results: Results) -> Judged:
    ours = results.of("send")
    if not ours:
        return "", NOT_RUN
    _, p99, worst = (median(column) for column in zip(*(_spread(t.send_lag_s) for t in ours), strict=True))
    said = f"p99 {_ms(p99)}, max {_ms(worst)}"
    pairs = [
        _spread(a.send_lag_s)[1] / _spread(b.send_lag_s)[1]
        for a, b in pairwise(results.trials.get("cost", []))
        if a.client == "harness" and b.client == "aiperf" and len(b.send_lag_s)
    ]
    said += (
        f"; 1/{1 / median(pairs):.0f} of aiperf's" if pairs else f"; aiperf: {results.absent.get('aiperf', NOT_RUN)}"
    )
    on_time = p99 <= 1e-3 and worst <= 5e-3
    if on_time and not pairs:
        return said, NOT_RUN
    return said, _judged(on_time and (not pairs or median(pairs) <= 0.1), [*ours, *results.of("cost")])


def _times_truly(results: Results) -> Judged:
    ours = results.of("timing")
    if not ours:
        return "", NOT_RUN
    figures = {
        name: [median(column) for column in zip(*(_spread(getattr(t, key)) for t in ours), strict=True)]
        for name, key in (("TTFT", "ttft_error_s"), ("E2E", "e2e_error_s"))
    }
    said = "; ".join(f"{name} p50 {_ms(p50)}, p99 {_ms(p99)}" for name, (p50, p99, _) in figures.items())
    good = all(p50 <= 0.1e-3 and p99 <= 1e-3 for p50, p99, _ in figures.values())
    return said, _judged(good, ours)


def _keeps_up(results: Results) -> Judged:
    ours = results.of("ceiling")
    if len({trial.load.streamed for trial in ours}) < 2:
        return "", NOT_RUN
    said, good = [], True
    for streamed in (True, False):
        runs = [trial for trial in ours if trial.load.streamed is streamed]
        p99 = median(_spread(trial.send_lag_s)[1] for trial in runs)
        share = median(trial.achieved_per_s / trial.load.rate_per_s for trial in runs)
        busy = median(trial.usage.cpu_s / trial.usage.wall_s for trial in runs)
        good &= p99 <= 1e-3 and share >= 0.97
        kind = "streamed" if streamed else "plain"
        said.append(f"{runs[0].load.rate_per_s * share:.0f} {kind}/s at {busy:.2f} core, p99 {_ms(p99)}")
    return "; ".join(said), _judged(good, ours)


def _sees_the_stall(results: Results) -> Judged:
    ours = results.of("stall")
    if not ours:
        return "", NOT_RUN
    errors, seen = [], []
    for trial in ours:
        run = run_of(trial.folder)
        rows = run.observations[run.seen]
        reported = rows["ended_s"] - rows["due_s"]
        due = dict(zip(rows["index"].astype("U").tolist(), rows["due_s"].tolist(), strict=True))
        origin = float(run.run["origin_monotonic_s"])
        true = np.array([row["last_s"] - origin - due[row["id"]] for row in trial.truth])
        got, want = (np.percentile(v, [95, 99], method="inverted_cdf") for v in (reported, true))
        errors.append(float(np.abs(got / want - 1).max()))
        seen.append(got)
    p95, p99 = np.median(seen, axis=0)
    return f"P95 {p95:.3f} s, P99 {p99:.3f} s, off by {100 * median(errors):.2f} %", _judged(
        median(errors) <= 0.01, ours
    )


def _arrives_as_poisson(results: Results) -> Judged:
    """Of the runs that are to look Poisson at the scale of their gaps: at hundreds a second and one worker, what the
    gaps show is how long a send takes, which goal 3 judges."""
    pools = {
        "one worker": results.of("cost"),
        "two workers": [trial for trial in results.trials.get("workers", ()) if trial.client != "harness"],
    }
    said, outcome = [], MET
    for name, pool in pools.items():
        if not pool:
            said.append(f"{name}: {NOT_RUN}")
            outcome = NOT_RUN if outcome == MET else outcome
            continue
        streams = [(trial.arrivals_s, trial.load.rate_per_s) for trial in pool]
        together, ks = regularity(streams), median(regularity([stream]).ks for stream in streams)
        said.append(
            f"{name}: KS x sqrt(n) {ks:.2f} (median of {len(pool)} runs), "
            f"dispersion {together.dispersion:.2f} +- {together.doubt:.2f}"
        )
        if ks >= KS_LIMIT or together.off_dispersion > 2:
            outcome = _missed(pool)
        elif together.off_dispersion and outcome != NOT_MET:
            outcome = INCONCLUSIVE
    return "; ".join(said), outcome


def _notices_faults(results: Results) -> Judged:
    """A flag is false when TTFT held and no stranger disturbed the run; a run without a flag is clean whoever did."""
    every = [trial for trials in results.trials.values() for trial in trials if trial.client.startswith("harness")]
    sound = [trial for trial in every if _undisturbed(trial)]
    moved = [trial for trial in every if not _undisturbed(trial) and _ttft_moved(trial)]
    if not results.trials.get("faults"):
        return "", NOT_RUN
    caught = sum(trial.exit_code == FLAGGED for trial in moved)
    flagged = [trial for trial in sound if trial.exit_code == FLAGGED]
    false = sum(not noisy([trial]) and not _ttft_moved(trial) for trial in flagged)
    excused = len(flagged) - false
    clean = len(sound) - excused
    said = f"{caught} of {len(moved)} faults that moved TTFT flagged; {false} flags in {clean} clean runs"
    if excused:
        said += f" ({excused} more flagged under noise or with TTFT moved)"
    if caught < len(moved) or false:
        return said, NOT_MET
    return said, MET if clean >= CLEAN_RUNS and moved else INCONCLUSIVE


def _undisturbed(trial: Trial) -> bool:
    """Whether nothing was done to a run of ours on purpose. Two workers on the client's one core are a fault."""
    return trial.client == "harness" and not trial.disturbed


def _ttft_moved(trial: Trial) -> bool:
    """Whether P99 of TTFT, as users would feel it from due, is off by more than 5 % of the truth."""
    truth, claims = trial.matched
    felt = claims["sent_s"] - claims["due_s"] + claims["ttft_s"]
    true = float(np.percentile(truth["first_s"] - truth["read_s"], 99))
    return bool(abs(float(np.percentile(felt, 99)) / true - 1) > TTFT_MOVED)


def _repairs_a_blocked_loop(results: Results) -> Judged:
    blocked = [
        trial for trial in results.trials.get("faults", []) if trial.disturbed and "blocked" in trial.folder.name
    ]
    if not blocked:
        return "", NOT_RUN
    p99 = median(_spread(trial.e2e_error_s)[1] for trial in blocked)
    return f"E2E error p99 {_ms(p99)}", _judged(p99 <= 1e-3, blocked)


def _stores_cheaply(results: Results) -> Judged:
    if not results.storage:
        return "", NOT_RUN
    cost = {name: median(each[name] for each in results.storage) for name in results.storage[0]}
    said = (
        f"{cost['rss_growth_mb']:.0f} MB, {cost['cpu_us_per_sample']:.1f} us a sample, "
        f"percentiles off by {100 * cost['percentile_error']:.3f} % ({cost['samples']:.0f} samples)"
    )
    good = cost["rss_growth_mb"] <= 50 and cost["cpu_us_per_sample"] <= 5 and cost["percentile_error"] <= 0.001
    return said, MET if good else NOT_MET


def _shares_work_cheaply(results: Results) -> Judged:
    played = results.trials.get("workers", [])
    overheads = [
        b.cpu_s_per_1000 / a.cpu_s_per_1000 - 1
        for a, b in pairwise(played)
        if a.client == "harness" and b.client != "harness"
    ]
    if not overheads:
        return "", NOT_RUN
    return f"{100 * median(overheads):+.0f} % CPU with 2 workers", _judged(median(overheads) <= 0.20, played)


GOALS: tuple[tuple[str, Callable[[Results], Judged]], ...] = (
    ("CPU per streamed request <= 1/3 of inference-perf's, <= 1/4 of aiperf's and guidellm's", _cheaper_than_peers),
    ("CPU per streamed request <= 1/2 of FastHttpUser's", _cheaper_than_locust),
    ("send lag p99 <= 1 ms, max <= 5 ms at 600 streamed/s; p99 <= 1/10 of aiperf's", _sends_on_time),
    ("TTFT and E2E error p50 <= 0.1 ms, p99 <= 1 ms at 300/s", _times_truly),
    (">= 1000 streamed/s and >= 6000 plain/s on one core at send lag p99 <= 1 ms", _keeps_up),
    ("2 s stall: P95 and P99 within 1 % of schedule and server log", _sees_the_stall),
    ("arrivals: KS x sqrt(n) < 1.36, dispersion at 100 ms 0.8 to 1.2, union of workers too", _arrives_as_poisson),
    ("every fault that moves P99 TTFT > 5 % is flagged; no flag in 20 clean runs", _notices_faults),
    ("E2E error p99 <= 1 ms with the loop blocked 30 of 100 ms", _repairs_a_blocked_loop),
    ("1 M samples: <= 50 MB, <= 5 us CPU each, percentiles within 0.1 %", _stores_cheaply),
    ("2 workers cost <= 20 % more CPU per request than 1", _shares_work_cheaply),
)


def _judged(good: bool, trials: Sequence[Trial]) -> str:
    return MET if good else _missed(trials)


def _missed(trials: Sequence[Trial]) -> str:
    return INCONCLUSIVE if noisy(trials) else NOT_MET


def _spread(values: np.ndarray) -> list[float]:
    return spread(values) or [float("nan")] * 3


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
