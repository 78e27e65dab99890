"""Capture files -> packets: pcap (micro- and nanoseconds, both byte orders), pcapng, gzip, standard input, several in turn."""

from typing import NamedTuple


class Packet(NamedTuple):
    """One record of a capture file: when it was taken, its link type (LINKTYPE number), its bytes, its length on the wire."""

    at_ns: int
    link: int
    data: bytes
    length: int
