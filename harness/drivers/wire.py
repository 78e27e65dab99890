"""Where an answer ends: HTTP/1.1 framing, watched while the bytes come in. No sockets, no clock.

Only what tells the end is looked at here: the head, the chunk framing, and a stream's `data: [DONE]`, which ends a
request whether or not the server goes on to close the message. Bodies are kept as they came, for `stream` to read;
chunks that are plainly in the middle of a stream are parsed several at once, which is cheaper, and never so many that
the schedule would wait for it.
HTTP/2 and proxies are refused by never being asked for.
"""

import httptools

from harness.drivers.stream import Reply
from harness.model import Outcome

_DONE = b"data: [DONE]", b"data:[DONE]"
_CHUNK_END = b"\n\n\r\n"  # of a chunk that ends with a whole event; a message ends in two CRLFs
_AT_ONCE = 8  # chunks: some 25 us
_OVERLAP = max(map(len, _DONE))  # enough of the last piece to see a [DONE] that was cut in two, and its line's start
_CRLF = b"\r\n"
_SIZES = {b"%x" % size: size for size in range(1, 4096)}  # of chunks that hold one event


class Answers:
    """Reads the answers of one connection, one after another; a fresh `Reply` is given for each by `expect`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._reply = Reply()
        self._at_s = 0.0
        self._stream = self._until_done = self._head = False
        self._interim = self._head_seen = self._has_length = False
        self._in_chunks = False  # of a stream: nothing but a chunk of no bytes ends it
        self._between = False  # two chunks: the parser waits for the size of the next
        self._tail = b"\n"
        self._unread: list[tuple[float, bytes]] = []
        self.whole = True  # the message has ended as HTTP says: the connection can take another
        self.over = True  # the user has the answer: whole, or the stream said [DONE]
        self.keep_alive = True

    def expect(self, reply: Reply, stream: bool, *, to_the_end: bool = False, head: bool = False) -> None:
        """The next bytes answer a new request: one that waits `to_the_end` of the message, past its [DONE], when the
        connection is wanted by another; one of HEAD, whose answer has no body whatever its length says."""
        self._reply, self._stream, self._tail = reply, stream, b"\n"
        self._until_done, self._head = stream and not to_the_end, head
        self.whole = self.over = self._head_seen = self._has_length = self._in_chunks = self._between = False

    def feed(self, at_s: float, data: bytes) -> bool:
        """Take bytes that arrived at `at_s`; True when the answer is over. Malformed bytes end it too."""
        if self._in_chunks and data.endswith(_CHUNK_END) and data.find(b"[DONE]") < 0:
            self._unread.append((at_s, data))
            if len(self._unread) == _AT_ONCE:
                self.catch_up()
            return self.over
        self.catch_up()
        self._parse(at_s, data)
        return self.over

    def catch_up(self) -> None:
        """Read what was put off; the reply is complete, as far as it came, only after this.

        One whole chunk between two others leaves the parser as it was, so it need not see it: half of what a token
        costs.
        """
        for at_s, data in self._unread:
            if self._between and (body := _whole_chunk(data)):
                if not self.over:
                    self._reply.pieces.append((at_s, body))
                    self._tail = b"\n"
            else:
                self._parse(at_s, data)
        self._unread.clear()

    def _parse(self, at_s: float, data: bytes) -> None:
        self._at_s = at_s
        self._between = False
        try:
            self._parser.feed_data(data)
            self._between = self._between and data.endswith(_CRLF)  # not so when the next size has begun
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.over:
                self._reply.broken = Outcome.MALFORMED
            self.over, self.whole, self.keep_alive = True, True, False

    def closed(self) -> Outcome | None:
        """How an answer stands when the peer closes in good order: None if that is its proper end."""
        if not self._head_seen:
            return Outcome.RESET
        return Outcome.TRUNCATED if self._has_length else None

    def close(self) -> None:
        """Let go of the parser, which holds us as we hold it: nobody collects such a pair while traffic flows."""
        del self._parser

    # Called by the parser -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.whole:  # nothing was asked: the connection cannot be trusted
            self.keep_alive = False
        elif self._reply.first_byte_s != self._reply.first_byte_s:
            self._reply.first_byte_s = self._at_s

    def on_header(self, name: bytes, value: bytes) -> None:
        if (name := name.lower()) in (b"content-length", b"transfer-encoding"):
            self._has_length = True
            self._in_chunks = self._stream and name == b"transfer-encoding" and value.lower() == b"chunked"
        elif name == b"content-encoding":
            self._reply.coding = value.decode(errors="replace")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200  # 100 Continue, 103 Early Hints: the answer is still to come
        if not self._interim:
            self._head_seen, self._reply.status = True, status
            if self._head:
                self._end_at_the_head()

    def on_body(self, body: bytes) -> None:
        if self.over:
            return
        self._reply.pieces.append((self._at_s, body))
        if self._until_done:
            seen = self._tail + body
            if seen.find(b"[DONE]") >= 0 and any(b"\n" + done in seen or b"\r" + done in seen for done in _DONE):
                self._reply.broken, self.over = None, True
            self._tail = seen[-_OVERLAP - 1 :]

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = self._in_chunks

    def on_message_complete(self) -> None:
        self._between = False
        if self._interim or self.whole:
            return
        if not self.over:
            self._reply.broken = None
        self.over = self.whole = True
        self.keep_alive = self._parser.should_keep_alive()

    def _end_at_the_head(self) -> None:
        """The parser cannot be told that no body comes: another reads what follows."""
        self._reply.broken, self.over, self.whole = None, True, True
        self.keep_alive = self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)


def _whole_chunk(data: bytes) -> bytes:
    """What is in bytes that are one small chunk, with its size and its line ends; empty when they are not that."""
    line_end = data.find(_CRLF, 0, 5)
    size = _SIZES.get(data[:line_end], 0)
    return data[line_end + 2 : -2] if len(data) == line_end + size + 4 and size else b""
