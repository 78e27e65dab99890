"""Peers are read as they write, and one that cannot be had says why."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.trial import Load


def test_aiperf_record(tmp_path: Path) -> None:
    """aiperf's units become seconds, its credit the due moment; failed requests claim nothing."""
    good = {
        "metadata": {"x_request_id": "u", "credit_issued_ns": 1_000_000_000, "request_start_ns": 1_250_000_000},
        "metrics": {"time_to_first_token": {"value": 50.0}, "request_latency": {"value": 360.0}},
        "error": None,
    }
    bad = good | {"error": {"code": 500}, "metrics": {}}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "profile_export.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    (row,) = peers.Aiperf().claims(tmp_path)
    assert row.tolist() == ("u", 1.0, 1.25, 0.05, 0.36)


def test_guidellm_report(tmp_path: Path) -> None:
    """guidellm's moments become durations from its own start of the request."""
    timings = {"targeted_start": 9.0, "request_start": 10.0, "first_token_iteration": 10.5, "request_end": 11.0}
    report = {"benchmarks": [{"requests": {"successful": [{"info": {"timings": timings}}]}}]}
    (tmp_path / "out.json").write_text(json.dumps(report))
    (row,) = peers.Guidellm().claims(tmp_path)
    assert row.tolist() == ("", 9.0, 10.0, 0.5, 1.0)


def test_inference_perf_records(tmp_path: Path) -> None:
    """inference-perf claims no due moment: its lag is unknown, not zero."""
    record = {
        "start_time": 10.0,
        "end_time": 11.0,
        "error": None,
        "info": {"response_metrics": {"output_token_times": [10.5, 10.6]}},
    }
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "per_request_lifecycle_metrics.json").write_text(json.dumps([record]))
    (row,) = peers.InferencePerf().claims(tmp_path)
    assert np.isnan(row["due_s"])
    assert (row["sent_s"], row["ttft_s"], row["e2e_s"]) == (10.0, 0.5, 1.0)


def test_every_peer_is_pinned() -> None:
    """Each peer that is installed has a file of exact versions that names its Python."""
    for peer in peers.PEERS[1:]:
        first, *pins = (peers.HERE / f"requirements-{peer.name}.txt").read_text().splitlines()
        assert first.startswith("# python: 3.")
        assert any(pin.startswith(f"{peer.name}==") for pin in pins)
        assert all("==" in pin for pin in pins)


def test_no_python_no_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the Python that a peer needs has a reason, and nothing is installed."""
    monkeypatch.setattr(peers, "CACHE", tmp_path)
    monkeypatch.setattr(peers, "_search_path", lambda version: "")
    peers.why_absent.cache_clear()
    assert peers.why_absent("inference-perf") == "not installed: needs Python 3.12"
    peers.why_absent.cache_clear()
    assert list(tmp_path.iterdir()) == []


def test_fast_http_gets_its_load(tmp_path: Path) -> None:
    """The locustfile reads rate, seed and count from its environment."""
    peer = peers.FastHttp()
    peer.command("http://127.0.0.1:1", Load(50, 2, seed=4), tmp_path)
    load = json.loads(peer.environment()["BENCH_LOAD"])
    assert (load["rate_per_s"], load["requests"], load["seed"]) == (50, 100, 4)
