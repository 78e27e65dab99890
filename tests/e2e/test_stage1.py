"""Stage 1 end to end on the local stack with the simulated engine: the verdicts a team would act on."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from running import HARNESS, ROOT, harness, origin_is_set, process, processes_of, run_dir_of, verdict

from harness import timeline
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("stack")
LATEST = ROOT / "runs" / "latest"


@pytest.fixture(scope="module")
def smoke(stack: None) -> tuple[str, Path]:
    """What a smoke run said, and its run directory."""
    done = harness("run", "scenarios/smoke.yaml", "--stage", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, run_dir_of(done.stdout)


def test_a_healthy_stack_passes(smoke: tuple[str, Path]) -> None:
    """A healthy stack passes the smoke scenario, and whoever reads it is told that it was simulated."""
    said, run_dir = smoke
    assert "PASS" in said
    assert "SIMULATED" in said
    assert verdict(run_dir)["verdict"] == "PASS"
    assert {"report.md", "junit.xml"} <= {path.name for path in run_dir.iterdir()}


def test_a_verdict_can_be_verified(smoke: tuple[str, Path], tmp_path: Path) -> None:
    """A run directory verifies to the byte; one flipped byte in any file is named with the file."""
    run_dir = smoke[1]
    before = (run_dir / "verdict.json").read_bytes()
    assert harness("verify", str(run_dir)).returncode == 0
    assert harness("judge", str(run_dir)).returncode == 0
    assert (run_dir / "verdict.json").read_bytes() == before
    for name in ("log.player-0.bin", "plan.jsonl", "corpus.bin", "log.watch.jsonl"):
        copy = tmp_path / name
        shutil.copytree(run_dir, copy)
        flipped = bytearray((copy / name).read_bytes())
        flipped[len(flipped) // 2] ^= 1
        (copy / name).write_bytes(flipped)
        told = harness("verify", str(copy))
        assert told.returncode == 3
        assert name in told.stdout


def test_every_bad_request_is_refused_as_it_should_be(smoke: tuple[str, Path]) -> None:
    """The report's table shows each kind of bad request with the answer it got; no good one is refused (GATE-6)."""
    table = verdict(smoke[1])["tables"]["rejections"]  # type: ignore[index]
    assert len(table) == 8
    for kind, row in table.items():
        assert row["n"] == row["right"] > 0, (kind, row)


def test_a_stage_has_one_verdict_over_its_runs(smoke: tuple[str, Path]) -> None:
    """`--stage 1` leaves runs/latest-stage1 with one verdict, the way to each run, and something to verify."""
    stage = (ROOT / "runs" / "latest-stage1").resolve()
    told = verdict(stage)
    assert told["verdict"] == "PASS"
    for run in told["provenance"]["runs"]:  # type: ignore[index]
        assert (stage / run / "verdict.json").exists()
    assert harness("verify", str(stage)).returncode == 0


def test_overload_fails() -> None:
    """A load that the stack cannot carry ends FAIL with exit 1, believed: the player itself was on time."""
    done = harness("run", "scenarios/load/overload.yaml")
    assert done.returncode == 1, done.stdout + done.stderr
    said = verdict(run_dir_of(done.stdout))
    assert said["verdict"] == "FAIL"
    assert {finding["verdict"] for finding in said["believed"]} == {"PASS"}  # type: ignore[attr-defined]


@contextmanager
def burners(player: psutil.Process) -> Iterator[None]:
    """The player's processes share one core with forty burners as eager as they, each in a session of its own."""
    weight = Path(f"/proc/{player.pid}/autogroup").read_text().split()[-1]
    for one in (player, *player.children(recursive=True)):
        os.sched_setaffinity(one.pid, {0})
    with ExitStack() as running:
        for _ in range(40):
            burner = running.enter_context(process(["sh", "-c", "while :; do :; done"]))
            os.sched_setaffinity(burner.pid, {0})
            Path(f"/proc/{burner.pid}/autogroup").write_text(weight)
        yield


def test_a_starved_player_accuses_nobody() -> None:
    """The same overload seen by a client that was starved of its core is INVALID with exit 3, not FAIL."""
    with process([HARNESS, "run", "scenarios/load/overload.yaml"]) as conductor:
        before = LATEST.resolve()
        until(lambda: LATEST.resolve() != before and origin_is_set(LATEST), "the origin is set", 60)
        player = next(p for p in psutil.Process(conductor.pid).children() if "locust" in " ".join(p.cmdline()))
        with burners(player):
            said, _ = conductor.communicate(timeout=240)
    assert conductor.returncode == 3, said
    assert verdict(LATEST.resolve())["verdict"] == "INVALID"


