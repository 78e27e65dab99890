"""The order of things around every fault, in one place: nothing is broken that could not be taken back, or unseen.

    aim -> undo record on disk -> guard armed -> inject -> proof -> hold -> undo -> proof -> record gone, guard disarmed

Whatever happens once the guard is armed, an exception, a signal, a probe that hangs, a guard that dies, ends in undo;
what happens to this process itself is the guard's to mend. Nothing is reported as injected or healed without evidence.
It belongs on the main thread: signals and time limits work nowhere else.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from harness.chaos import undo
from harness.chaos.fault import Aim, Fault, Refused, Unproven
from harness.chaos.guard import Guard
from harness.chaos.journal import Journal
from harness.chaos.limit import limited
from harness.log import Log
from harness.targets.base import Target

STEP_LIMIT_S = 30.0  # of finding targets, and of the proof; a fault's own limits tell more
TICK_S = 0.1
_in_force: set[Path] = set()  # this process's own, by their records: several may be, together


class StillBroken(Unproven):
    """A fault that could not be taken back, by us or by its guard. Its record is left; the sentence says what to do."""


def told(name: str, aim: Aim) -> tuple[str, ...]:
    """What a fault would do, in lines for the user."""
    return (
        f"{name} would hit {', '.join(aim.targets)}",
        f"{name} would be felt: {aim.radius}",
        f"{name} would be undone: {aim.undo}",
    )


class Injection:
    """One fault from aim to proof that it is gone, in steps, for those who inject in one place and heal in another.

    `signals` counts those that came while a step could not be left.
    """

    def __init__(
        self,
        name: str,
        fault: Fault,
        target: Target,
        log: Log | None,
        *,
        ttl_s: float,
        run_dir: Path | None,
        dry_run: bool = False,
    ) -> None:
        self.name, self.fault, self.target = name, fault, target
        self.ttl_s, self.run_dir, self.dry_run = ttl_s, run_dir, dry_run
        self.signals = 0
        self._journal = Journal(name, log, run_dir)
        self._step = ""
        self._open: tuple[Path, Guard, Aim] | None = None

    def begin(self) -> Aim:
        """Break it, and prove it; in a dry run only aim.

        Raises Refused when nothing was broken, Unproven when what was broken shows no effect and is taken back again,
        KeyboardInterrupt when a signal came, after taking it back, and StillBroken when that did not succeed.
        """
        aim = self._aimed()
        if self.dry_run:
            return aim
        with _Counted() as signals:
            self._open = self._armed(aim)
            try:
                self._break(self._open[2], signals)
                self._see_guarded(self._open[1])
            except BaseException as error:
                self._give_up(error)
                raise
            finally:
                self.signals += signals.count
        if signals.count:
            self.abort("a signal came")
            raise KeyboardInterrupt
        return aim

    def hold(self, for_s: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Leave it in force that long, or until there is enough of it; at whatever comes up meanwhile it is taken back.

        Raises as `end` does when its guard is gone.
        """
        until = time.monotonic() + for_s
        try:
            while self._open and (left_s := until - time.monotonic()) > 0 and not enough():
                if not self._open[1].watches(min(left_s, TICK_S)):
                    self.end()
        except BaseException as error:
            self.abort(_why(error))
            raise

    def abort(self, why: str) -> None:
        """Take it back before its time, and say why. Raises as `end` does."""
        if self._open:
            self._note("aborted", why=why)
            self.end()

    def end(self) -> None:
        """Take it back, and prove it; nothing when there is nothing to take back. Signals are counted meanwhile.

        Raises StillBroken when it is left in force; Unproven when it is gone, but was not in force and under guard
        until now.
        """
        if self._open:
            with _Counted() as signals:
                try:
                    self._end(*self._open)
                finally:
                    self.signals += signals.count

    # Steps --------------------------------------------------------------------------------------------------------

    def _aimed(self) -> Aim:
        try:
            with limited(STEP_LIMIT_S, "finding its targets"):
                aim = self.fault.resolve(self.target)
        except (Refused, OSError) as error:
            self._refuse(error)
        if not aim.targets:
            self._refuse("it matches no target")
        return aim

    def _armed(self, aim: Aim) -> tuple[Path, Guard, Aim]:
        """With the aim as it was written down: no later step sees more of it than the guard does."""
        if stale := undo.stale(_in_force):
            self._refuse(stale)
        record = undo.record(self.name, self.fault, self.target, aim, self.ttl_s, self.run_dir)
        try:
            path = undo.write(record)
        except OSError as error:
            self._refuse(f"what it takes to undo it cannot be written down: {error}")
        try:
            guard = Guard(path)
        except (Refused, OSError) as error:
            undo.remove(path)
            self._refuse(error)
        _in_force.add(path)
        return path, guard, record.aim

    def _refuse(self, why: object) -> NoReturn:
        self._note("refused", why=str(why))
        if isinstance(why, Refused):
            raise why
        raise Refused(str(why)) from (why if isinstance(why, Exception) else None)

    def _note(self, kind: str, **detail: Any) -> None:
        """A note that must not stand in the way of mending: on a full disk the run lacks it, and is not believed."""
        with contextlib.suppress(OSError):
            self._journal.note(kind, **detail)

    def _break(self, aim: Aim, signals: "_Counted") -> None:
        detail = {"targets": aim.targets, "radius": aim.radius, "undo": aim.undo}
        self._journal.note("injecting", **detail, arguments=undo.arguments(self.fault))
        self._run("inject", self.fault.inject_limit_s, self.fault.inject, aim, signals)
        evidence = self._run("applied", STEP_LIMIT_S, self.fault.applied, aim, signals)
        if not evidence:
            raise Unproven("it gave no evidence that it was applied")
        self._journal.note("injected", evidence=evidence)

    def _see_guarded(self, guard: Guard) -> None:
        """One that came before the fault was in force took nothing back, whatever it said."""
        if not guard.watches():
            raise Unproven(f"its guard did not stand by while it was injected: {guard.word}")

    def _run(
        self, step: str, limit_s: float, call: Callable[[Target, Mapping[str, Any]], Any], aim: Aim, signals: "_Counted"
    ) -> Any:
        self._step = step
        try:
            with signals.breaking(), limited(limit_s, step):
                return call(self.target, aim.state)
        except OSError as error:
            raise Unproven(f"{step}: {error}") from error

    def _give_up(self, error: BaseException) -> None:
        if isinstance(error, Unproven):
            self._note("unproven", why=_why(error), step=self._step)
        else:
            self._note("refused" if isinstance(error, Refused) else "aborted", why=_why(error))
        assert self._open
        self._take_back(*self._open, seen_guarded=False)

    def _end(self, path: Path, guard: Guard, aim: Aim) -> None:
        trouble = "" if guard.watches() else f"its guard did not stand by to the end: {guard.word}"
        if trouble:
            self._note("unproven", why=trouble, step="hold")
        self._take_back(path, guard, aim)
        if trouble:
            raise Unproven(trouble)

    def _take_back(self, path: Path, guard: Guard, aim: Aim, seen_guarded: bool = True) -> None:
        """By ourselves; else by order to the guard, for what ails this process need not ail that one. A guard that may
        have healed before the fault was in force is not believed."""
        self._open, failure = None, ""
        _in_force.discard(path)
        with undo.held(path):
            if not (seen_guarded and guard.healed):
                failure = self._mended(path, guard, aim)
        if failure and (not guard.watches() or not guard.order()):
            self._note("unproven", why=failure, step="undone")
            raise StillBroken(f"{self.name} is still in force: {failure}; by hand: {aim.undo}; then `harness heal`")
        guard.leave()

    def _mended(self, path: Path, guard: Guard, aim: Aim) -> str:
        """Why it is still in force; nothing when it is gone."""
        self._note("healing")
        try:
            evidence = undo.mend(self.fault, self.target, aim.state)
        except Unproven as error:
            return str(error)
        guard.disarm()
        undo.remove(path)
        self._note("healed", evidence=evidence)
        return ""


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__


class _Counted:
    """Within it SIGINT, SIGTERM and SIGHUP are counted; within `breaking` they also end what goes on."""

    def __init__(self) -> None:
        self.count, self._breaks = 0, False

    def __enter__(self) -> "_Counted":
        self._before = {
            number: signal.signal(number, self._noted) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _noted(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        if self._breaks:
            self._breaks = False  # the second one must not end the undo that the first one began
            raise KeyboardInterrupt(signal.Signals(number).name)

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Raises KeyboardInterrupt at a signal, also at one that came before."""
        if self.count:
            raise KeyboardInterrupt("a signal came while the guard was armed")
        self._breaks = True
        try:
            yield
        finally:
            self._breaks = False
