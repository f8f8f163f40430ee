"""Promises, training runs that do their calls in order, and what a session has.

POST forward_backward, seq_id 2  ─┐                     every call of a model is a promise: it is answered at once,
POST optim_step,       seq_id 3   ├─► TrainingRun ─►    and its result is asked for, as often as it takes
POST forward_backward, seq_id 1  ─┘   1, 2, 3           a seq_id that comes again is the same promise

A promise is in memory until its result is in the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from unbroken.errors import EngineError, StoreError, UnbrokenError
from unbroken.server.http.errors import HttpError, to_http_error
from unbroken.server.http.json import encode_json
from unbroken.threads import DaemonThreads
from unbroken.tinker.sampling import SamplerWeights
from unbroken.tinker.store import ANSWERS_KEPT_S, CallResult, ModelFacts, TinkerStore

if TYPE_CHECKING:
    from unbroken.tinker.models import Models, TrainerProcess

MAX_OPEN, MAX_OPEN_BYTES = 10_000, 2**31
"""Most promises of one key that are not answered yet, and bytes of their bodies, and so of a batch's chunks."""
MAX_SNAPSHOTS = 8
"""Most samplers of a model that have weights without a name: each is a copy on the disk."""
_SEQ_IDS_PER_CLONE = 1_000_000_000
"""The SDK numbers the calls of a sampler's copies in this way."""
_MISSING_S = 120.0
"""How long after the last call came all wait for one that does not: the SDK sends a lost one again within that time."""
Ended: TypeAlias = tuple[int, str]
Work: TypeAlias = Callable[[], Coroutine[Any, Any, dict[str, Any] | CallResult]]


def _fail(error: Exception) -> CallResult:
    """The result of a call that failed, in the SDK's categories: `user` for what the caller can mend."""
    if isinstance(error, UnbrokenError) and not isinstance(error, EngineError):
        message, is_ours = str(error), isinstance(error, StoreError)
    else:
        found = to_http_error(error)
        message, is_ours = found.message, found.status >= 500
    return CallResult(answer=encode_json({"error": message, "category": "server" if is_ours else "user"}))


