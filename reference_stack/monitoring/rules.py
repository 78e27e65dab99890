"""When somebody must be told: the alerts of a serving stack, as one pure function to a Prometheus rule file.

What decides is what users and operators see: replicas in service, the gateway's own latency, GPU memory, what the
gateway refuses, what waits. Each alert names its runbook. It refuses to page for a moment: every alert has a `for`.
In a cluster there is one group more, a candidate release against the one that serves. Beside them, the series that
dashboards draw, recorded under one name each.
"""

import math
from dataclasses import dataclass
from typing import Any

RUNBOOKS = "reference_stack/monitoring/runbooks"
RECORDED_SPAN_S = 60  # what a dashboard's point looks back on
LEAST_FOR_S = 1
LEAST_SPAN_S = 5  # a rate needs a few scrapes, however short the test

# What the gateway and the engines said, in requests a second. A counter that never counted is not there: that is 0.
_REJECTED = '(sum(rate(gateway_requests_total{decision="rejected"}[SPAN])) or vector(0))'
_DECIDED = "sum(rate(gateway_requests_total[SPAN]))"
_SLIPPED = 'sum(rate(envoy_cluster_upstream_rq_xx{envoy_cluster_name="engines",envoy_response_code_class="4"}[SPAN]))'
_TOTAL_MIB = (
    "(DCGM_FI_DEV_FB_FREE + DCGM_FI_DEV_FB_USED + (DCGM_FI_DEV_FB_RESERVED or 0 * DCGM_FI_DEV_FB_FREE))"  # as harness
)


@dataclass(frozen=True)
class Alert:
    """A condition that must hold for `for_s` before it fires; SPAN in it is the time that its rates look back on."""

    name: str
    condition: str
    for_s: float
    severity: str
    summary: str
    span_s: float = 300

    def rule(self, scale: float) -> dict[str, Any]:
        """The rule as Prometheus reads it, its times multiplied by `scale` and rounded up to whole seconds."""
        for_s, span_s = max(LEAST_FOR_S, _whole(self.for_s * scale)), max(LEAST_SPAN_S, _whole(self.span_s * scale))
        return {
            "alert": self.name,
            "expr": self.condition.replace("SPAN", f"{span_s}s"),
            "for": f"{for_s}s",
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": f"{RUNBOOKS}/{self.name}.md"},
        }


def _whole(span_s: float) -> int:
    return math.ceil(round(span_s, 6))


ALERTS = (
    Alert(
        "ReplicaDown",
        # A process that is gone is not scraped; one that is frozen or wrong fails the gateway's canary.
        'up{job="engine"} == 0 or envoy_cluster_membership_healthy{envoy_cluster_name="engines"} '
        '< envoy_cluster_membership_total{envoy_cluster_name="engines"}',
        for_s=30,
        severity="critical",
        summary="A replica serves nobody ({{ $labels.job }} {{ $labels.instance }})",
    ),
    Alert(
        "HighLatencyP95",
        # 1200 ms is a boundary of this histogram (gateway/envoy.py), so that which side the P95 is on is no estimate.
        "histogram_quantile(0.95, sum by (le) "
        '(rate(envoy_http_downstream_rq_time_bucket{envoy_http_conn_manager_prefix="gateway"}[SPAN]))) / 1000 > 1.2',
        for_s=300,
        severity="warning",
        summary="P95 at the gateway is {{ $value | humanizeDuration }}, over 1.2 s",
    ),
    Alert(
        "GpuMemoryHigh",
        f"1 - DCGM_FI_DEV_FB_FREE / {_TOTAL_MIB} > 0.85",
        for_s=120,
        severity="critical",
        summary="{{ $value | humanizePercentage }} of the memory of GPU {{ $labels.gpu }} is taken, over 85 %",
    ),
    Alert(
        "RejectShareUnusual",
        # Under half: the share of bad requests that the gateway stopped, for as long as those that engines had to
        # refuse matter (1 % of all). Half of all requests, as one may read it, would page a service with good clients.
        f"({_REJECTED} / ({_REJECTED} + {_SLIPPED}) < 0.5 and {_SLIPPED} / {_DECIDED} > 0.01) "
        f"or {_REJECTED} / {_DECIDED} > 0.95",
        for_s=180,
        severity="warning",
        summary="The gateway's share of rejections is {{ $value | humanizePercentage }}, outside 50 .. 95 %",
    ),
    Alert(
        "QueueTooLong",
        "sum(vllm:num_requests_waiting) > 100",
        for_s=300,
        severity="warning",
        summary="{{ $value }} requests wait in the engines, over 100",
    ),
    Alert(
        "EngineStalled",
        # A frozen engine whose server goes on: /health is 200, requests are said to run, and no token comes.
        "vllm:num_requests_running > 0 and rate(vllm:generation_tokens_total[SPAN]) == 0",
        for_s=30,
        severity="critical",
        summary="{{ $value }} requests run on {{ $labels.instance }} and no token comes",
        span_s=30,
    ),
    Alert(
        "MetricsMissing",
        # What is not measured fires nothing, so its absence must. Engines that are down are ReplicaDown's.
        'up{job!="engine"} == 0 or absent(up{job="engine"}) or absent(up{job="gateway"}) or absent(up{job="guard"})',
        for_s=120,
        severity="warning",
        summary="{{ $labels.job }} {{ $labels.instance }} is not scraped: alerts that need it are blind",
    ),
)


