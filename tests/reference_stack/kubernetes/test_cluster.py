"""What a promotion asks an API server, on the wire (K8S-2)."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from reference_stack.kubernetes.cluster import Cluster

Asked = tuple[str, str, dict[str, str], bytes]


class Server(ThreadingHTTPServer):
    """Answers everything with one document, or with a refusal; `asked` is what came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[Asked] = []
        self.status, self.answer = 200, {"items": []}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append((self.command, self.path, dict(self.headers), body))
        answer = json.dumps(self.server.answer).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PATCH = _any

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def cluster(server: Server, tmp_path: Path) -> Cluster:
    for name, text in (("namespace", "llm-serving"), ("token", "first"), ("ca.crt", "")):
        (tmp_path / name).write_text(text)
    return Cluster(f"http://127.0.0.1:{server.server_port}", tmp_path)


def test_questions(cluster: Cluster, server: Server) -> None:
    """Its own namespace, a merge as a patch, the pod's token."""
    assert cluster.deployment("engine") == {"items": []}
    cluster.patch_deployment("engine", {"spec": {"replicas": 1}})
    cluster.patch_config("weights", {"routing.candidate": "1"})
    assert cluster.pods("a/b=c,d=e") == []
    assert [(method, path, body) for method, path, _, body in server.asked] == [
        ("GET", "/apis/apps/v1/namespaces/llm-serving/deployments/engine", b""),
        ("PATCH", "/apis/apps/v1/namespaces/llm-serving/deployments/engine", b'{"spec": {"replicas": 1}}'),
        ("PATCH", "/api/v1/namespaces/llm-serving/configmaps/weights", b'{"data": {"routing.candidate": "1"}}'),
        ("GET", "/api/v1/namespaces/llm-serving/pods?labelSelector=a/b%3Dc%2Cd%3De", b""),
    ]
    assert {headers["Authorization"] for _, _, headers, _ in server.asked} == {"Bearer first"}
    assert server.asked[1][2]["Content-Type"] == "application/strategic-merge-patch+json"


def test_token_is_read_anew(cluster: Cluster, server: Server, tmp_path: Path) -> None:
    """A promotion lasts longer than a token."""
    cluster.deployment("engine")
    (tmp_path / "token").write_text("second")
    cluster.deployment("engine")
    assert [headers["Authorization"] for _, _, headers, _ in server.asked] == ["Bearer first", "Bearer second"]


def test_a_refusal_is_an_error(cluster: Cluster, server: Server) -> None:
    """403 and the like are no answers."""
    server.status = 403
    with pytest.raises(OSError, match="403"):
        cluster.patch_config("weights", {})
