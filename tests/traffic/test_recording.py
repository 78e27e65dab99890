"""A recording is read back as it was written, and nothing else is taken for one."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.model import Finish, UsageError
from harness.traffic import recording
from harness.traffic.recording import Answered, Recorded, RecordingHeader

HEADER = RecordingHeader(
    ("one.pcap",),
    requests=2,
    connections=1,
    lasts_s=1.5,
    lost_share=0.25,
    account={"seen": 3},
    shapes={"7": ["id:text"]},
)
FULL = Recorded(
    at_s=0.5, connection=3, turn=1, method="POST", path="/v1/chat/completions", raw=b"POST \xff\r\n\r\n\xc3",
    answer=Answered(200, 0.1, 0.2, 0.3, 0.31, (0.01, 0.02), 12, 3, Finish.LENGTH, 7, whole=True),
    client="a", session="s", flaw="bad_json", stream=True, prompt_tokens=12, max_tokens=3, lead_s=0.001, pipelined=True,
    give_up_s=0.2, half_close_s=0.1, blocks=(7, 8),
)  # fmt: skip
BARE = Recorded(
    at_s=0.0, connection=0, turn=0, method="GET", path="/health", raw="GET /é\r\n\r\n".encode(), answer=Answered()
)


def test_a_recording_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Every field and every byte, those that are no text among them; moments that never came stay so."""
    recording.write(tmp_path / "r.jsonl", HEADER, [BARE, FULL])
    header, exchanges = recording.read(tmp_path / "r.jsonl")
    bare, full = exchanges
    assert (header, full) == (HEADER, FULL)
    assert (bare.raw, bare.answer.status, bare.answer.ended_s == bare.answer.ended_s) == (BARE.raw, 0, False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no recording"),
        (b"\xd4\xc3\xb2\xa1", "is no recording"),
        (b'{"recording":0}\n', "version 0"),
        (b'{"recording":1}\n', "damaged"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """One sentence that says what to do."""
    (tmp_path / "r.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=said):
        recording.read(tmp_path / "r.jsonl")


def test_a_damaged_line_and_a_missing_one_are_told(tmp_path: Path) -> None:
    """The line's number; or how many are missing."""
    path = tmp_path / "r.jsonl"
    recording.write(path, HEADER, [BARE, FULL])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + b"{}\n")
    with pytest.raises(UsageError, match=r"r\.jsonl:3: not an exchange"):
        list(recording.read(path)[1])
    path.write_bytes(lines[0] + lines[1])
    with pytest.raises(UsageError, match="1 of its 2"):
        list(recording.read(path)[1])
    with pytest.raises(UsageError, match="cannot be read"):
        recording.read(tmp_path / "none.jsonl")


@pytest.mark.parametrize(("name", "pack"), [("r.jsonl.gz", gzip.compress), ("r.jsonl.xz", lzma.compress)])
def test_a_packed_recording_is_read_as_it_is(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    """A name that ends in .gz or .xz is unpacked; one that breaks off is told."""
    plain, packed = tmp_path / "r.jsonl", tmp_path / name
    recording.write(plain, HEADER, [BARE, FULL])
    packed.write_bytes(pack(plain.read_bytes()))
    assert list(recording.read(packed)[1])[1] == FULL
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(UsageError, match="cannot be read"):
        list(recording.read(packed)[1])
