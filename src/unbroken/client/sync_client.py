"""The client for code without an event loop: an `AsyncClient` on an event loop in a separate thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

from anyio.from_thread import start_blocking_portal

from unbroken.client.async_client import AsyncClient
from unbroken.types import SampleResult, SamplingParams, ScoredSequence, TokenIds

_T = TypeVar("_T")


class Client:
    """`AsyncClient` with blocking methods and the same arguments. Thread-safe."""

    def __init__(self, base_url: str, **options: Any) -> None:
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())
        self._client = AsyncClient(base_url, **options)
        self._stack.callback(self._run, self._client.close)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread."""
        self._stack.close()

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int] | TokenIds],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> list[SampleResult]:
        """See `AsyncClient.generate`."""
        return self._run(lambda: self._client.generate(prompts, params, **options))

    def score(self, sequences: Sequence[Sequence[int] | TokenIds], **options: Any) -> list[ScoredSequence]:
        """See `AsyncClient.score`."""
        return self._run(lambda: self._client.score(sequences, **options))

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """See `AsyncClient.chat`."""
        return self._run(lambda: self._client.chat(messages, **fields))

    def chat_tokens(
        self, tokens: Sequence[int] | TokenIds, messages: Sequence[Mapping[str, Any]], **fields: Any
    ) -> dict[str, Any]:
        """See `AsyncClient.chat_tokens`."""
        return self._run(lambda: self._client.chat_tokens(tokens, messages, **fields))

    def tokenize(self, prompt: str | Sequence[Mapping[str, Any]], **fields: Any) -> TokenIds:
        """See `AsyncClient.tokenize`."""
        return self._run(lambda: self._client.tokenize(prompt, **fields))

    def health(self) -> bool:
        """See `AsyncClient.health`."""
        return self._run(self._client.health)

    def models(self) -> list[dict[str, Any]]:
        """See `AsyncClient.models`."""
        return self._run(self._client.models)

    def _run(self, call: Callable[[], Awaitable[_T]]) -> _T:
        return self._portal.call(call)
