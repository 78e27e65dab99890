"""What an importer saw and what became of it: counters that add up, so that nothing is lost in silence.

Each stage of the pipeline counts into the same account as it goes, so its numbers are true at any moment. It judges
nothing: whether too much was lost is the verdict's business.
"""

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Account:
    """Counters, zero until something is seen. `as_dict` gives the ones that counted, a plain JSON object.

    Every packet is one of `segments`, `not_tcp`, `other_ports`, `fragments_held` and `unreadable`. Every connection
    is one of `http`, `not_http`, `tls`, `http2` and `empty`. Every request seen is `complete` or under one reason of
    `incomplete`.
    """

    # records: what the files hold
    files: int = 0
    packets: int = 0
    bytes: int = 0  # of packets, as captured
    cut_packets: int = 0  # the snap length took their end
    truncated_files: int = 0  # ended inside a record: everything before it was read
    damaged_files: int = 0  # a record made no sense: everything before it was read
    damage: list[str] = field(default_factory=list)  # in words, one for each file above
    dropped: int = 0  # by the one who captured, as the file itself says

    # packets: what carries TCP
    not_tcp: int = 0
    other_ports: int = 0
    unreadable: int = 0  # too short, or no header where one must be
    slow_path: int = 0  # dissected by scapy: tunnels, options, extension headers
    fragments: int = 0
    fragments_held: int = 0  # pieces of datagrams that another piece completed, or that nothing did
    fragments_lost: int = 0  # of those: their datagram never became whole

    # flows: what each side said
    connections: int = 0
    mid_stream: int = 0  # connections that were open before the capture began
    duplicates: int = 0
    conflicting: int = 0  # sent again with other bytes: the first copy counts
    probes: int = 0  # keep-alive probes
    far: int = 0  # too far ahead of the stream to belong to it
    reordered: int = 0
    gaps: int = 0
    gap_bytes: int = 0
    resets: int = 0
    idle: int = 0  # connections given up as idle, in capture time
    crowded: int = 0  # connections given up because there were too many at once

    # messages: what it meant
    http: int = 0
    not_http: int = 0
    tls: int = 0
    http2: int = 0
    empty: int = 0  # connections that carried no byte
    upgraded: int = 0  # HTTP connections that went on with another protocol
    requests_seen: int = 0
    complete: int = 0
    incomplete: Counter[str] = field(default_factory=Counter)  # by reason
    malformed: Counter[str] = field(default_factory=Counter)  # by flaw, as sent: these are kept
    answers_seen: int = 0
    answers_unpaired: int = 0
    answers_lost: Counter[str] = field(default_factory=Counter)  # not whole, or not known, by reason
    unanswered: int = 0
    aborted: int = 0  # the client gave up before the answer ended
    skipped_bytes: int = 0  # that belong to no message
    unread_answers: int = 0  # coded in a way that could not be undone
    ports: Counter[int] = field(default_factory=Counter)  # connections with HTTP by the server's port

    @property
    def segments(self) -> int:
        """TCP segments: the packets that became nothing else."""
        return self.packets - self.not_tcp - self.other_ports - self.fragments_held - self.unreadable

    def as_dict(self) -> dict[str, object]:
        """The counters that counted something, as values that JSON knows."""
        held = [("segments", self.segments), *((each.name, getattr(self, each.name)) for each in fields(self))]
        return {name: _plain(value) for name, value in held if value}


def _plain(value: object) -> object:
    return {str(key): count for key, count in sorted(value.items())} if isinstance(value, Counter) else value
