"""The client for code without an event loop: an `AsyncClient` on an event loop in a separate thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, TypeVar

from anyio.from_thread import start_blocking_portal

from unbroken.client.async_client import AsyncClient
from unbroken.client.sessions import (
    CreatedSession,
    SessionCalls,
    SessionStatus,
    SessionSummary,
    SessionTree,
    SessionView,
)
from unbroken.types import SampleResult, SamplingParams, ScoredSequence, TokenIds, TrainingSample

_T = TypeVar("_T")


class Client:
    """`AsyncClient` with blocking methods and the same arguments. Thread-safe."""

    def __init__(self, base_url: str, **options: Any) -> None:
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())
        self._client = AsyncClient(base_url, **options)
        self._stack.callback(self._run, self._client.close)
        self.sessions = _BlockingSessionCalls(self._client.sessions, self._run)

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
        """Continue prompts, all texts or all ids."""
        return self._run(lambda: self._client.generate(prompts, params, **options))

    def score(self, sequences: Sequence[Sequence[int] | TokenIds], **options: Any) -> list[ScoredSequence]:
        """Compute the logprobs of sequences, their images expanded."""
        return self._run(lambda: self._client.score(sequences, **options))

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """Make an OpenAI chat completion with ids; `fields` are other fields of the body."""
        return self._run(lambda: self._client.chat(messages, **fields))

    def chat_tokens(
        self, tokens: Sequence[int] | TokenIds, messages: Sequence[Mapping[str, Any]], **fields: Any
    ) -> dict[str, Any]:
        """Make a chat completion that continues exactly these ids."""
        return self._run(lambda: self._client.chat_tokens(tokens, messages, **fields))

    def tokenize(self, prompt: str | Sequence[Mapping[str, Any]], **fields: Any) -> TokenIds:
        """Encode a text, or render messages with their images expanded, on the server."""
        return self._run(lambda: self._client.tokenize(prompt, **fields))

    def health(self) -> bool:
        """Whether the server answers and its engine works; never retried."""
        return self._run(self._client.health)

    def models(self) -> list[dict[str, Any]]:
        """The server's models, at least one; `max_model_len` is the context length."""
        return self._run(self._client.models)

    def model(self, name: str) -> dict[str, Any]:
        """What a name of a model means: `policy`, its name without a version, and the `policy_version` that would
        answer; `UnknownPolicyError` if it means nothing.
        """
        return self._run(lambda: self._client.model(name))

    def _run(self, call: Callable[[], Awaitable[_T]]) -> _T:
        return self._portal.call(call)


class _Run(Protocol):
    def __call__(self, call: Callable[[], Awaitable[_T]]) -> _T: ...


class _BlockingSessionCalls:
    """`SessionCalls` with blocking methods. `Client.sessions` is one."""

    def __init__(self, calls: SessionCalls, run: _Run) -> None:
        self._calls = calls
        self._run = run

    def create(self, settings: Mapping[str, Any] | None = None) -> CreatedSession:
        """Create a session."""
        return self._run(lambda: self._calls.create(settings))

    def get(self, session_id: str) -> SessionView:
        """Status, settings, outcome, counters and forks."""
        return self._run(lambda: self._calls.get(session_id))

    def samples(self, session_id: str, *, advantage: float | None = None) -> list[TrainingSample]:
        """The rows to train on, one for each branch, with their images; each sampled id is trained once."""
        return self._run(lambda: self._calls.samples(session_id, advantage=advantage))

    def tree(self, session_id: str) -> SessionTree:
        """All that is recorded: messages, tools, turns, and the nodes of the token tree with arrays."""
        return self._run(lambda: self._calls.tree(session_id))

    def image(self, session_id: str, sha256: str) -> bytes:
        """The file of an image in the session."""
        return self._run(lambda: self._calls.image(session_id, sha256))

    def finish(self, session_id: str, outcome: Mapping[str, Any] | None = None) -> SessionSummary:
        """End a session with its `reward`, `metrics` and `status`; returns the session."""
        return self._run(lambda: self._calls.finish(session_id, outcome))

    def delete(self, session_id: str) -> None:
        """Delete a session and all that it recorded."""
        return self._run(lambda: self._calls.delete(session_id))

    def list(self, *, status: SessionStatus | None = None) -> list[SessionSummary]:
        """All sessions, oldest first, or those of one status."""
        return self._run(lambda: self._calls.list(status=status))
