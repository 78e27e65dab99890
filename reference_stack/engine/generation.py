"""A generation request as it arrives: read and checked in vLLM's order, refused with vLLM's status and error body.

Measured against vLLM 0.32; the contract suite holds both to it. n > 1, several prompts in one request, echo, stop
strings, logprobs and tools are left out: the first two are refused, the others have no effect. Numbers given as text,
which vLLM takes, are refused.
"""

import json
from dataclasses import dataclass
from typing import Any

from reference_stack.engine.tokens import Tokens


class UnreadableBodyError(Exception):
    """A body whose bytes are no text: answered by the web framework, not by vLLM."""


class RequestError(Exception):
    """A request that is refused: the status and the body that say so."""

    def __init__(self, message: str, param: str | None = None, kind: str = "BadRequestError", status: int = 400):
        """Refuse with `status`; `kind` and `param` are the error's type and the parameter at fault."""
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True)
class Generation:
    """What is asked of the model: a text or token ids to continue, and how the answer is to be sent."""

    prompt: str | list[int]
    special_tokens: bool  # BOS is still to be added to a text
    max_tokens: int | None
    limited_by: str  # the parameter that max_tokens came from
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool


def read_json(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object of a body. Raises RequestError or UnreadableBodyError as FastAPI and vLLM's own check do."""
    if content_type.split(";", 1)[0].strip().lower() != "application/json":
        raise _invalid("Unsupported Media Type: Only 'application/json' is allowed", None)
    if not body:
        raise _invalid("Field required", "body")
    try:
        document = json.loads(body)
    except json.JSONDecodeError as error:
        raise _invalid(f"JSON decode error: {error.msg}", f"body.{error.pos}") from error
    except UnicodeDecodeError as error:
        raise UnreadableBodyError("There was an error parsing the body") from error
    if not isinstance(document, dict):
        raise _invalid("Input should be a valid dictionary", "body")
    return document


def read(document: dict[str, Any], chat: bool, model: str, tokens: Tokens) -> Generation:
    """The request in a JSON object. Raises RequestError for what vLLM refuses before it counts tokens."""
    prompt = tokens.render(_messages(document)) if chat else _prompt(document)
    options = document.get("stream_options") or {}
    if options and not document.get("stream"):
        raise RequestError("Stream options can only be defined when `stream=True`.", "stream_options")
    _check_types(document)
    check_model(document, model)
    _check_sampling(document)
    stream = bool(document.get("stream"))
    limited_by = "max_completion_tokens" if chat and document.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = document.get(limited_by)
    return Generation(
        prompt=prompt,
        special_tokens=not chat,
        max_tokens=16 if max_tokens is None and not chat else max_tokens,
        limited_by=limited_by,
        ignore_eos=bool(document.get("ignore_eos")),
        stream=stream,
        include_usage=stream and bool(options.get("include_usage")),
        continuous_usage=stream and bool(options.get("include_usage") and options.get("continuous_usage_stats")),
    )


def read_text(document: dict[str, Any], model: str, tokens: Tokens) -> tuple[str, bool]:
    """What /tokenize is asked to count, of whatever length: the text, and whether special tokens are added to it."""
    chat = "messages" in document
    if not chat and not isinstance(document.get("prompt"), str):
        raise _invalid("Field required", "body.prompt")
    text = tokens.render(_messages(document)) if chat else document["prompt"]
    check_model(document, model)
    return text, bool(document.get("add_special_tokens", not chat))


def check_model(document: dict[str, Any], model: str) -> None:
    """Refuse a request for another model; no model named is the served one."""
    if document.get("model") not in (None, "", model):
        message = f"The model `{document['model']}` does not exist. Valid aliases: {model}."
        raise RequestError(message, "model", "NotFoundError", 404)


def check_text(text: str, tokens: Tokens, max_model_len: int) -> None:
    """Refuse by its characters a text that cannot fit, before the work of counting its tokens."""
    limit = max_model_len * tokens.max_chars_per_token
    if len(text) > limit:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{len(text)} characters (more than {limit} characters, which is the upper bound for {max_model_len} "
            "input tokens). Please reduce the length of the input prompt.",
            "input_text",
        )


def output_limit(request: Generation, token_ids: list[int], vocabulary_size: int, max_model_len: int) -> int:
    """How many tokens the answer may have. Raises RequestError when the prompt or max_tokens leave no room."""
    if request.max_tokens is not None and request.max_tokens > max_model_len:
        raise RequestError(
            f"{request.limited_by}={request.max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            request.limited_by,
        )
    if not token_ids:
        raise RequestError("The decoder prompt cannot be empty")
    if max(token_ids) >= vocabulary_size:
        raise RequestError(f"Token id {max(token_ids)} is out of vocabulary")
    if len(token_ids) > max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{len(token_ids)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
        )
    room = max_model_len - len(token_ids)
    limit = room if request.max_tokens is None else min(room, request.max_tokens)
    if limit < 1:
        raise RequestError(f"max_tokens must be at least 1, got {limit}.", "max_tokens")
    return limit


def _prompt(document: dict[str, Any]) -> str | list[int]:
    """The prompt of a completion: a text, or a list of token ids; a list of one of either is that one."""
    prompt = document.get("prompt")
    if prompt is None or prompt == "":
        raise RequestError("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, str):
        return prompt
    if prompt == []:
        raise RequestError("You must pass at least one prompt")
    if isinstance(prompt, list) and all(type(item) is int for item in prompt):
        if min(prompt) < 0:
            raise _invalid("Input should be greater than or equal to 0", f"body.prompt.{prompt.index(min(prompt))}")
        return prompt
    if isinstance(prompt, list) and len(prompt) == 1:
        return prompt[0] if isinstance(prompt[0], str) else _prompt({"prompt": prompt[0]})
    if isinstance(prompt, list) and all(isinstance(item, str | list) for item in prompt):
        raise RequestError("The simulated engine takes one prompt in a request.", "prompt")
    raise _invalid("Input should be a valid string", "body.prompt")


def _messages(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat, each content as one text."""
    if "messages" not in document:
        raise _invalid("Field required", "body.messages")
    messages = document["messages"]
    if messages is None:
        raise RequestError("'NoneType' object is not iterable")
    if not isinstance(messages, list):
        raise _invalid("Input should be a valid list", "body.messages")
    if not messages:
        raise RequestError("You must pass at least one message")
    return [_message(message, f"body.messages.{index}") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message with its content as one text: given as text, as parts, or not at all; an assistant's may be null."""
    kind = f"{where}.ChatCompletionDeveloperMessageParam"  # the first of the types that vLLM tries
    if not isinstance(message, dict):
        raise _invalid("Input should be a valid dictionary", kind)
    if "role" not in message:
        raise _invalid("Field required", f"{kind}.role")
    content = message.get("content", "")
    if content is None and message["role"] == "assistant":
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part(part) for part in content)
    if not isinstance(content, str):
        raise _invalid("Input should be a valid string", f"{kind}.content")
    return message | {"content": content}


def _part(part: Any) -> str:
    """The text of a part of a message; the model sees nothing else."""
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise RequestError("The simulated model is not a multimodal model: a part must be a text.")
    return str(part["text"])


def _check_types(document: dict[str, Any]) -> None:
    """Refuse wrong types of the parameters that have an effect here."""
    for name in ("max_tokens", "max_completion_tokens", "n"):
        value = document.get(name)
        if value is not None and type(value) is not int:
            raise _invalid("Input should be a valid integer", f"body.{name}")
    for name in ("stream", "ignore_eos"):
        if not isinstance(document.get(name), bool | None):
            raise _invalid("Input should be a valid boolean", f"body.{name}")
    if not isinstance(document.get("model"), str | None):
        raise _invalid("Input should be a valid string", "body.model")
    if not isinstance(document.get("stream_options"), dict | None):
        raise _invalid("Input should be a valid dictionary", "body.stream_options")
    for name in ("temperature", "top_p"):
        if not isinstance(document.get(name), int | float | None):
            raise _invalid("Input should be a valid number", f"body.{name}")


def _check_sampling(document: dict[str, Any]) -> None:
    """Refuse values that are well typed and yet impossible."""
    temperature, top_p = document.get("temperature"), document.get("top_p")
    if temperature is not None and temperature < 0:
        raise RequestError(f"temperature must be non-negative, got {temperature}.", "temperature")
    if temperature is not None and not temperature <= 2:
        raise RequestError(f"temperature must be in [0, 2], got {temperature}.", "temperature")
    if top_p is not None and not 0 < top_p <= 1:
        raise RequestError(f"top_p must be in (0, 1], got {top_p}.", "top_p")
    n = document.get("n", 1)
    if n is not None and n < 1:
        raise RequestError(f"n must be at least 1, got {n}.")
    if n not in (None, 1):
        raise RequestError("The simulated engine gives one answer: n must be 1.", "n")


def _invalid(message: str, param: str | None) -> RequestError:
    """The error of a body that fails validation: its type is the phrase of the status, not a class name."""
    return RequestError(f"1 validation error:\n  {message}", param, "Bad Request")
