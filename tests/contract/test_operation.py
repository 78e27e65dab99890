"""What an operator sees: health, models, tokenize, metrics, and what happens when a client goes away."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.contract.conftest import Engine

LONG = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}
REQUEST = ("model_name", "engine")

LATENCY = (
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0 +Inf"
)
FIRST_TOKEN = (
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0 +Inf"
)
BETWEEN_TOKENS = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 +Inf"
TOKENS = "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 1000.0 2000.0 +Inf"
STEP = "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0 +Inf"

GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
COUNTERS = ["num_preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"]
HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": BETWEEN_TOKENS,
    "request_time_per_output_token_seconds": BETWEEN_TOKENS,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "iteration_tokens_total": STEP,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
}


@pytest.fixture
def families(engine: "Engine") -> dict[str, tuple[str, list]]:
    """The metrics page by name, after at least one request: the type and the samples."""
    engine.post("/v1/completions", {"prompt": "hello", "max_tokens": 2, "ignore_eos": True})
    page = engine.get("/metrics").body.decode()
    return {family.name: (family.type, family.samples) for family in text_string_to_metric_families(page)}


@pytest.mark.parametrize("name", GAUGES)
def test_gauges(families: dict[str, tuple[str, list]], name: str) -> None:
    """Each gauge has one series, by model and engine."""
    kind, samples = families[f"vllm:{name}"]
    assert kind == "gauge"
    assert [sample.labels for sample in samples] == [{"model_name": "tiny", "engine": "0"}]


@pytest.mark.parametrize("name", COUNTERS)
def test_counters(families: dict[str, tuple[str, list]], name: str) -> None:
    """Each counter ends in _total, with one series by model and engine."""
    kind, samples = families[f"vllm:{name}"]
    assert kind == "counter"
    totals = [sample for sample in samples if sample.name == f"vllm:{name}_total"]
    assert [sample.labels for sample in totals] == [{"model_name": "tiny", "engine": "0"}]


@pytest.mark.parametrize("name", list(HISTOGRAMS))
def test_histograms(families: dict[str, tuple[str, list]], name: str) -> None:
    """Each histogram has vLLM's buckets, a sum and a count."""
    kind, samples = families[f"vllm:{name}"]
    assert kind == "histogram"
    buckets = [sample.labels["le"] for sample in samples if sample.name.endswith("_bucket")]
    assert " ".join(buckets) == HISTOGRAMS[name]
    assert {f"vllm:{name}_sum", f"vllm:{name}_count"} <= {sample.name for sample in samples}


def test_finished_reasons(families: dict[str, tuple[str, list]]) -> None:
    """Requests are counted by how they ended, and every reason has a series from the start."""
    kind, samples = families["vllm:request_success"]
    assert kind == "counter"
    totals = {s.labels["finished_reason"]: s.value for s in samples if s.name == "vllm:request_success_total"}
    assert set(totals) == {"stop", "length", "abort", "error", "repetition"}
    assert totals["length"] >= 1


def test_cache_config(families: dict[str, tuple[str, list]]) -> None:
    """The configuration of the KV cache is exported as labels of a gauge that is 1."""
    kind, (sample,) = families["vllm:cache_config_info"]
    assert (kind, sample.value) == ("gauge", 1)
    wanted = {"engine", "block_size", "gpu_memory_utilization", "num_gpu_blocks", "enable_prefix_caching"}
    assert wanted <= set(sample.labels)
    assert int(sample.labels["num_gpu_blocks"]) > 0
    assert 0 < float(sample.labels["gpu_memory_utilization"]) < 1


def test_no_invented_metric(engine: "Engine", families: dict[str, tuple[str, list]]) -> None:
    """The simulation exports the names checked here and no other, so none that vLLM does not have."""
    checked = {f"vllm:{name}" for name in [*GAUGES, *COUNTERS, *HISTOGRAMS, "request_success", "cache_config_info"]}
    exported = {name for name in families if name.startswith("vllm:") and not name.endswith("_created")}
    assert checked <= exported
    if engine.kind == "sim":
        assert exported == checked


def test_tokens_are_counted(engine: "Engine") -> None:
    """A request adds its prompt tokens, its output tokens and one of each per-request observation."""
    names = ["prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count"]
    names += ["time_to_first_token_seconds_count", "inter_token_latency_seconds_count"]
    before = [engine.sample(f"vllm:{name}") for name in names]
    engine.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True})
    after = [engine.sample(f"vllm:{name}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 4, 1, 1, 3]


def test_health(engine: "Engine") -> None:
    """/health is 200 with an empty body."""
    reply = engine.get("/health")
    assert (reply.status, reply.body) == (200, b"")


def test_models(engine: "Engine") -> None:
    """/v1/models lists the one served model with its context length."""
    body = engine.get("/v1/models").json
    assert list(body) == ["object", "data"]
    (card,) = body["data"]
    assert list(card) == ["id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"]
    assert (card["id"], card["max_model_len"], card["owned_by"]) == ("tiny", engine.max_model_len, "vllm")
    assert len(card["permission"]) == 1


def test_version(engine: "Engine") -> None:
    """/version names vLLM 0.32.0, and the simulation says that it is one."""
    version = engine.get("/version").json["version"]
    assert version.startswith("0.32.0")
    assert ("simulated" in version) == (engine.kind == "sim")


def test_tokenize(engine: "Engine") -> None:
    """/tokenize gives the count, the ids with BOS, and the context length, for a text of any length."""
    body = engine.post("/tokenize", {"model": "tiny", "prompt": "hello"}).json
    assert list(body) == ["count", "max_model_len", "tokens", "token_strs"]
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == engine.max_model_len
    bare = engine.post("/tokenize", {"prompt": "hello", "add_special_tokens": False}).json
    assert body["tokens"][1:] == bare["tokens"]
    assert engine.count({"prompt": "hello " * 5000}) > engine.max_model_len


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_disconnect_aborts(engine: "Engine", stream: bool) -> None:
    """When the client goes away its request stops running at once, and its cache is free."""

    def running() -> float:
        return engine.sample("vllm:num_requests_running")

    def leave() -> None:
        with engine.asked("/v1/completions", LONG | {"stream": True}) as response:
            assert response.readline().startswith(b"data: ")
            until(lambda: running() == 1, "the request runs", 10)

    def leave_unread() -> None:
        import http.client
        import json

        connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(LONG), {"Content-Type": "application/json"})
        until(lambda: running() == 1, "the request runs", 10)
        connection.close()

    served = engine.sample("vllm:e2e_request_latency_seconds_count")
    leave() if stream else leave_unread()
    until(lambda: running() == 0, "nothing runs", 5)
    assert engine.sample("vllm:kv_cache_usage_perc") == 0
    assert engine.sample("vllm:e2e_request_latency_seconds_count") == served


def test_requests_share_the_engine(engine: "Engine") -> None:
    """Requests sent together run together, and a short one does not wait for the end of a long one."""
    with engine.asked("/v1/completions", LONG | {"stream": True}) as long:
        assert long.readline().startswith(b"data: ")
        with ThreadPoolExecutor(4) as pool:
            asked = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True}
            replies = list(pool.map(lambda _: engine.post("/v1/completions", asked), range(4)))
        assert [reply.json["usage"]["completion_tokens"] for reply in replies] == [4] * 4
        assert engine.sample("vllm:num_requests_running") == 1
