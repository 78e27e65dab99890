"""Who plays what: one process alone, or a master and its workers, here or on other machines.

Roles talk through locust's runner, which they are given: they import none of it. `Alone` plays the whole plan;
`Worker` plays a part of it, from the run directory that it shares with its master or from files that the master sends
it; `Master` keeps the workers together and plays nothing.
"""

import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import gevent
from gevent.event import AsyncResult, Event

from harness import model
from harness.drivers.part import FILES, Part, origin
from harness.drivers.player import Played
from harness.log import Log
from harness.model import Observation, Outcome, Request

STOP_LIMIT_S = 8.0  # for workers to drain, to write and to say so
SHIP_S = 0.5  # between two shipments of a distant worker's logs
CLOCK_ROUNDS = 16
_LOG_NAME = re.compile(r"log\.player-\d+\.(bin|jsonl)")


class Alone:
    """Plays the whole plan in this process."""

    def __init__(self, environment: Any, run_dir: Path) -> None:
        self.environment, self.runner, self.run_dir = environment, environment.runner, run_dir
        self.part: Part | None = None
        self.started = self.asked = self.leaving = False
        self.over = Event()

    def run(self) -> None:
        self.part = part = Part(self.run_dir, 0, 1, self.seen if self.environment.web_ui else None)
        try:
            part.warm()
            part.note(model.Event(0.0, "ready", "player"))
            origin_s = origin(self.run_dir, lambda: self.asked)
            if origin_s is None:
                played = Played(0, 0, 0, "asked")
            else:
                part.note(model.Event(0.0, "started", "player", {"nice": part.nice}))
                played = part.play(origin_s)
            part.note(_stopped(origin_s, [played]))
        finally:
            part.close()

    def ask(self) -> None:
        """Send nothing more; `over` is set when all is written."""
        self.asked = True
        if self.part is not None:
            self.part.stop()

    def seen(self, request: Request, observation: Observation, size: int) -> None:
        """Show an observation to locust's UI, where there is one: it costs as much as reading a plain answer."""
        if observation.outcome is Outcome.OPEN:
            return
        good = observation.outcome in (Outcome.OK, Outcome.REJECTED_AS_EXPECTED, Outcome.CANCELLED_BY_US)
        self.environment.events.request.fire(
            request_type="stream" if request.stream else "plain",
            name=request.class_name,
            response_time=(observation.ended_s - observation.due_s) * 1000,
            response_length=size,
            exception=None if good else RuntimeError(observation.outcome.name.lower()),
            context={},
        )


class Worker(Alone):
    """Plays one part of the plan. Without a run directory it is given the files, and ships its logs back."""

    def __init__(self, environment: Any, run_dir: Path | None) -> None:
        super().__init__(environment, run_dir or Path())
        self.distant = run_dir is None
        self.order, self.origin_s, self.pong = AsyncResult(), AsyncResult(), AsyncResult()
        self.shipped: dict[str, int] = {}
        for name, listener in (
            ("harness-part", lambda environment, msg: self.order.set(msg.data)),
            ("harness-origin", lambda environment, msg: self.origin_s.set(msg.data)),
            ("harness-pong", lambda environment, msg: self.pong.set(msg.data)),
            ("harness-stop", lambda environment, msg: self.ask()),
        ):
            self.runner.register_message(name, listener)

    def run(self) -> None:
        if self.distant:
            self.run_dir = Path(tempfile.mkdtemp(prefix="harness-"))
        try:
            self._play()
        except BaseException as error:
            self.runner.send_message("harness-stopped", {"why": f"failed: {error}", "sent": 0, "done": 0, "open": 0})
            raise
        finally:
            if self.distant:
                shutil.rmtree(self.run_dir)

    def _play(self) -> None:
        self.runner.send_message("harness-part", {"files": self.distant})
        order = self.order.get()
        for name, content in order["files"].items():
            (self.run_dir / name).write_bytes(content)
        seen = self.seen if order["shown"] else None
        self.part = part = Part(self.run_dir, order["worker"], order["workers"], seen)
        part.warm()
        offset_s = self._clock_offset(part) if self.distant else 0.0
        self.runner.send_message("harness-ready", {"worker": order["worker"], "nice": part.nice})
        origin_s = self._distant_origin(offset_s) if self.distant else origin(self.run_dir, lambda: self.asked)
        shipping = gevent.spawn(self._ship_on) if self.distant else None
        played = part.play(origin_s) if origin_s is not None else Played(0, 0, 0, "asked")
        part.close()
        if shipping is not None:
            shipping.kill()
            self._ship()
        self.runner.send_message(
            "harness-stopped", {"why": played.why, "sent": played.sent, "done": played.done, "open": played.open}
        )

    def _clock_offset(self, part: Part) -> float:
        """The master's monotonic clock less ours, by the quickest of some round trips; 0 on the master's machine.

        Good to half that round trip when it is taken. Both clocks are held to true seconds by their machines' NTP,
        without which an hour's run may drift by a tenth of a second.
        """
        best_s, offset_s = float("inf"), 0.0
        for _ in range(CLOCK_ROUNDS):
            self.pong = AsyncResult()
            asked_s = time.monotonic()
            self.runner.send_message("harness-ping")
            answer = self.pong.get()
            now_s = time.monotonic()
            if answer["boot_id"] == _boot_id():
                return 0.0
            if now_s - asked_s < best_s:
                best_s, offset_s = now_s - asked_s, answer["monotonic_s"] - (asked_s + now_s) / 2
        part.note(model.Event(0.0, "note", "clock", {"offset_s": offset_s, "error_s": best_s / 2}))
        return offset_s

    def _distant_origin(self, offset_s: float) -> float | None:
        while not self.asked:
            if self.origin_s.wait(0.1) is not None:
                return float(self.origin_s.get()["monotonic_s"]) - offset_s
        return None

    def _ship_on(self) -> None:
        while True:
            gevent.sleep(SHIP_S)
            self._ship()

    def _ship(self) -> None:
        """Send what our logs have grown by. Whole blocks and lines are on disk when we look."""
        for path in sorted(self.run_dir.glob("log.*")):
            with open(path, "rb") as file:
                file.seek(self.shipped.get(path.name, 0))
                grown = file.read()
            if grown:
                self.shipped[path.name] = self.shipped.get(path.name, 0) + len(grown)
                self.runner.send_message("harness-grown", {"name": path.name, "bytes": grown})


