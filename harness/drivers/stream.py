"""What bytes and their moments say: from what came back for a request to one Observation.

Pure: no sockets, no clock, no logging. The player keeps (moment, bytes) pairs while traffic flows and calls this when
the request is over, so nothing here is in the way of a deadline. `answers` reads the bytes; what cannot be read is
MALFORMED.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from harness.answers import Answer, read_stream, shape_sum
from harness.model import NEVER, Finish, Observation, Outcome, Request, Tag

_UNTAGGED = Tag(0)


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
        finish=Finish.of(answer.reason),
        shape=shape_sum(answer.shape),
        gaps_s=tuple([later - earlier for earlier, later in pairwise(content_s)]),
    )


def _read(request: Request, reply: Reply) -> Answer:
    """An error answer is not read: its status says all. A stream that is one JSON document is an error or a mistake."""
    if not 200 <= reply.status < 300:
        return Answer()
    shape: set[str] | None = set() if request.raw else None
    if request.stream and not _opening(reply.pieces).startswith(b"{"):
        return read_stream(reply.pieces, reply.ended_s, shape)
    answer = Answer(shape)
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
