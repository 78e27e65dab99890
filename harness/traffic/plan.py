"""Arrivals x prompts x bad requests -> the plan: every request of a run, made before the run, a function of its seed.

Each concern draws from a generator of its own, derived from the seed, and every arrival draws from all of them: a
change of one concern (the share of bad requests, say) moves nothing in the others. Which worker sends what, and how
many there are, is no part of a plan.
"""

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Annotated, Any, Protocol

from harness import plan_file
from harness.document import OneOf, Place, SomeOf
from harness.log import ObservationLog, write_beside
from harness.model import Observation, Request, UsageError, Window
from harness.plan_file import PlanHeader
from harness.timeline import CAPTURED
from harness.traffic import corpus as corpora
from harness.traffic.arrivals import ARRIVALS, Arrivals, Recorded
from harness.traffic.corpus import Corpus
from harness.traffic.misbehaving import MISBEHAVING, Misbehaviour, OfArrivals, OnTop
from harness.traffic.prompts import Bad, Prompts, drawn, log_uniform, scaled
from harness.units import Duration, Period, spec

BAD = "bad"  # the class of all bad requests; their flaw tells them apart
BAD_TOKENS = (16, 511)
OVER_LONG = "over_long"


class Served(Protocol):
    """What a plan must know of its target."""

    @property
    def tokenizer(self) -> Path: ...

    @property
    def prompt_limit(self) -> int: ...

    @property
    def load_factor(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Made:
    """A plan before it is files. The spans of its `requests` point into `corpus`; `captured` holds what each request
    got when it was captured, where it was."""

    header: PlanHeader
    requests: Sequence[Request]
    corpus: bytes
    captured: Sequence[Observation] = ()


class Plannable(Protocol):
    """Traffic of any kind."""

    def plan(self, target: Served, seed: int, scenario: str, extendable: bool) -> Made:
        """The plan against a target: the same arguments give the same plan. Raises UsageError when nothing is due, or
        a file that it is made from cannot be read."""


@spec
class Traffic:
    """What to send: `warm_up` is sent and not judged, the steady state lasts `for`."""

    arrivals: Annotated[Arrivals, OneOf(ARRIVALS)]
    for_s: Period
    warm_up_s: Duration = 0.0
    time_limit_s: Period = 30.0
    prompts: Prompts
    bad: Bad | None = None
    misbehaving: Annotated[Mapping[str, Misbehaviour], SomeOf(MISBEHAVING)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (taken := sum(self.shares.values())) > 1:
            raise ValueError(f"bad and misbehaving requests take {100 * taken:.6g}% of the arrivals")
        for name in self.prompts.mix:
            if name == BAD or name in MISBEHAVING:
                raise ValueError(f"a class of the mix cannot be called `{name}`: other requests are")

    @property
    def shares(self) -> dict[str, float]:
        """The share of arrivals that each class but the good ones takes."""
        misbehaving = {kind: one.share for kind, one in self.misbehaving.items() if isinstance(one, OfArrivals)}
        return ({BAD: self.bad.share} if self.bad else {}) | misbehaving

    @property
    def windows(self) -> tuple[Window, ...]:
        return windows(self.warm_up_s, self.warm_up_s + self.for_s)

    @property
    def window_names(self) -> tuple[str, ...]:
        return tuple(window.name for window in self.windows)

    def planned_windows(self, extendable: bool) -> tuple[Window, ...]:
        """The windows, and as long again as the steady state when thin evidence may extend it."""
        end_s = self.warm_up_s + self.for_s
        return (*self.windows, Window("extension", end_s, end_s + self.for_s)) if extendable else self.windows

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes whose requests should be served."""
        return (*self.prompts.mix, *self.misbehaving)

    @property
    def refusable(self) -> bool:
        """Whether any request may, or must, be refused."""
        return bool(self.bad) or any(one.expect != ("2xx",) for one in self.misbehaving.values())

    @property
    def never_judged(self) -> tuple[str, ...]:
        """The kinds that come so seldom that the steady state sees none of them."""
        end_s = self.warm_up_s + self.for_s
        return tuple(
            kind
            for kind, one in self.misbehaving.items()
            if isinstance(one, OnTop) and not any(at_s >= self.warm_up_s for at_s in one.turns_s(end_s))
        )

    @property
    def files(self) -> dict[Place, Path]:
        """The files that a plan is made from, by the keys that name them."""
        named: dict[Place, Path] = {}
        if self.prompts.text:
            named["prompts", "text"] = self.prompts.text
        if isinstance(self.arrivals, Recorded):
            named["arrivals", "recorded", "file"] = self.arrivals.file
        return named

    def plan(self, target: Served, seed: int, scenario: str, extendable: bool) -> Made:
        header, requests, corpus = make(self, target, seed, scenario, extendable)
        return Made(header, requests, corpus.text)


def windows(warm_up_s: float, end_s: float) -> tuple[Window, ...]:
    """The warm-up, if there is one, and the steady state to the end."""
    steady = Window("steady", warm_up_s, end_s)
    return (Window("warm_up", 0.0, warm_up_s), steady) if warm_up_s else (steady,)


def make(
    traffic: Traffic, target: Served, seed: int, scenario: str, extendable: bool = False
) -> tuple[PlanHeader, list[Request], Corpus]:
    """The plan of a scenario's traffic against a target. The same arguments give the same plan."""
    windows = traffic.planned_windows(extendable)
    longest = 2 * target.prompt_limit
    corpus = corpora.build(target.tokenizer, seed, longest, traffic.prompts.text)
    asked = _asked(traffic, target, corpus, seed, windows[-1].end_s)
    requests = _numbered(sorted(asked, key=lambda request: request.due_s))
    if not requests:
        raise UsageError(f"nothing is due in the {windows[-1].end_s:g} s of {scenario}")
    header = PlanHeader(
        scenario=scenario,
        seed=seed,
        requests=len(requests),
        windows=windows,
        time_limit_s=traffic.time_limit_s,
        corpus_sha256=hashlib.sha256(corpus.text).hexdigest(),
        facts=_facts(traffic, target, corpus, requests),
    )
    return header, requests, corpus


def write(
    run_dir: Path, scenario: Path, traffic: Plannable, target: Served, seed: int, extendable: bool = False
) -> tuple[PlanHeader, str]:
    """Make the plan and write `plan.jsonl`, `corpus.bin` and, of a recording, `captured.bin` into the new run
    directory; its header and SHA-256."""
    made = traffic.plan(target, seed, str(scenario), extendable)
    write_beside(run_dir / "corpus.bin", made.corpus)
    if made.captured:
        _write_captured(run_dir / CAPTURED, made.captured)
    return made.header, _written(run_dir / "plan.jsonl", made.header, made.requests)


def write_alone(
    out: Path, scenario: Path, traffic: Plannable, target: Served, seed: int, extendable: bool = False
) -> str:
    """Make the plan and write it to `out`, without the text that its prompts are cut from; its SHA-256."""
    made = traffic.plan(target, seed, str(scenario), extendable)
    return _written(out, made.header, made.requests)


def _write_captured(path: Path, captured: Iterable[Observation]) -> None:
    log = ObservationLog(path)
    for observation in captured:
        log.append(observation)
    log.close()


def _written(path: Path, header: PlanHeader, requests: Iterable[Request]) -> str:
    plan = b"".join(plan_file.lines(header, requests))
    write_beside(path, plan)
    return hashlib.sha256(plan).hexdigest()


def _numbered(requests: Iterable[Request]) -> list[Request]:
    return [one if one.index == index else replace(one, index=index) for index, one in enumerate(requests)]


def _asked(traffic: Traffic, target: Served, corpus: Corpus, seed: int, end_s: float) -> Iterator[Request]:
    """Every request; those of one arrival follow each other, whenever they are due."""
    good, bad, other = (_Mix(traffic.prompts, target, corpus, f"{seed}/{whose}") for whose in ("good", BAD, "other"))
    flaws = _dealt(traffic.bad, random.Random(f"{seed}/flaws"))
    kinds, kind_rng = [*traffic.shares, ""], random.Random(f"{seed}/kinds")
    cumulative = list(accumulate([*traffic.shares.values(), 1 - sum(traffic.shares.values())]))

    def misbehaving(kind: str, at_s: float) -> Iterator[Request]:
        behaviour, as_itself = traffic.misbehaving[kind], ("user-agent", f"harness-{kind}")
        for sent in behaviour.requests(at_s, other.request):
            if sent.due_s < end_s:
                headers = (*sent.headers, as_itself)  # a gateway that blocks this client can leave the others alone
                yield replace(sent, class_name=kind, expect=behaviour.expect, headers=headers)

    arrivals = traffic.arrivals.scaled(target.load_factor).due_s(random.Random(f"{seed}/arrivals"))
    for index, due_s in enumerate(takewhile(lambda moment: moment < end_s, arrivals)):
        usual, kind = good.request(due_s, index=index), kinds[drawn(kind_rng, cumulative)]
        if not kind:
            yield usual
        elif kind == BAD:
            yield bad.flawed(due_s, *next(flaws))
        else:
            yield from misbehaving(kind, due_s)
    for kind, behaviour in traffic.misbehaving.items():
        if isinstance(behaviour, OnTop):
            for at_s in behaviour.turns_s(end_s):
                yield from misbehaving(kind, at_s)


def _dealt(bad: Bad | None, rng: random.Random) -> Iterator[tuple[str, int]]:
    """Flaws and their right answers for ever, dealt like cards: a short run, too, holds each as often as the others."""
    cards = list(bad.kinds.items()) if bad else []
    while cards:
        yield from rng.sample(cards, len(cards))


class _Mix:
    """Draws requests of the mix, each from a place in the corpus where none began before."""

    def __init__(self, prompts: Prompts, target: Served, corpus: Corpus, seed: str) -> None:
        self._prompts, self._limit, self._corpus = prompts, target.prompt_limit, corpus
        self._classes = [
            (name, scaled(each.tokens, self._limit), prompts.streamed if each.streamed is None else each.streamed)
            for name, each in prompts.mix.items()
        ]
        self._cumulative = list(accumulate(each.share for each in prompts.mix.values()))
        self._answers = prompts.answer_tokens_.cumulative()
        self._headers = tuple(prompts.headers.items())
        concerns = ("class", "length", "answer", "streamed", "give_up", "start")
        self._class, self._length, self._answer, self._streamed, self._give_up, start = (
            random.Random(f"{seed}/{concern}") for concern in concerns
        )
        self._starts = corpus.places(start)

    def request(self, due_s: float, tokens: tuple[int, int] | None = None, index: int = -1) -> Request:
        """A good request; of lengths such as `tokens`, else those of its class. Its index is final only in the plan."""
        name, usual, streamed = self._classes[drawn(self._class, self._cumulative)]
        text, prompt_tokens = self._text(*(scaled(tokens, self._limit) if tokens else usual))
        give_up, hangs_up = self._prompts.give_up, self._give_up.random()
        return Request(
            index=index,
            due_s=due_s,
            class_name=name,
            path=self._prompts.path,
            text=text,
            prompt_tokens=prompt_tokens,
            max_tokens=1 + drawn(self._answer, self._answers),
            stream=self._streamed.random() < streamed,
            give_up_s=give_up.after_s if give_up and hangs_up < give_up.share else None,
            headers=self._headers,
        )

    def flawed(self, due_s: float, flaw: str, status: int) -> Request:
        """A bad request: one that would be good but for its flaw."""
        asked = replace(
            self.request(due_s, BAD_TOKENS), class_name=BAD, flaw=flaw, expect=(str(status),), give_up_s=None
        )
        if flaw != OVER_LONG:
            return asked
        text, prompt_tokens = self._text(self._limit + 1, 2 * self._limit)
        return replace(asked, text=text, prompt_tokens=prompt_tokens)

    def _text(self, low: int, high: int) -> tuple[tuple[int, int], int]:
        wanted = log_uniform(self._length, low, high)
        begin, end, tokens = self._corpus.span(next(self._starts), wanted, at_least=low)
        return (begin, end), tokens


def _facts(traffic: Traffic, target: Served, corpus: Corpus, requests: list[Request]) -> dict[str, Any]:
    """What a reader should know of the plan without reading it all."""
    steady = traffic.windows[-1]
    of_class = totals(requests)
    kind_of = (
        dict.fromkeys(traffic.prompts.mix, "good") | {BAD: BAD} | dict.fromkeys(traffic.misbehaving, "misbehaving")
    )
    due = sum(steady.start_s <= request.due_s < steady.end_s for request in requests)
    return {
        "planned_rate_per_s": due / traffic.for_s,
        "bad_share": of_class.get(BAD, Counter())["requests"] / len(requests),
        "classes": {name: {"kind": kind_of[name], **sums} for name, sums in sorted(of_class.items())},
        "load_factor": target.load_factor,
        "prompt_limit": target.prompt_limit,
        "exact_answers": traffic.prompts.answer_tokens_.exact and bool(traffic.prompts.dialect.to_the_end),
        "prompt_tokens_are": "of the text alone, without chat template and special tokens",
        "prompt_tokens_worst_difference": corpus.worst_difference,
        "prompt_starts": corpus.starts,
    }


def totals(requests: Iterable[Request]) -> dict[str, Counter[str]]:
    """Requests, tokens and streams of each class."""
    of_class: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for request in requests:
        of_one = of_class[request.class_name]
        of_one["requests"] += 1
        of_one["prompt_tokens"] += request.prompt_tokens
        of_one["answer_tokens"] += request.max_tokens
        of_one["streamed"] += request.stream
    return dict(of_class)