class Master(Alone):
    """Hands out the parts, passes the origin on, and writes what distant workers ship into the run directory."""

    def __init__(self, environment: Any, run_dir: Path) -> None:
        super().__init__(environment, run_dir)
        self.workers: int = environment.parsed_options.expect_workers
        self.log = Log(run_dir / "log.player-master.jsonl")
        self.ready: dict[str, int] = {}  # the workers' niceness
        self.stopped: dict[str, Played] = {}
        for name, listener in (
            ("harness-part", self._hand_out),
            ("harness-ping", self._tell_time),
            ("harness-ready", lambda environment, msg: self.ready.update({msg.node_id: msg.data["nice"]})),
            ("harness-grown", self._write),
            ("harness-stopped", lambda environment, msg: self.stopped.update({msg.node_id: Played(**msg.data)})),
        ):
            self.runner.register_message(name, listener)

    def run(self) -> None:
        self._wait_for(self.ready)
        origin_s = None
        if len(self.ready) == self.workers:
            self.log.event(model.Event(0.0, "ready", "player"))
            origin_s = origin(self.run_dir, lambda: self.asked or bool(self.stopped))
        if origin_s is not None:
            self.runner.send_message("harness-origin", {"monotonic_s": origin_s})
            self.log.event(model.Event(0.0, "started", "player", {"nice": max(self.ready.values())}))
        self._wait_for(self.stopped)
        self.log.event(_stopped(origin_s, list(self.stopped.values())))
        self.log.close()
        failed = [played.why for played in self.stopped.values() if played.why not in ("finished", "asked")]
        if failed:
            raise RuntimeError("; ".join(failed))

    def _wait_for(self, told: Any) -> None:
        """Until every worker has told us, or one that has not is lost, or has failed. A lost one ends the run."""
        limit_s = float("inf")
        while len(told) < self.workers and time.monotonic() < limit_s:
            gevent.sleep(0.02)
            for node in [node for node in self._lost() if node not in self.stopped]:
                self.stopped[node] = Played(0, 0, 0, f"lost worker {self.runner.get_worker_index(node)}")
            ended = self.asked or any(played.why != "finished" for played in self.stopped.values())
            if ended and limit_s == float("inf"):
                self.ask()
                limit_s = time.monotonic() + STOP_LIMIT_S

    def _lost(self) -> list[str]:
        known = self.runner.clients
        parts = [node for node, worker in self.runner.worker_indexes.items() if worker < self.workers]
        return [node for node in parts if node not in known or known[node].state == "missing"]

    def ask(self) -> None:
        self.asked = True
        self.runner.send_message("harness-stop")

    def _hand_out(self, environment: Any, msg: Any) -> None:
        worker = self.runner.get_worker_index(msg.node_id)
        if worker < self.workers:  # one too many waits in vain, and does no harm
            files = {name: (self.run_dir / name).read_bytes() for name in FILES} if msg.data["files"] else {}
            shown = self.environment.web_ui is not None
            order = {"worker": worker, "workers": self.workers, "shown": shown, "files": files}
            self.runner.send_message("harness-part", order, msg.node_id)

    def _tell_time(self, environment: Any, msg: Any) -> None:
        told = {"monotonic_s": time.monotonic(), "boot_id": _boot_id()}
        self.runner.send_message("harness-pong", told, msg.node_id)

    def _write(self, environment: Any, msg: Any) -> None:
        name = msg.data["name"]
        if not _LOG_NAME.fullmatch(name):
            raise ValueError(f"a worker sent a file that is no log: {name!r}")
        try:
            with open(self.run_dir / name, "ab") as file:
                file.write(msg.data["bytes"])
        except OSError as error:  # raised in a listener it would only be logged
            self.stopped[msg.node_id] = Played(0, 0, 0, f"failed: {name}: {error}")


def _stopped(origin_s: float | None, parts: list[Played]) -> model.Event:
    whys = {played.why for played in parts}
    detail = {
        "sent": sum(played.sent for played in parts),
        "done": sum(played.done for played in parts),
        "open": sum(played.open for played in parts),
        "why": "finished" if whys == {"finished"} else ", ".join(sorted(whys - {"finished"})) or "no workers",
    }
    return model.Event(time.monotonic() - origin_s if origin_s is not None else 0.0, "stopped", "player", detail)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
