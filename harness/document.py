"""A user's file, with the line of every key, checked against its spec.

YAML without its surprises: only `true` and `false` are truth values, so that a class may be called `on`; `1:30` and
`2026-01-01` stay text; a key written twice and an alias are refused. Whatever is wrong is told in one sentence with
`file:line`; nothing is guessed, and nothing that was written is ignored.
"""

import difflib
import re
import types
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml
from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from harness.model import UsageError
from harness.units import spelled

T = TypeVar("T")
Place = tuple[int | str, ...]

_INTEGER = re.compile(r"[-+]?\d{1,30}")  # longer ones stay text: nothing here is so large, and reading them is slow
_NUMBER = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(\.\d*)?[eE][-+]?\d+)")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's names for a key too many
_SHAPES = {
    "dataclass_type": "keys with values",
    "dict_type": "keys with values",
    "list_type": "a list",
    "tuple_type": "a list",
    "string_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
}


@dataclass(frozen=True)
class OneOf:
    """In an annotation: exactly one key, the name of a kind, with that kind's settings: `{poisson: {rate: 20/s}}`."""

    kinds: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices: dict[Hashable, CoreSchema] = {
            name: _keys_schema({name: kind}, handler, required=True) for name, kind in self.kinds.items()
        }
        union = core_schema.tagged_union_schema(choices, discriminator=_only_key)
        return core_schema.no_info_after_validator_function(_only_value, union)


@dataclass(frozen=True)
class SomeOf:
    """In an annotation: any number of kinds, each once: `{flood: {size: 100}, repeat: {size: 10}}`."""

    kinds: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _keys_schema(self.kinds, handler, required=False)


def _keys_schema(kinds: Mapping[str, Any], handler: GetCoreSchemaHandler, *, required: bool) -> CoreSchema:
    keys = {
        name: core_schema.typed_dict_field(handler.generate_schema(kind), required=required)
        for name, kind in kinds.items()
    }
    return core_schema.typed_dict_schema(keys, extra_behavior="forbid")


def _only_key(value: Any) -> Any:
    return next(iter(value)) if isinstance(value, dict) and len(value) == 1 else None


def _only_value(value: dict[str, Any]) -> Any:
    return next(iter(value.values()))


@dataclass(frozen=True)
class Document:
    """A file as plain values, and the line that each key and item stands on."""

    path: Path
    value: Any
    lines: Mapping[Place, int]

    def where(self, place: Place) -> str:
        """`file:line` of the nearest thing that was written at or above `place`."""
        return f"{self.path}:{self.lines[self._written(place)]}"

    def parse(self, kind: type[T]) -> T:
        """The value as a `kind`. Raises UsageError with one sentence on the first thing that is wrong."""
        try:
            value: T = _adapter(cast(Hashable, kind)).validate_python(self.value)
        except ValidationError as error:
            first = min(error.errors(), key=self._urgency)
            raise UsageError(self._sentence(first, kind), self.where(first["loc"])) from None
        return value

    def _written(self, place: Place) -> Place:
        """`place` without the steps that only the schema knows, such as the tag of a union."""
        here: Place = ()
        for step in place:
            if (*here, step) in self.lines:
                here = (*here, step)
        return here

    def _urgency(self, error: ErrorDetails) -> tuple[bool, int]:
        # A misspelt key is also a missing one; the spelling is the thing to say.
        return error["type"] not in _UNKNOWN, self.lines[self._written(error["loc"])]

    def _sentence(self, error: ErrorDetails, kind: Any) -> str:
        place, context = self._written(error["loc"]), error.get("ctx", {})
        key = ".".join(str(step) for step in place) or "the file"
        match error["type"]:
            case unknown if unknown in _UNKNOWN:
                near = suggestion(str(place[-1]), _keys_at(kind, place[:-1]))
                sentence = f"unknown key `{place[-1]}`{_within(place[:-1])}; {near}"
            case "missing":
                sentence = f"`{error['loc'][-1]}` is missing{_within(place)}"
            case "union_tag_invalid":
                near = suggestion(str(context["tag"]), _keys_at(kind, place))
                sentence = f"`{key}` knows no `{context['tag']}`; {near}"
            case "union_tag_not_found":
                sentence = f"`{key}` takes one kind and its settings; there are: {', '.join(_keys_at(kind, place))}"
            case "value_error":
                sentence = f"`{key}`: {context['error']}"
            case shape if shape in _SHAPES:
                sentence = f"`{key}` must be {_SHAPES[shape]}, not {_shown(error['input'])}"
            case _:
                sentence = f"`{key}`: {error['msg'][:1].lower()}{error['msg'][1:]}, not {_shown(error['input'])}"
        return sentence


