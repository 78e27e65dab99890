"""The leak over a driver: every limit holds, and whatever happens to the process, the memory is back."""

import itertools
import signal

import pytest
from stub_card import CONTEXT_BYTES, GIB, MIB, until_said

from tests.support.waiting import until

pytestmark = pytest.mark.e2e
_PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def held(said):
    """What it held after each step, in MiB."""
    return [line["held_bytes"] // MIB for line in said if "at_s" in line]


def test_step_rate_and_aim(card):
    """It takes its steps one a period up to its aim, NVML sees them, and the memory is back when it is killed."""
    with card.leak("--aim", "5%", "--step", "256MiB", "--every", "100ms") as process:
        said = until_said(process, "stopped")
        assert said[0] == {
            "device": "GPU-stub",
            "simulated": False,
            "pid": process.pid,
            "free_bytes": 16 * GIB - CONTEXT_BYTES,
            "total_bytes": 16 * GIB,
        }
        assert held(said) == [256, 512, 768, 819]
        assert said[-1] == {"held_bytes": int(0.05 * 16 * GIB), "stopped": "all is held"}
        moments = [line["at_s"] for line in said if "at_s" in line]
        assert all(later - earlier >= 0.099 for earlier, later in itertools.pairwise(moments))
        assert card.free_bytes() == 16 * GIB - CONTEXT_BYTES - int(0.05 * 16 * GIB)
        process.kill()
        process.wait()
        assert card.free_bytes() == 16 * GIB


def test_floor(card):
    """Its last step is cut so that the floor stays free, counted with what others hold, and there it waits."""
    card.set("others", 12 * GIB)
    with card.leak("--aim", "50%", "--step", "512MiB", "--every", "10ms", "--floor", "2GiB") as process:
        said = until_said(process, "waiting")
        assert held(said) == [512, 1024, 1536, 1792, 1792]
        assert card.free_bytes() == 2 * GIB


def test_room_that_others_make_is_taken(card):
    """At the floor it waits; when somebody else gives memory back, it goes on to its aim."""
    card.set("others", 14 * GIB)
    with card.leak("--aim", "4GiB", "--step", "512MiB", "--every", "10ms", "--floor", "1GiB") as process:
        assert until_said(process, "waiting")[-1]["held_bytes"] == 768 * MIB
        card.set("others", 0)
        assert until_said(process, "stopped")[-1]["held_bytes"] == 4 * GIB


def test_out_of_memory_is_the_end(card):
    """It stops at the first allocation that the driver refuses, with memory free or not, and holds what it has."""
    card.set("refuse_above", GIB)
    with card.leak("--aim", "4GiB", "--step", "512MiB", "--every", "10ms") as process:
        last = until_said(process, "stopped")[-1]
        assert (last["stopped"], last["held_bytes"]) == ("out of memory", GIB)
        assert process.poll() is None and card.free_bytes() == 15 * GIB - CONTEXT_BYTES


def test_ttl(card):
    """It ends by the kernel's timer, and the memory is back."""
    with card.leak("--aim", "1GiB", "--every", "10ms", "--ttl", "2s") as process:
        until_said(process, "stopped")
        assert process.wait(timeout=20) == -signal.SIGALRM
        assert card.free_bytes() == 16 * GIB


def test_ttl_of_a_stuck_process(card):
    """A driver call that never returns does not keep it from ending at its TTL."""
    card.set("hang")
    with card.leak("--aim", "1GiB", "--every", "10ms", "--ttl", "2s") as process:
        until_said(process, "device")
        assert process.wait(timeout=20) == -signal.SIGALRM
        assert card.free_bytes() == 16 * GIB


@pytest.mark.parametrize("stuck", [False, True], ids=["running", "stuck in the driver"])
def test_the_parent_is_killed(card, stuck):
    """SIGKILL of its parent frees the memory, in whatever call it is."""
    leak = ["-m", "harness.chaos.leak", "--device", "0", "--aim", "1GiB", "--every", "10ms", "--ttl", "10m"]
    if stuck:
        card.set("hang")
    with card.python("-c", f"import sys; sys.argv[1:1] = [sys.executable]; {_PARENT}", *leak) as parent:
        until_said(parent, "device" if stuck else "stopped")
        assert card.free_bytes() < 16 * GIB
        parent.kill()
        until(lambda: card.free_bytes() == 16 * GIB, "the memory is back")


def test_a_parent_that_is_gone_already(card):
    """Told of a parent that is not its own any more, it ends before it takes anything."""
    with card.leak("--aim", "1GiB", "--parent", "1") as process:
        assert process.stdout.read() == ""
        assert process.wait() == -signal.SIGTERM


def test_no_such_device(card):
    """A device that the driver does not have is one line that says so, and exit 1."""
    with card.python("-m", "harness.chaos.leak", "--device", "GPU-other", "--aim", "1GiB") as process:
        assert until_said(process, "failed")[-1] == {"failed": "cuDeviceGet failed with CUDA error 100"}
        assert process.wait() == 1


def test_no_permit(card, tmp_path):
    """Without the permit that it was told of it takes nothing, not even a context."""
    with card.leak("--aim", "1GiB", "--permit", str(tmp_path / "none")) as process:
        assert until_said(process, "failed")[-1] == {"failed": "Revoked"}
        assert process.wait() == 1 and not list(card.folder.iterdir())
