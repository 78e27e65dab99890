"""The peers that are libraries, each reading a capture as its documents say. Runs in a peer's own environment.

    python packet_readers.py NAME FILE

Prints what it found: requests where the library knows HTTP, else bytes of TCP payload.
"""

import logging
import sys
from collections.abc import Callable


def dpkt_dissect(path: str) -> int:
    """Every packet taken apart down to TCP; no reassembly, no HTTP."""
    import dpkt

    payload = 0
    with open(path, "rb") as file:
        for _, data in dpkt.pcap.Reader(file):
            tcp = dpkt.ethernet.Ethernet(data).data.data
            payload += len(tcp.data)
    return payload


def scapy_dissect(path: str) -> int:
    """Every packet taken apart down to TCP; no reassembly, no HTTP."""
    from scapy.layers.inet import TCP
    from scapy.utils import PcapReader

    with PcapReader(path) as packets:
        return sum(len(packet[TCP].payload) for packet in packets if TCP in packet)


def scapy_session(path: str) -> int:
    """Streams put together and taken apart as HTTP."""
    logging.getLogger("scapy").setLevel(logging.ERROR)
    from scapy.layers.http import HTTPRequest
    from scapy.sendrecv import sniff
    from scapy.sessions import TCPSession

    found = []
    sniff(offline=path, session=TCPSession, store=False, prn=lambda packet: found.append(HTTPRequest in packet))
    return sum(found)


READERS: dict[str, Callable[[str], int]] = {
    "dpkt-dissect": dpkt_dissect,
    "scapy-dissect": scapy_dissect,
    "scapy-session": scapy_session,
}

if __name__ == "__main__":
    print(READERS[sys.argv[1]](sys.argv[2]))
