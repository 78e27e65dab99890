"""An answer that is no: raised wherever it is known, told in OpenAI's error shape in one place."""

import math
from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Refusal(Exception):  # noqa: N818  (a decision, not a mistake)
    """The request ends with `status`; `code` is a word for metrics and clients, `param` names the field at fault."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def document(self) -> dict[str, Any]:
        """The body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """When to come again, where that is known."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})
