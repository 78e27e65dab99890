"""What is kept is what was seen."""

from pathlib import Path

from benchmarks.storage import measure


def test_storage_reads_back_what_was_written(tmp_path: Path) -> None:
    """All observations come back and percentiles are those of the values written."""
    figures = measure(2000, tmp_path)
    assert figures["percentile_error"] <= 0.001
    assert figures["file_mb"] > 0.1
