"""Captured traffic sent again: a recording -> a plan of the same requests, and beside it what each got at the time.

A recording is played as it is: a target's `load_factor` does not apply, and `speed` is the only scale there is. It
scales the moments of requests and the time that users took between an answer and their next request. It does not scale
how long a client waited before it hung up, nor any captured latency: those are the stack's pace, not the users'.

The plan holds the captured bytes as the recording has them, scrubbed; what must change in them changes when they are
sent (`rewrite`). Which answer is right for a request is what the recording says, so a request that was refused is one
that must be refused again. Nothing is guessed where the capture is silent.
"""

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import StringConstraints

from harness import provenance
from harness.document import Place
from harness.model import NEVER, Finish, Observation, Outcome, Request, Tag, UsageError, refusal
from harness.plan_file import PlanHeader
from harness.traffic import corpus as corpora
from harness.traffic import recording
from harness.traffic.dialects import speaks
from harness.traffic.plan import Made, Served, totals, windows
from harness.traffic.prompts import TEMPLATE_TOKENS
from harness.traffic.recording import Answered, Recorded, RecordingHeader
from harness.traffic.rewrite import model_of
from harness.traffic.traces.mooncake import BLOCK_TOKENS
from harness.units import Count, Duration, Multiple, Period, Share, spec

CLASSES = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/embeddings": "embeddings",
    "/responses": "responses",
}
OTHER = "other"  # the class of requests to any path but these
BUSY = (408, 429)  # refusals that are about the moment, not about the request
MOST_MODELS = 20  # told in the facts; the name "" counts requests for an answer whose model cannot be read, or changed

PathBeginning = Annotated[str, StringConstraints(pattern=r"^/[!-~]*$")]


def class_of(path: str) -> str:
    """The endpoint class of a request, by the ending of its path."""
    return next((name for ending, name in CLASSES.items() if path.partition("?")[0].endswith(ending)), OTHER)


@spec
class Rewrite:
    """What changes in captured requests beside the host and the credentials, which are always the target's.

    `model` is the captured name that the target's own model takes the place of: the one that most requests name, when
    it is left out. `path` maps beginnings of captured paths to others.
    """

    model: str = ""
    path: dict[PathBeginning, PathBeginning] = field(default_factory=dict)


class Held(NamedTuple):
    """What the played part of a recording holds: the classes of its requests, answers to them, refusals among these."""

    classes: tuple[str, ...]
    answered: bool
    refused: bool


