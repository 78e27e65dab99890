"""Clients that misbehave: what each kind sends, and which answers to it are right.

Every kind is a class of its own in the plan, named after the kind, so that it is judged and shown apart and never
dilutes the good ones. Kinds with a `share` take their moments from the scenario's arrivals; kinds with `every` come on
top of them. A plan is made before the run: what a client might leave undone after seeing an answer, such as asking
again, it does regardless, which is the harsher client.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Protocol

from pydantic import BeforeValidator, Field, StringConstraints

from harness.model import Request
from harness.units import Count, Duration, Part, Period, TokenRange, spec

Answer = Annotated[str, BeforeValidator(str), StringConstraints(pattern=r"^[1-5](xx|\d\d)$")]
Answers = Annotated[tuple[Answer, ...], Field(min_length=1)]
Ordinary = Callable[[float, tuple[int, int] | None], Request]  # one of the mix, due then, of lengths such as these


class Misbehaviour(Protocol):
    """What every kind says of itself: the answers that are right, and what a client sends from `at_s` on."""

    @property
    def expect(self) -> tuple[str, ...]: ...

    def requests(self, at_s: float, ordinary: Ordinary) -> Iterator[Request]: ...


@spec
class OfArrivals:
    """A kind that takes a share of all arrivals."""

    share: Part
    expect: Answers = ("2xx",)


@spec
class OnTop:
    """A kind that comes `every` so often, on top of the arrivals."""

    every_s: Period
    expect: Answers = ("2xx", "429")

    def turns_s(self, end_s: float) -> Iterator[float]:
        """The moments before `end_s` at which it comes."""
        return (turn * self.every_s for turn in range(1, math.ceil(end_s / self.every_s)))


@spec
class HangUp(OfArrivals):
    """Disconnects `after` sending, in the middle of its stream."""

    after_s: Duration

    def requests(self, at_s: float, ordinary: Ordinary) -> Iterator[Request]:
        yield replace(ordinary(at_s, None), stream=True, give_up_s=self.after_s)


@spec
class Impatient(OfArrivals):
    """Waits `after` and no longer, hangs up and asks the same `again`, so many times."""

    after_s: Period
    again: Count = 1

    def requests(self, at_s: float, ordinary: Ordinary) -> Iterator[Request]:
        asked = replace(ordinary(at_s, None), give_up_s=self.after_s)
        yield from (replace(asked, due_s=at_s + turn * self.after_s) for turn in range(self.again + 1))


@spec
class ForgedAddress(OfArrivals):
    """Claims to come from somewhere else."""

    def requests(self, at_s: float, ordinary: Ordinary) -> Iterator[Request]:
        somewhere = f"203.0.113.{int(at_s * 1000) % 254 + 1}"  # a network reserved for documentation
        yield replace(ordinary(at_s, None), headers=(("x-forwarded-for", somewhere), ("x-real-ip", somewhere)))


@spec
class Flood(OnTop):
    """One user sends `size` prompts of these lengths at one moment."""

    size: Count
    tokens: TokenRange

    def requests(self, at_s: float, ordinary: Ordinary) -> Iterator[Request]:
        yield from (ordinary(at_s, self.tokens) for _ in range(self.size))


@spec
class Repeat(OnTop):
    """One user sends the same prompt `size` times `within` so long."""

    size: Count
    within_s: Duration

    def requests(self, at_s: float, ordinary: Ordinary) -> Iterator[Request]:
        asked = ordinary(at_s, None)
        yield from (replace(asked, due_s=at_s + turn * self.within_s / self.size) for turn in range(self.size))


MISBEHAVING: dict[str, type[HangUp | Impatient | ForgedAddress | Flood | Repeat]] = {
    "hang_up": HangUp,
    "impatient": Impatient,
    "forged_address": ForgedAddress,
    "flood": Flood,
    "repeat": Repeat,
}
