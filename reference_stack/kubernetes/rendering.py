"""The files of the manifests that follow from code, each where kustomize reads it: Envoy's, Prometheus's, the rules."""

from pathlib import Path
from typing import Any

import yaml

from reference_stack.kubernetes import envoy, overlays
from reference_stack.monitoring import prometheus, rules

HERE = Path(__file__).parent
NAMESPACE = "llm-serving"
HEAD = "# Written by `python -m reference_stack.kubernetes`; change what it is made of, not this.\n"


def documents() -> dict[str, Any]:
    """Every such file, by its path from here."""
    return {
        **overlays.documents(),
        "base/gateway/envoy.yaml": envoy.config(),
        "base/prometheus/prometheus.yml": prometheus.in_cluster(["rules.yml", "gpu_rules.yml"], NAMESPACE),
        "base/prometheus/rules.yml": rules.in_cluster(),
    }


def text(document: Any) -> str:
    """A document as its file holds it."""
    return HEAD + yaml.safe_dump(document, sort_keys=False, width=120)


def write(root: Path = HERE) -> None:
    """Write them all."""
    for path, document in documents().items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text(document))
