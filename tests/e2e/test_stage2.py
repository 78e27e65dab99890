"""Stage 2 end to end: captured packets are imported, sent again and judged; nothing of them leaks or is repaired."""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from recorder import Heard, Recorder, wire
from running import HARNESS, ROOT, harness, process, run_dir_of, simulated_engine, url_target, verdict
from scripted import sized
from tap import Tap, write_capture

from harness import timeline
from harness.model import Outcome
from harness.traffic import recording
from harness.traffic.capture import tcpdump
from tests.support.waiting import until
from tests.traffic.capture.links import SERVER_PORT
from tests.traffic.capture.material import SECOND_NS, START_NS, Talk

pytestmark = pytest.mark.e2e

SAME_ANSWERS = """
claim: What was refused is refused.
traffic: {replay: recording.jsonl}
gates:
  - same_answers: {rejected_otherwise: 0}
"""


def imported(folder: Path, capture: Path, *options: str) -> Path:
    """The capture as a recording in `folder`."""
    done = harness("import", str(capture), "-o", "recording.jsonl", "--port", str(SERVER_PORT), *options, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "recording.jsonl"


def found(told: dict[str, Any], gate: str) -> dict[str, Any]:
    """What a gate found, of a verdict."""
    return dict(next(finding for finding in told["gates"] if finding["id"] == gate))


# What is sent, and what is written down ----------------------------------------------------------------------------

HOST = b"prod.example:80"  # as long as the target's: the requests say in a header how long they are
KEY, OUR_KEY = b"sk-captured-5f0c9a7e21d4", b"sk-of-the-target-1234567"
AUTHORIZATION = b"Authorization: Bearer %b\r\n" % KEY
SECRETS = {
    "authorization": KEY,
    "api key": b"ak-77c1e0d9b2f4",
    "cookie": b"c00kie-8a6b4c2d",
    "e-mail": b"jane.doe@mail.example.org",
    "phone": b"+49 151 23456789",
    "member": b"hunter2-and-more",
}
CHUNKED = b"transfer-encoding: chunked\r\n"
MALFORMED = {
    "broken chunking": ("status400", CHUNKED, b"zz\r\nhello\r\n0\r\n\r\n"),
    "two lengths": ("status400", b"content-length: 5\r\nContent-Length: 7\r\n", b"hello"),
    "length and chunks": ("status400", b"content-length: 3\r\n" + CHUNKED, b"5\r\nhello\r\n0\r\n\r\n"),
    "truncated body": ("fin400", b"content-length: 5000\r\n", b'{"model":"tiny","messages":[{"role":"us'),
    "bad JSON": ("status400", b"content-length: 30\r\n", b'{"model":"tiny","messages":[{]'),
    "folded header": ("status400", b"x-long: one\r\n two\r\ncontent-length: 2\r\n", b"{}"),
    "no colon": ("status400", b"nonsense\r\ncontent-length: 2\r\n", b"{}"),
    "bare line feeds": ("status400", b"x-bare: 1\ncontent-length: 2\r\n", b"{}"),
    "no text": ("status400", b"content-length: 6\r\n", b"\x00\xff\xfe{}\x80"),
}


def malformed() -> list[bytes]:
    return [wire(do, headers=AUTHORIZATION + headers, body=body, host=HOST) for do, headers, body in MALFORMED.values()]


def secretive() -> bytes:
    """A request that is right, and holds a secret in every place."""
    prompt = b"Write to %b or call %b." % (SECRETS["e-mail"], SECRETS["phone"])
    messages = b'[{"role":"user","content":"%b"}]' % prompt
    body = b'{"model":"tiny","password":"%b","messages":%b}' % (SECRETS["member"], messages)
    lines = b"x-api-key: %b\r\nCookie: session=%b\r\n" % (SECRETS["api key"], SECRETS["cookie"])
    return wire(headers=AUTHORIZATION + lines + b"content-length: %d\r\n" % len(body), body=body, host=HOST)


class Stack(Recorder):
    """The recording server, which also says what it serves when it is asked before a run."""

    async def _take(self, heard: Heard, unread: bytes, writer: Any) -> bytes:
        if unread.startswith(b"GET /v1/models ") and unread.endswith(b"\r\n\r\n"):
            writer.write(sized(200, b'{"data":[{"id":"tiny"}]}'))
            return b""
        return await super()._take(heard, unread, writer)

    def requests(self) -> list[bytes]:
        """All that was asked by the run."""
        return [bytes(heard.data) for heard in self.heard if heard.requests]


def captured(path: Path) -> Path:
    """A capture of the requests above, each on a connection of its own, answered as the server will answer."""
    talks = []
    for number, raw in enumerate([*malformed(), secretive()]):
        talk = Talk(number, START_NS + number * SECOND_NS // 10, random.Random(number))
        talk.open()
        talk.say(True, raw)
        if b"x-do: fin" in raw:
            talk.half_close()
        talk.wait(5, 10)
        answer = sized(200, b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{}}')
        talk.say(False, answer if b"x-do: plain" in raw else sized(400, b"{}"))
        talk.close(from_client=False, answered=b"x-do: fin" not in raw)
        talks.append(talk)
    return write_capture(path, talks)


@dataclass
class Replayed:
    """What came of a replay: the recording it played, what the command said, its run, what the server was sent (with
    the captured host in place of its own)."""

    recording: Path
    said: str
    code: int
    run_dir: Path
    asked: list[bytes]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    """The capture through `harness import` and `harness run`, at a server that keeps every byte."""
    folder = tmp_path_factory.mktemp("replayed")
    played = imported(folder, captured(folder.parent / f"{folder.name}.pcap"))
    (folder / "replay.yaml").write_text(SAME_ANSWERS)
    with Stack() as server, pytest.MonkeyPatch.context() as patch:
        assert len(f"127.0.0.1:{server.port}") == len(HOST)
        patch.setenv("STAGE2_KEY", OUR_KEY.decode())
        target = url_target(folder, f"http://127.0.0.1:{server.port}")
        with open(target, "a") as file:
            file.write('headers: {authorization: "Bearer ${STAGE2_KEY}"}\n')
        done = harness("run", "replay.yaml", "--target", str(target), cwd=folder)
        assert "every record" in done.stdout, done.stdout + done.stderr
        ours = b"127.0.0.1:%d" % server.port
    asked = [raw.replace(b"host: %b" % ours, b"host: %b" % HOST) for raw in server.requests()]
    return Replayed(played, done.stdout, done.returncode, run_dir_of(done.stdout, folder), asked)


def test_malformed_requests_of_a_capture_reach_the_server_to_the_byte(replayed: Replayed) -> None:
    """But for the host and the key, which are the target's, the server is sent what was captured, however broken."""
    assert len(OUR_KEY) == len(KEY)
    asked = [raw.replace(OUR_KEY, KEY) for raw in replayed.asked if b"x-do: plain" not in raw]
    assert sorted(asked) == sorted(malformed())
    assert (replayed.code, verdict(replayed.run_dir)["verdict"]) == (0, "PASS"), replayed.said
    seen = timeline.read(replayed.run_dir)
    assert sorted(seen.observations["outcome"]) == [Outcome.OK] + [Outcome.REJECTED_AS_EXPECTED] * len(MALFORMED)


def test_no_secret_of_a_capture_is_written_or_sent(replayed: Replayed, tmp_path: Path) -> None:
    """Neither the recording nor any file of the run holds one, nor the target's own key; kept when it is asked for."""
    written = {path: path.read_bytes() for path in replayed.run_dir.rglob("*") if path.is_file()}
    written[replayed.recording] = b"".join(one.raw for one in recording.read(replayed.recording)[1])
    written[replayed.recording.with_suffix(".file")] = replayed.recording.read_bytes()
    assert len(written) > 8
    for what, secret in {**SECRETS, "target's key": OUR_KEY}.items():
        assert not [path for path, data in written.items() if secret in data], what
    (sent,) = (raw for raw in replayed.asked if b"x-do: plain" in raw)
    assert OUR_KEY in sent
    assert [what for what, secret in SECRETS.items() if secret in sent] == []
    kept = b"".join(
        one.raw for one in recording.read(imported(tmp_path, captured(tmp_path / "c.pcap"), "--keep-secrets"))[1]
    )
    assert [what for what, secret in SECRETS.items() if secret not in kept] == []


# What a changed stack does to the verdict --------------------------------------------------------------------------

PORT = 21160
LIMIT = 512  # tokens of a prompt: longer ones are refused by the gateway
TRAFFIC = """
claim: The stack serves what is about to be its own baseline.
seed: 3
traffic:
  arrivals: {constant: {rate: 16/s}}
  for: 5s
  time_limit: 20s
  prompts:
    mix: {short: {share: 100%, tokens: 16..64}}
    answer_tokens: {mean: 8, at_most: 8}
    streamed: 100%
  bad:
    share: 30%
    kinds: {over_long: 422, bad_json: 400}
gates:
  - rejections: exact
"""
# A fifth of the speed is far from half of it and from all of it: a busy machine makes no difference.
REPLAY = """
claim: This build answers as the one before, and no slower.
traffic: {replay: recording.jsonl}
gates:
  - same_answers: {accepted_then_rejected: 0, accepted_then_failed: 0}
  - latency_against_capture: {quantile: p50, of: itl, at_most: 2x}
"""


def profile(folder: Path, name: str, bandwidth_gb_per_s: float) -> str:
    """A card of that bandwidth: 17 ms a token at 800 GB/s, 83 ms at 160."""
    card = yaml.safe_load((ROOT / "reference_stack/cards/h100.yaml").read_text())
    card["speed"]["bandwidth_gb_per_s"] = bandwidth_gb_per_s
    (folder / f"{name}.card.yaml").write_text(yaml.safe_dump(card))
    value = yaml.safe_load((ROOT / "reference_stack/profiles/h100-8b.yaml").read_text())
    value["card"] = str(folder / f"{name}.card.yaml")
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(value))
    return str(folder / name)


def local_target(folder: Path, name: str, card: str, prompt_limit: int = LIMIT) -> Path:
    """A whole stack on ports of its own: gateway, guard, two engines."""
    file = folder / f"{name}.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "kind": "local",
                "engine": "sim",
                "url": f"http://127.0.0.1:{PORT}",
                "engines": [f"http://127.0.0.1:{PORT + 1}", f"http://127.0.0.1:{PORT + 2}"],
                "model": "tiny",
                "tokenizer": str(ROOT / ".cache/tiny"),
                "profile": card,
                "gpu": "none",
                "prompt_limit": prompt_limit,
            }
        )
    )
    return file


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a recording of a stack in good health, `good.yaml` for that stack, which is up, and a replay."""
    folder = tmp_path_factory.mktemp("baseline")
    good = local_target(folder, "good", profile(folder, "card", 800))
    (folder / "traffic.yaml").write_text(TRAFFIC)
    (folder / "replay.yaml").write_text(REPLAY)
    up = harness("stack", "up", "--target", str(good), cwd=folder)
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        with Tap(PORT) as tap:
            target = url_target(folder, tap.url)
            target.write_text(target.read_text().replace("16384", str(LIMIT)))
            done = harness("run", "traffic.yaml", "--target", str(target), cwd=folder)
            imported(folder, tap.capture(folder / "capture.pcap"), "--method", "POST")
        assert verdict(run_dir_of(done.stdout, folder))["verdict"] in ("PASS", "INCONCLUSIVE"), done.stdout
        yield folder
    finally:
        harness("stack", "down", cwd=folder)


def judged(folder: Path, target: Path) -> tuple[int, dict[str, Any], str]:
    """The replay against a target: exit code, verdict and what was said."""
    done = harness("run", "replay.yaml", "--target", str(target), cwd=folder)
    return done.returncode, dict(verdict(run_dir_of(done.stdout, folder))), done.stdout + done.stderr


def test_the_build_that_was_captured_passes(baseline: Path) -> None:
    """All refusals are refused again, and nothing is slower."""
    code, told, said = judged(baseline, baseline / "good.yaml")
    assert (code, told["verdict"]) == (0, "PASS"), said
    changes = found(told, "same_answers")["changes"]
    assert changes["rejected_then_accepted"]["n"] >= 10


def test_a_gateway_that_lets_one_kind_through_fails_and_names_it(baseline: Path) -> None:
    """Over-long prompts were refused; with the limit raised they are served: that kind is named, and no other."""
    harness("stack", "down", cwd=baseline)
    lax = local_target(baseline, "lax", str(baseline / "card"), prompt_limit=8 * LIMIT)
    code, told, said = judged(baseline, lax)
    assert (code, told["verdict"]) == (1, "FAIL"), said
    finding = found(told, "same_answers")
    assert finding["verdict"] == "FAIL"
    (kind,) = finding["changes"]["rejected_then_accepted"]["kinds"]
    assert (kind["flaw"], kind["captured"], kind["replayed"]) == ("refused_422", "422", "2xx")
    assert "refused_422" in told["why"]
    assert "refused_422" in said
    assert found(told, "latency_against_capture")["verdict"] == "PASS"


def test_a_slower_engine_fails_against_the_capture(baseline: Path) -> None:
    """A card with a fifth of the bandwidth gives the same answers, later: only the latency gate fails."""
    harness("stack", "down", cwd=baseline)
    slow = local_target(baseline, "slow", profile(baseline, "slow_card", 160))
    code, told, said = judged(baseline, slow)
    assert (code, told["verdict"]) == (1, "FAIL"), said
    finding = found(told, "latency_against_capture")
    assert finding["verdict"] == "FAIL"
    assert finding["ratio"] > 3
    assert found(told, "same_answers")["verdict"] == "PASS"


# What goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "order", "outcome"),
    [(signal.SIGKILL, "connection", Outcome.REFUSED), (signal.SIGSTOP, "open", Outcome.TIMEOUT)],
    ids=["killed", "frozen"],
)
def test_a_target_that_goes_down_fails_and_leaves_a_readable_run(
    baseline: Path, tmp_path: Path, loss: signal.Signals, order: str, outcome: Outcome
) -> None:
    """The engine is lost in the middle: the replay plays on to its end, and the verdict says what is served no more."""
    shutil.copy(baseline / "recording.jsonl", tmp_path)
    played = f"recording.jsonl, order: {order}, time_limit: 3s"
    (tmp_path / "replay.yaml").write_text(REPLAY.replace("recording.jsonl", played))
    with simulated_engine(tmp_path, "--max-model-len", str(LIMIT)) as (url, pid):
        run = [HARNESS, "run", "replay.yaml", "--target", str(url_target(tmp_path, url))]
        with process(run, cwd=tmp_path) as conductor:
            latest = tmp_path / "runs" / "latest"
            until(lambda: any(p.stat().st_size > 2000 for p in latest.glob("log.player-*.bin")), "observations", 60)
            os.kill(pid, loss)
            said, _ = conductor.communicate(timeout=120)
    seen = timeline.read(latest)
    assert not seen.damage
    assert seen.seen.all()
    assert {Outcome.OK, outcome} <= set(seen.observations["outcome"])
    told = dict(verdict(latest))
    assert (conductor.returncode, told["verdict"]) == (1, "FAIL"), said
    assert found(told, "same_answers")["changes"]["accepted_then_failed"]["bad"] > 0
    assert harness("verify", str(latest.resolve()), cwd=tmp_path).returncode == 0


def refused(folder: Path) -> str:
    """The one sentence with which a run of the folder's recording is refused; nothing is started for it."""
    (folder / "replay.yaml").write_text(SAME_ANSWERS)
    target = url_target(folder, "http://127.0.0.1:9")
    done = harness("run", "replay.yaml", "--target", str(target), cwd=folder, limit_s=60)
    said = (done.stdout + done.stderr).strip()
    assert (done.returncode, len(said.splitlines())) == (2, 1), said
    assert not (folder / "runs").exists()
    return said


