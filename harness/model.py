"""The nouns. Frozen values and the closed sets they draw from; no I/O, no clock, no libraries.

Every time is in seconds from the run's origin on one monotonic clock, as a float; `nan` means "never happened".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag, StrEnum
from typing import Any, NamedTuple

NEVER = float("nan")
PROMPT_LIMIT_TOKENS = 16_384  # scenarios state lengths for a gateway that takes this many; they scale with a target's


class UsageError(Exception):
    """The user's mistake, told in one sentence; `where` is `file:line` when a file is to blame. Exit code 2."""

    def __init__(self, sentence: str, where: str = "") -> None:
        super().__init__(f"{where}: {sentence}" if where else sentence)
        self.sentence, self.where = sentence, where


class Outcome(IntEnum):
    """How a request ended: a closed set, stored as its number."""

    OK = 0
    REJECTED_AS_EXPECTED = 1
    ACCEPTED_BUT_BAD = 2  # a bad request that was served
    REJECTED = 3  # any other 4xx
    RATE_LIMITED = 4  # 429
    HTTP_5XX = 5
    REFUSED = 6  # no connection
    RESET = 7  # the connection broke before or inside the answer
    TIMEOUT = 8  # no answer within the plan's time limit
    STALLED = 9  # an answer began and then stopped for the limit
    TRUNCATED = 10  # a stream or body that ended early: no [DONE], no finish_reason, or short of its length
    ERROR_IN_STREAM = 11  # status 200 and then an error event
    EMPTY = 12  # status 200 and not one token
    MALFORMED = 13  # bytes that are not the protocol
    CANCELLED_BY_US = 14  # planned: the client hung up
    OPEN = 15  # the run ended first


class Finish(IntEnum):
    """Why an answer ended, by its own word: a closed set, stored as its number."""

    UNSAID = 0
    STOP = 1
    LENGTH = 2
    TOOL_CALLS = 3
    CONTENT_FILTER = 4
    OTHER = 5

    @staticmethod
    def of(reason: str) -> "Finish":
        return Finish.__members__.get(reason.upper(), Finish.OTHER) if reason else Finish.UNSAID


class Tag(IntFlag):
    """What a reader of one observation must know before trusting its times."""

    NEW_CONNECTION = 1  # the connection was opened for this request: its handshake is inside TTFT
    COALESCED = 2  # the first token shared a read with later ones: TTFT is an upper bound
    USAGE_MISSING = 4  # the server sent no usage: tokens_out counts content events
    CHUNKED_TOKENS = 8  # more tokens than content events: gaps are between chunks, not tokens
    STREAMED = 16
    GAVE_UP = 32  # the plan told the client to hang up, and it did
    RESENT = 64  # the server had closed the idle connection as the request went out: sent again on a new one


class Judgement(StrEnum):
    """The four things that a finding or a verdict can say."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"


# Worst first: what was not measured outranks all, then what is broken, then what is too thin to tell.
SEVERITY = (Judgement.INVALID, Judgement.FAIL, Judgement.INCONCLUSIVE, Judgement.PASS)
EXIT_CODE = {Judgement.PASS: 0, Judgement.FAIL: 1, Judgement.INVALID: 3, Judgement.INCONCLUSIVE: 4}
EXIT_USAGE, EXIT_UNSAFE, EXIT_INTERRUPTED = 2, 5, 130


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the plan.

    `text` is a span of bytes in the run's corpus (already escaped for JSON) that holds `prompt_tokens` tokens.
    `flaw` names what is wrong with a bad request and `expect` the answers that are right for it: exact statuses
    ("422") or families ("2xx"). `give_up_s` is the client hanging up that long after sending.

    A captured request is `raw`: `text` is then the span of its whole bytes, head and body, sent as they are but for the
    rewrites that the plan's header names. Those of one `group` (a captured connection or session) are played by one
    worker and share connections. One that comes `after` another of its group is due `think_s` after that one's end,
    and its `due_s` is only the captured moment. `half_close_s` is the client closing its sending side that long after
    sending.
    """

    index: int
    due_s: float
    class_name: str
    path: str = "/v1/chat/completions"
    text: tuple[int, int] = (0, 0)
    prompt_tokens: int = 0
    max_tokens: int = 0
    stream: bool = False
    flaw: str = ""
    expect: tuple[str, ...] = ("2xx",)
    give_up_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()
    raw: bool = False
    group: int | None = None
    after: int | None = None
    think_s: float = 0.0
    half_close_s: float | None = None

    @property
    def good(self) -> bool:
        """A request that should be served."""
        return "2xx" in self.expect

    def expects(self, status: int) -> bool:
        return expects(self.expect, status)


def expects(answers: tuple[str, ...], status: int) -> bool:
    """Whether a status is among the right answers: exact ones ("422") and families ("2xx")."""
    return str(status) in answers or f"{status // 100}xx" in answers


def refusal(answers: tuple[str, ...], status: int) -> Outcome:
    """How a request ended whose answer is no success, by the answers that are right for it."""
    if expects(answers, status):
        return Outcome.REJECTED_AS_EXPECTED
    if status == 429:
        return Outcome.RATE_LIMITED
    if status >= 500:
        return Outcome.HTTP_5XX
    return Outcome.REJECTED if status >= 400 else Outcome.MALFORMED  # a redirect answers nobody who asked for a model


class Observation(NamedTuple):
    """What became of one request; written once, when it is over or when the run ends with it open.

    A named tuple, for a player makes thousands a second; its order is the order on disk.
    `gaps_s` are the gaps between its content events. `receive_lag_s` is the longest the client left its bytes
    unread, by the kernel's receive stamps; `connect_s` the handshake when it opened its connection. `shape` is a
    checksum over the members of a captured request's answer, 0 where nobody asked.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of an observation
    due_s: float
    sent_s: float = NEVER
    first_byte_s: float = NEVER
    first_token_s: float = NEVER
    last_token_s: float = NEVER
    ended_s: float = NEVER
    tokens_in: int = 0
    tokens_out: int = 0
    status: int = 0
    outcome: Outcome = Outcome.OPEN
    tags: Tag = Tag(0)
    worker: int = 0
    receive_lag_s: float = 0.0
    connect_s: float = 0.0
    finish: Finish = Finish.UNSAID
    shape: int = 0
    gaps_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """What was done or happened: ready, started, stopped, exited, interrupted, error_sample, note ..."""

    at_s: float
    kind: str
    name: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """One raw sample of something measured beside the requests; a gap in a series stays a gap."""

    at_s: float
    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Window:
    """A named span; a request belongs to the window it was due in: start <= due < end."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    """What one gate saw in one window. `figures` are the numbers a reader needs, in the order they are shown."""

    gate: str
    verdict: Judgement
    why: str
    window: str = ""
    limit: str = ""
    line: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The worst finding, what the harness says of itself first (`believed`), and where it all came from."""

    verdict: Judgement
    exit_code: int
    why: str
    believed: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
