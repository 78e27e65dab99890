"""What the stack says of itself while a run goes: GPU memory and the engines' own gauges, raw, once a second.

    python -m harness.watch RUN_DIR

A process of its own, so that nothing here can delay a send. It asks a Prometheus when one has the GPUs' series (raw
samples with their own times, by a range selector: an evaluated query would fill gaps with values up to five minutes
old), else the exporter, else NVML. It refuses to make up a value: what was not read leaves a gap, an answer that calls
itself partial is dropped whole, and `nan` stays `nan`. The judge decides what a gap means.
"""

import argparse
import ctypes
import itertools
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import requests
from prometheus_client.parser import text_string_to_metric_families

from harness.model import Event, Reading
from harness.targets import base
from harness.timeline import Log, read_run_json

INTERVAL_S = 1.0
TIMEOUT_S = 1.0  # of one question; a source that is slower than the interval is a source that is silent
PREPARE_S = 10.0  # how long a Prometheus may take to have two samples of every GPU
BARRIER_S = 120.0
REPEAT_S = 10.0  # a source that stays silent is said to be so this often
MIB = 2**20

FREE, USED, RESERVED = "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_RESERVED"
UTILISATION = "DCGM_FI_DEV_GPU_UTIL"
ENGINE_METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
)


class PartialAnswer(ValueError):  # noqa: N818 -- a fact about an answer, not about us
    """A Prometheus said that its answer lacks something."""


class Unwatchable(Exception):  # noqa: N818 -- a fact about the stack, said in the log
    """A source that gives no usable GPU series; the sentence says why."""


class Source(Protocol):
    """Somebody to ask. `clock` names the clock that the moments of its samples are on."""

    name: str
    clock: Literal["wall", "monotonic"]

    def sample(self) -> Iterable[Reading]:
        """What is new, at absolute moments. Raises OSError or ValueError when there is no good answer."""


# Engines ---------------------------------------------------------------------------------------------------------


class Engine:
    """The vLLM metrics of one replica, under their own names."""

    clock: Literal["wall", "monotonic"] = "monotonic"

    def __init__(self, url: str) -> None:
        self.name, self._session = url, _session()

    def sample(self) -> Iterator[Reading]:
        for seen in scrape(self._session, f"{self.name}/metrics", ENGINE_METRICS):
            yield replace(seen, labels={"engine": _engine_of(self.name, seen.labels)})


def _engine_of(url: str, labels: Mapping[str, str]) -> str:
    """A data-parallel server has several engines behind one port: the first is the url, the others are marked."""
    rank = labels.get("engine", "0")
    return url if rank == "0" else f"{url}#{rank}"


def scrape(session: requests.Session, url: str, names: tuple[str, ...]) -> list[Reading]:
    """The named samples of an exporter's page. Other lines are not parsed: vLLM's histograms cost 10 ms a page."""
    answer = session.get(url, timeout=TIMEOUT_S)
    at_s = time.monotonic()
    answer.raise_for_status()
    lines = "".join(f"{line}\n" for line in answer.text.splitlines() if line.startswith(names))
    samples = [sample for family in text_string_to_metric_families(lines) for sample in family.samples]
    return [Reading(at_s, s.name, float(s.value), s.labels) for s in samples if s.name in names]


def _session() -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # asked directly, as the player asks: no proxy between us and the stack
    return session


# GPUs ------------------------------------------------------------------------------------------------------------


