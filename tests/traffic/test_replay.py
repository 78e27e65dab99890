"""A recording becomes a plan: the same requests, their moments, who waits for whom, which answers are right."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from harness import plan_file, scenario
from harness.log import Blocks
from harness.model import Finish, Observation, Outcome, Request, Tag, UsageError
from harness.traffic import corpus as corpora
from harness.traffic import plan, recording
from harness.traffic.dialects import DIALECTS
from harness.traffic.plan import Made
from harness.traffic.recording import Answered, Recorded, RecordingHeader
from harness.traffic.replay import CLASSES, Replay, class_of

SERVED = Answered(
    status=200,
    first_byte_s=0.1,
    first_token_s=0.2,
    last_token_s=0.5,
    ended_s=0.6,
    gaps_s=(0.1, 0.2),
    tokens_in=12,
    tokens_out=3,
    finish=Finish.STOP,
    shape=7,
    whole=True,
)


@dataclass(frozen=True)
class Target:
    tokenizer: Path = Path("none")
    prompt_limit: int = 1024
    load_factor: float = 0.1


def body_of(text: str, model: str = "captured") -> bytes:
    body = b'{"model":"%b","prompt":"%b"}' % (model.encode(), text.encode())
    return b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def recorded(at_s: float, connection: int = 0, answer: Answered = SERVED, **more: Any) -> Recorded:
    usual: dict[str, Any] = {"turn": 0, "method": "POST", "path": "/v1/completions", "raw": body_of(f"at {at_s}")}
    return Recorded(at_s, connection, **usual | more, answer=answer)


def answered(status: int, **more: Any) -> Answered:
    return Answered(status=status, first_byte_s=0.01, ended_s=0.02, whole=True, **more)


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Records exchanges and plans their replay."""

    def make(*exchanges: Recorded, header: dict[str, Any] | None = None, target: Any = None, **settings: Any) -> Made:
        return replay(tmp_path, exchanges, header, **settings).plan(target or Target(), 1, "test.yaml", False)

    return make


def replay(
    directory: Path, exchanges: Sequence[Recorded], header: dict[str, Any] | None = None, **settings: Any
) -> Replay:
    path = directory / "recording.jsonl"
    lasts_s = exchanges[-1].at_s if exchanges else 0.0
    told = {"sources": ("one.pcap",), "requests": len(exchanges), "connections": 1, "lasts_s": lasts_s}
    recording.write(path, RecordingHeader(**told | (header or {})), exchanges)
    return TypeAdapter(Replay).validate_python({"replay": str(path), **settings})


def dues(made: Made) -> list[float]:
    return [round(request.due_s, 9) for request in made.requests]


def test_every_request_keeps_its_moment_and_its_bytes(made: Any) -> None:
    """Under the open order; a pass ends one mean gap after its last request, and the load factor does not count."""
    plan = made(recorded(0.0), recorded(0.5), recorded(2.0), header={"lost_share": 0.25, "account": {"packets": 9}})
    assert dues(plan) == [0.0, 0.5, 2.0]
    assert [plan.corpus[slice(*request.text)] for request in plan.requests] == [
        body_of(f"at {at_s}") for at_s in (0.0, 0.5, 2.0)
    ]
    assert all(request.raw and request.expect == ("2xx",) for request in plan.requests)
    (steady,) = plan.header.windows
    assert (steady.name, steady.start_s, steady.end_s) == ("steady", 0.0, 3.0)
    assert plan.header.corpus_sha256 == hashlib.sha256(plan.corpus).hexdigest()
    told = plan.header.facts["replay"]
    assert (told["lost_share"], told["lost_at_most"], told["account"]) == (0.25, 0.01, {"packets": 9})
    assert told["rewrite"] == {"model": "captured", "path": {}}
    assert plan.header.facts["planned_rate_per_s"] == pytest.approx(1.0)


def test_equal_bytes_are_kept_once(made: Any) -> None:
    """Whoever asks the same again points to the same span."""
    plan = made(*(recorded(at_s, raw=body_of("same")) for at_s in (0.0, 1.0, 2.0)), recorded(3.0), loop=3)
    assert plan.corpus == body_of("same") + body_of("at 3.0")
    assert len({request.text for request in plan.requests}) == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 1, 11, 12]),
        ({"speed": "2x"}, [0, 0.5, 5.5, 6]),
        ({"speed": "0.5x"}, [0, 2, 22, 24]),
        ({"longest_gap": "4s"}, [0, 1, 5, 6]),
        ({"longest_gap": "4s", "speed": "2x"}, [0, 0.5, 2.5, 3]),
        ({"from": "1s"}, [0, 10, 11]),
        ({"from": "6s"}, [5, 6]),
        ({"from": "6s", "longest_gap": "2s"}, [2, 3]),
        ({"until": "12s"}, [0, 1, 11]),
        ({"from": "1s", "until": "11s"}, [0]),
    ],
)
def test_moments_are_scaled_cut_and_selected(made: Any, settings: dict[str, Any], expected: list[float]) -> None:
    """From one anchor: nothing is summed up that could drift; the silence before the first request is kept."""
    assert dues(made(*map(recorded, (0.0, 1.0, 11.0, 12.0)), **settings)) == expected


