"""Who is asked what the stack says of itself, and how: engines' pages, exporters, a Prometheus, NVIDIA's library.

Each source gives readings at absolute moments of its own clock. It refuses to make up a value: an answer that calls
itself partial is dropped whole, `nan` stays `nan`, and the fields of other people's GPUs are left out.
"""

import json
import math
import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

import requests
from prometheus_client.parser import text_string_to_metric_families

from harness.model import Event, Reading

TIMEOUT_S = 1.0  # of one question; a source that is slower than the interval is a source that is silent
MIB = 2**20

FREE, USED, RESERVED = "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_RESERVED"
UTILISATION = "DCGM_FI_DEV_GPU_UTIL"
GPU_FIELDS = (FREE, USED, RESERVED, UTILISATION)
ENGINE_METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
)
Clock = Literal["wall", "monotonic"]
Matchers = Mapping[str, list[str]]  # label -> the values of the GPUs that serve; empty: all of them do


class PartialAnswer(ValueError):  # noqa: N818 -- a fact about an answer, not about us
    """A Prometheus said that its answer lacks something."""


class Unwatchable(Exception):  # noqa: N818 -- a fact about the stack, said in the log
    """A source that gives no usable GPU series; the sentence says why."""


class Source(Protocol):
    """Somebody to ask. `clock` names the clock that the moments of its samples are on."""

    name: str
    clock: Clock

    def sample(self) -> Iterable[Reading | Event]:
        """What is new, at absolute moments. Raises OSError or ValueError when there is no good answer."""


# Engines ---------------------------------------------------------------------------------------------------------


class Engine:
    """The vLLM metrics of one replica, under their own names."""

    clock: Clock = "monotonic"

    def __init__(self, url: str) -> None:
        self.name, self._session = url, _session()

    def sample(self) -> Iterator[Reading]:
        """One reading a metric and engine: counts by further labels, such as why requests ended, are summed."""
        sums: dict[tuple[str, str], Reading] = {}
        for seen in scrape(self._session, f"{self.name}/metrics", ENGINE_METRICS):
            key = seen.name, _engine_of(self.name, seen.labels)
            before = sums[key].value if key in sums else 0.0
            sums[key] = replace(seen, labels={"engine": key[1]}, value=before + seen.value)
        yield from sums.values()


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
    """Asks directly, with the system's trust in certificates, as the player does: no proxy stands between."""
    session, trusted = requests.Session(), ssl.get_default_verify_paths()
    session.trust_env, session.verify = False, trusted.cafile or trusted.capath or True
    return session


# GPUs ------------------------------------------------------------------------------------------------------------


class Dcgm:
    """GPU memory and utilisation out of DCGM's fields, wherever they are asked for.

    The total is the sum of the memory fields that were exported at the start; a moment that lacks one of them is a gap,
    for a sum over fewer would be another ratio. Raises Unwatchable when free and used of a GPU are not both there.
    """

    def __init__(self, name: str, clock: Clock, ask: Callable[[], list[Reading]], first: list[Reading]) -> None:
        self.name, self.clock, self._ask = name, clock, ask
        self._parts = sorted({seen.name for seen in first} & {FREE, USED, RESERVED})
        if FREE not in self._parts or USED not in self._parts:
            raise Unwatchable(f"{name} has no {FREE} and {USED} of a GPU that serves")
        self.gpus = sorted({gpu_of(seen.labels) for seen in first if seen.name == FREE})
        self.simulated = any(seen.labels.get("simulated") == "true" for seen in first)
        self.total = " + ".join(self._parts)
        self._newest: dict[str, float] = {}

    def sample(self) -> Iterator[Reading]:
        moments: dict[tuple[float, str], dict[str, float]] = {}
        for seen in self._ask():
            moments.setdefault((seen.at_s, gpu_of(seen.labels)), {})[seen.name] = seen.value
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


def gpu_of(labels: Mapping[str, str]) -> str:
    """One name a device, whatever pod or host labels come and go; a MIG slice is a device of its own."""
    name = labels.get("UUID") or f"GPU-{labels.get('gpu', '?')}"
    return f"{name}/{labels['GPU_I_ID']}" if labels.get("GPU_I_ID") else name