def test_what_is_no_recording_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """A capture, a recording of another version, one cut between lines, one cut inside a line: each says what it is."""
    capture = captured(tmp_path / "capture.pcap")
    path = imported(tmp_path, capture)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    header = orjson.loads(lines[0])
    for data, words in {
        capture.read_bytes(): "is no recording: `harness import",
        orjson.dumps(header | {"recording": header["recording"] + 1}) + b"\n" + b"".join(lines[1:]): "version 2",
        b"".join(lines[:-2]): f"{len(lines) - 3} of its {len(lines) - 1}",
        whole[: -len(lines[-1]) // 2]: "not an exchange",
        b"": "is no recording",
    }.items():
        path.write_bytes(data)
        assert words in refused(tmp_path)


# A baseline of one's own -------------------------------------------------------------------------------------------


def test_a_healthy_build_is_recorded_with_tcpdump(tmp_path: Path) -> None:
    """Every request of the scenario is in the recording, with its answer; where nobody may capture, that is said."""
    (tmp_path / "traffic.yaml").write_text(TRAFFIC.replace("over_long: 422, ", ""))  # the gateway's work, not here
    with simulated_engine(tmp_path) as (url, _):
        target = url_target(tmp_path, url)
        done = harness("record", "traffic.yaml", "--target", str(target), "-o", "recording.jsonl", cwd=tmp_path)
    if reason := tcpdump.why_not():
        assert os.geteuid(), f"this test needs the Debian package tcpdump: {reason}"
        assert (done.returncode, done.stderr.strip()) == (2, f"harness: {reason}")
        return
    assert done.returncode == 0, done.stdout + done.stderr
    header, ones = recording.read(tmp_path / "recording.jsonl")
    seen = timeline.read(run_dir_of(done.stdout, tmp_path))
    assert (header.requests, header.lost_share) == (len(seen.observations), 0.0)
    assert sorted(one.answer.status for one in ones) == sorted(seen.observations["status"])
