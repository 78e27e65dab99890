"""The player sends captured requests: to the byte, on connections of their own, one after another where they were."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gevent
import numpy as np
import pytest
from recorder import POST, Heard, Recorder, wire

from harness import plan_file
from harness.drivers import pool as pools
from harness.drivers.collector import Collector
from harness.drivers.connection import Endpoint
from harness.drivers.part import Part, share
from harness.drivers.player import Played, Player
from harness.log import Blocks, read_log
from harness.model import Event, Outcome, Reading, Request, Tag, Window

pytestmark = pytest.mark.e2e  # sockets, in real time

ASKED = Request(index=0, due_s=0.0, class_name="chat", raw=True, group=0)
GET = b"GET /v1/models HTTP/1.1"
Plan = Sequence[tuple[Request, bytes]]


@dataclass
class Run:
    """What a run left behind: a row of each request, and what the server heard."""

    rows: np.ndarray
    entries: list[Event | Reading]
    heard: list[Heard]
    played: Played

    def outcomes(self) -> list[Outcome]:
        return [Outcome(code) for code in self.rows["outcome"]]

    def new_connections(self) -> list[bool]:
        return [bool(tags & Tag.NEW_CONNECTION) for tags in self.rows["tags"]]

    def gauge(self, name: str) -> float:
        return [entry.value for entry in self.entries if isinstance(entry, Reading) and entry.name == name][-1]


def planned(*asked: tuple[dict[str, Any], bytes]) -> Plan:
    return [(replace(ASKED, index=index, **fields), data) for index, (fields, data) in enumerate(asked)]


def play(folder: Path, plan: Plan, *, limit_s: float = 3.0, cap: float = float("inf")) -> Run:
    with Recorder() as server:
        header = plan_file.PlanHeader("replay", 0, len(plan), (Window("steady", 0.0, 1e9),), limit_s)
        lines = list(plan_file.lines(header, [request for request, _ in plan]))[1:]
        endpoints = Endpoint.of(f"http://127.0.0.1:{server.port}")
        collector = Collector(folder, 0)
        player = Player(lines, lambda request: plan[request.index][1], endpoints, limit_s, collector, cap)
        player.warm()
        played = player.play(time.monotonic() + 0.05)
        collector.close()
    rows = np.sort(np.concatenate([rows for rows, _ in Blocks(folder / "log.player-0.bin").new()]), order="index")
    assert rows["index"].tolist() == list(range(len(plan)))
    return Run(rows, list(read_log(folder / "log.player-0.jsonl", [])), server.heard, played)


def once_each(run: Run) -> list[bytes]:
    """The requests that the server heard, each on a connection of its own."""
    assert all(len(heard.requests) == 1 for heard in run.heard)
    return [bytes(heard.data) for heard in run.heard]


# The bytes -------------------------------------------------------------------------------------------------------

CHUNKED = b"transfer-encoding: chunked\r\n"
MALFORMED = {
    "broken_chunking": wire("status400", headers=CHUNKED, body=b"zz\r\nhello\r\n0\r\n\r\n"),
    "two_lengths": wire("status400", headers=b"content-length: 5\r\nContent-Length: 7\r\n", body=b"hello"),
    "length_and_chunks": wire("status400", headers=b"content-length: 3\r\n" + CHUNKED, body=b"5\r\nhello\r\n0\r\n\r\n"),
    "truncated_body": wire("fin400", headers=b"content-length: 5000\r\n", body=b'{"model":"ti'),
    "bad_json": wire("status400", body=b'{"model":"tiny","messages":[{]}'),
    "folded_header": wire("status400", headers=b"x-long: one\r\n two\r\ncontent-length: 2\r\n", body=b"{}"),
    "header_without_colon": wire("status400", headers=b"nonsense\r\ncontent-length: 2\r\n", body=b"{}"),
    "bad_request_line": wire("status400", line=b"POST  /v1/chat/completions\tHTTP/9.9", body=b"\x00\xff\xfe"),
    "bare_line_feeds": wire("status400", headers=b"x-bare: 1\ncontent-length: 2\r\n", body=b"{}"),
}


def test_malformed_requests_reach_the_server_to_the_byte(tmp_path: Path) -> None:
    """However broken they are, what the server reads is what was captured, and the refusal is the expected one."""
    fields = [
        {
            "group": number,
            "due_s": 0.02 * number,
            "flaw": flaw,
            "expect": ("400",),
            "half_close_s": 0.05 if flaw == "truncated_body" else None,
        }
        for number, flaw in enumerate(MALFORMED)
    ]
    run = play(tmp_path, planned(*zip(fields, MALFORMED.values(), strict=True)))
    assert sorted(once_each(run)) == sorted(MALFORMED.values())
    assert run.outcomes() == [Outcome.REJECTED_AS_EXPECTED] * len(MALFORMED)


def test_a_malformed_request_that_is_served_is_told(tmp_path: Path) -> None:
    """A refusal was captured, and now the request is accepted."""
    run = play(tmp_path, planned(({"flaw": "bad_json", "expect": ("400",)}, wire("plain", body=b"{"))))
    assert run.outcomes() == [Outcome.ACCEPTED_BUT_BAD]


def test_a_request_that_a_server_closed_on_is_not_sent_again(tmp_path: Path) -> None:
    """Bytes that are wrong may be why: they are sent once, on a connection however long idle."""
    plan = planned(
        ({}, wire()), ({"after": 0, "think_s": 1.2, "flaw": "two_lengths"}, wire("close", headers=b"", body=b""))
    )
    run = play(tmp_path, plan)
    assert run.outcomes() == [Outcome.OK, Outcome.RESET]
    assert sum(len(heard.requests) for heard in run.heard) == 2


def test_a_half_close_reaches_the_server_and_the_answer_the_client(tmp_path: Path) -> None:
    """The client says that it sends no more, at its time, and still reads."""
    run = play(tmp_path, planned(({"half_close_s": 0.2}, wire("fin"))))
    (heard,) = run.heard
    assert (run.outcomes(), heard.ended) == ([Outcome.OK], "fin")
    assert heard.ended_s - heard.requests[0][0] > 0.15


def test_a_half_close_waits_until_all_is_written(tmp_path: Path) -> None:
    """A large body arrives whole before the end that was to come at once."""
    large = wire("fin", body=b"x" * 8_000_000)
    run = play(tmp_path, planned(({"half_close_s": 0.0}, large)))
    assert once_each(run) == [large]
    assert run.outcomes() == [Outcome.OK]


def test_clients_that_gave_up_give_up_after_as_long(tmp_path: Path) -> None:
    """One that waited three times as long is seen to wait three times as long, and both are recorded as ours."""
    plan = planned(
        ({"give_up_s": 0.3, "stream": True}, wire("never")),
        ({"give_up_s": 0.9, "group": 1, "stream": True}, wire("never")),
    )
    run = play(tmp_path, plan)
    waited_s = [heard.ended_s - heard.requests[0][0] for heard in run.heard]
    assert 2 < waited_s[1] / waited_s[0] < 4
    assert run.outcomes() == [Outcome.CANCELLED_BY_US] * 2
    assert all(tags & Tag.GAVE_UP for tags in run.rows["tags"])


# Connections -----------------------------------------------------------------------------------------------------


def test_a_group_keeps_its_connection(tmp_path: Path) -> None:
    """One connection carries all that follow each other, and it stood before the first."""
    run = play(tmp_path, planned(*[({"due_s": 0.1 * k}, wire()) for k in range(5)]))
    assert [len(heard.requests) for heard in run.heard] == [5]
    assert run.new_connections() == [False] * 5
    assert run.outcomes() == [Outcome.OK] * 5


def test_a_busy_connection_delays_nobody(tmp_path: Path) -> None:
    """A request that finds its group's connection busy opens another, says so, and leaves it to those that follow."""
    dues = (0.0, 0.1, 0.8, 0.9)
    run = play(tmp_path, planned(*[({"due_s": due_s}, wire("wait0.4")) for due_s in dues]))
    assert [len(heard.requests) for heard in run.heard] == [2, 2]
    assert run.new_connections() == [False, True, False, False]


