"""What a capacity plan is made from: a small file, the command line over it, or both.

Every figure has its unit, and none has a default that would decide the answer: who leaves the peak out has said that
users come evenly all day. Prices are an hour's, in whatever currency; money comes out in the same.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from harness import document
from harness.document import Document, OneOf
from harness.model import UsageError
from harness.units import Count, Duration, Multiple, Part, Rate, Share, spec

_PRICE = re.compile(r"(\d+(?:\.\d+)?) ?/h")


def price(text: Any) -> float:
    """`0.95/h` -> 0.95 an hour."""
    match = _PRICE.fullmatch(text) if isinstance(text, str) else None
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a price such as 0.95/h")
    return float(match[1])


Price = Annotated[float, BeforeValidator(price)]
Served = Annotated[Rate, Field(gt=0)]
Peak = Annotated[Multiple, Field(ge=1)]


@spec
class Gateways:
    """Machines in front of the GPUs, so many at this price each."""

    count: Count
    price: Price


@spec
class Quantise:
    """The GPUs serve another rate: with quantised weights, a smaller model, or other settings."""

    rate_per_gpu_per_s: Served

    name = "quantise"

    def told(self) -> str:
        return f"{self.rate_per_gpu_per_s:g}/s a GPU"


@spec
class Merge:
    """Several requests become one: so much of their number remains."""

    to: Part

    name = "merge"

    def told(self) -> str:
        return f"to {self.to * 100:g} % of the requests"


@spec
class Route:
    """A share of the requests goes to a smaller model, on GPUs of its own that serve another rate."""

    share: Part
    rate_per_gpu_per_s: Served

    name = "route"

    def told(self) -> str:
        return f"{self.share * 100:g} % at {self.rate_per_gpu_per_s:g}/s a GPU"


WhatIf = Quantise | Merge | Route
_KINDS = {kind.name: kind for kind in (Quantise, Merge, Route)}


@spec
class Order:
    """The keys of a capacity file.

    `requests_per_user` are those of a day, `peak` how many times the day's mean the busiest time brings, `redundancy`
    the GPUs beyond those that the peak asks for. What one GPU serves inside the SLO is assumed, `rate_per_gpu`, or
    measured: `run` is a run directory, `replicas` how many served it where its target does not list them. Replicas of
    several GPUs are bought whole. With `latency`, what a request takes, the plan sizes the gateway's connections too.
    Each of `what_if` changes the plan that those above it have made.
    """

    users: Count
    requests_per_user: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    price: Price
    rate_per_gpu_per_s: Served | None = None
    run: Path | None = None
    replicas: Count | None = None
    peak: Peak = 1.0
    redundancy: Share = 0.0
    gpus_per_replica: Count = 1
    gateways: Gateways | None = None
    latency_s: Duration | None = None
    what_if: list[Annotated[WhatIf, OneOf(_KINDS)]] = field(default_factory=list)


def read(path: Path | None, flags: Mapping[str, Any], what_if: Sequence[str]) -> Order:
    """The order in a file, with flags (by key, None where not given) in place of its keys, and one source of the rate.

    `what_if` are further ones as a command line has them: `quantise=78/s`, `merge=70%`, `route=95%@160/s`.
    Raises UsageError, with file and line where a file is to blame.
    """
    found = document.read(path) if path else Document(Path("the command line"), {}, {(): 1})
    if not isinstance(found.value, dict):
        raise UsageError("a capacity file is keys with values", f"{path}:1")
    given = {key: value for key, value in flags.items() if value is not None}
    if what_if:
        before = found.value.get("what_if", [])
        given["what_if"] = [*(before if isinstance(before, list) else [before]), *map(_what_if, what_if)]
    lines = {(key,): 1 for key in given} | dict(found.lines)
    try:
        order = Document(found.path, found.value | given, lines).parse(Order)
    except UsageError as mistake:
        if path is None or any(f"`{key}" in mistake.sentence for key in given):
            raise UsageError(f"{mistake.sentence} (on the command line)") from None
        raise
    if (order.rate_per_gpu_per_s is None) == (order.run is None):
        raise UsageError(
            "what a GPU serves is assumed (`rate_per_gpu`) or measured (`run`): say one of them, and only one"
        )
    return order


def _what_if(text: str) -> dict[str, Any]:
    """One what-if of a command line as a file would have it."""
    name, _, value = text.partition("=")
    if name == "quantise":
        return {name: {"rate_per_gpu": value}}
    if name == "merge":
        return {name: {"to": value}}
    if name == "route" and "@" in value:
        share, _, rate = value.partition("@")
        return {name: {"share": share, "rate_per_gpu": rate}}
    raise UsageError(f"--what-if {text}: known are quantise=78/s, merge=70% and route=95%@160/s")
