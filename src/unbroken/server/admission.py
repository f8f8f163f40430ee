"""Which requests may run now: the queue's limit, pauses as in vLLM, and aborting requests by name.

mode     requests in flight              new requests
keep     wait, and go on at `resume`     wait
abort    end with what they have         503
wait     finish                          503
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum

from unbroken.engines.base import Engine
from unbroken.server.config import Limits
from unbroken.server.http.errors import HttpError
from unbroken.server.metrics import Metrics
from unbroken.types import SampleRequest

_LOOK_AGAIN_S = 0.05


class PauseMode(StrEnum):
    """What a pause does to requests."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class Admission:
    """Admits the requests of one engine."""

    def __init__(self, engine: Engine, *, limits: Limits, metrics: Metrics) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._num_admitted = 0
        self._running: dict[str, SampleRequest] = {}
        """The requests in flight, by id."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._paused: PauseMode | None = None

    @property
    def is_paused(self) -> bool:
        """Whether a pause lasts."""
        return self._paused is not None

    @property
    def num_running(self) -> int:
        """Requests in flight, those that wait included."""
        return len(self._running)

    @contextmanager
    def admit(self, requests: Sequence[SampleRequest]) -> Iterator[None]:
        """Count requests as running; `HttpError` if there is no room, or a pause refuses them."""
        with self.reserve(sum(request.n for request in requests)):
            self._running |= {request.request_id: request for request in requests}
            try:
                yield
            finally:
                for request in requests:
                    del self._running[request.request_id]

    @contextmanager
    def reserve(self, num_completions: int) -> Iterator[None]:
        """Take places in the queue; `HttpError` if there is no room, or a pause refuses them."""
        self._check_open()
        self._check_room(num_completions)
        self._count(num_completions)
        try:
            yield
        finally:
            self._count(-num_completions)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause; returns once no request samples, or the pause is over.

        `clear_cache` drops cached keys and values, except with KEEP. If the engine refuses, nothing is paused that was
        not before; requests that were aborted stay so.
        """
        earlier, self._paused = self._paused, mode
        try:
            if mode is PauseMode.KEEP:
                await self._engine.pause()
                return
            if earlier is PauseMode.KEEP:
                await self._engine.resume()
                earlier = None
            await self._wait_until_idle()
            if clear_cache and self._refuses:
                await self._engine.reset_prefix_cache()
        except Exception:
            if self._paused is mode:  # and nobody has resumed or paused since
                self._paused = earlier
            raise

    async def _wait_until_idle(self) -> None:
        """Wait for the requests in flight, or abort them, unless the pause ends or becomes KEEP."""
        while self._refuses and self._num_admitted:
            if self._paused is PauseMode.ABORT:
                await self.abort()  # each time: a request that is still prepared cannot be aborted yet
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _LOOK_AGAIN_S)

    async def resume(self) -> None:
        """End the pause. ABORT and WAIT pause nothing but the queue; otherwise the engine is asked."""
        if not self._refuses:
            await self._engine.resume()
        self._paused = None

    async def abort(self, names: Collection[str] | None = None) -> int:
        """Abort requests by the names that their callers know, sessions' included, or all; returns how many."""
        ids = [
            request_id
            for request_id, request in self._running.items()
            if names is None or name_of(request_id) in names or request.session_id in names
        ]
        for request_id in ids:
            await self._engine.abort(request_id)
        return len(ids)

    def _count(self, num_completions: int) -> None:
        self._num_admitted += num_completions
        self._metrics.in_flight.set(self._num_admitted)
        if self._num_admitted:
            self._idle.clear()
        else:
            self._idle.set()

    @property
    def _refuses(self) -> bool:
        return self._paused in (PauseMode.ABORT, PauseMode.WAIT)

    def _check_open(self) -> None:
        if self._paused is not None and self._refuses:
            raise HttpError(
                503,
                f"the server is paused (mode {self._paused.value!r}): try again after POST /resume",
                code="paused",
                headers={"Retry-After": str(self._limits.retry_after_s)},
            )

    def _check_room(self, num_completions: int) -> None:
        maximum = self._limits.max_queued
        if num_completions > maximum:
            raise HttpError(
                400,
                f"a request may have at most {maximum} completions (max_queued), got {num_completions} (prompts times "
                "n)",
                param="n",
            )
        if self._num_admitted + num_completions > maximum:
            self._metrics.refused_busy.inc()
            raise HttpError(
                429,
                f"the queue has {self._num_admitted} of at most {maximum} completions (max_queued), no room for "
                f"{num_completions} more: try again later",
                code="queue_full",
                headers={"Retry-After": str(self._limits.retry_after_s)},
            )


def make_request_id(name: str, unique: str, index: int) -> str:
    """The engine's id of the request for prompt `index` of a call; `name` is the one that the caller knows."""
    return f"{name}-{unique}-{index}"


def name_of(request_id: str) -> str:
    """The caller's name for a request."""
    return request_id.rsplit("-", 2)[0]