@spec
class Replay:
    """Which recording is played, and how.

    Under `order: open` every request has its captured moment. Under `connection` and `session` only the first of each
    has: the others follow the one before as long after its end as they did, so a slow stack is asked later. `from` and
    `until` are the recording's time; a gap between two requests longer than `longest_gap` is shortened to it; `loop` is
    how often it is played. `warm_up` is the first part of the run, not judged. More than `lost_at_most` of the requests
    missing from the recording makes a run INVALID. A request that falls due while `in_flight_cap` are open is not sent.
    """

    replay: Path
    order: Literal["open", "connection", "session"] = "open"
    speed: Multiple = 1.0
    from_s: Duration = 0.0
    until_s: Period | None = None
    longest_gap_s: Period | None = None
    loop: Count = 1
    warm_up_s: Duration = 0.0
    time_limit_s: Period = 60.0
    in_flight_cap: Count | None = None
    lost_at_most: Share = 0.01
    rewrite: Rewrite = field(default_factory=Rewrite)

    def __post_init__(self) -> None:
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError("`until` is not after `from`: nothing lies between them")

    @property
    def window_names(self) -> tuple[str, ...]:
        return ("warm_up", "steady") if self.warm_up_s else ("steady",)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes that requests of a recording can be of; `look` says which it holds."""
        return (*CLASSES.values(), OTHER)

    @property
    def refusable(self) -> bool:
        """Any recording may hold requests that were refused; `look` says whether this one does."""
        return True

    @property
    def never_judged(self) -> tuple[str, ...]:
        return ()

    @property
    def files(self) -> dict[Place, Path]:
        return {("replay",): self.replay}

    def look(self) -> Held:
        """Read the recording once for what it holds. Raises UsageError when it cannot be played."""
        header, exchanges = self.exchanges()
        found = {(class_of(one.path), _refused(one)) for one in exchanges}
        classes, answered = {name for name, _ in found}, not header.timing_only
        refused = answered and any(refused for _, refused in found)
        return Held(tuple(name for name in self.classes if name in classes), answered, refused)

    def exchanges(self) -> tuple[RecordingHeader, Iterator[Recorded]]:
        """The account of the recording, and the part of it that is played, as it is read.

        Raises UsageError when it is no recording, is damaged or out of order, or has nothing in that part.
        """
        header, recorded = recording.read(self.replay)
        return header, self._covered(recorded)

    def _covered(self, recorded: Iterable[Recorded]) -> Iterator[Recorded]:
        until_s = math.inf if self.until_s is None else self.until_s
        before_s, held = 0.0, False
        for line, one in enumerate(recorded, start=2):
            if not before_s <= one.at_s < math.inf:
                raise UsageError("this exchange comes before the one above it", f"{self.replay}:{line}")
            before_s = one.at_s
            if self.from_s <= one.at_s < until_s:
                held = True
                yield one
        if not held:
            raise UsageError(f"nothing of {self.replay} is played: its last request is {before_s:g} s after its first")

    def plan(self, target: Served, seed: int, scenario: str, extendable: bool) -> Made:
        """The plan. The seed matters for a source without bytes only; no replay is extended: there is no more of it."""
        header, exchanges = self.exchanges()
        source = _Composed(target, seed) if header.timing_only else _Captured()
        held = [(replace(one, raw=b""), asked) for one in exchanges if (asked := source.request(one))]
        if not held:
            raise UsageError(f"no request of {self.replay} is to a path that prompts can be composed for")
        recorded = [one for one, _ in held]
        requests, end_s = self._looped([asked for _, asked in held], recorded)
        if self.warm_up_s >= end_s:
            raise UsageError(f"{self.replay} is over after {end_s:.3g} s: its warm-up leaves nothing to judge")
        corpus = source.corpus()
        captured = [] if header.timing_only else [_seen(r, recorded[r.index % len(recorded)].answer) for r in requests]
        planned = PlanHeader(
            scenario=scenario,
            seed=seed,
            requests=len(requests),
            windows=windows(self.warm_up_s, end_s),
            time_limit_s=self.time_limit_s,
            corpus_sha256=hashlib.sha256(corpus).hexdigest(),
            facts=_facts(self, header, requests, end_s) | {"replay": self._told(header, recorded, source)},
        )
        return Made(planned, requests, corpus, captured)

    def _looped(self, asked: Sequence[Request], recorded: Sequence[Recorded]) -> tuple[list[Request], float]:
        """Every request of every pass, numbered and due, and when the last pass is over.

        A pass lasts until one mean gap after its last request, so that passes follow each other at the captured rate.
        """
        dues_s, links = self.dues_s(recorded), self.links(recorded)
        count, groups = len(asked), 1 + max(link.group for link in links)
        gaps = count - 1
        pass_s = dues_s[-1] + (dues_s[-1] / gaps if gaps and dues_s[-1] else 1.0)
        requests = [
            replace(
                request,
                index=turn * count + index,
                due_s=turn * pass_s + due_s,
                group=turn * groups + link.group,
                after=None if link.after is None else turn * count + link.after,
                think_s=link.think_s,
            )
            for turn in range(self.loop)
            for index, (request, due_s, link) in enumerate(zip(asked, dues_s, links, strict=True))
        ]
        return requests, self.loop * pass_s

    def dues_s(self, recorded: Sequence[Recorded]) -> list[float]:
        """When each request is due, from the start of a pass: its captured moment, long gaps cut, at this speed."""
        longest_s = math.inf if self.longest_gap_s is None else self.longest_gap_s
        dues_s, cut_s, before_s = [], 0.0, self.from_s
        for one in recorded:
            cut_s += max(0.0, one.at_s - before_s - longest_s)
            before_s = one.at_s
            dues_s.append((one.at_s - self.from_s - cut_s) / self.speed)
        return dues_s

    def links(self, recorded: Sequence[Recorded]) -> list["Link"]:
        """How each request hangs on the others of its group: a connection, or a session where the order says so."""
        numbers: dict[str | int, int] = {}
        last: dict[int, int] = {}
        links = []
        for index, one in enumerate(recorded):
            key = one.session if self.order == "session" and one.session else one.connection
            group = numbers.setdefault(key, len(numbers))
            before, last[group] = last.get(group), index
            think_s = None if self.order == "open" or before is None else _think_s(recorded[before], one)
            if think_s is None:
                links.append(Link(group))
            else:
                links.append(Link(group, before, min(think_s, self.longest_gap_s or math.inf) / self.speed))
        return links

    def _told(self, header: RecordingHeader, recorded: Sequence[Recorded], source: "_Source") -> dict[str, Any]:
        """What the judge, the player and a reader must know of the recording and of how it is played."""
        models = source.models.most_common()
        model = self.rewrite.model or next((name for name, _ in models if name), "")
        if self.rewrite.model and not source.models[self.rewrite.model]:
            named = ", ".join(name for name, _ in models[:MOST_MODELS] if name) or "none"
            raise UsageError(f"no request of {self.replay} names the model {model}; they name: {named}")
        return {
            "recording": str(self.replay),
            "recording_sha256": provenance.sha256(self.replay),
            "sources": list(header.sources),
            "timing_only": header.timing_only,
            "requests": header.requests,
            "connections": header.connections,
            "played": len(recorded),
            "lost_share": header.lost_share,
            "lost_at_most": self.lost_at_most,
            "account": dict(header.account),
            "scrubbed": dict(header.scrubbed),
            "shapes": dict(header.shapes),
            "order": self.order,
            "speed": self.speed,
            "loop": self.loop,
            "from_s": self.from_s,
            "until_s": self.until_s,
            "longest_gap_s": self.longest_gap_s,
            "in_flight_cap": self.in_flight_cap,
            "rewrite": {"model": model, "path": self.rewrite.path},
            "models": dict(models[:MOST_MODELS]),
            "left_out": source.left_out,
        }


class Link(NamedTuple):
    """The group of a request, and the one of that group that it waits for, if any, and for how long."""

    group: int
    after: int | None = None
    think_s: float = 0.0


def _think_s(before: Recorded, one: Recorded) -> float | None:
    """How long the user took from one answer to the next request; None where the request did not wait for the answer.

    That is so when it was sent before the answer was over, or when nobody saw the answer end.
    """
    answer_s = NEVER if _unseen(before.answer) else before.answer.ended_s
    think_s = one.at_s - before.at_s - (answer_s if before.give_up_s is None else before.give_up_s)
    return think_s if think_s >= 0 and not one.pipelined else None


# What is sent ------------------------------------------------------------------------------------------------------


class _Source(Protocol):
    """Where the requests of a plan get their text from. `models` counts the names that they ask for."""

    models: Counter[str]
    left_out: int

    def request(self, one: Recorded) -> Request | None:
        """The request without its place in the plan; None when it cannot be sent."""

    def corpus(self) -> bytes:
        """What the requests' spans point into."""


