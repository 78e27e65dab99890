"""Lays out a run directory from a story: a few lines that say what requests met and what the machines said.

A story is what a case of tests/golden holds in `log.yaml`. Whatever it does not mention is healthy: a player that is
idle, on time and finished; a watcher that saw every GPU each second.

    window: [0, 100]            # the steady state, and the run
    requests:                   # groups, each spread evenly over `from` .. `to` (the window)
      - {n: 900, e2e: 0.81, class: short, send_lag: 0, ttft: 0.1, gaps: [0.02], outcome: OK, status: 200, ...}
      # one replayed says under `captured` what it met when it was captured, where that differs: captured: {e2e: 0.6}
    replay: {lost_share: 0}     # what the plan says of its recording; the captured answers are then laid out too
    gpus: {GPU-0: {used: 0.8, skip: [40, 50], nan_at: 30, empty: [60, 62]}}
    player: {cpu_share: 0.3, skip: [0, 0]}
    faults:                     # each proven and undone, as far as it says when
      - {name: replica_killed, injected: 30, healed: 50, targets: [engine-1]}
        back: {engine-1: 50}    # when a replica answered again
    events: [[33, unproven, replica_killed, {why: w}]]     # anything else that a log told
    alerts: {GpuMemoryHigh: [[0, 100]]}                    # the rules, and when each was told of, once a second
    engines: {engine-0: [[0, 30, 10], [30, 60, 20]]}       # spans of time, and the requests/s that reached it
    files: 1                    # that the observations are spread over
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import TypeAdapter

from harness import plan_file, timeline
from harness.judge import verdict as verdicts
from harness.judge.gates import GATES, Gate
from harness.log import Log, ObservationLog
from harness.model import NEVER, Event, Finish, Observation, Outcome, Reading, Request, Tag, Verdict, Window

ANSWER_S = 0.5
GPU_BYTES = 80 * 2**30
MOMENTS = slice(2, 7)  # of an observation: from sent_s to ended_s
ORIGIN_S = 5000.0  # of the run, on the machine's monotonic clock
SILENT = (Outcome.REFUSED, Outcome.TIMEOUT, Outcome.OPEN)
HEALTHY = {"cpu_share": 0.3, "run_delay_share": 0.01, "steal_share": 0.0}
RECORDING = {"recording": "hour.jsonl", "order": "open", "speed": 1.0, "lost_share": 0.0, "lost_at_most": 0.01}


@dataclass(frozen=True)
class Sent:
    """One request of the story, what became of it, and what had become of it when it was captured."""

    request: Request
    observation: Observation | None
    captured: Observation | None


def gates_of(story: dict[str, Any]) -> list[Gate]:
    named = [(name, value) for gate in story["gates"] for name, value in gate.items()]
    return [Gate(name, 10 + n, _adapter(name).validate_python(v)) for n, (name, v) in enumerate(named)]


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(GATES[name])


def _sent(story: dict[str, Any], start_s: float, end_s: float) -> tuple[Sent, ...]:
    return _made(json.dumps([story.get("requests", ()), "replay" in story, start_s, end_s]))


@lru_cache(maxsize=8)  # many stories in a row have the same requests
def _made(written: str) -> tuple[Sent, ...]:
    requests, replayed, start_s, end_s = json.loads(written)
    due = []
    for number, group in enumerate(requests):
        begin_s, finish_s = group.get("from", start_s), group.get("to", end_s)
        step_s, met = (finish_s - begin_s) / group["n"], _Met(group, replayed)
        due += [(begin_s + (k + 0.5) * step_s, number, k, met) for k in range(group["n"])]
    ordered = sorted(due, key=lambda entry: entry[:3])
    return tuple(met.sent(index, due_s) for index, (due_s, _, _, met) in enumerate(ordered))


class _Met:
    """What one group of requests met, worked out once for all of them; the capture's side of a replay."""

    def __init__(self, group: dict[str, Any], replayed: bool) -> None:
        self.request = {
            "class_name": group.get("class", "short"),
            "path": group.get("path", "/v1/chat/completions"),
            "prompt_tokens": group.get("prompt_tokens", 100),
            "max_tokens": 32,
            "stream": "ttft" in group or "gaps" in group,
            "flaw": group.get("flaw", ""),
            "expect": tuple(group.get("expect", ("2xx",))),
            "give_up_s": group.get("give_up"),
        }
        then = {**group, "seen": True, "sent": True, "send_lag": 0.0, **group.get("captured", {})}
        self.observed, self.captured = _seen(group), _seen(then) if replayed else None

    def sent(self, index: int, due_s: float) -> Sent:
        request, moment_s = Request(index=index, due_s=due_s, **self.request), round(due_s, 9)
        now, then = (one and _moved(one, index, moment_s) for one in (self.observed, self.captured))
        return Sent(request, now, then)