def serves(labels: Mapping[str, str], matchers: Matchers) -> bool:
    """Whether a GPU with these labels is one of the target's."""
    return all(labels.get(name) in values for name, values in matchers.items())


def exporter(page: str, matchers: Matchers) -> Dcgm:
    """The GPUs of an exporter's page, as they are at the moment of asking."""
    session = _session()

    def ask() -> list[Reading]:
        return [seen for seen in scrape(session, page, GPU_FIELDS) if serves(seen.labels, matchers)]

    return Dcgm(page, "monotonic", ask, ask())


class Prometheus:
    """Raw samples of DCGM's fields, with the times at which Prometheus took them.

    prometheus-api-client has no time limit of its own, retries silently and drops warnings: the session given to it
    has one, and refuses an answer that carries warnings.
    """

    def __init__(self, url: str, matchers: Matchers) -> None:
        from prometheus_api_client import PrometheusConnect
        from prometheus_api_client.exceptions import PrometheusApiClientException
        from urllib3.util import Retry

        self._client = PrometheusConnect(url, session=prometheus_session(), timeout=TIMEOUT_S, retry=Retry(0))
        self._refused: type[Exception] = PrometheusApiClientException
        self._selector = _selector(matchers)
        self._answered_s = time.monotonic()

    def ask(self, back_s: int = 15) -> list[Reading]:
        """Every sample since the last answer, and `back_s` before it: what came late is still found."""
        asked_s = time.monotonic()
        found = self._query(f"{self._selector}[{back_s + math.ceil(asked_s - self._answered_s)}s]")
        try:
            samples = [
                Reading(float(at_s), series["metric"]["__name__"], float(value), series["metric"])
                for series in found
                for at_s, value in series["values"]
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a matrix of samples: {error!r}") from error
        self._answered_s = asked_s
        return samples

    def ahead_s(self) -> float:
        """How far its clock is ahead of this machine's; 0 when the time its answer took explains the difference."""
        asked_s = time.time()  # the wall clock, for that is what Prometheus stamps its samples with
        try:
            _, told = self._query("time()")
            its_s = float(told)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a moment: {error}") from error
        return its_s - min(max(its_s, asked_s), time.time())

    def _query(self, query: str) -> Any:
        try:
            return self._client.custom_query(query)
        except self._refused as error:
            raise OSError(str(error)) from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an answer: {error!r}") from error


def _selector(matchers: Matchers) -> str:
    """The GPUs' fields as PromQL names them: quotes and escapes are those of JSON."""
    wanted = {"__name__": "|".join(GPU_FIELDS)}
    wanted |= {name: "|".join(map(re.escape, values)) for name, values in matchers.items()}
    return "{" + ",".join(f"{name}=~{json.dumps(pattern)}" for name, pattern in wanted.items()) + "}"


def prometheus_session() -> requests.Session:
    """Asks directly, and refuses an answer that says it lacks something."""
    session = _session()
    session.hooks["response"].append(_refuse_partial)
    return session


def _refuse_partial(response: requests.Response, *_: Any, **__: Any) -> None:
    if warnings := response.json().get("warnings"):
        raise PartialAnswer("; ".join(warnings))


class Nvml:
    """The devices of this machine through NVIDIA's library, under the labels that DCGM gives them.

    Raises Unwatchable when the library is not here, or no device is the target's.
    """

    name: str = "nvml"
    clock: Clock = "monotonic"
    total, simulated = "nvmlDeviceGetMemoryInfo.total", False

    def __init__(self, matchers: Matchers) -> None:
        try:
            import pynvml  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise Unwatchable("gpu: nvml needs the package nvidia-ml-py, which is not installed") from error
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            named = [({"gpu": str(n), "UUID": pynvml.nvmlDeviceGetUUID(one)}, one) for n, one in enumerate(handles)]
        except pynvml.NVMLError as error:
            raise Unwatchable(f"NVML gives no devices: {error}") from error
        self._handles = {labels["UUID"]: handle for labels, handle in named if serves(labels, matchers)}
        self.gpus = sorted(self._handles)
        if not self.gpus:
            raise Unwatchable("NVML has no device that serves")

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
