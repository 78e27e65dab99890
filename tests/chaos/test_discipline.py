"""The order of things around a fault: what is refused before anything is broken, and what is told of the rest."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from scene import TARGET, TOYS
from toy import Toy

from harness.chaos import discipline, undo
from harness.chaos.catalogue import FAULTS
from harness.chaos.discipline import Injection, StillBroken
from harness.chaos.fault import Aim, Refused, Unproven
from harness.log import Log, read_log
from harness.model import Event
from harness.targets import base
from harness.targets.base import Target
from tests.support.waiting import until

Make = Callable[..., Injection]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run in it; the catalogue here has the toy, and a guard's where PYTHONPATH says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(undo.FOLDER, raising=False)
    monkeypatch.setitem(FAULTS, "toy", Toy)
    (tmp_path / "target.yaml").write_text(TARGET)
    (tmp_path / "run.json").write_bytes(orjson.dumps({"origin_monotonic_s": 0.0}))
    return tmp_path


@pytest.fixture
def make(work: Path) -> Make:
    def injection(name: str = "toy", dry_run: bool = False, ttl_s: float = 60, **arguments: Any) -> Injection:
        toy = Toy(**{"path": str(work / "broken"), **arguments})
        log = Log(work / "log.chaos.jsonl")
        return Injection(name, toy, base.load("target.yaml"), log, ttl_s=ttl_s, run_dir=work, dry_run=dry_run)

    return injection


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards know the toy too."""
    monkeypatch.setenv("PYTHONPATH", str(TOYS))


def told(work: Path) -> list[Event]:
    return [entry for entry in read_log(work / "log.chaos.jsonl", []) if isinstance(entry, Event)]


def test_a_dry_run_finds_its_targets_and_changes_nothing(make: Make, work: Path) -> None:
    """No file, no record, no guard, no event; what would be done is told in lines."""
    injection = make(dry_run=True)
    aim = injection.begin()
    injection.hold(60)
    injection.end()
    assert discipline.told("toy", aim) == (
        f"toy would hit {work}/broken",
        "toy would be felt: nobody feels it",
        f"toy would be undone: rm {work}/broken",
    )
    assert not (work / "broken").exists()
    assert not (work / ".harness").exists()
    assert told(work) == []


