"""What both sides said -> HTTP/1.1 exchanges: raw bytes as sent, and what they mean beside them. Pure.

Nothing is repaired: a request whose framing is broken is kept up to where the next thing is known, and tagged. Nothing
is made up either: where bytes are missing, the message at hand is `lost`, the next one begins where a packet begins
with a first line, and an answer that could be that of two requests is taken for nobody's.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from harness.traffic.capture.account import Account
from harness.traffic.capture.flows import Kind, Run, Step
from harness.traffic.capture.framing import Answer, Message, Request, may_start_answer, starts_answer, starts_request
from harness.traffic.capture.packets import Flow

UNANSWERED_AT_ONCE = 64  # requests that wait on one connection; beyond that their answers are not in the capture


@dataclass(slots=True)
class Said:
    """One message: its raw bytes, when its first and last byte were seen, and why it is not whole ("" when it is).

    `pieces` are the moments and bytes of the body, chunk framing taken off and content coding left on; names of
    `headers` are as they were sent. `flaw` names what is wrong with a message's framing or head, as sent. `lost` is
    "gap" (the capture has not all of it), "end of capture", "too large" (to be kept), "not captured", or "closed": cut
    off for the other side too.
    """

    raw: bytes
    first_ns: int
    last_ns: int
    headers: tuple[tuple[bytes, bytes], ...] = ()
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    lost: str = ""
    flaw: str = ""

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


@dataclass(slots=True)
class Exchange:
    """A request and its final answer, as they were paired on their connection.

    `flow` points from the client to the server; `turn` counts the requests of the connection from 0; `opened_ns` is
    the SYN, if it was seen. `answer` is None when none was given; when one may have been and the capture cannot tell,
    it is empty, with `status` 0 and the reason in `lost`. `pipelined`: sent before the answer to the request before it
    was over. `half_closed_ns` is the client's FIN while the answer was still to come, `gave_up_ns` its RST, or its
    close before the answer ended. `upgraded` names another protocol that the connection went on with.
    """

    connection: int
    turn: int
    flow: Flow
    opened_ns: int | None
    method: str
    target: str
    request: Said
    status: int = 0
    answer: Said | None = None
    interim: tuple[int, ...] = ()
    pipelined: bool = False
    half_closed_ns: int | None = None
    gave_up_ns: int | None = None
    upgraded: str = ""


def exchanges(steps: Iterable[Step | Run], account: Account, ports: frozenset[int] = frozenset()) -> Iterator[Exchange]:
    """All exchanges of all connections, each as soon as it is over.

    `ports` are the servers' ones: nobody who speaks from one is a client whose connection was open already.
    """
    splitters: dict[int, Splitter] = {}
    for step in steps:
        connection = step.connection
        splitter = splitters.get(connection)
        if splitter is None:
            splitter = splitters[connection] = Splitter(connection, account, ports)
        if isinstance(step, Run):
            yield from splitter.feed_run(step)
            continue
        yield from splitter.feed(step)
        if step.kind is Kind.OVER:
            del splitters[connection]


class _Turn:
    """A request on its way to be an exchange; `next` is the one after it on its connection.

    One without a `request` stands for those that a gap may have swallowed: an answer may be theirs.
    """

    __slots__ = ("answer", "answered", "asked", "interim", "next", "number", "pipelined", "request")

    def __init__(self, number: int, request: Request | None, pipelined: bool = False) -> None:
        self.number, self.request, self.pipelined = number, request, pipelined
        self.answer: Answer | None = None
        self.interim: tuple[int, ...] = ()
        self.asked = self.answered = False  # the request is over; its answer is, or there is none
        self.next: _Turn | None = None

    @property
    def began_ns(self) -> int:
        return self.request.first_ns if self.request else 0

    @property
    def refused(self) -> bool:
        return self.answer is not None and self.answer.status >= 400


_NOTHING: tuple[Exchange, ...] = ()
_DATA = Kind.DATA


class Splitter:
    """The messages of one connection, paired. Feed it the connection's steps up to OVER.

    As long as nothing is missing answers belong to requests by their order. After a gap (`_doubt`) an answer is a
    request's only when no other can have asked for it, until the connection has come to rest.
    """

    def __init__(self, connection: int, account: Account, ports: frozenset[int] = frozenset()) -> None:
        self._connection, self._account, self._ports = connection, account, ports
        self._client: Flow | None = None
        self._server: Flow | None = None
        self._opened_ns: int | None = None
        self._strays: set[Flow] = set()  # who spoke before the client was known
        self._is_http = self._skips = self._spoke = self._server_spoke = self._missed = self._doubt = False
        self._seeks_request = self._seeks_answer = False  # after a gap: where does the next one begin?
        self._asking: _Turn | None = None  # whose request is being read
        self._answering: _Turn | None = None  # whose answer is, if it is anybody's
        self._answer: Answer | None = None
        self._pending: deque[_Turn] = deque()  # no answer yet
        self._last: _Turn | None = None  # the newest, until it is over
        self._ended_ns = 0  # the end of the last answer
        self._turns = 0
        self._blank = b""  # empty lines before a request
        self._fin_ns: int | None = None  # the client's
        self._reset_ns: int | None = None
        self._server_closed_ns: int | None = None
        self._closing: list[_Turn] = []  # over after the client closed: how it closed is not known yet
        self._done: list[Exchange] = []

    def feed(self, step: Step) -> Sequence[Exchange]:
        """The exchanges that a step completes, often none. Raises nothing, whatever the bytes are."""
        at_ns, _, flow, kind, data = step
        if kind is _DATA:
            self._hear(at_ns, flow, data)
        elif kind is Kind.OVER:
            self._end()
        elif kind is Kind.OPENED:
            self._client, self._server, self._opened_ns = flow, flow.back, at_ns
        elif not self._skips and self._client is not None:
            self._break(at_ns, flow, kind)
        elif kind is Kind.GAP:
            self._spoke = self._missed = True
        return self._took()

    def feed_run(self, run: Run) -> Sequence[Exchange]:
        """As `feed`, of steps in a row."""
        _, flow, moments, pieces, leads = run
        place, last = 0, len(pieces)
        while place < last:
            if flow == self._server:
                if self._answer is not None:
                    place = self._answer.take_chunks(moments, pieces, leads, place)
            elif (asking := self._asking) is not None and asking.request is not None and asking.answer is None:
                place = asking.request.take_length(moments, pieces, place)
            if place < last:
                self._hear(moments[place], flow, pieces[place])
                place += 1
        return self._took()

    def _took(self) -> Sequence[Exchange]:
        if not self._done:
            return _NOTHING
        done, self._done = self._done, []
        return done

    def _hear(self, at_ns: int, flow: Flow, data: bytes) -> None:
        if self._skips:
            self._account.skipped_bytes += len(data)
            return
        self._spoke = True
        if self._client is None:
            self._meet(flow, data)
        if flow == self._server:
            self._server_spoke = True
            self._from_server(at_ns, data)
        elif flow == self._client:
            self._from_client(at_ns, data)
        else:
            self._account.skipped_bytes += len(data)

    def _break(self, at_ns: int, flow: Flow, kind: Kind) -> None:
        """A gap, or an end of what one side says."""
        from_client = flow == self._client
        self._server_spoke = self._server_spoke or not from_client
        if kind is Kind.GAP:
            if from_client:
                self._miss_request()
            else:
                self._miss_answer()
            self._doubt = True
        elif not from_client:
            self._server_closed_ns = self._server_closed_ns or at_ns
            if kind is Kind.FIN:
                self._close_answer()
        elif kind is Kind.FIN:
            self._fin_ns = at_ns
            if self._asking is not None:
                self._stop_request(self._asking)
        else:
            self._reset_ns = self._reset_ns or at_ns

    # Who is who, and what they speak

    def _meet(self, flow: Flow, data: bytes) -> None:
        """The opening was not captured: a first line tells the client. What came before is nobody's, but may be of a
        request that is still to be answered."""
        self._doubt = self._seeks_request = self._seeks_answer = True
        if _is_tls(data):
            self._skip("tls")
        elif starts_request(data) and flow.source_port not in self._ports:
            self._client = flow
        elif starts_answer(data) and flow.target_port not in self._ports:
            self._client = flow.back
        else:
            self._strays.add(flow)
        if self._client is not None:
            self._server = self._client.back
            if self._missed or self._client in self._strays:
                self._miss_request()

    def _recognise(self, request: Request) -> None:
        """What the client's first bytes say of the protocol; of a strange first line the server tells if it is HTTP."""
        if request.method == "PRI" and request.flaw == "bad_version":
            self._skip("http2")
        elif _is_tls(request.opening):
            self._skip("tls")
        elif request.looks_like_http:
            self._found_http()
        elif request.lost:
            self._skip("not_http")

    def _found_http(self) -> None:
        if not self._is_http and self._client is not None:
            self._is_http = True
            self._account.http += 1
            self._account.ports[self._client.target_port] += 1

    def _skip(self, protocol: str) -> None:
        """The rest of the connection is not HTTP/1.1; it is counted as what it is, once."""
        self._skips = True
        if not self._is_http:
            setattr(self._account, protocol, getattr(self._account, protocol) + 1)
            self._asking = self._answering = self._answer = self._last = None
            self._pending.clear()

    # Requests

    def _from_client(self, at_ns: int, data: bytes) -> None:
        asking = self._asking
        if asking is not None and asking.request is not None and self._goes_on(asking, asking.request, data):
            self._stop_request(asking)
        while data:
            if self._asking is None:
                data = self._begin_request(at_ns, data)
            elif (request := self._asking.request) is not None:
                data = request.take(at_ns, data)
                if not self._is_http:
                    self._recognise(request)
                    if self._skips:
                        return
                if request.whole:
                    self._end_request(self._asking)

    def _goes_on(self, turn: _Turn, request: Request, data: bytes) -> bool:
        """Whether the client is at its next request already, though this one is not at its end."""
        return (request.open_ended or turn.answer is not None) and not request.in_head and starts_request(data)

    def _begin_request(self, at_ns: int, data: bytes) -> bytes:
        """Returns the bytes to read on with; none when there is no request in them."""
        if self._seeks_request:
            if not starts_request(data):
                self._account.skipped_bytes += len(data)
                if not self._pending:
                    self._miss_request()
                return b""
            self._seeks_request = False
        line = data.lstrip(b"\r\n")
        self._blank = (self._blank + data[: len(data) - len(line)])[:64]
        if not line:
            return b""
        blank, self._blank = self._blank, b""
        last = self._last
        if last is not None and last.request is not None and not b"A" <= line[:1] <= b"Z":
            # No method begins so: more of the body than its head says.
            last.request.go_on("excess_body")
            last.asked, self._asking = False, last
            return blank + line
        self._asking = self._last = self._next_turn(Request(at_ns, blank), last)
        return line

    def _next_turn(self, request: Request, last: _Turn | None) -> _Turn:
        pipelined = request.first_ns < self._ended_ns or (last is not None and not last.answered)
        turn = _Turn(self._turns, request, pipelined)
        self._turns += 1
        if last is not None:
            last.next = turn
        self._pending.append(turn)
        if len(self._pending) > UNANSWERED_AT_ONCE:
            self._doubt = True
            self._leave_unanswered(self._pending.popleft(), "not captured")
        return turn

    def _stop_request(self, turn: _Turn) -> None:
        """The client sent no more of it. What a server took for good it had whole: then the capture lacks the rest."""
        request = turn.request
        if request is not None and not request.open_ended:
            if turn.answer is not None and 0 < turn.answer.status < 400:
                request.lost = request.lost or "gap"
            else:
                request.flaw = request.flaw or ("short_head" if request.in_head else "short_body")
        self._end_request(turn)

    def _end_request(self, turn: _Turn) -> None:
        self._asking, turn.asked = None, True
        self._finish(turn)

    def _miss_request(self) -> None:
        """Bytes of the client are missing: of the request at hand, or of one or more that nobody knows."""
        self._blank = b""
        if self._asking is not None and self._asking.request is not None:
            self._asking.request.lost = self._asking.request.lost or "gap"
            self._end_request(self._asking)
        elif not self._pending or self._pending[-1].request is not None:
            self._pending.append(_Turn(-1, None))
        self._seeks_request = True

    # Answers

    def _from_server(self, at_ns: int, data: bytes) -> None:
        while data:
            answer = self._answer
            if answer is None:
                self._seeks_answer = self._seeks_answer or (self._doubt and not may_start_answer(data))
                if self._seeks_answer and not starts_answer(data):
                    self._account.skipped_bytes += len(data)
                    return
                self._seeks_answer = False
                answer = self._begin_answer(at_ns)
            data = answer.take(at_ns, data)
            if not self._is_http:
                if answer.flaw == "bad_status_line":
                    self._skip("not_http")
                    return
                if answer.status:
                    self._found_http()
            if answer.whole:
                self._end_answer(answer)
                if self._skips:
                    return

    def _begin_answer(self, at_ns: int) -> Answer:
        turn = self._asker(at_ns) if self._doubt else self._pending.popleft() if self._pending else None
        asked = turn.request.method if turn is not None and turn.request is not None else ""
        answer = self._answer = Answer(at_ns, asked)
        self._answering = turn
        if turn is None:
            self._doubt = True  # somebody asked for it, and was not heard
        else:
            turn.answer = answer
        return answer

    def _asker(self, at_ns: int) -> _Turn | None:
        """Whose answer this must be, in doubt; when it could be that of several, none of them is known to have one."""
        askers = [turn for turn in self._pending if turn.began_ns <= at_ns]
        for turn in askers:
            self._pending.remove(turn)
        if len(askers) == 1 and not askers[0].pipelined:
            return askers[0]
        for turn in askers:
            self._leave_unanswered(turn, "gap")
        return None

    def _end_answer(self, answer: Answer) -> None:
        turn, self._answering, self._answer = self._answering, None, None
        if answer.is_interim and not answer.lost:
            if turn is not None:
                turn.interim += (answer.status,)
                turn.answer = None
                self._pending.appendleft(turn)
            return
        self._account.answers_seen += 1
        self._ended_ns = answer.last_ns
        if turn is None:
            self._account.answers_unpaired += 1
            return
        turn.answered = True
        if turn.next is not None:
            turn.next.pipelined = not answer.lost and turn.next.began_ns < answer.last_ns
        if turn.request is None:
            self._account.answers_unpaired += 1
        self._finish(turn)
        if not (self._pending or self._asking or self._seeks_request or self._seeks_answer or answer.lost):
            self._doubt = False  # all is quiet, so the next answer is that of the next request
        if answer.upgrades_to:
            self._upgrade()

    def _close_answer(self) -> None:
        """The server closed: that is how an answer without framing ends."""
        if self._answer is not None and self._answer.open_ended:
            self._end_answer(self._answer)
        elif self._answer is not None:
            self._cut_answer(self._answer, "closed")

    def _cut_answer(self, answer: Answer, lost: str) -> None:
        answer.lost = answer.lost or lost
        self._end_answer(answer)

    def _miss_answer(self) -> None:
        """Bytes of the server are missing: of the answer at hand, or of the next one, which has lost its first line."""
        if self._answer is not None:
            self._cut_answer(self._answer, "gap")
        else:
            for _ in range(len(self._pending) if self._doubt else min(len(self._pending), 1)):
                self._leave_unanswered(self._pending.popleft(), "gap")
        self._seeks_answer = True

    def _upgrade(self) -> None:
        self._account.upgraded += 1
        self._end_all("closed")
        self._skips = True

    # Exchanges

    def _leave_unanswered(self, turn: _Turn, lost: str) -> None:
        """Nobody knows what the server answered."""
        turn.answered = True
        if turn.request is not None:
            turn.answer = Answer(turn.request.last_ns, turn.request.method)
            turn.answer.lost = lost
            if turn.next is not None:
                turn.next.pipelined = False
        self._finish(turn)

    def _finish(self, turn: _Turn) -> None:
        """Say an exchange that is over; if the client has closed, only the connection's end tells how: then keep it."""
        if not turn.answered or not turn.asked or turn.request is None:
            return
        if self._last is turn:
            self._last = None
        if self._fin_ns is not None or self._reset_ns is not None:
            self._closing.append(turn)
        else:
            self._say(turn, turn.request)

    def _say(self, turn: _Turn, request: Request) -> None:
        if self._client is None:
            return
        answer = turn.answer
        exchange = Exchange(
            connection=self._connection,
            turn=turn.number,
            flow=self._client,
            opened_ns=self._opened_ns,
            method=request.method,
            target=request.target,
            request=_said(request),
            status=answer.status if answer else 0,
            answer=_said(answer) if answer else None,
            interim=turn.interim,
            pipelined=turn.pipelined,
            upgraded=answer.upgrades_to if answer else "",
        )
        self._say_how_it_closed(exchange)
        self._done.append(exchange)
        self._count(exchange)

    def _say_how_it_closed(self, exchange: Exchange) -> None:
        closed_ns = min((at_ns for at_ns in (self._fin_ns, self._reset_ns) if at_ns is not None), default=None)
        answer = exchange.answer
        if closed_ns is None or (self._server_closed_ns is not None and self._server_closed_ns < closed_ns):
            return
        if answer is None or answer.lost in ("closed", "end of capture"):
            exchange.gave_up_ns = closed_ns
        elif not answer.lost and answer.last_ns > closed_ns:
            if self._reset_ns is None:
                exchange.half_closed_ns = closed_ns
            else:
                exchange.gave_up_ns = closed_ns

    def _count(self, exchange: Exchange) -> None:
        account, request, answer = self._account, exchange.request, exchange.answer
        account.requests_seen += 1
        if request.lost:
            account.incomplete[request.lost] += 1
        else:
            account.complete += 1
            if request.flaw:
                account.malformed[request.flaw] += 1
        if answer is None:
            account.unanswered += 1
        elif answer.lost:
            account.answers_lost[answer.lost] += 1
        account.aborted += exchange.gave_up_ns is not None

    # The end

    def _end(self) -> None:
        """The connection is over: say what is left of it."""
        if not self._skips:
            if self._asking is not None and self._asking.request is not None and not self._is_http:
                self._recognise(self._asking.request)
            if self._is_http:
                closed = self._fin_ns or self._reset_ns or self._server_closed_ns
                self._end_all("closed" if closed else "end of capture")
            elif not self._skips:
                self._skip("not_http" if self._spoke else "empty")
        self._account.skipped_bytes += len(self._blank)
        for turn in self._closing:
            if turn.request is not None:
                self._say(turn, turn.request)

    def _end_all(self, lost: str) -> None:
        """Whatever is at hand ends here, for the reason given."""
        asking = self._asking
        if asking is not None and asking.request is not None:
            if self._fin_ns or self._reset_ns or asking.refused or (asking.answer and asking.request.open_ended):
                self._stop_request(asking)
            else:
                asking.request.lost = asking.request.lost or lost
                self._end_request(asking)
        if self._answer is not None:
            self._cut_answer(self._answer, lost)
        unheard = not self._server_spoke and self._turns > 1
        for turn in self._pending:
            if unheard or lost != "closed":
                self._leave_unanswered(turn, "not captured" if unheard else lost)
            else:
                turn.answered = True
                self._finish(turn)
        self._pending.clear()


def _said(message: Message) -> Said:
    """The message as others see it."""
    return Said(
        message.raw, message.first_ns, message.last_ns, message.headers, message.pieces, message.lost, message.flaw
    )


def _is_tls(data: bytes) -> bool:
    """Whether bytes begin with a TLS record: its type, then the version's first byte."""
    return len(data) >= 2 and 0x14 <= data[0] <= 0x17 and data[1] == 3
