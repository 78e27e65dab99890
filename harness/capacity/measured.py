"""What one GPU serves: assumed, or from a run, where it is the rate of good answers in steady state over the GPUs.

A measured rate is one that the gates held at, not the highest: a run says nothing of what it did not try. It refuses a
run that did not pass, for a rate at which a gate fails is no capacity, and one whose replicas it cannot count.
"""

from dataclasses import dataclass
from pathlib import Path

from harness import evidence, timeline
from harness.capacity.order import Order
from harness.judge import measures
from harness.model import Judgement, Outcome, UsageError
from harness.targets import base


@dataclass(frozen=True)
class GpuRate:
    """What one GPU serves, and where that is from; `served_per_s` is the whole run's."""

    per_gpu_per_s: float
    run: str = ""
    served_per_s: float = 0.0
    replicas: int = 0
    simulated: bool = False

    def told(self) -> str:
        """In one sentence, with what it is not."""
        if not self.run:
            return f"A GPU serves {self.per_gpu_per_s:g}/s: assumed, not measured."
        line = (
            f"A GPU serves {self.per_gpu_per_s:.2f}/s at least: {self.run} passed with {self.served_per_s:.2f}/s on "
            f"{self.replicas} replicas, and more was not tried."
        )
        return f"{line} SIMULATED: no real GPU was measured." if self.simulated else line

    def as_json(self) -> dict[str, object]:
        told: dict[str, object] = {"rate_per_gpu_per_s": self.per_gpu_per_s, "measured": bool(self.run)}
        told["simulated"] = self.simulated
        seen: dict[str, object] = {"run": self.run, "served_per_s": self.served_per_s, "replicas": self.replicas}
        return told | seen if self.run else told


def rate(order: Order) -> GpuRate:
    """The rate that an order assumes or names a run for. Raises UsageError when the run cannot tell it."""
    if order.run is None:
        assert order.rate_per_gpu_per_s is not None
        return GpuRate(order.rate_per_gpu_per_s)
    verdict = evidence.read_verdict(order.run)
    if verdict.verdict != Judgement.PASS:
        raise UsageError(f"{order.run} is {verdict.verdict}: a rate at which the gates do not hold is no capacity")
    seen = timeline.read(order.run)
    if seen.damage:
        raise UsageError(f"{order.run} cannot be counted: {seen.damage[0]}")
    served_per_s = _served_per_s(order.run, seen)
    replicas = order.replicas or len(base.load(str(order.run / "target.yaml")).engines)
    if not replicas:
        raise UsageError(f"the target of {order.run} lists no engines: say how many `replicas` served")
    each = served_per_s / (replicas * order.gpus_per_replica)
    return GpuRate(each, str(order.run), served_per_s, replicas, bool(seen.run.get("simulated")))


def _served_per_s(run_dir: Path, seen: timeline.Timeline) -> float:
    """Good answers in steady state, by the second."""
    window = seen.windows.get("steady")
    if window is None:
        raise UsageError(f"{run_dir} has no steady state to take a rate from")
    good = measures.good_requests(seen, window) & (seen.observations["outcome"] == Outcome.OK)
    if not good.any():
        raise UsageError(f"{run_dir} served nothing in its steady state")
    return float(good.sum()) / (window.end_s - window.start_s)
