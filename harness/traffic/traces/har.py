"""HTTP archives (HAR 1.2), as browsers and proxies export them: bodies, statuses and moments of each exchange.

The bytes of a request are written anew from what the archive says of it: as HTTP/1.1, its framing by Content-Length.
An archive never has the bytes themselves, so what was wrong with them is not in it. The moments inside an answer are
not either: all tokens of a stream are taken to have come when it ended, and are marked as read together.
"""

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from harness.model import UsageError
from harness.traffic.capture.exchanges import Reader
from harness.traffic.capture.messages import Exchange, Said
from harness.traffic.capture.packets import Flow
from harness.traffic.recording import Recorded
from harness.traffic.traces.azure import moment_s
from harness.traffic.traces.rows import Connections

_NOWHERE = Flow(b"", 0, b"", 0)  # addresses are not kept: an archive knows the server's alone
_WRITTEN_ANEW = (b"content-length", b"transfer-encoding", b"content-encoding")  # texts are without their coding
Fields = tuple[tuple[bytes, bytes], ...]


def read(path: Path, reader: Reader) -> Iterator[tuple[Recorded, str]]:
    """The exchanges of an archive, read whole; requests whose body it does not hold are lost. Raises UsageError."""
    connections = Connections()
    for number, entry in enumerate(_entries(path), start=1):
        try:
            place = connections.place(str(entry.get("connection") or ""))
            yield reader.recorded(_exchange(entry, place)), _lost(entry["request"])
        except (UsageError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            why = error.sentence if isinstance(error, UsageError) else f"not as HAR 1.2 has it: {error!r:.80}"
            raise UsageError(f"entry {number}: {why}", str(path)) from None


def _entries(path: Path) -> Sequence[dict[str, Any]]:
    try:
        entries = orjson.loads(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))["log"]["entries"]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise UsageError(f"no JSON: {error.msg}", f"{path}:{error.lineno}") from None
    except (KeyError, TypeError):
        raise UsageError("no HTTP archive: there is no list of log.entries in it", f"{path}:1") from None
    if not isinstance(entries, list):
        raise UsageError("no HTTP archive: log.entries is no list", f"{path}:1")
    return entries


def _lost(request: Mapping[str, Any]) -> str:
    there = (request.get("postData") or {}).get("text")
    return "its body is not in the archive" if request.get("bodySize", 0) > 0 and not there else ""


def _exchange(entry: Mapping[str, Any], place: tuple[int, int]) -> Exchange:
    """Moments count from the request's first byte: what came before (queue, name, handshake) is the client's time."""
    request, response = entry["request"], entry["response"]
    timings = {name: max(0.0, value or 0.0) for name, value in entry["timings"].items() if name != "comment"}
    before_ms = sum(timings.get(name, 0.0) for name in ("blocked", "dns", "connect"))
    first_ns = round(1e9 * moment_s(entry["startedDateTime"], "")) + round(1e6 * before_ms)
    began_ns = first_ns + round(1e6 * (timings.get("send", 0.0) + timings.get("wait", 0.0)))
    ended_ns = began_ns + round(1e6 * timings.get("receive", 0.0))
    url, status = urlsplit(request["url"]), int(response["status"])
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    content = response["content"]
    lost = "not in the archive" if content.get("size", 0) != 0 and not content.get("text") else ""  # -1: unknown
    answer = Said(b"", began_ns, ended_ns, _fields(response["headers"]), [(ended_ns, _content(content))], lost)
    asked = _said(request, url.netloc, target, first_ns)
    turn = (place[0], place[1], _NOWHERE, None, str(request["method"]), target)
    return Exchange(*turn, request=asked, status=status, answer=answer if status > 0 else None)


def _said(request: Mapping[str, Any], host: str, target: str, first_ns: int) -> Said:
    body = _content(request.get("postData") or {})
    fields = list(_fields(request["headers"]))
    if not any(name.lower() == b"host" for name, _ in fields):
        fields.insert(0, (b"Host", host.encode()))
    if body or request["method"] in ("POST", "PUT", "PATCH"):
        fields.append((b"Content-Length", b"%d" % len(body)))
    line = f"{request['method']} {target} HTTP/1.1".encode()
    head = b"\r\n".join([line, *(b"%b: %b" % field for field in fields), b"", b""])
    return Said(head + body, first_ns, first_ns, tuple(fields), [(first_ns, body)])


def _fields(headers: Sequence[Mapping[str, str]]) -> Fields:
    """Without those of the framing, and the pseudo headers of HTTP/2, whose names begin with a colon."""
    pairs = ((each["name"].encode(), each["value"].encode()) for each in headers)
    return tuple(pair for pair in pairs if not pair[0].startswith(b":") and pair[0].lower() not in _WRITTEN_ANEW)


def _content(content: Mapping[str, Any]) -> bytes:
    text = content.get("text") or ""
    return b64decode(text) if content.get("encoding") == "base64" else str(text).encode()