def begun(scenario: str = "scenarios/smoke.yaml") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    before = LATEST.resolve()
    with process([HARNESS, "run", scenario]) as conductor:
        until(lambda: LATEST.resolve() != before, "a new run directory", 60)
        run_dir = LATEST.resolve()
        until(
            lambda: any(path.stat().st_size > 2000 for path in run_dir.glob("log.player-*.bin")),
            "the first observations are on disk",
            60,
        )
        yield conductor, run_dir


started = contextmanager(begun)


def test_ctrl_c_keeps_every_record() -> None:
    """Ctrl-C stops the sending, keeps all records, and ends INVALID "interrupted" with exit 130."""
    with started() as (conductor, run_dir):
        conductor.send_signal(signal.SIGINT)
        said, _ = conductor.communicate(timeout=60)
    assert conductor.returncode == 130, said
    told, seen = verdict(run_dir), timeline.read(run_dir)
    assert told["verdict"] == "INVALID"
    assert "interrupted" in str(told["why"])
    stopped = next(event for event in seen.events if event.kind == "stopped" and event.name != "watch")
    assert seen.seen.sum() == stopped.detail["sent"] > 0
    until(lambda: not processes_of(str(run_dir)), "no child is left", 20)


@pytest.mark.parametrize("victim", ["player", "watch"])
def test_a_killed_child_leaves_a_readable_run(victim: str) -> None:
    """kill -9 of a child ends the run INVALID, says which child, and keeps what was written."""
    word = "locust" if victim == "player" else "harness.watch"
    with started() as (conductor, run_dir):
        child = next(p for p in psutil.Process(conductor.pid).children() if word in " ".join(p.cmdline()))
        child.kill()
        said, _ = conductor.communicate(timeout=60)
    assert conductor.returncode == 3, said
    told = verdict(run_dir)
    assert told["verdict"] == "INVALID"
    assert victim in str(told["believed"])


def test_a_killed_conductor_leaves_a_readable_run() -> None:
    """kill -9 of the conductor: INVALID at once, judged INVALID later from all that was written; no process is left."""
    with started() as (conductor, run_dir):
        conductor.kill()
        conductor.wait()
        assert verdict(run_dir)["verdict"] == "INVALID"
        until(lambda: not processes_of(str(run_dir)), "the children stop by themselves", 30)
        judged = harness("judge", str(run_dir))
    assert judged.returncode == 3, judged.stdout
    told = verdict(run_dir)
    assert told["verdict"] == "INVALID"
    ends = [count for counts in told["tables"]["outcomes"].values() for count in counts.values()]  # type: ignore[index]
    assert sum(ends) > 0
    assert "no observation" in str(told["believed"])


def test_an_earlier_pass_does_not_outlive_a_killed_stage(smoke: tuple[str, Path]) -> None:
    """While a stage runs, and after it was killed, runs/latest-stage1 says INVALID, whatever the last one said."""
    stage = ROOT / "runs" / "latest-stage1"
    before = stage.resolve()
    with process([HARNESS, "run", "scenarios/smoke.yaml", "--stage", "1"]) as conductor:
        until(lambda: stage.resolve() != before, "the stage began", 60)
        conductor.kill()
        conductor.wait()
        assert verdict(stage)["verdict"] == "INVALID"
        until(lambda: not processes_of("HARNESS_CONDUCTOR=" + str(conductor.pid)), "the children stop", 90)


def test_a_second_run_is_refused_while_one_is_going_on() -> None:
    """Two runs at once would judge each other's traffic: the second is told whose turn it is, and the first goes on."""
    with started() as (conductor, _):
        second = harness("run", "scenarios/smoke.yaml")
        assert second.returncode == 2
        assert str(conductor.pid) in second.stderr
        assert conductor.poll() is None


def test_stack_down_leaves_no_process() -> None:
    """`harness stack down` ends everything that was started, and can be said twice."""
    assert harness("stack", "down").returncode == 0
    until(lambda: not processes_of(f"HARNESS_STACK={ROOT / '.stack'}"), "no process of the stack is left", 20)
    assert harness("stack", "down").returncode == 0
    assert harness("stack", "up").returncode == 0
