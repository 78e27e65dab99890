"""A permit: whoever comes first, the process or its end, nothing runs on without one."""

import json
import os
import subprocess
import sys

import pytest

from harness import processes
from harness.chaos import permit

HOLDER = (
    "import sys, time; from pathlib import Path; from harness.chaos import permit;"
    "permit.claim(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "permits" / "one"


@pytest.fixture
def holder(path):
    """Another process that holds the permit."""
    permit.grant(path)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_none_was_granted(path):
    """Without a permit nothing can be claimed, and there is nothing to revoke."""
    with pytest.raises(permit.Revoked):
        permit.claim(path)
    permit.revoke(path)


def test_revoked_before_it_was_claimed(path):
    """A process that is still starting when its permit goes finds none."""
    permit.grant(path)
    permit.revoke(path)
    with pytest.raises(permit.Revoked):
        permit.claim(path)


def test_granted_twice(path):
    """A permit is for one process: a second grant is an error."""
    permit.grant(path)
    with pytest.raises(FileExistsError):
        permit.grant(path)


@pytest.mark.e2e
def test_revoking_ends_the_holder(path, holder):
    """The holder is gone when revoke returns, unreaped as it is; again is nothing to do."""
    permit.revoke(path)
    assert processes.started(holder.pid) is None and not path.exists()
    permit.revoke(path)
    assert holder.wait() == -9


@pytest.mark.e2e
def test_a_second_claim(path, holder):
    """Another process that claims a permit which is held gets none, and the holder keeps its own."""
    with pytest.raises(permit.Revoked):
        permit.claim(path)
    assert json.loads(path.read_text()) == {"pid": holder.pid, "started": processes.started(holder.pid)}


@pytest.mark.e2e
def test_a_holder_that_died_by_itself(path, holder):
    """The permit of a dead process is only removed."""
    holder.kill()
    holder.wait()
    permit.revoke(path)
    assert not path.exists()


@pytest.mark.e2e
def test_another_process_of_the_same_number_is_spared(path, holder):
    """When the file names a pid with another start, nobody is killed and the permit stays: somebody must look."""
    me = {"pid": os.getpid(), "started": (processes.started(os.getpid()) or 0) + 1}
    path.write_text(json.dumps(me))
    with pytest.raises(TimeoutError, match="does not end"):
        permit.revoke(path, limit_s=0.2)
    assert path.exists() and processes.started(holder.pid) is not None
