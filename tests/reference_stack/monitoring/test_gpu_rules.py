"""The thresholds of cards: read strictly, and what the rules are made of (MON-4)."""

from pathlib import Path

import pytest
import yaml

from reference_stack.kubernetes.overlays import PRODUCTS
from reference_stack.monitoring import gpu_rules
from reference_stack.monitoring.gpu_rules import FILE, ThresholdError


def test_a_card_has_its_own() -> None:
    """What the file says of a card counts for it, and the rest is the default's."""
    a10, h100 = gpu_rules.read("NVIDIA A10"), gpu_rules.read("NVIDIA H100 80GB HBM3")
    assert (a10.link_bytes_per_s, h100.link_bytes_per_s) == (32e9, 64e9)
    assert a10.tensor_active == h100.tensor_active == 0.5  # below 50 % is what the documents alert on
    assert (h100.copying, h100.stalled) == (0.45, 0.25)


def test_the_file_knows_cards() -> None:
    """No card in it is one that no profile has."""
    assert yaml.safe_load(FILE.read_text())["cards"].keys() <= PRODUCTS.keys()


def test_every_threshold_is_used() -> None:
    """Each number moves a rule."""
    written = yaml.safe_load(FILE.read_text())
    before = gpu_rules.document(gpu_rules.read("NVIDIA H200"))
    for name, value in written["default"].items():
        limit = gpu_rules.GpuThresholds(**{**written["default"], name: value * 1.1})
        assert gpu_rules.document(limit) != before, name


WRONG = {
    "an unknown threshold": ("stalled", "stalling", "stalling"),
    "text": ("0.45", "much", "copying"),
    "nothing": ("0.45", "0", "copying"),
    "an unknown section": ("cards:", "card:", "default and cards"),
    "an unknown threshold of another card": ("L40S: {link_bytes_per_s", "L40S: {link", "link is no"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong(kind: str, tmp_path: Path) -> None:
    """A slip in the file is one sentence that names it."""
    right, wrong, told = WRONG[kind]
    file = tmp_path / "thresholds.yaml"
    assert right in FILE.read_text()
    file.write_text(FILE.read_text().replace(right, wrong))
    with pytest.raises(ThresholdError, match=told):
        gpu_rules.read("NVIDIA A10", file)
