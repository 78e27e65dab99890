"""What both sides said -> HTTP/1.1 exchanges: raw bytes as sent, and what they mean beside them. Pure.

Nothing is repaired: a request whose framing is broken is kept up to where the next thing is known, and tagged.
"""

from dataclasses import dataclass, field

from harness.traffic.capture.packets import Flow


@dataclass(slots=True)
class Said:
    """One message: its raw bytes, when its first and last byte were seen, and why it is not whole ("" when it is).

    `pieces` are the moments and bytes of the body, chunk framing taken off and content coding left on.
    `flaw` names what is wrong with a request's framing or head, as sent.
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
    the SYN, if it was seen. `pipelined`: sent before the answer to the request before it was over. `half_closed_ns` is
    the client's FIN while the answer was still to come, `gave_up_ns` its RST, or its close before the answer ended.
    `upgraded` names another protocol that the connection went on with.
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
