"""What an orchestrator is told: one YAML file, read strictly, checked whole before anything starts.

It refuses what it does not know. Every mistake is one sentence with file and line; nothing here connects to anything.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
import yaml
from pydantic import Field, model_validator

CONFIG_VARIABLE = "ORCHESTRATOR_CONFIG"  # tells a worker the path of its file

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/?#]+[^\s?#]*$")]


class UsageError(Exception):
    """The user can put this right: one sentence, with file and line where there is one."""


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Pool(_Strict):
    """Who serves: the gateway's URL and the model's name there."""

    url: Url
    model: str


class Routing(_Strict):
    """Which pool serves what; each names one of `pools`."""

    small_talk: str
    expert: str
    long_session: str
    over_budget: str
    session_limit_s: Seconds = 180.0
    small_talk_chars: Count = 120
    expert_words: tuple[str, ...] = ()


class Tier(_Strict):
    """What the keys of one kind may have; tokens are those of prompt and answer together."""

    requests_per_min: Count = 100
    tokens_per_min: Count = 2000
    burst_min: Seconds = 2.0  # minutes' worth of tokens that may be had at once
    tokens_per_h: Count = 50_000
    stream: Literal["immediate", "packed"] = "immediate"
    guarded: bool = False  # its answers pass the guardrail even where others' do not


class Answers(_Strict):
    """How long an answer may be, in tokens: when nothing is asked for, and at most."""

    default: Count = 256
    at_most: Count = 2048

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.default > self.at_most:
            raise ValueError("default is more than at_most")
        return self


class Redis(_Strict):
    """What the workers share, and what a request gets while it does not answer: through (open), or a 503 (closed)."""

    url: Annotated[str, Field(pattern=r"^(redis|rediss|unix)://\S+$")]
    when_down: Literal["open", "closed"]
    timeout_s: Seconds = 0.5
    connections: Count = 32


class Retrieval(_Strict):
    """Where notes come from: a file of some hundred documents, held in this process, or a collection of a Qdrant."""

    documents: Path | None = None
    url: Url | None = None
    collection: str = "documents"
    limit: Count = 3
    at_least: float = 0.2  # cosine similarity
    timeout_s: Seconds = 0.3

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.documents is None) == (self.url is None):
            raise ValueError("needs either documents or url")
        return self


class Sanitizer(_Strict):
    """What is taken out of prompts, and what is refused."""

    drop_system_messages: bool = True
    forbidden: tuple[str, ...] = ()  # phrases; whatever their case


class Guardrail(_Strict):
    """What no answer may say; `everyone` or only the tiers that are `guarded`."""

    phrases: Annotated[tuple[str, ...], Field(min_length=1)]
    everyone: bool = True


class Tracing(_Strict):
    """Where spans go; without it trace ids are passed on and nothing is sent."""

    otlp: Url


class Config(_Strict):
    """One orchestrator. A module without its section (retrieval, sanitizer, guardrail, tracing) is off."""

    port: Annotated[int, Field(gt=0, lt=65536)]
    host: pydantic.IPvAnyAddress = IPv4Address("127.0.0.1")
    keys: Path
    tokenizer: Path
    pools: Annotated[dict[str, Pool], Field(min_length=1)]
    routing: Routing
    tiers: Annotated[dict[str, Tier], Field(min_length=1)]
    redis: Redis
    model: str = "auto"  # the name that users give to have the pool chosen for them
    workers: Count = 2
    worker_memory_mib: Count = 2048
    cors_origins: tuple[Url, ...] = ()
    body_limit_bytes: Count = 1024 * 1024
    depth_limit: Count = 32
    system_prompt: str = ""
    answer_tokens: Answers = Answers()
    pack_s: Seconds = 0.5
    upstream_idle_s: Seconds = 60.0
    retrieval: Retrieval | None = None
    sanitizer: Sanitizer | None = None
    guardrail: Guardrail | None = None
    tracing: Tracing | None = None

    @model_validator(mode="after")
    def _names(self) -> Self:
        used = (self.routing.small_talk, self.routing.expert, self.routing.long_session, self.routing.over_budget)
        for name in used:
            if name not in self.pools:
                raise ValueError(f"routing names the pool {name}, which is not in pools")
        if self.model in self.pools:
            raise ValueError(f"model is {self.model}, which is a pool: then nothing would be routed")
        if self.guardrail is None and any(tier.guarded for tier in self.tiers.values()):
            raise ValueError("a tier is guarded and there is no guardrail")
        return self


def read(path: Path) -> Config:
    """The configuration in `path`. UsageError when it is not one, or names files that are not there."""
    config = document(path, Config)
    if not (config.tokenizer / "tokenizer.json").is_file():
        raise UsageError(f"{path}: tokenizer: there is no {config.tokenizer / 'tokenizer.json'}.")
    return config


Model = TypeVar("Model", bound=pydantic.BaseModel)


def document(path: Path, kind: type[Model]) -> Model:
    """A YAML file as a value of `kind`. UsageError with the line of the first key that is wrong."""
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
        value = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise UsageError(
            f"{path}:{mark.line + 1 if mark else 1}: not YAML: {getattr(error, 'problem', error)}."
        ) from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}:1: must be a mapping of keys to values.")
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        sentence = first["msg"].removeprefix("Value error, ")
        what = f"{where}: {sentence}" if where else sentence
        raise UsageError(f"{path}:{_line(root, first['loc'])}: {what}.") from None


def _line(node: yaml.Node | None, location: Sequence[Any]) -> int:
    """The line of the deepest key of `location` that the file has."""
    line = 1
    for step in location:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == str(step)]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
    return line
