"""What bytes and their moments say: from the body of an answer to one Observation.

Pure: no sockets, no clock, no logging. The player keeps (moment, bytes) pairs while traffic flows and calls this when
the request is over, so nothing here is in the way of a deadline. The rules of server-sent events are WHATWG's
(https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation) with one leniency: a last
event without its blank line counts. What cannot be read is MALFORMED; nothing is guessed, repaired or tokenised anew.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson

from harness.model import NEVER, Observation, Outcome, Request, Tag

_BOM = b"\xef\xbb\xbf"
_UNTAGGED = Tag(0)
_FAILED = ("abort", "error")  # reasons to finish that no user asked for
_RESPONSE_ENDS = {"completed": True, "incomplete": True, "failed": False, "cancelled": False}  # and which are served
_TEXT_KEYS = ("text", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


@dataclass(slots=True)
class Reply:
    """All that came back for one request, as it came. Moments are monotonic seconds; `nan` where nothing happened.

    `broken` says how the bytes ended when they did not end as HTTP says: None for a message that came whole (or a
    stream that said [DONE]).
    """

    sent_s: float = NEVER
    first_byte_s: float = NEVER
    ended_s: float = NEVER
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    broken: Outcome | None = Outcome.OPEN
    connect_s: float = 0.0
    receive_lag_s: float = 0.0
    tags: Tag = _UNTAGGED


# One dispatched event: the moment at which it was complete, its type (`message` unless named), its data. A plain tuple,
# for there are tens of thousands a second.
ServerEvent = tuple[float, str, bytes]


class EventStream:
    """Decodes server-sent events from pieces cut anywhere. Works on bytes: U+2028 or a cut character ends no line."""

    def __init__(self) -> None:
        self.strange_lines = 0  # lines that are no field of the format: a page of HTML has many
        self._line: list[bytes] = []  # the parts of a line that has not ended
        self._data: list[bytes] = []
        self._type = b""
        self._after_cr = False
        self._opening = b""  # held until it is known whether the stream opens with a byte order mark
        self._opened = False
        self._between = False  # two events: nothing has begun that the next piece could go on with

    def feed(self, at_s: float, piece: bytes) -> list[ServerEvent]:
        """The events that this piece completes."""
        if self._between and piece.startswith(b"data: ") and piece.endswith(b"\n\n"):
            data = piece[6:-2]
            if data.find(b"\n") < 0 and data.find(b"\r") < 0:  # one data line and its blank line, as nearly all are
                return [(at_s, "message", data)]
        if not self._opened:
            piece = self._opening + piece
            if len(piece) < len(_BOM) and _BOM.startswith(piece):
                self._opening = piece
                return []
            self._opened, piece = True, piece.removeprefix(_BOM)
        events = [event for line in self._lines(piece) if (event := self._take(at_s, line)) is not None]
        self._between = not (self._line or self._data or self._type or self._after_cr)
        return events

    def close(self, at_s: float) -> list[ServerEvent]:
        """The stream has ended: the event that lacked its blank line, if there is one."""
        if line := b"".join((self._opening if not self._opened else b"", *self._line)):
            self._take(at_s, line)
        event = self._take(at_s, b"")
        return [event] if event is not None else []

    def _lines(self, piece: bytes) -> list[bytes]:
        """The lines that this piece ends: at CR, LF or both."""
        if self._after_cr and piece:
            piece, self._after_cr = piece.removeprefix(b"\n"), False
        if b"\r" in piece:
            self._after_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = piece.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._line, lines[0]))
            self._line.clear()
        if rest:
            self._line.append(rest)
        return lines

    def _take(self, at_s: float, line: bytes) -> ServerEvent | None:
        """One line: a field of the event at hand, or, when empty, its end."""
        if not line:
            data, name = self._data, self._type
            self._data, self._type = [], b""
            return (at_s, (name or b"message").decode(errors="replace"), b"\n".join(data)) if data else None
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._type = value
        elif name not in (b"", b"id", b"retry"):  # no name: a comment, which is how servers keep a stream alive
            self.strange_lines += 1
        return None


@dataclass(slots=True)
class Answer:
    """What an answer's body says. `content_s` are the moments of its content events; `done` is the stream's [DONE]."""

    content_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    finished: bool = False
    finished_apart: bool = False  # the finish came in an event of its own: the token that ended it shows no content
    done_s: float = NEVER
    error: bool = False
    malformed: bool = False

    @property
    def done(self) -> bool:
        return self.done_s == self.done_s

    def take(self, at_s: float, data: bytes) -> None:
        """Read one JSON document: an event of a stream or a whole body."""
        try:
            self._take(at_s, orjson.loads(data))
        except (orjson.JSONDecodeError, AttributeError, TypeError):  # not JSON, or not of the API's shape
            self.malformed = True

    def _take(self, at_s: float, value: dict[str, Any]) -> None:
        if value.get("error") or value.get("object") == "error":
            self.error = True
            return
        if isinstance(usage := value.get("usage"), dict):
            self.usage = usage
        has_content = finished = False
        for choice in value.get("choices") or ():
            has_content = has_content or _has_content(choice)
            if reason := choice.get("finish_reason"):
                finished = True
                self.error = self.error or reason in _FAILED
        if has_content:
            self.content_s.append(at_s)
        if finished:
            self.finished, self.finished_apart = True, not has_content
        if "choices" not in value:
            self._take_other(at_s, value)

    def _take_other(self, at_s: float, value: dict[str, Any]) -> None:
        """What paths without choices say: a list of embeddings, a whole response, or one event of a streamed one."""
        kind, response = value.get("type"), value.get("response") or value
        if isinstance(usage := response.get("usage"), dict):
            self.usage = usage
        if kind and kind.endswith(".delta") and value.get("delta"):
            self.content_s.append(at_s)
        elif response.get("object") == "response" and (status := response.get("status")) in _RESPONSE_ENDS:
            self.finished, self.error = True, self.error or not _RESPONSE_ENDS[status]
            if kind:
                self.done_s, self.finished_apart = at_s, True
            elif any(map(_has_output, response.get("output") or ())):
                self.content_s.append(at_s)
        elif value.get("object") == "list" and value.get("data"):
            self.finished = True
            self.content_s.append(at_s)

    def tokens(self, *keys: str) -> int:
        """One count of the server's usage, by the first of its names; 0 when it sent none, or no number."""
        count = next((self.usage[key] for key in keys if key in self.usage), None) if self.usage else None
        return count if isinstance(count, int) and 0 <= count < 1 << 32 else 0


