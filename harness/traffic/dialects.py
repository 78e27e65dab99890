"""What each OpenAI path calls the prompt and the length of its answer, and how it is asked for a stream.

A new path is one line in DIALECTS, and its answer's shape in `answers.py`. A scenario with a path that is not
here is refused: an answer that nobody can read would count as a failure of the stack.
"""

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Dialect:
    """Members of a request's JSON body. `length` takes the number of tokens; None where a path has no such thing."""

    prompt: bytes
    no_prompt: bytes
    length: bytes | None = None
    stream: bytes | None = None
    to_the_end: bytes | None = None  # has vLLM go on to the full length

    def ask(self, text: bytes) -> bytes:
        """The member that holds the prompt; `text` is escaped for JSON."""
        return self.prompt % text

    @cache  # noqa: B019 -- dialects live as long as the process, and are asked for each request that is sent
    def settings(self, max_tokens: int, stream: bool, exact: bool) -> bytes:
        """The other members."""
        bound = self.length % max_tokens if self.length else None
        return b",".join(filter(None, (bound, self.to_the_end if exact else None, self.stream if stream else None)))


_COUNTED = b'"stream":true,"stream_options":{"include_usage":true}'
_MAX = b'"max_tokens":%d'

DIALECTS = {
    "/chat/completions": Dialect(
        b'"messages":[{"role":"user","content":"%b"}]', b'"messages":[]', _MAX, _COUNTED, b'"ignore_eos":true'
    ),
    "/completions": Dialect(b'"prompt":"%b"', b'"prompt":""', _MAX, _COUNTED, b'"ignore_eos":true'),
    "/responses": Dialect(b'"input":"%b"', b'"input":""', b'"max_output_tokens":%d', b'"stream":true'),
    "/embeddings": Dialect(b'"input":"%b"', b'"input":""'),
}

_ENDINGS = tuple(DIALECTS)


@cache
def dialect_of(path: str) -> Dialect:
    """How a path is spoken to: by its ending, and as completions are when it has none of these."""
    return next((dialect for ending, dialect in DIALECTS.items() if path.endswith(ending)), DIALECTS["/completions"])


def speaks(path: str) -> bool:
    """Whether a path, with or without a query, asks a model for something: its answer then has content."""
    return path.partition("?")[0].endswith(_ENDINGS)
