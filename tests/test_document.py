"""YAML as users mean it, with the line of everything."""

from pathlib import Path
from typing import Annotated, Any

import pytest

from harness import document
from harness.document import OneOf, SomeOf
from harness.model import UsageError
from harness.units import Duration, Rate, spec


@spec
class Slow:
    for_s: Duration


@spec
class Quick:
    rate_per_s: Rate
    turns: int = 1


KINDS = {"slow": Slow, "quick": Quick}


@spec
class File:
    name: str
    one: Annotated[Any, OneOf(KINDS)]
    many: Annotated[dict[str, Any], SomeOf(KINDS)]
    steps: list[Quick] = ()  # type: ignore[assignment]


GOOD = """\
name: on
one: {quick: {rate: 5/s}}
many:
  slow:
    for: 3s
steps:
  - {rate: 1/s}
  - rate: 2/s
    turns: 3
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def sentence(tmp_path: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        document.read(written(tmp_path, text)).parse(File)
    said = str(caught.value).replace(str(tmp_path) + "/", "")
    assert "\n" not in said
    return said


def test_kinds_become_their_specs(tmp_path: Path) -> None:
    """One kind by its name, several kinds by theirs, and a list."""
    file = document.read(written(tmp_path, GOOD)).parse(File)
    assert file.one == Quick(rate_per_s=5.0)
    assert file.many == {"slow": Slow(for_s=3.0)}
    assert file.steps[1] == Quick(rate_per_s=2.0, turns=3)
    assert file.name == "on"


def test_yaml_holds_no_surprises(tmp_path: Path) -> None:
    """Words that YAML 1.1 turns into truth values, times and dates stay what was written."""
    text = "a: on\nb: no\nc: 12:30\nd: 2026-01-01\ne: 010\nf: true\ng: 1.5\nh:\ni: '7'\nj: 1e3\nk: 0x1F\n"
    assert list(document.read(written(tmp_path, text)).value.values()) == [
        *("on", "no", "12:30", "2026-01-01", 10, True, 1.5, None, "7", 1000.0, "0x1F"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("for: 3s", "fro: 3s", "file.yaml:5: unknown key `fro` in `many.slow`; did you mean `for`?"),
        ("    turns", "    rotations", "file.yaml:9: unknown key `rotations` in `steps.1`; there are: rate, turns"),
        ("name: on", "nam: x", "file.yaml:1: unknown key `nam`; did you mean `name`?"),
        ("name: on\n", "", "file.yaml:1: `name` is missing"),
        ("    for: 3s", "    {}", "file.yaml:4: `for` is missing in `many.slow`"),
        ("rate: 2/s", "rate: 2", "file.yaml:8: `steps.1.rate`: 2 is not a rate such as 20/s"),
        ("for: 3s", "for: 3/s", "file.yaml:5: `many.slow.for`: '3/s' is not a time such as 1.2s, 250ms or 2m"),
        ("{quick: {rate", "{quik: {rate", "file.yaml:2: `one` knows no `quik`; did you mean `quick`?"),
        ("{quick: {rate: 5/s}}", "other", "file.yaml:2: `one` takes one kind and its settings; there are: slow, quick"),
        ("name: on", "name: 5", "file.yaml:1: `name` must be text, not '5'"),
        ("turns: 3", "turns: three", "file.yaml:9: `steps.1.turns` must be a whole number, not 'three'"),
        ("    for: 3s", "    - 1", "file.yaml:4: `many.slow` must be keys with values, not '[1]'"),
        ("turns: 3", "rate: 3/s", "file.yaml:9: `rate` is written twice, first on line 8"),
        ("turns: 3", "turns: *x", "file.yaml:9: not YAML: an alias (*name) is not taken here"),
        ("turns: 3", "turns: [3", "file.yaml:10: not YAML: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    """What is wrong, where, and what was perhaps meant."""
    assert old in GOOD
    assert sentence(tmp_path, GOOD.replace(old, new)) == said


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    """Not there, empty, two documents, or not text."""
    with pytest.raises(UsageError, match="there is no file"):
        document.read(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="the file is empty"):
        document.read(written(tmp_path, "# nothing\n"))
    with pytest.raises(UsageError, match="not YAML"):
        document.read(written(tmp_path, "a: 1\n---\nb: 2\n"))
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(UsageError, match="cannot be read"):
        document.read(tmp_path / "latin.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        document.read(tmp_path)
