"""What Prometheus scrapes, and which rules it evaluates: of the local stack, and of one in a cluster.

Pure functions. The names of the jobs are part of the rules' language (`up{job="engine"}`), so both give the same ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any

INTERVAL = "1s"  # of the local stack: gates read it in windows of seconds
CLUSTER_INTERVAL = "5s"
DCGM_PORT = 9400


def config(scraped: Mapping[str, Sequence[str]], rule_files: Sequence[str] = ()) -> dict[str, Any]:
    """The document for jobs of `host:port/path` addresses, by job name; all in a job share its path.

    `rule_files` are relative to where the document will lie.
    """
    return {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": list(rule_files),
        "scrape_configs": [_job(name, addresses) for name, addresses in scraped.items()],
    }


def _job(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    paths = {address.partition("/")[2] for address in addresses}
    if len(paths) != 1:
        raise ValueError(f"job {name}: one path, not {sorted(paths)}")
    return {
        "job_name": name,
        "metrics_path": "/" + paths.pop(),
        "static_configs": [{"targets": [address.partition("/")[0] for address in addresses]}],
    }


def in_cluster(rule_files: Sequence[str], namespace: str) -> dict[str, Any]:
    """The document for a Prometheus among the pods of `namespace`; GPUs are those of the DCGM exporter, anywhere."""
    return {
        "global": {
            "scrape_interval": CLUSTER_INTERVAL,
            "scrape_timeout": CLUSTER_INTERVAL,
            "evaluation_interval": CLUSTER_INTERVAL,
        },
        "rule_files": list(rule_files),
        "scrape_configs": [
            _pods("engine", "/metrics", "http", namespace),
            _pods("gateway", "/stats/prometheus", "stats", namespace),
            _pods("guard", "/guard/metrics", "stats", namespace, component="gateway"),
            _pods("orchestrator", "/metrics", "http", namespace),
            _pods("qdrant", "/metrics", "http", namespace),
            _gpus(namespace),
        ],
    }


def _pods(job: str, path: str, port: str, namespace: str, component: str | None = None) -> dict[str, Any]:
    """The pods of one component, at their port of that name; each series says its pod, node and release."""
    return {
        "job_name": job,
        "metrics_path": path,
        "kubernetes_sd_configs": [{"role": "pod", "namespaces": {"names": [namespace]}}],
        "relabel_configs": [
            _keep("pod_label_app_kubernetes_io_component", component or job),
            _keep("pod_container_port_name", port),
            _keep("pod_phase", "Running"),
            _label("pod_name", "pod"),
            _label("pod_node_name", "node"),
            _label("pod_label_harness_release", "release"),
        ],
    }


def _gpus(namespace: str) -> dict[str, Any]:
    """The GPUs that serve: those of other namespaces are others' to watch.

    The DCGM exporter's own labels stand: `pod` and `namespace` are of who uses the GPU, not of the exporter.
    """
    return {
        "job_name": "gpu",
        "honor_labels": True,
        "kubernetes_sd_configs": [{"role": "pod"}],
        "relabel_configs": [
            _keep("pod_label_app", "nvidia-dcgm-exporter"),
            _keep("pod_container_port_number", str(DCGM_PORT)),
        ],
        "metric_relabel_configs": [{"action": "keep", "source_labels": ["namespace"], "regex": namespace}],
    }


def _keep(source: str, value: str) -> dict[str, Any]:
    return {"action": "keep", "source_labels": [f"__meta_kubernetes_{source}"], "regex": value}


def _label(source: str, name: str) -> dict[str, Any]:
    return {"source_labels": [f"__meta_kubernetes_{source}"], "target_label": name}
