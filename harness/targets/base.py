"""Where the stack under test is, and what must be known of it to plan, send and judge.

One file, shared with the stack that it may start. Secrets stay out of it: a header's value may name a variable of the
environment as `${NAME}`, which is read when requests are composed and never written down.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from harness import document
from harness.document import Place
from harness.headers import Headers, is_value
from harness.model import PROMPT_LIMIT_TOKENS, UsageError
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
OneOrMore = Annotated[
    list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value), Field(min_length=1)
]


@spec
class TargetFile:
    """The keys of a target file. `url` is what users call; each of `engines` is a replica behind it, with /metrics.

    `prompt_limit` is the longest prompt that the gateway takes, in tokens: the lengths of a scenario scale with it.
    `load_factor` scales its rates, `alert_scale` the times in the alert rules of a local stack. `gpus` says which GPUs
    serve, by the labels of their metrics, where the exporter or the Prometheus knows others too: `{Hostname: node-1}`,
    or several values, `{UUID: [GPU-5e2f, GPU-77b0]}`. `chaos: allowed` lets experiments break a target whose name
    sounds like production.
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
    gpus: dict[str, OneOrMore] = field(default_factory=dict)
    load_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    alert_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    prompt_limit: Annotated[int, Field(ge=256)] = PROMPT_LIMIT_TOKENS
    headers: Headers = field(default_factory=dict)
    chaos: Literal["", "allowed"] = ""


@dataclass(frozen=True, kw_only=True)
class Target(TargetFile):
    """The stack under test; `path` is the file that names it, `lines` the line of each of its keys."""

    path: Path
    lines: Mapping[Place, int] = field(default_factory=dict, repr=False, compare=False)

    def where(self, *place: str) -> str:
        """`file:line` of a key, for what turns out to be wrong with its value."""
        return f"{self.path}:{self.lines[place]}" if place in self.lines else str(self.path)

    @property
    def host(self) -> str:
        """The value of the Host header."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    def sent_headers(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The headers of every request, the environment's values in place.

        Raises UsageError when a variable is not set, or holds what no header may; its value is not told.
        """
        return {
            name: _VARIABLE.sub(partial(self._variable, name, environment), text) for name, text in self.headers.items()
        }

    def _variable(self, header: str, environment: Mapping[str, str], match: re.Match[str]) -> str:
        here = self.where("headers", header)
        value = environment.get(match[1])
        if value is None:
            raise UsageError(f"the header {header} names ${{{match[1]}}}, which is not set", here)
        if not is_value(value):
            raise UsageError(
                f"the header {header} cannot be sent: ${{{match[1]}}} holds a line break, or another character that is "
                "not printable ASCII",
                here,
            )
        return value


def load(name: str, engine: str | None = None) -> Target:
    """The target that a file describes; `local` stands for the local stack's own file for the engine (default sim).

    Raises UsageError when there is no such file, it is wrong, or it leaves open which GPUs serve.
    """
    path = Path(name)
    if name == "local":
        if (engine or "sim") not in LOCAL:
            raise UsageError(f"there is no engine {engine}; there are: {', '.join(LOCAL)}")
        path = LOCAL[engine or "sim"]
    written = document.read(path)
    target = Target(path=path, lines=written.lines, **vars(written.parse(TargetFile)))
    if target.kind == "local" and engine not in (None, target.engine):
        raise UsageError(f"the target serves with engine {target.engine}, not {engine}", target.where("engine"))
    if target.gpu == "dcgm" and target.prometheus and not target.gpus:
        raise UsageError(
            "`gpus` is missing: a Prometheus may know the GPUs of others, so say which serve, as in "
            "`gpus: {Hostname: node-1}`",
            target.where("prometheus"),
        )
    return target
