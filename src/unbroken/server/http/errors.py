"""Errors as HTTP: each of our errors has one status and one error object, in the form of OpenAI, Anthropic or Google.

{"error": {"message": "...", "type": "invalid_request_error", "param": "prompts.3", "code": "context_length_exceeded"}}
{"type": "error", "error": {"type": "invalid_request_error", "message": "...", "param": "messages.0", "code": null}}
{"error": {"code": 400, "message": "...", "status": "INVALID_ARGUMENT", "details": [{..., "metadata": {"param": ...}}]}}
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from unbroken.errors import (
    ContextOverflowError,
    EchoError,
    EngineError,
    ImageError,
    IncompleteWeightsError,
    InvalidInputError,
    NotOwnerError,
    SessionEndedError,
    StoreError,
    TemplateError,
    UnknownImageError,
    UnknownPolicyError,
    UnknownSessionError,
    WeightsError,
)
from unbroken.server.http.json import json_response

_log = logging.getLogger(__name__)
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_GOOGLE_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
GOOGLE_METHODS = (":generateContent", ":streamGenerateContent", ":countTokens")
"""How the paths of Google's API end; they begin with `/v1/models/` or `/v1beta/models/`, as the client has it."""


class HttpError(Exception):
    """An error with an HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.details = dict(details or {})
        """Further entries of the error object, for programs."""


def to_http_error(error: Exception) -> HttpError:
    """Choose status and code for an error; the log has the traceback of a 500."""
    found = _choose_status(error)
    if found.status == 500:
        _log.error("the server failed on a request: it was answered with 500", exc_info=error)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """How errors of one kind are answered."""

    kind: type[Exception]
    status: int
    code: str | None = None
    message: str = "{}"
    """`{}` is what the error says."""
    param: str | None = None
    headers: Mapping[str, str] | None = None


_RULES = (
    _Rule(kind=ContextOverflowError, status=400, code="context_length_exceeded"),
    _Rule(kind=UnknownPolicyError, status=404, code="model_not_found", param="model"),
    _Rule(kind=ImageError, status=400, code="invalid_image"),
    _Rule(kind=EchoError, status=500, code="echo_mismatch"),
    _Rule(kind=WeightsError, status=400, code="bad_weights"),
    _Rule(kind=InvalidInputError, status=400),
    _Rule(kind=TemplateError, status=400),
    _Rule(
        kind=RecursionError,
        status=400,
        message="the body is nested too deeply: at most a few hundred levels are allowed",
    ),
    _Rule(kind=IncompleteWeightsError, status=503, code="weights_incomplete"),
    _Rule(kind=EngineError, status=503, code="engine_error", message="the engine cannot answer: {}"),
    _Rule(kind=UnknownSessionError, status=404, code="session_not_found"),
    _Rule(kind=NotOwnerError, status=503, code="session_elsewhere", headers={"Retry-After": "1"}),
    _Rule(kind=StoreError, status=503, code="store_error", message="sessions cannot be stored: {}"),
    _Rule(
        kind=TimeoutError,
        status=504,
        message="the request took longer than the server's request_timeout_s and was aborted",
    ),
    _Rule(
        kind=Exception,
        status=500,
        code="internal_error",
        message="the server failed on this request; its log says why",
    ),
)
"""The first that fits counts: a special kind stands before the one that it is of."""


def _choose_status(error: Exception) -> HttpError:
    match error:
        case HttpError():
            return error
        case UnknownImageError():
            return HttpError(400, str(error), code="unknown_image", details={"sha256": error.sha256[:64]})
        case RequestValidationError() | ValidationError():
            return field_error(error)
        case SessionEndedError():
            return HttpError(409, str(error), code=f"session_{error.status}")
        case HTTPException():
            return HttpError(error.status_code, str(error.detail), headers=error.headers)
    rule = next(rule for rule in _RULES if isinstance(error, rule.kind))
    message = rule.message.replace("{}", str(error))
    return HttpError(rule.status, message, param=rule.param, code=rule.code, headers=rule.headers)


def error_object(error: HttpError, *, path: str = "") -> dict[str, Any]:
    """The body of an error answer of this path: below any prefix, Anthropic's and Google's paths have their form."""
    if path.endswith(GOOGLE_METHODS):
        return {"error": _google_error(error)}
    if path.endswith(_ANTHROPIC_PATHS):
        return {
            "type": "error",
            "error": {
                "type": _ANTHROPIC_TYPES.get(error.status, "api_error"),
                "message": error.message,
                "param": error.param,
                "code": error.code,
                **error.details,
            },
        }
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(error.status, "internal_error"),
            "param": error.param,
            "code": error.code,
            **error.details,
        }
    }


def _google_error(error: HttpError) -> dict[str, Any]:
    about = {"param": error.param, **error.details}
    metadata = {name: str(value) for name, value in about.items() if value is not None}
    info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": error.code or "", "domain": "unbroken"}
    return {
        "code": error.status,
        "message": error.message,
        "status": _GOOGLE_STATUSES.get(error.status, "INVALID_ARGUMENT"),
        "details": [{**info, "metadata": metadata}] if metadata or error.code else [],
    }


def error_response(error: Exception, *, path: str) -> Response:
    """Answer with the error's status and object, in the form of the path."""
    http_error = to_http_error(error)
    return json_response(error_object(http_error, path=path), status=http_error.status, headers=http_error.headers)


def shorten(value: Any) -> str:
    """The beginning of a value's repr, for messages; the cost does not grow with the value."""
    return _SHORT.repr(value)


def check_size(value: Any, *, name: str, most: int = 2**16) -> str:
    """Return the JSON of the field `name`, which is kept as it is; raises `HttpError` if it has more characters."""
    text = json.dumps(value, sort_keys=True)
    if len(text) > most:
        raise HttpError(400, f"{name} must have at most {most} characters as JSON, got {len(text)}", param=name)
    return text


def field_error(error: RequestValidationError | ValidationError, *, within: str = "") -> HttpError:
    """The error for the first invalid field (inside the field `within`), with its rule and value."""
    detail = error.errors()[0]
    if detail["type"] == "json_invalid":
        reason = detail.get("ctx", {}).get("error", "")
        return HttpError(400, f"the body must be JSON in UTF-8: {reason}")
    place = detail["loc"][1:] if isinstance(error, RequestValidationError) else detail["loc"]
    parts = [within, *(str(part) for part in place if not _is_form_tag(part))]
    path = ".".join(part for part in parts if part)
    return HttpError(400, f"{path or 'the body'} {_word_rule(detail)}", param=path or None)


def _word_rule(detail: Mapping[str, Any]) -> str:
    """What a field must be, and what it is."""
    match detail["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return f"is not a known field, got {shorten(detail['input'])}"
        case "type":
            return str(detail["msg"])
    return f"{_reword(detail['msg'])}, got {shorten(detail['input'])}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlevel = 3


def _reword(message: str) -> str:
    """Word pydantic's rules like our other messages."""
    return message.replace("Input should be", "must be").replace("Value error, ", "")


def _is_form_tag(part: object) -> bool:
    """Whether a part of a field's path is the name of a form, such as `<text>`, which errors leave out."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")
