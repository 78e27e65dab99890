"""Why a capture holds nothing to replay: what was seen in it, in one sentence, and what to do about it. Pure.

It judges the account of a whole import and looks at no packet; how much may be lost of what there is, the verdict says.
"""

from collections.abc import Callable, Mapping, Sequence

from harness.traffic.capture.account import Account

_AGAIN = "capture again with `tcpdump -s 0`, as `harness capture` prints it"
_UNLOCK = (
    "decrypt it first (`editcap --inject-secrets tls,KEYLOG IN OUT`, then tshark), or capture behind what ends TLS"
)


def why_no_requests(account: Account, ports: Sequence[int], look_again: Callable[[], Sequence[int]]) -> str:
    """For a capture without one request. `look_again` says which ports carry HTTP, whatever `ports` the user named."""
    if account.tls and not account.http:
        return f"{account.tls} connections of TLS and none of plain HTTP: {_UNLOCK}"
    if account.http2 and not account.http:
        return f"{account.http2} connections of HTTP/2, which is not read: capture where the servers speak HTTP/1.1"
    if account.answers_seen:
        return f"{account.answers_seen} answers and no request: it holds one direction only; {_AGAIN}"
    if account.cut_packets:
        return f"{_cut(account)}, and no request is left; {_AGAIN}"
    named = ", ".join(map(str, ports))
    if ports and (others := look_again()):
        return f"no HTTP on port {named}, but on {', '.join(map(str, others))}: give that as --port, or none"
    return (
        f"no HTTP request{f' on port {named}' if named else ''} in {account.packets} packets, {account.segments} of "
        "them TCP: was it the right interface, and the right port?"
    )


def why_none_kept(account: Account, lost: Mapping[str, int], filtered: int) -> str:
    """For a capture with requests of which none, or none that could be compared, was kept; "" when all is well."""
    if not account.answers_seen:
        return f"{account.requests_seen} requests and not one answer: it holds one direction only; {_AGAIN}"
    if not lost:
        return f"the filters left nothing of its {filtered} requests" if filtered else ""
    if account.cut_packets:
        return f"{_cut(account)}, and each request with them; {_AGAIN}"
    reasons = ", ".join(f"{count} {reason}" for reason, count in lost.items())
    return f"not one of its requests is whole ({reasons}): capture from before the traffic until after it"


def _cut(account: Account) -> str:
    return f"the snap length cut {account.cut_packets} of {account.packets} packets"
