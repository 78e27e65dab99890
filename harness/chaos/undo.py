"""What is broken now, as files: a record is on disk before its fault is injected, and goes when that is proven gone.

A record holds all that is needed to take a fault back, whoever does it: the one who injected it, its guard, or `harness
heal` after a power loss. One at a time does; the others wait for the record's lock. Nothing here injects.
"""

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from harness import processes
from harness.chaos.catalogue import FAULTS
from harness.chaos.fault import Aim, Fault, Unproven
from harness.chaos.limit import limited
from harness.log import write_beside
from harness.targets import base
from harness.targets.base import Target

FOLDER = "HARNESS_UNDO_DIR"  # the variable that names another place for the records than this directory's own
TRIES, PAUSE_S, TICK_S = 3, 1.0, 0.05
UNDO_LIMIT_S, UNDONE_LIMIT_S, LOCK_LIMIT_S = 30.0, 300.0, 60.0  # a fault's own limits are shorter, and tell more


@dataclass(frozen=True, slots=True)
class Record:
    """One fault that may be in force. Relative paths of the target hold in `directory`; `started` is the owner's start.

    `arguments` are the fault's attributes, which must be JSON values: `revived` makes the same fault of them.
    """

    fault: str
    arguments: Mapping[str, Any]
    aim: Aim
    target: str
    directory: str
    run_dir: str | None
    pid: int
    started: int
    boot_id: str
    deadline_wall_s: float

    @property
    def owner(self) -> str:
        return f"pid {self.pid}" + (f" of {self.run_dir}" if self.run_dir else "")

    @property
    def owner_lives(self) -> bool:
        return self.boot_id == processes.boot_id() and processes.lives(self.pid, self.started)

    def revived(self) -> tuple[Fault, Target]:
        """The fault and its target. Raises ValueError when there is no such fault, UsageError as `load` does."""
        if self.fault not in FAULTS:
            raise ValueError(f"there is no fault {self.fault} here")
        with contextlib.chdir(self.directory):
            return FAULTS[self.fault](**self.arguments), base.load(self.target)


def record(name: str, fault: Fault, target: Target, aim: Aim, ttl_s: float, run_dir: Path | None) -> Record:
    """What this process is about to break, as it will be read. Raises TypeError when that would be another fault."""
    pid = os.getpid()
    made = Record(
        fault=name,
        arguments=arguments(fault),
        aim=aim,
        target=str(target.path.absolute()),
        directory=str(Path.cwd()),
        run_dir=str(run_dir.absolute()) if run_dir else None,
        pid=pid,
        started=processes.started(pid) or 0,
        boot_id=processes.boot_id(),
        deadline_wall_s=time.time() + ttl_s,  # wall time: read after a reboot, too, where no monotonic clock goes on
    )
    made = _parsed(_written(made))
    if made.revived()[0] != fault:
        raise TypeError(f"{name} cannot be made again from its arguments as JSON: {made.arguments}")
    return made


def arguments(fault: Fault) -> dict[str, Any]:
    """What a user chose of a fault, by attribute."""
    return dataclasses.asdict(fault)  # type: ignore[call-overload,no-any-return]


# Files ------------------------------------------------------------------------------------------------------------


def folder() -> Path:
    return Path(os.environ.get(FOLDER, ".harness/undo")).absolute()


def left() -> list[Path]:
    """Every record there is, the newest first: what was broken last is taken back first."""
    return sorted(folder().glob("*.json"), reverse=True)


def stale(ours: Collection[Path] = ()) -> str:
    """Why nothing may be broken now: a fault other than `ours` may be in force. Empty when none is."""
    for path in left():
        if path in ours:
            continue
        with contextlib.suppress(FileNotFoundError):
            try:
                found = read(path)
            except ValueError as error:
                return f"{error}: `harness heal` says what to do"
            if found.owner_lives and found.pid != os.getpid():
                return f"{found.fault} is in force in a run that goes on ({found.owner})"
            return f"{found.fault} was left in force by {found.owner}: take it back with `harness heal`"
    return ""


