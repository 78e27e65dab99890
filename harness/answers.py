"""What the bytes of an answer say: events of a stream, the JSON in them, and what both amount to.

Pure: no sockets, no clock, no logging; the same eyes read what the player received and what a capture holds. The rules
of server-sent events are WHATWG's (https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation)
with one leniency: a last event without its blank line counts. Nothing is guessed, repaired or tokenised anew.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import orjson

from harness.model import NEVER

_BOM = b"\xef\xbb\xbf"
_FAILED = ("abort", "error")  # reasons to finish that no user asked for
_RESPONSE_ENDS = {"completed": True, "incomplete": True, "failed": False, "cancelled": False}  # and which are served
_KIND = {str: "text", int: "number", float: "number", bool: "yes or no", type(None): "null"}
_TEXT_KEYS = ("text", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


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
        self.between = False  # two events: nothing has begun that the next piece could go on with

    def feed(self, at_s: float, piece: bytes) -> list[ServerEvent]:
        """The events that this piece completes."""
        if self.between and piece.startswith(b"data: ") and piece.endswith(b"\n\n"):
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
        self.between = not (self._line or self._data or self._type or self._after_cr)
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
    """What an answer's body says. `content_s` are the moments of its content events; `done` is the stream's [DONE].

    `reason` is the finish reason of its first choice. `shape`, when the reader asks for it, gathers the paths of all
    members with their kinds: what a client that reads this answer relies on, whatever the text.
    """

    shape: set[str] | None = None
    reason: str = ""
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
            value = orjson.loads(data)
            if self.shape is not None:
                _add_members(self.shape, value)
            self._take(at_s, value)
        except (orjson.JSONDecodeError, AttributeError, TypeError, RecursionError):
            self.malformed = True  # not JSON, or not of the API's shape

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
                self.reason = self.reason or str(reason)
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


def _add_members(shape: set[str], value: Any, path: str = "") -> None:
    """The path of every member of a JSON document with the kind of its value; items of a list are one member."""
    if isinstance(value, dict):
        before = f"{path}." if path else ""
        shape.update([f"{before}{key}:{kind}" for key, each in value.items() if (kind := _KIND.get(type(each)))])
        for key, each in value.items():
            if type(each) not in _KIND:
                _add_members(shape, each, before + key)
    elif isinstance(value, list):
        for each in value:
            _add_members(shape, each, f"{path}[]")
    else:
        shape.add(f"{path}:{_KIND[type(value)]}")


def shape_sum(shape: set[str] | None) -> int:
    """A checksum that is the same for the same members, in whatever order; 0 of none."""
    return zlib.crc32("\n".join(sorted(shape)).encode()) if shape else 0


# All of a string of JSON, where it is not empty and needs no \u: UTF-8, and the short escapes.
_TEXT = re.compile(
    rb"(?:[ !#-\[\]-\x7f]|\\[\"\\/bfnrt]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]"
    rb"|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xed[\x80-\x9f][\x80-\xbf])++"
)
_AT_ONCE = 64
_TEXT_MEMBER = re.compile(rb'[{,]"(?:content|text|reasoning_content|reasoning)": ?"')


class _Twins:
    """Events that differ from one that was read in the text of its content alone, as nearly all of a stream do.

    What such an event says is known without parsing it: the bytes before and behind the text are the same, and the
    text is a whole string of JSON that is not empty. So the document has the same members, and brings content again.
    """

    def __init__(self) -> None:
        self._begin = self._end = b""

    def count(self, pieces: Sequence[bytes], place: int) -> int:
        """How many pieces, from a place on, are such events, each a whole one; the stream must be between two events.
        Looks at no more than `_AT_ONCE`."""
        begin, end = self._begin, self._end
        if not begin:
            return 0
        first, last, texts = len(begin), -len(end), []
        for piece in pieces[place : place + _AT_ONCE]:
            if not (piece.startswith(begin) and piece.endswith(end)):
                break
            texts.append(piece[first:last])
        if all(texts) and _TEXT.fullmatch(b" ".join(texts)):  # a space stands alone: nothing is of two texts
            return len(texts)
        return sum(1 for _ in takewhile(_TEXT.fullmatch, texts))

    def take(self, answer: Answer, events: list[ServerEvent], piece: bytes) -> bool:
        """Read the events of a piece as `_take_all` does, and keep it as the one to compare with if it brought content
        and nothing else."""
        count, usage = len(answer.content_s), answer.usage
        done = _take_all(answer, events)
        told = answer.usage is not usage or answer.finished or answer.error or answer.malformed or answer.done
        if len(events) == 1 and len(answer.content_s) == count + 1 and not told:
            _, name, data = events[0]
            member = _TEXT_MEMBER.search(piece)
            text = _TEXT.match(piece, member.end()) if member else None
            if text and piece[text.end() :][:1] == b'"' and name == "message" and piece == b"data: %b\n\n" % data:
                self._begin, self._end = piece[: text.start()], piece[text.end() :]
        return done


def read_stream(pieces: Iterable[tuple[float, bytes]], ended_s: float = NEVER, shape: set[str] | None = None) -> Answer:
    """Read the body of a streamed answer. What follows [DONE] is not looked at."""
    answer, stream, twins, said, place = Answer(shape), EventStream(), _Twins(), False, 0
    moments, datas = zip(*pieces, strict=True) if (pieces := list(pieces)) else ((), ())
    while place < len(datas):
        alone = stream.between
        if alone and (count := twins.count(datas, place)):
            answer.content_s += moments[place : place + count]
            place += count
            continue
        events = stream.feed(moments[place], datas[place])
        said = said or bool(events)
        if twins.take(answer, events, datas[place]) if alone else _take_all(answer, events):
            return answer
        place += 1
    at_s = moments[-1] if moments else ended_s
    events = stream.close(at_s)
    if not _take_all(answer, events) and not (said or events) and stream.strange_lines:
        answer.malformed = True
    return answer


def _take_all(answer: Answer, events: list[ServerEvent]) -> bool:
    """Read events of a stream; True at its [DONE]."""
    for at_s, name, data in events:
        if data == b"[DONE]":
            answer.done_s = at_s
            return True
        answer.take(at_s, data)
        if name == "error":
            answer.error = True
    return False
