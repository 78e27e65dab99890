"""Whatever dies, the fault is gone at once or within its time, and no run with that story can pass."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from signal import SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGSTOP, SIGTERM
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scene import LIMIT_S, Scene

from harness.judge import faults
from harness.model import Judgement
from harness.timeline import Timeline

pytestmark = pytest.mark.e2e

TTL_S = 3.0


def sent(*numbers: signal.Signals) -> Callable[[Scene], None]:
    return lambda scene: scene.send(*numbers)


def held(deed: Callable[[Scene], None]) -> Callable[[Scene], None]:
    def happens(scene: Scene) -> None:
        scene.until_held()
        deed(scene)

    return happens


def midway(deed: Callable[[Scene], None]) -> Callable[[Scene], None]:
    """The file is there, and the owner hangs in the step that made it or looks for it."""

    def happens(scene: Scene) -> None:
        scene.until(scene.file.exists, "the file is there")
        deed(scene)

    return happens


def nothing(scene: Scene) -> None:
    """The fault's own way of going wrong is enough."""


def more_while_undoing(scene: Scene) -> None:
    wait = scene.file.with_name("broken.wait")
    wait.touch()
    scene.send(SIGINT)
    scene.until_event("healing")
    for number in (SIGINT, SIGTERM, SIGHUP):
        scene.send(number)
    scene.until(lambda: pending(scene) == 0, "the signals have arrived")
    assert scene.file.exists()
    wait.unlink()


def pending(scene: Scene) -> int:
    """The signals that wait for the owner, as the kernel's mask."""
    with open(f"/proc/{scene.owner.pid}/status") as file:
        return sum(int(line.split()[1], 16) for line in file if line.startswith(("SigPnd", "ShdPnd")))


def stopped_for_good(scene: Scene) -> None:
    scene.send(SIGSTOP)
    scene.until(lambda: not scene.file.exists(), "the guard's time came", TTL_S + LIMIT_S)
    scene.until(lambda: not scene.guards(), "the guard ended")
    scene.send(SIGKILL)


def group_killed(scene: Scene) -> None:
    os.killpg(scene.owner.pid, SIGKILL)


def guard_killed(scene: Scene) -> None:
    scene.kill_guards()


def guard_terminated(scene: Scene) -> None:
    for pid in scene.guards():
        os.kill(pid, SIGTERM)


def guard_hears_the_terminal(scene: Scene) -> None:
    for pid in scene.guards():
        os.kill(pid, SIGINT)
        os.kill(pid, SIGHUP)
    scene.send(SIGINT)


def guard_and_owner_killed(scene: Scene) -> None:
    scene.send(SIGSTOP)  # so that it cannot notice
    scene.kill_guards()
    scene.send(SIGKILL)
    scene.owner.wait()
    assert scene.file.exists()
    assert len(scene.records()) == 1
    done = scene.harness("heal")
    assert done.returncode == 0, done.stdout


def killed_leaving_a_child(scene: Scene) -> None:
    scene.until(lambda: "child" in scene.said(), "the child is there")
    child = int(scene.said().split("child ")[1].split()[0])
    scene.send(SIGKILL)
    scene.until(lambda: not scene.file.exists(), "the guard saw that its owner is dead")
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, SIGKILL)


@dataclass(frozen=True)
class Row:
    """`by` is who takes the fault back; `told` the event that says why the run is not to be believed."""

    dies: str
    happens: Callable[[Scene], None]
    by: str
    told: str
    says: str = ""
    deed: str = "hold"
    ttl_s: float = 120.0
    fault: dict[str, Any] = field(default_factory=dict)


