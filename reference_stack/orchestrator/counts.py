"""What an orchestrator says of itself, for Prometheus: every decision by its reason.

Counters and histograms only: they add up over workers, and a worker that was killed takes nothing back.
"""

import os

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

SHARED_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"  # set before the first import, the workers' values are files in it

_SECONDS = (0.05, 0.1, 0.25, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)


class Counts:
    """The metrics of one worker, and the page with those of all."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "orchestrator_requests_total", "Requests, by how they ended.", ["status", "reason"], registry=registry
        )
        self.routed = Counter(
            "orchestrator_routed_total", "Requests sent on, by pool and why.", ["pool", "reason"], registry=registry
        )
        self.tokens = Counter(
            "orchestrator_tokens_total", "Tokens used.", ["pool", "kind", "budget"], registry=registry
        )
        self.dependency_failures = Counter(
            "orchestrator_dependency_failures_total",
            "Questions that a dependency did not answer, and what that meant: open, closed, or without it.",
            ["dependency", "policy"],
            registry=registry,
        )
        self.modules = Counter(
            "orchestrator_modules_total", "What modules did.", ["module", "action"], registry=registry
        )
        self.first_byte = Histogram(
            "orchestrator_first_byte_seconds", "To the first byte.", buckets=_SECONDS, registry=registry
        )
        self.whole = Histogram("orchestrator_request_seconds", "To the last byte.", buckets=_SECONDS, registry=registry)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        if SHARED_DIRECTORY not in os.environ:
            return generate_latest(self._registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)
