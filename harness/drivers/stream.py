"""What bytes and their moments say: from what came back for a request to one Observation.

Pure: no sockets, no clock, no logging. The player keeps (moment, bytes) pairs while traffic flows and calls this when
the request is over, so nothing here is in the way of a deadline. `answers` reads the bytes; what cannot be read is
MALFORMED.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from harness.answers import Answer, read_stream, shape_sum
from harness.model import NEVER, Finish, Observation, Outcome, Request, Tag, refusal
from harness.traffic.capture.coding import Undecodable, decoded
from harness.traffic.dialects import speaks

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
    coding: str = ""  # what the body is compressed with, as Content-Encoding names it


def observe(request: Request, reply: Reply, origin_s: float, worker: int) -> Observation:
    """The one record of a request: its moments from the run's origin, its tokens, and what became of it."""
    answer = read_answer(request, reply)
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


def read_answer(request: Request, reply: Reply) -> Answer:
    """What the body says, with its shape for a captured request. An error answer is not read: its status says all. A
    stream that is one JSON document is an error or a mistake."""
    if not 200 <= reply.status < 300:
        return Answer()
    try:
        pieces = _plain(reply) if reply.coding else reply.pieces
    except Undecodable:
        return Answer(malformed=True)
    shape: set[str] | None = set() if request.raw else None
    if request.stream and not _opening(pieces).startswith(b"{"):
        return read_stream(pieces, reply.ended_s, shape)
    answer = Answer(shape)
    if reply.broken is None:
        answer.take(reply.ended_s, b"".join([piece for _, piece in pieces]))
        answer.malformed |= request.stream and not answer.error
    return answer


def _plain(reply: Reply) -> list[tuple[float, bytes]]:
    """The body as it reads, each piece at the moment of the bytes that made it readable. Raises Undecodable."""
    moments_s = [at_s for at_s, _ in reply.pieces]
    numbered = enumerate([piece for _, piece in reply.pieces])
    return [(moments_s[number], plain) for number, plain in decoded(numbered, reply.coding)]


def _opening(pieces: list[tuple[float, bytes]]) -> bytes:
    return next((start for _, piece in pieces if (start := piece.lstrip()[:1])), b"")


def outcome(request: Request, reply: Reply, answer: Answer) -> Outcome:
    """Place a request in the closed set. A status line that is no success tells all, whole body or not."""
    if reply.broken is Outcome.CANCELLED_BY_US:
        return Outcome.CANCELLED_BY_US
    if reply.status and not 200 <= reply.status < 300:
        return refusal(request.expect, reply.status)
    if reply.status and not request.expects(reply.status):
        return Outcome.ACCEPTED_BUT_BAD
    return _success(request, reply, answer)


def _success(request: Request, reply: Reply, answer: Answer) -> Outcome:
    """What the server said, then what broke the bytes, then what they are not, then what they lack.

    What a captured request asked of no model (a list of models, a health check) owes no content: whole is enough.
    """
    if request.raw and not speaks(request.path):
        return Outcome.OK if reply.broken is None else reply.broken
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
