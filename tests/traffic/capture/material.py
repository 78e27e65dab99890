"""A capture of 200 requests with the truth beside it: what each side of each connection said, made up from a seed.

Sizes, shapes and moments are those of LLM traffic: prompts of 0.5 to 60 kB, most answers streamed an event a segment,
keep-alive connections, and what goes wrong in production: broken JSON, missing keys, early answers, clients that give
up. Only standard Python: it shares no code, and so no error, with the importer that it is to try.
"""

import json
import random
import struct
import sys
import zlib
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

from tests.traffic.capture import links
from tests.traffic.capture.links import ACK, FIN, PSH, RST, SYN, Tcp

SECOND_NS = 1_000_000_000
START_NS = 1_790_000_000 * SECOND_NS
MSS = 1448
LATEST_ACK_NS = 40_000_000
EACH = 10  # requests of a connection
CONNECTIONS = 20

# The last request of the first connections ends them; all others close in peace after their tenth.
ENDINGS = (
    "reset",
    "gave_up",
    "too_large",
    "too_large_goes_on",
    "two_lengths",
    "bad_chunk",
    "short_body",
    "until_close",
)
RARE = (
    *("chunked",) * 4,
    *("expect", "bad_json", "zipped", "head") * 2,
    *("quoting", "no_key", "not_modified", "no_content", "early_hints"),
    *("health",) * 3,
)
TRIPLES = 2  # pipelined


@dataclass(frozen=True, slots=True)
class Message:
    """`start` and `end` are its place in its side's stream; `pieces` the moment and bytes of each piece of the body."""

    raw: bytes
    body: bytes
    start: int
    end: int
    first_ns: int
    last_ns: int
    pieces: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Truth:
    """One request and its answer as they were said. `whole` is False for an answer that the client did not wait for."""

    name: str
    connection: int
    turn: int
    kind: str
    method: str
    target: str
    request: Message
    status: int
    answer: Message
    interim: tuple[int, ...] = ()
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Material:
    packets: list[Tcp]
    truths: list[Truth]


@dataclass(slots=True)
class Talk:
    """One connection as it is spoken: the clock, both sides' next sequence numbers, and what was sent so far."""

    number: int
    now_ns: int
    rng: random.Random
    packets: list[Tcp] = field(default_factory=list)
    next: dict[bool, int] = field(default_factory=dict)  # by whether it is the client's
    speaker: bool = True  # who sent last; `unheard`: so many segments, which the other side has not acknowledged
    unheard: int = 0

    def put(self, from_client: bool, flags: int, payload: bytes = b"") -> None:
        client = (1 + self.number % 250, 10_000 + self.number % 50_000)
        seq, ack = self.next[from_client], self.next[not from_client] if flags & ACK else 0
        self.packets.append(Tcp(self.now_ns, self.number, from_client, client, seq, ack, flags, payload))
        self.next[from_client] += len(payload) + bool(flags & (SYN | FIN))
        self.unheard = self.unheard + 1 if payload and self.speaker is from_client else bool(payload)
        self.speaker = from_client

    def wait(self, low_ms: float, high_ms: float) -> None:
        """Time goes by, in whole microseconds, which every format holds; a late acknowledgement may fall due."""
        left_ns = round(1000 * self.rng.uniform(low_ms, high_ms)) * 1000
        if self.unheard and left_ns > LATEST_ACK_NS:
            self.now_ns, left_ns = self.now_ns + LATEST_ACK_NS, left_ns - LATEST_ACK_NS
            self.put(not self.speaker, ACK)
        self.now_ns += left_ns

    def open(self) -> None:
        self.next = {True: self.rng.getrandbits(31), False: self.rng.getrandbits(31)}
        self.put(True, SYN)
        self.wait(0.1, 0.2)
        self.put(False, SYN | ACK)
        self.wait(0.1, 0.2)
        self.put(True, ACK)

    def say(self, from_client: bool, data: bytes) -> tuple[int, int, int, int]:
        """Send in segments, every second one acknowledged. Returns start and end, first and last moment."""
        start = self.next[from_client]
        self.wait(0.02, 0.06)
        first_ns = last_ns = self.now_ns
        for at in range(0, len(data), MSS):
            last_ns = self.now_ns
            self.put(from_client, ACK | PSH if at + MSS >= len(data) else ACK, data[at : at + MSS])
            self.wait(0.004, 0.012)
            if self.unheard == 2:
                self.put(not from_client, ACK)
                self.wait(0.004, 0.012)
        return start, self.next[from_client], first_ns, last_ns

    def message(
        self, from_client: bool, pieces: list[tuple[bytes, bytes]], waits_ms: tuple[float, float] = (0, 0)
    ) -> Message:
        """Say a message in pieces of (bytes as sent, what of the body is in them), each a write of its own."""
        spans, moments = [], []
        for sent, body in pieces:
            if spans:
                self.wait(*waits_ms)
            spans.append(self.say(from_client, sent))
            if body:
                moments.append((spans[-1][3], body))
        raw, body = (b"".join(column) for column in zip(*pieces, strict=True))
        return Message(raw, body, spans[0][0], spans[-1][1], spans[0][2], spans[-1][3], tuple(moments))

    def close(self, from_client: bool, answered: bool = True) -> None:
        """One side closes, and the other too (`answered`), unless it had closed before."""
        self.wait(0.1, 0.3)
        self.put(from_client, FIN | ACK)
        self.wait(0.1, 0.3)
        self.put(not from_client, FIN | ACK if answered else ACK)
        if answered:
            self.wait(0.1, 0.3)
            self.put(from_client, ACK)

    def half_close(self) -> None:
        self.wait(0.1, 0.3)
        self.put(True, FIN | ACK)
        self.wait(0.02, 0.05)
        self.put(False, ACK)

    def reset(self) -> None:
        self.wait(0.02, 0.05)
        self.put(True, RST | ACK)


