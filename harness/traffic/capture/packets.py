"""Packets -> TCP segments. A fast path slices the common shapes; whatever it does not know goes through scapy once."""

from typing import NamedTuple

FIN, SYN, RST, ACK = 1, 2, 4, 16


class Flow(NamedTuple):
    """One direction of a conversation. `net` tells apart equal addresses on different VLANs or tunnels; 0 is none."""

    source: bytes
    source_port: int
    target: bytes
    target_port: int
    net: int = 0

    @property
    def back(self) -> "Flow":
        return Flow(self.target, self.target_port, self.source, self.source_port, self.net)


class Segment(NamedTuple):
    """One TCP segment. `cut` is how many bytes of its payload the capture's snap length took away."""

    at_ns: int
    flow: Flow
    seq: int
    ack: int
    flags: int
    payload: bytes
    cut: int = 0
