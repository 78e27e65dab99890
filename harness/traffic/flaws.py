"""What can be wrong with a bad request: each flaw turns a good draft into the bytes that are sent instead.

A new flaw is one function and one line in FLAWS. Which answer is right for it is the scenario's to say.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import orjson

from harness.traffic.dialects import Dialect

JSON = "application/json"
OVERSIZED_BYTES = 10 * 1024 * 1024 + 1  # the least that is over a limit of 10 MB, however that is counted


@dataclass(frozen=True, slots=True)
class Draft:
    """A request before it is bytes: `text` is escaped for JSON, `settings` are further members of the body."""

    dialect: Dialect
    model: str
    text: bytes
    settings: bytes

    def prompt(self) -> bytes:
        """The member of the body that holds the prompt."""
        return self.dialect.ask(self.text)

    def body(self, *prompt: bytes) -> bytes:
        """The body around `prompt`."""
        return b"{%b}" % b",".join(filter(None, (b'"model":%b' % orjson.dumps(self.model), *prompt, self.settings)))


Sent = tuple[str, bytes]  # content type, body


def sound(draft: Draft) -> Sent:
    return JSON, draft.body(draft.prompt())


def empty_body(_draft: Draft) -> Sent:
    return JSON, b""


def empty_prompt(draft: Draft) -> Sent:
    return JSON, draft.body(draft.dialect.no_prompt)


def bad_json(draft: Draft) -> Sent:
    return JSON, draft.body(draft.prompt())[:-1]


def missing_prompt(draft: Draft) -> Sent:
    return JSON, draft.body()


def wrong_content_type(draft: Draft) -> Sent:
    return "text/plain", draft.body(draft.prompt())


def oversized_body(draft: Draft) -> Sent:
    return JSON, _oversized(replace(draft, text=b"", settings=draft.dialect.settings(1, stream=False, exact=False)))


@cache  # one body serves all of a run: making 10 MB anew would make the next request late
def _oversized(draft: Draft) -> bytes:
    around = len(draft.body(draft.prompt()))
    return draft.body(replace(draft, text=b"." * (OVERSIZED_BYTES - around)).prompt())


def unknown_model(draft: Draft) -> Sent:
    return sound(replace(draft, model="no-such-model"))


FLAWS: dict[str, Callable[[Draft], Sent]] = {
    "empty_body": empty_body,
    "empty_prompt": empty_prompt,
    "bad_json": bad_json,
    "missing_prompt": missing_prompt,
    "over_long": sound,  # its text is over the limit: the plan gives it one
    "wrong_content_type": wrong_content_type,
    "oversized_body": oversized_body,
    "unknown_model": unknown_model,
}
