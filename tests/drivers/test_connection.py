"""One connection on the loop: when a broken one may be tried again, and what it tells its owner."""

import socket
import struct
from collections.abc import Iterator
from dataclasses import replace

import gevent
import pytest

from harness.drivers import connection as connections
from harness.drivers.connection import Connection, Endpoint, Exchange
from harness.drivers.stream import Reply
from harness.model import Outcome, Request, Tag

ASKED = Request(index=0, due_s=0.0, class_name="short")


class Told:
    """An owner that writes down what it is told."""

    next_s = float("inf")
    wall_ahead_s = 0.0

    def __init__(self) -> None:
        self.words: list[str] = []
        self.pressing: set[Connection] = set()

    def poll(self) -> None:
        pass

    def free(self, connection: Connection) -> None:
        self.words.append("free")

    def over(self, exchange: Exchange) -> None:
        self.words.append("over")

    def resend(self, exchange: Exchange) -> None:
        self.words.append("resend")

    def closed(self, connection: Connection) -> None:
        self.words.append("closed")

    def wait_for(self, word: str) -> None:
        with gevent.Timeout(10):
            while word not in self.words:
                gevent.sleep(0.001)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Connection, Told, socket.socket]]:
    """An idle connection, its owner, and the peer's end; any idle time counts as a long one."""
    monkeypatch.setattr(connections, "_KEPT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = Told()
        endpoint = Endpoint.of(f"http://127.0.0.1:{server.getsockname()[1]}")[0]
        server.accept()[0].close()  # the look at whether the address takes connections
        connection = Connection(endpoint, gevent.get_hub().loop, told)
        peer, _ = server.accept()
        told.wait_for("free")
        yield connection, told, peer
        connection.close()
        peer.close()


def sent(connection: Connection) -> Exchange:
    exchange = Exchange(ASKED, b"POST / HTTP/1.1\r\n\r\n", Reply(sent_s=connections.time.monotonic()))
    connection.carry(exchange)
    return exchange


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def test_a_request_that_crossed_the_closing_of_an_idle_connection_is_sent_again(
    pair: tuple[Connection, Told, socket.socket],
) -> None:
    """An idle connection that breaks within a round trip of the sending was closed before the request was seen."""
    connection, told, peer = pair
    connection.connect_s = 10.0  # a far server: what happens now happens within its round trip
    sent(connection)
    reset(peer)
    told.wait_for("closed")
    assert told.words == ["free", "closed", "resend"]


def test_a_server_that_had_the_request_has_failed_it(pair: tuple[Connection, Told, socket.socket]) -> None:
    """Later than a round trip, or after a byte of the answer, the break is the answer's own: it is not tried again."""
    connection, told, peer = pair
    connection.connect_s = -10.0  # so near that its round trip is over
    exchange = sent(connection)
    reset(peer)
    told.wait_for("over")
    assert "resend" not in told.words
    assert exchange.reply.broken is Outcome.RESET


def test_an_answer_that_has_begun_is_not_asked_for_again(pair: tuple[Connection, Told, socket.socket]) -> None:
    """A byte of the answer proves that the server had the request."""
    connection, told, peer = pair
    connection.connect_s = 10.0
    exchange = sent(connection)
    peer.sendall(b"HTTP/1.1 200")
    with gevent.Timeout(10):
        while exchange.reply.first_byte_s != exchange.reply.first_byte_s:
            gevent.sleep(0.001)
    reset(peer)
    told.wait_for("over")
    assert "resend" not in told.words


def test_an_idle_connection_that_the_peer_has_closed_is_not_alive(
    pair: tuple[Connection, Told, socket.socket],
) -> None:
    """The kernel knows before the loop has told us."""
    connection, _, peer = pair
    assert connection.alive
    peer.close()
    assert not connection.alive


def test_a_name_stands_for_the_addresses_that_take_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose first address nobody listens on is reached at its second, as any client would reach it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port if host == "127.0.0.1" else 9))
            for host in ("127.0.0.2", "127.0.0.1")
        ]
        monkeypatch.setattr(connections.socket, "getaddrinfo", lambda *_, **__: found)
        assert [endpoint.address for endpoint in Endpoint.of(f"http://a.name:{port}")] == [("127.0.0.1", port)]


def test_an_address_without_a_route_is_refused(pair: tuple[Connection, Told, socket.socket]) -> None:
    """An error that connecting gives at once (no route, no permission) is a refusal, not a connection that broke."""
    told = Told()
    endpoint = Endpoint(socket.AF_INET, ("224.0.0.1", 9), "nowhere", None)
    connection = Connection(endpoint, gevent.get_hub().loop, told)
    exchange = Exchange(ASKED, b"POST / HTTP/1.1\r\n\r\n", Reply(sent_s=connections.time.monotonic()))
    connection.carry(exchange)
    told.wait_for("over")
    assert exchange.reply.broken is Outcome.REFUSED


def test_a_half_close_says_that_no_more_comes(pair: tuple[Connection, Told, socket.socket]) -> None:
    """The peer reads to the end, and its answer still arrives; the connection is of no more use then."""
    connection, told, peer = pair
    exchange = sent(connection)
    connection.half_close()
    assert peer.recv(100) == exchange.wire
    assert peer.recv(100) == b""
    peer.sendall(b"HTTP/1.1 204 X\r\n\r\n")
    told.wait_for("over")
    assert told.words == ["free", "closed", "over"]
    assert (exchange.reply.status, exchange.reply.broken) == (204, None)


def test_tls_hangs_up_where_a_capture_closed_one_side(pair: tuple[Connection, Told, socket.socket]) -> None:
    """There is no half of a TLS connection that a server would bear."""
    connection, told, _ = pair
    exchange = sent(connection)
    connection._tls = object()  # type: ignore[assignment]
    connection.half_close()
    assert told.words == ["free", "closed", "over"]
    assert (exchange.reply.broken, exchange.reply.tags) == (Outcome.CANCELLED_BY_US, Tag.GAVE_UP)


def test_a_malformed_request_is_sent_once(pair: tuple[Connection, Told, socket.socket]) -> None:
    """Its bytes may be why the server closed, however soon it did."""
    connection, told, peer = pair
    connection.connect_s = 10.0
    request = replace(ASKED, raw=True, flaw="two_lengths")
    connection.carry(Exchange(request, b"POST / HTTP/1.1\r\n\r\n", Reply(sent_s=connections.time.monotonic())))
    reset(peer)
    told.wait_for("over")
    assert "resend" not in told.words