def suggestion(word: str, known: Iterable[str]) -> str:
    """`did you mean X?` when something near is known, else all that is."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=2)
    if near:
        return f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
    return f"there are: {', '.join(known)}" if known else "there are none"


def _within(place: Place) -> str:
    return f" in `{'.'.join(str(step) for step in place)}`" if place else ""


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{str(value)[:60]!r}"


def _keys_at(kind: Any, place: Place) -> list[str]:
    """The keys that may stand at `place` in a file of this kind."""
    for step in place:
        kind = _inside(kind).get(str(step), _inside(kind).get("*"))
    return [key for key in _inside(kind) if key != "*"]


def _inside(kind: Any) -> Mapping[str, Any]:
    """What stands inside a value of this kind: by key, or under `*` when any key or place will do."""
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return {spelled(field.name): hints[field.name] for field in fields(kind)}
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        for note in arguments[1:]:
            if isinstance(note, OneOf | SomeOf):
                return note.kinds
        return _inside(arguments[0])
    if get_origin(kind) in (Union, types.UnionType):
        return {key: value for choice in arguments for key, value in _inside(choice).items()}
    if get_origin(kind) in (dict, Mapping):
        return {"*": arguments[1]}
    return {"*": arguments[0]} if get_origin(kind) in (list, tuple) else {}


# Reading ----------------------------------------------------------------------------------------------------------


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Made once a kind: that takes longer than to read a file."""
    return TypeAdapter(kind)


def read(path: Path) -> Document:
    """Read a YAML file. Raises UsageError when it is not there, not YAML, or says something twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    try:
        root = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UsageError(f"not YAML: {error.problem}", f"{path}:{mark.line + 1 if mark else 1}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {error}") from None
    if root is None:
        raise UsageError("the file is empty", f"{path}:1")
    lines: dict[Place, int] = {}
    return Document(path, _value(root, (), root.start_mark.line + 1, path, lines), lines)


class _Loader(yaml.SafeLoader):
    """Composes nodes only. An alias makes one line count twice, and a chain of them is a bomb: refused."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "an alias (*name) is not taken here", event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


def _value(node: yaml.Node, place: Place, line: int, path: Path, lines: dict[Place, int]) -> Any:
    lines[place] = line
    if isinstance(node, yaml.MappingNode):
        for key, _ in node.value:
            here = (*place, key.value)
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError("a key must be a word", f"{path}:{key.start_mark.line + 1}")
            if here in lines:
                raise UsageError(
                    f"`{key.value}` is written twice, first on line {lines[here]}", f"{path}:{key.start_mark.line + 1}"
                )
            lines[here] = key.start_mark.line + 1
        return {
            key.value: _value(item, (*place, key.value), key.start_mark.line + 1, path, lines)
            for key, item in node.value
        }
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*place, k), item.start_mark.line + 1, path, lines) for k, item in enumerate(node.value)]
    return _plain(node.value) if isinstance(node, yaml.ScalarNode) and not node.style else node.value


def _plain(text: str) -> Any:
    """A word without quotes: a number, true, false, nothing, or text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