def test_groups_share_no_connection(tmp_path: Path) -> None:
    """Whatever is idle elsewhere, each group has connections of its own, and those without a group have theirs."""
    groups = [0, 1, None, 2, 3, None] * 4
    plan = planned(
        *[
            ({"group": group, "due_s": 0.02 * k}, wire(headers=b"x-group: %d\r\n" % (9 if group is None else group)))
            for k, group in enumerate(groups)
        ]
    )
    run = play(tmp_path, plan)
    assert run.outcomes() == [Outcome.OK] * len(groups)
    on_each = [{data.partition(b"x-group: ")[2][:1] for _, data in heard.requests} for heard in run.heard]
    assert all(len(told) == 1 for told in on_each)


def test_a_group_closes_its_connections_when_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sees them go while the run goes on."""
    monkeypatch.setattr(pools, "_LINGER_S", 0.0)
    run = play(tmp_path, planned(({}, wire()), ({"group": 1, "due_s": 1.0}, wire())))
    first, second = run.heard
    assert first.ended == "fin"
    assert first.ended_s < second.requests[0][0]


def test_a_closed_connection_is_replaced_and_told(tmp_path: Path) -> None:
    """The server closed it: the next of the group opens another, with the handshake inside its times."""
    run = play(tmp_path, planned(({}, wire("close")), ({"due_s": 0.3}, wire())))
    assert run.outcomes() == [Outcome.RESET, Outcome.OK]
    assert run.new_connections() == [False, True]


# One after another -----------------------------------------------------------------------------------------------


def test_order_and_think_time_are_kept(tmp_path: Path) -> None:
    """Each falls due so long after the real end of the one before, however slow that was, and none overtakes."""
    waits_s = (0.2, 0.02, 0.1, 0.0)
    fields = [{"after": k - 1 if k else None, "think_s": 0.05 * k, "due_s": 0.01 * k} for k in range(4)]
    run = play(
        tmp_path, planned(*[(each, wire(f"wait{wait_s}")) for each, wait_s in zip(fields, waits_s, strict=True)])
    )
    rows = run.rows
    assert np.allclose(rows["due_s"][1:], rows["ended_s"][:-1] + np.array([0.05, 0.1, 0.15]), atol=1e-6)
    assert (rows["sent_s"] >= rows["due_s"] - 1e-4).all()
    (heard,) = run.heard
    assert [data for _, data in heard.requests] == [wire(f"wait{wait_s}") for wait_s in waits_s]


def test_a_stream_s_connection_carries_what_comes_at_once_after_it(tmp_path: Path) -> None:
    """The end of a message may come after its [DONE]: the next waits for its connection, as the captured client did."""
    plan = planned(
        ({"stream": True}, wire("stream0.2")),
        ({"after": 0, "stream": True}, wire("stream")),
        ({"after": 1}, wire()),
    )
    run = play(tmp_path, plan)
    assert run.outcomes() == [Outcome.OK] * 3
    assert [len(heard.requests) for heard in run.heard] == [3]
    assert run.rows["due_s"][1] - run.rows["ended_s"][0] > 0.1  # the user had the answer at its [DONE]


@pytest.mark.parametrize(
    ("fields", "do", "outcome"),
    [
        ({}, "close", Outcome.RESET),
        ({"give_up_s": 0.1}, "never", Outcome.CANCELLED_BY_US),
        ({}, "status503", Outcome.HTTP_5XX),
        ({}, "never", Outcome.TIMEOUT),
    ],
)
def test_whatever_became_of_one_the_next_comes(
    tmp_path: Path, fields: dict[str, Any], do: str, outcome: Outcome
) -> None:
    """A failed request dates the one after it as a served one does."""
    run = play(tmp_path, planned((fields, wire(do)), ({"after": 0, "think_s": 0.1}, wire())), limit_s=0.5)
    assert run.outcomes() == [outcome, Outcome.OK]
    assert run.rows["due_s"][1] == pytest.approx(run.rows["ended_s"][0] + 0.1, abs=1e-6)


def test_what_waited_in_vain_is_on_record(tmp_path: Path) -> None:
    """An answer that never ends leaves the requests after it unsent: each is observed, as open."""
    plan = planned(
        ({"stream": True}, wire("drip3")),
        ({"after": 0, "due_s": 0.5}, wire()),
        ({"after": 1, "due_s": 0.7}, wire()),
    )
    run = play(tmp_path, plan, limit_s=0.4)
    assert run.outcomes() == [Outcome.OPEN] * 3
    assert np.isnan(run.rows["sent_s"]).tolist() == [False, True, True]
    assert run.rows["due_s"][1:].tolist() == [0.5, 0.7]
    assert (run.played.sent, run.played.open, run.played.why) == (1, 1, "finished")


def test_a_run_that_is_asked_to_stop_sends_nothing_that_comes_after(tmp_path: Path) -> None:
    """The end of an answer dates nothing any more."""
    plan = planned(({}, wire("wait0.6")), ({"after": 0}, wire()), ({"due_s": 30.0, "group": 1}, wire()))
    with Recorder() as server:
        collector = Collector(tmp_path, 0)
        header = plan_file.PlanHeader("replay", 0, 3, (Window("steady", 0.0, 1e9),), 3.0)
        lines = list(plan_file.lines(header, [request for request, _ in plan]))[1:]
        endpoints = Endpoint.of(f"http://127.0.0.1:{server.port}")
        player = Player(lines, lambda request: plan[request.index][1], endpoints, 3.0, collector)
        gevent.spawn_later(0.3, player.stop)
        played = player.play(time.monotonic())
        collector.close()
    assert (played.sent, played.done, played.why) == (1, 1, "asked")
    assert sum(len(heard.requests) for heard in server.heard) == 1


# The cap ---------------------------------------------------------------------------------------------------------


def test_the_cap_sheds_what_falls_due_last_and_counts_it(tmp_path: Path) -> None:
    """With so many in flight the next is not sent: it is on record as open, and what comes after it still comes."""
    plan = planned(
        *[({"group": k, "due_s": 0.02 * k}, wire("wait0.5")) for k in range(4)],
        ({"group": 3, "after": 3, "think_s": 1.0}, wire()),
        ({"group": 4, "due_s": 1.0}, wire()),
    )
    run = play(tmp_path, plan, cap=2)
    ok, left = Outcome.OK, Outcome.OPEN
    assert run.outcomes() == [ok, ok, left, left, ok, ok]
    assert np.isnan(run.rows["sent_s"]).tolist() == [False, False, True, True, False, False]
    assert run.rows["due_s"][4] - run.rows["due_s"][3] >= 1.0
    assert (run.gauge("player.shed"), run.played.sent, run.played.open) == (2, 4, 0)


@pytest.mark.parametrize(("cap", "workers"), [(10, 3), (3, 3), (500, 7)])
def test_workers_share_the_cap(cap: int, workers: int) -> None:
    """All together have in flight what the plan says."""
    assert sum(share(cap, worker, workers) for worker in range(workers)) == cap
    assert share(None, 0, workers) == float("inf")
    assert share(1, workers - 1, workers) == 1


# Answers ---------------------------------------------------------------------------------------------------------


def test_other_methods_and_paths_are_answered_as_they_are(tmp_path: Path) -> None:
    """An answer to HEAD has no body whatever its length says, and what asks no model needs no content to be right."""
    plan = planned(
        ({"path": "/v1/models"}, wire("head", line=b"HEAD /v1/models HTTP/1.1", body=b"")),
        ({"path": "/health", "due_s": 0.1}, wire("text", line=b"GET /health HTTP/1.1", body=b"")),
        ({"path": "/v1/models?limit=1", "due_s": 0.2}, wire("status204", line=GET, body=b"")),
        ({"path": "/v1/models", "due_s": 0.3, "expect": ("404",)}, wire("status404", line=GET, body=b"")),
        ({"due_s": 0.4}, wire("text", line=POST)),
    )
    run = play(tmp_path, plan)
    ok = Outcome.OK
    assert run.outcomes() == [ok, ok, ok, Outcome.REJECTED_AS_EXPECTED, Outcome.MALFORMED]
    assert [len(heard.requests) for heard in run.heard] == [5]
    assert run.rows["status"].tolist() == [200, 200, 204, 404, 200]


def test_the_shape_of_answers_is_told_once(tmp_path: Path) -> None:
    """Each new set of members is in the log with the number that stands for it in the records."""
    plan = planned(
        *[({"due_s": 0.05 * k}, wire()) for k in range(3)],
        ({"due_s": 0.2, "stream": True}, wire("stream")),
        ({"due_s": 0.3, "path": "/health"}, wire("text")),
    )
    run = play(tmp_path, plan)
    told = {
        int(entry.name): entry.detail["members"]
        for entry in run.entries
        if isinstance(entry, Event) and entry.kind == "shape"
    }
    shapes = run.rows["shape"].tolist()
    assert shapes[0] == shapes[1] == shapes[2] != shapes[3]
    assert list(told) == [shapes[0], shapes[3]]
    assert "choices[].message.content:text" in told[shapes[0]]
    assert shapes[4] == 0


def test_a_plan_with_captured_requests_is_played_from_its_files(tmp_path: Path) -> None:
    """The bytes come out of the corpus by way of the named rewrites, and the cap out of the plan's facts."""
    captured = wire("wait0.4")
    requests = [replace(ASKED, index=k, group=k, text=(0, len(captured))) for k in range(3)]
    facts = {"replay": {"in_flight_cap": 2}}
    header = plan_file.PlanHeader("replay", 0, 3, (Window("steady", 0.0, 1e9),), 3.0, facts=facts)
    (tmp_path / "plan.jsonl").write_bytes(b"".join(plan_file.lines(header, requests)))
    (tmp_path / "corpus.bin").write_bytes(captured)
    (tmp_path / "run.json").write_text("{}")
    with Recorder() as server:
        url = f"http://127.0.0.1:{server.port}"
        (tmp_path / "target.yaml").write_text(
            f"kind: url\nurl: {url}\nmodel: tiny\ntokenizer: .cache/tiny\ngpu: none\n"
        )
        part = Part(tmp_path, 0, 1, None)
        part.warm()
        played = part.play(time.monotonic() + 0.05)
        part.close()
    assert (played.sent, played.done) == (2, 2)
    hosts = {data.split(b"\r\n")[1] for heard in server.heard for _, data in heard.requests}
    assert hosts == {b"host: 127.0.0.1:%d" % server.port}
