"""A server's error answers as our exceptions."""

from __future__ import annotations

import httpx

from unbroken.errors import (
    ContextOverflowError,
    ImageError,
    SamplingError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    SessionEndedError,
    UnknownImageError,
    UnknownSessionError,
)


def unreachable_error(base_url: str, error: Exception, num_tries: int) -> ServerUnreachableError:
    """The error for a connection that failed or broke."""
    return ServerUnreachableError(
        f"no answer from {base_url} in {num_tries} tries ({type(error).__name__}: {error}): is the server running, and "
        "is this its address?"
    )


def unexpected_answer(base_url: str, path: str, answer: object) -> ServerError:
    """The error for an answer with status 200 that is not one of a server of ours."""
    return ServerError(
        f"{base_url} answered {path} with {str(answer)[:200]!r}, which is no answer of a server of this package: is "
        "this its address?"
    )


def to_error(response: httpx.Response) -> Exception:
    """Convert an error answer to one of our exceptions, with the server's message."""
    try:
        body = response.json()["error"]
        message, code, sha256 = str(body["message"]), body.get("code"), str(body.get("sha256"))
    except (ValueError, KeyError, TypeError):
        message, code, sha256 = response.text[:500], None, ""
    if code == "context_length_exceeded":
        return ContextOverflowError.from_message(message)
    if code == "unknown_image":
        return _with_message(UnknownImageError(sha256), message)
    if code in ("session_ended", "session_finished", "session_expired"):
        return _with_message(SessionEndedError("", ""), message)
    if code == "session_not_found":
        return _with_message(UnknownSessionError(""), message)
    if code == "invalid_image":
        return ImageError(message)
    if response.status_code == 429:
        return ServerBusyError(message)
    if response.status_code in (400, 404, 409, 413, 422):
        return SamplingError(message)
    return ServerError(f"HTTP {response.status_code}: {message}")


def _with_message(error: Exception, message: str) -> Exception:
    error.args = (message,)
    return error