def _of_release(name: str, release: str) -> str:
    return f'sum(rate({name}{{release="{release}"}}[SPAN]))'


def _errors(cluster: str) -> str:
    """The share of answers with 5xx; a counter that never counted is not there."""
    of = f'envoy_cluster_name="{cluster}"'
    failed = f'(sum(rate(envoy_cluster_upstream_rq_xx{{{of},envoy_response_code_class="5"}}[SPAN])) or vector(0))'
    return f"{failed} / sum(rate(envoy_cluster_upstream_rq_completed{{{of}}}[SPAN]))"


def _p95_ms(cluster: str) -> str:
    buckets = f'rate(envoy_cluster_upstream_rq_time_bucket{{envoy_cluster_name="{cluster}"}}[SPAN])'
    return f"histogram_quantile(0.95, sum by (le) ({buckets}))"


def _tokens_an_answer(release: str) -> str:
    """Tokens of an answer, without the answers of one token: those are the canary's."""
    total, count, single = (
        _of_release(f"vllm:request_generation_tokens_{part}", release) for part in ("sum", "count", "bucket")
    )
    single = single.replace("{", '{le="1.0",')
    return f"({total} - {single}) / ({count} - {single})"


def _named(measure: str, condition: str) -> str:
    return f'label_replace({condition}, "measure", "{measure}", "", "")'


_TOKENS_RATIO = f"({_tokens_an_answer('candidate')}) / ({_tokens_an_answer('stable')})"

# A release that has a share of the users beside the one that serves. It must hold for as long as it looks back, so that
# what happened before it got its share says nothing.
CANDIDATE = (
    Alert(
        "CandidateWorse",
        _named("errors", f"{_errors('candidate')} > 0.01 + ({_errors('engines')})")
        + " or "
        + _named("latency", f"{_p95_ms('candidate')} / {_p95_ms('engines')} > 1.25")
        + " or "
        + _named("tokens", f"abs({_TOKENS_RATIO} - 1) > 0.25"),
        for_s=1200,
        severity="warning",
        summary="The candidate is worse than the release that serves, by its {{ $labels.measure }} ({{ $value }})",
        span_s=1200,
    ),
)


# What dashboards draw: level:metric:operation, as Prometheus's own practice has it.
RECORDED = {
    "gateway:latency_seconds:p95": "histogram_quantile(0.95, sum by (le) "
    '(rate(envoy_http_downstream_rq_time_bucket{envoy_http_conn_manager_prefix="gateway"}[SPAN]))) / 1000',
    "gateway:rejected:share": f"{_REJECTED} / {_DECIDED}",
    "gateway:decisions:rate": "sum by (decision, reason) (rate(gateway_requests_total[SPAN]))",
    "engine:first_token_seconds:p95": "histogram_quantile(0.95, sum by (le) "
    "(rate(vllm:time_to_first_token_seconds_bucket[SPAN])))",
    "engine:tokens:rate": "sum by (instance) (rate(vllm:generation_tokens_total[SPAN]))",
    "engine:waiting:sum": "sum(vllm:num_requests_waiting)",
    "gpu:memory_taken:share": f"1 - DCGM_FI_DEV_FB_FREE / {_TOTAL_MIB}",
}


def document(scale: float = 1.0) -> dict[str, Any]:
    """The rule file. `scale` multiplies every time in it: 1 in production, less where minutes must be seconds."""
    return {"groups": [group("serving", ALERTS, scale), _recorded(scale)]}


def in_cluster() -> dict[str, Any]:
    """The rule file of a cluster: the same, and a candidate release."""
    return {"groups": [*document()["groups"], group("release", CANDIDATE, 1.0)]}


def group(name: str, alerts: tuple[Alert, ...], scale: float) -> dict[str, Any]:
    """Alerts that are evaluated together."""
    return {"name": name, "rules": [alert.rule(scale) for alert in alerts]}


def _recorded(scale: float) -> dict[str, Any]:
    span_s = max(LEAST_SPAN_S, _whole(RECORDED_SPAN_S * scale))
    rules = [{"record": name, "expr": expr.replace("SPAN", f"{span_s}s")} for name, expr in RECORDED.items()]
    return {"name": "recorded", "rules": rules}
