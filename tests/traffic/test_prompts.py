"""Classes, lengths and the bytes of requests."""

import json
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from harness.model import Request
from harness.traffic.flaws import FLAWS, OVERSIZED_BYTES
from harness.traffic.prompts import AnswerTokens, Bad, Composer, Prompts, log_uniform, scaled

TEXT = rb"tell me \"all\" about " + "łódź".encode()


def composed(request: Request, **more: Any) -> tuple[bytes, dict[str, str], bytes]:
    """Request line, headers and body of a request."""
    wire = Composer(TEXT, "tiny", "127.0.0.1:8080", **more).wire(request)
    head, _, body = wire.partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    return line, dict(header.decode().split(": ", 1) for header in headers), body


def asked(**changes: Any) -> Request:
    return Request(
        **{"index": 7, "due_s": 0.0, "class_name": "short", "text": (0, len(TEXT)), "max_tokens": 32} | changes
    )


def test_lengths_inside_a_class_are_log_uniform() -> None:
    """Each octave between the bounds gets the same share, and both bounds occur."""
    rng = random.Random(1)
    drawn = [log_uniform(rng, 16, 511) for _ in range(50_000)]
    assert (min(drawn), max(drawn)) == (16, 511)
    octaves = Counter(int(math.log2(length)) for length in drawn)
    assert max(octaves.values()) / min(octaves.values()) < 1.06


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (16_384, [(16, 511), (512, 4095), (4096, 16_320)]),
        (2048, [(4, 63), (64, 511), (512, 1984)]),
        (32_768, [(32, 1022), (1024, 8190), (8192, 32_704)]),
    ],
)
def test_lengths_scale_with_the_gateways_limit(limit: int, expected: list[tuple[int, int]]) -> None:
    """One line of the target scales all classes; the longest leaves room for the chat template under the limit."""
    assert [scaled(tokens, limit) for tokens in ((16, 511), (512, 4095), (4096, 16_384))] == expected


@pytest.mark.parametrize(("mean", "at_most"), [(32, 64), (1, 64), (64, 64), (8, 100), (60, 64), (1, 1)])
def test_answers_have_the_stated_mean_and_no_more_than_the_most(mean: float, at_most: int) -> None:
    """The law's own mean is the stated one, and its ratios are constant: geometric."""
    cumulative = AnswerTokens(mean=mean, at_most=at_most).cumulative()
    weights = np.diff([0, *cumulative])
    assert len(weights) == at_most
    assert abs(float((weights * np.arange(1, at_most + 1)).sum()) - mean) < 1e-6
    if 1 < mean < at_most:
        ratios = weights[1:] / weights[:-1]
        assert ratios.max() - ratios.min() < 1e-6


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (AnswerTokens, {"mean": 65, "at_most": 64}, "over the most"),
        (
            Prompts,
            {"mix": {"a": {"share": "60%", "tokens": "1..2"}}, "answer_tokens": {"mean": 1, "at_most": 1}},
            "add to 60",
        ),
        (Bad, {"share": "10%", "kinds": {"empty_bodi": 400}}, "no flaw is called `empty_bodi`; there are: empty_body"),
        (Bad, {"share": "10%", "kinds": {"empty_body": 200}}, "greater than or equal to 400"),
    ],
)
def test_a_mix_that_means_nothing_is_refused(kind: Any, value: Any, words: str) -> None:
    """Shares that are no whole, a mean over the most, an unknown flaw, a bad request that is to be served."""
    with pytest.raises(ValidationError, match=words):
        TypeAdapter(kind).validate_python(value)


def test_a_chat_request_is_whole() -> None:
    """Head and body of a streamed chat request: path, host, length, id, and a body that is what was planned."""
    line, headers, body = composed(asked(stream=True), headers={"Authorization": "Bearer x"})
    assert line == b"POST /v1/chat/completions HTTP/1.1"
    assert headers == {
        "host": "127.0.0.1:8080",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": "7",
        "user-agent": "harness",
        "authorization": "Bearer x",
    }
    assert json.loads(body) == {
        "model": "tiny",
        "messages": [{"role": "user", "content": 'tell me "all" about łódź'}],
        "max_tokens": 32,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_completion_is_asked_with_a_prompt() -> None:
    """A path of completions gets `prompt`; without `exact` the model may end sooner; a request's own header wins."""
    request = asked(path="/v1/completions", headers=(("User-Agent", "somebody"),))
    _, headers, body = composed(request, headers={"user-agent": "all"}, exact=False)
    assert json.loads(body) == {"model": "tiny", "prompt": 'tell me "all" about łódź', "max_tokens": 32}
    assert headers["user-agent"] == "somebody"


def test_other_paths_are_asked_in_their_own_words() -> None:
    """Responses bound the answer by another name and take no stream options; embeddings have no answer to bound."""
    _, _, body = composed(asked(path="/v1/responses", stream=True))
    told = {"model": "tiny", "input": 'tell me "all" about łódź'}
    assert json.loads(body) == told | {"max_output_tokens": 32, "stream": True}
    _, _, body = composed(asked(path="/v1/embeddings"))
    assert json.loads(body) == told


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize("flaw", FLAWS)
def test_each_flaw_is_the_one_thing_wrong(flaw: str, path: str) -> None:
    """Every bad request is a good one but for its flaw, and its Content-Length is true."""
    _, headers, body = composed(asked(flaw=flaw, path=path, expect=("4xx",)))
    assert int(headers["content-length"]) == len(body)
    assert (headers["content-type"] != "application/json") == (flaw == "wrong_content_type")
    assert (body == b"") == (flaw == "empty_body")
    if flaw == "empty_body":
        return
    if flaw == "bad_json":
        with pytest.raises(json.JSONDecodeError):
            json.loads(body)
        return
    told = json.loads(body)
    prompt = told.get("messages", told.get("prompt", told.get("input")))
    assert (prompt is None) == (flaw == "missing_prompt")
    assert (prompt in ([], "")) == (flaw == "empty_prompt")
    assert (told["model"] != "tiny") == (flaw == "unknown_model")
    assert (len(body) > 10 * 1024 * 1024) == (flaw == "oversized_body")


def test_the_oversized_body_is_just_over_the_limit() -> None:
    """10 MiB and one byte: over 10 MB however that is counted."""
    assert len(composed(asked(flaw="oversized_body"))[2]) == OVERSIZED_BYTES == 10_485_761
