"""Which pool serves which question (ORC-3)."""

import pytest

from reference_stack.orchestrator.config import Config
from reference_stack.orchestrator.refusal import Refusal
from reference_stack.orchestrator.routing import Route, over_budget, route


@pytest.mark.parametrize(
    ("model", "question", "age_s", "expected"),
    [
        ("auto", "hi there", 0, Route("small", "small_talk")),
        ("auto", "Why does the KERNEL panic?", 0, Route("large", "expert")),
        ("auto", "words " * 50, 0, Route("large", "expert")),
        ("large", "hi there", 0, Route("large", "asked")),
        ("auto", "hi there", 180, Route("small", "small_talk")),
        ("auto", "hi there", 180.1, Route("long", "long_session")),
        ("large", "hi there", 600, Route("long", "long_session")),
    ],
)
def test_routes(config: Config, model: str, question: str, age_s: float, expected: Route) -> None:
    """Small talk to the small pool, experts to the large one, sessions over three minutes to their own."""
    assert route(config, model, question, age_s) == expected


def test_unknown_model(config: Config) -> None:
    """A model that is neither a pool nor the routed name is not there, whatever the session's age."""
    with pytest.raises(Refusal) as caught:
        route(config, "gpt-9", "hi", 900)
    assert caught.value.status == 404


def test_over_budget(config: Config) -> None:
    """Over its minute's budget a key gets the cheaper pool (ORC-2)."""
    assert over_budget(config) == Route("small", "over_budget")