def _has_output(item: dict[str, Any]) -> bool:
    """Whether an item of a response carries text, reasoning or a call of a tool."""
    return bool(item.get("content") or item.get("arguments") or item.get("summary"))


def _has_content(choice: dict[str, Any]) -> bool:
    """Whether a choice carries text, reasoning or a tool call. A role alone is no token."""
    delta = choice.get("delta") or choice.get("message") or choice
    if delta.get("content"):
        return True
    return any(map(delta.get, _TEXT_KEYS))


def read_stream(pieces: Iterable[tuple[float, bytes]], ended_s: float = NEVER) -> Answer:
    """Read the body of a streamed answer. What follows [DONE] is not looked at."""
    answer, stream, said = Answer(), EventStream(), False
    for at_s, name, data in _events(stream, pieces, ended_s):
        said = True
        if data == b"[DONE]":
            answer.done_s = at_s
            break
        answer.take(at_s, data)
        if name == "error":
            answer.error = True
    if not said and stream.strange_lines:
        answer.malformed = True
    return answer


def _events(stream: EventStream, pieces: Iterable[tuple[float, bytes]], ended_s: float) -> Iterator[ServerEvent]:
    at_s = ended_s
    for at_s, piece in pieces:
        yield from stream.feed(at_s, piece)
    yield from stream.close(at_s)


