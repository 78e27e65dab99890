"""The plan: a function of the scenario, the target and the seed, and nothing else."""

import functools
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from harness import plan_file
from harness.model import Request, UsageError
from harness.traffic import corpus as corpora
from harness.traffic import plan
from harness.traffic.plan import Traffic
from harness.traffic.prompts import Bad

MIX = """
arrivals: {poisson: {rate: 100/s}}
warm_up: 5s
for: 20s
prompts:
  mix:
    short:  {share: 70%, tokens: 16..511}
    medium: {share: 20%, tokens: 512..4095}
    long:   {share: 10%, tokens: 4096..16384}
  answer_tokens: {mean: 32, at_most: 64}
  streamed: 80%
bad:
  share: 10%
  kinds: {empty_body: 400, over_long: 422, unknown_model: 404}
"""
ONE_TOKEN = {"answer_tokens": {"mean": 1, "at_most": 1}}


@dataclass(frozen=True)
class Target:
    tokenizer: Path
    prompt_limit: int = 16_384
    load_factor: float = 1.0


@pytest.fixture(scope="module", autouse=True)
def small_corpora() -> Iterator[None]:
    """A plan does not care how long its corpus is, as long as no two of its prompts begin alike; each is built once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "DRAWN_WORDS", 10_000)
        patch.setattr(corpora, "build", functools.cache(corpora.build))
        yield


@pytest.fixture
def target(tokenizer_dir: Path) -> Target:
    return Target(tokenizer_dir)


def traffic(text: str = MIX, **more: Any) -> Traffic:
    """Traffic as a file would write it; numbers keep their units, so YAML's own reading does."""
    return TypeAdapter(Traffic).validate_python({**yaml.safe_load(text), **more})


def requests_of(traffic: Traffic, target: Target, seed: int = 1) -> list[Request]:
    return plan.make(traffic, target, seed, "test")[1]


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, target: Target) -> None:
    """Plan and corpus are written twice to the same hash; another seed gives another; the file reads back."""
    hashes, short = [], traffic(**{"for": "3s"})
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run_dir = tmp_path / name
        run_dir.mkdir()
        corpora.build.cache_clear()  # type: ignore[attr-defined]  # the same twice over, not the same one
        header, sha256 = plan.write(run_dir, Path("test"), short, target, seed)
        assert sha256 == hashlib.sha256((run_dir / "plan.jsonl").read_bytes()).hexdigest()
        assert header.corpus_sha256 == hashlib.sha256((run_dir / "corpus.bin").read_bytes()).hexdigest()
        hashes.append(sha256)
    assert hashes[0] == hashes[1] != hashes[2]
    header, lines = plan_file.read(tmp_path / "a" / "plan.jsonl")
    read, made = list(lines), requests_of(short, target)
    assert header.requests == len(read) == len(made)
    assert read[17] == replace(made[17], due_s=round(made[17].due_s, 9))
    assert plan.write_alone(tmp_path / "alone", Path("test"), short, target, 1) == hashes[0]


def test_requests_are_numbered_in_the_order_they_are_due(target: Target) -> None:
    """Indices count up from 0, due moments ascend, and nothing is due after the end."""
    requests = requests_of(traffic(misbehaving={"impatient": {"share": "10%", "after": "900ms", "again": 3}}), target)
    assert [request.index for request in requests] == list(range(len(requests)))
    assert all(one.due_s <= two.due_s for one, two in itertools.pairwise(requests))
    assert requests[-1].due_s < 25


def test_the_mix_is_as_stated(target: Target) -> None:
    """Shares of the classes, of streams and of bad requests are the stated ones; token counts stay in their class."""
    requests = requests_of(traffic(**{"for": "90s"}), target)
    good = [request for request in requests if request.good]
    assert abs(len(good) / len(requests) - 0.9) < 0.01
    for name, share, low, high in (("short", 0.7, 16, 511), ("medium", 0.2, 512, 4095), ("long", 0.1, 4096, 16_320)):
        tokens = [request.prompt_tokens for request in good if request.class_name == name]
        assert abs(len(tokens) / len(good) - share) < 0.02
        assert low <= min(tokens) < low * 1.3
        assert high * 0.9 < max(tokens) <= high
    assert abs(sum(request.stream for request in good) / len(good) - 0.8) < 0.02
    answers = [request.max_tokens for request in good]
    assert abs(sum(answers) / len(answers) - 32) < 1
    assert (min(answers), max(answers)) == (1, 64)


def test_bad_requests_are_dealt_evenly_and_know_their_answer(target: Target) -> None:
    """Each flaw comes as often as the others, with its status; over-long prompts lie between one and two limits."""
    bad = [request for request in requests_of(traffic(), target) if request.class_name == "bad"]
    counts = Counter(request.flaw for request in bad)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert {(request.flaw, request.expect) for request in bad} == {
        ("empty_body", ("400",)),
        ("over_long", ("422",)),
        ("unknown_model", ("404",)),
    }
    assert all(16_384 < request.prompt_tokens <= 32_768 for request in bad if request.flaw == "over_long")


def test_one_concern_does_not_move_another(target: Target) -> None:
    """Without its bad requests the plan has the same arrivals, and its good requests are the same as before."""
    short = {"for": "5s"}
    with_bad, without = requests_of(traffic(**short), target), requests_of(traffic(bad=None, **short), target)
    assert [one.due_s for one in with_bad] == [one.due_s for one in without]
    assert all(one == other for one, other in zip(with_bad, without, strict=True) if one.good)
    other_flaw = traffic(bad={"share": "10%", "kinds": {"bad_json": 400}}, **short)
    assert [one.class_name for one in requests_of(other_flaw, target)] == [one.class_name for one in with_bad]


