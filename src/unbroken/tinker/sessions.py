"""Promises, training runs that do their calls in order, and what a session has.

POST forward_backward, seq_id 2  ─┐                     every call of a model is a promise: it is answered at once,
POST optim_step,       seq_id 3   ├─► TrainingRun ─►    and its result is asked for, as often as it takes
POST forward_backward, seq_id 1  ─┘   1, 2, 3           a seq_id that comes again is the same promise
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.responses import Response

from unbroken.errors import EngineError, StoreError, UnbrokenError
from unbroken.server.http.errors import HttpError, to_http_error
from unbroken.server.http.json import json_response
from unbroken.tinker.sampling import SamplerWeights
from unbroken.tinker.store import ModelFacts

if TYPE_CHECKING:
    from unbroken.tinker.models import Models, TrainerProcess

MAX_OPEN = 10_000
"""Most promises of one key that are not answered yet."""
MAX_OPEN_BYTES = 2**31
"""Most bytes of the bodies of these promises, and so of one batch: the first of its chunks comes last."""
MAX_SNAPSHOTS = 8
"""Most samplers of a model that have weights without a name: each is a copy on the disk."""
_SEQ_IDS_PER_CLONE = 1_000_000_000
"""The SDK numbers the calls of a sampler's copies in this way."""
_MISSING_S = 120.0
"""How long after the last call came all wait for one that does not come. Of a batch, the SDK sends the first chunk once
all others are taken; a call that is lost it sends again within that time."""
_KEPT_S = 3600.0
_MAX_KEPT_BYTES = 512 * 2**20
"""Most bytes of the results of one key: then those that were sent are forgotten."""
Work: TypeAlias = Callable[[], Coroutine[Any, Any, Response]]


def describe_failure(error: Exception) -> Response:
    """The result of a call that failed, in the SDK's categories: `user` for what the caller can mend, `server` for the
    rest.
    """
    if isinstance(error, UnbrokenError) and not isinstance(error, EngineError):
        return json_response({"error": str(error), "category": "server" if isinstance(error, StoreError) else "user"})
    found = to_http_error(error)
    return json_response({"error": found.message, "category": "user" if found.status < 500 else "server"})


FORGOTTEN = describe_failure(
    HttpError(410, f"the result is kept for {_KEPT_S:g} s, and no longer; one that was sent makes room for others")
)


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """A call whose result is asked for later."""

    request_id: str
    kind: str
    digest: bytes
    """Of kind and body: by it a call that comes again is known."""
    num_bytes: int
    """Of the body."""
    task: asyncio.Task[Response]
    sequence_ids: list[str] = field(default_factory=list)
    """Of a sampling call: the ids of its completions."""
    result: Response | None = None
    is_sent: bool = False
    """When there is no room, its result is forgotten before any that was not."""
    ended_ns: int = 0

    async def wait(self, timeout_s: float | None = None) -> Response | None:
        """Wait for the result; None if it takes longer."""
        await asyncio.wait({self.task}, timeout=timeout_s)
        return self.result


class Promises:
    """All promises of a key: those that are open, and the results of the last hour."""

    def __init__(self) -> None:
        self._by_id: dict[str, Promise] = {}
        self._kept: dict[str, Promise] = {}
        """Those with results, the oldest first."""
        self._open_bytes = self._kept_bytes = 0
        """All bytes of the bodies of open ones, and of results."""
        self._next_end = asyncio.Event()

    def start(self, request_id: str, kind: str, body: bytes, work: Work, *, is_next: bool = False) -> Promise:
        """Begin a call; the promise of before, if it comes again.

        Raises:
            HttpError: the number was another call's; or there are too many calls, and others do not wait for this one
                (`is_next`), or too many results that were not asked for (429: the SDK sends the call again).
        """
        digest = hashlib.blake2b(body, digest_size=16, person=kind.encode()[:16]).digest()
        if known := self._by_id.get(request_id):
            if known.digest == digest:
                return known
            raise HttpError(  # not 409: the SDK would send it again for ever
                400,
                f"call {request_id} was {known.kind}, and came again as {kind}, or with another body: another call "
                "needs another seq_id",
            )
        number = len(self._by_id) - len(self._kept)
        is_full = number >= MAX_OPEN or self._open_bytes + len(body) > MAX_OPEN_BYTES
        if (is_full and not is_next) or (self._kept_bytes > _MAX_KEPT_BYTES and self._find_sent() is None):
            raise HttpError(
                429,
                f"this key has {number} calls of {self._open_bytes} bytes that are not answered yet (at most "
                f"{MAX_OPEN} of {MAX_OPEN_BYTES}), or {self._kept_bytes} bytes of results that it has not asked for "
                f"(at most {_MAX_KEPT_BYTES}): wait for some of them, and retrieve their results",
                headers={"Retry-After": "1"},
            )
        self._by_id[request_id] = promise = Promise(
            request_id=request_id,
            kind=kind,
            digest=digest,
            num_bytes=len(body),
            task=asyncio.create_task(work()),
        )
        self._open_bytes += len(body)
        promise.task.add_done_callback(partial(self._finish, promise))
        return promise

    def _finish(self, promise: Promise, task: asyncio.Task[Response]) -> None:
        try:
            promise.result = task.result()
        except asyncio.CancelledError:
            promise.result = describe_failure(HttpError(499, "the call was cancelled"))
        except Exception as error:
            promise.result = describe_failure(error)
        promise.ended_ns = time.monotonic_ns()
        self._next_end.set()
        self._next_end = asyncio.Event()
        self._open_bytes -= promise.num_bytes
        self._kept[promise.request_id] = promise
        self._kept_bytes += len(promise.result.body)
        while self._kept_bytes > _MAX_KEPT_BYTES and (sent := self._find_sent()) is not None:
            self._forget(sent)
        while (oldest := next(iter(self._kept.values()))).ended_ns < promise.ended_ns - _KEPT_S * 1e9:
            self._forget(oldest)

    def _find_sent(self) -> Promise | None:
        """The oldest whose result was sent."""
        return next((each for each in self._kept.values() if each.is_sent), None)

    def _forget(self, promise: Promise) -> None:
        del self._kept[promise.request_id], self._by_id[promise.request_id]
        assert promise.result is not None, "only what has a result is kept"
        self._kept_bytes -= len(promise.result.body)

    def cancel_samples(self, prefix: str) -> None:
        """End the sampling calls whose names begin like this."""
        for promise in self._by_id.values():
            if promise.kind == "sample" and promise.request_id.startswith(prefix):
                promise.task.cancel()

    async def wait_for_samples(self, sampler_id: str, clone: int, *, after: int, timeout_s: float) -> list[Promise]:
        """The calls of a sampler, or of a clone of it, that have ended after the time `after`, in order; none if none
        ends in time.
        """
        found: list[Promise] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not found:
                    for promise in takewhile(lambda each: each.ended_ns > after, reversed(self._kept.values())):
                        name, _, seq_id = promise.request_id.rpartition(":")
                        if name == sampler_id and int(seq_id) // _SEQ_IDS_PER_CLONE == clone:
                            found.insert(0, promise)
                    if not found:
                        await self._next_end.wait()
        return found

    def find(self, request_id: str) -> Promise | None:
        """A promise that is open, or kept."""
        return self._by_id.get(request_id)


