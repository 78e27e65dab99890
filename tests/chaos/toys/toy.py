"""A fault for tests: it makes a file, and can be told to go wrong in every way that a fault can."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.chaos.fault import Aim, Fault, Refused, Unproven
from harness.targets.base import Target
from harness.units import spec

LONG_S = 600.0


@spec
class Toy(Fault):
    """`hangs` and `raises` name a step. While the file `path`.kept is there, nothing can be undone; while `path`.wait
    is, undoing waits."""

    path: str
    hangs: str = ""
    raises: str = ""
    idle: bool = False
    mute: bool = False

    def resolve(self, target: Target) -> Aim:
        if Path(self.path).exists():
            raise Refused(f"{self.path} is there already")
        return Aim((self.path,), "nobody feels it", f"rm {self.path}", {"path": self.path})

    @property
    def inject_limit_s(self) -> float:
        return 1.0

    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        if not self.idle:
            Path(state["path"]).touch()
        self._stumble("inject")

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        self._stumble("applied")
        if not Path(state["path"]).exists():
            raise Unproven("there is no file")
        return {} if self.mute else {"there": True}

    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        while Path(state["path"] + ".wait").exists():
            time.sleep(0.01)
        if Path(state["path"] + ".kept").exists():
            raise PermissionError(f"{state['path']} is kept")
        Path(state["path"]).unlink(missing_ok=True)

    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if Path(state["path"]).exists():
            raise Unproven("the file is still there")
        return {"there": False}

    def _stumble(self, step: str) -> None:
        if self.hangs == step:
            while True:  # a probe that takes whatever comes for its stack's silence
                try:
                    time.sleep(LONG_S)
                except Exception:
                    continue
        if self.raises == step:
            raise ConnectionRefusedError(f"no answer to {step}")
