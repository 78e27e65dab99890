"""What is asked: classes of prompts, lengths of answers, bad requests; and the bytes of each request.

Lengths are written for a gateway that takes PROMPT_LIMIT_TOKENS, and scale with the target's own limit. Inside a class
they are log-uniform: the honest law when only the bounds are known. Bodies are composed when they are sent, from the
plan's numbers and the corpus; no prompt is stored twice.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import field
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from harness.headers import Headers
from harness.model import PROMPT_LIMIT_TOKENS, Request
from harness.traffic.dialects import DIALECTS, Dialect, dialect_of
from harness.traffic.flaws import FLAWS, Draft, sound
from harness.traffic.rewrite import Rewrites
from harness.units import Count, Duration, Part, Share, TokenRange, spec

TEMPLATE_TOKENS = 64  # room left under the gateway's limit for the chat template, which it counts and we cannot
LEAST_TOKENS = 4

Refusal = Annotated[int, Field(ge=400, le=499)]


def _openai_path(path: str) -> str:
    if not path.startswith("/") or not path.endswith(tuple(DIALECTS)) or " " in path:
        raise ValueError(f"{path!r} is no path that ends in one of {', '.join(DIALECTS)}")
    return path


def _known_flaws(kinds: Mapping[str, int]) -> Mapping[str, int]:
    for name in kinds:
        if name not in FLAWS:
            raise ValueError(f"no flaw is called `{name}`; there are: {', '.join(FLAWS)}")
    return kinds


@spec
class PromptClass:
    """Prompts of like length. `streamed` is this class's own share of streamed answers."""

    share: Part
    tokens: TokenRange
    streamed: Share | None = None


@spec
class AnswerTokens:
    """How long answers are asked to be: geometric from 1 to `at_most`, its slope such that the mean is `mean`.

    `exact` asks vLLM to go on to the drawn length (`ignore_eos`); without it a model may end sooner.
    """

    mean: Annotated[float, Field(ge=1)]
    at_most: Count
    exact: bool = True

    def __post_init__(self) -> None:
        if self.mean > self.at_most:
            raise ValueError(f"a mean of {self.mean:g} is over the most, {self.at_most}")

    def cumulative(self) -> list[float]:
        """P(length <= k) for k = 1 .. at_most."""
        low, high = -30.0, 30.0  # log of the ratio of one length's weight to the one before; the mean rises with it
        while high - low > 1e-12:
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_at(middle) < self.mean else (low, middle)
        total = sum(weights := self._weights(low))
        return list(accumulate(weight / total for weight in weights))

    def _weights(self, slope: float) -> list[float]:
        return [math.exp(slope * (k - (self.at_most if slope > 0 else 1))) for k in range(1, self.at_most + 1)]

    def _mean_at(self, slope: float) -> float:
        weights = self._weights(slope)
        return sum(k * weight for k, weight in enumerate(weights, start=1)) / sum(weights)


@spec
class GiveUp:
    """Users who hang up `after` sending, answered or not."""

    share: Share
    after_s: Duration


@spec
class Prompts:
    """The good requests. Shares of the mix are of these; `streamed` holds where a class does not say otherwise."""

    mix: dict[str, PromptClass]
    answer_tokens_: AnswerTokens
    streamed: Share = 1.0
    path: Annotated[str, AfterValidator(_openai_path)] = "/v1/chat/completions"
    headers: Headers = field(default_factory=dict)
    text: Path | None = None
    give_up: GiveUp | None = None

    def __post_init__(self) -> None:
        total = sum(each.share for each in self.mix.values())
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(f"the shares of the mix add to {100 * total:.6g}%, not to 100%")
        shares = (self.streamed if each.streamed is None else each.streamed for each in self.mix.values())
        if not self.dialect.stream and any(shares):
            raise ValueError(f"answers of {self.path} cannot be streamed: write `streamed: 0%`")

    @property
    def dialect(self) -> Dialect:
        """How the path is spoken to."""
        return dialect_of(self.path)


@spec
class Bad:
    """Bad requests: `share` of all arrivals, every kind as often as the others, each with the status that is right."""

    share: Part
    kinds: Annotated[dict[str, Refusal], Field(min_length=1), AfterValidator(_known_flaws)]


def scaled(tokens: tuple[int, int], prompt_limit: int) -> tuple[int, int]:
    """A range of lengths, written for PROMPT_LIMIT_TOKENS, at a gateway that takes `prompt_limit`."""
    low, high = (int(length * prompt_limit / PROMPT_LIMIT_TOKENS) for length in tokens)
    high = max(LEAST_TOKENS, min(high, prompt_limit - TEMPLATE_TOKENS))
    return min(max(low, LEAST_TOKENS), high), high


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """A length whose logarithm is uniform; both ends included."""
    return min(high, int(low * ((high + 1) / low) ** rng.random()))


def drawn(rng: random.Random, cumulative: list[float]) -> int:
    """The position that a uniform draw falls on."""
    return min(bisect_right(cumulative, rng.random() * cumulative[-1]), len(cumulative) - 1)


class Composer:
    """Turns a planned request into the bytes of an HTTP/1.1 request, head and body.

    `host` is the value of the Host header, `headers` are sent with every request (a request's own win). `rewrite` is
    what the plan of a replay says of the model and the paths that were captured. Costs about 5 us and one copy of the
    text; of a captured request, as long as it takes to read its JSON.
    """

    def __init__(
        self,
        corpus: bytes,
        model: str,
        host: str,
        headers: Mapping[str, str] | None = None,
        *,
        exact: bool = True,
        rewrite: Mapping[str, Any] | None = None,
    ) -> None:
        self._corpus, self._model = memoryview(corpus), model
        self._host = host
        own = {name.lower(): value for name, value in (headers or {}).items()}
        self._headers = {"user-agent": "harness", **own}
        self._exact = exact
        captured = rewrite or {}
        renamed = (captured["model"], model) if captured.get("model") else None
        self._rewrites = Rewrites(host, own, renamed, captured.get("path", {}))

    def wire(self, request: Request) -> bytes:
        """The complete request. A composed one takes its index along as `x-request-id`, a captured one nothing."""
        if request.raw:
            begin, end = request.text
            refused = not {"401", "403"}.isdisjoint(request.expect)
            return self._rewrites.apply(bytes(self._corpus[begin:end]), credentials=not refused)
        content_type, body = FLAWS.get(request.flaw, sound)(self._draft(request))
        headers = {**self._headers, **{name.lower(): value for name, value in request.headers}}
        head = [
            f"POST {request.path} HTTP/1.1",
            f"host: {self._host}",
            f"content-type: {content_type}",
            f"content-length: {len(body)}",
            f"x-request-id: {request.index}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return b"\r\n".join(["\r\n".join(head).encode(), b"", body])

    def _draft(self, request: Request) -> Draft:
        dialect = dialect_of(request.path)
        begin, end = request.text
        settings = dialect.settings(request.max_tokens, request.stream, self._exact)
        return Draft(dialect, self._model, bytes(self._corpus[begin:end]), settings)
