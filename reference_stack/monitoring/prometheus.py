"""What Prometheus scrapes of the local stack: its configuration as a pure function of addresses.

Once a second, because the gates that read it judge windows of seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SCRAPE_INTERVAL = "1s"


def config(scraped: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The document for jobs of `host:port/path` addresses, by job name; all in a job share its path."""
    return {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "scrape_timeout": SCRAPE_INTERVAL},
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
