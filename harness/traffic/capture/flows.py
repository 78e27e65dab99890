"""TCP segments -> what each side of each connection said, in order and once. Pure: no files, no clock."""

from enum import IntEnum
from typing import NamedTuple

from harness.traffic.capture.packets import Flow


class Kind(IntEnum):
    OPENED = 0  # a SYN of the client was seen; without one a connection begins with its first DATA or GAP
    DATA = 1
    GAP = 2  # bytes that the capture has not: the stream goes on after them
    FIN = 3  # this side sends no more
    RESET = 4  # this side broke the connection off
    OVER = 5  # nothing more of this connection comes: closed, replaced by a new one, idle, or the capture ended


class Step(NamedTuple):
    """One step of a connection. `flow` is the direction it happened in; `connection` counts connections from 0.

    `data` are the new bytes of a DATA step, stamped with the packet that brought them.
    """

    at_ns: int
    connection: int
    flow: Flow
    kind: Kind
    data: bytes = b""
