"""What the stack says of itself while a run goes: GPU memory, the engines' own gauges, raw, and alerts, once a second.

    python -m harness.watch RUN_DIR

A process of its own, so that nothing here can delay a send. It asks a Prometheus when one has the GPUs' series (raw
samples with their own times, by a range selector: an evaluated query would fill gaps with values up to five minutes
old), else the exporter, else NVML. What was not read leaves a gap; the judge decides what a gap means.
"""

import argparse
import itertools
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import parent, sources
from harness.alerts import Alerts
from harness.log import Log, read_run_json
from harness.model import Event
from harness.sources import Dcgm, Engine, Matchers, Nvml, PartialAnswer, Prometheus, Source, Unwatchable
from harness.targets import base

INTERVAL_S = 1.0
FIRST_LOOK_S = 150  # holds two samples of a Prometheus that scrapes once a minute
PREPARE_S = 10.0  # how long a Prometheus may take to have two samples of every GPU
REPEAT_S = 10.0  # a source that stays silent is said to be so this often


def gpu_source(target: base.Target, log: Log, stop: threading.Event) -> tuple[list[Source], dict[str, Any]]:
    """Who is asked for GPU memory, and the detail of the `watching` event: what the judge may expect."""
    if target.gpu == "none":
        return [], {"source": "none", "series": 0, "interval_s": INTERVAL_S, "simulated": False}
    reasons = []
    for open_source in _openers(target, stop):
        try:
            source, interval_s = open_source()
        except (Unwatchable, OSError, ValueError) as error:
            reasons.append(str(error))
            log.event(Event(0.0, "note", "gpu", {"why": f"GPUs are not read here: {error}"}))
            continue
        return [source], {
            "source": source.name,
            "series": len(source.gpus),
            "gpus": source.gpus,
            "interval_s": interval_s,
            "simulated": source.simulated or target.gpu == "simulated",
            "share": "1 - free / total",
            "total": source.total,
        }
    asked = target.gpu_metrics or target.prometheus or target.gpu
    silent = {"source": asked, "series": 0, "interval_s": INTERVAL_S, "simulated": target.gpu == "simulated"}
    return [], silent | {"why": "; ".join(reasons)}


def _openers(target: base.Target, stop: threading.Event) -> Iterator[Callable[[], tuple[Dcgm | Nvml, float]]]:
    if target.gpu == "nvml":
        yield lambda: (Nvml(target.gpus), INTERVAL_S)
        return
    if url := target.prometheus:
        yield lambda: _open_prometheus(url, target.gpus, stop)
    if page := target.gpu_metrics:
        yield lambda: (sources.exporter(page, target.gpus), INTERVAL_S)


def _open_prometheus(url: str, matchers: Matchers, stop: threading.Event) -> tuple[Dcgm, float]:
    """Waits until every GPU has two samples: the time between them is the interval that the judge holds it to.

    Its samples are put on the run's clock by this machine's wall clock: Unwatchable when the two differ by more.
    """
    prometheus, until_s = Prometheus(url, matchers), time.monotonic() + PREPARE_S
    while True:
        first = prometheus.ask(back_s=FIRST_LOOK_S)
        moments: dict[str, list[float]] = {}
        for seen in first:
            if seen.name == sources.FREE:
                moments.setdefault(sources.gpu_of(seen.labels), []).append(seen.at_s)
        if moments and all(len(times) > 1 for times in moments.values()):
            break
        if time.monotonic() > until_s or stop.wait(0.5):
            raise Unwatchable(f"{url} has no two samples of {sources.FREE} from each GPU that serves")
    steps = [b - a for times in moments.values() for a, b in itertools.pairwise(times)]
    interval_s = round(statistics.median(steps), 3)
    if abs(ahead_s := prometheus.ahead_s()) > interval_s:
        way = "ahead of" if ahead_s > 0 else "behind"
        raise Unwatchable(
            f"the clock of {url} is {abs(ahead_s):.1f} s {way} this machine's, more than the {interval_s:g} s between "
            "its samples: nobody can tell when they were taken"
        )
    return Dcgm(url, "wall", prometheus.ask, first), interval_s


