"""Calls to one server: over kept connections, retried where that is safe, with images sent once."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes
from uuid import uuid4

import httpx
import numpy as np
import orjson

from unbroken import compact
from unbroken.client.connections import Connections
from unbroken.client.images import Files, RequestImages, SentImages, read_messages
from unbroken.errors import (
    ContextOverflowError,
    ImageError,
    InvalidInputError,
    SamplingError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
    SessionEndedError,
    UnknownImageError,
    UnknownPolicyError,
    UnknownSessionError,
)
from unbroken.types import EncodedImage, TokenIds
from unbroken.untrusted import parse_exactly

_T = TypeVar("_T")
SAME = secrets.token_hex(16)
"""Stands in a decoded answer for an echo with the bytes of what was sent. No server knows it."""
_JSON = {"Content-Type": "application/json"}
_NO_HEADERS: Mapping[str, str] = {}
_read_url = lru_cache(256)(httpx.URL)
_REFUSALS = frozenset({400, 415, 422})
"""Statuses of a server that does not take a form of body; nothing was sampled then."""
RETRIED_STATUSES = frozenset({429, 502, 503})
"""Those of a server that is full or not there, which is asked again."""
MAX_ANSWER_BYTES = 2 << 30
"""Of one answer, or one event of a stream, unpacked: the experts of sixteen long completions have 1.6 GB."""
MAX_ERROR_BYTES = 1 << 20
"""Of an answer with another status than 200."""


class Calls:
    """Makes the calls of `AsyncClient`, with the same arguments."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        timeout_s: float,
        connect_timeout_s: float,
        max_retries: int,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self._headers = {"User-Agent": "unbroken"}
        if "@" in base_url and (userinfo := (url := httpx.URL(base_url)).userinfo):
            if api_key is not None:
                raise InvalidInputError(
                    "api_key and a user in base_url exclude each other: both are sent as Authorization"
                )
            self._headers["Authorization"] = f"Basic {b64encode(unquote_to_bytes(userinfo)).decode()}"
            base_url = str(url.copy_with(userinfo=b""))
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):
                raise InvalidInputError("api_key must be printable ASCII, without a line break: it is sent in a header")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.base_url = base_url.rstrip("/")
        self._max_retries = max_retries
        self._abandoning: set[asyncio.Task[None]] = set()
        self._compact_paths: set[str] = set()
        """Those whose answers said that they take the compact form."""
        self._images = SentImages(self._upload)
        self._timeout = {"connect": connect_timeout_s, "read": timeout_s, "write": timeout_s, "pool": None}
        self._transport = transport or Connections()

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*self._abandoning)
        await self._transport.aclose()

    async def get(self, path: str) -> Any:
        """Read a path's JSON."""
        return self._read_json(await self._try("GET", path))

    async def get_compact(self, path: str) -> Any:
        """Read a path's answer in the compact form, with arrays."""
        response = await self._try("GET", path, None, {"Accept": compact.MEDIA_TYPE})
        return compact.decode(response.content)

    async def get_bytes(self, path: str) -> bytes:
        """Read a path's answer as it is."""
        return (await self._try("GET", path)).content

    async def delete(self, path: str) -> None:
        """Delete what is at a path."""
        await self._try("DELETE", path)

    async def is_ok(self, path: str, *, or_code: str | None = None) -> bool:
        """Whether a path answers with 200, or with an error of this code, within 5 s. Never retried."""
        try:
            answer = await self._read("GET", path, timeout_s=5.0)
        except (httpx.HTTPError, ServerError):
            return False
        return answer.status_code == 200 or (or_code is not None and f'"code":"{or_code}"' in answer.text)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a body as JSON and read the answer, JSON or compact form. A retry does not sample again."""
        response = await self._post_with_key(path, body)
        if response.headers.get("content-type", "").startswith(compact.MEDIA_TYPE):
            return compact.decode(response.content)
        return self._read_json(response)

    async def post_again(
        self, path: str, body: Mapping[str, Any], *, session_id: str | None = None, echo: bytes = b""
    ) -> Any:
        """Send a body as JSON to a server that knows no idempotency keys: a retry is a new request there.

        `echo` is `"KEY":VALUE` of JSON: where the answer has these bytes, its value is `SAME`, and is not parsed.
        """
        response = await self._try("POST", path, _encode(body), {**_JSON, **_session_header(session_id)})
        return self._read_json(response, echo)

    async def post_without_answer(self, path: str) -> None:
        """Send an empty body, and read no answer but its status."""
        await self._try("POST", path, b"{}", _JSON)

    async def post_without_retry(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a body as JSON, without retries and idempotency key."""
        try:
            response = await self._read("POST", path, _encode(body), _JSON)
        except httpx.TransportError as error:
            raise _unreachable_error(self.base_url, error, 1) from error
        if response.status_code != 200:
            raise _to_error(response)
        return self._read_json(response)

    async def post_with_images(
        self, path: str, body: Mapping[str, Any], held: RequestImages, settings: Mapping[str, Any] | None
    ) -> Any:
        """Send a body with the images of its prompts; `settings` are its `mm_processor_kwargs`."""
        return await self._with_images(
            held.files, lambda inline: self.post(path, {**body, **_format_images(held, settings, inline)})
        )

    async def post_messages(self, path: str, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Any:
        """Send a body with messages that may have images."""
        held = await read_messages(messages)
        return await self._with_images(
            held.files, lambda inline: self.post(path, {"messages": held.body(inline=inline), **fields})
        )

    async def stream_with_images(
        self,
        path: str,
        body: Mapping[str, Any],
        held: RequestImages,
        settings: Mapping[str, Any] | None,
        *,
        echo: bytes = b"",
    ) -> AsyncGenerator[dict[str, Any]]:
        """Open a stream and return its events; an error in the request is raised here. See `open_stream`."""
        return await self._with_images(
            held.files,
            lambda inline: self.open_stream(
                path, {**body, **_format_images(held, settings, inline)}, session_id=body.get("session_id"), echo=echo
            ),
        )

    async def open_stream(
        self, path: str, body: Mapping[str, Any], *, session_id: Any = None, echo: bytes = b""
    ) -> AsyncGenerator[dict[str, Any]]:
        """Open a stream and return its events. Only the answer 503 is retried: then nothing was sampled.

        `echo` is as for `post_again`.
        """
        headers = {**_JSON, **_session_header(session_id)}
        content = _encode(body)
        for attempt in range(self._max_retries + 1):
            try:
                response = await self._open("POST", path, content, headers)
                if response.status_code == 200:
                    return _read_events(response, self.base_url, echo)
                response = await _read_whole(response, self.base_url)
            except httpx.TransportError as error:
                raise _unreachable_error(self.base_url, error, 1) from error
            if response.status_code != 503 or attempt == self._max_retries:
                raise _to_error(response)
            await asyncio.sleep(_pause_s(attempt, response.headers.get("retry-after")))
        raise AssertionError

    async def _with_images(self, files: Files, call: Callable[[bool], Awaitable[_T]]) -> _T:
        """Send images that the server lacks, then make a call that names them by hash; again if one was dropped.

        A server that cannot keep all of the call's images gets them in the call itself.
        """
        for _ in range(2):
            try:
                await self._images.send(files)
            except ImageError:
                break  # refused: the error of the call itself names the image's place
            try:
                return await call(False)
            except UnknownImageError as error:
                if error.sha256 not in files:
                    raise
                self._images.forget(files)
        return await call(True)

    def _read_json(self, response: httpx.Response, echo: bytes = b"") -> Any:
        try:
            return _decode(response.content, echo)
        except ValueError:  # of a web page, or of bytes in no encoding
            raise unexpected_answer(self.base_url, response.url.path, response.text) from None

    async def _upload(self, image: EncodedImage) -> None:
        await self._try("POST", "/v1/images", image.data, {"Content-Type": "application/octet-stream"})

    async def _post_with_key(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        content, kind = self._encode_for(path, body)
        headers = {
            "Accept": f"{compact.MEDIA_TYPE}, application/json",
            "Idempotency-Key": uuid4().hex,
            **kind,
            **_session_header(body.get("session_id")),
        }
        try:
            response = await self._ask("POST", path, content, headers)
        except asyncio.CancelledError:
            # Otherwise the server would continue for a while, in case the connection broke and a retry comes.
            task = asyncio.create_task(self._abandon(headers))
            self._abandoning.add(task)
            task.add_done_callback(self._abandoning.discard)
            raise
        if response.status_code in _REFUSALS and kind is not _JSON:  # by a server that is older, or a proxy
            self._compact_paths.discard(path)
            return await self._post_with_key(path, body)
        if response.status_code != 200:
            raise _to_error(response)
        if response.headers.get(compact.ACCEPT_HEADER) == compact.MEDIA_TYPE:
            self._compact_paths.add(path)
        return response

    def _encode_for(self, path: str, body: Mapping[str, Any]) -> tuple[bytes, Mapping[str, str]]:
        """A body in the form that the path takes, and the header that says which; JSON until it has answered once."""
        if path not in self._compact_paths:
            return _encode(body), _JSON
        return compact.encode(body), {"Content-Type": compact.MEDIA_TYPE}

    async def _abandon(self, headers: Mapping[str, str]) -> None:
        with suppress(httpx.HTTPError, ServerError, RuntimeError):  # RuntimeError: this client is closed by now
            await self._read("POST", "/v1/abandon", headers=headers, timeout_s=5.0)

    async def _try(
        self, method: str, path: str, content: bytes | None = None, headers: Mapping[str, str] = _NO_HEADERS
    ) -> httpx.Response:
        response = await self._ask(method, path, content, headers)
        if response.status_code != 200:
            raise _to_error(response)
        return response

    async def _ask(self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]) -> httpx.Response:
        """Send a request, again where that is safe. Returns the last answer, whatever its status."""
        for attempt in range(self._max_retries + 1):
            is_last = attempt == self._max_retries
            try:
                response = await self._read(method, path, content, headers)
            except (httpx.TransportError, OSError) as error:
                if is_last or isinstance(error, httpx.ReadTimeout):
                    raise _unreachable_error(self.base_url, error, attempt + 1) from error
                await asyncio.sleep(_pause_s(attempt))
                continue
            if response.status_code in RETRIED_STATUSES and not is_last:
                await asyncio.sleep(_pause_s(attempt, response.headers.get("retry-after")))
                continue
            return response
        raise AssertionError

    async def _read(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        *,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """Send a request and read the whole answer. `timeout_s` replaces the usual times."""
        return await _read_whole(await self._open(method, path, content, headers, timeout_s=timeout_s), self.base_url)

    async def _open(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        *,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """Send a request; its answer is to be read and closed. `httpx.AsyncClient` would take four times the CPU."""
        timeout = self._timeout if timeout_s is None else dict.fromkeys(self._timeout, timeout_s)
        url = _read_url(self.base_url + path)
        request = httpx.Request(
            method, url, headers={**self._headers, **headers}, content=content, extensions={"timeout": timeout}
        )
        response = await self._transport.handle_async_request(request)
        response.request = request
        return response


async def _read_whole(response: httpx.Response, base_url: str) -> httpx.Response:
    """Read an answer to its end and close it; `ServerError` if it is longer than the limit for its status."""
    max_bytes = MAX_ANSWER_BYTES if response.status_code == 200 else MAX_ERROR_BYTES
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in response.aiter_bytes():
            num_bytes += len(part)
            _check_length(num_bytes, max_bytes, response, base_url)
            parts.append(part)
    finally:
        await response.aclose()
    # The bytes are unpacked: with that header they would be unpacked again.
    headers = [field for field in response.headers.raw if field[0].lower() != b"content-encoding"]
    return httpx.Response(response.status_code, headers=headers, content=b"".join(parts), request=response.request)


def _check_length(num_bytes: int, max_bytes: int, response: httpx.Response, base_url: str) -> None:
    if num_bytes > max_bytes:
        raise ServerError(
            f"an answer must have at most {max_bytes} bytes, and that of {base_url} to {response.url.path} with status "
            f"{response.status_code} is longer"
        )


async def _read_lines(response: httpx.Response, base_url: str) -> AsyncGenerator[bytes]:
    """The lines of an answer. Only a line feed ends one: JSON may contain what else Python takes for an end."""
    begun: list[bytes] = []
    num_bytes = 0
    async for part in response.aiter_bytes():
        first, *others = part.split(b"\n")
        num_bytes += len(first)
        _check_length(num_bytes, MAX_ANSWER_BYTES, response, base_url)
        begun.append(first)
        for line in others:
            yield b"".join(begun)
            begun, num_bytes = [line], len(line)
    yield b"".join(begun)


async def _read_events(response: httpx.Response, base_url: str, echo: bytes) -> AsyncGenerator[dict[str, Any]]:
    """Yield the events of a stream, which must end with `[DONE]`, and close the response."""
    try:
        async for line in _read_lines(response, base_url):
            if not line.startswith(b"data: "):
                continue
            data = line[len(b"data: ") :].rstrip(b"\r")
            if data == b"[DONE]":
                return
            event = _decode(data, echo)
            if "error" in event:
                raise ServerError(str(event["error"]["message"]))
            yield event
    except httpx.TransportError as error:
        raise _unreachable_error(base_url, error, 1) from error
    finally:
        await response.aclose()
    raise ServerError("the server's stream ended before [DONE]")


class EncodedIds:
    """Ids as JSON, encoded once for a body and for the echo in its answer."""

    def __init__(self, ids: TokenIds) -> None:
        self.ids = ids

    @cached_property
    def json(self) -> bytes:
        """A JSON list."""
        return orjson.dumps(self.ids, option=orjson.OPT_SERIALIZE_NUMPY)

    def to_field(self, name: str) -> bytes:
        """`"NAME":IDS` as servers write it."""
        return b'"' + name.encode() + b'":' + self.json


def _encode(body: Mapping[str, Any]) -> bytes:
    """Encode a body, numpy arrays in it included. Raises as `json.dumps` does, also for numbers that are not finite."""
    try:
        content = orjson.dumps(body, _wrap_ids, orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS)
    except TypeError:  # such as a number beyond 64 bits, or a key that is no text
        return json.dumps(body, ensure_ascii=False, allow_nan=False, default=_list_array).encode()
    if b"null" in content:  # which may stand for a number that is not finite
        json.dumps(body, allow_nan=False, default=lambda _: None)
    return content


def _wrap_ids(value: Any) -> orjson.Fragment:
    if isinstance(value, EncodedIds):
        return orjson.Fragment(value.json)
    raise TypeError


def _list_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, EncodedIds):
        return orjson.loads(value.json)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _decode(content: bytes, echo: bytes) -> Any:
    key = echo[: echo.find(b":") + 1]
    # To search for the whole echo would take 14 ms for 200,000 ids.
    if echo and (start := content.find(key)) >= 0 and content.startswith(echo, start):
        content = b"".join([content[:start], key, b'"', SAME.encode(), b'"', content[start + len(echo) :]])
    try:
        return parse_exactly(content, orjson.loads)
    except ValueError:  # in another encoding than UTF-8
        return json.loads(content)


def _format_images(held: RequestImages, settings: Mapping[str, Any] | None, inline: bool) -> dict[str, Any]:
    fields: dict[str, Any] = (
        {"images": held.body(inline=inline)} if any(own is not None for own in held.by_prompt) else {}
    )
    return fields if settings is None else {**fields, "mm_processor_kwargs": dict(settings)}


def _session_header(session_id: Any) -> dict[str, str]:
    """The conversation's name for load balancers, which do not read bodies, where a header can hold it."""
    if not session_id or not isinstance(session_id, str):
        return {}
    is_header = session_id.isascii() and session_id.isprintable() and session_id == session_id.strip()
    return {"X-Session-ID": session_id} if is_header else {}


def _pause_s(attempt: int, retry_after: str | None = None) -> float:
    """Seconds until a retry: the server's Retry-After or a growing time, with random jitter."""
    if retry_after is not None and retry_after.isdigit():
        return int(retry_after) + random.random()
    return min(2.0**attempt, 30.0) * (0.5 + random.random() / 2)


def _unreachable_error(base_url: str, error: Exception, num_tries: int) -> ServerUnreachableError:
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


def _to_error(response: httpx.Response) -> Exception:
    """Convert an error answer to one of our exceptions, with the server's message."""
    try:
        body = response.json()["error"]
        message, code, sha256 = str(body["message"]), body.get("code"), str(body.get("sha256"))
        param = body.get("param")
    except (ValueError, KeyError, TypeError):
        message, code, param, sha256 = response.text[:500], None, None, ""
    if code == "unknown_image":
        return _with_message(UnknownImageError(sha256), message)
    if (make_error := _ERRORS_BY_CODE.get(str(code))) is not None:
        return make_error(message)
    if response.status_code == 404 and param == "model":  # vLLM gives the status as the code
        return UnknownPolicyError(message)
    if response.status_code == 429:
        return ServerBusyError(message)
    if response.status_code in (400, 404, 409, 413, 422):
        return SamplingError(message)
    failure = ServerError(f"HTTP {response.status_code}: {message}")
    failure.status = response.status_code
    return failure


def _with_message(error: Exception, message: str) -> Exception:
    error.args = (message,)
    return error


def _session_ended(message: str) -> Exception:
    return _with_message(SessionEndedError("", ""), message)


def _session_not_found(message: str) -> Exception:
    return _with_message(UnknownSessionError(""), message)


_ERRORS_BY_CODE: Mapping[str, Callable[[str], Exception]] = {
    "context_length_exceeded": ContextOverflowError.from_message,
    "invalid_image": ImageError,
    "model_not_found": UnknownPolicyError,
    "session_ended": _session_ended,
    "session_expired": _session_ended,
    "session_finished": _session_ended,
    "session_not_found": _session_not_found,
}
