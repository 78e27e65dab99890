"""Which of the captured requests a recording keeps: one frozen value, asked for each.

A filter never hides a loss: what it leaves out is counted, and what was lost is held against what it would have kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from harness import units
from harness.model import UsageError, expects
from harness.traffic.recording import Recorded

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class Filters:
    """Each that is empty lets everything through. `paths` are globs (`/v1/*`), `statuses` exact (`422`), a family
    (`2xx`) or `none` (no answer was seen); `size_bytes` is of the whole request; times count from the capture's first
    packet, `from_s` <= at < `until_s`. `sample` keeps that share of the connections, the same ones each time.
    """

    methods: frozenset[str] = frozenset()
    paths: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    size_bytes: tuple[int, int] | None = None
    clients: tuple[Network, ...] = ()
    from_s: float | None = None
    until_s: float | None = None
    sample: float = 1.0

    def keeps(self, one: Recorded) -> bool:
        """Whether a request, not yet scrubbed, goes into the recording."""
        return (
            (not self.methods or one.method in self.methods)
            and (not self.paths or any(fnmatchcase(one.path, glob) for glob in self.paths))
            and (not self.statuses or self._keeps_status(one.answer.status))
            and (not self.size_bytes or self.size_bytes[0] <= len(one.raw) <= self.size_bytes[1])
            and (not self.clients or _is_among(one.client, self.clients))
            and (self.from_s is None or self.from_s <= one.at_s)
            and (self.until_s is None or one.at_s < self.until_s)
            and (self.sample >= 1 or _share(one) < self.sample)
        )

    def _keeps_status(self, status: int) -> bool:
        return expects(self.statuses, status) if status else "none" in self.statuses


def _is_among(client: str, networks: tuple[Network, ...]) -> bool:
    try:
        address = ip_address(client)
    except ValueError:
        return False
    return any(address in network for network in networks)


def _share(one: Recorded) -> float:
    """Where between 0 and 1 a connection stands: always the same place for the same connection."""
    digest = blake2b(b"%d" % one.connection, digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def read(
    methods: Sequence[str] | None = None,
    paths: Sequence[str] | None = None,
    statuses: Sequence[str] | None = None,
    size: str | None = None,
    clients: Sequence[str] | None = None,
    from_: str | None = None,
    until: str | None = None,
    sample: str | None = None,
) -> Filters:
    """The filters as a user writes them: `2xx`, `1kB..10MB`, `10.0.0.0/8`, `30s`, `10%`. Raises UsageError."""
    try:
        return Filters(
            frozenset(method.upper() for method in methods or ()),
            tuple(paths or ()),
            tuple(map(_status, statuses or ())),
            _sizes(size) if size else None,
            tuple(map(_network, clients or ())),
            units.duration(from_) if from_ else None,
            units.duration(until) if until else None,
            units.share(sample) if sample else 1.0,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def _status(text: str) -> str:
    text = text.lower()
    if text == "none" or (len(text) == 3 and text[0] in "12345" and (text[1:] == "xx" or text[1:].isdigit())):
        return text
    raise ValueError(f"{text!r} is not a status such as 422, 2xx or none")


def _sizes(text: str) -> tuple[int, int]:
    low, dots, high = text.partition("..")
    if not dots:
        raise ValueError(f"{text!r} is not a range of sizes such as 1kB..10MB")
    sizes = units.size(low), units.size(high)
    if sizes[0] > sizes[1]:
        raise ValueError(f"the range {text} ends before it begins")
    return sizes


def _network(text: str) -> Network:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is not an address or a network such as 10.0.0.7 or 10.0.0.0/8") from None
