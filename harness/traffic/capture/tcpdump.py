"""The tcpdump that a capture needs: printed for the user to run elsewhere, or run here, for a while.

Every option is there for a loss that was seen: whole packets, a large buffer, flushed as they come, nothing but the
target's traffic. It starts one process, ends it the way tcpdump wants to be ended, and says what the kernel dropped.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from harness.model import UsageError

_BUFFER_KIB = 65_536  # what the kernel holds while the disk is busy; its own default is 2 MiB
_STOP_S = 10.0
_HELD_S = 1.2  # the kernel hands packets over in blocks, and one that is not full after a second
_SETTLED_S = 4.0  # the most that a capture is waited for to be still: a target may never be
_COUNTS = re.compile(r"^(\d+) packets? (captured|received by filter|dropped by kernel)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Captured:
    """What tcpdump said at its end."""

    packets: int
    dropped: int


def command(url: str, out: Path) -> list[str]:
    """What captures the traffic of a target, given its URL."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    local = _is_local(host)
    options = ["tcpdump", "-i", "lo" if local else "any", "-n", "-s", "0", "-U", "-B", str(_BUFFER_KIB), "-w", str(out)]
    return [*options, *(["tcp", "port", str(port)] if local else ["host", host, "and", "tcp", "port", str(port)])]


def told(url: str, out: Path, seconds: float | None) -> list[str]:
    """The command and what to know about it, as lines for the user."""
    tcpdump = shlex.join(command(url, out))
    lines = [f"timeout --signal=INT {seconds:g} {tcpdump}" if seconds else tcpdump]
    lines.append(
        "# run it as root where the traffic can be seen; for hours, add `-C 1000 -W 40 -Z root`: 40 GB in turn"
    )
    if url.startswith("https://"):
        lines.append("# the target speaks TLS: capture where its traffic is plain, such as behind the gateway")
    return [*lines, f"# then: harness import {shlex.quote(str(out))} -o recording.jsonl"]


def run(url: str, out: Path, seconds: float) -> Captured:
    """Capture for that long, or until Ctrl-C. Raises UsageError as `Listening` does."""
    with Listening(url, out) as listening, contextlib.suppress(subprocess.TimeoutExpired):
        listening.process.wait(seconds)
    return listening.captured


class Listening:
    """tcpdump at work, from the moment it listens until the block is left; `captured` is known after that.

    Raises UsageError without tcpdump, without root, or when it does not start or ends early.
    """

    def __init__(self, url: str, out: Path) -> None:
        if reason := why_not():
            raise UsageError(reason)
        self._out = out
        self._command = ["tcpdump", "-Z", "root", *command(url, out)[1:]]  # or it writes as a user who may not
        self.captured = Captured(0, 0)

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            self._said = _until_it_listens(self.process)
        except UsageError:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            _let_settle(self.process, self._out)
            self._said += _stop(self.process)
        finally:
            self.process.kill()  # does nothing to one that has ended
            self.process.wait()
        counts = {what: int(count) for count, what in _COUNTS.findall(self._said)}
        if "captured" not in counts:
            raise UsageError(f"tcpdump ended early: {_last_line(self._said)}")
        self.captured = Captured(counts["captured"], counts.get("dropped by kernel", 0))


def why_not() -> str:
    """Why this process cannot capture, as a sentence; empty when it can."""
    if not shutil.which("tcpdump"):
        return "tcpdump is not installed: `apt-get install tcpdump`, or run what `harness capture` prints elsewhere"
    if os.geteuid() != 0:
        return "only root may capture: run it with sudo, or run what `harness capture` prints elsewhere"
    return ""


def _until_it_listens(process: "subprocess.Popen[str]") -> str:
    """What tcpdump prints until packets are taken; all it prints, when it fails."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "listening on" in line:
            return said
    raise UsageError(f"tcpdump did not start: {_last_line(said)}")


def _let_settle(process: "subprocess.Popen[str]", out: Path) -> None:
    """Wait until it has written what the kernel holds, which it would lose: until its file grows no more."""
    limit = time.monotonic() + _SETTLED_S
    size, still_since = -1, time.monotonic()
    while process.poll() is None and (now := time.monotonic()) < limit and now - still_since < _HELD_S:
        if (grown := out.stat().st_size if out.exists() else 0) != size:
            size, still_since = grown, now
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)


def _stop(process: "subprocess.Popen[str]") -> str:
    """End it, unless it has ended; returns what it had still to say."""
    assert process.stderr is not None
    process.terminate()  # it then writes what it holds, and its counts; SIGINT may be ignored, in the background
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        raise UsageError(f"tcpdump did not end within {_STOP_S:g} s of being told to") from None
    return process.stderr.read()


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["it said nothing"])[-1]


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
