"""HTTP error answers: a status code and a sentence, in one form."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from geartrain.ams.values.errors import AccessDenied, Busy, GeartrainError, InvalidArgument, NotServed, Unavailable

logger = logging.getLogger(__name__)

CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    413: "too_large",
    415: "unsupported_type",
    421: "misdirected",
    429: "too_many_requests",
    500: "internal",
    503: "unavailable",
}


class RefusedRequest(GeartrainError):
    """A request that is refused, with the HTTP status and the reason."""

    def __init__(self, status: int, message: str, retry_after_seconds: float | None = None) -> None:
        """``retry_after_seconds``: time until a retry."""
        super().__init__(message)
        self.status, self.retry_after_seconds = status, retry_after_seconds


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON value."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode(errors="replace"), status, headers, "application/json")


def refusal(error: Exception, path: str) -> Response:
    """Return the answer to an error of a request for ``path``: its message; for a bug only that there is one."""
    status, message, headers = 500, str(error), {}
    wait: float | None = None
    if isinstance(error, RefusedRequest):
        status, wait = error.status, error.retry_after_seconds
    elif isinstance(error, HTTPException):
        status = error.status_code
        message = _ROUTES.get(status, str(error.detail))
        headers = dict(error.headers or {})
    elif isinstance(error, NotServed):
        status = 404
    elif isinstance(error, InvalidArgument):
        status = 400
    elif isinstance(error, AccessDenied):
        status = 403
    elif isinstance(error, Busy):
        status, wait = 503, error.retry_after_seconds
    elif isinstance(error, Unavailable):
        status, wait = 503, 1.0
    else:
        logger.error("a request failed", exc_info=error)
        if not isinstance(error, GeartrainError):
            message = "a bug of the service; see its log"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if wait is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait)))
    if status in (408, 413):  # more of the body may be on its way
        headers["Connection"] = "close"
    if path == "/v2" or path.startswith("/v2/"):  # clients of the protocol fail on any other form
        return json_response({"error": message}, status, headers)
    return json_response({"error": {"code": CODES.get(status, "error"), "message": message}}, status, headers)


_ROUTES = {
    404: "there is nothing here; GET /openapi.json says what there is",
    405: "it is not asked by this method; GET /openapi.json says by which",
}


async def refuse(request: Request, error: Exception) -> Response:
    """Return :func:`refusal`, as an exception handler of Starlette."""
    return refusal(error, request.url.path)
