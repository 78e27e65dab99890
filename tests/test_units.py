"""Numbers with units."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from harness import units
from harness.units import Duration, Rate, Share, Size, TokenRange, spec


@spec
class Everything:
    below_s: Duration
    rate_per_s: Rate
    share: Share
    limit_bytes: Size
    tokens: TokenRange
    class_: str = "all"


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.duration, "250ms", 0.25),
        (units.duration, "1.2 s", 1.2),
        (units.duration, "2m", 120.0),
        (units.duration, "8h", 28_800.0),
        (units.rate, "20/s", 20.0),
        (units.rate, "90/m", 1.5),
        (units.rate, "20 /s", 20.0),
        (units.share, "99.95%", 0.9995),
        (units.share, "0 %", 0.0),
        (units.size, "10MB", 10_000_000),
        (units.size, "128KiB", 131_072),
        (units.span, "16..511", (16, 511)),
        (units.span, "7..7", (7, 7)),
        (units.multiple, "1.2x", 1.2),
        (units.multiple, "2 x", 2.0),
        (units.quantile, "p99", 0.99),
        (units.quantile, "p99.9", 0.999),
    ],
)
def test_a_number_is_read_with_its_unit(parse: Any, text: str, value: Any) -> None:
    """Every unit that a file may use, as a number of the base unit."""
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.duration, 1.2),
        (units.duration, "1.2"),
        (units.duration, "-1s"),
        (units.duration, "1min"),
        (units.duration, "1s2"),
        (units.duration, "1 2s"),
        (units.duration, "12  s"),
        (units.duration, " 12s"),
        (units.rate, 20),
        (units.rate, "20"),
        (units.rate, "20/d"),
        (units.share, 0.85),
        (units.share, "101%"),
        (units.share, "85"),
        (units.size, "10mb"),
        (units.span, "511..16"),
        (units.span, "16-511"),
        (units.span, None),
        (units.multiple, 1.2),
        (units.multiple, "1.2"),
        (units.multiple, "0x"),
        (units.quantile, "99%"),
        (units.quantile, "p100"),
    ],
)
def test_a_bare_number_or_a_wrong_unit_is_refused(parse: Any, text: Any) -> None:
    """Nobody's milliseconds become seconds."""
    with pytest.raises(ValueError, match=r".+"):
        parse(text)


def test_a_spec_is_spelled_without_its_units() -> None:
    """`below_s` is written `below: 1.2s`, `class_` is `class`, and an unknown key is an error."""
    written = {"below": "1.2s", "rate": "5/s", "share": "1%", "limit": "1kB", "tokens": "1..2", "class": "short"}
    read = TypeAdapter(Everything).validate_python(written)
    assert read == Everything(below_s=1.2, rate_per_s=5.0, share=0.01, limit_bytes=1000, tokens=(1, 2), class_="short")
    with pytest.raises(ValidationError):
        TypeAdapter(Everything).validate_python(written | {"below_s": "1s"})


def test_the_schema_of_a_unit_is_a_pattern() -> None:
    """Editors are told what a value looks like: exactly what the parser takes."""
    schema = TypeAdapter(Everything).json_schema()
    assert schema["properties"]["below"]["pattern"] == r"^(\d+(?:\.\d+)?) ?(ms|s|m|h)$"
    assert set(schema["required"]) == {"below", "rate", "share", "limit", "tokens"}
