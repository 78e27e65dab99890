"""How the player is started: who starts the workers, and what listens where."""

from itertools import pairwise
from pathlib import Path

from harness.drivers.process import command, environment

RUN = Path("runs/x")


def test_one_worker_needs_no_master() -> None:
    """A single player is one process that listens nowhere."""
    words = command(RUN, 1)
    assert "--headless" in words
    assert not {"--processes", "--master", "--web-port"} & set(words)


def test_its_own_workers_meet_on_this_machine_only() -> None:
    """The port that master and workers talk on is free, the same for both, and bound to 127.0.0.1."""
    words = command(RUN, 3)
    value = dict(pairwise(words))
    assert value["--processes"] == "3"
    assert value["--master-bind-host"] == value["--master-host"] == "127.0.0.1"
    assert value["--master-bind-port"] == value["--master-port"]


def test_workers_of_other_machines_are_waited_for() -> None:
    """With a port for them the master starts none itself and waits for as many as are asked for."""
    words = command(RUN, 4, master_port=5557)
    value = dict(pairwise(words))
    assert (value["--master-bind-port"], value["--expect-workers"]) == ("5557", "4")
    assert "--processes" not in words


def test_the_web_ui_is_for_this_machine() -> None:
    """Locust's UI shows the traffic on 127.0.0.1 and starts by itself."""
    words = command(RUN, 1, web_port=8089)
    assert "--autostart" in words
    assert words[words.index("--web-host") + 1] == "127.0.0.1"


def test_the_run_directory_is_told_as_an_absolute_path() -> None:
    """Locust may change where it works; the run directory stays where it is."""
    assert Path(environment(RUN)["HARNESS_RUN_DIR"]).is_absolute()
