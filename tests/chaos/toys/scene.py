"""A toy fault in real processes: its owner, its guard, its files, and what they wrote."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from harness.log import read_log
from harness.model import Event
from tests.support.waiting import until

TOYS = Path(__file__).parent
HARNESS = str(Path(sys.executable).with_name("harness"))
LIMIT_S = 30.0
TARGET = "kind: url\nurl: http://127.0.0.1:9\nmodel: tiny\ntokenizer: tiny\ngpu: none\n"


class Scene:
    """One fault under `work`; all processes of a scene are ended by `close`."""

    def __init__(self, work: Path) -> None:
        self.work, self.file, self.run_dir = work, work / "broken", work / "run"
        self.run_dir.mkdir()
        (work / "target.yaml").write_text(TARGET)
        (self.run_dir / "run.json").write_bytes(orjson.dumps({"origin_monotonic_s": time.monotonic()}))
        self.environment = {**os.environ, "PYTHONPATH": str(TOYS), "HARNESS_UNDO_DIR": str(work / "undo")}
        self.owners: list[subprocess.Popen[str]] = []

    # Deeds --------------------------------------------------------------------------------------------------------

    def start(self, deed: str = "hold", ttl_s: float = 120, file: Path | None = None, **fault: Any) -> None:
        """Have an owner begin; `until_held` waits until the fault is in force."""
        arguments = orjson.dumps({"path": str(file or self.file), **fault}).decode()
        command = [sys.executable, str(TOYS / "breaker.py"), str(self.work), str(ttl_s), deed, arguments]
        with open(self.work / f"owner-{len(self.owners)}.out", "wb") as out:
            owner = subprocess.Popen(
                command, cwd=self.work, env=self.environment, stdout=out, stderr=out, start_new_session=True, text=True
            )
        self.owners.append(owner)

    @property
    def owner(self) -> "subprocess.Popen[str]":
        return self.owners[-1]

    def send(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            self.owner.send_signal(number)

    def kill_guards(self) -> None:
        for pid in self.guards():
            os.kill(pid, signal.SIGKILL)
        self.until(lambda: not self.guards(), "the guard is dead")

    def begin_harness(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [HARNESS, *words],
            cwd=self.work,
            env={**self.environment, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def harness(self, *words: str) -> "subprocess.CompletedProcess[str]":
        running = self.begin_harness(*words)
        said, _ = running.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess(words, running.returncode, said)

    def close(self) -> None:
        for owner in self.owners:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(owner.pid, signal.SIGKILL)
            owner.wait()
        for pid in self.guards():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # What is to be seen -------------------------------------------------------------------------------------------

    def until(self, true: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
        until(true, lambda: f"{what}; {self.said()} {self.events()}", limit_s)

    def until_held(self) -> None:
        self.until(lambda: "held" in self.said(), "the fault is in force")

    def until_event(self, kind: str) -> None:
        self.until(lambda: kind in self.kinds(), f"the event {kind}")

    def until_over(self) -> None:
        """The owner has ended, and so have the guards."""
        self.until(lambda: self.owner.poll() is not None, "the owner ended")
        self.until(lambda: not self.guards(), "the guard ended")

    def said(self) -> str:
        return (self.work / f"owner-{len(self.owners) - 1}.out").read_text()

    def events(self) -> list[Event]:
        damage: list[str] = []
        found = [
            entry
            for path in sorted(self.run_dir.glob("log.*.jsonl"))
            for entry in read_log(path, damage)
            if isinstance(entry, Event)
        ]
        return sorted(found, key=lambda event: event.at_s)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events()]

    def records(self) -> list[Path]:
        return sorted((self.work / "undo").glob("*.json"))

    def guards(self) -> list[int]:
        """Living guards of this scene."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if b"harness.chaos.guard" in words and any(str(self.work).encode() in word for word in words):
                        found.append(int(entry.name))
        return found
