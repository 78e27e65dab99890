"""How often may a client ask? A token bucket per client, kept as one number each.

The number is the moment at which the client's bucket will be full again (GCRA, ITU-T I.371). A client whose bucket is
full is forgotten, so memory is bounded by the rate, not by the number of names a client can invent. It has no clock.
"""


class RateLimit:
    """`rate_per_s` requests a second for each client, and `burst` at once after a rest."""

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self._interval_s = 1.0 / rate_per_s
        self._depth_s = burst / rate_per_s
        self._full_at_s: dict[bytes, float] = {}
        self._sweep_at = 1024

    def take(self, client: bytes, now_s: float) -> float:
        """Count one request of `client`; 0.0 when it may pass, else the seconds after which one would."""
        full_at_s = max(now_s, self._full_at_s.get(client, 0.0)) + self._interval_s
        wait_s = full_at_s - self._depth_s - now_s
        if wait_s > 1e-9:
            return wait_s
        self._full_at_s[client] = full_at_s
        if len(self._full_at_s) > self._sweep_at:
            self._forget(now_s)
        return 0.0

    def __len__(self) -> int:
        """The clients remembered."""
        return len(self._full_at_s)

    def _forget(self, now_s: float) -> None:
        self._full_at_s = {client: full_at_s for client, full_at_s in self._full_at_s.items() if full_at_s > now_s}
        self._sweep_at = max(1024, 2 * len(self._full_at_s))
