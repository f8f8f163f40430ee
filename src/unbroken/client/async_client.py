"""The server's client for asyncio: ids in, exact ids out, in the compact form.

async with AsyncClient("http://127.0.0.1:8000") as client:
    (result,) = await client.generate([[1, 2, 3]], SamplingParams(max_tokens=64), n=4)
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any
from uuid import uuid4

import httpx
import numpy as np

from unbroken import compact
from unbroken.client.connections import Connections
from unbroken.client.wire import params_object, read_chunk, read_result, read_scored
from unbroken.errors import (
    ContextOverflowError,
    EchoError,
    InvalidInputError,
    SamplingError,
    ServerBusyError,
    ServerError,
    ServerUnreachableError,
)
from unbroken.types import SampleChunk, SampleResult, SamplingParams, ScoredSequence, TokenIds, token_ids

_RETRIED = frozenset({429, 502, 503})


class AsyncClient:
    """Talks to one server over kept connections.

    A call that meets a broken connection, or a server that is full or restarting, is tried again after a growing pause.
    Each call has an idempotency key, so that a server which had answered already does not sample again.

    Args:
        base_url: e.g. `http://127.0.0.1:8000`.
        api_key: what the server asks for, if it does.
        timeout_s: longest wait for an answer.
        connect_timeout_s: longest wait for a connection.
        max_retries: how often a call is tried again.
        transport: in place of `Connections`: httpx's own with a proxy, say, or one that asks an app in this process.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 3600.0,
        connect_timeout_s: float = 10.0,
        max_retries: int = 4,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.base_url = base_url.rstrip("/")
        self._max_retries = max_retries
        self._farewells: set[asyncio.Task[None]] = set()
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=connect_timeout_s, pool=None),
            transport=transport or Connections(),
        )

    async def __aenter__(self) -> AsyncClient:
        """Use as a context manager to close the connections at the end."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*self._farewells)
        await self._http.aclose()

    async def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int] | TokenIds],
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        adapter: str | None = None,
        session_id: str | None = None,
    ) -> list[SampleResult]:
        """Continue prompts, all texts or all ids: one result for each, with n completions.

        Raises:
            SamplingError: the server refuses a prompt or parameter; the message is the server's.
            ServerBusyError: it is full, and stayed so.
            ServerUnreachableError: there is no connection, and it stayed so.
            ServerError: it failed.
        """
        body = {
            "prompts": [p if isinstance(p, str) else _listed(p, name="prompts") for p in prompts],
            "params": params_object(params or SamplingParams()),
            "n": n,
            "adapter": adapter,
            "session_id": session_id,
        }
        answer = await self._post("/v1/sample", body)
        return [read_result(result) for result in answer["results"]]

    async def stream(
        self,
        prompt: Sequence[int] | TokenIds,
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        adapter: str | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[SampleChunk]:
        """Continue one prompt, in chunks as they are sampled; see `Engine.stream`. Never retried.

        Raises:
            EchoError: the server continues another prompt (I3).
            SamplingError, ServerError: as for `generate`.
        """
        ids = _listed(prompt, name="prompt")
        body = {
            "prompts": [ids],
            "params": params_object(params or SamplingParams()),
            "n": n,
            "adapter": adapter,
            "session_id": session_id,
            "stream": True,
        }
        try:
            async with self._http.stream("POST", "/v1/sample", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _error_of(response)
                async for event in _events(response):
                    if event.get("prompt_ids", ids) != ids:
                        raise EchoError(f"{self.base_url} continues another prompt than it was sent")
                    yield read_chunk(event)
        except httpx.TransportError as error:
            raise _unreachable(self.base_url, error, 1) from error

    async def score(
        self,
        sequences: Sequence[Sequence[int] | TokenIds],
        *,
        temperature: float = 1.0,
        num_top_logprobs: int = 0,
    ) -> list[ScoredSequence]:
        """The logprobs of given sequences. Raises as `generate` does."""
        body = {
            "sequences": [_listed(ids, name="sequences") for ids in sequences],
            "temperature": temperature,
            "num_top_logprobs": num_top_logprobs,
        }
        answer = await self._post("/v1/score", body)
        return [read_scored(result) for result in answer["results"]]

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """OpenAI's chat completion, with ids; `fields` are that dialect's. Raises as `generate` does."""
        return await self._chat("/v1/chat/completions", {"messages": list(messages), **fields})

    async def chat_tokens(
        self, tokens: Sequence[int] | TokenIds, messages: Sequence[Mapping[str, Any]], **fields: Any
    ) -> dict[str, Any]:
        """A chat completion that continues exactly these ids; `messages` are never rendered. Raises as `generate`."""
        ids = _listed(tokens, name="tokens")
        return await self._chat("/v1/chat/completions/tokens", {"tokens": ids, "messages": list(messages), **fields})

    async def tokenize(self, prompt: str | Sequence[Mapping[str, Any]], **fields: Any) -> TokenIds:
        """The ids of a text or of rendered messages, as the server encodes them. Raises as `generate` does."""
        what = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        answer = await self._post("/tokenize", {**what, **fields})
        return token_ids(answer["tokens"])

    async def pause(self) -> None:
        """Stop sampling after the current step, for everybody. Needs the admin key where there is one."""
        await self._post("/pause", {})

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._post("/resume", {})

    async def reset_prefix_cache(self) -> None:
        """Forget keys and values of finished requests. Needs the admin key where there is one."""
        await self._post("/reset_prefix_cache", {})

    async def policy_version(self) -> int:
        """The version of the weights in use."""
        version: int = (await self._request("GET", "/version")).json()["policy_version"]
        return version

    async def world_size(self) -> int:
        """How many workers of the server take part in an update of the weights."""
        size: int = (await self._request("GET", "/get_world_size")).json()["world_size"]
        return size

    async def health(self) -> bool:
        """Whether the server answers and its engine lives; never retried."""
        try:
            return (await self._http.get("/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def models(self) -> list[dict[str, Any]]:
        """What the server serves; `max_model_len` is its context length."""
        answer: list[dict[str, Any]] = (await self._request("GET", "/v1/models")).json()["data"]
        return answer

    async def _chat(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        body = {"logprobs": True, "return_token_ids": True, **body}
        if body.get("stream"):
            raise InvalidInputError("stream must be absent here: use the OpenAI SDK to stream")
        answer: dict[str, Any] = await self._post(path, body)
        return answer

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        response = await self._request("POST", path, body)
        if response.headers.get("content-type", "").startswith(compact.MEDIA_TYPE):
            return compact.decode(response.content)
        return response.json()

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        headers = {"Accept": f"{compact.MEDIA_TYPE}, application/json"}
        if body is None:
            return await self._try(method, path, None, headers)
        headers["Idempotency-Key"] = uuid4().hex
        try:
            return await self._try(method, path, body, headers)
        except asyncio.CancelledError:
            # The server would go on for a while, in case the connection broke and this call is tried again.
            told = asyncio.create_task(self._abandon(headers))
            self._farewells.add(told)
            told.add_done_callback(self._farewells.discard)
            raise

    async def _abandon(self, headers: Mapping[str, str]) -> None:
        with suppress(httpx.HTTPError, RuntimeError):  # RuntimeError: this client was closed meanwhile
            await self._http.post("/v1/abandon", headers=headers, timeout=5.0)

    async def _try(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> httpx.Response:
        for attempt in range(self._max_retries + 1):
            is_last = attempt == self._max_retries
            try:
                response = await self._http.request(method, path, json=body, headers=headers)
            except (httpx.TransportError, OSError) as error:
                if is_last or isinstance(error, httpx.ReadTimeout):
                    raise _unreachable(self.base_url, error, attempt + 1) from error
                await asyncio.sleep(_pause_s(attempt))
                continue
            if response.status_code in _RETRIED and not is_last:
                await asyncio.sleep(_pause_s(attempt, response.headers.get("retry-after")))
                continue
            if response.status_code != 200:
                raise _error_of(response)
            return response
        raise AssertionError


async def _events(response: httpx.Response) -> AsyncGenerator[dict[str, Any]]:
    """The events of a stream, which must end with `[DONE]`."""
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerError(str(event["error"]["message"]))
        yield event
    raise ServerError("the server's stream broke off before its end")


def _listed(ids: Sequence[int] | TokenIds, *, name: str) -> list[int]:
    listed: list[int] = ids.tolist() if isinstance(ids, np.ndarray) else [int(token_id) for token_id in ids]
    if listed and min(listed) < 0:
        raise InvalidInputError(f"{name} must hold ids >= 0, got {min(listed)}")
    return listed


def _pause_s(attempt: int, retry_after: str | None = None) -> float:
    """Seconds to wait before the next try: what the server says, or a growing time, never the same for two clients."""
    if retry_after is not None and retry_after.isdigit():
        return int(retry_after) + random.random()
    return min(2.0**attempt, 30.0) * (0.5 + random.random() / 2)


def _unreachable(base_url: str, error: Exception, num_tries: int) -> ServerUnreachableError:
    return ServerUnreachableError(
        f"no answer from {base_url} in {num_tries} tries ({type(error).__name__}: {error}): is the server running, and "
        "is this its address?"
    )


def _error_of(response: httpx.Response) -> Exception:
    """The server's error as one of ours, with the server's message."""
    try:
        told = response.json()["error"]
        message, code = str(told["message"]), told.get("code")
    except (ValueError, KeyError, TypeError):
        message, code = response.text[:500], None
    if code == "context_length_exceeded":
        return ContextOverflowError.told(message)
    if response.status_code == 429:
        return ServerBusyError(message)
    if response.status_code in (400, 404, 413, 422):
        return SamplingError(message)
    return ServerError(f"HTTP {response.status_code}: {message}")