def base(seed: int = 1, first: int = 0, at_ns: int = START_NS) -> Material:
    """200 requests over 20 connections, numbered from `first`; the same for the same arguments."""
    rng = random.Random(seed)
    talks, truths = [], []
    for number, script in enumerate(_scripts(rng), start=first):
        talk = Talk(number, at_ns + rng.randrange(2_000_000) * 1000, rng)
        talk.open()
        speaker = Speaker(talk, f"{seed}-{number}")
        for kind in script:
            talk.wait(20, 400)
            getattr(speaker, kind)()
        if script[-1] not in ENDINGS:
            talk.wait(20, 400)
            talk.close(from_client=True)
        talks.append(talk)
        truths += speaker.truths
    packets = sorted((packet for talk in talks for packet in talk.packets), key=lambda packet: packet.at_ns)
    return Material(packets, truths)


def _scripts(rng: random.Random) -> list[list[str]]:
    """What happens on each connection, by turns. A pipelined triple counts as three."""
    common = CONNECTIONS * EACH - len(ENDINGS) - len(RARE) - 3 * TRIPLES
    rest = [*RARE, *(("streamed",) * (common * 17 // 20)), *(("plain",) * (common - common * 17 // 20))]
    rng.shuffle(rest)
    scripts = []
    for number in range(CONNECTIONS):
        ending = ENDINGS[number : number + 1]
        triple = ["pipelined"] if len(ENDINGS) <= number < len(ENDINGS) + TRIPLES else []
        script = [rest.pop() for _ in range(EACH - len(ending) - 3 * len(triple))]
        script[4:4] = triple
        scripts.append([*script, *ending])
    return scripts


class Speaker:
    """Says each kind of exchange on one connection, and keeps the truth of it. A method is named for its kind."""

    def __init__(self, talk: Talk, name: str) -> None:
        self.talk, self.rng, self.name = talk, talk.rng, name
        self.truths: list[Truth] = []
        self._ids = count()

    def streamed(self) -> None:
        request = self._post(_prompt(self.rng, stream=True))
        self.talk.wait(20, 200)
        self._note("streamed", request, 200, self._stream(self.rng.randint(4, 48)))

    def plain(self) -> None:
        request = self._post(_prompt(self.rng))
        self.talk.wait(50, 400)
        self._note("plain", request, 200, self._answer(200, _completion(self.rng)))

    def zipped(self) -> None:
        request = self._post(_prompt(self.rng))
        self.talk.wait(50, 400)
        answer = self._answer(200, _stored(_completion(self.rng)), b"content-encoding: gzip\r\n")
        self._note("zipped", request, 200, answer)

    def chunked(self) -> None:
        """A body in chunks of odd sizes, one of them with an extension, and a trailer after the last."""
        body = _prompt(self.rng)
        cuts = [*range(0, len(body), 977), len(body)]
        parts = [body[a:b] for a, b in pairwise(cuts)]
        pieces = [(b"%x;part=%d\r\n%b\r\n" % (len(part), at, part), part) for at, part in enumerate(parts)]
        head = self._head(b"POST", b"/v1/chat/completions", b"Transfer-Encoding: chunked\r\n")
        request = self.talk.message(True, [(head, b""), *pieces, (b"0\r\nx-sum: 1\r\n\r\n", b"")])
        self.talk.wait(20, 200)
        self._note("chunked", request, 200, self._stream(self.rng.randint(4, 12)))

    def expect(self) -> None:
        body = _prompt(self.rng)
        head = self._head(
            b"POST", b"/v1/chat/completions", b"Expect: 100-continue\r\ncontent-length: %d\r\n" % len(body)
        )
        asked = self.talk.message(True, [(head, b"")])
        self.talk.wait(1, 2)
        self.talk.say(False, b"HTTP/1.1 100 Continue\r\n\r\n")
        sent = self.talk.message(True, [(body, body)])
        request = Message(head + body, body, asked.start, sent.end, asked.first_ns, sent.last_ns, sent.pieces)
        self.talk.wait(50, 400)
        self._note("expect", request, 200, self._answer(200, _completion(self.rng)), interim=(100,))

    def early_hints(self) -> None:
        request = self._post(_prompt(self.rng))
        self.talk.wait(1, 2)
        self.talk.say(False, b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
        self.talk.wait(50, 400)
        self._note("early_hints", request, 200, self._answer(200, _completion(self.rng)), interim=(103,))

    def bad_json(self) -> None:
        self._refused("bad_json", _prompt(self.rng)[:-2] + b',,"x', 400)

    def quoting(self) -> None:
        """A body that holds what looks like the next request, at the start of a line."""
        self._refused("quoting", b"{\n" + self._head(b"POST", b"/v1/chat/completions", b"") + _prompt(self.rng), 400)

    def no_key(self) -> None:
        body = _prompt(self.rng)
        head = self._head(b"POST", b"/v1/chat/completions", b"content-length: %d\r\n" % len(body), key=False)
        request = self.talk.message(True, [(head + body, body)])
        self.talk.wait(1, 5)
        self._note("no_key", request, 401, self._answer(401, _error("no key")))

    def head(self) -> None:
        request = self._bare(b"HEAD", b"/v1/models")
        self.talk.wait(1, 5)
        answer = self.talk.message(False, [(b"HTTP/1.1 200 OK\r\ncontent-length: 4211\r\n\r\n", b"")])
        self._note("head", request, 200, answer, method="HEAD", target="/v1/models")

    def health(self) -> None:
        request = self._bare(b"GET", b"/health")
        self.talk.wait(1, 5)
        self._note("health", request, 200, self._answer(200, b""), method="GET", target="/health")

    def not_modified(self) -> None:
        """Its length is that of the body which it does not bring."""
        request = self._bare(b"GET", b"/v1/models")
        self.talk.wait(1, 5)
        answer = self.talk.message(False, [(b"HTTP/1.1 304 Not Modified\r\ncontent-length: 4211\r\n\r\n", b"")])
        self._note("not_modified", request, 304, answer, method="GET", target="/v1/models")

    def no_content(self) -> None:
        request = self._bare(b"OPTIONS", b"*")
        self.talk.wait(1, 5)
        answer = self.talk.message(False, [(b"HTTP/1.1 204 No Content\r\nallow: POST\r\n\r\n", b"")])
        self._note("no_content", request, 204, answer, method="OPTIONS", target="*")

    def pipelined(self) -> None:
        """Three requests in one write, cut into segments wherever it falls; the answers come in their order."""
        wholes = []
        for _ in range(3):
            body = _prompt(self.rng)[:700]
            head = self._head(b"POST", b"/v1/embeddings", b"content-length: %d\r\n" % len(body))
            wholes.append((head + body, body))
        start, *_ = self.talk.say(True, b"".join(raw for raw, _ in wholes))
        requests = []
        for raw, body in wholes:
            requests.append(self._seen(raw, body, start))
            start += len(raw)
        for request in requests:
            self.talk.wait(1, 20)
            self._note("pipelined", request, 400, self._answer(400, _error("bad JSON")), target="/v1/embeddings")

    def reset(self) -> None:
        """The client breaks off in the midst of a stream."""
        request = self._post(_prompt(self.rng, stream=True))
        self.talk.wait(20, 200)
        answer = self._stream(6, whole=False)
        self.talk.reset()
        self._note("reset", request, 200, answer, whole=False)

    def gave_up(self) -> None:
        """The client closes in the midst of a stream, and answers what still comes with a reset."""
        request = self._post(_prompt(self.rng, stream=True))
        self.talk.wait(20, 200)
        answer = self._stream(6, whole=False)
        self.talk.half_close()
        event = _event(self.rng)
        self.talk.wait(5, 20)
        self.talk.put(False, ACK | PSH, _chunk(event))
        late_ns, end = self.talk.now_ns, self.talk.next[False]
        self.talk.reset()
        pieces, raw, body = (*answer.pieces, (late_ns, event)), answer.raw + _chunk(event), answer.body + event
        said = Message(raw, body, answer.start, end, answer.first_ns, late_ns, pieces)
        self._note("gave_up", request, 200, said, whole=False)

    def too_large(self) -> None:
        """The answer comes before the body has ended, and the client stops at once."""
        self._early_answer("too_large", late=b"")

    def too_large_goes_on(self) -> None:
        """The client has sent more of the body by the time it hears that nobody wants it."""
        self._early_answer("too_large_goes_on", late=_text(self.rng, 9_000))

    def two_lengths(self) -> None:
        self._broken("two_lengths", b"content-length: 30\r\ncontent-length: 10\r\n", _text(self.rng, 30))

    def bad_chunk(self) -> None:
        self._broken("bad_chunk", b"transfer-encoding: chunked\r\n", b"5\r\nabcde\r\nzz\r\n" + _text(self.rng, 40))

    def short_body(self) -> None:
        """The client sends less than it said, and closes its side."""
        body = _text(self.rng, 200)
        head = self._head(b"POST", b"/v1/chat/completions", b"content-length: 500\r\n")
        request = self.talk.message(True, [(head + body, body)])
        self.talk.half_close()
        self._last("short_body", request, 400, closed=True)

    def until_close(self) -> None:
        """A stream without framing: the server's close ends it."""
        request = self._post(_prompt(self.rng, stream=True))
        self.talk.wait(20, 200)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        events = [_event(self.rng) for _ in range(8)]
        answer = self.talk.message(False, [(head, b""), *((event, event) for event in events)], (5, 20))
        self.talk.close(from_client=False)
        self._note("until_close", request, 200, answer)

    def _note(
        self,
        kind: str,
        request: Message,
        status: int,
        answer: Message,
        *,
        method: str = "POST",
        target: str = "/v1/chat/completions",
        interim: tuple[int, ...] = (),
        whole: bool = True,
    ) -> None:
        turn = len(self.truths)
        name = f"{kind} {self.name}-{turn}"
        truth = Truth(name, self.talk.number, turn, kind, method, target, request, status, answer, interim, whole)
        self.truths.append(truth)

    def _head(self, method: bytes, target: bytes, fields: bytes, key: bool = True) -> bytes:
        name = f"{self.name}-{next(self._ids)}"
        secret = f"Authorization: Bearer sk-material-{name}-0123456789abcdef\r\n" if key else ""
        first = b"%b %b HTTP/1.1\r\nHost: llm.example\r\n" % (method, target)
        return first + f"X-Request-Id: {name}\r\n{secret}".encode() + fields + b"Content-Type: application/json\r\n\r\n"

    def _post(self, body: bytes) -> Message:
        head = self._head(b"POST", b"/v1/chat/completions", b"content-length: %d\r\n" % len(body))
        if self.rng.random() < 0.3:  # some clients write head and body apart
            return self.talk.message(True, [(head, b""), (body, body)])
        return self.talk.message(True, [(head + body, body)])

    def _bare(self, method: bytes, target: bytes) -> Message:
        return self.talk.message(True, [(self._head(method, target, b""), b"")])

    def _seen(self, raw: bytes, body: bytes, start: int) -> Message:
        """A part of what was just said, by the segments that carried its first and its last byte."""
        end = start + len(raw)
        carrying = [p for p in self.talk.packets if p.from_client and p.payload and p.seq < end and p.end > start]
        return Message(raw, body, start, end, carrying[0].at_ns, carrying[-1].at_ns)

    def _answer(self, status: int, body: bytes, fields: bytes = b"") -> Message:
        head = b"HTTP/1.1 %d Said\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n" % (
            status,
            fields,
            len(body),
        )
        return self.talk.message(False, [(head + body, body)])

    def _stream(self, events: int, whole: bool = True) -> Message:
        """One write for the head, one for each event, one for the end."""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        bodies = [_event(self.rng) for _ in range(events)]
        if whole:
            bodies += [_usage(events), b"data: [DONE]\n\n"]
        pieces = [(head, b""), *((_chunk(body), body) for body in bodies)]
        if whole:
            pieces.append((b"0\r\n\r\n", b""))
        return self.talk.message(False, pieces, (5, 20))

    def _refused(self, kind: str, body: bytes, status: int) -> None:
        request = self._post(body)
        self.talk.wait(1, 5)
        self._note(kind, request, status, self._answer(status, _error("bad JSON")))

    def _early_answer(self, kind: str, late: bytes) -> None:
        head = self._head(b"POST", b"/v1/chat/completions", b"content-length: 3000000\r\n")
        body = _text(self.rng, 30_000)
        begun = self.talk.message(True, [(head, b""), (body, body)])
        answer = self._answer(413, _error("too large"), b"connection: close\r\n")
        ended = self.talk.message(True, [(late, late)]) if late else begun
        request = Message(head + body + late, body + late, begun.start, ended.end, begun.first_ns, ended.last_ns)
        self.talk.close(from_client=False)
        self._note(kind, request, 413, answer)

    def _broken(self, kind: str, fields: bytes, rest: bytes) -> None:
        raw = self._head(b"POST", b"/v1/chat/completions", fields) + rest
        request = self.talk.message(True, [(raw, rest)])
        self._last(kind, request, 400)

    def _last(self, kind: str, request: Message, status: int, closed: bool = False) -> None:
        self.talk.wait(1, 5)
        answer = self._answer(status, _error(kind), b"connection: close\r\n")
        self.talk.close(from_client=False, answered=not closed)
        self._note(kind, request, status, answer)


_WORDS = tuple(
    "the cache holds a block for every token that was seen and a request waits until enough of them are free".split()  # noqa: SIM905
)
_BANK = [
    " ".join(random.Random(number).choices(_WORDS, k=14)) + f", case {number} of 400 \u2192 caf\u00e9."
    for number in range(400)
]


def _text(rng: random.Random, length: int) -> bytes:
    return " ".join(rng.choices(_BANK, k=1 + length // 70)).encode()[:length]


def _prompt(rng: random.Random, stream: bool = False) -> bytes:
    """The body of a chat request: 0.5 to 60 kB, log-normal, a few kB as a rule."""
    length = min(60_000, max(500, int(rng.lognormvariate(7.9, 1.1))))
    said = " ".join(rng.choices(_BANK, k=1 + length // 85))
    messages = [{"role": "system", "content": _BANK[0]}, {"role": "user", "content": said}]
    value = {"model": "small", "messages": messages, "max_tokens": rng.randint(4, 48), "user": f"u{rng.randrange(9)}"}
    return json.dumps(value | ({"stream": True} if stream else {}), ensure_ascii=rng.random() < 0.5).encode()


def _completion(rng: random.Random) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": rng.choice(_BANK)}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 900, "completion_tokens": 24, "total_tokens": 924}
    return json.dumps({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def _stored(data: bytes) -> bytes:
    """gzip without compression, so that no version of a compressor makes other bytes of it."""
    block = struct.pack("<BHH", 1, len(data), len(data) ^ 0xFFFF) + data
    return bytes.fromhex("1f8b08000000000000ff") + block + struct.pack("<II", zlib.crc32(data), len(data))


def _event(rng: random.Random) -> bytes:
    delta = f" {rng.choice(_WORDS)}"
    return (
        b'data: {"id":"chatcmpl-6f1d","object":"chat.completion.chunk","created":1790000000,"model":"small",'
        b'"choices":[{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":null}]}\n\n' % delta.encode()
    )


def _usage(events: int) -> bytes:
    return (
        b'data: {"id":"chatcmpl-6f1d","object":"chat.completion.chunk","created":1790000000,"model":"small","choices":'
        b'[{"index":0,"delta":{},"finish_reason":"length"}],"usage":{"prompt_tokens":900,"completion_tokens":%d}}\n\n'
        % events
    )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode()


def write_pcap(path: Path, size_mb: float) -> int:
    """A capture of at least so many MB on Ethernet, written as it is made; returns how many requests are in it."""
    seed, requests, at_ns = 0, 0, START_NS
    with open(path, "wb") as file:
        file.write(links.pcap_header(links.ETHERNET))
        while file.tell() < size_mb * 1e6:
            made = base(seed + 1, first=CONNECTIONS * seed, at_ns=at_ns)
            captured = links.frames(made.packets, links.ethernet)
            file.write(b"".join(links.pcap_record(frame) for frame in captured))
            seed, requests, at_ns = seed + 1, requests + len(made.truths), made.packets[-1].at_ns + SECOND_NS
    return requests


if __name__ == "__main__":
    captured = links.frames(base().packets, links.ethernet)
    Path(sys.argv[1]).write_bytes(links.squeezed(links.pcap(captured, links.ETHERNET)))