def test_prompts_begin_at_different_places(target: Target) -> None:
    """No two good prompts share their beginning, so that no prefix cache helps by accident."""
    good = [request for request in requests_of(traffic(), target) if request.good]
    assert len({request.text[0] for request in good}) == len(good)


def test_a_small_target_gets_short_prompts_and_a_low_rate(target: Target) -> None:
    """A limit of 2,048 tokens and a load factor of 0.2 scale lengths and rate, and the header says so."""
    small = replace(target, prompt_limit=2048, load_factor=0.2)
    header, requests, _ = plan.make(traffic(), small, 1, "test")
    assert max(request.prompt_tokens for request in requests if request.good) <= 2048 - 64
    assert 350 < len(requests) < 650
    assert (header.facts["prompt_limit"], header.facts["load_factor"]) == (2048, 0.2)


def test_the_header_says_what_is_in_the_plan(target: Target) -> None:
    """Windows, planned rate, bad share and the counts of each class are those of the requests."""
    header, requests, _ = plan.make(traffic(), target, 1, "test")
    assert [(w.name, w.start_s, w.end_s) for w in header.windows] == [("warm_up", 0, 5), ("steady", 5, 25)]
    assert header.time_limit_s == 30
    assert header.facts["planned_rate_per_s"] == sum(request.due_s >= 5 for request in requests) / 20
    assert header.facts["bad_share"] == sum(not request.good for request in requests) / len(requests)
    assert header.facts["classes"]["bad"]["kind"] == "bad"
    assert sum(entry["requests"] for entry in header.facts["classes"].values()) == len(requests)
    assert header.facts["prompt_tokens_worst_difference"] == 0


def test_users_who_give_up_are_good_requests_with_a_moment(target: Target) -> None:
    """A share of the mix hangs up; they stay in their class."""
    prompts = {**yaml.safe_load(MIX)["prompts"], "give_up": {"share": "25%", "after": "300ms"}}
    good = [request for request in requests_of(traffic(prompts=prompts), target) if request.good]
    leaving = [request for request in good if request.give_up_s is not None]
    assert abs(len(leaving) / len(good) - 0.25) < 0.04
    assert {request.give_up_s for request in leaving} == {0.3}
    assert {request.class_name for request in leaving} == {"short", "medium", "long"}


def test_misbehaving_clients_are_classes_of_their_own(target: Target) -> None:
    """Each kind does what it is named for, under its own name and user agent, with the answers that are right."""
    kinds = {
        "hang_up": {"share": "5%", "after": "300ms"},
        "impatient": {"share": "5%", "after": "200ms", "again": 2},
        "forged_address": {"share": "5%"},
        "flood": {"size": 100, "tokens": "4096..8191", "every": "12s"},
        "repeat": {"size": 10, "within": "1s", "every": "7s", "expect": ["2xx", 429, 503]},
    }
    requests = requests_of(traffic(bad=None, misbehaving=kinds), target)
    of = {kind: [request for request in requests if request.class_name == kind] for kind in kinds}
    assert all(("user-agent", f"harness-{kind}") in request.headers for kind in kinds for request in of[kind])
    assert all(request.give_up_s == 0.3 and request.stream for request in of["hang_up"])
    assert {request.expect for request in of["repeat"]} == {("2xx", "429", "503")}
    assert all(
        re.fullmatch(r"203\.0\.113\.\d+", dict(request.headers)["x-forwarded-for"]) for request in of["forged_address"]
    )
    assert Counter(request.due_s for request in of["flood"]) == {12.0: 100, 24.0: 100}
    assert len({request.text for request in of["flood"]}) == 200
    assert min(request.prompt_tokens for request in of["flood"]) >= 4096
    first = of["repeat"][:10]
    assert len({request.text for request in first}) == 1
    assert [round(request.due_s, 6) for request in first] == [round(7 + turn / 10, 6) for turn in range(10)]
    turns = Counter(request.text for request in of["impatient"] if request.due_s < 24)
    assert max(turns.values()) == 3
    good = [request for request in requests if request.class_name in ("short", "medium", "long")]
    assert abs(len(good) / (len(good) + len(of["hang_up"]) + len(of["forged_address"]) + len(turns)) - 0.85) < 0.03


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"misbehaving": {"forged_address": {"share": "50%"}, "hang_up": {"share": "60%", "after": "1s"}}},
            "take 120%",
        ),
        ({"prompts": {**ONE_TOKEN, "mix": {"bad": {"share": "100%", "tokens": "1..2"}}}}, "cannot be called `bad`"),
    ],
)
def test_traffic_that_means_nothing_is_refused(changes: dict[str, Any], words: str) -> None:
    """More than the whole, or a class of the mix named as another kind of request."""
    with pytest.raises(ValueError, match=words):
        traffic(**changes)


def test_a_plan_without_requests_is_refused(target: Target) -> None:
    """Nothing due in the whole run is the user's mistake, not an empty success."""
    with pytest.raises(UsageError, match="nothing is due"):
        requests_of(traffic(arrivals={"poisson": {"rate": "1/h"}}), target)


def test_bad_is_all_of_a_share() -> None:
    """A share of 10 % bad requests is of all arrivals, not on top of them."""
    assert traffic().shares == {"bad": 0.1}
    assert isinstance(traffic().bad, Bad)
