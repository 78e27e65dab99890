"""What both sides said is cut into the right messages and paired rightly; what is missing is told, never made up."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.traffic.capture import framing
from harness.traffic.capture.account import Account
from harness.traffic.capture.flows import Kind, Step
from harness.traffic.capture.messages import Exchange, exchanges
from harness.traffic.capture.packets import Flow

TO_SERVER = Flow(b"\1\1\1\1", 40_000, b"\2\2\2\2", 8000)
C, S = TO_SERVER, TO_SERVER.back
Said = tuple[Flow, bytes | Kind]
Rounds = list[tuple[list[bytes], list[bytes]]]  # requests sent at once, and their answers


def steps(said: Iterable[Said], opened: bool = True, over: bool = True) -> list[Step]:
    """A connection as steps, the first at 1, each one later than the one before."""
    made = [Step(1, 0, C, Kind.OPENED)] if opened else []
    for at_ns, (flow, what) in enumerate(said, start=2):
        made.append(Step(at_ns, 0, flow, what) if isinstance(what, Kind) else Step(at_ns, 0, flow, Kind.DATA, what))
    return made + ([Step(len(made) + 2, 0, C, Kind.OVER)] if over else [])


def split(
    *said: Said, opened: bool = True, account: Account | None = None, ports: frozenset[int] = frozenset()
) -> list[Exchange]:
    """The exchanges of one connection in the order of their turns; the account must add up."""
    account = account if account is not None else Account()
    found = sorted(exchanges(steps(said, opened), account, ports), key=lambda one: one.turn)
    assert account.requests_seen == len(found) == account.complete + account.incomplete.total()
    assert account.http + account.not_http + account.tls + account.http2 + account.empty == 1
    return found


def post(body: bytes, target: bytes = b"/v1/chat/completions", fields: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n%b" % (target, fields, len(body), body)


def get(target: bytes = b"/health", method: bytes = b"GET", fields: bytes = b"") -> bytes:
    return b"%b %b HTTP/1.1\r\nHost: a\r\n%b\r\n" % (method, target, fields)


def ok(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


CHUNKED = b"Transfer-Encoding: chunked\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + CHUNKED + b"\r\n"
TO_CLOSE = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


def test_requests_and_answers_of_one_connection_follow_each_other() -> None:
    """Bytes, bodies, heads, and the moments of the packets that carried their first and last byte."""
    asked = post(b"one")
    first, second = split(
        (C, asked[:-2]), (C, b"ne"), (S, ok(b"1")), (C, post(b"two", b"/b")), (S, ok(b"2", b"404 No"))
    )
    assert (first.method, first.target, first.turn) == ("POST", "/v1/chat/completions", 0)
    assert (first.flow, first.opened_ns) == (C, 1)
    assert (first.request.raw, first.request.body) == (post(b"one"), b"one")
    assert (first.request.first_ns, first.request.last_ns) == (2, 3)
    assert first.request.headers == ((b"Host", b"a"), (b"Content-Length", b"3"))
    assert first.request.pieces == [(2, b"o"), (3, b"ne")]
    assert first.answer and (first.status, first.answer.body, first.answer.first_ns) == (200, b"1", 4)
    assert second.answer and (second.status, second.answer.body, second.turn) == (404, b"2", 1)
    for one in (first, second):
        assert one.answer and not (one.pipelined or one.request.lost or one.request.flaw or one.answer.lost)


def test_pipelined_requests_are_answered_in_their_order() -> None:
    """Three in one packet; the one sent after the answer to the one before it was not pipelined."""
    found = split(
        (C, post(b"1") + post(b"2") + get()), (S, ok(b"a") + ok(b"b")), (S, ok(b"c")), (C, get()), (S, ok(b"d"))
    )
    assert [one.answer.body for one in found if one.answer] == [b"a", b"b", b"c", b"d"]
    assert [one.pipelined for one in found] == [False, True, True, False]


def test_chunks_are_taken_off_and_kept() -> None:
    """Extensions and trailers stay in the raw bytes; each piece of the body has the moment of its packet."""
    request = get(method=b"POST", fields=CHUNKED) + chunk(b"ab", b";x=1") + chunk(b"cd") + b"0\r\nx-sum: 1\r\n\r\n"
    (found,) = split(
        (C, request), (S, STREAM), (S, chunk(b"data: 1\n\n")), (S, chunk(b"da") + chunk(b"ta: 2\n\n") + b"0\r\n\r\n")
    )
    assert (found.request.raw, found.request.body) == (request, b"abcd")
    assert found.answer and found.answer.pieces == [(4, b"data: 1\n\n"), (5, b"da"), (5, b"ta: 2\n\n")]
    assert found.answer.raw.endswith(b"0\r\n\r\n") and not found.answer.lost and found.answer.last_ns == 5


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (get(method=b"HEAD"), b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"),
        (get(), b"HTTP/1.1 204 No Content\r\n\r\n"),
        (get(), b"HTTP/1.1 304 Not Modified\r\ncontent-length: 99\r\n\r\n"),
    ],
)
def test_answers_without_a_body_end_with_their_head(request_: bytes, answer: bytes) -> None:
    """Whatever length the head states."""
    first, second = split((C, request_), (S, answer), (C, get()), (S, ok(b"x")))
    assert first.answer and second.answer and (first.answer.raw, second.answer.body) == (answer, b"x")


def test_interim_answers_are_not_the_answer() -> None:
    """The body that a client held back belongs to the request that asked; hints change nothing."""
    whole = post(b"body", fields=b"Expect: 100-continue\r\n")
    hints = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    (found,) = split((C, whole[:-4]), (S, b"HTTP/1.1 100 Continue\r\n\r\n"), (C, b"body"), (S, hints + ok(b"x")))
    assert (found.interim, found.status, found.request.raw, found.request.flaw) == ((100, 103), 200, whole, "")


@pytest.mark.parametrize(
    ("end", "lost"),
    [((S, Kind.FIN), ""), ((S, Kind.RESET), "closed"), ((C, Kind.RESET), "closed"), (None, "end of capture")],
)
def test_an_answer_without_framing_lasts_until_the_server_closes(end: Said | None, lost: str) -> None:
    """Only a close in peace makes it whole."""
    (found,) = split((C, get()), (S, TO_CLOSE + b"ab"), (S, b"c"), *([end] if end else []))
    assert found.answer and (found.answer.body, found.answer.lost) == (b"abc", lost)


@pytest.mark.parametrize("framed", [ok(b"abcdef")[:-2], STREAM + chunk(b"abcd")])
def test_an_answer_that_the_server_cut_short_is_not_whole(framed: bytes) -> None:
    """Its body is what came; the client did not give up."""
    (found,) = split((C, get()), (S, framed), (S, Kind.FIN), (C, Kind.FIN))
    assert found.answer and (found.answer.body, found.answer.lost, found.gave_up_ns) == (b"abcd", "closed", None)


def test_a_request_ends_where_the_client_stopped_after_an_early_answer() -> None:
    """What follows is the next request if it is one, and more of the body if not."""
    asked = post(b"x" * 50)[:-40]
    stopped, following = split((C, asked), (S, ok(b"no", b"413 Large")), (C, get()), (S, ok(b"y")))
    assert (stopped.request.raw, stopped.request.flaw, stopped.request.lost, stopped.status) == (
        asked,
        "short_body",
        "",
        413,
    )
    assert following.answer and (following.answer.body, following.pipelined) == (b"y", False)
    (went_on,) = split((C, asked), (S, ok(b"no", b"413 Large")), (C, b"x" * 40))
    assert (went_on.request.raw, went_on.request.flaw, went_on.status) == (post(b"x" * 50), "", 413)
    (closed,) = split((C, asked), (S, ok(b"no", b"413 Large")), (C, b"x"), (S, Kind.FIN), (C, Kind.FIN))
    assert (closed.request.raw, closed.request.flaw, closed.gave_up_ns) == (asked + b"x", "short_body", None)


def test_a_request_that_the_server_took_for_good_had_no_short_body() -> None:
    """Where its end was not captured and no gap tells, it is lost, not malformed."""
    lost, whole = split((C, post(b"x" * 50)[:-40]), (S, ok(b"fine")), (C, get()), (S, ok(b"y")))
    assert (lost.request.lost, whole.request.lost) == ("gap", "")


STARTED = STREAM + chunk(b"data: 1\n\n")


@pytest.mark.parametrize(
    ("after", "gave_up_ns", "half_closed_ns"),
    [
        ([(C, Kind.RESET)], 4, None),
        ([(C, Kind.FIN), (S, chunk(b"x")), (C, Kind.RESET)], 4, None),
        ([(C, Kind.FIN), (S, chunk(b"x") + b"0\r\n\r\n"), (C, Kind.RESET)], 4, None),
        ([(C, Kind.FIN), (S, chunk(b"x")), (S, Kind.FIN)], 4, None),
        ([(C, Kind.FIN), (S, chunk(b"x")), (S, b"0\r\n\r\n"), (S, Kind.FIN)], None, 4),
        ([(S, b"0\r\n\r\n"), (C, Kind.FIN), (S, Kind.FIN)], None, None),
        ([(S, Kind.RESET), (C, Kind.FIN)], None, None),
    ],
)
def test_how_a_client_closed_shows_in_what_follows(
    after: list[Said], gave_up_ns: int | None, half_closed_ns: int | None
) -> None:
    """It gave up if it refused what came, or nothing came to an end; it only half closed if the answer did."""
    account = Account()
    (found,) = split((C, get()), (S, STARTED), *after, account=account)
    assert (found.gave_up_ns, found.half_closed_ns) == (gave_up_ns, half_closed_ns)
    assert account.aborted == (gave_up_ns is not None)


def test_a_client_can_give_up_before_any_answer_and_before_its_own_end() -> None:
    """Unanswered, and sent as far as it was sent."""
    account = Account()
    (waiting,) = split((C, get()), (C, Kind.FIN), account=account)
    assert (waiting.answer, waiting.gave_up_ns, account.unanswered) == (None, 3, 1)
    (sending,) = split((C, post(b"body")[:-2]), (C, Kind.RESET))
    assert (sending.request.raw, sending.request.flaw, sending.gave_up_ns) == (post(b"body")[:-2], "short_body", 3)
    (short,) = split((C, post(b"body")[:-2]), (C, Kind.FIN), (S, ok(b"", b"400 Bad")), (S, Kind.FIN))
    assert (short.request.flaw, short.status, short.half_closed_ns) == ("short_body", 400, 3)


def test_what_is_cut_off_by_the_end_says_by_which() -> None:
    """The capture's end tells nothing of an answer; a server that closed gave none."""
    account = Account()
    (open_,) = split((C, get()), account=account)
    assert open_.answer and (open_.status, open_.answer.lost, account.answers_lost) == (
        0,
        "end of capture",
        {"end of capture": 1},
    )
    (refused,) = split((C, get()), (S, Kind.RESET))
    assert (refused.answer, refused.gave_up_ns) == (None, None)
    (half,) = split((C, post(b"body")[:-2]))
    assert (half.request.lost, half.request.flaw) == ("end of capture", "")
    assert split((C, post(b"body")[:-2]), (S, Kind.FIN))[0].request.lost == "closed"