def test_a_loop_plays_all_again_in_new_groups(made: Any) -> None:
    """Passes follow each other at the mean gap, and no pass shares a connection with another."""
    plan = made(recorded(0.0, 5), recorded(1.0, 9), loop=2, warm_up="1500ms")
    assert dues(plan) == [0.0, 1.0, 2.0, 3.0]
    assert [request.group for request in plan.requests] == [0, 1, 2, 3]
    assert [request.index for request in plan.requests] == [0, 1, 2, 3]
    assert [(w.name, w.start_s, w.end_s) for w in plan.header.windows] == [("warm_up", 0, 1.5), ("steady", 1.5, 4.0)]


def links(plan: Made) -> list[tuple[int | None, int | None, float]]:
    return [(request.group, request.after, round(request.think_s, 9)) for request in plan.requests]


CONVERSATION = (
    recorded(0.0, 1, session="a"),
    recorded(0.2, 2, session="b"),
    recorded(2.0, 1, session="a"),  # 1.4 s after the end of the one before
    recorded(3.0, 3, session="a"),
    recorded(3.1, 3, session="a"),  # sent before the answer to the one before was over
)


def test_under_the_open_order_nobody_waits(made: Any) -> None:
    """Connections are kept as groups all the same."""
    assert links(made(*CONVERSATION)) == [(0, None, 0), (1, None, 0), (0, None, 0), (2, None, 0), (2, None, 0)]


def test_under_connection_the_user_thinks_as_long_as_then(made: Any) -> None:
    """Think time scales with the speed; a request that did not wait keeps its moment; loops do not wait for loops."""
    plan = made(*CONVERSATION, order="connection", speed="2x", loop=2)
    first = [(0, None, 0), (1, None, 0), (0, 0, 0.7), (2, None, 0), (2, None, 0)]
    again = [(3, None, 0), (4, None, 0), (3, 5, 0.7), (5, None, 0), (5, None, 0)]
    assert links(plan) == first + again


def test_under_session_a_conversation_spans_connections(made: Any) -> None:
    """Requests that name no session belong to their connection; long thoughts are cut as other gaps are."""
    plan = made(*CONVERSATION, recorded(9.0, 2, session=""), order="session", longest_gap="1s")
    assert links(plan) == [(0, None, 0), (1, None, 0), (0, 0, 1.0), (0, 2, 0.4), (0, None, 0), (2, None, 0)]


@pytest.mark.parametrize(
    ("before", "one", "after"),
    [
        ({}, {}, 0),
        ({}, {"pipelined": True}, None),
        ({"answer": Answered()}, {}, None),  # nobody saw it end
        ({"answer": replace(SERVED, lost="gap")}, {}, None),
        ({"answer": Answered(), "give_up_s": 0.5}, {}, 0),  # it ended when the client hung up
    ],
)
def test_only_who_waited_waits(made: Any, before: dict[str, Any], one: dict[str, Any], after: int | None) -> None:
    """Pipelined requests and those after an answer that was lost keep their moment."""
    plan = made(recorded(0.0, **before), recorded(1.0, **one), order="connection")
    assert plan.requests[1].after == after
    assert plan.requests[1].think_s == pytest.approx(0.0 if after is None else 0.5 if "give_up_s" in before else 0.4)


