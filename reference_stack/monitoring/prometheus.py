"""What Prometheus scrapes of the local stack, and which rules it evaluates: a pure function of addresses.

Once a second, because the gates that read it judge windows of seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

INTERVAL = "1s"


def config(scraped: Mapping[str, Sequence[str]], rule_files: Sequence[str] = ()) -> dict[str, Any]:
    """The document for jobs of `host:port/path` addresses, by job name; all in a job share its path.

    `rule_files` are relative to where the document will lie.
    """
    return {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": list(rule_files),
        "scrape_configs": [_job(name, addresses) for name, addresses in scraped.items()],
    }


def _job(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    paths = {address.partition("/")[2] for address in addresses}
    if len(paths) != 1:
        raise ValueError(f"job {name}: one path, not {sorted(paths)}")
    return {
        "job_name": name,
        "metrics_path": "/" + paths.pop(),
        "static_configs": [{"targets": [address.partition("/")[0] for address in addresses]}],
    }
