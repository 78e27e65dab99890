"""What an operator looks at, as Grafana's JSON: one page with three panels, and a page behind it for each layer.

The first page answers one question: are users well? Latency, GPU memory, what is refused; each with the line at which
its alert fires, and the alerts as marks in time. Everything else is one click away. The files in `grafana/` are written
by `python -m reference_stack.monitoring`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "grafana"
SCHEMA = 39  # Grafana 11; older ones are migrated as they are read
WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True)
class Panel:
    """One graph: queries by what their lines are called (Grafana's `{{label}}`), a unit of Grafana's, and where the
    alert's line is, if there is one."""

    title: str
    queries: Mapping[str, str]
    unit: str
    line: float | None = None
    about: str = ""


@dataclass(frozen=True)
class Dashboard:
    """A page: `across` panels side by side."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    across: int = 3


def p95(histogram: str, by: str = "") -> str:
    """The query of a histogram's P95."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile(0.95, sum by ({labels}) (rate({histogram}[$__rate_interval])))"


def rate(counter: str, by: str) -> str:
    """The query of a counter's rate by a label."""
    return f"sum by ({by}) (rate({counter}[$__rate_interval]))"


_ENGINES = 'envoy_cluster_name="engines"'
_GATEWAY = 'envoy_http_conn_manager_prefix="gateway"'

DASHBOARDS = (
    Dashboard(
        "serving",
        "Are users well?",
        (
            Panel(
                "P95 of a response",
                {"P95": "gateway:latency_seconds:p95"},
                "s",
                1.2,
                "To the last byte, at the gateway, refusals among them. HighLatencyP95 after 5 minutes over the line.",
            ),
            Panel(
                "GPU memory taken",
                {"GPU {{gpu}}": "gpu:memory_taken:share"},
                "percentunit",
                0.85,
                "1 - free / total. Flat at any load; a rise is a leak or somebody else. GpuMemoryHigh after 2 minutes.",
            ),
            Panel(
                "Requests refused",
                {"refused": "gateway:rejected:share"},
                "percentunit",
                0.95,
                "Of all that the guard decided. RejectShareUnusual also looks at what engines had to refuse.",
            ),
        ),
    ),
    Dashboard(
        "gateway",
        "Gateway",
        (
            Panel("Decisions", {"{{decision}} {{reason}}": "gateway:decisions:rate"}, "reqps"),
            Panel(
                "Answers",
                {
                    "{{envoy_response_code_class}}xx": rate(
                        f"envoy_http_downstream_rq_xx{{{_GATEWAY}}}", "envoy_response_code_class"
                    )
                },
                "reqps",
            ),
            Panel(
                "Replicas in service",
                {
                    "in service": f"sum(envoy_cluster_membership_healthy{{{_ENGINES}}})",
                    "all": f"sum(envoy_cluster_membership_total{{{_ENGINES}}})",
                },
                "none",
            ),
            Panel(
                "P95, whole and at the engines",
                {
                    "whole": p95(f"envoy_http_downstream_rq_time_bucket{{{_GATEWAY}}}"),
                    "engines": p95(f"envoy_cluster_upstream_rq_time_bucket{{{_ENGINES}}}"),
                },
                "ms",
                about="What lies between the two is the gateway's: the guard, or a fault left in its runtime.",
            ),
            Panel(
                "Tried again, shed",
                {
                    "retries": rate(f"envoy_cluster_upstream_rq_retry{{{_ENGINES}}}", "envoy_cluster_name"),
                    "shed": rate(f"envoy_cluster_upstream_rq_pending_overflow{{{_ENGINES}}}", "envoy_cluster_name"),
                },
                "reqps",
            ),
            Panel(
                "Under way",
                {
                    "at the gateway": f"sum(envoy_http_downstream_rq_active{{{_GATEWAY}}})",
                    "at the engines": f"sum(envoy_cluster_upstream_rq_active{{{_ENGINES}}})",
                },
                "none",
            ),
        ),
    ),
    Dashboard(
        "engines",
        "Engines",
        (
            Panel("Requests that run", {"{{instance}}": "vllm:num_requests_running"}, "none"),
            Panel(
                "Requests that wait",
                {"{{instance}}": "vllm:num_requests_waiting", "all": "engine:waiting:sum"},
                "none",
                100,
            ),
            Panel("KV cache in use", {"{{instance}}": "vllm:kv_cache_usage_perc"}, "percentunit"),
            Panel(
                "P95 to the first token",
                {
                    "all": "engine:first_token_seconds:p95",
                    "{{instance}}": p95("vllm:time_to_first_token_seconds_bucket", "instance"),
                },
                "s",
            ),
            Panel(
                "P95 between tokens", {"{{instance}}": p95("vllm:inter_token_latency_seconds_bucket", "instance")}, "s"
            ),
            Panel("P95 in the queue", {"{{instance}}": p95("vllm:request_queue_time_seconds_bucket", "instance")}, "s"),
            Panel("Tokens made", {"{{instance}}": "engine:tokens:rate"}, "short"),
            Panel("Tokens read", {"{{instance}}": rate("vllm:prompt_tokens_total", "instance")}, "short"),
            Panel(
                "Answers, preemptions",
                {
                    "{{finished_reason}}": rate("vllm:request_success_total", "finished_reason"),
                    "preempted": "sum(rate(vllm:num_preemptions_total[$__rate_interval]))",
                },
                "reqps",
            ),
        ),
    ),
    Dashboard(
        "gpus",
        "GPUs",
        (
            Panel("Memory taken", {"GPU {{gpu}}": "gpu:memory_taken:share"}, "percentunit", 0.85),
            Panel(
                "A kernel is there",
                {"GPU {{gpu}}": "DCGM_FI_DEV_GPU_UTIL / 100"},
                "percentunit",
                about="Says nothing about work: compare with the next two.",
            ),
            Panel(
                "Tensor cores at work",
                {"GPU {{gpu}}": "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"},
                "percentunit",
                0.5,
                "High while prompts are read.",
            ),
            Panel(
                "Memory at work",
                {"GPU {{gpu}}": "DCGM_FI_PROF_DRAM_ACTIVE"},
                "percentunit",
                about="High while tokens are made: decoding is bound by it.",
            ),
        ),
        across=2,
    ),
)


def files() -> dict[str, str]:
    """Every dashboard as Grafana reads it, by the name of its file."""
    return {f"{one.uid}.json": json.dumps(document(one), indent=1) + "\n" for one in DASHBOARDS}


def document(of: Dashboard) -> dict[str, Any]:
    """One dashboard."""
    return {
        "uid": of.uid,
        "title": of.title,
        "tags": ["llm-serving"],
        "schemaVersion": SCHEMA,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "annotations": {"list": [_alerts()]},
        "links": [{"title": "Pages", "type": "dashboards", "tags": ["llm-serving"], "keepTime": True}],
        "panels": [_panel(panel, number, of.across) for number, panel in enumerate(of.panels)],
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertstate="firing"}',
        "titleFormat": "{{alertname}}",
    }


def _panel(panel: Panel, number: int, across: int) -> dict[str, Any]:
    width, height = WIDTH // across, 8
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.line is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.line}]
        defaults |= {
            "thresholds": {"mode": "absolute", "steps": steps},
            "custom": {"thresholdsStyle": {"mode": "line"}},
        }
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {"x": number % across * width, "y": number // across * height, "w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + k), "datasource": _SOURCE, "expr": query, "legendFormat": name}
            for k, (name, query) in enumerate(panel.queries.items())
        ],
    }
