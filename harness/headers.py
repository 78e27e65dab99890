"""What may stand in the head of a request: names and values that cannot add a line or a header of their own."""

import re
from typing import Annotated

from pydantic import StringConstraints

_NAME = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
_VALUE = r"^[\x20-\x7e]*$"

HeaderName = Annotated[str, StringConstraints(pattern=_NAME)]
HeaderValue = Annotated[str, StringConstraints(pattern=_VALUE)]
Headers = dict[HeaderName, HeaderValue]


def is_value(text: str) -> bool:
    """Whether a text may be sent as a header's value: printable ASCII, no line break."""
    return re.fullmatch(_VALUE, text) is not None
