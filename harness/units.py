"""Numbers with units, as a user writes them: `1.2s`, `20/s`, `85%`, `16..511`, `10MB`, `1.2x`, `p99`.

A bare number where a unit is needed is refused, so that nobody's milliseconds become seconds. `spec` makes a frozen
dataclass that is its own schema: an attribute `below_s: Duration` is spelled `below: 1.2s` in a file.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

T = TypeVar("T")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"B": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
# One blank may stand before the unit, and nowhere else: `1 2s` is a slip, not twelve seconds.
_NUMBER = r"(\d+(?:\.\d+)?) ?"
_DURATION = f"{_NUMBER}(ms|s|m|h)"
_RATE = f"{_NUMBER}/(s|m|h)"
_SHARE = f"{_NUMBER}%"
_SIZE = f"{_NUMBER}(B|kB|MB|GB|KiB|MiB|GiB)"
_SPAN = r"(\d+)\.\.(\d+)"
_MULTIPLE = f"{_NUMBER}x"
_QUANTILE = r"p(\d{1,2}(?:\.\d+)?)"
_SUFFIXES = ("_per_s", "_s", "_tokens", "_bytes", "_")


def duration(text: Any) -> float:
    """`250ms`, `1.2s`, `2m`, `8h` -> seconds."""
    number, unit = _parts(text, _DURATION, "a time such as 1.2s, 250ms or 2m")
    return float(number) * _SECONDS[unit]


def rate(text: Any) -> float:
    """`20/s`, `90/m` -> per second."""
    number, unit = _parts(text, _RATE, "a rate such as 20/s")
    return float(number) / _SECONDS[unit]


def share(text: Any) -> float:
    """`85%` -> 0.85. Between 0 and 100 %."""
    (number,) = _parts(text, _SHARE, "a share such as 85%")
    if float(number) > 100:
        raise ValueError(f"{text} is more than the whole")
    return float(number) / 100


def size(text: Any) -> int:
    """`10MB`, `128KiB` -> bytes."""
    number, unit = _parts(text, _SIZE, "a size such as 10MB or 128KiB")
    return int(float(number) * _BYTES[unit])


def span(text: Any) -> tuple[int, int]:
    """`16..511` -> (16, 511), both ends included."""
    low, high = _parts(text, _SPAN, "a range such as 16..511")
    if int(low) > int(high):
        raise ValueError(f"the range {text} ends before it begins")
    return int(low), int(high)


def multiple(text: Any) -> float:
    """`1.2x` -> 1.2. More than nothing."""
    (number,) = _parts(text, _MULTIPLE, "a multiple such as 1.2x")
    if not float(number):
        raise ValueError(f"{text} is no multiple: it leaves nothing")
    return float(number)


def quantile(text: Any) -> float:
    """`p99.9` -> 0.999."""
    (number,) = _parts(text, _QUANTILE, "a quantile such as p99")
    return float(number) / 100


def _parts(text: Any, pattern: str, wanted: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not {wanted}")
    return match.groups()


def _unit(parse: Callable[[Any], Any], pattern: str) -> tuple[BeforeValidator, WithJsonSchema]:
    return BeforeValidator(parse), WithJsonSchema({"type": "string", "pattern": f"^{pattern}$"})


Duration = Annotated[float, *_unit(duration, _DURATION)]
Rate = Annotated[float, *_unit(rate, _RATE)]
Share = Annotated[float, *_unit(share, _SHARE)]
Size = Annotated[int, *_unit(size, _SIZE)]
Multiple = Annotated[float, *_unit(multiple, _MULTIPLE)]
Quantile = Annotated[float, *_unit(quantile, _QUANTILE)]
TokenRange = Annotated[tuple[int, int], *_unit(span, _SPAN)]
Count = Annotated[int, Field(ge=1)]
Period = Annotated[Duration, Field(gt=0)]
Part = Annotated[Share, Field(gt=0)]  # a share of something that is there at all


def spelled(attribute: str) -> str:
    """How an attribute is spelled in a file: its unit is written with the value, not in the key."""
    for suffix in _SUFFIXES:
        if attribute.endswith(suffix):
            return attribute.removesuffix(suffix)
    return attribute


@dataclass_transform(frozen_default=True, kw_only_default=True)
def spec(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are the keys of a mapping in a user's file; unknown keys are errors."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid", alias_generator=spelled)  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)
