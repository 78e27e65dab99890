"""What a capacity plan is made from: the file, the flags over it, and mistakes in either (CAP-1)."""

from pathlib import Path
from typing import Any

import pytest

from harness.capacity import order
from harness.capacity.order import Gateways, Merge, Quantise, Route
from harness.model import UsageError

FILE = """\
users: 1000000
requests_per_user: 24
rate_per_gpu: 42/s
peak: 5x
price: 0.95/h
gateways: {count: 2, price: 0.35/h}
what_if:
  - quantise: {rate_per_gpu: 78/s}
  - merge: {to: 70%}
"""
FLAGS = {"users": 10, "requests_per_user": 2.5, "rate_per_gpu": "1/s", "price": "1/h"}


def written(directory: Path, text: str = FILE) -> Path:
    path = directory / "capacity.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read_with_its_units(tmp_path: Path) -> None:
    """Shares, rates, multiples and prices are what their units say."""
    read = order.read(written(tmp_path), {}, ())
    assert (read.rate_per_gpu_per_s, read.peak, read.price, read.redundancy) == (42.0, 5.0, 0.95, 0.0)
    assert read.gateways == Gateways(count=2, price=0.35)
    assert read.what_if == [Quantise(rate_per_gpu_per_s=78.0), Merge(to=0.7)]


def test_flags_take_the_place_of_keys_and_what_ifs_follow(tmp_path: Path) -> None:
    """A flag wins over the file, one that is not given changes nothing, and what-ifs are added at the end."""
    read = order.read(written(tmp_path), {"users": 5, "peak": None}, ["route=95%@160/s"])
    assert (read.users, read.peak) == (5, 5.0)
    assert read.what_if[2:] == [Route(share=0.95, rate_per_gpu_per_s=160.0)]


def test_flags_alone_will_do() -> None:
    """Without a file, the flags are the whole order."""
    assert order.read(None, FLAGS, ()).requests_per_user == 2.5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (FILE.replace("peak: 5x", "peak: 5"), r"capacity\.yaml:4: `peak`: 5 is not a multiple"),
        (FILE.replace("42/s", "42"), r"capacity\.yaml:3: `rate_per_gpu`: 42 is not a rate"),
        (FILE.replace("42/s", "0/s"), r"capacity\.yaml:3: `rate_per_gpu`"),
        (FILE.replace("0.95/h", "0.95"), r"capacity\.yaml:5: `price`: 0.95 is not a price such as 0.95/h"),
        (FILE.replace("0.95/h", "0/h"), r"capacity\.yaml:5: `price`: '0/h' is not a price"),
        (FILE.replace("5x", "0.5x"), r"capacity\.yaml:4: `peak`: input should be greater than or equal to 1"),
        (FILE.replace("merge", "merging"), r"capacity\.yaml:9: `what_if.1` knows no `merging`"),
        (FILE.replace("to: 70%", "to: 0%"), r"capacity\.yaml:9"),
        (FILE + "user: 3\n", r"capacity\.yaml:10: unknown key `user`; did you mean `users`\?"),
        (FILE.replace("users: 1000000\n", ""), r"capacity\.yaml:1: `users` is missing"),
        (FILE + "run: runs/latest\n", "say one of them, and only one"),
        ("- 1\n", r"capacity\.yaml:1: a capacity file is keys with values"),
    ],
)
def test_mistakes_in_a_file_have_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    """What is wrong in a file is told with its line."""
    with pytest.raises(UsageError, match=sentence):
        order.read(written(tmp_path, text), {}, ())


@pytest.mark.parametrize(
    ("flags", "what_if", "sentence"),
    [
        (FLAGS | {"peak": "5"}, (), r"`peak`: '5' is not a multiple such as 1.2x \(on the command line\)"),
        (FLAGS | {"users": 0}, (), r"`users`: .* \(on the command line\)"),
        (FLAGS | {"users": None}, (), r"`users` is missing \(on the command line\)"),
        (FLAGS | {"rate_per_gpu": None}, (), "say one of them, and only one"),
        (FLAGS, ("quantise=78",), r"`what_if.*'78' is not a rate"),
        (FLAGS, ("faster=2x",), "known are quantise=78/s, merge=70% and route=95%@160/s"),
        (FLAGS, ("route=95%",), "known are quantise"),
    ],
)
def test_mistakes_in_flags_are_told_as_such(flags: dict[str, Any], what_if: tuple[str, ...], sentence: str) -> None:
    """What is wrong on the command line is not put down to a line of a file."""
    with pytest.raises(UsageError, match=sentence):
        order.read(None, flags, what_if)


def test_what_ifs_that_are_no_list_are_refused_beside_flags(tmp_path: Path) -> None:
    """A file's own what-ifs are checked when the command line adds to them, too."""
    text = FILE[: FILE.index("what_if")] + "what_if: 3\n"
    with pytest.raises(UsageError, match="`what_if"):
        order.read(written(tmp_path, text), {}, ["merge=70%"])


def test_a_wrong_flag_is_not_put_down_to_the_file(tmp_path: Path) -> None:
    """With a file at hand, too."""
    with pytest.raises(UsageError, match=r"^`peak`: .* \(on the command line\)$"):
        order.read(written(tmp_path), {"peak": "5"}, ())
