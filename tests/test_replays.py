"""What ships in `replays/` can be imported and played."""

from pathlib import Path

import pytest

from harness.traffic import recording
from harness.traffic.capture.filters import Filters
from harness.traffic.importing import Choices, import_captures
from harness.traffic.replay import Replay

REPLAYS = Path(__file__).parent.parent / "replays"


def test_the_capture_of_the_local_stack_is_whole(tmp_path: Path) -> None:
    """Nothing of it is lost: streams and plain answers, refusals of several kinds, clients that gave up."""
    only_posts = Choices(frozenset({8080}), filters=Filters(methods=frozenset({"POST"})))
    header = import_captures([REPLAYS / "captures" / "local_stack.pcap.gz"], tmp_path / "r.jsonl", only_posts)
    ones = list(recording.read(tmp_path / "r.jsonl")[1])
    assert (header.lost_share, header.requests) == (0.0, len(ones))
    assert {one.answer.status for one in ones} >= {200, 400, 404, 415, 422}
    assert {one.stream for one in ones if one.answer.status == 200} == {True, False}
    assert sum(one.give_up_s is not None for one in ones) >= 3
    assert sum(one.stream and one.answer.whole for one in ones) >= 200  # a gate on first tokens needs as many


@pytest.mark.parametrize("path", sorted((REPLAYS / "plans").iterdir()), ids=lambda path: path.name)
def test_every_shipped_recording_is_whole(path: Path) -> None:
    """It is of this version, holds all that it says, and has answers to compare with."""
    held = Replay(replay=path).look()
    assert held.answered
    assert recording.read_header(path).lost_share == 0.0
