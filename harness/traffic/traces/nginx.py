"""Access logs of nginx in its `combined` format, with or without `$request_time` (s) at the end of the line.

    log_format timed '$remote_addr - $remote_user [$time_local] "$request" $status $body_bytes_sent '
                     '"$http_referer" "$http_user_agent" $request_time';

They hold no bytes of a request and no token counts: what can be played is when something was asked of which path, with
prompts as short as can be.
A line is written when its request is over and has whole seconds; with `$request_time` a request's own beginning is
known that well, without it only its end is. Queries, names of users, referers and agents are not kept.
"""

import math
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from harness.model import NEVER, UsageError
from harness.traffic.recording import Answered, Recorded
from harness.traffic.traces import rows

_LINE = re.compile(
    r'(?P<client>\S+) - .*? \[(?P<ended>[^\]]+)\] "(?P<request>[^"]*)" (?P<status>\d{3}) \d+'
    r'(?: "[^"]*" "[^"]*")?(?: (?P<lasted>\d+\.\d+|-))?(?: .*)?'
)
_REQUEST = re.compile(r"([A-Z]+) ([^\s?]+)(?:\?\S*)? HTTP/[\d.]+")


def read(path: Path) -> Iterator[tuple[Recorded, str]]:
    """The requests of a log; those without a request line are lost. Raises UsageError with the line."""
    for place, (where, line) in enumerate(rows.lines(path)):
        found = _LINE.fullmatch(line)
        if not found:
            raise UsageError("no line of an access log in nginx's combined format", where)
        asked = _REQUEST.fullmatch(found["request"])
        lasted_s = NEVER if found["lasted"] in (None, "-") else float(found["lasted"])
        one = Recorded(
            at_s=_ended_s(found["ended"], where) - (0.0 if math.isnan(lasted_s) else lasted_s),
            connection=place,
            turn=0,
            method=asked[1] if asked else "",
            path=asked[2] if asked else "",
            raw=b"",
            answer=Answered(status=int(found["status"]), ended_s=lasted_s),
            client=found["client"],
        )
        yield one, "" if asked else "no request line in the log"


def _ended_s(text: str, where: str) -> float:
    try:
        return datetime.strptime(text, "%d/%b/%Y:%H:%M:%S %z").timestamp()
    except ValueError:
        raise UsageError(f"{text!r:.50} is no time such as 10/Oct/2026:13:55:36 +0000", where) from None