def observe(request: Request, reply: Reply, origin_s: float, worker: int) -> Observation:
    """The one record of a request: its moments from the run's origin, its tokens, and what became of it."""
    answer = _read(request, reply)
    streamed = request.stream and 200 <= reply.status < 300
    content_s = answer.content_s if streamed else []
    tokens_out = answer.tokens("completion_tokens", "output_tokens")
    tags = reply.tags
    if streamed:
        tags |= Tag.STREAMED
    if len(content_s) > 1 and content_s[0] == content_s[1]:
        tags |= Tag.COALESCED
    if answer.usage is None and answer.content_s:
        tags |= Tag.USAGE_MISSING
        tokens_out = len(answer.content_s)
    elif content_s and tokens_out > len(content_s) + answer.finished_apart:
        tags |= Tag.CHUNKED_TOKENS
    return Observation(
        index=request.index,
        due_s=request.due_s,
        sent_s=reply.sent_s - origin_s,
        first_byte_s=reply.first_byte_s - origin_s,
        first_token_s=content_s[0] - origin_s if content_s else NEVER,
        last_token_s=content_s[-1] - origin_s if content_s else NEVER,
        ended_s=(answer.done_s if answer.done else reply.ended_s) - origin_s,
        tokens_in=answer.tokens("prompt_tokens", "input_tokens"),
        tokens_out=tokens_out,
        status=reply.status,
        outcome=outcome(request, reply, answer),
        tags=tags,
        worker=worker,
        receive_lag_s=reply.receive_lag_s,
        connect_s=reply.connect_s,
        gaps_s=tuple([later - earlier for earlier, later in pairwise(content_s)]),
    )


def _read(request: Request, reply: Reply) -> Answer:
    """An error answer is not read: its status says all. A stream that is one JSON document is an error or a mistake."""
    if not 200 <= reply.status < 300:
        return Answer()
    if request.stream and not _opening(reply.pieces).startswith(b"{"):
        return read_stream(reply.pieces, reply.ended_s)
    answer = Answer()
    if reply.broken is None:
        answer.take(reply.ended_s, b"".join([piece for _, piece in reply.pieces]))
        answer.malformed |= request.stream and not answer.error
    return answer


def _opening(pieces: list[tuple[float, bytes]]) -> bytes:
    return next((start for _, piece in pieces if (start := piece.lstrip()[:1])), b"")


def outcome(request: Request, reply: Reply, answer: Answer) -> Outcome:
    """Place a request in the closed set. A status line that is no success tells all, whole body or not."""
    if reply.broken is Outcome.CANCELLED_BY_US:
        return Outcome.CANCELLED_BY_US
    if reply.status and not 200 <= reply.status < 300:
        return _refusal(request, reply.status)
    if reply.status and not request.expects(reply.status):
        return Outcome.ACCEPTED_BUT_BAD
    return _success(request, reply, answer)


def _success(request: Request, reply: Reply, answer: Answer) -> Outcome:
    """What the server said, then what broke the bytes, then what they are not, then what they lack."""
    if answer.error:
        return Outcome.ERROR_IN_STREAM
    if reply.broken is not None and not answer.done:
        return reply.broken
    if answer.malformed:
        return Outcome.MALFORMED
    if not answer.content_s:
        return Outcome.EMPTY
    unfinished = not answer.finished or (request.stream and not answer.done)
    return Outcome.TRUNCATED if unfinished else Outcome.OK


def _refusal(request: Request, status: int) -> Outcome:
    if request.expects(status):
        return Outcome.REJECTED_AS_EXPECTED
    if status == 429:
        return Outcome.RATE_LIMITED
    if status >= 500:
        return Outcome.HTTP_5XX
    return Outcome.REJECTED if status >= 400 else Outcome.MALFORMED  # a redirect answers nobody who asked for a model