@pytest.mark.parametrize("found", [Refused("one replica would be left"), OSError("no answer"), Aim((), "", "")])
def test_without_a_target_nothing_is_broken(
    found: Any, make: Make, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that refuses, a stack that does not answer and an empty list of targets are all refusals."""

    def resolve(self: Toy, target: Target) -> Aim:
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr(Toy, "resolve", resolve)
    with pytest.raises(Refused):
        make().begin()
    assert [event.kind for event in told(work)] == ["refused"]
    assert undo.left() == []


def test_a_record_that_cannot_be_written_refuses(make: Make, work: Path) -> None:
    """What could not be taken back after a crash is not broken."""
    (work / ".harness").write_text("a file where the folder should be")
    with pytest.raises(Refused, match="cannot be written down"):
        make().begin()
    assert not (work / "broken").exists()


@pytest.mark.e2e
def test_a_guard_that_cannot_undo_is_not_armed(make: Make, work: Path) -> None:
    """It says why before anything is broken, and the record goes again."""
    with pytest.raises(Refused, match="no guard could be armed; it said: there is no fault toy here"):
        make().begin()
    assert not (work / "broken").exists()
    assert undo.left() == []


@pytest.mark.e2e
@pytest.mark.usefixtures("guarded")
def test_the_events_tell_what_was_done_and_what_shows_it(make: Make, work: Path) -> None:
    """In order, with the aim, the arguments and the evidence; a second end has nothing to do."""
    injection = make()
    injection.begin()
    assert (work / "broken").exists()
    assert len(undo.left()) == 1
    injection.end()
    injection.end()
    assert [(event.kind, event.name) for event in told(work)] == [
        (kind, "toy") for kind in ("injecting", "injected", "healing", "healed")
    ]
    injecting, injected, _, healed = (event.detail for event in told(work))
    assert injecting["targets"] == [f"{work}/broken"]
    assert injecting["undo"] == f"rm {work}/broken"
    assert injecting["arguments"]["path"] == f"{work}/broken"
    assert injected == {"evidence": {"there": True}}
    assert healed == {"evidence": {"there": False}}
    assert all(event.at_s > 0 for event in told(work))
    assert undo.left() == []


@pytest.mark.e2e
@pytest.mark.usefixtures("guarded")
def test_the_undo_is_on_disk_and_under_guard_before_anything_is_broken(
    make: Make, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When inject is called there is a record, and a guard that has said that it is armed."""
    seen: list[Any] = []
    inject, guard = Toy.inject, discipline.Guard

    def watched(record: Path) -> Any:
        armed = guard(record)
        seen.append(armed.watches())
        return armed

    def injecting(self: Toy, target: Target, state: Mapping[str, Any]) -> None:
        seen.append(undo.read(undo.left()[0]).fault)
        inject(self, target, state)

    monkeypatch.setattr(discipline, "Guard", watched)
    monkeypatch.setattr(Toy, "inject", injecting)
    injection = make()
    injection.begin()
    injection.end()
    assert seen == [True, "toy"]
    assert not (work / "broken").exists()


@pytest.mark.e2e
@pytest.mark.usefixtures("guarded")
def test_two_faults_of_one_run_may_be_in_force_together(make: Make, work: Path) -> None:
    """Each has its own record and guard."""
    first, second = make(), make(path=str(work / "another"))
    first.begin()
    second.begin()
    assert len(undo.left()) == 2
    first.end()
    assert (work / "another").exists()
    second.end()
    assert undo.left() == []
    assert not (work / "another").exists()


@pytest.mark.e2e
@pytest.mark.usefixtures("guarded")
def test_an_abort_takes_back_at_once_and_says_why(make: Make, work: Path) -> None:
    """Holding ends when there is enough, and the story says that it was cut short."""
    injection = make()
    injection.begin()
    injection.hold(60, lambda: True)
    injection.abort("the error budget is spent")
    assert [event.kind for event in told(work)] == ["injecting", "injected", "aborted", "healing", "healed"]
    assert told(work)[2].detail == {"why": "the error budget is spent"}


@pytest.mark.e2e
@pytest.mark.usefixtures("guarded")
def test_a_guard_that_came_first_is_told(make: Make, work: Path) -> None:
    """A fault that outlives its time was not in force as long as its experiment believes."""
    injection = make(ttl_s=2.0)
    with pytest.raises(Unproven, match=r"its guard did not stand by .*: healed ttl"):
        injection.begin()
        injection.hold(60)
    assert not (work / "broken").exists()
    assert "unproven" in [event.kind for event in told(work)]


@pytest.mark.e2e
@pytest.mark.usefixtures("guarded")
def test_what_a_guard_healed_before_it_was_broken_is_taken_back(
    make: Make, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that comes into force after its time is over is not left there on its guard's word."""

    def late(self: Toy, target: Target, state: Mapping[str, Any]) -> None:
        until(lambda: not undo.left(), "its guard took back what was not there")
        (work / "broken").touch()

    monkeypatch.setattr(Toy, "inject", late)
    monkeypatch.setattr(Toy, "inject_limit_s", 60.0)
    with pytest.raises(Unproven, match="its guard did not stand by while it was injected: healed ttl"):
        make(ttl_s=0.2).begin()
    assert not (work / "broken").exists()
    assert [event.kind for event in told(work)][-2:] == ["healing", "healed"]


@pytest.mark.e2e
@pytest.mark.usefixtures("guarded")
def test_a_run_is_waited_for_until_its_guards_are_done(make: Make, work: Path) -> None:
    """The conductor judges no run whose faults are still being taken back; others' faults are not its own."""
    injection = make()
    injection.begin()
    waited: list[bool] = []
    undo.await_guards(work / "another run", 60, lambda: bool(waited.append(True)))
    assert not waited
    undo.await_guards(work, 60, lambda: bool(waited) or bool(waited.append(True)))
    assert waited
    injection.end()
    undo.await_guards(work, 60)


@pytest.mark.e2e
@pytest.mark.usefixtures("guarded")
def test_what_the_owner_cannot_undo_its_guard_does_by_order(
    make: Make, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ails one process need not ail the other; who did it is told."""

    def refuse(self: Toy, target: Target, state: Mapping[str, Any]) -> None:
        raise OSError("too many open files")

    injection = make()
    injection.begin()
    monkeypatch.setattr(undo, "PAUSE_S", 0.0)
    monkeypatch.setattr(Toy, "undo", refuse)
    injection.end()
    assert not (work / "broken").exists()
    assert undo.left() == []
    by_guard = [entry for entry in read_log(work / "log.guard-1.jsonl", []) if isinstance(entry, Event)]
    assert [(event.kind, event.detail["why"]) for event in by_guard] == [("healing", "order"), ("healed", "order")]


@pytest.mark.e2e
@pytest.mark.usefixtures("guarded")
def test_nothing_more_is_broken_once_something_could_not_be_taken_back(make: Make, work: Path) -> None:
    """Neither owner nor guard could: the sentence says what to do, and the next fault is refused."""
    injection = make()
    injection.begin()
    (work / "broken.kept").touch()
    with pytest.raises(StillBroken, match=rf"by hand: rm {work}/broken; then `harness heal`"):
        injection.end()
    with pytest.raises(Refused, match="toy was left in force"):
        make(path=str(work / "another")).begin()
    assert not (work / "another").exists()
