"""What a client gets for a good request: bodies, frames, usage and finish reasons."""

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.contract.conftest import Engine

TEXT = "the quick brown fox jumps over the lazy dog"
COMPLETION = {"model": "tiny", "prompt": TEXT, "max_tokens": 8, "ignore_eos": True}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "ignore_eos": True}
ASKED = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}

both = pytest.mark.parametrize("path", list(ASKED))


def frames(engine: "Engine", path: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON of every frame of a stream; that it is framed rightly and ends with [DONE] is checked here."""
    reply = engine.post(path, asked | {"stream": True})
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["transfer-encoding"] == "chunked"
    *data, done, end = reply.body.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert all(frame.startswith(b"data: {") and b"\n" not in frame for frame in data)
    return [json.loads(frame.removeprefix(b"data: ")) for frame in data]


def prompt_tokens(engine: "Engine", asked: dict[str, Any]) -> int:
    """What /tokenize counts for a request's prompt or messages."""
    return engine.count({key: asked[key] for key in ("prompt", "messages") if key in asked})


def usage(prompt: int, completion: int) -> dict[str, int]:
    """The usage of an answer, as a stream carries it."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def assert_frame_count(engine: "Engine", got: list[dict[str, Any]]) -> None:
    """Eight tokens come in as many frames, but that real vLLM puts several into one when its front end is behind."""
    assert len(got) == 8 or (engine.kind == "vllm" and 1 <= len(got) < 8)


def test_completion_body(engine: "Engine") -> None:
    """A whole completion has vLLM's fields, its text in one choice, and says how many tokens it took."""
    reply = engine.post("/v1/completions", COMPLETION)
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    body = reply.json
    assert list(body) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        *("kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["system_fingerprint"].startswith("vllm-0.32.0-")
    (choice,) = body["choices"]
    assert list(choice) == [
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs"),
        *("prompt_token_ids", "routed_experts"),
    ]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["text"].strip()
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    assert body["usage"] == usage(prompt_tokens(engine, COMPLETION), 8) | details


def test_chat_body(engine: "Engine") -> None:
    """A whole chat completion has vLLM's fields and its text in an assistant's message."""
    body = engine.post("/v1/chat/completions", CHAT).json
    assert list(body) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        *("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert list(choice) == [
        *("index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"),
    ]
    message = choice["message"]
    assert list(message) == ["role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"]
    assert message["role"] == "assistant"
    assert message["content"].strip()
    assert choice["finish_reason"] == "length"
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    assert body["usage"] == usage(prompt_tokens(engine, CHAT), 8) | details


def test_completion_stream(engine: "Engine") -> None:
    """A completion streams its tokens in frames; the last has finish_reason and the fingerprint."""
    got = frames(engine, "/v1/completions", COMPLETION)
    assert_frame_count(engine, got)
    for frame in got[:-1]:
        assert list(frame) == ["id", "object", "created", "model", "choices"]
    assert list(got[-1]) == ["id", "object", "created", "model", "choices", "system_fingerprint"]
    choices = [frame["choices"][0] for frame in got]
    for choice in choices:
        assert list(choice) == [
            *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"),
        ]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(got) - 1) + ["length"]
    assert {frame["object"] for frame in got} == {"text_completion"}
    assert len({frame["id"] for frame in got}) == 1


def test_chat_stream(engine: "Engine") -> None:
    """A chat streams a frame with the role, then its tokens; the last frame has finish_reason and stop_reason."""
    opening, *got = frames(engine, "/v1/chat/completions", CHAT)
    assert list(opening) == ["id", "object", "created", "model", "choices", "prompt_token_ids", "prompt_text"]
    assert opening["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert_frame_count(engine, got)
    for frame in got[:-1]:
        assert list(frame) == ["id", "object", "created", "model", "choices"]
        assert list(frame["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "token_ids"]
        assert list(frame["choices"][0]["delta"]) == ["content"]
        assert frame["choices"][0]["finish_reason"] is None
    last = got[-1]
    assert list(last) == ["id", "object", "created", "model", "choices", "system_fingerprint"]
    assert list(last["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"]
    assert last["choices"][0]["finish_reason"] == "length"
    assert {frame["object"] for frame in got} == {"chat.completion.chunk"}


@both
def test_usage_frame(engine: "Engine", path: str) -> None:
    """With include_usage a frame without choices, after the finish, carries the usage; the others carry none."""
    *got, closing = frames(engine, path, ASKED[path] | {"stream_options": {"include_usage": True}})
    assert list(closing) == ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    assert closing["choices"] == []
    assert closing["usage"] == usage(prompt_tokens(engine, ASKED[path]), 8)
    assert not any("usage" in frame or "system_fingerprint" in frame for frame in got)


@both
def test_continuous_usage(engine: "Engine", path: str) -> None:
    """With continuous_usage_stats every frame carries the usage so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *got, closing = frames(engine, path, ASKED[path] | {"stream_options": options})
    prompt = prompt_tokens(engine, ASKED[path])
    details = {"completion_tokens_details": None} if "chat" in path else {}
    counts = [frame["usage"]["completion_tokens"] for frame in got]
    assert [frame["usage"] for frame in got] == [usage(prompt, count) | details for count in counts]
    assert counts == sorted(set(counts))
    assert (counts[0] == 0) == ("chat" in path)
    assert counts[-1] == 8
    assert closing["usage"] == usage(prompt, 8)


@both
def test_missing_model_is_the_served_one(engine: "Engine", path: str) -> None:
    """A request that names no model is answered."""
    asked = {key: value for key, value in ASKED[path].items() if key != "model"}
    reply = engine.post(path, asked)
    assert (reply.status, reply.json["model"]) == (200, "tiny")


def test_default_length_of_a_completion(engine: "Engine") -> None:
    """A completion without max_tokens, or with null, has 16 tokens."""
    for asked in ({"prompt": TEXT, "ignore_eos": True}, {"prompt": TEXT, "ignore_eos": True, "max_tokens": None}):
        body = engine.post("/v1/completions", asked).json
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (16, "length")


def test_empty_chat_content(engine: "Engine") -> None:
    """A message with empty content is a good request."""
    asked = {"messages": [{"role": "user", "content": ""}], "max_tokens": 2}
    reply = engine.post("/v1/chat/completions", asked)
    assert reply.status == 200
    assert reply.json["usage"]["prompt_tokens"] == engine.count({"messages": asked["messages"]})


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": TEXT}],
        [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
        [{"role": "user", "content": "一二三 naïve\n\n"}, {"role": "assistant", "content": ""}],
        [{"role": "user"}, {"role": "assistant", "content": None}],
    ],
    ids=["system", "parts", "scripts", "no content"],
)
def test_chat_is_counted_with_its_template(engine: "Engine", messages: list[dict[str, Any]]) -> None:
    """The prompt tokens of a chat are those of the rendered template, as /tokenize counts them."""
    reply = engine.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert reply.json["usage"]["prompt_tokens"] == engine.count({"messages": messages})


def test_chat_counts_agree(engine: "Engine") -> None:
    """The tiny model's template is a role line per message and the beginning of the answer, after one BOS."""
    ids = engine.post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}).json["tokens"]
    assert ids == engine.post("/tokenize", {"prompt": "user: hello\nassistant:"}).json["tokens"]


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]], [TEXT]], ids=["ids", "list of ids", "list of text"])
def test_prompt_forms(engine: "Engine", prompt: list[Any]) -> None:
    """A prompt may be token ids, which are counted as they are, or a list of one prompt."""
    body = engine.post("/v1/completions", {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}).json
    assert body["usage"]["prompt_tokens"] == (engine.count({"prompt": TEXT}) if prompt == [TEXT] else 3)


def test_answer_is_cut_to_the_context(engine: "Engine") -> None:
    """When prompt and max_tokens together exceed the context the answer is cut to what is left, and ends by length."""
    asked = {"prompt": [5] * (engine.max_model_len - 3), "max_tokens": 100, "ignore_eos": True}
    body = engine.post("/v1/completions", asked).json
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (3, "length")


def test_same_request_same_answer(engine: "Engine") -> None:
    """The same greedy request is answered alike, whole or streamed."""
    asked = COMPLETION | {"temperature": 0}
    whole = engine.post("/v1/completions", asked).json["choices"][0]["text"]
    streamed = "".join(frame["choices"][0]["text"] for frame in frames(engine, "/v1/completions", asked))
    assert whole == streamed
