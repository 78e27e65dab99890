"""One connection to the target as callbacks on an event loop: no greenlet, no thread, no wait.

Every read carries the moment at which the kernel received it (SO_TIMESTAMPNS), so that a busy client does not make the
stack look slow; what the client left lying unread is kept as `receive_lag_s`. Before each read the schedule is polled:
a request that falls due is late by one read at most, however many sockets are ready.

TLS runs over the same callbacks (ssl.MemoryBIO) and verifies certificates (SSL_CERT_FILE and SSL_CERT_DIR are
honoured). Nothing is parsed here; no proxy is used.
"""

import _socket
import contextlib
import errno
import socket
import ssl
import struct
import time
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from harness.drivers.stream import Reply
from harness.drivers.wire import Answers
from harness.model import NEVER, Outcome, Request, Tag, UsageError

_READ, _WRITE = 1, 2
_READ_BYTES = 1 << 16
_WRITE_BYTES = 1 << 17  # of a body in one go: ten megabytes must not hold up the schedule
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("qq")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)
_OURS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)  # this machine ran out
_PROBE_S = 2.0  # for an address to take a connection, before the run
_KEPT_S = 1.0  # no server closes a connection for being idle sooner
_NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a connection goes: an address that was looked up once, and the TLS to speak there, if any."""

    family: int
    address: Any
    host: str
    tls: ssl.SSLContext | None

    @staticmethod
    def of(url: str) -> "list[Endpoint]":
        """Every address of a target's URL that takes a connection now; all of them when none does.

        A name may have an address of a family that nothing listens on, and several that should share the load. Raises
        UsageError for a name that has no address.
        """
        parts = urlsplit(url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        host, port = parts.hostname or "", parts.port or (443 if tls else 80)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(f"the target's host {host!r} has no address: {error}") from error
        every = [Endpoint(family, address, host, tls) for family, _, _, _, address in found]
        return [endpoint for endpoint in every if endpoint._takes_connections()] or every

    def _takes_connections(self) -> bool:
        with socket.socket(self.family, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            return int(probe.connect_ex(self.address)) == 0


@dataclass(slots=True, eq=False)
class Exchange:
    """One request on its way: the plan's line, its bytes, and what came back so far."""

    request: Request
    wire: bytes
    reply: Reply
    carrier: "Connection | None" = None  # while it is in flight


class Owner(Protocol):
    """What a connection asks of its owner, and tells it of itself.

    `next_s` is when the schedule wants to be polled next; `wall_ahead_s` is the wall clock less the monotonic one, for
    the kernel stamps with the former. `pressing` holds the connections whose next step no kernel stamp dates: those
    that are being opened, and those with more to write.
    """

    next_s: float
    wall_ahead_s: float
    pressing: "set[Connection]"

    def poll(self) -> None:
        """Do what has fallen due; called before every read."""

    def free(self, connection: "Connection") -> None:
        """It can carry a request."""

    def over(self, exchange: Exchange) -> None:
        """A request is over, however it ended."""

    def resend(self, exchange: Exchange) -> None:
        """The request never reached a server that lived: it had closed this idle connection before."""

    def closed(self, connection: "Connection") -> None:
        """It is gone."""


