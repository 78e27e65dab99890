"""The fault on a card with a driver: whoever names the device, NVML on this machine is the witness."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from stub_card import CONTEXT_BYTES, GIB

pytestmark = pytest.mark.e2e

PLAY = """
import dataclasses, json, sys
from harness.chaos.fault import Refused
from harness.chaos.faults.gpu import GpuLeak
from harness.targets import base
target, fault = base.load(sys.argv[1]), GpuLeak(step_bytes=2**30, every_s=0.01, **json.loads(sys.argv[2]))
try:
    aim = fault.resolve(target)
except Refused as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit()
try:
    fault.inject(target, aim.state)
    applied = fault.applied(target, aim.state)
finally:
    fault.undo(target, aim.state)
print(json.dumps({"targets": aim.targets, "applied": applied, "undone": fault.undone(target, aim.state)}))
"""


@pytest.fixture
def exporter():
    """The URL of a page of DCGM's fields; `labels` are those of its one GPU."""

    class Page(BaseHTTPRequestHandler):
        labels = ""

        def do_GET(self):
            fields = ("DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_USED")
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"{field}{{{Page.labels}}} 1\n" for field in fields).encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Page.url = f"http://127.0.0.1:{server.server_port}/metrics"
    yield Page
    server.shutdown()
    server.server_close()


def played(card, tmp_path, target, **fault):
    """What came of the fault on a target, in a process that has the card."""
    keys = {"kind": "url", "url": "http://127.0.0.1:9", "model": "tiny", "tokenizer": "tiny"} | target
    file = tmp_path / "target.yaml"
    file.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in keys.items()))
    with card.python("-c", PLAY, str(file), json.dumps(fault)) as process:
        return json.loads(process.stdout.read())


@pytest.mark.parametrize("device", [None, 0, "GPU-stub"])
def test_nvml(card, tmp_path, monkeypatch, device):
    """Named or not, the device loses what was aimed at and the driver's context, and gets it all back."""
    monkeypatch.chdir(tmp_path)
    seen = played(card, tmp_path, {"gpu": "nvml"}, share=0.25, device=device)
    assert seen["targets"] == ["GPU-stub"]
    assert seen["applied"]["fell_bytes"] == 4 * GIB + CONTEXT_BYTES and not seen["applied"]["simulated"]
    assert seen["undone"]["fell_bytes"] == 0


def test_dcgm(card, tmp_path, monkeypatch, exporter):
    """A device that an exporter names by its own labels is leaked on here, and counted by NVML, not by the exporter."""
    monkeypatch.chdir(tmp_path)
    exporter.labels = 'gpu="3",UUID="GPU-stub",Hostname="node-1"'
    target = {"gpu": "dcgm", "gpu_metrics": exporter.url, "gpus": {"Hostname": "node-1"}}
    seen = played(card, tmp_path, target, share=0.25)
    assert seen["applied"]["fell_bytes"] == 4 * GIB + CONTEXT_BYTES
    assert seen["undone"]["fell_bytes"] == 0


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ('gpu="0",UUID="GPU-far"', "GPU-far cannot be leaked on from this machine: NVML has no device that serves"),
        (
            'gpu="0",UUID="GPU-stub",GPU_I_ID="2"',
            "GPU-stub/2 is a slice of a GPU (MIG), and a slice cannot be leaked on",
        ),
    ],
    ids=["elsewhere", "a slice"],
)
def test_devices_that_cannot_be_leaked_on(card, tmp_path, monkeypatch, exporter, labels, why):
    """A device of another machine, and a slice of one, are refused with the reason."""
    monkeypatch.chdir(tmp_path)
    exporter.labels = labels
    assert played(card, tmp_path, {"gpu": "dcgm", "gpu_metrics": exporter.url}) == {"refused": why}
