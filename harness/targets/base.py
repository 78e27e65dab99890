"""Where the stack under test is, and what must be known of it to plan, send and judge.

One file, shared with the stack that it may start. Secrets stay out of it: a header's value may name a variable of the
environment as `${NAME}`, which is read when requests are composed and never written down.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints

from harness import document
from harness.model import UsageError
from harness.units import spec

LOCAL = {"sim": Path("reference_stack/local/target.yaml"), "vllm": Path("reference_stack/local/target_vllm.yaml")}
_VARIABLE = re.compile(r"\$\{(\w+)\}")


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ValueError(
            f"{url!r} is not scheme, host and port such as http://127.0.0.1:8080; paths are the scenario's"
        )
    return url.rstrip("/")


def _page_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:8085/metrics")
    return url.rstrip("/")


BaseUrl = Annotated[str, AfterValidator(_base_url)]
PageUrl = Annotated[str, AfterValidator(_page_url)]
HeaderValue = Annotated[str, StringConstraints(pattern=r"^[\x20-\x7e]*$")]


@spec
class TargetFile:
    """The keys of a target file. `url` is what users call; each of `engines` is a replica behind it, with /metrics.

    `prompt_limit` is the longest prompt that the gateway takes, in tokens: the lengths of a scenario scale with it.
    `load_factor` scales its rates.
    """

    kind: Literal["local", "kubernetes", "url"]
    engine: Literal["", "sim", "vllm"] = ""
    url: BaseUrl
    engines: list[PageUrl] = field(default_factory=list)
    model: str
    tokenizer: Path
    profile: str = ""
    prometheus: PageUrl | None = None
    gpu: Literal["none", "simulated", "dcgm", "nvml"]
    gpu_metrics: PageUrl | None = None
    load_factor: Annotated[float, Field(gt=0)] = 1.0
    prompt_limit: Annotated[int, Field(ge=256)] = 16_384
    headers: dict[str, HeaderValue] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Target(TargetFile):
    """The stack under test; `path` is the file that names it."""

    path: Path

    @property
    def host(self) -> str:
        """The value of the Host header."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    def sent_headers(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The headers of every request, the environment's values in place. Raises UsageError when one is not set."""

        def value(match: re.Match[str]) -> str:
            if match[1] not in environment:
                raise UsageError(f"the target's headers name ${{{match[1]}}}, which is not set", str(self.path))
            return environment[match[1]]

        return {name: _VARIABLE.sub(value, text) for name, text in self.headers.items()}


def load(name: str, engine: str | None = None) -> Target:
    """The target that a file describes; `local` stands for the local stack's own file for the engine (default sim).

    Raises UsageError when there is no such file, or it is wrong.
    """
    path = Path(name)
    if name == "local":
        if (engine or "sim") not in LOCAL:
            raise UsageError(f"there is no engine {engine}; there are: {', '.join(LOCAL)}")
        path = LOCAL[engine or "sim"]
    target = Target(path=path, **vars(document.read(path).parse(TargetFile)))
    if target.kind == "local" and engine not in (None, target.engine):
        raise UsageError(f"{path} serves with engine {target.engine}, not {engine}")
    return target
