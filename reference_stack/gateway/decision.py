"""Which requests reach a GPU? One pure function from a request to a decision.

It refuses what no engine should spend time on: no JSON, no prompt, too long a prompt. What it lets pass it does not
touch, and what the engine alone can know (the model's name, the range of a parameter) it leaves to the engine.
"""

from dataclasses import dataclass
from typing import Any

import orjson

from reference_stack.gateway.tokens import Tokens, TooManyTokensError

PROMPT_PATHS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}


@dataclass(frozen=True)
class Request:
    """What the decision is made of. `path` may carry a query; `content_type` is the header's raw value."""

    path: str
    content_type: str
    body: bytes


@dataclass(frozen=True)
class Decision:
    """The answer to a request: let it pass (status 200), or refuse it with this status and OpenAI's error body.

    `reason` is a word for the metrics and the error's `code`; `param` names the field at fault.
    """

    status: int
    reason: str
    message: str = ""
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def allowed(self) -> bool:
        """Whether the request may go to an engine."""
        return self.status == 200

    def body(self) -> bytes:
        """The refusal in OpenAI's error shape; nothing for a request that passes."""
        if self.allowed:
            return b""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.reason}
        return orjson.dumps({"error": error})


ALLOWED = Decision(200, "ok")
NOT_A_PROMPT = Decision(200, "not_a_prompt")


def decide(request: Request, tokens: Tokens, prompt_limit: int) -> Decision:
    """The decision on one request; a prompt may have `prompt_limit` tokens. Paths that take no prompt pass unread."""
    field = PROMPT_PATHS.get(request.path.partition("?")[0].rstrip("/"))
    if field is None:
        return NOT_A_PROMPT
    if not request.body.strip():
        return Decision(400, "empty_body", "The request body is empty.")
    if request.content_type.partition(";")[0].strip().lower() != "application/json":
        return Decision(415, "wrong_content_type", "The content type must be application/json.")
    try:
        document = orjson.loads(request.body)
    except orjson.JSONDecodeError as error:
        return Decision(400, "bad_json", f"The request body is not JSON: {error}")
    if not isinstance(document, dict):
        return Decision(400, "bad_json", "The request body must be a JSON object.")
    return _document(document, field, tokens, prompt_limit)


def _document(document: dict[str, Any], field: str, tokens: Tokens, limit: int) -> Decision:
    if field not in document:
        if "prompt" in document or "messages" in document:
            return ALLOWED  # the field of another path: the engine refuses it in its own words
        return Decision(
            422, "missing_prompt", f"The request has neither prompt nor messages: {field} is needed.", field
        )
    prompt = document[field]
    if _empty(prompt):
        return Decision(400, "empty_prompt", f"{field} is empty.", field)
    try:
        if field == "prompt":
            return _completion(prompt, tokens, limit)
        if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
            tokens.check_chat(prompt, document.get("tools"), limit)
    except TooManyTokensError as error:
        return Decision(422, "prompt_too_long", str(error), field)
    return ALLOWED


def _completion(prompt: Any, tokens: Tokens, limit: int) -> Decision:
    """A completion's prompt: a text, a list of token ids, or a list of either."""
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = prompt if several else [prompt]
    if any(_empty(one) for one in prompts):
        return Decision(400, "empty_prompt", "prompt is empty.", "prompt")
    ids = max((len(one) for one in prompts if isinstance(one, list)), default=0)
    if ids > limit:
        raise TooManyTokensError(f"The prompt has {ids} tokens; at most {limit} are allowed.")
    tokens.check_texts([one for one in prompts if isinstance(one, str)], limit)
    return ALLOWED


def _empty(prompt: Any) -> bool:
    return prompt is None or prompt in ("", [])
