"""Undo records: written for good, read whatever is in them, and mended a few times over."""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from scene import TARGET
from toy import Toy

from harness import processes
from harness.chaos import undo
from harness.chaos.catalogue import FAULTS
from harness.chaos.fault import Unproven
from harness.targets import base
from harness.targets.base import Target

Made = Callable[..., undo.Record]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target, in a working directory whose records are its own and whose catalogue has the toy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(undo.FOLDER, raising=False)
    monkeypatch.setitem(FAULTS, "toy", Toy)
    monkeypatch.setattr(undo, "PAUSE_S", 0.0)
    (tmp_path / "target.yaml").write_text(TARGET)
    return base.load("target.yaml")


@pytest.fixture
def made(target: Target) -> Made:
    def make(toy: Toy | None = None, **changes: Any) -> undo.Record:
        toy = toy or Toy(path=str(target.path.absolute().with_name("broken")))
        return dataclasses.replace(undo.record("toy", toy, target, toy.resolve(target), 60, None), **changes)

    return make


def test_a_record_gives_back_the_fault_its_aim_and_its_target(made: Made, target: Target) -> None:
    """What another process reads is what this one wrote."""
    toy = Toy(path=str(Path("broken").absolute()), hangs="applied")
    path = undo.write(made(toy))
    found = undo.read(path)
    fault, its_target = found.revived()
    assert fault == toy
    assert its_target.url == target.url
    assert found.aim == toy.resolve(target)
    assert found.owner_lives
    assert undo.left() == [path]
    undo.remove(path)
    assert undo.left() == []


def test_a_record_and_its_directory_are_synced(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss neither the file nor its name may be missing."""
    synced: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), sync(fd)))
    path = undo.write(made())
    assert synced[0].endswith(f".{path.name}.part")
    assert synced[1:] == [str(path.parent), str(path.parent.parent), str(path.parent.parent.parent)]


def test_a_fault_that_json_cannot_hold_is_found_before_anything_is_broken(made: Made) -> None:
    """A guard would undo another fault than the one that was injected."""
    with pytest.raises(TypeError, match="cannot be made again"):
        made(Toy(path="broken", hangs=("a", "tuple")))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"fault": "toy", "aim": 3}', '{"fault": "toy"'])
def test_a_damaged_record_is_told(text: str, made: Made) -> None:
    """It is no reason to believe that nothing is broken: nothing is injected, and healing names it."""
    path = undo.write(made())
    path.write_text(text)
    with pytest.raises(ValueError, match="is no undo record"):
        undo.read(path)
    assert "is no undo record" in undo.stale()
    told: list[str] = []
    assert undo.heal(told.append) == 1
    assert path.name in told[0]


def test_what_is_stale_depends_on_who_owns_it(made: Made) -> None:
    """Faults that are ours may be in force together; those of the living, of the dead, and what we gave up may not."""
    ours = undo.write(made())
    assert undo.stale([ours]) == ""
    assert "was left in force" in undo.stale()
    undo.remove(ours)
    parent = os.getppid()
    theirs = undo.write(made(pid=parent, started=processes.started(parent)))
    assert "in force in a run that goes on" in undo.stale()
    undo.remove(theirs)
    undo.write(made(boot_id="another boot"))
    assert "take it back with `harness heal`" in undo.stale()


def test_what_is_in_force_in_a_run_that_goes_on_is_left_to_it(made: Made) -> None:
    """Its owner believes in it; healing says whom to stop."""
    undo.write(made())
    told: list[str] = []
    assert undo.heal(told.append) == 1
    assert f"pid {os.getpid()}" in told[0]
    assert len(undo.left()) == 1


def test_healing_takes_back_the_newest_first_and_all_of_them(made: Made, target: Target) -> None:
    """One that cannot be taken back, or is unknown here, keeps nobody else from it; what to do by hand is told."""
    toys = [Toy(path=str(Path(name).absolute())) for name in ("first", "second", "third")]
    for toy in toys:
        undo.write(made(toy, pid=1, started=0, fault="alien" if toy is toys[1] else "toy"))
        Path(toy.path).touch()
    told: list[str] = []
    assert undo.heal(told.append) == 1
    begun = [line for line in told if "taking it back from" in line]
    assert [line.rpartition("/")[2].partition(";")[0] for line in begun] == ["third", "second", "first"]
    assert f"alien: by hand: rm {toys[1].path}; then `harness heal` again" in told
    assert [Path(toy.path).exists() for toy in toys] == [False, True, False]
    assert len(undo.left()) == 1


def test_mending_tries_again_and_then_says_what_it_met(target: Target, tmp_path: Path) -> None:
    """A stack that does not answer at once is asked again, a bounded number of times."""
    tries: list[int] = []

    class Stubborn(Toy):
        def undo(self, target: Target, state: Mapping[str, Any]) -> None:
            tries.append(len(tries))
            if len(tries) < self.at:
                raise ConnectionRefusedError("no answer")

        at = 3

    assert undo.mend(Stubborn(path="none"), target, {"path": "none"}) == {"there": False}
    assert len(tries) == 3
    tries.clear()
    Stubborn.at = 4
    with pytest.raises(Unproven, match="not undone in 3 tries: no answer"):
        undo.mend(Stubborn(path="none"), target, {"path": "none"})


def test_mending_without_evidence_is_not_mended(target: Target) -> None:
    """A fault that says nothing of its end has not ended."""

    class Silent(Toy):
        def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
            return {}

    with pytest.raises(Unproven, match="it gave no evidence"):
        undo.mend(Silent(path="none"), target, {"path": "none"})


def test_an_undo_that_hangs_is_ended(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every try has its limit."""
    monkeypatch.setattr(undo, "UNDO_LIMIT_S", 0.02)

    class Hanging(Toy):
        def undo(self, target: Target, state: Mapping[str, Any]) -> None:
            time.sleep(60)

    with pytest.raises(Unproven, match="undo did not end within"):
        undo.mend(Hanging(path="none"), target, {"path": "none"})


def test_one_who_hangs_over_a_record_is_not_waited_for_for_ever(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once undo the same thing twice; nobody at all would be worse."""
    monkeypatch.setattr(undo, "LOCK_LIMIT_S", 0.05)
    path = undo.write(made())
    with undo.held(path), undo.held(path):
        assert path.exists()


def test_a_record_is_readable_by_people(made: Made) -> None:
    """Whoever finds it after a crash sees what was broken and how to take it back."""
    value = orjson.loads(undo.write(made()).read_bytes())
    assert value["fault"] == "toy"
    assert value["aim"]["undo"].startswith("rm ")
    assert b"\n" in undo.left()[0].read_bytes()
