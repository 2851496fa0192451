"""The error answers of the server, in the OpenAI API's format with vLLM's type names and codes, or in Anthropic's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException

from megakernel.errors import MegakernelError
from megakernel.model.limited import HelperLost
from megakernel.serving.server.client import EngineDead, Overloaded

_SHOWN = 120  # maximum characters of a client's input that an error quotes
# By status: the type of an error in vLLM, and in Anthropic's API.
_TYPES = {
    400: ("BadRequestError", "invalid_request_error"),
    401: ("AuthenticationError", "authentication_error"),
    403: ("PermissionDeniedError", "permission_error"),
    404: ("NotFoundError", "not_found_error"),
    405: ("MethodNotAllowedError", "invalid_request_error"),
    408: ("RequestTimeoutError", "timeout_error"),
    413: ("RequestTooLargeError", "request_too_large"),
    415: ("UnsupportedMediaTypeError", "invalid_request_error"),
    500: ("InternalServerError", "api_error"),
    503: ("ServiceUnavailableError", "overloaded_error"),
}

# Exceptions of the libraries that convert a request back to JSON.
TOO_DEEP = (RecursionError, PydanticSerializationError)


class ClientGone(Exception):
    """Raised when the client has closed the connection, so that nobody reads the answer."""


class APIError(Exception):
    """Ends a request with the HTTP status `status`. `param` names the invalid field. Clients of Anthropic's API may
    recognise the error by its `details`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, dict(headers or {})
        self._details = details

    def body(self, path: str = "") -> bytes:
        """Return the error as JSON, in the format of the API to which the URL's `path` belongs."""
        kind, named = _TYPES.get(self.status, _TYPES[400])
        if is_messages(path):
            more = {"details": self._details} if self._details else {}
            error = {"type": named, "message": self.message, **more}
            return msgspec.json.encode({"type": "error", "error": error})
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": told})

    def response(self, path: str = "") -> Response:
        return Response(self.body(path), self.status, self.headers, "application/json")


def as_api_error(error: Exception) -> APIError:
    """Translate the exception that ended a request into an error for the client."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        return _validation(error.errors())
    if isinstance(error, HTTPException):
        cause = error.__cause__  # why a body cannot be parsed; FastAPI's own message lacks it
        told = f"the body is not JSON: {shortened(str(cause))}" if cause else str(error.detail)
        return APIError(error.status_code, told, headers=error.headers)
    if isinstance(error, TOO_DEEP):
        return APIError(400, "the JSON of the request is nested too deeply")
    if isinstance(error, (EngineDead, Overloaded, HelperLost)):
        return APIError(503, str(error), headers={"Retry-After": "30" if isinstance(error, EngineDead) else "1"})
    if isinstance(error, MegakernelError):
        return APIError(400, str(error))
    return APIError(500, "internal error: the server's log has the details")


async def answer_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response(request.scope["path"])


def is_messages(path: str) -> bool:
    """Whether a path, which may begin with --root-path, belongs to Anthropic's Messages API."""
    return "/v1/messages" in path


def shortened(text: str) -> str:
    """Return a text that a client sent, cut to a length that an error message may quote."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def quoted(value: object) -> str:
    """Return a value that a client sent, in the form in which an error message quotes it. A long text is cut first,
    because formatting all of it would take long."""
    if isinstance(value, str):
        return repr(value[:_SHOWN]) + (f"... ({len(value)} characters)" if len(value) > _SHOWN else "")
    return shortened(repr(value))


# Anthropic's package first sends a request with `thread`. After this error, it sends the whole conversation instead.
_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


def _validation(errors: Sequence[Any]) -> APIError:
    """Return an API error with a one-line message about the first invalid field of a request body."""
    first = errors[0]
    path = [part for part in first["loc"] if part not in ("body", "[key]") and not str(part).startswith("(")]
    if not path and isinstance(first["input"], bytes):
        return APIError(400, "the body must be JSON, with the header Content-Type: application/json")
    name = ".".join(str(part) for part in path)
    if first["type"] == "missing":
        return APIError(400, f"{name or 'the body'} is required", param=name or None)
    if first["type"] == "contradiction":
        return APIError(400, first["msg"], param=first["ctx"]["field"])
    if first["type"] == "refused":
        field = ".".join(map(str, [*path, first["ctx"]["field"]]))
        told = f"{name}: {first['msg']}" if name else first["msg"]
        return APIError(400, told, param=field, details=_DETAILS.get(first["ctx"]["field"]))
    said = re.sub(r"^\w+ should", "must", shortened(first["msg"]))  # pydantic's texts begin with "Input should"
    said = re.sub(r"a valid dictionary.*", "an object", re.sub(r" after validation|, unable to .*", "", said))
    got = "" if isinstance(first["input"], (dict, list)) else f", not {quoted(first['input'])}"
    return APIError(400, f"{name or 'the body'} {said}{got}", param=name or None)
