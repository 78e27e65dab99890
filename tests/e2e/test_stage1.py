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
from running import HARNESS, ROOT, harness, process, processes_of, until, verdict

pytestmark = pytest.mark.usefixtures("stack")
LATEST = ROOT / "runs" / "latest"


def test_smoke_passes_and_its_verdict_can_be_verified(tmp_path: Path) -> None:
    """A healthy stack passes the smoke scenario; its run directory verifies, and one flipped byte is named."""
    done = harness("run", "scenarios/smoke.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
    assert "SIMULATED" in done.stdout
    run_dir = LATEST.resolve()
    assert verdict(run_dir)["verdict"] == "PASS"
    assert {"report.md", "junit.xml"} <= {path.name for path in run_dir.iterdir()}
    assert harness("verify", str(run_dir)).returncode == 0

    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    log = next(copy.glob("log.player-*.bin"))
    flipped = bytearray(log.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    log.write_bytes(flipped)
    told = harness("verify", str(copy))
    assert told.returncode == 3
    assert log.name in told.stdout


def test_every_bad_request_is_refused_as_it_should_be() -> None:
    """The report's table shows each kind of bad request with the answer it got; no good one is refused (GATE-6)."""
    table = verdict(LATEST.resolve())["tables"]["rejections"]  # type: ignore[index]
    assert table, "the smoke scenario sends bad requests"
    for kind, row in table.items():
        assert row["n"] == row["right"] > 0, (kind, row)


def test_overload_fails() -> None:
    """A load that the stack cannot carry ends FAIL with exit 1, believed: the player itself was on time."""
    done = harness("run", "scenarios/load/overload.yaml")
    assert done.returncode == 1, done.stdout + done.stderr
    said = verdict(LATEST.resolve())
    assert said["verdict"] == "FAIL"
    assert {finding["verdict"] for finding in said["believed"]} == {"PASS"}  # type: ignore[attr-defined]


@contextmanager
def burners(player: psutil.Process) -> Iterator[None]:
    """The player's processes share one core with forty burners, each in a session of its own: a fortieth is left."""
    for one in (player, *player.children(recursive=True)):
        os.sched_setaffinity(one.pid, {0})
    with ExitStack() as running:
        for _ in range(40):
            burner = running.enter_context(process(["sh", "-c", "while :; do :; done"]))
            os.sched_setaffinity(burner.pid, {0})
        yield


def test_a_starved_player_accuses_nobody() -> None:
    """The same overload seen by a client that was starved of its core is INVALID with exit 3, not FAIL."""
    with process([HARNESS, "run", "scenarios/load/overload.yaml"]) as conductor:
        before = LATEST.resolve()
        until(lambda: LATEST.resolve() != before and (LATEST / "player.out").exists(), 60, "the run began")
        until(lambda: b"origin" in (LATEST / "log.conductor.jsonl").read_bytes(), 60, "the origin is set")
        player = next(p for p in psutil.Process(conductor.pid).children() if "locust" in " ".join(p.cmdline()))
        with burners(player):
            said, _ = conductor.communicate(timeout=240)
    assert conductor.returncode == 3, said
    assert verdict(LATEST.resolve())["verdict"] == "INVALID"


def begun(scenario: str = "scenarios/smoke.yaml") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    before = LATEST.resolve()
    with process([HARNESS, "run", scenario]) as conductor:
        until(lambda: LATEST.resolve() != before, 60, "a new run directory")
        run_dir = LATEST.resolve()
        until(
            lambda: any(path.stat().st_size > 2000 for path in run_dir.glob("log.player-*.bin")),
            60,
            "the first observations are on disk",
        )
        yield conductor, run_dir


started = contextmanager(begun)


def test_ctrl_c_keeps_every_record() -> None:
    """Ctrl-C stops the sending, keeps all records, and ends INVALID "interrupted" with exit 130."""
    with started() as (conductor, run_dir):
        conductor.send_signal(signal.SIGINT)
        said, _ = conductor.communicate(timeout=60)
    assert conductor.returncode == 130, said
    told = verdict(run_dir)
    assert told["verdict"] == "INVALID"
    assert "interrupted" in str(told["why"])
    until(lambda: not processes_of(str(run_dir)), 20, "no child is left")


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
        until(lambda: not processes_of(str(run_dir)), 30, "the children stop by themselves")
        judged = harness("judge", str(run_dir))
    assert judged.returncode == 3, judged.stdout
    told = verdict(run_dir)
    assert told["verdict"] == "INVALID"
    ends = [count for counts in told["tables"]["outcomes"].values() for count in counts.values()]  # type: ignore[index]
    assert sum(ends) > 0
    assert "no observation" in str(told["believed"])


def test_stage_1_writes_one_verdict_over_its_runs() -> None:
    """`--stage 1` leaves runs/latest-stage1 with one verdict and the way to each run."""
    done = harness("run", "scenarios/smoke.yaml", "--stage", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    stage = (ROOT / "runs" / "latest-stage1").resolve()
    told = verdict(stage)
    assert told["verdict"] == "PASS"
    for run in told["provenance"]["runs"]:  # type: ignore[index]
        assert (stage / run / "verdict.json").exists()


def test_stack_down_leaves_no_process() -> None:
    """`harness stack down` ends everything that was started, and can be said twice."""
    assert harness("stack", "down").returncode == 0
    until(lambda: not processes_of(f"HARNESS_STACK={ROOT / '.stack'}"), 20, "no process of the stack is left")
    assert harness("stack", "down").returncode == 0
    assert harness("stack", "up").returncode == 0