class Connection:
    """Opens at once. Raises OSError when this machine has no descriptors or ports left."""

    def __init__(self, endpoint: Endpoint, loop: Any, owner: Owner) -> None:
        self._owner = owner
        self._socket = sock = _socket.socket(endpoint.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._reader, self._writer = loop.io(sock.fileno(), _READ), loop.io(sock.fileno(), _WRITE)
        self._tls: ssl.SSLObject | None = None
        if endpoint.tls:
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls = endpoint.tls.wrap_bio(self._incoming, self._outgoing, server_hostname=endpoint.host)
        self._answers = Answers()
        self._unsent = self._unencrypted = _NOTHING
        self._body_cut = self._half_closed = False
        self.exchange: Exchange | None = None
        self.up = self.gone = False
        self.began_s = self.heard_s = time.monotonic()
        self.connect_s = 0.0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        error = sock.connect_ex(endpoint.address)
        if error in _OURS:
            self.close()
            raise OSError(error, f"cannot open another connection ({errno.errorcode[error]})")
        self._refused = error if error != errno.EINPROGRESS else 0  # an unreachable network is told at once
        self._writer.start(self._on_connected)  # told of a refusal as well
        owner.pressing.add(self)

    def close(self) -> None:
        """Drop the connection. With bytes unread, the peer sees a reset, as from any client that hangs up."""
        if self.gone:
            return
        self.gone, self.exchange = True, None
        self._owner.pressing.discard(self)
        for watcher in (self._reader, self._writer):
            watcher.stop()
            watcher.close()
        self._socket.close()
        self._answers.close()
        self._owner.closed(self)

    def hang_up(self, broken: Outcome, at_s: float) -> None:
        """End the request here and now, by the plan, by the time limit or with the run."""
        self._finish(at_s, broken)

    def give_up(self) -> None:
        """The plan has this client hang up now."""
        assert self.exchange is not None
        self.exchange.reply.tags |= Tag.GAVE_UP
        self._finish(time.monotonic(), Outcome.CANCELLED_BY_US)

    def half_close(self) -> None:
        """The plan has this client say that it sends no more, now or when all is written, and wait for the answer.

        TLS knows no such thing that servers bear: there it hangs up.
        """
        if self._tls:
            self.give_up()
            return
        self._half_closed = True
        if self.up and not self._sending:
            with contextlib.suppress(OSError):  # the peer has gone: the reader will be told
                self._socket.shutdown(socket.SHUT_WR)

    @property
    def alive(self) -> bool:
        """False when the peer has closed this idle connection and the loop has not told us yet."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK)) and self._tls is not None
        except BlockingIOError:
            return True
        except OSError:
            return False

    # Sending -----------------------------------------------------------------------------------------------------

    def carry(self, exchange: Exchange) -> None:
        """Send a request, now or as soon as the connection stands; the caller has set `sent_s`."""
        self.exchange, exchange.carrier = exchange, self
        request = exchange.request
        in_turn, head = request.group is not None, exchange.wire.startswith(b"HEAD ")
        self._answers.expect(exchange.reply, request.stream, to_the_end=in_turn, head=head)
        if self.up:
            self._send(exchange.wire)

    def _send(self, wire: bytes) -> None:
        if self._tls:
            self._unencrypted = memoryview(wire)
        else:
            self._unsent = memoryview(wire)
        self._write()

    def _write(self) -> None:
        """Write what the socket takes, one slice a call; the loop calls again while something is unsent."""
        try:
            self._encrypt()
            sent = self._socket.send(self._unsent[:_WRITE_BYTES])
        except BlockingIOError:
            sent = 0
        except OSError:  # the peer takes no more: an early answer or a reset waits for the reader
            self._unsent = self._unencrypted = _NOTHING
            self._body_cut, sent = True, 0
        self._unsent = self._unsent[sent:]
        if self._sending is not self._writer.active:
            if self._sending:
                self._writer.start(self._write)
                self._owner.pressing.add(self)
            else:
                self._writer.stop()
                self._owner.pressing.discard(self)
                if self._half_closed:
                    self.half_close()

    def _encrypt(self) -> None:
        """The next slice of the request, and whatever TLS itself has to say, joins what is unsent."""
        if self._tls is None:
            return
        if self._unencrypted and not self._unsent:
            taken = self._tls.write(self._unencrypted[:_WRITE_BYTES])
            self._unencrypted = self._unencrypted[taken:]
        if self._outgoing.pending:
            self._unsent = memoryview(bytes(self._unsent) + self._outgoing.read())

    @property
    def _sending(self) -> bool:
        return bool(self._unsent or self._unencrypted)

    # Opening -----------------------------------------------------------------------------------------------------

    def _on_connected(self) -> None:
        self._owner.poll()
        if self.gone:
            return
        self._writer.stop()
        if self._refused or self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._lost()
            return
        self._reader.start(self._on_readable)
        if self._tls:
            self._shake_hands()
        else:
            self._stand()

    def _shake_hands(self) -> None:
        assert self._tls is not None
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._write()
        except ssl.SSLError:
            self._lost()
        else:
            self._write()
            self._stand()

    def _stand(self) -> None:
        self.up, self.heard_s = True, time.monotonic()
        self.connect_s = self.heard_s - self.began_s
        self._owner.pressing.discard(self)
        if self.exchange is None:
            self._owner.free(self)
        else:
            self.exchange.reply.connect_s = self.connect_s
            self._send(self.exchange.wire)
            if self._half_closed:
                self.half_close()

    # Reading -----------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        owner, now_s = self._owner, time.monotonic()
        if now_s >= owner.next_s:
            owner.poll()
            if self.gone:  # the schedule hung this one up
                return
            now_s = time.monotonic()
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._lost()
            return
        if not data:
            self._peer_closed()
            return
        self.heard_s = at_s = now_s
        if ancillary and self.exchange is not None:
            reply, (seconds, nanoseconds) = self.exchange.reply, _TIMESPEC.unpack(ancillary[0][2])
            at_s = seconds + nanoseconds * 1e-9 - owner.wall_ahead_s
            if not reply.sent_s <= at_s <= now_s:  # somebody has set the wall clock
                at_s = min(max(at_s, reply.sent_s), now_s)
            reply.receive_lag_s = max(reply.receive_lag_s, now_s - at_s)
        if self._tls:
            self._take_encrypted(at_s, data)
        elif self._answers.feed(at_s, data):
            self._over(at_s)

    def _take_encrypted(self, at_s: float, data: bytes) -> None:
        assert self._tls is not None
        self._incoming.write(data)
        if not self.up:
            self._shake_hands()
        parts, ended = [], False
        while self.up and not self.gone and not ended:
            try:
                parts.append(self._tls.read(_READ_BYTES))
                ended = not parts[-1]  # the peer's good-bye
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError:  # bytes that are no TLS
                ended = True
        plain = b"".join(parts)
        if plain and self._answers.feed(at_s, plain):
            self._over(at_s)
        if ended and not self.gone:
            self._peer_closed()

    # The end of a request ----------------------------------------------------------------------------------------

    def _over(self, at_s: float) -> None:
        """The user has the answer; or, between requests, the message that went on after its [DONE] has ended."""
        if self.exchange is not None:
            self._finish(at_s, self.exchange.reply.broken)
        else:
            self._settle()

    def _peer_closed(self) -> None:
        if self.exchange is None:
            self.close()
        elif not self.up:
            self._lost()
        else:
            self._end(self._answers.closed())

    def _lost(self) -> None:
        if self.exchange is None:
            self.close()
        else:
            self._end(Outcome.RESET if self.up else Outcome.REFUSED)

    def _end(self, broken: Outcome | None) -> None:
        """The peer ended it. A request that crossed the closing of an idle connection on its way is sent again."""
        exchange, now_s = self.exchange, time.monotonic()
        assert exchange is not None
        if broken is Outcome.RESET and self._crossed(exchange, now_s):
            self.close()
            self._owner.resend(exchange)
        else:
            self._finish(now_s, broken)

    def _crossed(self, exchange: Exchange, now_s: float) -> bool:
        """True when the peer must have closed before it could see the request.

        That is so when an idle connection breaks without a byte within a round trip of the sending. One that breaks
        later was closed by a server that had the request, and failed it; and so may one have been that was sent
        malformed bytes or their end.
        """
        request, reply = exchange.request, exchange.reply
        if self._half_closed or (request.raw and request.flaw):
            return False
        idle_s = reply.sent_s - self.heard_s  # negative once a byte of the answer has come
        round_trip_s = 2 * self.connect_s + 0.001
        return idle_s >= _KEPT_S and now_s - reply.sent_s <= round_trip_s and Tag.RESENT not in reply.tags

    def _finish(self, at_s: float, broken: Outcome | None) -> None:
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        exchange.carrier = None
        self._answers.catch_up()
        if exchange.reply.broken is Outcome.MALFORMED:
            broken = Outcome.MALFORMED
        exchange.reply.broken = broken
        exchange.reply.ended_s = NEVER if broken is Outcome.OPEN else at_s
        if broken is None:
            self._settle()
        else:
            self.close()
        self._owner.over(exchange)

    def _settle(self) -> None:
        """Between requests: free, or waiting for the end of a message whose stream is [DONE], or of no more use."""
        if not self._answers.whole:
            return
        if self._answers.keep_alive and not (self._body_cut or self._sending or self._half_closed):
            self._owner.free(self)
        else:
            self.close()
