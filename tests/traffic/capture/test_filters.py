"""Filters keep what a user names, and refuse what they cannot read."""

from dataclasses import replace
from typing import Any

import pytest

from harness.model import UsageError
from harness.traffic.capture import filters
from harness.traffic.recording import Answered, Recorded

ONE = Recorded(30.0, 3, 0, "POST", "/v1/chat/completions", b"x" * 1500, Answered(422), client="10.0.0.7")


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({}, True),
        ({"methods": ["post"]}, True),
        ({"methods": ["GET"]}, False),
        ({"paths": ["/health", "/v1/*"]}, True),
        ({"paths": ["/v1/chat"]}, False),
        ({"statuses": ["422"]}, True),
        ({"statuses": ["4xx", "none"]}, True),
        ({"statuses": ["2XX"]}, False),
        ({"size": "1kB..2kB"}, True),
        ({"size": "2kB..1MB"}, False),
        ({"clients": ["10.0.0.0/24"]}, True),
        ({"clients": ["10.0.0.8", "fd00::/8"]}, False),
        ({"from_": "30s", "until": "31s"}, True),
        ({"until": "30s"}, False),
        ({"sample": "100%"}, True),
        ({"sample": "0%"}, False),
    ],
)
def test_each_filter(asked: dict[str, Any], kept: bool) -> None:
    """One request, held against one filter."""
    assert filters.read(**asked).keeps(ONE) is kept


def test_a_request_without_an_answer_is_none() -> None:
    """No family of statuses has it."""
    silent = replace(ONE, answer=Answered())
    assert filters.read(statuses=["none"]).keeps(silent)
    assert not filters.read(statuses=["2xx", "4xx"]).keeps(silent)


def test_no_name_is_among_addresses() -> None:
    """A recording that was scrubbed has no addresses to filter by."""
    assert not filters.read(clients=["10.0.0.0/8"]).keeps(replace(ONE, client="3f9a"))


def test_sampling_takes_whole_connections_and_the_same_ones() -> None:
    """A fifth of the connections, give or take; all requests of one are kept or none."""
    some = filters.read(sample="20%")
    kept = [some.keeps(replace(ONE, connection=number)) for number in range(5000)]
    assert 0.15 < sum(kept) / 5000 < 0.25
    assert kept == [some.keeps(replace(ONE, connection=number, turn=9)) for number in range(5000)]


@pytest.mark.parametrize(
    "asked",
    [
        {"statuses": ["600"]}, {"statuses": ["ok"]}, {"size": "1kB"}, {"size": "2kB..1kB"}, {"size": "1B..2"},
        {"clients": ["here"]}, {"from_": "soon"}, {"until": "5"}, {"sample": "0.1"}, {"sample": "120%"},
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(asked: dict[str, Any]) -> None:
    """In a sentence with what was written."""
    (value,) = asked.values()
    with pytest.raises(
        UsageError, match=value[0] if isinstance(value, list) else value.rpartition("..")[2].replace(".", r"\.")
    ):
        filters.read(**asked)
