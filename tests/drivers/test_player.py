"""The player against a server that misbehaves: every outcome told apart, every due time kept, nothing lost."""

import gc
import ssl
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scripted import Scripted, lay_out

from harness import timeline
from harness.drivers.part import Part
from harness.model import Outcome, Request, Tag

pytestmark = pytest.mark.e2e  # sockets, in real time

ASKED = Request(index=0, due_s=0.0, class_name="short", text=(0, 5), max_tokens=8, stream=True)
PLAIN = replace(ASKED, stream=False)
BAD = replace(ASKED, stream=False, flaw="empty_body", expect=("422",))


def due(requests: list[Request], apart_s: float = 0.01) -> list[Request]:
    return [replace(request, index=k, due_s=k * apart_s) for k, request in enumerate(requests)]


def play(run_dir: Path) -> timeline.Timeline:
    part = Part(run_dir, 0, 1, lambda *_: None)
    part.warm()
    part.play(time.monotonic() + 0.05)
    part.close()
    gc.unfreeze()
    return timeline.read(run_dir)


def to(path: str, like: Request = ASKED) -> Request:
    return replace(like, path=f"/{path}")


EXPECTED = [
    (to("stream"), Outcome.OK),
    (to("plain", PLAIN), Outcome.OK),
    (to("plain_close", PLAIN), Outcome.OK),
    (to("to_the_close", PLAIN), Outcome.OK),
    (to("interim"), Outcome.OK),
    (to("done_and_open"), Outcome.OK),
    (to("status_422", BAD), Outcome.REJECTED_AS_EXPECTED),
    (to("plain", BAD), Outcome.ACCEPTED_BUT_BAD),
    (to("status_422"), Outcome.REJECTED),
    (to("status_429"), Outcome.RATE_LIMITED),
    (to("status_503"), Outcome.HTTP_5XX),
    (to("reset_before"), Outcome.RESET),
    (to("close_before"), Outcome.RESET),
    (to("reset_inside"), Outcome.RESET),
    (to("silent"), Outcome.TIMEOUT),
    (to("stalls"), Outcome.STALLED),
    (to("cut"), Outcome.TRUNCATED),
    (to("no_done"), Outcome.TRUNCATED),
    (to("error_inside"), Outcome.ERROR_IN_STREAM),
    (to("empty"), Outcome.EMPTY),
    (to("html"), Outcome.MALFORMED),
    (to("no_http"), Outcome.MALFORMED),
    (replace(to("slow"), give_up_s=0.3), Outcome.CANCELLED_BY_US),
    (to("drips"), Outcome.OPEN),
    (replace(to("early_413", BAD), flaw="oversized_body", expect=("413",)), Outcome.REJECTED_AS_EXPECTED),
]


@pytest.fixture(scope="module")
def told_apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[timeline.Timeline, Scripted]:
    """One run of all misbehaviours at once."""
    with Scripted() as server:
        requests = due([request for request, _ in EXPECTED])
        run_dir = lay_out(tmp_path_factory.mktemp("r") / "run", f"http://127.0.0.1:{server.port}", requests)
        return play(run_dir), server


@pytest.mark.parametrize("number", range(len(EXPECTED)), ids=[request.path for request, _ in EXPECTED])
def test_every_outcome_is_told_apart(told_apart: tuple[timeline.Timeline, Scripted], number: int) -> None:
    """What the server did to a request is what the record says, though all were in flight together."""
    assert Outcome(told_apart[0].observations["outcome"][number]) is EXPECTED[number][1]


def test_every_request_is_observed_once_and_sent_once(told_apart: tuple[timeline.Timeline, Scripted]) -> None:
    """A broken request is not tried again, and none is lost."""
    seen, server = told_apart
    assert seen.seen.all()
    assert seen.damage == []
    assert set(server.seen.values()) == {1}


def test_the_closed_set_is_covered(told_apart: tuple[timeline.Timeline, Scripted]) -> None:
    """Each outcome but REFUSED, which needs a target that is not there, was seen."""
    assert set(told_apart[0].observations["outcome"]) == set(Outcome) - {Outcome.REFUSED}


def test_a_client_that_gives_up_hangs_up_in_time(told_apart: tuple[timeline.Timeline, Scripted]) -> None:
    """The server sees the disconnect, and the record says that we did it."""
    seen, server = told_apart
    row = seen.observations[[request.path for request, _ in EXPECTED].index("/slow")]
    assert row["ended_s"] - row["sent_s"] >= 0.3
    assert Tag.GAVE_UP in Tag(int(row["tags"]))
    assert server.hung_up >= 1


