"""Faults between the gateway and its engines, by the fault filter of the local Envoy: late requests, aborted ones.

The filter is always there and off; runtime values turn it on, for every request alike, also on connections that were
open before. The values are in Envoy's memory only, so an Envoy that is gone has no fault. What it counts and what a
request of our own meets are the evidence, never its word that it took the values.
"""

import contextlib
import json
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from harness.chaos.fault import Aim, Fault, Refused, Unproven
from harness.targets import envoy
from harness.targets.base import Target
from harness.targets.local import Stack, admin_url, ticks
from harness.units import Part, Period, spec

PREFIX = "fault.engines."  # of the filter's runtime keys
COUNTERS = "http.gateway.fault."
BASELINE_PROBES = 5
APPLIED_LIMIT_S = 20.0
UNDONE_LIMIT_S = 30.0
_MOST_MS = 60_000
_PARTS = 1_000_000


@spec
class _ByGateway(Fault):
    """Hits a `share` of the requests that the gateway lets through, retries not counted again."""

    share: Part = 1.0

    def resolve(self, target: Target) -> Aim:
        if target.kind != "local":
            raise Refused(f"the gateway of a target of kind {target.kind} has no fault filter that we may set")
        admin = admin_url(target)
        if left := envoy.values(admin, PREFIX):
            raise Refused(f"the gateway has a fault already: {left}")
        usual_s = min(_probe(target)[1] for _ in range(BASELINE_PROBES))
        return Aim(
            targets=(f"{target.url} on its way to {', '.join(target.engines)}",),
            radius=f"{'all' if self.share == 1 else f'{self.share:.1%} of all'} requests {self._harm()}",
            undo=f"curl -X POST '{admin}/runtime_modify?{'&'.join(f'{key}=' for key in self._values())}'",
            state={
                "stack": str(Stack().state),
                "admin": admin,
                "counter": self._counter(),
                "before": _count(admin, self._counter()),
                "usual_s": usual_s,
            },
        )

    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        envoy.modify(state["admin"], self._values())

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Envoy counts it, and a request of our own meets it."""
        rose, probes, met = 0, 0, None
        for _ in ticks(APPLIED_LIMIT_S):
            status, took_s = _probe(target)
            probes, met = probes + 1, met or self._met(status, took_s)
            rose = _count(state["admin"], state["counter"]) - state["before"]
            if met and rose > 0:
                model = {"model": self._model(), "upstream": "all", "share": self.share}
                return {**model, "usual_s": state["usual_s"], "probes": probes, "probe": met, state["counter"]: rose}
        raise Unproven(f"{probes} requests did not meet it, and Envoy counts {rose} of {state['counter']}")

    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        with contextlib.suppress(ConnectionRefusedError):  # no Envoy, no values; another one begins without them
            envoy.modify(state["admin"], dict.fromkeys(self._values(), ""))

    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Envoy has no such value, and requests of our own get through as they did."""
        stack, seen = Stack(Path(state["stack"])), "nothing"
        for _ in ticks(UNDONE_LIMIT_S):
            try:
                if not (keys := envoy.values(state["admin"], PREFIX)):
                    probes = [_probe(target) for _ in range(BASELINE_PROBES)]
                    if not all(self._met(*probe) for probe in probes):  # one may be slow, or refused, by itself
                        return {"keys": [], "probe_s": min(took_s for _, took_s in probes), "usual_s": state["usual_s"]}
                seen = f"values {keys}" if keys else f"requests that meet it: {probes}"
            except OSError as error:
                seen = str(error)
                if not stack.is_up():
                    return {"keys": [], "gone": "the stack is down, and its gateway's values with it"}
        raise Unproven(f"the gateway still has {seen}")

    @abstractmethod
    def _harm(self) -> str:
        """What becomes of a request, in words."""

    @abstractmethod
    def _model(self) -> str:
        """What exactly the filter does, for the report."""

    @abstractmethod
    def _counter(self) -> str:
        """The statistic of Envoy that counts it."""

    @abstractmethod
    def _values(self) -> dict[str, str]:
        """The runtime values that make it."""

    @abstractmethod
    def _met(self, status: int, took_s: float) -> dict[str, Any] | None:
        """What a request of our own met of it; None when nothing."""


@spec
class Latency(_ByGateway):
    """Requests wait for `delay` at the gateway before they go to an engine: time to first token grows by that, the
    stream after it does not slow down."""

    delay_s: Annotated[Period, Field(ge=0.001, le=_MOST_MS / 1000)] = 0.1

    def _harm(self) -> str:
        return f"start {self.delay_s * 1000:g} ms later"

    def _model(self) -> str:
        return f"the request's start delayed by {self.delay_s * 1000:g} ms at the gateway; later chunks are not"

    def _counter(self) -> str:
        return "delays_injected"

    def _values(self) -> dict[str, str]:
        return {f"{PREFIX}delay_ms": str(round(self.delay_s * 1000)), f"{PREFIX}delay_percent": _share(self.share)}

    def _met(self, status: int, took_s: float) -> dict[str, Any] | None:
        return {"took_s": took_s} if took_s >= self.delay_s else None


@spec
class Aborts(_ByGateway):
    """Requests are answered with `status` by the gateway itself, and never reach an engine."""

    share: Part = 0.1
    status: Annotated[int, Field(ge=400, le=599)] = 503

    def _harm(self) -> str:
        return f"are answered {self.status} by the gateway"

    def _model(self) -> str:
        return f"the gateway answers {self.status} instead of asking an engine"

    def _counter(self) -> str:
        return "aborts_injected"

    def _values(self) -> dict[str, str]:
        return {f"{PREFIX}abort_status": str(self.status), f"{PREFIX}abort_percent": _share(self.share)}

    def _met(self, status: int, took_s: float) -> dict[str, Any] | None:
        return {"status": status} if status == self.status else None


# What it takes ----------------------------------------------------------------------------------------------------


def _share(share: float) -> str:
    """A share as Envoy reads it, finer than its whole percents."""
    return json.dumps({"numerator": round(share * _PARTS), "denominator": "MILLION"})


def _count(admin: str, counter: str) -> int:
    """A counter of the filter. Raises OSError."""
    return envoy.counter(admin, f"{COUNTERS}{counter}")


def _probe(target: Target) -> tuple[int, float]:
    """Status and seconds of a small request on its way to an engine. Raises OSError."""
    start_s = time.monotonic()
    status, _ = envoy.exchange(f"{target.url}/v1/models", "GET", target.sent_headers())
    return status, time.monotonic() - start_s
