"""`harness heal`: what everything else left behind."""

from pathlib import Path
from signal import SIGKILL, SIGSTOP

import pytest
from scene import Scene

from harness import run
from harness.model import EXIT_UNSAFE, UsageError
from harness.report.panel import LivePanel

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]


def leave_behind(scene: Scene, **fault: str) -> None:
    """The owner and the guard both die while the fault is in force."""
    scene.start(**fault)
    scene.until_held()
    scene.send(SIGSTOP)
    scene.kill_guards()
    scene.send(SIGKILL)
    scene.owner.wait()
    assert scene.file.exists()


def test_heal_says_what_it_undoes_and_then_that_there_is_nothing(scene: Scene) -> None:
    """Line by line, with the evidence; the second call has nothing to do."""
    leave_behind(scene)
    first, second = scene.harness("heal"), scene.harness("heal")
    assert first.returncode == 0, first.stdout
    assert first.stdout.splitlines() == [
        f"toy: taking it back from {scene.file}; it was left by pid {scene.owner.pid} of {scene.run_dir}",
        'toy: gone, {"there":false}',
    ]
    assert not scene.file.exists()
    assert not scene.records()
    assert (second.returncode, second.stdout) == (0, "nothing to heal\n")


def test_what_cannot_be_undone_is_told_with_the_command_and_stays_on_record(scene: Scene) -> None:
    """Exit code 5, as often as it is tried, until it can be; doctor mentions it."""
    leave_behind(scene)
    kept = scene.file.with_name("broken.kept")
    kept.touch()
    for _ in range(2):
        done = scene.harness("heal")
        assert done.returncode == EXIT_UNSAFE
        assert f"toy: STILL THERE, not undone in 3 tries: {scene.file} is kept" in done.stdout
        assert f"toy: by hand: rm {scene.file}; then `harness heal` again" in done.stdout
        assert len(scene.records()) == 1
    assert "no   no fault left in force: `harness heal` takes it back" in scene.harness("doctor").stdout
    kept.unlink()
    assert scene.harness("heal").returncode == 0
    assert not scene.file.exists()


def test_nothing_is_injected_over_what_was_left(scene: Scene) -> None:
    """The next run is refused with what to do."""
    leave_behind(scene)
    scene.start(file=scene.file.with_name("another"))
    scene.until_over()
    assert "ended Refused" in scene.said()
    assert "take it back with `harness heal`" in scene.said()
    assert not scene.file.with_name("another").exists()
    assert scene.kinds()[-1] == "refused"


def test_two_runs_do_not_break_at_once(scene: Scene) -> None:
    """The second is refused and names the first, whose fault goes on; healing leaves it alone too."""
    scene.start()
    scene.until_held()
    first = scene.owner
    scene.start(file=scene.file.with_name("another"))
    scene.until(lambda: scene.owner.poll() is not None, "the second ended")
    assert f"toy is in force in a run that goes on (pid {first.pid} of {scene.run_dir})" in scene.said()
    done = scene.harness("heal")
    assert (done.returncode, scene.file.exists()) == (EXIT_UNSAFE, True)
    assert "stop that run" in done.stdout


def test_heal_waits_for_a_guard_at_work(scene: Scene) -> None:
    """They do not undo at the same time: the guard's turn comes first, and there is nothing left to do."""
    scene.start()
    scene.until_held()
    wait = scene.file.with_name("broken.wait")
    wait.touch()
    scene.send(SIGKILL)
    scene.owner.wait()
    scene.until_event("healing")
    healing = scene.begin_harness("heal")
    scene.until(lambda: "taking it back" in (healing.stdout.readline() if healing.stdout else ""), "healing began")
    assert healing.poll() is None
    wait.unlink()
    rest, _ = healing.communicate(timeout=30)
    assert (healing.returncode, rest) == (0, "toy: gone, taken back by its guard\n")
    assert scene.kinds().count("healed") == 1


def test_a_fault_that_nobody_can_take_back_is_loud(scene: Scene) -> None:
    """Owner and guard both try and fail: the owner says how to do it by hand, and the record stays."""
    kept = scene.file.with_name("broken.kept")
    kept.touch()
    scene.start("return")
    scene.until_over()
    assert "ended StillBroken" in scene.said()
    assert f"by hand: rm {scene.file}; then `harness heal`" in scene.said()
    assert scene.owner.returncode == 1
    assert [event.detail["step"] for event in scene.events() if event.kind == "unproven"] == ["undone", "undone"]
    assert len(scene.records()) == 1
    kept.unlink()
    assert scene.harness("heal").returncode == 0


def test_a_guard_that_fails_says_so_and_leaves_the_record(scene: Scene) -> None:
    """When the owner is dead nobody but the log hears it, and `harness heal`."""
    kept = scene.file.with_name("broken.kept")
    kept.touch()
    scene.start()
    scene.until_held()
    scene.send(SIGKILL)
    scene.owner.wait()
    scene.until(lambda: not scene.guards(), "the guard gave up")
    told = scene.events()[-1]
    assert (told.kind, told.detail["step"]) == ("unproven", "undone")
    assert f"by hand: rm {scene.file}" in told.detail["why"]
    assert len(scene.records()) == 1


def test_a_run_is_refused_over_what_was_left(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the stack is touched, with what to do: its users would meet a fault that is none of this run's."""
    leave_behind(scene)
    monkeypatch.setenv("HARNESS_UNDO_DIR", scene.environment["HARNESS_UNDO_DIR"])
    order = run.Order((ROOT / "scenarios/smoke.yaml",), str(scene.work / "target.yaml"), runs=scene.work / "runs")
    with pytest.raises(UsageError, match="take it back with `harness heal`"):
        run.run(order, LivePanel, lambda *_: None)
    assert not (scene.work / "runs/latest").exists()