@pytest.mark.parametrize(
    ("one", "expect", "flaw", "outcome"),
    [
        ({}, ("2xx",), "", Outcome.OK),
        ({"stream": True}, ("2xx",), "", Outcome.OK),
        ({"answer": answered(204), "path": "/health"}, ("2xx",), "", Outcome.OK),
        ({"answer": answered(404)}, ("404",), "refused_404", Outcome.REJECTED_AS_EXPECTED),
        ({"answer": answered(400), "flaw": "bad_json"}, ("400",), "bad_json", Outcome.REJECTED_AS_EXPECTED),
        ({"answer": answered(307)}, ("307",), "refused_307", Outcome.REJECTED_AS_EXPECTED),
        ({"answer": answered(429)}, ("2xx",), "", Outcome.RATE_LIMITED),
        ({"answer": answered(408)}, ("2xx",), "", Outcome.REJECTED),
        ({"answer": answered(503)}, ("2xx",), "", Outcome.HTTP_5XX),
        ({"answer": Answered()}, ("2xx",), "", Outcome.RESET),
        ({"answer": Answered(), "flaw": "bad_chunk"}, ("4xx",), "bad_chunk", Outcome.RESET),
        ({"answer": replace(SERVED, error=True)}, ("2xx",), "", Outcome.ERROR_IN_STREAM),
        ({"answer": replace(SERVED, whole=False)}, ("2xx",), "", Outcome.TRUNCATED),
        ({"answer": replace(SERVED, whole=False), "give_up_s": 0.3}, ("2xx",), "", Outcome.CANCELLED_BY_US),
        ({"answer": replace(SERVED, whole=False, lost="gap")}, ("2xx",), "", Outcome.OPEN),
        ({"answer": replace(SERVED, whole=False, lost="closed")}, ("2xx",), "", Outcome.TRUNCATED),
        ({"answer": Answered(lost="gap")}, ("2xx",), "", Outcome.OPEN),
        ({"answer": replace(SERVED, finish=Finish.UNSAID)}, ("2xx",), "", Outcome.TRUNCATED),
        ({"answer": replace(SERVED, finish=Finish.UNSAID), "path": "/v1/responses"}, ("2xx",), "", Outcome.OK),
        ({"answer": answered(200, finish=Finish.STOP), "stream": True}, ("2xx",), "", Outcome.EMPTY),
        ({"answer": answered(200), "stream": True, "path": "/events"}, ("2xx",), "", Outcome.OK),
    ],
)
def test_the_capture_says_what_is_right(
    made: Any, one: dict[str, Any], expect: tuple[str, ...], flaw: str, outcome: Outcome
) -> None:
    """What was served is to be served and what was refused is to be refused; busy moments make no rule."""
    plan = made(recorded(0.0, **one))
    (request,), (seen,) = plan.requests, plan.captured
    assert (request.expect, request.flaw, seen.outcome) == (expect, flaw, outcome)


def test_captured_answers_are_observations_of_the_plan(made: Any) -> None:
    """Moments count from the due one; the speed does not scale what the stack took."""
    aborted = recorded(2.0, answer=replace(SERVED, whole=False, gaps_s=(0.0,)), stream=True, give_up_s=0.3)
    plan = made(recorded(1.0, stream=True), aborted, speed="2x")
    whole, gone = plan.captured
    assert whole == Observation(
        0, 0.5, 0.5, 0.6, 0.7, 1.0, 1.1, 12, 3, 200, Outcome.OK, Tag.STREAMED, finish=Finish.STOP, shape=7,
        gaps_s=(0.1, 0.2),
    )  # fmt: skip
    assert gone.tags == Tag.STREAMED | Tag.GAVE_UP | Tag.COALESCED
    assert (gone.due_s, gone.ended_s) == (1.0, 1.3)
    assert (plan.requests[1].give_up_s, plan.requests[1].stream) == (0.3, True)


def test_the_files_hold_the_plan_and_what_was_captured(tmp_path: Path) -> None:
    """A run directory gets all three; `harness plan` alone writes the plan, the same to the byte."""
    traffic = replay(tmp_path, [recorded(0.0), recorded(1.0, answer=Answered(), half_close_s=0.1)], loop=2)
    header, sha256 = plan.write(tmp_path, Path("s.yaml"), traffic, Target(), 1)
    assert plan.write_alone(tmp_path / "alone.jsonl", Path("s.yaml"), traffic, Target(), 1) == sha256
    read_header, requests = plan_file.read(tmp_path / "plan.jsonl")
    assert read_header == header
    assert [(r.index, r.raw, r.half_close_s) for r in requests] == [
        (0, True, None), (1, True, 0.1), (2, True, None), (3, True, 0.1)
    ]  # fmt: skip
    rows = np.concatenate([records for records, _ in Blocks(tmp_path / "captured.bin").new()])
    assert rows["index"].tolist() == [0, 1, 2, 3]
    assert rows["status"].tolist() == [200, 0, 200, 0]
    assert math.isnan(rows["ended_s"][1])