def test_one_direction_alone_tells_nothing_of_answers() -> None:
    """The requests are there; that nobody answered them is not said."""
    found = split(*[(C, get())] * 200, (C, Kind.FIN))
    assert len(found) == 200 and {one.answer.lost for one in found if one.answer} == {"not captured"}
    assert all(one.answer and one.gave_up_ns is None for one in found)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ([(C, b"\x16\x03\x01\x02\x00\x01\xfc"), (S, b"\x16\x03\x03")], "tls"),
        ([(C, b"\x16"), (C, b"\x03\x01\x02\x00\x01\xfc")], "tls"),
        ([(C, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0"), (S, b"\0\0\0\4")], "http2"),
        ([(S, b"220 mail ready\r\n"), (C, b"EHLO a\r\n")], "not_http"),
        ([(C, b"\x03\0\0\x13 some \r\n\r\n protocol")], "not_http"),
        ([(C, b"HELO there\r\n"), (S, b"250 hello\r\n"), (C, b"DATA\r\n\r\n")], "not_http"),
        ([(C, b"\0" * 300_000)], "not_http"),
        ([(C, Kind.FIN)], "empty"),
    ],
)
@pytest.mark.parametrize("opened", [True, False])
def test_what_is_not_http_is_counted_as_what_it_is(said: list[Said], kind: str, opened: bool) -> None:
    """Once for each connection, and no request is seen in it."""
    account = Account()
    assert not split(*said, account=account, opened=opened)
    if opened or kind in ("empty", "not_http"):
        assert getattr(account, kind) == 1


def test_a_connection_that_changes_its_protocol_is_followed_no_further() -> None:
    """An upgrade or a tunnel is named; one that is refused is an ordinary answer."""
    account = Account()
    switch = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n\x81\x05"
    asked = get(fields=b"Upgrade: websocket\r\n")
    first, last = split((C, get()), (S, ok(b"1")), (C, asked), (S, switch), (C, get()), (S, ok(b"2")), account=account)
    assert (first.upgraded, last.upgraded, last.status, account.upgraded) == ("", "websocket", 101, 1)
    (tunnel,) = split(
        (C, get(b"b:443", b"CONNECT")), (S, b"HTTP/1.1 200 Fine\r\n\r\n"), (C, b"\x16\x03\x01"), (S, b"\x16\x03")
    )
    assert tunnel.upgraded == "tunnel"
    assert [one.upgraded for one in split((C, asked), (S, ok(b"no")), (C, get()), (S, ok(b"x")))] == ["", ""]


MALFORMED = [
    (b"GET  /x HTTP/1.1\r\nHost: a\r\n\r\n", "bad_request_line"),
    (b"\x00\x01\x02 nonsense\r\n\r\n", "bad_request_line"),
    (b" \t \r\n\r\n", "bad_request_line"),
    (get().replace(b"1.1", b"9.9"), "bad_version"),
    (post(b"abc", fields=b"Content-Length: 3\r\n"), "duplicate_content_length"),
    (post(b"abcdefgh", fields=b"Content-Length: 3\r\n"), "conflicting_content_length"),
    (get(method=b"POST", fields=b"Content-Length: +3\r\n") + b"abc", "bad_content_length"),
    (get(method=b"POST", fields=b"Content-Length: 3\r\n" + CHUNKED) + b"3\r\nabc\r\n0\r\n\r\n", "length_with_chunked"),
    (get(method=b"POST", fields=b"Transfer-Encoding: gzip\r\n") + b"abc", "bad_transfer_encoding"),
    (get(method=b"POST", fields=CHUNKED) + b"3\r\nabc\r\nzz\r\nabc", "bad_chunk"),
    (get(method=b"POST", fields=CHUNKED) + b"3\r\nabcdef\r\n0\r\n\r\n", "bad_chunk"),
    (get(method=b"POST", fields=CHUNKED) + b"0x3\r\nabc\r\n0\r\n\r\n", "bad_chunk"),
    (get(fields=b"X: a\r\n b\r\n"), "obs_fold"),
    (get(fields=b"no colon\r\n"), "header_without_colon"),
    (get(fields=b"X : a\r\n"), "bad_header_name"),
    (get(fields=b"X: a\0b\r\n"), "bad_header_value"),
    (get().replace(b"\r\n", b"\n"), "bare_lf"),
    (b"GET / HTTP/1.1\r\n\r\n", "no_host"),
    (get(fields=b"Host: b\r\n"), "duplicate_host"),
    (post(b"abc") + b'{"more"}', "excess_body"),
    (get(method=b"POST") + b'{"no": "length"}', "excess_body"),
]


@pytest.mark.parametrize(("raw", "flaw"), MALFORMED)
@pytest.mark.parametrize("by_byte", [True, False])
def test_malformed_requests_are_kept_to_the_byte(raw: bytes, flaw: str, by_byte: bool) -> None:
    """One request, named for what is wrong with it, however it was cut; the one before it is as it was."""
    account = Account()
    sent = [(C, bytes([byte])) for byte in raw] if by_byte else [(C, raw)]
    before, found = split(
        (C, get()), (S, ok(b"")), *sent, (S, ok(b"no", b"400 Bad")), (S, Kind.FIN), (C, Kind.FIN), account=account
    )
    assert (found.request.raw, found.request.flaw, found.request.lost, found.status) == (raw, flaw, "", 400)
    assert (before.request.raw, account.malformed, account.complete) == (get(), {flaw: 1}, 2)


def test_a_connection_may_begin_with_what_is_no_request_line() -> None:
    """The server, which answers in HTTP, tells that it was meant as one."""
    (found,) = split((C, b"NONSENSE\r\n\r\n"), (S, ok(b"no", b"400 Bad")), (S, Kind.FIN))
    assert (found.request.raw, found.request.flaw, found.status) == (b"NONSENSE\r\n\r\n", "bad_request_line", 400)


def test_after_broken_framing_the_next_request_line_is_the_next_request() -> None:
    """As far as the connection lives on."""
    raw, flaw = MALFORMED[4]
    broken, following = split((C, raw), (S, ok(b"no", b"400 Bad")), (C, get()), (S, ok(b"x")))
    assert (broken.request.raw, broken.request.flaw) == (raw, flaw)
    assert following.answer and (following.request.raw, following.answer.body) == (get(), b"x")


def test_a_head_that_never_ends_is_cut_off_by_the_close() -> None:
    """It is as short as it was sent."""
    (found,) = split((C, get()[:-2]), (C, Kind.FIN), (S, ok(b"", b"408 Timeout")), (S, Kind.FIN))
    assert (found.request.raw, found.request.flaw, found.status) == (get()[:-2], "short_head", 408)


def test_empty_lines_before_a_request_are_kept_with_it() -> None:
    """They are no request of their own."""
    (found,) = split((C, b"\r\n"), (C, b"\n\r\n" + get()), (S, ok(b"x")))
    assert (found.request.raw, found.request.flaw, found.request.first_ns) == (b"\r\n\n\r\n" + get(), "", 3)


def test_what_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a body nor a head; the next message is found all the same."""
    monkeypatch.setattr(framing, "MESSAGE_BYTES", 1000)
    monkeypatch.setattr(framing, "HEAD_BYTES", 800)
    large, small = split((C, post(b"x" * 1200)), (S, ok(b"y" * 1200)), (C, get()), (S, ok(b"z")))
    assert (large.request.lost, large.request.raw, large.answer and large.answer.lost) == (
        "too large",
        b"",
        "too large",
    )
    assert (large.status, small.request.lost, small.answer and small.answer.body) == (200, "", b"z")
    endless, small = split(
        (C, b"GET / HTTP/1.1\r\nX: " + b"x" * 900), (S, ok(b"", b"431 No")), (C, get()), (S, ok(b"z"))
    )
    assert (endless.request.lost, endless.request.raw, endless.status, small.status) == ("too large", b"", 431, 200)


def test_a_gap_in_a_request_loses_it_alone() -> None:
    """In its body, in its head, or all of it: the next one is found, with its answer."""
    body = post(b"x" * 50)
    for hit in ([(C, body[:-20]), (C, Kind.GAP), (C, b"xx")], [(C, body[:9]), (C, Kind.GAP), (C, body[30:])]):
        lost, whole = split(*hit, (S, ok(b"1")), (C, get()), (S, ok(b"2")))
        assert (lost.request.lost, lost.answer and lost.answer.body) == ("gap", b"1")
        assert whole.answer and (whole.request.raw, whole.answer.body, whole.answer.lost) == (get(), b"2", "")
    account = Account()
    first, third = split(
        (C, get()), (S, ok(b"1")), (C, Kind.GAP), (S, ok(b"2")), (C, post(b"3")), (S, ok(b"3")), account=account
    )
    assert third.answer and (first.request.lost, third.request.body, third.answer.body) == ("", b"3", b"3")
    assert account.answers_unpaired == 1


def test_a_gap_in_an_answer_loses_it_alone() -> None:
    """What came before the gap is kept, and nothing of what came after it."""
    for hit in ([(S, ok(b"1" * 50)[:-20]), (S, Kind.GAP), (S, b"11")], [(S, Kind.GAP), (S, b"111")]):
        lost, whole = split((C, get()), *hit, (C, post(b"2")), (S, ok(b"2")))
        assert lost.answer and (lost.answer.lost, set(lost.answer.body) <= {ord("1")}) == ("gap", True)
        assert whole.answer and (whole.answer.body, whole.answer.lost, whole.pipelined) == (b"2", "", False)


def test_a_lost_answer_that_is_told_late_is_still_that_of_its_request() -> None:
    """A hole is given up only when the next answer is there, after the next request."""
    lost, whole = split((C, get()), (C, post(b"2")), (S, Kind.GAP), (S, ok(b"2")))
    assert lost.answer and (lost.status, lost.answer.lost) == (0, "gap")
    assert whole.answer and (whole.answer.body, whole.pipelined) == (b"2", False)


def test_an_answer_that_could_be_that_of_two_requests_is_nobodys() -> None:
    """Pipelined requests after a gap: none is paired, and the connection is whole again once it has come to rest."""
    account = Account()
    three = post(b"1") + post(b"2") + post(b"3")
    *muddled, last = split((C, three), (S, Kind.GAP), (S, ok(b"3")), (C, post(b"4")), (S, ok(b"4")), account=account)
    assert [one.answer.lost for one in muddled if one.answer] == ["gap"] * 3
    assert last.answer and (last.answer.body, account.answers_unpaired, account.complete) == (b"4", 1, 4)


def test_a_quoted_request_in_a_body_is_no_request() -> None:
    """Where the thread was lost, a message begins where a packet does and nowhere else."""
    quoting = post(b"x\r\n" + get() + b"y")
    lost, whole = split(
        (C, quoting[:30]), (C, Kind.GAP), (C, quoting[40:]), (S, ok(b"1")), (C, post(b"2")), (S, ok(b"2"))
    )
    assert (lost.request.lost, whole.request.body) == ("gap", b"2")


@pytest.mark.parametrize("ports", [frozenset(), frozenset({8000})])
def test_a_connection_that_was_open_already_is_read_from_its_next_request(ports: frozenset[int]) -> None:
    """The rest of what was under way is counted, and its answer is nobody's."""
    account = Account()
    (found,) = split(
        (C, b"rest of a body"),
        (S, ok(b"1")),
        (C, post(b"2")),
        (S, ok(b"2")),
        opened=False,
        account=account,
        ports=ports,
    )
    assert found.answer and (found.request.body, found.answer.body, found.opened_ns, found.flow) == (
        b"2",
        b"2",
        None,
        C,
    )
    assert (account.skipped_bytes >= 14, account.answers_unpaired, account.ports) == (True, 1, {8000: 1})


def test_a_request_whose_forerunners_were_not_seen_is_not_given_their_answer() -> None:
    """Bytes that belonged to a request before it show that there was one, and it may still be waiting."""
    pipelined = [(C, b"{rest of a body}"), (C, post(b"2")), (S, ok(b"1") + ok(b"2"))]
    for opening in ([], [(S, ok(b"0"))]):
        found, last = split(*opening, *pipelined, (C, post(b"3")), (S, ok(b"3")), opened=False)
        assert found.answer and (found.request.body, found.status, found.answer.lost) == (b"2", 0, "gap")
        assert last.answer and last.answer.body == b"3"


@st.composite
def conversations(draw: st.DrawFn, quoted: bytes = b"") -> Rounds:
    """Rounds of one request or three; each message names its number, so that none is like another.

    Bodies quote what frames messages, and `quoted`.
    """
    rounds, number = [], 0
    for size in draw(st.lists(st.sampled_from([1, 1, 1, 3]), min_size=1, max_size=4)):
        asked, answered = [], []
        for _ in range(size):
            number += 1
            name = b"<%d>" % number
            filler = draw(st.binary(max_size=30))
            body = name + filler + draw(st.sampled_from([b"", b"\r\n\r\n", b"\r\n0\r\n\r\n", quoted]))
            kind = draw(st.sampled_from(["plain", "chunked", "get", "head"]))
            match kind:
                case "plain":
                    asked.append(post(body, b"/%d" % number))
                case "chunked":
                    asked.append(
                        get(b"/%d" % number, b"POST", CHUNKED)
                        + chunk(body)
                        + chunk(filler + b"x")
                        + b"0\r\nt: 1\r\n\r\n"
                    )
                case "get":
                    asked.append(get(b"/%d" % number))
                case "head":
                    asked.append(get(b"/%d" % number, b"HEAD"))
            if kind == "head":
                answered.append(b"HTTP/1.1 200 OK\r\nx: %d\r\ncontent-length: 99\r\n\r\n" % number)
            elif draw(st.booleans()):
                answered.append(ok(body))
            else:
                answered.append(STREAM + b"".join(map(chunk, (name, body))) + b"0\r\n\r\n")
        rounds.append((asked, answered))
    return rounds


def cut(draw: st.DrawFn, flow: Flow, data: bytes) -> list[Said]:
    cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=8))})
    return [(flow, data[start:end]) for start, end in pairwise(cuts)]


