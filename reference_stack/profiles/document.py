"""A YAML file as a frozen dataclass, read strictly, with the line of every key.

The dataclass is the schema: its fields are the keys, one with a default may be left out, one that is itself a dataclass
is a section. It refuses what it does not know, what is missing, what is written twice, a value of another type and a
number that is not greater than zero; every refusal is one sentence with `file:line`.
"""

import difflib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")
Lines = Mapping[str, int]  # `vllm.max_num_seqs` -> its line

_LOADER = yaml.SafeLoader("")
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


class ProfileError(Exception):
    """A profile, card or model that cannot be used; the message is one sentence for the user."""


def read(path: Path, kind: type[T]) -> tuple[T, Lines]:
    """The file as a `kind`, and where its keys stand. Raises ProfileError."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ProfileError(f"{path}:{line}: not YAML: {error.problem}.") from None
    lines: dict[str, int] = {"": 1}
    return _section(path, kind, root, "", lines), lines


def _section(path: Path, kind: type[T], node: yaml.Node | None, place: str, lines: dict[str, int]) -> T:
    """The keys of one mapping as its dataclass."""
    if not isinstance(node, yaml.MappingNode):
        raise ProfileError(f"{path}:{lines[place]}: {place or 'the file'} must be keys with values.")
    assert is_dataclass(kind)
    hints, given = get_type_hints(kind), dict[str, Any]()
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        here = f"{place}.{name}" if place else name
        if name not in hints:
            raise ProfileError(f"{path}:{line}: unknown key {here!r}{_near(name, list(hints))}")
        if name in given:
            raise ProfileError(f"{path}:{line}: {here!r} is written twice, first in line {lines[here]}.")
        lines[here] = line
        given[name] = _value(path, hints[name], value, here, lines)
    for field in fields(kind):
        if field.name not in given and field.default is MISSING:
            raise ProfileError(f"{path}:{lines[place]}: missing key {f'{place}.{field.name}'.lstrip('.')!r}.")
    return kind(**given)


def _value(path: Path, hint: Any, node: yaml.Node, place: str, lines: dict[str, int]) -> Any:
    """One value, which must be what the field says."""
    if get_origin(hint) in (Union, types.UnionType):  # `X | None`: left out, or an X
        hint = next(choice for choice in get_args(hint) if choice is not types.NoneType)
    if is_dataclass(hint):
        return _section(path, hint, node, place, lines)  # type: ignore[arg-type]
    try:
        value = _LOADER.construct_object(node, deep=True)
    except ValueError:
        value = node.value
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ProfileError(
                f"{path}:{lines[place]}: {place}: {value!r} is none of {', '.join(map(str, get_args(hint)))}."
            )
        return value
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise ProfileError(f"{path}:{lines[place]}: {place}: {value!r} is not {_WORDS[hint]}.")
    if hint in (int, float) and not 0 < value < float("inf"):
        raise ProfileError(f"{path}:{lines[place]}: {place} must be greater than zero, and finite.")
    return float(value) if hint is float else value


def _near(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}."
