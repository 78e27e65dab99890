"""The simulated answer, and the bodies and SSE frames that carry it, byte-shaped as vLLM 0.32 writes them.

An answer is seeded words of the model's own vocabulary, one token each: the same prompt and seed give the same answer.
It means nothing and refuses to: only its length, its timing and its framing are a model's.
"""

import json
import random
import zlib
from array import array
from dataclasses import dataclass
from typing import Any

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-simulated"
DONE = b"data: [DONE]\n\n"
NATURAL_LENGTH = (64, 256)  # tokens after which an answer stops by itself


@dataclass(frozen=True)
class Answer:
    """The texts of the tokens, and why it ends; the token that ends an answer by itself has no text."""

    pieces: list[str]
    finish_reason: str

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.pieces)


def answer(seed: int, prompt: list[int], words: list[str], limit: int, ignore_eos: bool) -> Answer:
    """The answer to a prompt, of at most `limit` tokens; with ignore_eos of exactly as many."""
    rng = random.Random(seed << 32 | zlib.crc32(array("L", prompt).tobytes()))
    natural = rng.randint(*NATURAL_LENGTH)
    if ignore_eos or natural > limit:
        return Answer(rng.choices(words, k=limit), "length")
    return Answer([*rng.choices(words, k=natural - 1), ""], "stop")


@dataclass(frozen=True)
class Envelope:
    """What all bodies and frames of one answer share."""

    id: str
    created: int
    model: str
    chat: bool
    prompt_tokens: int

    def whole(self, answered: Answer) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._chat_choice(answered) if self.chat else self._text_choice(answered)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": self._usage(len(answered.pieces))
            | {"prompt_tokens_details": None, "completion_tokens_details": None},
            **({"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None} if self.chat else {}),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, continuous_usage: bool) -> bytes:
        """What comes before the first token: chat's frame with the role, nothing for a completion."""
        if not self.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        usage = {"usage": self._running_usage(0)} if continuous_usage else {}
        return self._frame([choice], usage | {"prompt_token_ids": None, "prompt_text": None})

    def token(self, piece: str, finish_reason: str | None, usage_tokens: int | None, fingerprint: bool) -> bytes:
        """The frame of one token; usage_tokens, when given, is the usage so far."""
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice |= {"delta": {"content": piece}, "logprobs": None, "finish_reason": finish_reason}
            choice |= {"stop_reason": None} if finish_reason else {}
        else:
            choice |= {"text": piece, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
            choice |= {"prompt_token_ids": None}
        choice["token_ids"] = None
        usage = {} if usage_tokens is None else {"usage": self._running_usage(usage_tokens)}
        return self._frame([choice], usage | ({"system_fingerprint": FINGERPRINT} if fingerprint else {}))

    def closing(self, completion_tokens: int) -> bytes:
        """The frame with the usage of the whole answer and no choices."""
        return self._frame([], {"usage": self._usage(completion_tokens), "system_fingerprint": FINGERPRINT})

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }

    def _running_usage(self, completion_tokens: int) -> dict[str, Any]:
        """The usage in the midst of a stream; chat's has one field more, and it is empty."""
        return self._usage(completion_tokens) | ({"completion_tokens_details": None} if self.chat else {})

    def _frame(self, choices: list[dict[str, Any]], rest: dict[str, Any]) -> bytes:
        frame = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **rest,
        }
        return b"data: " + json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def _text_choice(self, answered: Answer) -> dict[str, Any]:
        return {
            "index": 0,
            "text": answered.text,
            "logprobs": None,
            "finish_reason": answered.finish_reason,
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "routed_experts": None,
        }

    def _chat_choice(self, answered: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answered.text}
        message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        return {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": answered.finish_reason,
            "stop_reason": None,
            "token_ids": None,
            "routed_experts": None,
        }
