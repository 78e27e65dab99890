"""A recording from end to end: planned, played by two workers against a simulated engine, judged, verified."""

from dataclasses import replace
from pathlib import Path

import pytest
from running import harness, run_dir_of, url_target, verdict

from harness import plan_file, timeline
from harness.model import Finish, Outcome
from harness.traffic import recording
from harness.traffic.recording import Answered, Recorded, RecordingHeader

pytestmark = pytest.mark.e2e

SCENARIO = """
claim: What was answered is answered, and what was refused is refused.
traffic:
  replay: recording.jsonl
  order: connection
  speed: 4x
gates:
  - same_answers: {rejected_then_accepted: 0, accepted_then_rejected: 0}
"""
SERVED = Answered(
    200, 0.5, 1.0, 2.0, 2.5, (0.5, 0.5), tokens_in=9, tokens_out=3, finish=Finish.LENGTH, whole=True
)  # fmt: skip
REFUSED = Answered(404, 0.1, ended_s=0.1, whole=True)
HEAD = b"POST %b HTTP/1.1\r\nHost: prod.example\r\nAuthorization: Bearer ********\r\nContent-Type: application/json\r\n"


def asked(path: str, body: bytes, **more: object) -> Recorded:
    raw = HEAD % path.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    return Recorded(0.0, 0, 0, "POST", path, raw, SERVED, **more)  # type: ignore[arg-type]


CHAT = b'{"messages":[{"role":"user","content":"a word"}],"max_tokens":3,"stream":true,"model":"%b"}'
PLAIN = b'{"model":"captured-70b","prompt":"a word","max_tokens":3,"ignore_eos":true}'
KINDS = [
    asked("/v1/chat/completions", CHAT % b"captured-70b", stream=True),
    asked("/v1/completions", PLAIN),
    replace(asked("/v1/completions", PLAIN[:-1], flaw="bad_json"), answer=replace(REFUSED, status=400)),
    replace(asked("/v1/chat/completions", CHAT % b"no-such-model"), answer=REFUSED),
    Recorded(0.0, 0, 0, "GET", "/v1/models", b"GET /v1/models HTTP/1.1\r\nHost: prod.example\r\n\r\n", SERVED),
]


def recorded(directory: Path, *changed: Recorded) -> Path:
    """Twelve connections, a request of each kind on every one of them, five a second."""
    kinds = [*KINDS, *changed]
    turns = [
        replace(kind, at_s=0.2 * (12 * turn + connection), connection=connection, turn=turn)
        for turn, kind in enumerate(kinds)
        for connection in range(12)
    ]
    header = RecordingHeader(("made.pcap",), requests=len(turns), connections=12, lasts_s=turns[-1].at_s)
    recording.write(directory / "recording.jsonl", header, turns)
    path = directory / "replay.yaml"
    path.write_text(SCENARIO)
    return path


def test_a_replay_is_played_and_judged(tmp_path: Path, engine: tuple[str, int]) -> None:
    """Every answer is what it was: streams, plain ones, refusals, and a page that no model wrote."""
    path, target = recorded(tmp_path), url_target(tmp_path, engine[0])
    done = harness("run", str(path), "--target", str(target), "--workers", "2", cwd=tmp_path)
    run_dir = run_dir_of(done.stdout, tmp_path)
    seen = timeline.read(run_dir)
    assert not seen.damage
    assert seen.seen.all()
    assert seen.captured is not None
    assert set(seen.observations["outcome"]) == {Outcome.OK, Outcome.REJECTED_AS_EXPECTED}, done.stdout
    assert (seen.observations["status"] == seen.captured.observations["status"]).all()
    groups = [request.group for request in plan_file.read(run_dir / "plan.jsonl")[1]]
    assert [group % 2 for group in groups if group is not None] == seen.observations["worker"].tolist()
    assert verdict(run_dir)["verdict"] == "PASS", done.stdout
    (tmp_path / "recording.jsonl").unlink()
    assert harness("verify", str(run_dir), cwd=tmp_path).returncode == 0


def test_a_refusal_that_is_gone_is_found(tmp_path: Path, engine: tuple[str, int]) -> None:
    """The capture refused what this engine serves: the gate names it."""
    path = recorded(tmp_path, replace(KINDS[0], answer=REFUSED))
    done = harness("run", str(path), "--target", str(url_target(tmp_path, engine[0])), cwd=tmp_path)
    told = verdict(run_dir_of(done.stdout, tmp_path))
    assert told["verdict"] == "FAIL"
    assert "12 of 36 requests refused in the capture were accepted" in str(told["why"])
    assert "refused_404" in str(told["why"])
