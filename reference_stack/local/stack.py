"""The local stack's life: up, down, and how it is.

All it knows is under one state directory, so any later call can go on from there, after any crash. `up` ends
with every replica having answered a prompt, or with nothing left running.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from reference_stack.local import full as full_stack
from reference_stack.local import processes, supervisor
from reference_stack.local.programs import VLLM_PYTHON, Program, documents, ports, programs
from reference_stack.local.supervisor import Supervisor
from reference_stack.local.target import HOST, Target, UsageError

READY_LIMIT_S = {"sim": 60.0, "vllm": 240.0}
STOP_LIMIT_S = 30.0
TAIL_LINES = 20

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class StackError(Exception):
    """The stack did not come up; the message says which program failed and how."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One program as it is now; `pid` is None when it has none."""

    program: str
    state: str
    pid: int | None
    url: str | None


class Stack:
    """The stack whose programs run in `directory`, with its state in `.stack` there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._state = self._directory / ".stack"
        self._record = self._state / "up.json"
        self._supervisor = Supervisor(self._state)

    def up(self, target: Target, full: bool = False) -> bool:
        """Start the stack, with all that is `full`, and wait until it serves; False when it is up already.

        UsageError when it cannot be started as asked, StackError when a program failed; then nothing is left running.
        """
        with self._alone():
            if self._is_up():
                self._check_same(target, full)
                return False
            processes.end(processes.of_stack(self._state))
            started = programs(target, self._state, shutil.which("prometheus"))
            written = documents(target, full_stack.scraped(target) if full else {})
            if full:
                started += full_stack.programs(target, self._state, _redis_binary())
                written = {**written, **full_stack.documents(target, self._state)}
            _check(target, started, self._state)
            self._write(target, started, written)
            try:
                self._start()
                self._wait_ready(target, started)
            except BaseException:
                self._take_down()
                raise
        return True

    def down(self) -> int:
        """Stop every process of the stack, whoever started or lost it; the number of processes there were."""
        if not self._state.exists():
            return 0
        with self._alone():
            return self._take_down()

    def status(self) -> list[Row]:
        """Every program of the recorded stack; empty when none was started."""
        try:
            states = self._supervisor.states()
        except OSError:
            states = {}
        rows = []
        for program in self._recorded().get("programs", []):
            state, pid = states.get(program["name"], ("GONE", 0))
            rows.append(Row(program["name"], state, pid or None, program["url"]))
        return rows

    def remarks(self) -> list[str]:
        """What a reader of the status should know besides."""
        target = self._recorded().get("target", {})
        names = {program["name"] for program in self._recorded().get("programs", [])}
        if target.get("prometheus") and "prometheus" not in names:
            return ["prometheus is not installed: readings come straight from the programs"]
        return []

    def logs(self, program: str | None) -> str:
        """The logs of one program, or of all, each under its name. UsageError when there is no such log."""
        files = sorted((self._state / "logs").glob("*.log"))
        if program is not None:
            files = [file for file in files if file.stem == program]
        if not files:
            raise UsageError(f"there is no log{f' of {program}' if program else ''} in {self._state / 'logs'}.")
        return "".join(f"==> {file.stem}\n{file.read_text(errors='replace')}" for file in files)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._state.mkdir(exist_ok=True)
        with (self._state / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _is_up(self) -> bool:
        try:
            return self._supervisor.pid() > 0
        except OSError:
            return False

    def _recorded(self) -> dict[str, Any]:
        try:
            recorded: dict[str, Any] = json.loads(self._record.read_text())
        except FileNotFoundError:
            return {}
        return recorded

    def _check_same(self, target: Target, full: bool) -> None:
        """UsageError when what is up is not what is asked for; a full stack serves who asks for its core."""
        if self._recorded().get("target") != _plain(target):
            raise UsageError(f"{target.where('kind')}: another target is up in {self._state}: take it down first.")
        if full and all(row.program != "orchestrator" for row in self.status()):
            raise UsageError(f"the stack is up in {self._state} without --full: take it down first.")

    def _write(self, target: Target, started: list[Program], written: Mapping[str, dict[str, Any]]) -> None:
        for old in ("logs", "gpu", "prometheus"):
            shutil.rmtree(self._state / old, ignore_errors=True)
        for new in ("logs", "gpu"):
            (self._state / new).mkdir()
        for name, document in written.items():
            (self._state / name).write_text(yaml.safe_dump(document, sort_keys=False))
        text = supervisor.config(started, self._state, self._directory)
        (self._state / "supervisord.conf").write_text(text)
        listed = [{"name": program.name, "url": program.url} for program in started]
        draft = self._record.with_suffix(".draft")
        draft.write_text(json.dumps({"target": _plain(target), "programs": listed}, indent=2))
        draft.replace(self._record)  # `status` reads it at any moment: whole, or not at all

    def _start(self) -> None:
        """Supervisord as a daemon, in a session of its own; its mark goes down to every process it starts."""
        environment = {**os.environ, supervisor.MARK: str(self._state)}
        command = supervisor.command(self._state)
        done = subprocess.run(
            command, cwd=self._directory, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode:
            raise StackError(f"supervisord did not start: {done.stderr.decode(errors='replace').strip()}")

    def _wait_ready(self, target: Target, started: list[Program]) -> None:
        """Return when every program answers and the gateway has a token from every replica."""
        deadline = time.monotonic() + READY_LIMIT_S[target.engine]
        waiting = started
        while waiting or not _serves(target):
            with contextlib.suppress(OSError):  # supervisord opens its socket after the parent has left
                for name, (state, _) in self._supervisor.states().items():
                    if state not in ("STARTING", "RUNNING"):
                        raise self._failure(name, f"is {state.lower()}")
            waiting = [program for program in waiting if program.ready_url and not _answers(program.ready_url)]
            if time.monotonic() > deadline:
                late = waiting[0].name if waiting else "gateway"
                raise self._failure(late, f"was not ready after {READY_LIMIT_S[target.engine]:g} s")
            time.sleep(0.1)

    def _failure(self, program: str, what: str) -> StackError:
        file = supervisor.log_file(self._state, program)
        tail = file.read_text(errors="replace").splitlines()[-TAIL_LINES:] if file.exists() else []
        return StackError("\n".join([*tail, f"{program} {what}; its last lines are above, the rest is in {file}."]))

    def _take_down(self) -> int:
        there = processes.of_stack(self._state)
        with contextlib.suppress(OSError):
            self._supervisor.shut_down()
            processes.wait_gone(there, STOP_LIMIT_S)
        processes.end([*there, *processes.of_stack(self._state)])
        for name in ("up.json", "supervisor.sock", "supervisord.pid", "zygote.sock"):
            (self._state / name).unlink(missing_ok=True)
        return len(there)


def _plain(target: Target) -> dict[str, Any]:
    """A target as JSON gives it back; where its file lies makes no difference."""
    fields = dataclasses.asdict(target)
    del fields["path"], fields["lines"]
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return plain


def _redis_binary() -> str:
    found = shutil.which("redis-server")
    if not found:
        raise UsageError("redis-server is not installed, and --full needs it: scripts/setup-redis installs it.")
    return found


def _check(target: Target, started: list[Program], state: Path) -> None:
    """Everything that can be known to fail before anything is started."""
    if not (target.tokenizer / "tokenizer.json").exists():
        raise UsageError(
            f"{target.where('tokenizer')}: {target.tokenizer} holds no tokenizer.json: "
            "python -m reference_stack.engine.tiny --out .cache/tiny --text harness/traffic/words.txt makes one."
        )
    if target.engine == "vllm" and not VLLM_PYTHON.exists():
        raise UsageError(f"{target.where('engine')}: {VLLM_PYTHON} is missing: run make vllm.")
    if len(str(state / "supervisor.sock")) > supervisor.SOCKET_PATH_LIMIT_BYTES:
        raise UsageError(f"{state} is too long a path for a Unix socket: work in a directory nearer to the root.")
    for program in started:
        for port in program.ports:
            _check_port(target, program.name, port)


def _check_port(target: Target, program: str, port: int) -> None:
    key = "engines" if program.startswith("engine-") else "prometheus" if program == "prometheus" else "url"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            pid = processes.listening_on(port)
            owner = f" by pid {pid}" if pid else ""
            raise UsageError(f"{target.where(key)}: port {port}, for {program}, is in use{owner}.") from None


def _answers(url: str) -> bool:
    try:
        with _direct.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _serves(target: Target) -> bool:
    """Whether users are served, by every replica: the gateway's check of one is a one-token completion."""
    url = f"http://{HOST}:{ports(target).admin}/stats?filter=^cluster.engines.membership_healthy$"
    try:
        with _direct.open(url, timeout=2) as answer:
            healthy = answer.read().split()[-1:] == [str(len(target.engines)).encode()]
    except OSError:
        return False
    return healthy and _answers(f"{target.url}/v1/models")
