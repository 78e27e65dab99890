"""What stands where: a target file, read strictly.

The same file tells the harness where to send its traffic; the two read it each with their own code. It refuses what it
does not know: a key with a typing error is an error, not a default.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

HOST = "127.0.0.1"


class UsageError(Exception):
    """The user can put this right: one sentence, with file and line where there is one."""


@dataclass(frozen=True)
class Target:
    """A local stack: what serves, under which addresses, with which model; `lines` are where its keys stand."""

    path: Path
    lines: Mapping[str, int]
    engine: str
    url: str
    engines: tuple[str, ...]
    model: str
    tokenizer: Path
    profile: str | None
    prometheus: str | None
    gpu: str
    gpu_metrics: str | None
    load_factor: float
    alert_scale: float
    prompt_limit: int

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together: room for the longest prompt and an eighth more."""
        return self.prompt_limit * 9 // 8

    @property
    def port(self) -> int:
        """The gateway's port; guard, Envoy's admin, exporter and Prometheus stand at fixed distances from it."""
        return port_of(self.url)

    def where(self, key: str) -> str:
        """`file:line` of a key; of the file's head when it is not there."""
        return f"{self.path}:{self.lines.get(key, 1)}"


def port_of(url: str) -> int:
    """The port in a URL."""
    return urlsplit(url).port or 80


def read(path: Path) -> Target:
    """The target in `path`. UsageError, with the line, when the file is not one of a local stack."""
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path}:{line}: not YAML: {error.problem}.") from None
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}:1: a target is a mapping of keys to values.")
    return _Reader(path, root).target()


class _Reader:
    """The keys of one file, taken out one by one, each with its line."""

    def __init__(self, path: Path, root: yaml.MappingNode) -> None:
        self._path = path
        self._line: dict[str, int] = {}
        self._value: dict[str, Any] = {}
        loader = yaml.SafeLoader("")
        for key, value in root.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in self._line:
                raise UsageError(f"{path}:{line}: {name} is given twice, first in line {self._line[name]}.")
            self._line[name] = line
            self._value[name] = loader.construct_object(value, deep=True)

    def target(self) -> Target:
        """The whole file."""
        if self._word("kind", ("local", "kubernetes", "url")) != "local":
            raise self._wrong("kind", "this stack runs on this machine: kind must be local")
        target = Target(
            path=self._path,
            lines=self._line,
            engine=self._word("engine", ("sim", "vllm")),
            url=self._take("url", _is_local_url, f"must be http://{HOST}:PORT"),
            engines=tuple(
                self._take("engines", _are_local_urls, f"must be a list of http://{HOST}:PORT, one a replica")
            ),
            model=self._take("model", _is_text, "must be a name"),
            tokenizer=Path(self._take("tokenizer", _is_text, "must be a directory")),
            profile=self._take("profile", _is_text, "must be a name", None),
            prometheus=self._take("prometheus", _is_local_url, f"must be http://{HOST}:PORT", None),
            gpu=self._word("gpu", ("none", "simulated", "dcgm", "nvml")),
            gpu_metrics=self._take("gpu_metrics", _is_text, "must be a URL", None),
            load_factor=float(self._take("load_factor", _is_positive, "must be a number above 0", 1.0)),
            alert_scale=float(self._take("alert_scale", _is_positive, "must be a number above 0", 1.0)),
            prompt_limit=self._take("prompt_limit", _is_count, "must be a whole number of tokens above 0"),
        )
        self._take("chaos", lambda word: word == "allowed", "must be allowed", None)  # the harness's, as the next
        self._take("gpus", _is_mapping, "must be labels with values", None)  # the harness's: which GPUs it watches
        if self._value:
            name = next(iter(self._value))
            raise self._wrong(name, f"unknown key {name}")
        if target.engine == "sim" and target.profile is None:
            raise UsageError(f"{self._path}:1: profile is missing: the simulated engine needs one.")
        return target

    def _take(self, name: str, right: Callable[[Any], bool], rule: str, *default: Any) -> Any:
        if name not in self._value:
            if default:
                return default[0]
            raise UsageError(f"{self._path}:1: {name} is missing: it {rule}.")
        value = self._value.pop(name)
        if not right(value):
            raise self._wrong(name, f"{name} {rule}, not {value!r}")
        return value

    def _word(self, name: str, words: tuple[str, ...]) -> str:
        return str(self._take(name, lambda value: value in words, f"must be one of {', '.join(words)}"))

    def _wrong(self, name: str, sentence: str) -> UsageError:
        return UsageError(f"{self._path}:{self._line[name]}: {sentence}.")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_local_url(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        parts = urlsplit(value)
        return (parts.scheme, parts.hostname) == ("http", HOST) and parts.port is not None and parts.path in ("", "/")
    except ValueError:
        return False


def _are_local_urls(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_local_url, value))