UNPROVEN = "ended Unproven"
INTERRUPTED = "ended KeyboardInterrupt"
ROWS = [
    Row("nothing", held(nothing), "owner", "", "ended well 0", deed="return"),
    Row("owner: SIGINT", held(sent(SIGINT)), "owner", "aborted", f"{INTERRUPTED} 0"),
    Row("owner: SIGINT, then INT, TERM, HUP", held(more_while_undoing), "owner", "aborted", f"{INTERRUPTED} 3"),
    Row("owner: SIGTERM", held(sent(SIGTERM)), "guard", "aborted"),
    Row("owner: SIGHUP", held(sent(SIGHUP)), "guard", "aborted"),
    Row("owner: SIGQUIT", held(sent(SIGQUIT)), "guard", "aborted"),
    Row("owner: SIGKILL", held(sent(SIGKILL)), "guard", "aborted"),
    Row("owner and its whole group: SIGKILL", held(group_killed), "guard", "aborted"),
    Row("owner: SIGKILL, a child holds the pipe", held(killed_leaving_a_child), "guard", "aborted", deed="fork"),
    Row("owner: SIGSTOP for good", held(stopped_for_good), "guard", "aborted", ttl_s=TTL_S),
    Row("owner: an exception", held(nothing), "owner", "aborted", "ended ZeroDivisionError 0", deed="raise"),
    Row("owner: sys.exit", held(nothing), "owner", "aborted", "ended SystemExit 0", deed="exit"),
    Row("owner: os._exit", held(nothing), "guard", "aborted", deed="exit at once"),
    Row("owner: holds longer than its time", held(nothing), "guard", "unproven", UNPROVEN, ttl_s=TTL_S),
    Row("inject: SIGKILL within", midway(sent(SIGKILL)), "guard", "aborted", fault={"hangs": "inject"}),
    Row("inject: SIGINT within", midway(sent(SIGINT)), "owner", "aborted", INTERRUPTED, fault={"hangs": "inject"}),
    Row("inject: hangs", midway(nothing), "owner", "unproven", UNPROVEN, fault={"hangs": "inject"}),
    Row("inject: connection refused", nothing, "owner", "unproven", UNPROVEN, fault={"raises": "inject"}),
    Row("inject: does nothing", nothing, "owner", "unproven", UNPROVEN, fault={"idle": True}),
    Row("probe: SIGKILL within", midway(sent(SIGKILL)), "guard", "aborted", fault={"hangs": "applied"}),
    Row("probe: SIGTERM within", midway(sent(SIGTERM)), "owner", "aborted", INTERRUPTED, fault={"hangs": "applied"}),
    Row("probe: hangs", midway(nothing), "owner", "unproven", UNPROVEN, fault={"hangs": "applied"}),
    Row("probe: connection refused", nothing, "owner", "unproven", UNPROVEN, fault={"raises": "applied"}),
    Row("probe: gives no evidence", nothing, "owner", "unproven", UNPROVEN, fault={"mute": True}),
    Row("guard: SIGKILL", held(guard_killed), "owner", "unproven", UNPROVEN),
    Row("guard: SIGTERM", held(guard_terminated), "guard", "unproven", UNPROVEN),
    Row("guard: INT and HUP, owner: INT", held(guard_hears_the_terminal), "owner", "aborted", f"{INTERRUPTED} 0"),
    Row("guard and owner: SIGKILL", held(guard_and_owner_killed), "heal", ""),
    Row("disk: full before", nothing, "nobody", "", "ended Refused 0", deed="no room"),
    Row("disk: full while in force", held(nothing), "owner", "", "held", deed="fill the disk"),
]  # fmt: skip


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, str, str]]]:
    """Prints the rows that held, when all were tried."""
    rows: list[tuple[str, str, str]] = []
    yield rows
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n\n" + "\n".join(f"{dies:42}{by:12}{told}" for dies, by, told in [HEAD, *rows]))


FULL = ("no room", "fill the disk")
HEAD = ("what dies, and how", "undone by", "so the run is not believed: ")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.dies)
def test_whatever_dies_the_fault_is_gone(row: Row, scene: Scene, table: list[tuple[str, str, str]]) -> None:
    """The fault is gone, nothing of it is left, who took it back is known, and only an undisturbed one is believed."""
    scene.start(row.deed, row.ttl_s, **row.fault)
    row.happens(scene)
    scene.until_over()
    assert not scene.file.exists()
    assert not scene.records()
    assert row.says in scene.said(), scene.said()
    assert judged(scene) == (Judgement.PASS if row.dies == "nothing" else Judgement.INVALID), scene.events()
    assert not row.told or row.told in scene.kinds(), scene.events()
    if row.deed not in FULL:  # it could not be written
        assert healed_by(scene) == row.by, scene.events()
    table.append((row.dies, row.by, "it is" if row.dies == "nothing" else row.told or "its story is not whole"))


def judged(scene: Scene) -> Judgement:
    """What the judge says of the fault, from the events alone: whatever else the run shows, it cannot be better."""
    seen = SimpleNamespace(events=scene.events(), run={"chaos": [{"experiment": "toy.yaml"}]})
    return faults.finding(cast(Timeline, seen)).verdict


def healed_by(scene: Scene) -> str:
    healed = [event for event in scene.events() if event.kind == "healed"]
    assert len(healed) <= 1
    return "heal" if not healed else "guard" if "why" in healed[0].detail else "owner"
