"""The child of a run that plays its experiments: in turn, and no further once it was told to stop."""

import os
import signal
import subprocess
import sys

import pytest
import yaml
from scene import Scene

from harness import parent

pytestmark = pytest.mark.e2e

DOOR = {"type": "python", "module": "harness.chaos.experiment"}
SCENARIO = """
claim: Two experiments in turn.
traffic:
  arrivals: {poisson: {rate: 1/s}}
  warm_up: 1s
  for: 10s
  prompts: {mix: {short: {share: 100%, tokens: 16..64}}, answer_tokens: {mean: 8, at_most: 16}}
chaos:
  - {experiment: experiment-0.yaml, at: 0s}
  - {experiment: experiment-1.yaml, at: 0s}
gates:
  - success: {at_least: 99%}
"""


class Player:
    """The child at work in a scene, on two experiments that break the toy."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.wait = scene.file.with_name("broken.wait")
        (scene.run_dir / "target.yaml").write_text((scene.work / "target.yaml").read_text())
        (scene.run_dir / "scenario.yaml").write_text(SCENARIO)
        self.write()

    def write(self, lasts: str = "1s") -> None:
        """The experiments; they leave the fault in force that long."""
        inject = {"func": "inject", "arguments": {"fault": "toy", "path": str(self.scene.file)}}
        hold, heal = {"func": "hold", "arguments": {"lasts": lasts}}, {"func": "heal"}
        method = [
            {"type": "action", "name": "break", "provider": DOOR | inject},
            {"type": "action", "name": "hold", "provider": DOOR | hold},
        ]
        written = {"title": "toy", "description": "toy", "method": method}
        written["rollbacks"] = [{"type": "action", "name": "heal", "provider": DOOR | heal}]
        for number in range(2):
            (self.scene.run_dir / f"experiment-{number}.yaml").write_text(yaml.safe_dump(written))

    def start(self) -> None:
        command = [sys.executable, "-m", "harness.chaos", str(self.scene.run_dir)]
        environment = self.scene.environment | {parent.CONDUCTOR: str(os.getpid())}
        with open(self.scene.work / "owner-0.out", "wb") as out:
            self.scene.owners.append(
                subprocess.Popen(
                    command,
                    cwd=self.scene.work,
                    env=environment,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    text=True,
                )
            )

    def stop(self) -> None:
        """Tell it to, and see to it that it ends with nothing broken and the second experiment never begun."""
        self.scene.send(signal.SIGTERM)
        self.wait.unlink(missing_ok=True)
        self.scene.until_over()
        assert self.scene.owner.returncode == 0, self.scene.said()
        assert self.scene.kinds().count("injecting") == 1
        assert not self.scene.file.exists() and not self.scene.records()


@pytest.fixture
def player(scene: Scene) -> Player:
    return Player(scene)


def test_experiments_are_played_in_turn(player: Player) -> None:
    """Each is broken and mended before the next, and Chaos Toolkit's journal of each is kept."""
    player.start()
    player.scene.until_over()
    once = ["injecting", "injected", "healing", "healed"]
    assert player.scene.kinds() == ["ready", *once, *once], player.scene.said()
    assert (player.scene.run_dir / "experiment-1.journal.json").exists()


def test_stopped_while_it_holds(player: Player) -> None:
    """What is in force is taken back at once."""
    player.write(lasts="10m")
    player.start()
    player.scene.until_event("injected")
    player.stop()
    assert "aborted" in player.scene.kinds()


def test_stopped_while_it_mends(player: Player) -> None:
    """Mending is not disturbed, and the signal is not forgotten after it."""
    player.wait.touch()
    player.start()
    player.scene.until_event("healing")
    player.stop()
    assert player.scene.kinds()[-1] == "healed"
