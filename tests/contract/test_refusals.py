"""What a client gets for a bad request: vLLM's status, and its error body."""

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.contract.conftest import Engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
GOOD = {"prompt": "hello", "max_tokens": 2}
CONTENT = "body.messages.0.ChatCompletionDeveloperMessageParam.content"
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}}
HELLO = [{"role": "user", "content": "hello"}]

# name: path, body, headers; then the status, and the error's type and param
REFUSED: dict[str, tuple[str, Any, dict[str, str], int, str, str | None]] = {
    "bad JSON": (COMPLETIONS, b'{"prompt": ', JSON, 400, "Bad Request", "body.11"),
    "empty body": (COMPLETIONS, b"", JSON, 400, "Bad Request", "body"),
    "JSON that is no object": (COMPLETIONS, b"[1]", JSON, 400, "Bad Request", "body"),
    "no content type": (COMPLETIONS, GOOD, {}, 400, "Bad Request", None),
    "wrong content type": (COMPLETIONS, GOOD, {"Content-Type": "text/plain"}, 400, "Bad Request", None),
    "missing prompt": (COMPLETIONS, {"max_tokens": 2}, JSON, 400, "BadRequestError", "prompt"),
    "null prompt": (COMPLETIONS, GOOD | {"prompt": None}, JSON, 400, "BadRequestError", "prompt"),
    "empty prompt": (COMPLETIONS, GOOD | {"prompt": ""}, JSON, 400, "BadRequestError", "prompt"),
    "no prompts": (COMPLETIONS, GOOD | {"prompt": []}, JSON, 400, "BadRequestError", None),
    "messages on completions": (COMPLETIONS, {"messages": HELLO}, JSON, 400, "BadRequestError", "prompt"),
    "prompt on chat": (CHAT, GOOD, JSON, 400, "Bad Request", "body.messages"),
    "no messages": (CHAT, {"messages": [], "max_tokens": 2}, JSON, 400, "BadRequestError", None),
    "null messages": (CHAT, {"messages": None}, JSON, 400, "BadRequestError", None),
    "messages in one text": (CHAT, {"messages": "hello"}, JSON, 400, "Bad Request", "body.messages"),
    "content that is no text": (
        CHAT,
        {"messages": [{"role": "user", "content": 5}]},
        JSON,
        400,
        "Bad Request",
        CONTENT,
    ),
    "null content": (CHAT, {"messages": [{"role": "user", "content": None}]}, JSON, 400, "Bad Request", CONTENT),
    "part that is no text": (
        CHAT,
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        JSON,
        400,
        "BadRequestError",
        None,
    ),
    "half a surrogate pair": (COMPLETIONS, b'{"prompt": "\\ud800"}', JSON, 400, "BadRequestError", None),
    "unknown model": (COMPLETIONS, GOOD | {"model": "other"}, JSON, 404, "NotFoundError", "model"),
    "unknown model, chat": (CHAT, {"messages": HELLO, "model": "other"}, JSON, 404, "NotFoundError", "model"),
    "prompt fills the context": (COMPLETIONS, {"prompt": [5] * 2304}, JSON, 400, "BadRequestError", "max_tokens"),
    "prompt over the context": (COMPLETIONS, {"prompt": [5] * 2305}, JSON, 400, "BadRequestError", "input_tokens"),
    "over-long text": (COMPLETIONS, {"prompt": "a " * 10_000}, JSON, 400, "BadRequestError", "input_tokens"),
    "over-long by characters": (COMPLETIONS, {"prompt": "a" * 500_000}, JSON, 400, "BadRequestError", "input_text"),
    "max_tokens 0": (COMPLETIONS, GOOD | {"max_tokens": 0}, JSON, 400, "BadRequestError", "max_tokens"),
    "max_tokens -1": (COMPLETIONS, GOOD | {"max_tokens": -1}, JSON, 400, "BadRequestError", "max_tokens"),
    "max_tokens over the context": (
        COMPLETIONS,
        GOOD | {"max_tokens": 2305},
        JSON,
        400,
        "BadRequestError",
        "max_tokens",
    ),
    "max_tokens no number": (COMPLETIONS, GOOD | {"max_tokens": "many"}, JSON, 400, "Bad Request", "body.max_tokens"),
    "temperature -1": (COMPLETIONS, GOOD | {"temperature": -1}, JSON, 400, "BadRequestError", "temperature"),
    "temperature NaN": (
        COMPLETIONS,
        b'{"prompt": "a", "temperature": NaN}',
        JSON,
        400,
        "BadRequestError",
        "temperature",
    ),
    "top_p 0": (COMPLETIONS, GOOD | {"top_p": 0}, JSON, 400, "BadRequestError", "top_p"),
    "n 0": (COMPLETIONS, GOOD | {"n": 0}, JSON, 400, "BadRequestError", None),
    "unknown token id": (COMPLETIONS, GOOD | {"prompt": [999_999]}, JSON, 400, "BadRequestError", None),
    "stream options without stream": (
        *(COMPLETIONS, GOOD | {"stream_options": {"include_usage": True}}, JSON),
        *(400, "BadRequestError", "stream_options"),
    ),
    "bad parameter in a stream": (
        *(COMPLETIONS, GOOD | {"stream": True, "temperature": -1}, JSON),
        *(400, "BadRequestError", "temperature"),
    ),
    "bad length in a chat stream": (
        *(CHAT, {"messages": HELLO, "stream": True, "max_completion_tokens": 2305}, JSON),
        *(400, "BadRequestError", "max_completion_tokens"),
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refusal(engine: "Engine", name: str) -> None:
    """Each kind of bad request is refused with its status and an error of four fields in plain JSON, never a stream."""
    path, body, headers, status, kind, param = REFUSED[name]
    reply = engine.post(path, body, headers)
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    assert list(reply.json) == ["error"]
    error = reply.json["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)


def test_large_body_is_refused_by_its_content(engine: "Engine") -> None:
    """A body of 8 MB is read, and refused for its length in characters."""
    reply = engine.post(COMPLETIONS, json.dumps({"prompt": "x" * 8_000_000}).encode())
    assert (reply.status, reply.json["error"]["param"]) == (400, "input_text")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_get_is_not_allowed(engine: "Engine", path: str) -> None:
    """GET on a POST path is 405, with the web framework's own body."""
    reply = engine.get(path)
    assert (reply.status, reply.json) == (405, {"detail": "Method Not Allowed"})
    assert reply.headers["allow"] == "POST"


def test_unreadable_body(engine: "Engine") -> None:
    """A body that is no UTF-8 is 400, with the web framework's own body."""
    reply = engine.post(COMPLETIONS, b'{"prompt": "\xff"}')
    assert (reply.status, reply.json) == (400, {"detail": "There was an error parsing the body"})


def test_unknown_path(engine: "Engine") -> None:
    """A path that is not there is 404, with the web framework's own body."""
    reply = engine.get("/generate")
    assert (reply.status, reply.json) == (404, {"detail": "Not Found"})


def test_refusals_leave_no_trace(engine: "Engine") -> None:
    """A refused request is neither running nor waiting nor counted as served."""
    before = engine.sample("vllm:e2e_request_latency_seconds_count")
    engine.post(COMPLETIONS, GOOD | {"temperature": -1})
    engine.post(COMPLETIONS, {"prompt": [5] * 2305})
    assert engine.sample("vllm:e2e_request_latency_seconds_count") == before
    assert engine.sample("vllm:num_requests_running") == 0
    assert engine.sample("vllm:num_requests_waiting") == 0