def test_samples_of_errors_show_what_the_server_said(told_apart: tuple[timeline.Timeline, Scripted]) -> None:
    """The first bytes of a failed answer are kept; answers that are right leave no sample."""
    samples = {event.name: event.detail for event in told_apart[0].events if event.kind == "error_sample"}
    assert samples["http_5xx"]["body"] == "no healthy upstream"
    assert "engine died" in samples["error_in_stream"]["body"]
    assert not {"ok", "rejected_as_expected", "cancelled_by_us"} & set(samples)


def test_nobody_at_the_door_is_refused(tmp_path: Path) -> None:
    """Without a listener every request is REFUSED at its due time, and the player goes on."""
    with Scripted() as server:
        port = server.port
    seen = play(lay_out(tmp_path / "run", f"http://127.0.0.1:{port}", due([ASKED] * 20)))
    assert set(seen.observations["outcome"]) == {Outcome.REFUSED}
    assert (np.diff(seen.observations["sent_s"]) > 0).all()


def test_large_bodies_arrive_whole(tmp_path: Path) -> None:
    """A body of 120 kB and one over 10 MB are sent in slices, and every byte arrives."""
    text = b"word " * 24_000
    requests = due([replace(ASKED, text=(0, len(text))), replace(PLAIN, path="/plain", flaw="oversized_body")], 0.05)
    with Scripted() as server:
        seen = play(lay_out(tmp_path / "run", f"http://127.0.0.1:{server.port}", requests, 10.0, text))
        assert set(seen.observations["outcome"]) == {Outcome.OK}
        assert server.bytes_read > len(text) + 10 * 1024 * 1024


def test_connections_stand_before_the_run_and_are_kept(tmp_path: Path) -> None:
    """No request pays for a handshake that could have been made before, and answers leave their connection usable."""
    with Scripted(token_s=0.001) as server:
        seen = play(lay_out(tmp_path / "run", f"http://127.0.0.1:{server.port}", due([ASKED] * 50)))
        assert not (seen.observations["tags"] & Tag.NEW_CONNECTION).any()
        assert server.connections < 4 + 1.5 * 50 + 10


def test_a_slow_answer_delays_no_later_request(tmp_path: Path) -> None:
    """Requests whose answers never come do not hold back those that fall due after them."""
    requests = due([to("silent")] * 150 + [ASKED] * 5, 0.001)
    with Scripted() as server:
        seen = play(lay_out(tmp_path / "run", f"http://127.0.0.1:{server.port}", requests, 1.5))
    lag_s = seen.observations["sent_s"] - seen.observations["due_s"]
    assert (seen.observations["outcome"][:150] == Outcome.TIMEOUT).all()
    assert (seen.observations["outcome"][150:] == Outcome.OK).all()
    assert lag_s.max() < 1.0
    assert lag_s.min() > -0.001


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that signs itself, and its key in the same file."""
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=127.0.0.1"
    command += " -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out certificate.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def serving(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "certificate.pem", certificate / "key.pem")
    return context


def test_https_is_spoken_over_the_same_callbacks(
    tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams, large bodies and broken connections come through TLS as they do without."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "certificate.pem"))
    text = b"word " * 24_000
    requests = due([ASKED, replace(ASKED, text=(0, len(text))), to("plain", PLAIN), to("cut"), to("silent"), ASKED])
    with Scripted(serving(certificate)) as server:
        seen = play(lay_out(tmp_path / "run", f"https://127.0.0.1:{server.port}", requests, 1.0, text))
        assert server.bytes_read > len(text)
    ok, truncated, timeout = Outcome.OK, Outcome.TRUNCATED, Outcome.TIMEOUT
    assert list(seen.observations["outcome"]) == [ok, ok, ok, truncated, timeout, ok]
    assert (seen.observations["tokens_out"][[0, 1, 5]] == 2).all()


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path, certificate: Path) -> None:
    """Certificates are verified unless the user says whom to trust."""
    with Scripted(serving(certificate)) as server:
        seen = play(lay_out(tmp_path / "run", f"https://127.0.0.1:{server.port}", due([ASKED])))
    assert Outcome(seen.observations["outcome"][0]) is Outcome.REFUSED
