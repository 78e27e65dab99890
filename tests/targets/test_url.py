"""What a target is asked before anything is sent to it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from harness.model import UsageError
from harness.targets import base, url
from harness.targets.base import Target

MODELS = json.dumps({"object": "list", "data": [{"id": "tiny", "max_model_len": 18_432}, {"id": "other"}]})
METRICS = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",gpu_memory_utilization="0.82",num_gpu_blocks="100"} 1.0
"""


@contextmanager
def serving(models: str = MODELS, metrics: str = METRICS, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (metrics if self.path == "/metrics" else models).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def target(tmp_path: Path, url: str, model: str = "tiny") -> Target:
    (tmp_path / "tokenizer.json").write_text("{}")
    path = tmp_path / "target.yaml"
    path.write_text(f"kind: url\nurl: {url}\nengines: [{url}]\nmodel: {model}\ntokenizer: {tmp_path}\ngpu: none\n")
    return base.load(str(path))


def test_a_target_says_what_it_serves(tmp_path: Path) -> None:
    """Models, the longest context, and the share of the GPU that each engine took."""
    with serving() as at:
        told = url.preflight(target(tmp_path, at))
    assert told == {"models": ["other", "tiny"], "max_model_len": 18_432, "gpu_memory_utilization": {at: 0.82}}


def test_an_engine_that_does_not_tell_its_share_is_left_out(tmp_path: Path) -> None:
    """No metric, no figure: nothing is made up."""
    with serving(metrics="up 1\n") as at:
        assert url.preflight(target(tmp_path, at))["gpu_memory_utilization"] == {}


def test_a_model_that_is_not_served_is_told_with_those_that_are(tmp_path: Path) -> None:
    """The wrong name, and the right ones."""
    with (
        serving() as at,
        pytest.raises(UsageError, match=r"yaml:4: .* does not serve a model tinny; it serves: other, t"),
    ):
        url.preflight(target(tmp_path, at, model="tinny"))


def test_it_asks_as_the_player_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of the environment stands between us and the target, and a redirect is no answer."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving() as at:
        assert url.preflight(target(tmp_path, at))["models"]
    with serving(status=302) as at, pytest.raises(UsageError, match=r"/v1/models answers 302"):
        url.preflight(target(tmp_path, at))


@pytest.mark.parametrize(("models", "status"), [("<html>", 200), ('{"data": 5}', 200), ("no", 401)])
def test_an_answer_that_is_no_list_of_models_is_refused(tmp_path: Path, models: str, status: int) -> None:
    """A web page, other JSON or a refusal is no target."""
    with serving(models=models, status=status) as at, pytest.raises(UsageError, match=r"/v1/models answers"):
        url.preflight(target(tmp_path, at))


def test_nobody_there_is_one_sentence(tmp_path: Path) -> None:
    """A closed port is told with its URL."""
    with serving() as at:
        pass
    with pytest.raises(UsageError, match=f"yaml:2: {at} cannot be reached: no connection"):
        url.preflight(target(tmp_path, at))


def test_a_missing_tokenizer_is_told_first(tmp_path: Path) -> None:
    """Lengths cannot be planned without it: the file is named before anybody is asked."""
    aimed = target(tmp_path, "http://127.0.0.1:9")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"yaml:5: there is no .*/tokenizer\.json"):
        url.preflight(aimed)