def _seen(group: dict[str, Any]) -> Observation | None:
    """The observation of a request that is due at 0 s."""
    if not group.get("seen", True):
        return None
    outcome = Outcome[group.get("outcome", "OK")]
    ended_s = NEVER if outcome == Outcome.OPEN else group.get("e2e", ANSWER_S)
    first_s, gaps_s = group.get("ttft", NEVER), tuple(group.get("gaps", ()))
    return Observation(
        index=0,
        due_s=0.0,
        sent_s=group.get("send_lag", 0.0) if group.get("sent", True) else NEVER,
        first_byte_s=NEVER if outcome in SILENT else group.get("ttft", ended_s),
        first_token_s=first_s,
        last_token_s=first_s + sum(gaps_s),
        ended_s=ended_s,
        tokens_in=group.get("tokens_in", 0),
        tokens_out=group.get("tokens_out", len(gaps_s) + 1),
        status=group.get("status", 200 if outcome == Outcome.OK else 0),
        outcome=outcome,
        tags=Tag[group["tag"]] if "tag" in group else Tag(0),
        receive_lag_s=group.get("receive_lag", 0.0),
        finish=Finish[group.get("finish", "UNSAID")],
        shape=group.get("shape", 0),
        gaps_s=gaps_s,
    )


def _moved(seen: Observation, index: int, due_s: float) -> Observation:
    """The same for another request, due then."""
    moments_s = (moment_s + due_s for moment_s in seen[MOMENTS])
    return Observation(index, due_s, *moments_s, *seen[MOMENTS.stop :])


def lay_out(run_dir: Path, story: dict[str, Any]) -> None:
    """Write the run directory that such a run would have left."""
    start_s, end_s = story.get("window", (0.0, 100.0))
    sent = _sent(story, start_s, end_s)
    header = plan_file.PlanHeader(
        scenario="story",
        seed=0,
        requests=len(sent),
        windows=(Window("steady", start_s, end_s),),
        time_limit_s=30.0,
        facts={"replay": {**RECORDING, **story["replay"]}} if "replay" in story else {},
    )
    plan = b"".join(plan_file.lines(header, [one.request for one in sent]))
    (run_dir / "plan.jsonl").write_bytes(plan)
    facts = {"run": run_dir.name, "plan_sha256": hashlib.sha256(plan).hexdigest(), "chaos": story.get("chaos", [])}
    facts["origin_monotonic_s"] = ORIGIN_S
    (run_dir / "run.json").write_bytes(orjson.dumps(facts))
    _observations(run_dir, sent, story.get("files", 1))
    if "replay" in story and not story["replay"].get("timing_only"):
        _captured(run_dir / timeline.CAPTURED, sent)
    closed_s = max([end_s, *(o.ended_s for s in sent if (o := s.observation) and not math.isnan(o.ended_s))])
    closed_s = story.get("closed", closed_s)
    _player(run_dir, story, sent, start_s, end_s, closed_s)
    if "gpus" in story:
        _watch(run_dir, story, start_s, end_s)
    _chaos(run_dir, story)
    _engines(run_dir, story)
    _alerts(run_dir, story)
    log = Log(run_dir / "log.conductor.jsonl")
    log.event(Event(0.0, "origin"))
    if story.get("interrupted"):
        log.event(Event(closed_s, "interrupted"))
    for child, code in {"player": 0, "watch": 0, **story.get("exited", {})}.items():
        log.event(Event(closed_s, "exited", child, {"code": code}))
    log.close()


def _observations(run_dir: Path, sent: Sequence[Sent], files: int) -> None:
    logs = [ObservationLog(run_dir / f"log.player-{k}.bin") for k in range(files)]
    for one in sent:
        if one.observation is not None:
            logs[one.request.index % files].append(one.observation)
    for log in logs:
        log.close()


def _captured(path: Path, sent: Sequence[Sent]) -> None:
    log = ObservationLog(path)
    for one in sent:
        if one.captured is not None:
            log.append(one.captured)
    log.close()


def _player(
    run_dir: Path, story: dict[str, Any], sent: Sequence[Sent], start_s: float, end_s: float, closed_s: float
) -> None:
    told = story.get("player", {})
    skip_from, skip_to = told.get("skip", (0, 0))
    log = Log(run_dir / "log.player-0.jsonl")
    seen = [one.observation for one in sent if one.observation]
    begun_s = np.array([o.sent_s for o in seen])
    finished_s = np.array([closed_s if math.isnan(o.ended_s) else o.ended_s for o in seen])
    at_s = start_s + 0.5
    while at_s < end_s:
        if not skip_from <= at_s < skip_to:
            flying = int(((begun_s <= at_s) & (at_s < finished_s)).sum())
            values = {**HEALTHY, "in_flight": flying, **{k: v for k, v in told.items() if k != "skip"}}
            for name, value in values.items():
                log.reading(Reading(at_s, f"player.{name}", value, {"worker": "0"}))
        at_s += 1.0
    if (why := story.get("stopped", "finished")) != "never":
        log.event(Event(closed_s, "stopped", "player", {"sent": len(sent), "why": why}))
    log.close()


