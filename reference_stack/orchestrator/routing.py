"""Which pool serves a request? One pure function.

Small talk goes to the small model, expert questions to the large one, and a conversation that has gone on for long to a
pool of its own, where its growing context holds up nobody else's. It reads the last question only, by rules that a
person can check: no model is asked.
"""

from dataclasses import dataclass

from reference_stack.orchestrator.config import Config, Routing
from reference_stack.orchestrator.refusal import Refusal


@dataclass(frozen=True)
class Route:
    """A pool's name, and why."""

    pool: str
    reason: str


def route(config: Config, model: str, question: str, session_age_s: float) -> Route:
    """The pool for the last `question` of a conversation. Refusal (404) when `model` is neither a pool nor routed."""
    if model != config.model and model not in config.pools:
        raise Refusal(404, "model_not_found", f"The model {model[:100]!r} does not exist.", "model")
    if session_age_s > config.routing.session_limit_s:
        return Route(config.routing.long_session, "long_session")
    if model in config.pools:
        return Route(model, "asked")
    if is_small_talk(question, config.routing):
        return Route(config.routing.small_talk, "small_talk")
    return Route(config.routing.expert, "expert")


def over_budget(config: Config) -> Route:
    """Where a request goes whose key has spent its minute."""
    return Route(config.routing.over_budget, "over_budget")


def is_small_talk(question: str, rules: Routing) -> bool:
    """A short question without an expert's word in it."""
    if len(question) > rules.small_talk_chars:
        return False
    folded = question.casefold()
    return not any(word.casefold() in folded for word in rules.expert_words)