class Dcgm:
    """GPU memory and utilisation out of DCGM's fields, wherever they are asked for.

    The total is the sum of the memory fields that were exported at the start; a moment that lacks one of them is a gap,
    for a sum over fewer would be another ratio. Raises Unwatchable when free and used are not both there.
    """

    def __init__(
        self, name: str, clock: Literal["wall", "monotonic"], ask: Callable[[], list[Reading]], first: list[Reading]
    ) -> None:
        self.name, self.clock, self._ask = name, clock, ask
        self._parts = sorted({seen.name for seen in first} & {FREE, USED, RESERVED})
        if FREE not in self._parts or USED not in self._parts:
            raise Unwatchable(f"{name} exports no {FREE} and {USED}")
        self.gpus = sorted({_gpu_of(seen.labels) for seen in first if seen.name == FREE})
        self.simulated = any(seen.labels.get("simulated") == "true" for seen in first)
        self.total = " + ".join(self._parts)
        self._newest: dict[str, float] = {}

    def sample(self) -> Iterator[Reading]:
        moments: dict[tuple[float, str], dict[str, float]] = {}
        for seen in self._ask():
            moments.setdefault((seen.at_s, _gpu_of(seen.labels)), {})[seen.name] = seen.value
        for (at_s, gpu), fields in sorted(moments.items()):
            if at_s > self._newest.get(gpu, -math.inf):
                self._newest[gpu] = at_s
                yield from self._readings(at_s, {"gpu": gpu}, fields)

    def _readings(self, at_s: float, labels: Mapping[str, str], fields: Mapping[str, float]) -> Iterator[Reading]:
        if all(part in fields for part in self._parts):
            yield Reading(at_s, "gpu.free_bytes", fields[FREE] * MIB, labels)
            yield Reading(at_s, "gpu.total_bytes", sum(fields[part] for part in self._parts) * MIB, labels)
        if UTILISATION in fields:
            yield Reading(at_s, "gpu.utilisation", fields[UTILISATION] / 100, labels)


def _gpu_of(labels: Mapping[str, str]) -> str:
    """One name a device, whatever pod or host labels come and go; a MIG slice is a device of its own."""
    name = labels.get("UUID") or f"GPU-{labels.get('gpu', '?')}"
    return f"{name}/{labels['GPU_I_ID']}" if labels.get("GPU_I_ID") else name


class Prometheus:
    """Raw samples of DCGM's fields, with the times at which Prometheus took them.

    prometheus-api-client has no time limit of its own, retries silently and drops warnings: the session given to it
    has one, and refuses an answer that carries warnings.
    """

    def __init__(self, url: str) -> None:
        from prometheus_api_client import PrometheusConnect
        from prometheus_api_client.exceptions import PrometheusApiClientException
        from urllib3.util import Retry

        session = _session()
        session.hooks["response"].append(_refuse_partial)
        self._client = PrometheusConnect(url, session=session, timeout=TIMEOUT_S, retry=Retry(0))
        self._refused: type[Exception] = PrometheusApiClientException
        self._answered_s = time.monotonic()

    def ask(self, back_s: int = 15) -> list[Reading]:
        """Every sample since the last answer, and `back_s` before it: what came late is still found."""
        asked_s = time.monotonic()
        range_s = back_s + math.ceil(asked_s - self._answered_s)
        try:
            found = self._client.custom_query(f'{{__name__=~"{FREE}|{USED}|{RESERVED}|{UTILISATION}"}}[{range_s}s]')
            samples = [
                Reading(float(at_s), series["metric"]["__name__"], float(value), series["metric"])
                for series in found
                for at_s, value in series["values"]
            ]
        except self._refused as error:
            raise OSError(str(error)) from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a matrix of samples: {error!r}") from error
        self._answered_s = asked_s
        return samples


def _refuse_partial(response: requests.Response, *_: Any, **__: Any) -> None:
    if warnings := response.json().get("warnings"):
        raise PartialAnswer("; ".join(warnings))