class TrainingRun:
    """A model that is trained, and its calls in the order of their `seq_id`."""

    def __init__(self, facts: ModelFacts, *, owner: str, promises: Promises) -> None:
        self.model_id = facts.model_id
        self.facts = facts
        self.owner = owner
        self.version = 0
        """Rises with each change of the weights."""
        self.backend: Models | TrainerProcess | None = None
        """Has the model; None until it is made."""
        self.counted: dict[str, float] = {}
        """The metrics of the `forward_backward` calls since the last step, added up as the SDK does for chunks."""
        self.inflight = SamplerWeights(model_id=facts.model_id)
        """What its `inflight` samplers share."""
        self.snapshots: list[str] = []
        """Names of samplers with weights without a name, the oldest first."""
        self._promises = promises
        self._next = 0
        """The first is the one that makes the model."""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """Of each call that waits, by its number: has a result when it is its turn."""
        self._idle = asyncio.Event()
        """Set while no call runs."""
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None

    def count(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a call to those of its step; means are left out."""
        for name, value in metrics.items():
            known = self.counted.get(name, 0.0)
            if name.endswith((":sum", ":max")):
                self.counted[name] = known + value if name.endswith(":sum") else max(known, value)

    def submit(self, seq_id: int | None, kind: str, work: Work, body: bytes) -> Promise:
        """Take a call, which runs after those with lower numbers; the promise of before, if it comes again.

        Raises:
            HttpError: the number is not valid, or was that of another call; or as `Promises.start`.
        """
        number, turn = seq_id or 0, asyncio.get_running_loop().create_future()
        request_id = f"{self.model_id}:{number}"
        is_new = self._promises.find(request_id) is None
        if is_new and not self._next <= number < self._next + MAX_OPEN:
            raise HttpError(
                400,
                f"seq_id of {self.model_id} must lie in [{self._next}, {self._next + MAX_OPEN}), got {number}: calls "
                "are numbered from 1, and a client that goes on with another's model must go on with its numbers",
            )
        in_turn = partial(self._work_in_turn, turn, work)
        promise = self._promises.start(request_id, kind, body, in_turn, is_next=number == self._next)
        if is_new:
            self._waiting[number] = turn
            self._begin_next()
        return promise

    async def _work_in_turn(self, turn: asyncio.Future[None], work: Work) -> Response:
        await turn
        try:
            return await work()
        finally:
            self._idle.set()
            self._begin_next()

    def _begin_next(self) -> None:
        """Let the next call begin, unless one runs; those that wait too long for one that does not come fail."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._idle.is_set():
            return
        if turn := self._waiting.pop(self._next, None):
            self._next += 1
            self._idle.clear()
            turn.set_result(None)
        elif self._waiting:
            self._timer = asyncio.get_running_loop().call_later(_MISSING_S, self._skip_missing)

    def _skip_missing(self) -> None:
        missing, self._next = self._next, max(self._waiting) + 1
        self._fail_waiting(
            f"call {missing} of model {self.model_id} never arrived, or was refused: what came after it waited "
            f"{_MISSING_S:g} s and was not done"
        )

    def _fail_waiting(self, reason: str) -> None:
        for turn in self._waiting.values():
            turn.set_exception(HttpError(410, reason))
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    async def end(self, reason: str) -> None:
        """Fail the calls that wait, and wait for the one that runs; there may be no more after it."""
        self._fail_waiting(f"model {self.model_id} is gone: {reason}")
        await self._idle.wait()


@dataclass(slots=True, kw_only=True, eq=False)
class TinkerSession:
    """One client, which gives signs of life."""

    session_id: str
    owner: str
    seen_s: float = field(default_factory=time.monotonic)
    runs: dict[str, TrainingRun] = field(default_factory=dict)
    samplers: dict[str, SamplerWeights] = field(default_factory=dict)
    """What each of its sampling sessions, by its name, samples from."""
    num_clones: int = 0
    """Of all these."""
