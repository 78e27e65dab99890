"""When requests are due: seeded processes that yield moments from 0 for ever, in order.

One process serves the whole run, whatever the number of workers: worker k of W plays every W-th arrival of the one
list, and the union stays what was asked for. Nothing here sleeps, reads a clock, or looks at answers: this is the open
loop. Rates of a curve (ramp, steps) are Poisson's at every moment.
"""

import heapq
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

from pydantic import Field, model_validator

from harness.model import UsageError
from harness.units import Count, Period, Rate, spec

Positive = Annotated[float, Field(gt=0)]
Flow = Annotated[Rate, Field(gt=0)]


class Arrivals(Protocol):
    """What every process can do."""

    def due_s(self, rng: random.Random) -> Iterator[float]:
        """Moments in seconds from 0, ascending, for ever (but for a recording); the same `rng` gives the same."""

    def scaled(self, factor: float) -> Self:
        """The same process at `factor` times the rate."""


@spec
class Constant:
    """One request every 1/rate seconds."""

    rate_per_s: Flow

    def due_s(self, rng: random.Random) -> Iterator[float]:
        return (k / self.rate_per_s for k in count())

    def scaled(self, factor: float) -> Self:
        return replace(self, rate_per_s=self.rate_per_s * factor)


@spec
class Poisson:
    """Many independent users: exponential gaps."""

    rate_per_s: Flow

    def due_s(self, rng: random.Random) -> Iterator[float]:
        return (k / self.rate_per_s for k in _unit_poisson(rng))

    def scaled(self, factor: float) -> Self:
        return replace(self, rate_per_s=self.rate_per_s * factor)


@spec
class Gamma:
    """Gaps drawn from a gamma distribution; `cv` is their standard deviation over their mean (1 is Poisson, more is
    burstier; the `burstiness` of vLLM's benchmark is 1 / cv^2)."""

    rate_per_s: Flow
    cv: Positive

    def due_s(self, rng: random.Random) -> Iterator[float]:
        shape = 1 / self.cv**2
        scale_s = 1 / (self.rate_per_s * shape)
        # Time 0 falls inside a gap, and likelier into a long one: so the rate is the stated one from the start.
        at_s = rng.random() * rng.gammavariate(shape + 1, scale_s)
        while True:
            yield at_s
            at_s += rng.gammavariate(shape, scale_s)

    def scaled(self, factor: float) -> Self:
        return replace(self, rate_per_s=self.rate_per_s * factor)


@spec
class Ramp:
    """The rate goes from one value to another in a straight line, then stays."""

    from_per_s: Rate
    to_per_s: Rate
    over_s: Period

    def due_s(self, rng: random.Random) -> Iterator[float]:
        slope = (self.to_per_s - self.from_per_s) / self.over_s
        whole = (self.from_per_s + self.to_per_s) / 2 * self.over_s  # arrivals to expect on the slope
        for expected in _unit_poisson(rng):
            if expected >= whole:
                if not self.to_per_s:
                    return
                yield self.over_s + (expected - whole) / self.to_per_s
            else:  # the moment when `from t + slope t^2 / 2` reaches it, in the form that is exact for small slopes
                yield 2 * expected / (self.from_per_s + math.sqrt(self.from_per_s**2 + 2 * slope * expected))

    def scaled(self, factor: float) -> Self:
        return replace(self, from_per_s=self.from_per_s * factor, to_per_s=self.to_per_s * factor)


@spec
class Step:
    """One level of a staircase."""

    rate_per_s: Rate
    for_s: Period


@spec
class Steps:
    """A staircase of rates, written as a list; the last level stays."""

    levels: Annotated[list[Step], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, value: Any) -> Any:
        return {"levels": value} if isinstance(value, list) else value

    def due_s(self, rng: random.Random) -> Iterator[float]:
        levels = iter(self.levels)
        level, begun_s, before = next(levels), 0.0, 0.0
        for expected in _unit_poisson(rng):
            while expected - before >= level.rate_per_s * level.for_s and (following := next(levels, None)):
                before, begun_s = before + level.rate_per_s * level.for_s, begun_s + level.for_s
                level = following
            if not level.rate_per_s:
                return
            yield begun_s + (expected - before) / level.rate_per_s

    def scaled(self, factor: float) -> Self:
        return replace(self, levels=[replace(step, rate_per_s=step.rate_per_s * factor) for step in self.levels])


@spec
class Bursts:
    """Poisson arrivals at a quiet rate, and `size` more all at once `every` so often."""

    quiet_per_s: Rate
    size: Count
    every_s: Period

    def due_s(self, rng: random.Random) -> Iterator[float]:
        quiet = Poisson(rate_per_s=self.quiet_per_s).due_s(rng) if self.quiet_per_s else iter(())
        return heapq.merge(quiet, (k * self.every_s for k in count(1) for _ in range(self.size)))

    def scaled(self, factor: float) -> Self:
        return replace(self, quiet_per_s=self.quiet_per_s * factor, size=max(1, round(self.size * factor)))


@spec
class Clients:
    """The sum of `count` unequal clients, as production traffic is: client k sends 1 / k^skew as much as the first,
    each with gamma gaps of its own."""

    rate_per_s: Flow
    count: Count
    skew: Annotated[float, Field(ge=0)] = 1.0
    cv: Positive = 2.0

    def due_s(self, rng: random.Random) -> Iterator[float]:
        weights = [1 / k**self.skew for k in range(1, self.count + 1)]
        rates = (self.rate_per_s * weight / sum(weights) for weight in weights)
        clients = (Gamma(rate_per_s=rate, cv=self.cv).due_s(random.Random(rng.getrandbits(64))) for rate in rates)
        return heapq.merge(*clients)

    def scaled(self, factor: float) -> Self:
        return replace(self, rate_per_s=self.rate_per_s * factor)


@spec
class Recorded:
    """Moments from a file, one a line: seconds, or a JSON object with `at_s`; the first is moment 0.

    Unlike the others it ends, with the file. Raises UsageError on a line that is no moment or goes back in time.
    """

    file: Path
    speed: Positive = 1.0

    def due_s(self, rng: random.Random) -> Iterator[float]:
        try:
            lines = self.file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"the recording {self.file} cannot be read: {error.strerror}") from None
        first_s: float | None = None
        last_s = -math.inf
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line)
                at_s = float(value["at_s"] if isinstance(value, dict) else value)
            except (ValueError, TypeError, KeyError):
                raise UsageError(f"{line[:40]!r} is no moment in seconds", f"{self.file}:{number}") from None
            if not last_s <= at_s < math.inf:
                raise UsageError(f"moment {at_s} does not follow the one above it", f"{self.file}:{number}")
            last_s, first_s = at_s, at_s if first_s is None else first_s
            yield (at_s - first_s) / self.speed

    def scaled(self, factor: float) -> Self:
        return replace(self, speed=self.speed * factor)


ARRIVALS: dict[str, type[Arrivals]] = {
    "constant": Constant,
    "poisson": Poisson,
    "gamma": Gamma,
    "ramp": Ramp,
    "steps": Steps,
    "bursts": Bursts,
    "clients": Clients,
    "recorded": Recorded,
}


def _unit_poisson(rng: random.Random) -> Iterator[float]:
    """Arrivals at rate 1; read as the number of arrivals expected so far, they make any curve of rates."""
    total = 0.0
    while True:
        total += rng.expovariate(1.0)
        yield total
