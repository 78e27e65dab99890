"""A run directory as one value: what was written is read back, and what a crash leaves is read up to its last block."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import plan_file, timeline
from harness.log import MAGIC, Log, ObservationLog
from harness.model import NEVER, Event, Finish, Observation, Outcome, Reading, Request, Tag, Window
from harness.plan_file import PlanHeader

moments = st.floats(0, 1e5) | st.just(NEVER)
lags = st.floats(0, 100, width=32)


def observations(n: int, gaps: int = 2) -> list[Observation]:
    return [
        Observation(
            index=k,
            due_s=float(k),
            sent_s=k + 0.001,
            first_byte_s=k + 0.1,
            ended_s=k + 0.5,
            status=200,
            outcome=Outcome.OK,
            tags=Tag.STREAMED,
            gaps_s=tuple(0.25 * (j + 1) for j in range(gaps)),
        )
        for k in range(n)
    ]


def write_plan(run_dir: Path, n: int, header_says: int | None = None) -> None:
    header = PlanHeader("story", 7, n if header_says is None else header_says, (Window("steady", 0.0, float(n)),), 30.0)
    requests = [Request(k, float(k), "short", stream=True) for k in range(n)]
    (run_dir / "plan.jsonl").write_bytes(b"".join(plan_file.lines(header, requests)))


def write_log(path: Path, seen: list[Observation], block: int = 1000) -> None:
    log = ObservationLog(path)
    for number, observation in enumerate(seen, start=1):
        log.append(observation)
        if number % block == 0:
            log.flush()
    log.close()


def alike(one: Observation, other: Observation) -> bool:
    """Equal, with NEVER equal to itself."""
    return repr(one) == repr(other)


@given(
    seen=st.builds(
        Observation,
        index=st.just(0),
        due_s=st.floats(0, 1e5),
        sent_s=moments,
        first_byte_s=moments,
        first_token_s=moments,
        last_token_s=moments,
        ended_s=moments,
        tokens_in=st.integers(0, 2**32 - 1),
        tokens_out=st.integers(0, 2**32 - 1),
        status=st.integers(0, 999),
        outcome=st.sampled_from(Outcome),
        tags=st.integers(0, 127).map(Tag),
        worker=st.integers(0, 2**16 - 1),
        receive_lag_s=lags,
        connect_s=lags,
        finish=st.sampled_from(Finish),
        shape=st.integers(0, 2**32 - 1),
        gaps_s=st.lists(lags, max_size=40).map(tuple),
    )
)
def test_an_observation_is_read_back(seen: Observation, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever an observation holds comes back from the file as it was."""
    run_dir = tmp_path_factory.mktemp("run")
    write_plan(run_dir, 1)
    write_log(run_dir / "log.player-0.bin", [seen])
    read = timeline.read(run_dir)
    assert read.damage == []
    (found,) = timeline.observations_of(read)
    assert alike(found, seen)


def test_a_tail_torn_at_any_byte(tmp_path: Path) -> None:
    """Cut anywhere, a log gives every whole block before the cut, and says that the rest is missing."""
    write_plan(tmp_path, 6)
    path = tmp_path / "log.player-0.bin"
    write_log(path, observations(6), block=2)
    whole = path.read_bytes()
    block = (len(whole) - len(MAGIC)) // 3
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        read = timeline.read(tmp_path)
        blocks = max(0, cut - len(MAGIC)) // block
        at_an_edge = cut >= len(MAGIC) and (cut - len(MAGIC)) % block == 0
        assert list(read.seen) == [k < 2 * blocks for k in range(6)], cut
        assert bool(read.damage) != at_an_edge, cut
        assert len(read.gaps_s) == 4 * blocks


def test_a_flipped_bit_anywhere(tmp_path: Path) -> None:
    """A bit that flips in any byte is noticed, and no observation of its block is used."""
    write_plan(tmp_path, 2)
    path = tmp_path / "log.player-0.bin"
    write_log(path, observations(2))
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        read = timeline.read(tmp_path)
        assert read.damage, at
        assert not read.seen.any(), at


def test_a_request_observed_twice(tmp_path: Path) -> None:
    """Two observations of one request are damage, in one file or in two."""
    write_plan(tmp_path, 3)
    seen = observations(3)
    write_log(tmp_path / "log.player-0.bin", seen)
    write_log(tmp_path / "log.player-1.bin", seen[:1])
    assert timeline.read(tmp_path).damage == ["log.player-1.bin: requests observed twice"]


def test_an_observation_of_no_request(tmp_path: Path) -> None:
    """An observation of a request that the plan has not is damage, and the others keep their own gaps."""
    write_plan(tmp_path, 2)
    seen = observations(4)
    strange = seen[3]._replace(gaps_s=(9.0, 9.0, 9.0))
    write_log(tmp_path / "log.player-0.bin", [seen[0], strange, seen[1]])
    read = timeline.read(tmp_path)
    assert "1 observations of requests that the plan has not" in read.damage[0]
    assert read.gaps_s.tolist() == [0.25, 0.5, 0.25, 0.5]