FORGOTTEN = _fail(HttpError(410, f"the result is kept for {ANSWERS_KEPT_S:g} s, and no longer"))


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """A call whose result is asked for later."""

    request_id: str
    digest: bytes
    """Of kind and body: by it a call that comes again is known."""
    num_bytes: int = 0
    """Of the body."""
    sequence_ids: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    """Of a sampling call, which also has the names of its completions."""
    result: CallResult | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_cancelled: bool = False

    async def wait(self, timeout_s: float | None = None) -> CallResult | None:
        """Wait for the result; None if it takes longer."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), timeout_s)
        return self.result if self.ended.is_set() else None

    def cancel(self) -> None:
        """End a sampling call that has no result yet."""
        if self.task is not None and self.result is None:
            self.is_cancelled = True
            self.task.cancel()


class Promises:
    """All promises of a key."""

    def __init__(self, store: TinkerStore, storing: DaemonThreads, owner: str) -> None:
        self._store, self._storing, self._owner = store, storing, owner
        self._open: dict[str, Promise] = {}
        """Those without a result, or whose result could not be stored, for as long as others are kept."""
        self._open_bytes = 0
        self._ended: deque[Ended] = deque()
        """When calls ended, and which, for as long as their results are kept."""
        self._next_end = asyncio.Event()

    async def find(self, request_id: str) -> Promise | None:
        """A promise that is open, or whose result is kept."""
        if (known := self._open.get(request_id)) is None:
            read = partial(self._store.find_result, request_id, owner=self._owner)
            if (stored := await self._storing.run(read)) is not None:
                known = Promise(request_id=request_id, digest=stored[0])
                known.result = stored[1] if stored[1].answer is not None else FORGOTTEN
                known.ended.set()
        return self._open.get(request_id, known)

    async def start(
        self, request_id: str, kind: str, body: bytes, *, is_new: bool = False, is_next: bool = False
    ) -> Promise:
        """Take a call, which `run` does; the promise of before, if it comes again, and is not known to be new. Raises
        `HttpError` if the number was another call's, or there are too many that do not wait for it (`is_next`).
        """
        digest = hashlib.blake2b(body, digest_size=16, person=kind.encode()[:16]).digest()
        if known := None if is_new else await self.find(request_id):
            if known.digest == digest:
                return known
            raise HttpError(  # not 409: the SDK would send it again for ever
                400, f"call {request_id} came again as {kind}, or with another body: another call needs another seq_id"
            )
        number, most = len(self._open), f"at most {MAX_OPEN} of {MAX_OPEN_BYTES}"
        if not is_next and (number >= MAX_OPEN or self._open_bytes + len(body) > MAX_OPEN_BYTES):
            of = f"{number} calls of {self._open_bytes} bytes that are not answered yet ({most})"
            raise HttpError(429, f"this key has {of}: wait for some of them", headers={"Retry-After": "1"})
        self._open[request_id] = promise = Promise(request_id=request_id, digest=digest, num_bytes=len(body))
        self._open_bytes += len(body)
        return promise

    async def run(self, promise: Promise, work: Work, *, is_kept: bool = True) -> None:
        """Do the work of a call, and store its result, unless nobody can ask for it later."""
        try:
            made = await work()
            promise.result = made if isinstance(made, CallResult) else CallResult(answer=encode_json(made))
        except asyncio.CancelledError:
            if not promise.is_cancelled:  # the server stops
                raise
            promise.result = _fail(HttpError(499, "the call was cancelled"))
        except Exception as error:
            promise.result = _fail(error)
        write = partial(self._store.put_result, promise.request_id, promise.digest, promise.result, owner=self._owner)
        try:
            if is_kept:
                await self._storing.run(write)
            del self._open[promise.request_id]
        except Exception as error:  # what was trained is trained; what was sampled cannot be proven later
            if promise.result.sequences:
                promise.result = _fail(error)
            asyncio.get_running_loop().call_later(ANSWERS_KEPT_S, self._open.pop, promise.request_id, None)
        now = time.monotonic_ns()
        self._open_bytes -= promise.num_bytes
        self._ended.append((now, promise.request_id))
        while self._ended[0][0] < now - ANSWERS_KEPT_S * 1e9:
            self._ended.popleft()
        promise.ended.set()
        self._next_end.set()
        self._next_end = asyncio.Event()

    def cancel_samples(self, prefix: str) -> None:
        """End the sampling calls whose names begin like this."""
        for promise in self._open.values():
            if promise.request_id.startswith(prefix):
                promise.cancel()

    async def wait_for_samples(self, sampler_id: str, clone: int, *, after: int, timeout_s: float) -> list[Ended]:
        """Which calls of a sampler, or of a clone of it, ended after the time `after`, in order; none if none does."""

        def is_of_clone(each: Ended) -> bool:
            name, _, seq_id = each[1].rpartition(":")
            return name == sampler_id and int(seq_id) // _SEQ_IDS_PER_CLONE == clone

        found: list[Ended] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not found:
                    later = takewhile(lambda each: each[0] > after, reversed(self._ended))
                    if not (found := [each for each in later if is_of_clone(each)][::-1]):
                        await self._next_end.wait()
        return found


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
        """The metrics of the `forward_backward` calls since the last step."""
        self.inflight = SamplerWeights(model_id=facts.model_id)
        """What its `inflight` samplers share."""
        self.snapshots: list[str] = []
        """Names of samplers with weights without a name, the oldest first."""
        self._promises = promises
        self._next = 0
        """The first is the one that makes the model."""
        self._waiting: dict[int, tuple[Promise, Work]] = {}
        self._arrived = asyncio.Event()
        self._reason: str | None = None
        """Why there are no more calls."""
        self._working: asyncio.Task[None] | None = None
        """Does calls while some wait."""

    async def submit(self, seq_id: int | None, kind: str, work: Work, body: bytes) -> Promise:
        """Take a call, which runs after those with lower numbers; the promise of before, if it comes again."""
        number = seq_id or 0
        request_id = f"{self.model_id}:{number}"
        is_new = self._next <= number < self._next + MAX_OPEN and number not in self._waiting
        if not is_new and await self._promises.find(request_id) is None:
            rule = f"seq_id of {self.model_id} must lie in [{self._next}, {self._next + MAX_OPEN}), got {number}"
            raise HttpError(400, f"{rule}: calls are numbered from 1, also of a client that continues with a model")
        is_next = number == self._next
        promise = await self._promises.start(request_id, kind, body, is_new=is_new, is_next=is_next)
        if is_new:
            self._waiting[number] = promise, work
            self._arrived.set()
            if self._working is None or self._working.done():
                self._working = asyncio.create_task(self._work())
        return promise

    async def _work(self) -> None:
        """Do calls in their order; those that wait too long for one that does not come fail."""
        while self._waiting and self._reason is None:
            if call := self._waiting.pop(self._next, None):
                self._next += 1
                await self._promises.run(*call)
                continue
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), _MISSING_S)
            except TimeoutError:
                missing, self._next = self._next, max(self._waiting) + 1
                what = f"call {missing} of model {self.model_id} never arrived, or was refused"
                await self._fail_waiting(f"{what}: what came after it waited {_MISSING_S:g} s and was not done")
        # Without a reason none wait. There may be 10,000, and a model that is gone is explained without them.
        await self._fail_waiting(f"model {self.model_id} is gone: {self._reason}", is_kept=False)

    async def _fail_waiting(self, reason: str, *, is_kept: bool = True) -> None:
        async def end() -> CallResult:
            raise HttpError(410, reason)

        waiting, self._waiting = self._waiting, {}
        for promise, _ in waiting.values():
            await self._promises.run(promise, end, is_kept=is_kept)

    async def end(self, reason: str) -> None:
        """Fail the calls that wait, and wait for the one that runs; there may be no more after it."""
        self._reason = reason
        self._arrived.set()
        if self._working is not None:
            await self._working


@dataclass(slots=True, kw_only=True, eq=False)
class TinkerSession:
    """One client, which gives signs of life."""

    session_id: str
    owner: str
    end: asyncio.TimerHandle | None = None
    """What ends it, unless its client gives another sign of life."""
    runs: dict[str, TrainingRun] = field(default_factory=dict)
    samplers: dict[str, SamplerWeights] = field(default_factory=dict)
    """What each of its sampling sessions, by its name, samples from."""
    num_clones: int = 0
    """Of all these."""
