"""The few questions that a promotion asks the API server, as its pod may ask them.

Plain HTTPS with the pod's own token: get and patch, one namespace. It watches nothing and creates nothing.
"""

import json
import ssl
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

SECRETS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SERVER = "https://kubernetes.default.svc"
LIMIT_S = 10.0

Document = dict[str, Any]


class Cluster:
    """One namespace of the cluster at `server`. Every question raises OSError when it has no answer, or a refusal."""

    def __init__(self, server: str = SERVER, secrets: Path = SECRETS) -> None:
        self._secrets = secrets
        self._api = server.rstrip("/")
        self._namespace = (secrets / "namespace").read_text().strip()
        authority = secrets / "ca.crt"
        context = ssl.create_default_context(cafile=str(authority)) if server.startswith("https") else None
        handlers = [urllib.request.HTTPSHandler(context=context)] if context else []
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)

    def deployment(self, name: str) -> Document:
        """A Deployment."""
        return self._ask("GET", f"apis/apps/v1/namespaces/{self._namespace}/deployments/{name}")

    def patch_deployment(self, name: str, patch: Document) -> None:
        """Change a Deployment by a strategic merge."""
        self._ask("PATCH", f"apis/apps/v1/namespaces/{self._namespace}/deployments/{name}", patch)

    def patch_config(self, name: str, data: dict[str, str]) -> None:
        """Set keys of a ConfigMap."""
        self._ask("PATCH", f"api/v1/namespaces/{self._namespace}/configmaps/{name}", {"data": data})

    def pods(self, selector: str) -> list[Document]:
        """The pods with these labels."""
        path = f"api/v1/namespaces/{self._namespace}/pods?labelSelector={urllib.parse.quote(selector)}"
        pods: list[Document] = self._ask("GET", path)["items"]
        return pods

    def _ask(self, method: str, path: str, body: Document | None = None) -> Document:
        request = urllib.request.Request(  # noqa: S310 -- the API server's own address
            f"{self._api}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            # The token is read anew each time: kubelet replaces it within the hour.
            headers={"Authorization": f"Bearer {(self._secrets / 'token').read_text().strip()}"},
        )
        if body is not None:
            request.add_header("Content-Type", "application/strategic-merge-patch+json")
        with self._opener.open(request, timeout=LIMIT_S) as answer:
            document: Document = json.load(answer)
        return document