class _Captured:
    """The captured bytes, equal ones kept once."""

    def __init__(self) -> None:
        self.models: Counter[str] = Counter()
        self.left_out = 0
        self._pieces: list[bytes] = []
        self._spans: dict[bytes, tuple[int, int]] = {}
        self._end = 0

    def request(self, one: Recorded) -> Request:
        name = class_of(one.path)
        if name != OTHER:
            self.models[model_of(one.raw) or ""] += 1
        return Request(
            index=-1,
            due_s=0.0,
            class_name=name,
            path=one.path.partition("?")[0],
            text=self._span(one.raw),
            prompt_tokens=one.prompt_tokens,
            max_tokens=one.max_tokens,
            stream=one.stream,
            flaw=one.flaw or (f"refused_{one.answer.status}" if _refused(one) else ""),
            expect=expected(one),
            give_up_s=one.give_up_s,
            raw=True,
            half_close_s=one.half_close_s,
        )

    def _span(self, raw: bytes) -> tuple[int, int]:
        digest = hashlib.sha256(raw).digest()
        if digest not in self._spans:
            self._pieces.append(raw)
            self._spans[digest] = self._end, self._end + len(raw)
            self._end += len(raw)
        return self._spans[digest]

    def corpus(self) -> bytes:
        return b"".join(self._pieces)


class _Composed:
    """Prompts for a source that told token counts only: as long as they were, but not over the target's limit.

    Where it told the blocks of its prompts too, those that began alike begin alike again.
    """

    def __init__(self, target: Served, seed: int) -> None:
        self.models: Counter[str] = Counter()
        self.left_out = 0
        self._longest = target.prompt_limit - TEMPLATE_TOKENS
        self._corpus = corpora.build(target.tokenizer, seed, target.prompt_limit)
        self._starts = self._corpus.places(random.Random(f"{seed}/start"))
        self._blocks: dict[int, int] = {}  # where the text of each begins
        self._joined: list[bytes] = []  # prompts made of blocks, behind the corpus
        self._end = len(self._corpus.text)

    def request(self, one: Recorded) -> Request | None:
        path = one.path.partition("?")[0]
        if not speaks(path):
            self.left_out += 1
            return None
        tokens = min(max(one.prompt_tokens, 1), self._longest)
        if one.blocks:
            begin, end, tokens = self._of_blocks(one.blocks, tokens)
        else:
            begin, end, tokens = self._corpus.span(next(self._starts), tokens)
        return Request(
            index=-1,
            due_s=0.0,
            class_name=class_of(path),
            path=path,
            text=(begin, end),
            prompt_tokens=tokens,
            max_tokens=max(one.max_tokens, 1),
            stream=one.stream,
            give_up_s=one.give_up_s,
        )

    def _of_blocks(self, blocks: Sequence[int], tokens: int) -> tuple[int, int, int]:
        """(begin, end, exact tokens) of a prompt: each block has the same words in every prompt that has it."""
        pieces: list[bytes] = []
        held = 0
        for k, at in enumerate(range(0, tokens, BLOCK_TOKENS)):
            start = self._blocks.get(blocks[k]) if k < len(blocks) else None
            if start is None:
                start = next(self._starts)
            if k < len(blocks):
                self._blocks[blocks[k]] = start
            begin, end, more = self._corpus.span(start, min(BLOCK_TOKENS, tokens - at), joined=bool(pieces))
            pieces.append(self._corpus.text[begin:end])
            held += more
        self._joined.append(text := b"".join(pieces))
        self._end += len(text)
        return self._end - len(text), self._end, held

    def corpus(self) -> bytes:
        return b"".join((self._corpus.text, *self._joined))