def test_a_short_plan(tmp_path: Path) -> None:
    """A plan that lacks requests which its header counts, or ends inside a line, says so."""
    write_plan(tmp_path, 3, header_says=5)
    assert timeline.read(tmp_path).damage == ["plan.jsonl: 3 of 5 requests are there"]
    path = tmp_path / "plan.jsonl"
    path.write_bytes(path.read_bytes()[:-4])
    assert "plan.jsonl:4: not a request" in timeline.read(tmp_path).damage


@pytest.mark.parametrize(
    ("line", "whole", "broken"),
    [
        (0, '"plan"', '"plbn"'),
        (0, '"windows"', '"windowc"'),
        (0, '["steady",0.0,3.0]', '["steady",0.0]'),
        (1, '"i"', '"j"'),
        (1, '"class"', '"clasr"'),
        (1, '"due_s":0.0', '"due_s":"0"'),
        (2, '"i":1', '"i":7'),
        (2, '{"i"', '["i"'),
    ],
)
def test_a_damaged_plan(tmp_path: Path, line: int, whole: str, broken: str) -> None:
    """Whatever is damaged in a plan, reading it says so: a header by ValueError, a request as damage of its line."""
    write_plan(tmp_path, 3)
    path = tmp_path / "plan.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert whole in lines[line]
    lines[line] = lines[line].replace(whole, broken)
    path.write_text("".join(lines))
    if line == 0:
        with pytest.raises(ValueError, match="not a plan"):
            timeline.read(tmp_path)
    else:
        assert any(told.startswith(f"plan.jsonl:{line + 1}: ") for told in timeline.read(tmp_path).damage)


def test_another_plan_is_damage(tmp_path: Path) -> None:
    """A plan that is whole, but not the one that the run was made with, is damage."""
    write_plan(tmp_path, 3)
    (tmp_path / "run.json").write_text(f'{{"plan_sha256": "{64 * "0"}"}}')
    assert timeline.read(tmp_path).damage == ["plan.jsonl: not the plan that was made for this run (sha256)"]


def test_a_damaged_run_json_is_damage(tmp_path: Path) -> None:
    """A run.json that cannot be read is named; what else is there is still read."""
    write_plan(tmp_path, 3)
    (tmp_path / "run.json").write_text('{"run": "sto')
    read = timeline.read(tmp_path)
    assert (read.damage, dict(read.run), len(read.due_s)) == (["run.json: not readable"], {}, 3)


def test_gaps_join_their_requests(tmp_path: Path) -> None:
    """Gaps come back with their request, whatever the order in which requests ended."""
    write_plan(tmp_path, 3)
    seen = [o._replace(gaps_s=(float(o.index),) * o.index) for o in observations(3)]
    write_log(tmp_path / "log.player-0.bin", [seen[2], seen[0]])
    write_log(tmp_path / "log.player-1.bin", [seen[1]])
    read = timeline.read(tmp_path)
    assert [found.gaps_s for found in timeline.observations_of(read)] == [(), (1.0,), (2.0, 2.0)]
    assert read.gaps_of(np.array([True, False, True])).tolist() == [2.0, 2.0]


def test_events_and_readings_are_read_back(tmp_path: Path) -> None:
    """Lines of all processes come back in the order of time; `nan` stays `nan`."""
    write_plan(tmp_path, 1)
    log = Log(tmp_path / "log.player-0.jsonl")
    log.reading(Reading(2.0, "player.sent", 5.0, {"worker": "0"}))
    log.event(Event(3.0, "stopped", "player", {"why": "finished"}))
    log.close()
    log = Log(tmp_path / "log.watch.jsonl")
    log.reading(Reading(1.0, "gpu.free_bytes", NEVER, {"gpu": "GPU-0"}))
    log.close()
    read = timeline.read(tmp_path)
    assert list(read.events) == [Event(3.0, "stopped", "player", {"why": "finished"})]
    assert [reading.at_s for reading in read.readings] == [1.0, 2.0]
    ((_, values),) = read.series("gpu.free_bytes").values()
    assert np.isnan(values).all()


def test_a_torn_line_is_damage(tmp_path: Path) -> None:
    """A last line that was cut short is named, and the lines before it are kept."""
    write_plan(tmp_path, 1)
    path = tmp_path / "log.watch.jsonl"
    log = Log(path)
    log.event(Event(0.0, "ready", "watch"))
    log.event(Event(1.0, "note"))
    log.close()
    path.write_bytes(path.read_bytes()[:-3])
    read = timeline.read(tmp_path)
    assert [event.kind for event in read.events] == ["ready"]
    assert read.damage == ["log.watch.jsonl:2: not an entry"]


