"""What the simulated engine says of itself: vLLM 0.32's metrics, by its names, types, labels and buckets.

Only metrics that the simulation can stand behind are here; a name that vLLM exports and this module does not is one
whose value would be invented. The engine's view of time is its own schedule's.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from reference_stack.engine.batching import Scheduler, Sequence, Step
from reference_stack.profiles.memory import BLOCK_TOKENS

LATENCY_S = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
FIRST_TOKEN_S = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
FIRST_TOKEN_S += [20, 40, 80, 160, 640, 2560]
BETWEEN_TOKENS_S = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
STEP_TOKENS = [1.0, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
FINISHED = ["stop", "length", "abort", "error", "repetition"]


class Metrics:
    """The metrics of one replica."""

    def __init__(self, model: str, scheduler: Scheduler) -> None:
        """Export the scheduler's state at each scrape, and what `stepped` and `finished` are told."""
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._state(scheduler)
        self._counters()
        self._times()
        self._sizes(scheduler.profile.vllm.max_model_len)

    def page(self) -> bytes:
        """The exposition page."""
        return generate_latest(self._registry)

    def stepped(self, step: Step) -> None:
        """Count a step: its tokens, its preemptions, and the gaps between tokens."""
        self._preemptions.inc(step.preempted)
        self._step_tokens.observe(step.batch_tokens)
        self._generation_tokens.inc(len(step.sampled))
        for sequence in step.sampled:
            if sequence.gap_s is not None:
                self._inter_token.observe(sequence.gap_s)
                continue
            self._prompt_tokens.inc(sequence.prompt_tokens)
            self._prefix_queries.inc(sequence.prompt_tokens)
            self._first_token.observe(step.ended_s - sequence.arrived_s)

    def finished(self, sequence: Sequence, reason: str, max_tokens: int) -> None:
        """Count a request that has all of its answer; aborted ones are not counted, as in vLLM."""
        assert sequence.scheduled_s is not None
        assert sequence.first_token_s is not None
        assert sequence.last_token_s is not None
        decode_s = sequence.last_token_s - sequence.first_token_s
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._e2e.observe(sequence.last_token_s - sequence.arrived_s)
        self._queue.observe(sequence.scheduled_s - sequence.arrived_s)
        self._prefill.observe(sequence.first_token_s - sequence.scheduled_s)
        self._decode.observe(decode_s)
        self._inference.observe(sequence.last_token_s - sequence.scheduled_s)
        self._per_output_token.observe(decode_s / max(sequence.output_tokens - 1, 1))
        self._request_prompt_tokens.observe(sequence.prompt_tokens)
        self._request_generation_tokens.observe(sequence.output_tokens)
        self._max_tokens.observe(max_tokens)

    def _state(self, scheduler: Scheduler) -> None:
        """Gauges that read the scheduler, and the configuration of its cache."""
        running = self._gauge("num_requests_running", "Number of requests in model execution batches.")
        running.set_function(lambda: len(scheduler.running))
        waiting = self._gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        waiting.set_function(lambda: len(scheduler.waiting))
        usage = self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        usage.set_function(lambda: scheduler.kv_usage)
        profile = scheduler.profile
        config = {
            "engine": "0",
            "block_size": str(BLOCK_TOKENS),
            "gpu_memory_utilization": str(profile.vllm.gpu_memory_utilization),
            "num_gpu_blocks": str(profile.kv_blocks),
            "enable_prefix_caching": "False",
        }
        name, help_text = "vllm:cache_config_info", "Information of the LLMEngine CacheConfig"
        Gauge(name, help_text, config.keys(), registry=self._registry).labels(**config).set(1)

    def _counters(self) -> None:
        self._preemptions = self._counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self._prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self._generation_tokens = self._counter("generation_tokens", "Number of generation tokens processed.")
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens."
        )
        self._counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.")
        self._success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        for reason in FINISHED:
            self._success.labels(**self._labels, finished_reason=reason)

    def _times(self) -> None:
        first, between, total = FIRST_TOKEN_S, BETWEEN_TOKENS_S, LATENCY_S
        self._first_token = self._histogram("time_to_first_token_seconds", "time to first token in seconds.", first)
        self._inter_token = self._histogram("inter_token_latency_seconds", "inter-token latency in seconds.", between)
        self._per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "time_per_output_token_seconds per request.", between
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "e2e request latency in seconds.", total)
        self._queue = self._phase("queue", "WAITING", total)
        self._inference = self._phase("inference", "RUNNING", total)
        self._prefill = self._phase("prefill", "PREFILL", total)
        self._decode = self._phase("decode", "DECODE", total)

    def _sizes(self, max_model_len: int) -> None:
        series = [mantissa * 10**power for power in range(7) for mantissa in (1, 2, 5)]
        tokens = [float(size) for size in series if size <= max_model_len]
        self._step_tokens = self._histogram("iteration_tokens_total", "number of tokens per engine_step.", STEP_TOKENS)
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "prefill tokens per request.", tokens)
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "generation tokens per request.", tokens
        )
        self._max_tokens = self._histogram("request_params_max_tokens", "the max_tokens request parameter.", tokens)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"vllm:{name}", help_text, self._labels, registry=self._registry).labels(**self._labels)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"vllm:{name}", help_text, self._labels, registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, of: str, buckets: list[float]) -> Histogram:
        made = Histogram(f"vllm:{name}", f"Histogram of {of}", self._labels, buckets=buckets, registry=self._registry)
        return made.labels(**self._labels)

    def _phase(self, name: str, phase: str, buckets: list[float]) -> Histogram:
        return self._histogram(f"request_{name}_time_seconds", f"time spent in {phase} phase for request.", buckets)