def test_most_requests_name_the_model_that_the_targets_takes_the_place_of(made: Any) -> None:
    """Unless the scenario names it; what cannot be read is counted, not guessed at."""
    exchanges = [recorded(float(k), raw=body_of("x", name)) for k, name in enumerate(("a", "b", "b"))]
    exchanges.append(recorded(3.0, raw=body_of("x", "b")[:-1]))
    exchanges.append(recorded(4.0, path="/health", raw=b"GET /health HTTP/1.1\r\n\r\n"))
    told = made(*exchanges).header.facts["replay"]
    assert (told["rewrite"]["model"], told["models"]) == ("b", {"b": 2, "a": 1, "": 1})
    named = made(*exchanges, rewrite={"model": "a", "path": {"/v1": "/v2"}}).header.facts["replay"]
    assert named["rewrite"] == {"model": "a", "path": {"/v1": "/v2"}}
    with pytest.raises(UsageError, match="names the model c; they name: b, a"):
        made(*exchanges, rewrite={"model": "c"})


def test_a_source_of_token_counts_gets_prompts_of_that_length(
    tokenizer_dir: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composed, not raw; none longer than the target takes, and nothing to compare with."""
    monkeypatch.setattr(corpora, "DRAWN_WORDS", 10_000)
    bare: dict[str, Any] = {"raw": b"", "max_tokens": 5, "answer": Answered()}
    counts = [recorded(0.0, prompt_tokens=40, **bare), recorded(1.0, prompt_tokens=9000, **bare)]
    other = recorded(2.0, raw=b"", path="/metrics", answer=Answered())
    plan = made(*counts, other, header={"timing_only": True}, target=Target(tokenizer_dir))
    short, long = plan.requests
    assert (short.raw, short.max_tokens, short.expect) == (False, 5, ("2xx",))
    assert 30 <= short.prompt_tokens <= 40 < long.prompt_tokens <= 1024
    assert not plan.captured
    assert plan.header.facts["replay"]["left_out"] == 1
    with pytest.raises(UsageError, match=r"no request of .* is to a path"):
        made(other, header={"timing_only": True}, target=Target(tokenizer_dir))


def test_prompts_of_a_trace_begin_alike_where_they_did(
    tokenizer_dir: Path, made: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of the same number have the same words, their token counts are exact, and a rest without one is new."""
    monkeypatch.setattr(corpora, "DRAWN_WORDS", 10_000)
    bare: dict[str, Any] = {"raw": b"", "max_tokens": 5, "answer": Answered()}
    asked = [(1000, (1, 2)), (1200, (1, 2, 3)), (900, (1, 4)), (600, (5, 6)), (700, (1,))]
    ones = [recorded(float(k), prompt_tokens=n, blocks=ids, **bare) for k, (n, ids) in enumerate(asked)]
    plan = made(*ones, header={"timing_only": True}, target=Target(tokenizer_dir, prompt_limit=4096))
    texts = [plan.corpus[begin:end].decode() for begin, end in (request.text for request in plan.requests)]
    for text, request, (tokens, _) in zip(texts, plan.requests, asked, strict=True):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == request.prompt_tokens
        assert tokens - 20 < request.prompt_tokens <= tokens
    shared = [_alike(texts[0], text) / len(texts[0]) for text in texts]
    assert shared[0] == shared[1] == 1.0
    assert 0.45 < shared[2] < 0.6
    assert shared[3] < 0.01
    assert 0.45 < shared[4] < 0.6


def _alike(one: str, other: str) -> int:
    """How many signs two texts begin alike with."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_classes_are_endpoints() -> None:
    """Each path that a dialect is spoken on has a class."""
    assert set(CLASSES) == set(DIALECTS)
    paths = ("/v1/chat/completions", "/v1/completions", "/x/embeddings?y=1", "/v1/responses", "/v1/models")
    assert [class_of(path) for path in paths] == ["chat", "completions", "embeddings", "responses", "other"]


SCENARIO = """claim: As it was.
traffic:
  replay: recording.jsonl
  order: open
  speed: 1x
gates:
  - success: {at_least: 99%}
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("recording.jsonl", "none.jsonl", "mine.yaml:3: there is no file none.jsonl"),
        ("recording.jsonl", "mine.yaml", "mine.yaml:3: mine.yaml is no recording"),
        ("speed: 1x", "speed: 0x", "mine.yaml:5: `traffic.speed`: 0x is no multiple"),
        ("speed: 1x", "speed: 2", "mine.yaml:5: `traffic.speed`: 2 is not a multiple such as 1.2x"),
        ("speed: 1x", "sped: 1x", "mine.yaml:5: unknown key `sped` in `traffic`; did you mean `speed`?"),
        ("speed: 1x", "arrivals: {}", "mine.yaml:5: unknown key `arrivals` in `traffic`; there are: replay, order"),
        ("order: open", "order: closed", "mine.yaml:4: `traffic.order`: input should be 'open', 'connection' or"),
        ("speed: 1x", "rewrite: {path: {v1: /v2}}", "mine.yaml:5: `traffic.rewrite.path.v1`: string should match"),
        ("speed: 1x", "loop: 0", "mine.yaml:5: `traffic.loop`: input should be greater than or equal to 1"),
        ("speed: 1x", "from: 9s", "mine.yaml:3: nothing of recording.jsonl is played: its last request is 1 s"),
        ("speed: 1x", "from: 3s\n  until: 2s", "`traffic`: `until` is not after `from`"),
        ("99%", "99%, class: chat", "mine.yaml:7: success: recording.jsonl has no request of class `chat`; there are"),
        ("99%", "99%, class: chatt", "mine.yaml:7: success: there is no class `chatt`; did you mean `chat`?"),
        ("success: {at_least: 99%}", "rejections: exact", "mine.yaml:7: rejections judges nothing: no request of"),
        ("gates:", "on_inconclusive: extend\ngates:", "mine.yaml:6: a recording cannot be extended"),
        ("99%", "99%, window: warm_up", "success: there is no window `warm_up`"),
    ],
)
def test_a_mistake_in_a_scenario_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, said: str
) -> None:
    """Files, keys, units, and what the recording does not hold."""
    monkeypatch.chdir(tmp_path)
    replay(tmp_path, [recorded(0.0), recorded(1.0)])
    path = Path("mine.yaml")
    path.write_text(SCENARIO)
    assert scenario.load(path).traffic.classes
    path.write_text(SCENARIO.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        scenario.load(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_finished_replay_is_judged_without_its_recording(tmp_path: Path) -> None:
    """All that it takes lies in the run directory; the part of the recording that was refused may be gated there."""
    path = tmp_path / "mine.yaml"
    path.write_text(SCENARIO.replace("99%", "99%, class: chat") + "  - rejections: exact\n")
    assert len(scenario.load(path, to_plan=False).gates) == 2


def test_a_source_without_answers_is_compared_with_nothing(tmp_path: Path) -> None:
    """Said before the run, with the gate's line."""
    traffic = replay(tmp_path, [recorded(0.0, raw=b"", answer=Answered())], {"timing_only": True})
    path = tmp_path / "mine.yaml"
    path.write_text(SCENARIO.replace("recording.jsonl", str(traffic.replay)).replace("success: {at_least: 99%}", GATE))
    with pytest.raises(
        UsageError, match=r"mine\.yaml:7: same_answers compares with captured answers, and .* holds times"
    ):
        scenario.load(path)


GATE = "same_answers: {rejected_then_accepted: 0}"


@pytest.mark.parametrize(
    ("exchanges", "settings", "said"),
    [
        ([recorded(1.0), recorded(0.5)], {}, r"recording\.jsonl:3: this exchange comes before"),
        ([], {}, "nothing of .* is played"),
        ([recorded(0.0), recorded(1.0)], {"warm_up": "2s"}, "over after 2 s: its warm-up leaves nothing"),
    ],
)
def test_a_recording_that_cannot_be_played_is_refused(
    made: Any, exchanges: list[Recorded], settings: dict[str, Any], said: str
) -> None:
    """Out of order, empty, or over before anything is judged."""
    with pytest.raises(UsageError, match=said):
        made(*exchanges, **settings)


def test_refused_requests_may_be_gated(tmp_path: Path) -> None:
    """The look finds the classes of the part that is played, and whether any was refused."""
    exchanges = [recorded(0.0), recorded(1.0, answer=answered(413)), recorded(2.0, path="/v1/embeddings")]
    assert replay(tmp_path, exchanges).look() == (("completions", "embeddings"), True, True)
    assert replay(tmp_path, exchanges, until="1s").look() == (("completions",), True, False)
    assert replay(tmp_path, exchanges, {"timing_only": True}).look()[1:] == (False, False)


def test_a_request_survives_its_line(made: Any) -> None:
    """All that a captured request needs is in the plan's file."""
    plan = made(*CONVERSATION, recorded(9.0, 1, half_close_s=0.2), order="connection")
    lines = list(plan_file.lines(plan.header, plan.requests))
    again: list[Request] = [plan_file.read_request(line) for line in lines[1:]]
    assert again == list(plan.requests)
