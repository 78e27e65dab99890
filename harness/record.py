"""Records a build in good health: plays a scenario while tcpdump listens, and imports what it saw.

    scenario + target --run--> packets --import--> recording

For teams that have no production traffic to capture yet, and for `make stage2`. What is recorded is a baseline that
other builds are held against, so a build that does not hold the scenario's own gates is not recorded.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from harness import run
from harness.model import Judgement, UsageError, Verdict
from harness.report.panel import LiveState, Panel
from harness.run import Order
from harness.targets import base
from harness.traffic import importing
from harness.traffic.capture.filters import Filters
from harness.traffic.capture.tcpdump import Listening
from harness.traffic.importing import Choices
from harness.traffic.recording import RecordingHeader

_ASKED = Filters(methods=frozenset({"POST"}))  # the questions asked of a target before a run are no traffic


def record(
    order: Order, out: Path, panel: Callable[[LiveState], Panel], tell: Callable[[Path, Verdict], None]
) -> RecordingHeader:
    """Run the scenarios and write the recording of their traffic to `out`; its header.

    The packets are kept nowhere. Raises UsageError where tcpdump cannot run, for a target that speaks TLS, and for a
    build that fails.
    """
    parts = urlsplit(base.load(order.target, order.engine).url)
    if parts.scheme == "https" or parts.port is None:
        raise UsageError("only a target with a plain URL and a port can be recorded: TLS hides what is asked")
    with tempfile.TemporaryDirectory() as folder:
        packets = Path(folder) / "packets.pcap"
        with Listening(parts.geturl(), packets) as listening:
            run_dir, verdict = run.run(order, panel, tell)
        if verdict.verdict in (Judgement.FAIL, Judgement.INVALID):
            raise UsageError(f"nothing is recorded: the run was {verdict.verdict}, see {run_dir}")
        if listening.captured.dropped:
            raise UsageError(f"nothing is recorded: the kernel dropped {listening.captured.dropped:,} packets")
        out.parent.mkdir(parents=True, exist_ok=True)
        return importing.import_captures([packets], out, Choices(frozenset({parts.port}), filters=_ASKED))