def test_what_was_flushed_before_the_disk_filled_is_readable(tmp_path: Path) -> None:
    """When a file may grow no further the player gets an error, and every block before it is still whole."""
    script = """
import resource, signal, sys
from pathlib import Path
from harness.model import Observation
from harness.log import ObservationLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
log = ObservationLog(Path(sys.argv[1]))
try:
    for index in range(100):
        log.append(Observation(index, float(index)))
        log.flush()
except OSError as full:
    print(index, full.strerror)
"""
    write_plan(tmp_path, 100)
    path = tmp_path / "log.player-0.bin"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    index, _, words = done.stdout.partition(" ")
    assert words.strip() == "File too large"
    read = timeline.read(tmp_path)
    assert int(read.seen.sum()) == int(index)
    assert read.damage


@pytest.mark.parametrize(("kind", "end_s", "requests"), [("extended", 20.0, 4), ("decided", 10.0, 2)])
def test_an_extension_counts_only_when_it_was_played(tmp_path: Path, kind: str, end_s: float, requests: int) -> None:
    """An extended run's steady state takes the extension in; otherwise what was due in the extension was never due."""
    windows = (Window("steady", 0.0, 10.0), Window("extension", 10.0, 20.0))
    header = PlanHeader("s", 1, 4, windows, 30.0)
    plan = plan_file.lines(header, [Request(i, i * 5.0, "short") for i in range(4)])
    (tmp_path / "plan.jsonl").write_bytes(b"".join(plan))
    spool = ObservationLog(tmp_path / "log.player-0.bin")
    for index in range(3):  # the third was on its way when the look decided
        spool.append(Observation(index, index * 5.0, gaps_s=(0.1, 0.2)))
    spool.close()
    log = Log(tmp_path / "log.conductor.jsonl")
    log.event(Event(11.0, kind))
    log.close()
    seen = timeline.read(tmp_path)
    assert list(seen.windows) == ["steady"]
    assert seen.windows["steady"].end_s == end_s
    assert len(seen.due_s) == len(seen.observations) == requests
    assert len(seen.gaps_s) == 2 * min(requests, 3)
    assert not seen.damage


def write_replay(run_dir: Path, captured: list[Observation], **told: object) -> None:
    """A plan of three requests of which the last follows the second, replayed, and what each got when captured."""
    facts = {"replay": {"recording": "hour.jsonl", **told}}
    header = PlanHeader("story", 7, 3, (Window("steady", 0.0, 10.0),), 30.0, facts=facts)
    requests = [Request(k, float(k), "chat", raw=True, after=1 if k == 2 else None, think_s=0.5) for k in range(3)]
    (run_dir / "plan.jsonl").write_bytes(b"".join(plan_file.lines(header, requests)))
    write_log(run_dir / "log.player-0.bin", [seen._replace(due_s=seen.due_s + 3.0) for seen in observations(3)])
    if captured:
        write_log(run_dir / timeline.CAPTURED, captured)


def test_captured_answers_stand_beside_the_runs_own(tmp_path: Path) -> None:
    """The capture is the same plan with other observations, and its file is among those a verdict rests on."""
    write_replay(tmp_path, [seen._replace(ended_s=seen.due_s + 0.2, gaps_s=(0.1,)) for seen in observations(3)])
    read = timeline.read(tmp_path)
    assert read.captured is not None
    assert not read.damage
    assert (read.captured.observations["ended_s"] - read.captured.due_s).tolist() == pytest.approx([0.2] * 3)
    assert (len(read.captured.gaps_s), len(read.gaps_s)) == (3, 6)
    assert read.captured.classes == read.classes
    assert tmp_path / timeline.CAPTURED in timeline.log_files(tmp_path)


def test_who_waits_for_another_is_due_when_that_one_is_over(tmp_path: Path) -> None:
    """Its due moment is the one that the player saw; every other request keeps the plan's, and so does the capture."""
    write_replay(tmp_path, observations(3))
    read = timeline.read(tmp_path)
    assert read.due_s.tolist() == [0.0, 1.0, 5.0]
    assert read.captured is not None
    assert read.captured.due_s.tolist() == [0.0, 1.0, 2.0]
    (tmp_path / "log.player-0.bin").unlink()
    assert timeline.read(tmp_path).due_s.tolist() == [0.0, 1.0, 2.0]


def test_captured_answers_that_are_not_there_are_damage(tmp_path: Path) -> None:
    """A replay without its captured answers, or without some of them, says so; one of times alone has none."""
    write_replay(tmp_path, [])
    read = timeline.read(tmp_path)
    assert (read.captured, read.damage) == (None, ["captured.bin: not there, though the run replays a capture"])
    write_replay(tmp_path, observations(2))
    assert "captured.bin: 1 of 3 requests have no captured answer" in timeline.read(tmp_path).damage
    (tmp_path / timeline.CAPTURED).unlink()
    (tmp_path / "log.player-0.bin").unlink()
    write_replay(tmp_path, [], timing_only=True)
    assert not timeline.read(tmp_path).damage
