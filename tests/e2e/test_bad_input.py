"""The user's mistakes: exit 2 with one sentence, and nothing is started, sent or left behind."""

import resource
import socket
from pathlib import Path

import psutil
import pytest
from running import HARNESS, ROOT, harness, process, url_target, verdict

from harness import timeline
from tests.support.waiting import until

GOOD = (ROOT / "scenarios/smoke.yaml").read_text()


def refused(*arguments: str, cwd: Path) -> str:
    done = harness(*arguments, cwd=cwd, limit_s=60)
    said = (done.stdout + done.stderr).strip()
    assert done.returncode == 2, said
    assert len(said.splitlines()) == 1, said
    assert "Traceback" not in said
    return said


def test_an_unreachable_target_is_named(tmp_path: Path) -> None:
    """Nothing listens there: the sentence names the URL."""
    target = url_target(tmp_path, "http://127.0.0.1:9")
    said = refused("run", str(ROOT / "scenarios/smoke.yaml"), "--target", str(target), cwd=tmp_path)
    assert "127.0.0.1:9" in said
    assert not list((tmp_path / "runs").glob("2*")), "no run directory"


def test_a_wrong_model_name_is_told_with_what_is_served(tmp_path: Path, engine: tuple[str, int]) -> None:
    """The target serves another model: the sentence names both."""
    target = url_target(tmp_path, engine[0])
    target.write_text(target.read_text().replace("model: tiny", "model: tinny"))
    said = refused("run", str(ROOT / "scenarios/smoke.yaml"), "--target", str(target), cwd=tmp_path)
    assert "tinny" in said
    assert "tiny" in said.replace("tinny", "")


def test_a_missing_tokenizer_is_named(tmp_path: Path, engine: tuple[str, int]) -> None:
    """Prompt lengths are measured with the model's tokenizer: without it nothing is planned."""
    target = url_target(tmp_path, engine[0])
    target.write_text(target.read_text().replace(str(ROOT / ".cache/tiny"), "no/such/place"))
    assert "no/such/place" in refused("run", str(ROOT / "scenarios/smoke.yaml"), "--target", str(target), cwd=tmp_path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (("seed:", "sed:"), "sed"),
        (("/s}", "}"), "rate"),
        (("gates:", "gates: []\nother:"), "gates"),
    ],
)
def test_a_mistake_in_a_scenario_is_told_with_file_and_line(tmp_path: Path, edit: tuple[str, str], words: str) -> None:
    """File, line and one sentence, whatever the mistake."""
    path = tmp_path / "mine.yaml"
    assert edit[0] in GOOD
    path.write_text(GOOD.replace(edit[0], edit[1], 1))
    said = refused(
        "plan",
        str(path),
        "-o",
        str(tmp_path / "p"),
        "--target",
        str(ROOT / "reference_stack/local/target.yaml"),
        cwd=tmp_path,
    )
    assert f"{path}:" in said
    assert words in said


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    """The stack refuses to start on a port that somebody holds, before it starts anything."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        target = tmp_path / "target.yaml"
        text = (ROOT / "reference_stack/local/target.yaml").read_text()
        target.write_text(text.replace("http://127.0.0.1:8080", f"http://127.0.0.1:{port}"))
        said = refused("run", "scenarios/smoke.yaml", "--target", str(target), cwd=ROOT)
    assert str(port) in said


def test_a_full_disk_is_said_and_truncates_nothing(tmp_path: Path, engine: tuple[str, int]) -> None:
    """When the disk takes no more the run ends INVALID with a clear error, and all that was written is readable."""
    target = url_target(tmp_path, engine[0])
    run = [HARNESS, "run", str(ROOT / "scenarios/smoke.yaml"), "--target", str(target)]
    latest = tmp_path / "runs" / "latest"
    with process(run, cwd=tmp_path) as conductor:
        until(lambda: any(p.stat().st_size > 2000 for p in latest.glob("log.player-*.bin")), "observations", 60)
        player = next(p for p in psutil.Process(conductor.pid).children() if "locust" in " ".join(p.cmdline()))
        full = max(path.stat().st_size for path in latest.glob("log.player-*.bin")) + 100
        player.rlimit(resource.RLIMIT_FSIZE, (full, full))
        said, _ = conductor.communicate(timeout=90)
    assert conductor.returncode == 3, said
    told = verdict(latest)
    assert told["verdict"] == "INVALID"
    assert "File too large" in str(told["why"]) + str(told["believed"]), said
    assert timeline.read(latest).seen.any()
