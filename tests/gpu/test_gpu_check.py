"""`make gpu-check` over the stub card: the fault itself, from aim to proof, with NVML as the witness."""

import pytest

pytestmark = pytest.mark.e2e


def checked(card):
    with card.python("-m", "harness.chaos.gpu_check") as process:
        said = process.stdout.read()
        return process.wait(), said


def test_a_card(card):
    """Leak and undo, floor, TTL and the death of the parent are all seen on the card."""
    status, said = checked(card)
    assert status == 0, said
    assert said.startswith("GPU-stub: 16.00 GiB, 16.00 GiB free before")
    assert [line.split(":")[0] for line in said.splitlines() if line.startswith("ok")] == [
        "ok   leak and undo",
        "ok   floor",
        "ok   ttl",
        "ok   parent",
    ]
    assert "came back to within 0.00% of the device" in said


def test_a_driver_that_takes_nothing(card):
    """When free memory does not fall, whatever the leak says, the check fails."""
    card.set("sink")
    status, said = checked(card)
    assert status == 1
    assert "FAIL leak and undo: free memory of GPU-stub fell by 0.00 GiB" in said


def test_a_full_card(card):
    """With too little free it does not run, says so, and that is no pass."""
    card.set("others", 15 * 2**30)
    status, said = checked(card)
    assert (status, "DID NOT RUN" in said, "at most 1.2% can be leaked" in said) == (3, True, True)


def test_no_card(card):
    """Where there is no GPU it does not run, says so, and that is no pass."""
    del card.environment["CARD"]
    status, said = checked(card)
    assert (status, said.count("\n")) == (3, 1)
    assert said.startswith("gpu-check DID NOT RUN, so nothing is known: no GPU to leak on")
