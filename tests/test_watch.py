"""The watcher beside small servers that answer as Prometheus, an exporter and an engine do, well and badly."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from harness import sources, watch
from harness.log import read_log
from harness.model import Event, Reading
from harness.targets.base import Target
from tests.support.waiting import until

LIMIT_S = 20.0
MIB = 2**20
EXPORTER = """\
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-0",simulated="true"} 800
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-1",simulated="true"} 400
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-0",simulated="true"} 200
DCGM_FI_DEV_FB_FREE{gpu="1",UUID="GPU-1",simulated="true"} 600
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-0",simulated="true"} 55
"""
ENGINE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="tiny"} 7.0
vllm:num_preemptions_created{engine="0",model_name="tiny"} 1.7e9
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} NaN
"""


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Nobody wants to wait a second for each sample of a test."""
    monkeypatch.setattr(watch, "INTERVAL_S", 0.05)


@pytest.fixture
def serve():
    """Starts a server that answers every GET with what `answer(path)` returns; its url."""
    servers = []

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                status, body = answer(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # a client that gave up is what some tests are about
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def matrix(*series, **more):
    """An answer of Prometheus: (name, gpu, [(moment, value), ...]) each."""
    result = [
        {"metric": {"__name__": name, "UUID": gpu, "gpu": "0"}, "values": [[at_s, value] for at_s, value in values]}
        for name, gpu, values in series
    ]
    return 200, json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}, **more})


def rules(*listed):
    """An answer of Prometheus to who asks for its alert rules."""
    return 200, json.dumps({"status": "success", "data": {"groups": [{"name": "serving", "rules": listed}]}})


def memory(gpu, *moments, free="200"):
    """The two memory fields of one GPU at these moments."""
    return ("DCGM_FI_DEV_FB_FREE", gpu, [(t, free) for t in moments]), (
        sources.USED,
        gpu,
        [(t, "800") for t in moments],
    )


def clocked(answer, ahead_s=0.0):
    """A Prometheus that answers `time()` with its own clock, and queries as `answer(path)` does; it has no rules."""

    def by_path(path):
        if path.startswith("/api/v1/rules"):
            return rules()
        if "time%28%29" not in path:
            return answer(path)
        now_s = time.time() + ahead_s
        told = {"resultType": "scalar", "result": [now_s, str(now_s)]}
        return 200, json.dumps({"status": "success", "data": told})

    return by_path


def target_of(tmp_path, **keys):
    lines = {"kind": "url", "url": "http://127.0.0.1:9", "model": "tiny", "tokenizer": ".cache/tiny", "gpu": "none"}
    (tmp_path / "target.yaml").write_text(json.dumps({**lines, **keys}))
    return Target(path=tmp_path / "target.yaml", **{**lines, "engines": [], **keys})


class Watched:
    """A watcher in a thread, on a run whose origin is now."""

    def __init__(self, run_dir):
        self.run_dir, self.stop = run_dir, threading.Event()
        self.thread = threading.Thread(target=watch.watch, args=(run_dir, self.stop), daemon=True)

    def __enter__(self):
        self.thread.start()
        until(lambda: self.events("ready"), "the watcher is ready")
        self.origin = {"origin_monotonic_s": time.monotonic(), "origin_wall_s": time.time()}
        (self.run_dir / "run.json").write_text(json.dumps(self.origin))
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        self.stop.set()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()

    def log(self):
        path = self.run_dir / "log.watch.jsonl"
        return list(read_log(path, [])) if path.exists() else []

    def events(self, kind):
        return [entry for entry in self.log() if isinstance(entry, Event) and entry.kind == kind]

    def readings(self, name):
        return [entry for entry in self.log() if isinstance(entry, Reading) and entry.name == name]


def test_exporter_page(tmp_path, serve):
    """Without a Prometheus the exporter is read: each GPU's free and total at one moment, and what it announced."""
    url = serve(lambda _: (200, EXPORTER))
    target_of(tmp_path, gpu="simulated", gpu_metrics=f"{url}/metrics")
    with Watched(tmp_path) as watched:
        until(lambda: len(watched.readings("gpu.free_bytes")) >= 4, "readings are there")
    (announced,) = watched.events("watching")
    assert announced.detail["series"] == 2 and announced.detail["gpus"] == ["GPU-0", "GPU-1"]
    assert announced.detail["interval_s"] == watch.INTERVAL_S and announced.detail["simulated"] is True
    assert announced.detail["total"] == "DCGM_FI_DEV_FB_FREE + DCGM_FI_DEV_FB_USED"
    free, total = watched.readings("gpu.free_bytes"), watched.readings("gpu.total_bytes")
    assert [(r.labels["gpu"], r.value) for r in free[:2]] == [("GPU-0", 200 * MIB), ("GPU-1", 600 * MIB)]
    assert [r.value for r in total[:2]] == [1000 * MIB, 1000 * MIB] and free[0].at_s == total[0].at_s
    assert watched.readings("gpu.utilisation")[0].value == 0.55
    assert watched.events("stopped")[0].detail == {"why": "asked"}


