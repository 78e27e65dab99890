"""What is done about one fault, as events of its run, in the run's own time."""

import time
from pathlib import Path
from typing import Any

from harness.log import Log, read_run_json
from harness.model import Event


class Journal:
    """Notes about the fault `name`. Without a log they go nowhere; before a run's origin is set they stand at 0."""

    def __init__(self, name: str, log: Log | None, run_dir: Path | None) -> None:
        self.name, self._log = name, log
        self._origin_s: float | None = read_run_json(run_dir).get("origin_monotonic_s") if run_dir else None

    def note(self, kind: str, **detail: Any) -> None:
        """Raises OSError when the disk takes no more."""
        if self._log:
            at_s = time.monotonic() - self._origin_s if self._origin_s is not None else 0.0
            self._log.event(Event(at_s, kind, self.name, detail))
