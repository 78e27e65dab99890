"""Exchanges of a capture -> what a recording keeps: the request as sent, and what its answer said, measured. Pure.

Answers are read with the eyes of the player (`harness.answers`), by the same rules, so that captured and replayed ones
can be compared; their bytes end here. Nothing is scrubbed yet: what this returns must not reach a disk.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from itertools import pairwise
from typing import Any

import orjson

from harness.answers import Answer, read_stream, shape_sum
from harness.model import NEVER, Finish
from harness.traffic.capture.account import Account
from harness.traffic.capture.coding import Piece, Undecodable, decoded
from harness.traffic.capture.messages import Exchange, Said
from harness.traffic.dialects import DIALECTS
from harness.traffic.recording import Answered, Recorded

SESSION_HEADERS = ("x-session-id",)
SESSION_FIELDS = ("session_id", "conversation_id", "user")  # members of the body, asked for in this order
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_SHAPES_KEPT = 1000  # a server that never answers twice alike must not fill the header


class Reader:
    """Reads the exchanges of one capture; `shapes` gathers the members of the answers that it met.

    `origin_ns` is the capture's first packet: moments count from it. `session_headers` are asked before the body.
    """

    def __init__(self, origin_ns: int, account: Account, session_headers: Iterable[str] = SESSION_HEADERS) -> None:
        self.shapes: dict[str, list[str]] = {}
        self._origin_ns, self._account = origin_ns, account
        self._session_headers = tuple(name.lower().encode() for name in session_headers)

    def recorded(self, one: Exchange) -> Recorded:
        """One exchange with its client's address, its secrets and all."""
        request, path = one.request, _path(one.target)
        asked, flaw = self._asked(one, path)
        stream = asked.get("stream") is True or _is_stream(one.answer)
        answer = self._answered(one, stream)
        return Recorded(
            at_s=(request.first_ns - self._origin_ns) / 1e9,
            connection=one.connection,
            turn=one.turn,
            method=one.method,
            path=path,
            raw=request.raw,
            answer=answer,
            client=_address(one.flow.source),
            session=self._session(request, asked),
            flaw=request.flaw or flaw,
            stream=stream,
            prompt_tokens=answer.tokens_in,
            max_tokens=next((length for key in _LENGTHS if (length := _count(asked.get(key)))), 0),
            lead_s=(request.first_ns - one.opened_ns) / 1e9 if one.opened_ns is not None and one.turn == 0 else None,
            pipelined=one.pipelined,
            give_up_s=_since(request, one.gave_up_ns),
            half_close_s=_since(request, one.half_closed_ns),
        )

    def _asked(self, one: Exchange, path: str) -> tuple[Mapping[str, Any], str]:
        """The members of the request's body, and what is wrong with it where JSON was due."""
        request = one.request
        try:
            body = b"".join([piece for _, piece in _plain(request)])
        except Undecodable:
            return {}, ""
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            due = one.method in ("POST", "PUT", "PATCH") and (
                path.endswith(tuple(DIALECTS)) or b"json" in _header(request, b"content-type")
            )
            return {}, ("bad_json" if body else "empty_body") if due else ""
        return value if isinstance(value, dict) else {}, ""

    def _session(self, request: Said, asked: Mapping[str, Any]) -> str:
        for name in self._session_headers:
            if value := _header(request, name):
                return value.decode(errors="replace")
        named = (asked.get(key) for key in SESSION_FIELDS)
        return next((str(value) for value in named if value and isinstance(value, str | int)), "")

    def _answered(self, one: Exchange, stream: bool) -> Answered:
        """What became of a request, measured as the player measures: an error answer is told by its status alone."""
        said, request = one.answer, one.request
        if said is None:
            return Answered()
        lost = "" if said.lost == "closed" else said.lost  # what both sides saw cut off, the capture has not lost
        if not one.status:
            return Answered(lost=lost)
        ended_s = (said.last_ns - request.first_ns) / 1e9
        answer = self._read(said, request.first_ns, ended_s, stream) if 200 <= one.status < 300 else Answer()
        content_s = answer.content_s if stream else []
        tokens_out = answer.tokens("completion_tokens", "output_tokens") if answer.usage else len(answer.content_s)
        return Answered(
            status=one.status,
            first_byte_s=(said.first_ns - request.first_ns) / 1e9,
            first_token_s=content_s[0] if content_s else NEVER,
            last_token_s=content_s[-1] if content_s else NEVER,
            ended_s=answer.done_s if answer.done else ended_s,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(content_s)),
            tokens_in=answer.tokens("prompt_tokens", "input_tokens"),
            tokens_out=tokens_out,
            finish=Finish.of(answer.reason),
            shape=self._shape(answer.shape),
            whole=answer.done or not said.lost,
            error=answer.error,
            lost="" if answer.done else lost,
        )

    def _read(self, said: Said, start_ns: int, ended_s: float, stream: bool) -> Answer:
        """A stream that is one JSON document is an error or a mistake; one that is cut short says what it said."""
        shape: set[str] = set()
        try:
            pieces = [((at_ns - start_ns) / 1e9, piece) for at_ns, piece in _plain(said)]
        except Undecodable:
            self._account.unread_answers += 1
            return Answer()
        if stream and not _opening(pieces).startswith(b"{"):
            return read_stream(pieces, ended_s, shape)
        answer = Answer(shape)
        if not said.lost:
            answer.take(ended_s, b"".join([piece for _, piece in pieces]))
        return answer

    def _shape(self, members: set[str] | None) -> int:
        shape = shape_sum(members)
        if members and str(shape) not in self.shapes and max(len(self.shapes), len(members)) < _SHAPES_KEPT:
            self.shapes[str(shape)] = sorted(members)
        return shape


def _plain(said: Said) -> Iterable[Piece]:
    """The body without its content coding, if it has one."""
    codings = _header(said, b"content-encoding")
    return decoded(said.pieces, codings.decode(errors="replace")) if codings else said.pieces


def _header(said: Said, name: bytes) -> bytes:
    """The value of a header, by its name in lower case; empty where there is none."""
    for key, value in said.headers:
        if len(key) == len(name) and key.lower() == name:
            return value
    return b""


def _is_stream(answer: Said | None) -> bool:
    return answer is not None and _header(answer, b"content-type").lower().startswith(b"text/event-stream")


def _opening(pieces: list[tuple[float, bytes]]) -> bytes:
    return next((start for _, piece in pieces if (start := piece.lstrip()[:1])), b"")


def _path(target: str) -> str:
    """The path alone of a request's target, which may be a whole URL and have a query."""
    if target.startswith(("http://", "https://")):
        target = "/" + target.partition("://")[2].partition("/")[2]
    return target.partition("?")[0]


def _since(request: Said, at_ns: int | None) -> float | None:
    return None if at_ns is None else (at_ns - request.first_ns) / 1e9


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 32 else 0


@lru_cache(maxsize=4096)
def _address(packed: bytes) -> str:
    return str(ip_address(packed)) if len(packed) in (4, 16) else packed.hex()