class Nvml:
    """The devices of this machine through NVIDIA's library. Raises Unwatchable when it is not here."""

    name: str = "nvml"
    clock: Literal["wall", "monotonic"] = "monotonic"
    total, simulated = "nvmlDeviceGetMemoryInfo.total", False

    def __init__(self) -> None:
        try:
            import pynvml  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise Unwatchable("gpu: nvml needs the package nvidia-ml-py, which is not installed") from error
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            self._handles = {pynvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
        except pynvml.NVMLError as error:
            raise Unwatchable(f"NVML gives no devices: {error}") from error
        self.gpus = sorted(self._handles)

    def sample(self) -> Iterator[Reading]:
        for gpu, handle in self._handles.items():
            try:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            except self._nvml.NVMLError as error:
                raise OSError(f"{gpu}: {error}") from error
            at_s = time.monotonic()
            yield Reading(at_s, "gpu.free_bytes", float(memory.free), {"gpu": gpu})
            yield Reading(at_s, "gpu.total_bytes", float(memory.total), {"gpu": gpu})
            yield Reading(at_s, "gpu.utilisation", busy / 100, {"gpu": gpu})


def gpu_source(target: base.Target, log: Log, stop: threading.Event) -> tuple[list[Source], dict[str, Any]]:
    """Who is asked for GPU memory, and the detail of the `watching` event: what the judge may expect."""
    if target.gpu == "none":
        return [], {"source": "none", "series": 0, "interval_s": INTERVAL_S, "simulated": False}
    for open_source in _openers(target, stop):
        try:
            source, interval_s = open_source()
        except (Unwatchable, OSError, ValueError) as error:
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
    return [], {"source": asked, "series": 0, "interval_s": INTERVAL_S, "simulated": target.gpu == "simulated"}


def _openers(target: base.Target, stop: threading.Event) -> Iterator[Callable[[], tuple[Dcgm | Nvml, float]]]:
    if target.gpu == "nvml":
        yield lambda: (Nvml(), INTERVAL_S)
        return
    if url := target.prometheus:
        yield lambda: _open_prometheus(url, stop)
    if page := target.gpu_metrics:
        yield lambda: _open_exporter(page)


def _open_exporter(page: str) -> tuple[Dcgm, float]:
    session = _session()
    names = (FREE, USED, RESERVED, UTILISATION)

    def ask() -> list[Reading]:
        return scrape(session, page, names)

    return Dcgm(page, "monotonic", ask, ask()), INTERVAL_S


def _open_prometheus(url: str, stop: threading.Event) -> tuple[Dcgm, float]:
    """Waits until every GPU has two samples: the time between them is the interval that the judge holds it to."""
    prometheus, until_s = Prometheus(url), time.monotonic() + PREPARE_S
    while True:
        first = prometheus.ask(back_s=60)
        moments: dict[str, list[float]] = {}
        for seen in first:
            if seen.name == FREE:
                moments.setdefault(_gpu_of(seen.labels), []).append(seen.at_s)
        if moments and all(len(times) > 1 for times in moments.values()):
            steps = [b - a for times in moments.values() for a, b in itertools.pairwise(times)]
            return Dcgm(url, "wall", prometheus.ask, first), round(statistics.median(steps), 3)
        if time.monotonic() > until_s or stop.wait(0.5):
            raise Unwatchable(f"{url} has no two samples of {FREE} from each GPU")


# The process -----------------------------------------------------------------------------------------------------


def follow(source: Source, log: Log, origin_s: float, stop: threading.Event) -> None:
    """Ask at every whole interval until told to stop, and once more then: Prometheus learns of samples late."""
    due_s, missed, told_s = time.monotonic(), 0, -math.inf
    while True:
        stopping = stop.wait(due_s - time.monotonic())
        try:
            for seen in source.sample():
                log.reading(replace(seen, at_s=seen.at_s - origin_s))
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
    return (time.time() if source.clock == "wall" else time.monotonic()) - origin_s


def watch(run_dir: Path, stop: threading.Event) -> None:
    """Announce what can be watched, wait for the start barrier, and follow every source until `stop`."""
    target, log = base.load(str(run_dir / "target.yaml")), Log(run_dir / "log.watch.jsonl")
    gpus, detail = gpu_source(target, log, stop)
    log.event(Event(0.0, "watching", "gpu", detail))
    log.event(Event(0.0, "ready", "watch"))
    run = _barrier(run_dir, stop)
    if run is not None:
        sources = [*gpus, *(Engine(url) for url in target.engines)]
        threads = [
            threading.Thread(target=follow, args=(source, log, run[f"origin_{source.clock}_s"], stop), daemon=True)
            for source in sources
        ]
        for thread in threads:
            thread.start()
        stop.wait()
        for thread in threads:
            thread.join(3 * TIMEOUT_S)
    at_s = time.monotonic() - run["origin_monotonic_s"] if run else 0.0
    log.event(Event(at_s, "stopped", "watch", {"why": "asked" if run else "never started"}))
    log.close()


def _barrier(run_dir: Path, stop: threading.Event) -> dict[str, Any] | None:
    """The run's own record once it has its origin; None when that never comes."""
    until_s = time.monotonic() + BARRIER_S
    while not stop.wait(0.02) and time.monotonic() < until_s:
        if "origin_monotonic_s" in (run := read_run_json(run_dir)):
            return run
    return None


def die_with_parent(parent: int) -> None:
    """Be told to stop when the conductor dies, however it dies; at once when it already has."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Watch a run until SIGTERM or the death of the conductor. Ctrl-C is the conductor's to hear."""
    parent, stop = int(os.environ.get("HARNESS_CONDUCTOR", os.getppid())), threading.Event()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_dir", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    watch(arguments.run_dir, stop)


if __name__ == "__main__":
    main()