def test_no_gpu_is_said(tmp_path):
    """A target without a GPU is announced as such, and the run is watched all the same."""
    target_of(tmp_path)
    with Watched(tmp_path) as watched:
        pass
    assert watched.events("watching")[0].detail["source"] == "none" and watched.events("stopped")


def test_silent_exporter_is_no_series(tmp_path):
    """A GPU whose exporter does not answer gives a note and zero announced series: nothing that could pass."""
    target_of(tmp_path, gpu="dcgm", gpu_metrics="http://127.0.0.1:9/metrics")
    with Watched(tmp_path) as watched:
        pass
    assert watched.events("watching")[0].detail["series"] == 0
    assert "GPUs are not read here" in watched.events("note")[0].detail["why"]


def test_nvml_that_is_not_installed(tmp_path, monkeypatch):
    """`gpu: nvml` without its package names the package."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    target_of(tmp_path, gpu="nvml")
    with Watched(tmp_path) as watched:
        pass
    assert "nvidia-ml-py" in watched.events("note")[0].detail["why"]


def test_engine_metrics(tmp_path, serve):
    """The engine's gauges and counters keep vLLM's names and raw values, `nan` too; nothing else is read."""
    url = serve(lambda _: (200, ENGINE))
    target_of(tmp_path, engines=[url])
    with Watched(tmp_path) as watched:
        until(lambda: watched.readings("vllm:kv_cache_usage_perc"), "readings are there")
    assert watched.readings("vllm:num_requests_running")[0].value == 3.0
    assert watched.readings("vllm:num_preemptions_total")[0].value == 7.0
    assert watched.readings("vllm:num_preemptions_total")[0].labels == {"engine": url}
    assert math.isnan(watched.readings("vllm:kv_cache_usage_perc")[0].value)
    assert {e.name for e in watched.log() if isinstance(e, Reading)} <= set(sources.ENGINE_METRICS)


def test_ranks_are_told_apart(tmp_path, serve):
    """Two data-parallel engines behind one port are two series."""
    page = 'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 2\n'
    url = serve(lambda _: (200, page))
    seen = {r.labels["engine"]: r.value for r in sources.Engine(url).sample()}
    assert seen == {url: 1.0, f"{url}#1": 2.0}


def test_requests_are_counted_whatever_ended_them(tmp_path, serve):
    """What an engine has finished is one reading: the sum over the reasons, which are labels."""
    counts = {"stop": 5, "length": 7, "abort": 1}
    page = "".join(f'vllm:request_success_total{{engine="0",finished_reason="{r}"}} {n}\n' for r, n in counts.items())
    url = serve(lambda _: (200, page))
    (seen,) = sources.Engine(url).sample()
    assert (seen.name, seen.value, seen.labels) == ("vllm:request_success_total", 13.0, {"engine": url})


def test_a_missed_scrape_is_an_event(tmp_path, serve):
    """An engine that answers 500 leaves no reading, and one event however often it is asked meanwhile."""
    asked = []
    url = serve(lambda path: (asked.append(path) or 500, "no"))
    target_of(tmp_path, engines=[url])
    with Watched(tmp_path) as watched:
        until(lambda: len(asked) >= 3, "it was asked three times")
    (failed,) = watched.events("scrape_failed")
    assert failed.name == url and "500" in failed.detail["why"] and failed.detail["missed"] == 1
    assert not [entry for entry in watched.log() if isinstance(entry, Reading)]


def test_a_frozen_engine_delays_nobody(tmp_path, serve, monkeypatch):
    """While the question to one engine hangs, the GPUs are still read."""
    monkeypatch.setattr(sources, "TIMEOUT_S", LIMIT_S)
    asked, thawed = threading.Event(), threading.Event()
    engine = serve(lambda _: (200, str(asked.set() or thawed.wait(2 * LIMIT_S))))
    exporter = serve(lambda _: (200, EXPORTER))
    target_of(tmp_path, gpu="dcgm", gpu_metrics=f"{exporter}/metrics", engines=[engine])
    with Watched(tmp_path) as watched:
        assert asked.wait(LIMIT_S)
        before = len(watched.readings("gpu.free_bytes"))
        until(lambda: len(watched.readings("gpu.free_bytes")) >= before + 6, "readings are there")
        assert not watched.events("scrape_failed")
        thawed.set()


def test_prometheus_samples_keep_their_own_times(tmp_path, serve):
    """Samples come with the times Prometheus took them at, each once, however often a range shows them again."""
    wall_s = time.time()
    moments = [round(wall_s) - 4, round(wall_s) - 2]
    asked = []

    def answer(path):
        asked.append(path)
        moments.append(moments[-1] + 2)
        return matrix(*memory("GPU-0", *moments[-8:]))

    url = serve(clocked(answer))
    target_of(tmp_path, gpu="simulated", prometheus=url, gpu_metrics="http://127.0.0.1:9/metrics")
    with Watched(tmp_path) as watched:
        until(lambda: len(watched.readings("gpu.free_bytes")) >= 5, "readings are there")
    announced = watched.events("watching")[0].detail
    assert (announced["source"], announced["series"], announced["interval_s"]) == (url, 1, 2.0)
    times = [r.at_s + watched.origin["origin_wall_s"] for r in watched.readings("gpu.free_bytes")]
    assert times == pytest.approx(moments[: len(times)], abs=1e-3)
    assert all(re.search(r"/api/v1/query\?query=.*%5B\d+s%5D$", path) for path in asked), "a range, asked for now"
    assert int(re.search(r"%5B(\d+)s%5D$", asked[0])[1]) > 120, "holds two samples that are a minute apart"


@pytest.mark.parametrize(("ahead_s", "way"), [(5.0, "ahead of"), (-5.0, "behind")])
def test_a_clock_that_differs_is_refused(tmp_path, serve, ahead_s, way):
    """A Prometheus whose clock is off by more than its samples lie apart is not read, and both places say why."""
    now_s = time.time()
    url = serve(clocked(lambda _: matrix(*memory("GPU-0", now_s - 2, now_s)), ahead_s))
    target_of(tmp_path, gpu="simulated", prometheus=url)
    with Watched(tmp_path) as watched:
        pass
    (announced,) = watched.events("watching")
    assert announced.detail["series"] == 0
    assert re.search(rf"\d\.\d s {way} this machine's, more than the 2 s", announced.detail["why"])
    assert announced.detail["why"] in watched.events("note")[0].detail["why"]


def test_the_gpus_of_others_are_left_out(tmp_path, serve):
    """Only the GPUs that the target names count, on an exporter's page as in a Prometheus's selector."""
    url = serve(lambda _: (200, EXPORTER))
    target_of(tmp_path, gpu="dcgm", gpu_metrics=f"{url}/metrics", gpus={"UUID": ["GPU-1", "GPU-7"]})
    with Watched(tmp_path) as watched:
        until(lambda: len(watched.readings("gpu.free_bytes")) >= 2, "readings are there")
    assert watched.events("watching")[0].detail["gpus"] == ["GPU-1"]
    assert {reading.labels["gpu"] for reading in watched.readings("gpu.free_bytes")} == {"GPU-1"}
    assert sources._selector({"Hostname": ["node-1.x", 'no"de']}) == (
        '{__name__=~"DCGM_FI_DEV_FB_FREE|DCGM_FI_DEV_FB_USED|DCGM_FI_DEV_FB_RESERVED|DCGM_FI_DEV_GPU_UTIL",'
        r'Hostname=~"node\\-1\\.x|no\"de"}'
    )


def test_nvml_devices_are_told_apart_by_index_or_uuid(monkeypatch):
    """Of the devices of a machine those that the target names are read; none of them is an error."""
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda n: n,
        nvmlDeviceGetUUID=lambda n: f"GPU-{'ab'[n]}",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert sources.Nvml({}).gpus == ["GPU-a", "GPU-b"]
    assert sources.Nvml({"gpu": ["1"]}).gpus == ["GPU-b"]
    with pytest.raises(sources.Unwatchable, match="no device that serves"):
        sources.Nvml({"UUID": ["GPU-c"]})


def ask(url):
    """One question to a stub that answers as Prometheus."""
    return sources.Prometheus(url, {}).ask()


def test_nan_stays_nan(serve):
    """The string NaN of a sample is the number nan, never zero and never dropped."""
    url = serve(lambda _: matrix(*memory("GPU-0", 10, 11, free="NaN")))
    source = sources.Dcgm(url, "wall", sources.Prometheus(url, {}).ask, ask(url))
    free = [r.value for r in source.sample() if r.name == "gpu.free_bytes"]
    assert len(free) == 2 and all(map(math.isnan, free))


def test_empty_answer_is_no_samples(serve):
    """An empty result is no samples, and a Prometheus that has none is not used."""
    url = serve(lambda _: matrix())
    assert ask(url) == []
    with pytest.raises(sources.Unwatchable):
        sources.Dcgm(url, "wall", sources.Prometheus(url, {}).ask, ask(url))


def test_warnings_drop_the_answer(tmp_path, serve):
    """An answer that calls itself partial gives a note and no reading: the judge must see a gap."""
    now_s, calls = round(time.time()), []

    def answer(_):
        calls.append(1)
        late = {"warnings": ["one shard is down"]} if len(calls) > 1 else {}
        return matrix(*memory("GPU-0", now_s - 1, now_s, *([now_s + 1] if late else [])), **late)

    target_of(tmp_path, gpu="simulated", prometheus=serve(clocked(answer)))
    with Watched(tmp_path) as watched:
        until(lambda: watched.events("note")[1:], "a note is there")
    assert watched.events("note")[1].detail["why"] == "one shard is down"
    assert not watched.readings("gpu.free_bytes") and not watched.events("scrape_failed")


def test_slow_prometheus_is_given_up(serve):
    """A Prometheus that does not answer in time is an error, for its client has no limit of its own."""
    done = threading.Event()
    url = serve(lambda _: (200, str(done.wait(LIMIT_S))))
    with pytest.raises(OSError, match="timed out"):
        ask(url)
    done.set()


@pytest.mark.parametrize(
    "answer",
    [
        (500, "no"),
        (200, "<html>"),
        (200, '{"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "2"]}]}}'),
        (200, '{"status": "success", "data": {"resultType": "scalar", "result": [1, "2"]}}'),
    ],
)
def test_answers_that_are_no_samples(serve, answer):
    """A refusal, a page of HTML, a vector and a scalar are errors, never values."""
    url = serve(lambda _: answer)
    with pytest.raises((OSError, ValueError)):
        ask(url)


def test_a_total_is_never_of_other_parts():
    """A moment that lacks a field which was there at the start gives no memory reading: a gap, not another ratio."""
    fields = (sources.FREE, sources.USED, sources.RESERVED)
    first = [Reading(1.0, name, 10.0, {"UUID": "GPU-0"}) for name in fields]
    lacking = [Reading(2.0, name, 10.0, {"UUID": "GPU-0"}) for name in fields[:2]]
    source = sources.Dcgm("x", "wall", lambda: first + lacking, first)
    assert [(r.at_s, r.name, r.value / MIB) for r in source.sample()] == [
        (1.0, "gpu.free_bytes", 10.0),
        (1.0, "gpu.total_bytes", 30.0),
    ]


def test_devices_are_told_apart():
    """MIG slices are devices of their own; pod labels that come and go are not part of a name."""
    assert sources.gpu_of({"UUID": "GPU-a", "GPU_I_ID": "3", "pod": "x"}) == "GPU-a/3"
    assert sources.gpu_of({"gpu": "1", "pod": "y"}) == "GPU-1"


def start(run_dir, code="import harness.watch as w; w.main()", **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def logged(run_dir, kind):
    path = run_dir / "log.watch.jsonl"
    return path.exists() and any(isinstance(e, Event) and e.kind == kind for e in read_log(path, []))


@pytest.mark.e2e
def test_sigterm_ends_it_and_ctrl_c_does_not(tmp_path):
    """Ctrl-C is the conductor's: the watcher goes on until SIGTERM, says that it stopped, and exits 0."""
    target_of(tmp_path)
    process = start(tmp_path, HARNESS_CONDUCTOR=str(os.getpid()))
    until(lambda: logged(tmp_path, "ready"), "the watcher is ready")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0 and logged(tmp_path, "stopped")


@pytest.mark.e2e
def test_the_conductors_death_ends_it(tmp_path):
    """When the process that started it is killed, the watcher stops and says so."""
    target_of(tmp_path)
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-m', 'harness.watch', sys.argv[1]]); "
        "print(p.pid, flush=True); p.wait()"
    )
    conductor = start(tmp_path, code)
    int(conductor.stdout.readline())
    until(lambda: logged(tmp_path, "ready"), "the watcher is ready")
    conductor.kill()
    conductor.wait(LIMIT_S)
    until(lambda: logged(tmp_path, "stopped"), "the watcher has stopped")


@pytest.mark.e2e
def test_a_conductor_that_is_already_gone(tmp_path):
    """A watcher whose conductor died before it could ask to be told stops at once."""
    target_of(tmp_path)
    process = start(tmp_path, HARNESS_CONDUCTOR="1")
    assert process.wait(LIMIT_S) == 0 and logged(tmp_path, "stopped")