# What is right, and what was seen ----------------------------------------------------------------------------------


def expected(one: Recorded) -> tuple[str, ...]:
    """The right answers to a captured request: what it got, unless that was about the moment and not the request.

    A malformed request that nobody answered may be refused in any way; any other that got no good answer should have.
    """
    status = one.answer.status
    if 300 <= status < 500 and status not in BUSY:
        return (str(status),)
    return ("4xx",) if one.flaw and not status else ("2xx",)


def _refused(one: Recorded) -> bool:
    return "2xx" not in expected(one)


def _unseen(answer: Answered) -> bool:
    """Whether the capture lost part of an answer: nobody knows how it ended."""
    return answer.lost not in ("", "closed")


def _seen(request: Request, answer: Answered) -> Observation:
    """A captured answer as an observation, as if its request had been sent when it is due in the plan."""
    due_s, served = request.due_s, 200 <= answer.status < 300
    tags = Tag.STREAMED if request.stream and served else Tag(0)
    outcome = _outcome(request, answer)
    if outcome == Outcome.CANCELLED_BY_US:
        tags |= Tag.GAVE_UP
    if answer.gaps_s and not answer.gaps_s[0]:
        tags |= Tag.COALESCED
    ended_s = request.give_up_s if outcome == Outcome.CANCELLED_BY_US else answer.ended_s
    return Observation(
        index=request.index,
        due_s=due_s,
        sent_s=due_s,
        first_byte_s=due_s + answer.first_byte_s,
        first_token_s=due_s + answer.first_token_s,
        last_token_s=due_s + answer.last_token_s,
        ended_s=due_s + (NEVER if ended_s is None else ended_s),
        tokens_in=answer.tokens_in,
        tokens_out=answer.tokens_out,
        status=answer.status,
        outcome=outcome,
        tags=tags,
        finish=answer.finish,
        shape=answer.shape,
        gaps_s=answer.gaps_s,
    )


def _outcome(request: Request, answer: Answered) -> Outcome:
    """How a captured request ended, in the words that the player has for its own."""
    if request.give_up_s is not None and not answer.whole:
        return Outcome.CANCELLED_BY_US
    if answer.status and not 200 <= answer.status < 300:
        return refusal(request.expect, answer.status)
    if _unseen(answer):
        return Outcome.OPEN
    return _success(request, answer) if answer.status else Outcome.RESET


def _success(request: Request, answer: Answered) -> Outcome:
    if answer.error:
        return Outcome.ERROR_IN_STREAM
    says_why = request.class_name in ("chat", "completions")  # a whole answer has a reason to finish there
    if not answer.whole or (says_why and answer.finish == Finish.UNSAID):
        return Outcome.TRUNCATED
    silent = request.stream and math.isnan(answer.first_token_s)
    return Outcome.EMPTY if silent and request.class_name != OTHER else Outcome.OK


def _facts(replay: Replay, header: RecordingHeader, requests: Sequence[Request], end_s: float) -> dict[str, Any]:
    """What a reader should know of the plan without reading it all."""
    steady = sum(request.due_s >= replay.warm_up_s for request in requests)
    of_class: Mapping[str, Counter[str]] = totals(requests)
    return {
        "planned_rate_per_s": steady / (end_s - replay.warm_up_s),
        "bad_share": sum(not request.good for request in requests) / len(requests),
        "classes": {name: {"kind": "captured", **sums} for name, sums in sorted(of_class.items())},
        "exact_answers": True,
        "prompt_tokens_are": "as the source told them" if header.timing_only else "as the captured answers told them",
    }