def await_guards(run_dir: Path, limit_s: float, enough: Callable[[], bool] = lambda: False) -> None:
    """Wait until nothing of a run is in force any more whose experiments have ended, or there was enough of waiting."""
    limit = time.monotonic() + limit_s
    while any(map(partial(_is_of, run_dir), left())) and time.monotonic() < limit and not enough():
        time.sleep(TICK_S)


def _is_of(run_dir: Path, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return read(path).run_dir == str(run_dir.absolute())
    return False


def write(made: Record) -> Path:
    """Put a record on disk for good, its directory's entry too. Raises OSError, and leaves nothing, when it cannot."""
    where = folder()
    where.mkdir(parents=True, exist_ok=True)
    path = where / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{made.fault}.json"
    write_beside(path, _written(made))
    for directory in (where, where.parent, where.parent.parent):
        _sync(directory)
    return path


def read(path: Path) -> Record:
    """Raises FileNotFoundError, and ValueError when it is no record."""
    try:
        return _parsed(path.read_bytes())
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no undo record: {error}") from error


def remove(path: Path) -> None:
    """Its fault is proven gone, or was never injected."""
    path.unlink(missing_ok=True)
    _sync(path.parent)


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Wait until nobody else takes this fault back, and keep others waiting; but not for ever for one who hangs."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError, TimeoutError), limited(LOCK_LIMIT_S, "another's undo"):
            fcntl.flock(stack.enter_context(open(path, "rb")), fcntl.LOCK_EX)
        yield


def _written(made: Record) -> bytes:
    return orjson.dumps(made, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _parsed(data: bytes) -> Record:
    value = orjson.loads(data)
    aim = value.pop("aim")
    return Record(**value, aim=Aim(**{**aim, "targets": tuple(aim["targets"])}))


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# Taking back ------------------------------------------------------------------------------------------------------


def mend(fault: Fault, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Undo and prove it, a few times over if need be; the evidence. Raises Unproven with what the last try met."""
    why = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            with limited(UNDO_LIMIT_S, "undo"):
                fault.undo(target, state)
            with limited(UNDONE_LIMIT_S, "the proof that it is undone"):
                if evidence := fault.undone(target, state):
                    return evidence
            why = "it gave no evidence"
        except Exception as error:  # whatever went wrong, another try may do
            why = str(error) or repr(error)
    raise Unproven(f"not undone in {TRIES} tries: {why}")


def heal(tell: Callable[[str], None]) -> int:
    """Take back what is left over, newest first, telling each line; how many faults may still be in force after it."""
    records = left()
    if not records:
        tell("nothing to heal")
    return sum(not _healed(path, tell) for path in records)


def _healed(path: Path, tell: Callable[[str], None]) -> bool:
    try:
        found = read(path)
    except FileNotFoundError:
        return True  # somebody else took it back meanwhile
    except ValueError as error:
        tell(f"{error}; see what it names, take that back by hand, and remove the file")
        return False
    if found.owner_lives:
        tell(f"{found.fault}: in force in a run that goes on ({found.owner}); stop that run, and it is taken back")
        return False
    tell(f"{found.fault}: taking it back from {', '.join(found.aim.targets)}; it was left by {found.owner}")
    with held(path):
        if not path.exists():
            tell(f"{found.fault}: gone, taken back by its guard")
            return True
        return _taken_back(path, found, tell)


def _taken_back(path: Path, found: Record, tell: Callable[[str], None]) -> bool:
    try:
        with contextlib.chdir(found.directory):
            evidence = mend(*found.revived(), found.aim.state)
    except Exception as error:  # the next record is to be healed all the same
        tell(f"{found.fault}: STILL THERE, {error}")
        tell(f"{found.fault}: by hand: {found.aim.undo}; then `harness heal` again")
        return False
    remove(path)
    tell(f"{found.fault}: gone, {orjson.dumps(evidence).decode()}")
    return True