def alert_source(target: base.Target, log: Log) -> list[Source]:
    """The alerts of the target's Prometheus, announced; without one that has rules, a note that nobody watches them."""
    why = "the target names no Prometheus"
    if target.prometheus:
        try:
            alerts = Alerts(target.prometheus)
        except (Unwatchable, OSError, ValueError) as error:
            why = str(error)
        else:
            log.event(Event(0.0, "watching", "alerts", {"source": alerts.name, "rules": alerts.rules}))
            return [alerts]
    log.event(Event(0.0, "note", "alerts", {"why": f"alerts are not watched: {why}"}))
    return []


# The process -----------------------------------------------------------------------------------------------------


def follow(source: Source, log: Log, origin_s: float, stop: threading.Event) -> None:
    """Ask at every whole interval until told to stop, and once more then: Prometheus learns of samples late."""
    due_s, missed, told_s = time.monotonic(), 0, -math.inf
    while True:
        stopping = stop.wait(due_s - time.monotonic())
        try:
            for seen in source.sample():
                moved = replace(seen, at_s=seen.at_s - origin_s)
                log.event(moved) if isinstance(moved, Event) else log.reading(moved)
        except (OSError, ValueError) as error:
            missed, now_s = missed + 1, time.monotonic()
            if now_s - told_s >= REPEAT_S:
                told_s = now_s
                kind = "note" if isinstance(error, PartialAnswer) else "scrape_failed"
                log.event(Event(_run_time(source, origin_s), kind, source.name, {"why": str(error), "missed": missed}))
        if stopping:
            return
        # A moment that went by while we waited for an answer is not made up for.
        due_s += INTERVAL_S * max(1, math.ceil((time.monotonic() - due_s) / INTERVAL_S))


def _run_time(source: Source, origin_s: float) -> float:
    # An event about a source stands among its readings: a Prometheus stamps them with the wall clock.
    return (time.time() if source.clock == "wall" else time.monotonic()) - origin_s


def watch(run_dir: Path, stop: threading.Event) -> None:
    """Announce what can be watched, wait for the start barrier, and follow every source until `stop`."""
    target, log = base.load(str(run_dir / "target.yaml")), Log(run_dir / "log.watch.jsonl")
    gpus, detail = gpu_source(target, log, stop)
    log.event(Event(0.0, "watching", "gpu", detail))
    alerts = alert_source(target, log)
    log.event(Event(0.0, "ready", "watch"))
    run = _barrier(run_dir, stop)
    if run is not None:
        threads = [
            threading.Thread(target=follow, args=(source, log, run[f"origin_{source.clock}_s"], stop), daemon=True)
            for source in (*gpus, *alerts, *map(Engine, target.engines))
        ]
        for thread in threads:
            thread.start()
        stop.wait()
        for thread in threads:
            thread.join(3 * sources.TIMEOUT_S)
    at_s = time.monotonic() - run["origin_monotonic_s"] if run else 0.0
    log.event(Event(at_s, "stopped", "watch", {"why": "asked" if run else "never started"}))
    log.close()


def _barrier(run_dir: Path, stop: threading.Event) -> dict[str, Any] | None:
    """The run's own record once it has its origin; None when asked to stop before. The conductor sets the limit."""
    while not stop.wait(0.02):
        if "origin_monotonic_s" in (run := read_run_json(run_dir)):
            return run
    return None


def main() -> None:
    """Watch a run until SIGTERM or the death of the conductor. Ctrl-C is the conductor's to hear."""
    conductor, stop = parent.conductor(), threading.Event()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_dir", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent.die_with(conductor)
    watch(arguments.run_dir, stop)


if __name__ == "__main__":
    main()
