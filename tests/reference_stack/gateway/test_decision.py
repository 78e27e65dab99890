"""Every kind of request, and the decision it gets."""

import json

import pytest

from reference_stack.gateway.decision import ALLOWED, Decision, Request, decide
from reference_stack.gateway.tokens import Tokens

LIMIT = 50
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "x y " * LIMIT


def decision(tokens: Tokens, body: object, path: str = COMPLETIONS, content_type: str = "application/json") -> Decision:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return decide(Request(path, content_type, raw), tokens, LIMIT)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": "hello"}, COMPLETIONS),
        ({"prompt": " "}, COMPLETIONS),
        ({"prompt": ["hello", "world"]}, COMPLETIONS),
        ({"prompt": [1, 2, 3]}, COMPLETIONS),
        ({"prompt": [[1, 2], [3]]}, COMPLETIONS),
        ({"prompt": "hello"}, COMPLETIONS + "?x=1"),
        ({"prompt": "hello", "model": "nobody's", "max_tokens": -1}, COMPLETIONS),  # the engine's to refuse
        ({"prompt": 7}, COMPLETIONS),  # the engine's to refuse
        ({"messages": [{"role": "user", "content": "hello"}]}, CHAT),
        ({"messages": [{"role": "user", "content": ""}]}, CHAT),
        ({"messages": "hello"}, CHAT),  # the engine's to refuse
        ({"prompt": "hello"}, CHAT),  # the engine's to refuse
    ],
)
def test_allowed(tokens: Tokens, body: object, path: str) -> None:
    """Good requests pass, and so do bad ones that only the engine can judge."""
    assert decision(tokens, body, path) == ALLOWED


@pytest.mark.parametrize(
    ("body", "path", "status", "reason"),
    [
        (b"", COMPLETIONS, 400, "empty_body"),
        (b" \r\n", COMPLETIONS, 400, "empty_body"),
        (b"{", COMPLETIONS, 400, "bad_json"),
        (b"\xff\xfe", COMPLETIONS, 400, "bad_json"),
        (b"[" * 100_000, COMPLETIONS, 400, "bad_json"),
        ([], COMPLETIONS, 400, "bad_json"),
        ("hello", COMPLETIONS, 400, "bad_json"),
        ({}, COMPLETIONS, 422, "missing_prompt"),
        ({"model": "tiny"}, CHAT, 422, "missing_prompt"),
        ({"prompt": ""}, COMPLETIONS, 400, "empty_prompt"),
        ({"prompt": None}, COMPLETIONS, 400, "empty_prompt"),
        ({"prompt": []}, COMPLETIONS, 400, "empty_prompt"),
        ({"prompt": [[]]}, COMPLETIONS, 400, "empty_prompt"),
        ({"prompt": ["hello", ""]}, COMPLETIONS, 400, "empty_prompt"),
        ({"messages": []}, CHAT, 400, "empty_prompt"),
        ({"prompt": LONG}, COMPLETIONS, 422, "prompt_too_long"),
        ({"prompt": LONG}, COMPLETIONS + "/", 422, "prompt_too_long"),
        ({"prompt": ["hello", LONG]}, COMPLETIONS, 422, "prompt_too_long"),
        ({"prompt": [1] * (LIMIT + 1)}, COMPLETIONS, 422, "prompt_too_long"),
        ({"prompt": [[1], [1] * (LIMIT + 1)]}, COMPLETIONS, 422, "prompt_too_long"),
        ({"messages": [{"role": "user", "content": LONG}]}, CHAT, 422, "prompt_too_long"),
    ],
)
def test_refused(tokens: Tokens, body: object, path: str, status: int, reason: str) -> None:
    """Each kind of bad request has a status and a reason of its own."""
    refused = decision(tokens, body, path)
    assert (refused.status, refused.reason) == (status, reason)
    error = json.loads(refused.body())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (reason, "invalid_request_error")


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_wrong_content_type(tokens: Tokens, content_type: str) -> None:
    """A prompt must come as JSON and say so."""
    assert decision(tokens, {"prompt": "hello"}, content_type=content_type).status == 415


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_content_type_spellings(tokens: Tokens, content_type: str) -> None:
    """Parameters and letter case of the content type make no difference."""
    assert decision(tokens, {"prompt": "hello"}, content_type=content_type).allowed


def test_empty_body_needs_no_content_type(tokens: Tokens) -> None:
    """Who sends nothing is told so, not asked for the type of nothing."""
    assert decision(tokens, b"", content_type="").reason == "empty_body"


def test_other_paths_pass_unread(tokens: Tokens) -> None:
    """A path that takes no prompt is not judged as if it did."""
    passed = decision(tokens, b"\x00 audio", "/v1/audio/transcriptions", "multipart/form-data")
    assert (passed.allowed, passed.reason) == (True, "not_a_prompt")


def test_allowed_has_no_body() -> None:
    """A decision to let pass has nothing to say to the client."""
    assert ALLOWED.body() == b""
