"""The admin door of a gateway's Envoy: what it counts, which runtime values it has, and how it is told others.

Values live in Envoy's memory only: one that was restarted has none. Whether what they ask for happens is for others to
see; this module only tells and asks.
"""

import json
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import quote, urlencode, urlsplit

LIMIT_S = 30.0


def modify(admin: str, values: Mapping[str, str]) -> None:
    """Set runtime values, or take them back with empty ones. Raises OSError."""
    _ask(f"{admin}/runtime_modify?{urlencode(values, quote_via=quote)}", "POST")


def values(admin: str, prefix: str) -> dict[str, str]:
    """The runtime values in force whose keys begin with `prefix`. Raises OSError."""
    entries = json.loads(_ask(f"{admin}/runtime?format=json"))["entries"]
    return {key: entry["final_value"] for key, entry in entries.items() if key.startswith(prefix)}


def counter(admin: str, name: str) -> int:
    """A counter or gauge by its whole name; 0 where Envoy knows none yet. Raises OSError."""
    lines = _ask(f"{admin}/stats?filter=^{name}$").split()
    return int(lines[-1]) if lines else 0


def exchange(
    asked: str, method: str, headers: Mapping[str, str], body: str | None = None, limit_s: float = LIMIT_S
) -> tuple[int, str]:
    """Status and text of one exchange on a connection of its own, without proxies. Raises OSError."""
    parts = urlsplit(asked)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.netloc, timeout=limit_s)
    try:
        connection.request(method, f"{parts.path}?{parts.query}", body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except HTTPException as error:
        raise ConnectionError(f"{asked}: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _ask(asked: str, method: str = "GET") -> str:
    status, page = exchange(asked, method, {})
    if status != 200:
        raise ConnectionError(f"{asked} answers {status}: {page[:100]!r}")
    return page
