"""What open loop means, shown on one engine without a gateway: a freeze is seen, and workers share one plan."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from running import HARNESS, harness, origin_is_set, process, run_dir_of, url_target

from harness import timeline
from harness.log import read_run_json
from harness.model import Outcome
from tests.support.waiting import until

SHORT = """
claim: Short prompts at a steady rate.
seed: 11
traffic:
  arrivals: {{poisson: {{rate: {rate}/s}}}}
  warm_up: 2s
  for: {seconds}s
  prompts:
    mix:
      short: {{share: 100%, tokens: 16..64}}
    answer_tokens: {{mean: 4, at_most: 8}}
    streamed: 50%
gates:
  - p99_latency: {{below: 20s}}
"""


def scenario(work: Path, rate: int, seconds: int) -> Path:
    path = work / "short.yaml"
    path.write_text(SHORT.format(rate=rate, seconds=seconds))
    return path


CLOSED_LOOP = """
import json, sys
from locust import FastHttpUser, constant, events, task
class Closed(FastHttpUser):
    wait_time = constant(0)
    @task
    def ask(self):
        self.client.post("/v1/completions", json={"model": "tiny", "prompt": "a word", "max_tokens": 4})
@events.quitting.add_listener
def tell(environment, **kw):
    total = environment.stats.total
    print("CLOSED " + json.dumps({"n": total.num_requests, "p99_s": total.get_response_time_percentile(0.99) / 1000}))
"""


def test_a_freeze_of_two_seconds_is_seen_by_open_loop_only(tmp_path: Path, engine: tuple[str, int]) -> None:
    """SIGSTOP for 2 s at 50/s: our P99 shows it and loses no request; a closed loop beside it does not see it."""
    url, pid = engine
    run = ["run", str(scenario(tmp_path, 50, 20)), "--target", str(url_target(tmp_path, url))]
    (tmp_path / "closed.py").write_text(CLOSED_LOOP)
    closed = [sys.executable, "-m", "locust", "-f", "closed.py", "--headless", "-u", "5", "-r", "5", "-t", "20s"]
    with process([HARNESS, *run], cwd=tmp_path) as ours:
        run_dir = tmp_path / "runs" / "latest"
        until(lambda: origin_is_set(run_dir), "the run began", 90)
        origin_s = float(read_run_json(run_dir)["origin_monotonic_s"])
        with process([*closed, "-H", url], cwd=tmp_path) as beside:
            until(lambda: time.monotonic() > origin_s + 10, "both loads are well under way", 30)
            began_s = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            try:
                until(lambda: time.monotonic() > began_s + 2, "two seconds have passed", 10)
            finally:
                os.kill(pid, signal.SIGCONT)
            frozen_s = time.monotonic() - began_s
            told, _ = beside.communicate(timeout=60)
        said, _ = ours.communicate(timeout=90)
    seen = timeline.read(run_dir)
    e2e_s = seen.observations["ended_s"] - seen.observations["due_s"]
    steady = seen.within(seen.windows["steady"])
    open_p99_s = float(np.quantile(e2e_s[steady], 0.99, method="inverted_cdf"))
    line = next(line for line in told.splitlines() if line.startswith("CLOSED "))
    closed_p99_s = float(line.split('"p99_s": ')[1].rstrip("}"))
    print(f"\nfrozen {frozen_s:.2f} s; open loop: n={steady.sum()} p99={open_p99_s:.3f} s; closed loop: {line[7:]}")
    assert seen.seen.all(), "every due request is accounted for"
    assert (seen.observations["outcome"] == Outcome.OK).all(), said
    assert open_p99_s > 0.7 * frozen_s
    assert closed_p99_s < open_p99_s / 4


@pytest.fixture
def dispersion() -> object:
    def of(moments_s: np.ndarray, width_s: float = 0.25) -> float:
        counts = np.bincount((moments_s / width_s).astype(int))[1:-1]
        return float(counts.var() / counts.mean())

    return of


def test_one_plan_for_any_number_of_workers(tmp_path: Path, engine: tuple[str, int], dispersion: object) -> None:
    """Same seed with 1, 2 and 4 workers: one plan hash, every request once, and the plan's own arrivals at the wire."""
    path, target = scenario(tmp_path, 60, 30), url_target(tmp_path, engine[0])
    hashes, spread = set(), {}
    for workers in (1, 2, 4):
        done = harness("run", str(path), "--target", str(target), "--workers", str(workers), cwd=tmp_path)
        seen = timeline.read(run_dir_of(done.stdout, tmp_path))
        hashes.add(seen.run["plan_sha256"])
        assert seen.seen.all()
        assert len(np.unique(seen.observations["worker"])) == workers
        spread[workers] = dispersion(seen.observations["sent_s"])  # type: ignore[operator]
        planned = dispersion(seen.due_s)  # type: ignore[operator]
        assert 0.8 <= planned <= 1.2
        assert abs(spread[workers] - planned) < 0.15
    print(f"\nindex of dispersion at 250 ms, planned {planned:.3f}, at the wire by workers: {spread}")
    assert len(hashes) == 1
    assert all(0.8 <= value <= 1.2 for value in spread.values()), spread


def test_a_plan_alone_has_the_hash_of_the_plan_that_is_run(tmp_path: Path, engine: tuple[str, int]) -> None:
    """`harness plan` writes the very plan that `harness run` plays."""
    path, target = scenario(tmp_path, 20, 2), url_target(tmp_path, engine[0])
    said = harness("plan", str(path), "-o", str(tmp_path / "plan.jsonl"), "--target", str(target), cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    harness("run", str(path), "--target", str(target), cwd=tmp_path)
    assert (tmp_path / "runs/latest/plan.jsonl").read_bytes() == (tmp_path / "plan.jsonl").read_bytes()
    assert said.stdout.split()[0] == timeline.read(tmp_path / "runs" / "latest").run["plan_sha256"]


@pytest.mark.parametrize(("rate", "event", "lasts_s"), [(8, "extended", 12.0), (40, "decided", 6.0)])
def test_thin_evidence_is_extended(
    tmp_path: Path, engine: tuple[str, int], rate: int, event: str, lasts_s: float
) -> None:
    """Under `on_inconclusive: extend` a run goes on only when its steady state proved too little; then it decides."""
    path = scenario(tmp_path, rate, 6)
    path.write_text(path.read_text().replace("p99_latency", "p95_latency") + "on_inconclusive: extend\n")
    done = harness("run", str(path), "--target", str(url_target(tmp_path, engine[0])), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "runs" / "latest"
    seen = timeline.read(run_dir)
    assert [each.kind for each in seen.events if each.kind in ("extended", "decided")] == [event]
    steady = seen.windows["steady"]
    assert steady.end_s - steady.start_s == lasts_s
    assert seen.seen.all()
    assert harness("verify", str(run_dir)).returncode == 0