def _chaos(run_dir: Path, story: dict[str, Any]) -> None:
    """What was broken; the evidence of each step is whatever the story says, and some by default."""
    log = Log(run_dir / "log.chaos.jsonl")
    for fault in story.get("faults", ()):
        name, injected_s, healed_s = fault["name"], fault.get("injected"), fault.get("healed")
        begun_s = fault.get("injecting", injected_s)
        log.event(
            Event(begun_s, "injecting", name, {"targets": fault.get("targets", ["engine-1"]), "undo": "start it"})
        )
        if injected_s is not None:
            log.event(Event(injected_s, "injected", name, {"evidence": fault.get("evidence", {"pid 7": "gone"})}))
        if healed_s is not None:
            log.event(Event(healed_s, "healing", name))
            back = [
                {"replica": replica, "pid": 8, "at_s": ORIGIN_S + at_s}
                for replica, at_s in fault.get("back", {}).items()
            ]
            undone = fault.get("undone", {"ready": back} if back else {"pid 8": "answers"})
            log.event(Event(healed_s, "healed", name, {"evidence": undone}))
    for at_s, kind, name, detail in story.get("events", ()):
        log.event(Event(at_s, kind, name, detail))
    log.close()


def _engines(run_dir: Path, story: dict[str, Any]) -> None:
    """Once a second what each engine has finished; a gap between two spans is a restart, from nothing."""
    log = Log(run_dir / "log.engines.jsonl")
    for name, spans in story.get("engines", {}).items():
        done, before_s = 0.0, spans[0][0]
        for from_s, to_s, rate_per_s in spans:
            done = done if from_s == before_s else 0.0
            for second in range(from_s, to_s):
                log.reading(Reading(second + 0.25, "vllm:request_success_total", done, {"engine": name}))
                log.reading(Reading(second + 0.25, "vllm:num_requests_running", 4.0, {"engine": name}))
                done += rate_per_s
            before_s = to_s
    log.close()


def _alerts(run_dir: Path, story: dict[str, Any]) -> None:
    """Once a second that each alert was evaluated, while it was; when it fired is an event of the story."""
    if not story.get("alerts"):
        return
    log = Log(run_dir / "log.alerts.jsonl")
    log.event(Event(0.0, "watching", "alerts", {"rules": sorted(story["alerts"])}))
    for name, spans in story["alerts"].items():
        for second in (second for from_s, to_s in spans for second in range(from_s, to_s)):
            log.reading(Reading(second + 0.25, "alert.firing", 0.0, {"alert": name}))
    log.close()


def _watch(run_dir: Path, story: dict[str, Any], start_s: float, end_s: float) -> None:
    log = Log(run_dir / "log.watch.jsonl")
    watching = {"series": len(story["gpus"]), "interval_s": 1.0, "source": "exporter", "simulated": True}
    log.event(Event(0.0, "watching", "gpu", {**watching, **story.get("watching", {})}))
    for name, told in story["gpus"].items():
        skip_from, skip_to = told.get("skip", (0, 0))
        for second in range(int(start_s), int(end_s)):
            if skip_from <= second < skip_to:
                continue
            used = told.get("peak", told["used"]) if second == told.get("peak_at") else told["used"]
            empty_from, empty_to = told.get("empty", (0, 0))
            used = 0.0 if empty_from <= second < empty_to else used
            free = float("nan") if second == told.get("nan_at") else GPU_BYTES * (1 - used)
            busy = told.get("utilisation", 0.4 + 0.01 * (second % 7))
            for reading, value in (("free_bytes", free), ("total_bytes", GPU_BYTES), ("utilisation", busy)):
                if value is not None:  # a field that the exporter does not have
                    log.reading(Reading(second + 0.25, f"gpu.{reading}", value, {"gpu": name}))
    log.event(Event(end_s, "stopped", "watch", {"why": "asked"}))
    log.close()


def judged(run_dir: Path, story: dict[str, Any]) -> Verdict:
    return verdicts.judge(
        timeline.read(run_dir),
        gates_of(story),
        gpu=story.get("gpu", "none"),
        on_inconclusive=story.get("on_inconclusive", ""),
        provenance={"run": "story"},
    )


Tell = Callable[[dict[str, Any]], Verdict]


@pytest.fixture
def tell(tmp_path: Path) -> Tell:
    """Lay a story out as a run directory and judge what is read back from it."""

    def lay_out_and_judge(story: dict[str, Any]) -> Verdict:
        lay_out(tmp_path, story)
        return judged(tmp_path, story)

    return lay_out_and_judge


@pytest.fixture
def lay() -> Callable[[Path, dict[str, Any]], None]:
    return lay_out


@pytest.fixture
def judge_dir() -> Callable[[Path, dict[str, Any]], Verdict]:
    return judged