def cut_up(draw: st.DrawFn, rounds: Rounds) -> list[Said]:
    return [part for flow, said in in_turn(rounds) for part in cut(draw, flow, said)]


def in_turn(rounds: Rounds) -> list[tuple[Flow, bytes]]:
    return [(flow, b"".join(said)) for round_ in rounds for flow, said in zip((C, S), round_, strict=True)]


@given(conversations(get() + b"HTTP/1.1 200 OK\r\n\r\n"), st.data())
def test_any_cut_of_the_bytes_gives_the_same_exchanges(rounds: Rounds, data: st.DataObject) -> None:
    """Where packets begin and end says nothing about messages."""
    whole = split(*in_turn(rounds))
    found = split(*cut_up(data.draw, rounds))
    assert [one.request.raw for one in found] == [raw for asked, _ in rounds for raw in asked]
    assert [one.answer and one.answer.raw for one in found] == [raw for _, answered in rounds for raw in answered]
    assert [(one.request.body, one.answer and one.answer.body, one.pipelined, one.request.lost) for one in found] == [
        (one.request.body, one.answer and one.answer.body, one.pipelined, "") for one in whole
    ]


@given(conversations(), st.data())
def test_a_gap_anywhere_makes_no_wrong_message(rounds: Rounds, data: st.DataObject) -> None:
    """What is called whole was said so, and an answer is that of its request or nobody's."""
    said = cut_up(data.draw, rounds)
    gone = data.draw(st.sets(st.integers(0, len(said) - 1), min_size=1, max_size=4))
    hit = [(flow, Kind.GAP if at in gone else part) for at, (flow, part) in enumerate(said)]
    answers = {raw: answer for asked, answered in rounds for raw, answer in zip(asked, answered, strict=True)}
    for one in split(*hit, opened=data.draw(st.booleans())):
        assert one.request.lost or one.request.raw in answers
        if one.answer and one.status and not one.request.lost:
            truth = answers[one.request.raw]
            assert one.answer.raw == truth if not one.answer.lost else truth.startswith(one.answer.raw)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([C, S]),
            st.binary(max_size=60) | st.sampled_from([Kind.GAP, Kind.FIN, Kind.RESET, get(), STREAM]),
        ),
        max_size=30,
    )
)
def test_no_bytes_in_any_order_break_the_account(said: list[tuple[Flow, bytes | Kind]]) -> None:
    """Whatever both sides say and lose: nothing is raised, and every request is counted once."""
    split(*said)
    split(*said, opened=False)
