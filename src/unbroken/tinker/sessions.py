"""Promises, training runs in order, and sessions with their heartbeats.

POST forward_backward, seq_id 2  ─┐                     every call of a model is a promise: it is answered at once,
POST optim_step,       seq_id 3   ├─► TrainingRun ─►    and its result is asked for, as often as it takes
POST forward_backward, seq_id 1  ─┘   1, 2, 3           a seq_id that comes again is the same promise
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from unbroken.errors import EngineError, StoreError, UnbrokenError
from unbroken.server.http.errors import HttpError, error_object, to_http_error
from unbroken.server.http.json import encode_json
from unbroken.tinker.sampling import SamplerWeights
from unbroken.tinker.store import ModelFacts

_log = logging.getLogger(__name__)
MAX_OPEN = 10_000
"""Most promises of one key that are not answered yet."""
MAX_OPEN_BYTES = 2**31
"""Most bytes of the bodies of these promises, and so of one batch: the first of its chunks comes last."""
MAX_SNAPSHOTS = 8
"""Most samplers of a model that have weights without a name: each is a copy on the disk."""
_MAX_AHEAD = 10_000
_MISSING_S = 120.0
"""How long after the last call came all wait for one that does not come. Of a batch, the SDK sends the first chunk once
all others are taken; a call that is lost it sends again within that time."""
_KEPT_S = 3600.0
_MAX_KEPT_BYTES = 512 * 2**20
"""Most bytes of the results of one key: then those that were sent are forgotten."""
_JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseResult:
    """A result as it is sent."""

    body: bytes
    media_type: str = _JSON

    @staticmethod
    def of(value: Any) -> PromiseResult:
        """A result in JSON."""
        return PromiseResult(body=encode_json(value))

    @staticmethod
    def failed(error: Exception) -> PromiseResult:
        """A failure, in the SDK's categories: `user` for what the caller can mend, `server` for the rest."""
        if isinstance(error, UnbrokenError) and not isinstance(error, EngineError):
            category = "server" if isinstance(error, StoreError) else "user"
            return PromiseResult.of({"error": str(error), "category": category})
        http_error = to_http_error(error)
        category = "user" if http_error.status < 500 else "server"
        return PromiseResult.of({"error": error_object(http_error)["error"]["message"], "category": category})


Work = Callable[[], Awaitable[PromiseResult]]
FORGOTTEN = PromiseResult.failed(
    HttpError(410, f"the result is kept for {_KEPT_S:g} s, and no longer; one that was sent makes room for others")
)


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """A call whose result is asked for later."""

    request_id: str
    owner: str
    kind: str
    digest: bytes
    """Of kind and body."""
    num_bytes: int
    """Of the body."""
    model_id: str = ""
    sequence_ids: list[str] = field(default_factory=list)
    """Of a sampling call: the ids of its completions."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: PromiseResult | None = None
    finished_s: float = 0.0
    task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """End the work, if it is one that can be left."""
        if self.task is not None:
            self.task.cancel()


def hash_call(kind: str, body: bytes) -> bytes:
    """A hash by which a call that comes again is known."""
    return hashlib.blake2b(body, digest_size=16, person=kind.encode()[:16]).digest()


class Promises:
    """All promises of a server: those that are open, and the results of the last hour."""

    def __init__(self) -> None:
        self._by_id: dict[str, Promise] = {}
        self._kept: OrderedDict[str, None] = OrderedDict()
        """Those with results, the oldest first."""
        self._sent: dict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """Of each owner: those whose results were sent."""
        self._num_open: dict[str, int] = {}
        self._open_bytes: Counter[str] = Counter()
        """Of each owner: all bytes of the bodies of open ones."""
        self._num_bytes: Counter[str] = Counter()
        """Of each owner: all bytes of its results."""

    def open(
        self, request_id: str, kind: str, body: bytes, *, owner: str, model_id: str = "", is_next: bool = False
    ) -> Promise:
        """Make a promise; `HttpError` (429) if its owner has too many open ones that do not wait for it (`is_next`)."""
        number, num_bytes = self._num_open.get(owner, 0), self._open_bytes[owner]
        problem = ""
        if (number >= MAX_OPEN or num_bytes + len(body) > MAX_OPEN_BYTES) and not is_next:
            problem = (
                f"{number} calls of {num_bytes} bytes that are not answered yet, and may have {MAX_OPEN} calls of "
                f"{MAX_OPEN_BYTES} bytes: wait for some of them"
            )
        elif self._num_bytes[owner] > _MAX_KEPT_BYTES and not self._sent[owner]:
            problem = f"{self._num_bytes[owner]} bytes of results that it has not asked for: retrieve them"
        if problem:
            raise HttpError(429, f"this key has {problem}", headers={"Retry-After": "1"})
        digest = hash_call(kind, body)
        promise = Promise(
            request_id=request_id, owner=owner, kind=kind, digest=digest, num_bytes=len(body), model_id=model_id
        )
        self._by_id[request_id] = promise
        self._open_bytes[owner] += len(body)
        self._num_open[owner] = number + 1
        return promise

    async def run(self, promise: Promise, work: Work) -> None:
        """Do the work of a promise, and keep its result."""
        try:
            result = await work()
        except asyncio.CancelledError:
            self.finish(promise, PromiseResult.failed(HttpError(499, "the call was cancelled")))
            raise
        except Exception as error:
            result = PromiseResult.failed(error)
        self.finish(promise, result)

    def finish(self, promise: Promise, result: PromiseResult) -> None:
        """Keep the result of a promise, and tell those who wait for it."""
        if promise.result is not None:
            return
        promise.result, promise.finished_s = result, time.monotonic()
        promise.done.set()
        self._num_open[promise.owner] -= 1
        self._open_bytes[promise.owner] -= promise.num_bytes
        self._kept[promise.request_id] = None
        self._num_bytes[promise.owner] += len(result.body)
        while (sent := self._sent[promise.owner]) and self._num_bytes[promise.owner] > _MAX_KEPT_BYTES:
            self._forget(next(iter(sent)))
        while self._by_id[oldest := next(iter(self._kept))].finished_s < promise.finished_s - _KEPT_S:
            self._forget(oldest)

    def _forget(self, request_id: str) -> None:
        del self._kept[request_id]
        promise = self._by_id.pop(request_id)
        self._sent[promise.owner].pop(request_id, None)
        assert promise.result is not None, "only what has a result is kept"
        self._num_bytes[promise.owner] -= len(promise.result.body)
        promise.result = FORGOTTEN

    def note_sent(self, promise: Promise) -> None:
        """The result was sent: when there is no room, it is forgotten before any that was not."""
        if promise.request_id in self._kept:
            self._sent[promise.owner][promise.request_id] = None

    def find_repeated(self, request_id: str, kind: str, body: bytes) -> Promise | None:
        """The promise of a call that comes again; `HttpError` if the number was another call's."""
        known = self._by_id.get(request_id)
        if known is not None and known.digest != hash_call(kind, body):
            raise HttpError(  # not 409: the SDK would send it again for ever
                400,
                f"call {request_id} was {known.kind}, and came again as {kind}, or with another body: another call "
                "needs another seq_id",
            )
        return known

    def cancel_samples(self, session_id: str) -> None:
        """End the sampling calls of a session."""
        for promise in self._by_id.values():
            if promise.kind == "sample" and promise.request_id.startswith(f"{session_id}:"):
                promise.cancel()

    def find(self, request_id: str, *, owner: str) -> Promise | None:
        """A promise of this owner."""
        promise = self._by_id.get(request_id)
        return promise if promise is not None and promise.owner == owner else None


class TrainingRun:
    """A model that is trained, and its calls in the order of their `seq_id`."""

    def __init__(self, facts: ModelFacts, *, owner: str, promises: Promises) -> None:
        self.model_id = facts.model_id
        self.session_id = facts.model_id.partition(":")[0]
        self.facts = facts
        self.owner = owner
        self.version = 0
        """Rises with each change of the weights."""
        self.inflight = SamplerWeights(model_id=facts.model_id)
        """What its `inflight` samplers share."""
        self.snapshots: list[TinkerSampler] = []
        """Samplers of weights without a name, the oldest first."""
        self._promises = promises
        self._next = 1
        self._waiting: dict[int, tuple[Promise, Work]] = {}
        self._runner: asyncio.Task[None] | None = None
        self._came = asyncio.Event()
        """A call came, or the run has ended."""
        self._ended = ""

    def submit(self, seq_id: int | None, kind: str, work: Work, body: bytes) -> Promise:
        """Take a call, which runs after those with lower numbers; the promise of before, if it comes again.

        Raises:
            HttpError: the number is not valid, or was that of another call.
        """
        seq_id = seq_id or 0
        request_id = f"{self.model_id}:{seq_id}"
        if known := self._promises.find_repeated(request_id, kind, body):
            return known
        if not self._next <= seq_id < self._next + _MAX_AHEAD:
            raise HttpError(
                400,
                f"seq_id of {self.model_id} must lie in [{self._next}, {self._next + _MAX_AHEAD}), got {seq_id}: calls "
                "are numbered from 1, and a client that goes on with another's model must go on with its numbers",
            )
        is_next = seq_id == self._next
        promise = self._promises.open(request_id, kind, body, owner=self.owner, model_id=self.model_id, is_next=is_next)
        self._waiting[seq_id] = promise, work
        if self._ended:
            self._fail_waiting(self._ended)
        self._came.set()
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return promise

    async def _run(self) -> None:
        """Do the calls in order while some wait; those that wait too long for one that does not come fail."""
        while self._waiting:
            if self._next in self._waiting:
                promise, work = self._waiting.pop(self._next)
                self._next += 1
                await self._promises.run(promise, work)
                continue
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), _MISSING_S)
            except TimeoutError:
                if self._next in self._waiting or not self._waiting:  # in the last moment
                    continue
                missing, self._next = self._next, max(self._waiting) + 1
                self._fail_waiting(
                    f"call {missing} of model {self.model_id} never arrived, or was refused: what came after it waited "
                    f"{_MISSING_S:g} s and was not done"
                )

    def _fail_waiting(self, reason: str) -> None:
        for promise, _ in self._waiting.values():
            self._promises.finish(promise, PromiseResult.failed(HttpError(410, reason)))
        self._waiting.clear()

    async def end(self, reason: str) -> None:
        """Take no more calls; those that wait fail, and the one that runs is waited for."""
        self._ended = f"model {self.model_id} is gone: {reason}"
        self._fail_waiting(self._ended)
        self._came.set()
        if self._runner is not None:
            await asyncio.wait({self._runner})


@dataclass(slots=True, kw_only=True, eq=False)
class TinkerSampler:
    """What a client samples from: a sampling session of the API."""

    sampler_id: str
    owner: str
    weights: SamplerWeights
    model_path: str | None = None
    num_clones: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class TinkerSession:
    """One client, which gives signs of life."""

    session_id: str
    owner: str
    seen_s: float = field(default_factory=time.monotonic)
    runs: dict[str, TrainingRun] = field(default_factory=dict)
    samplers: dict[str, TinkerSampler] = field(default_factory=dict)


class TinkerSessions:
    """The sessions of a server. `end_session` frees what a session has."""

    def __init__(self, *, idle_s: float, end_session: Callable[[TinkerSession, str], Awaitable[None]]) -> None:
        """`idle_s` is how long a client may be silent."""
        self.idle_s = idle_s
        self._end_session = end_session
        self._by_id: dict[str, TinkerSession] = {}

    def add(self, session: TinkerSession) -> None:
        """Begin a session."""
        self._by_id[session.session_id] = session

    def get(self, session_id: str, *, owner: str, status: int = 404) -> TinkerSession:
        """A session of this owner, whose client is alive; otherwise `HttpError`, by default 404."""
        session = self._by_id.get(session_id)
        if session is None or session.owner != owner:
            raise HttpError(
                status,
                f"session {session_id[:100]!r} is not open: it has finished, its client was silent for "
                f"{self.idle_s:g} s, or the server started again. Make a new ServiceClient",
            )
        session.seen_s = time.monotonic()
        return session

    def count_runs(self, *, owner: str) -> int:
        """How many models an owner trains."""
        return sum(len(each.runs) for each in self._by_id.values() if each.owner == owner)

    def add_sampler(
        self, session: TinkerSession, seq_id: int, weights: SamplerWeights, *, model_path: str | None = None
    ) -> TinkerSampler:
        """Add a sampler to its session; the one of before, if the number comes again."""
        name = f"{session.session_id}:sample:{seq_id}"
        sampler = TinkerSampler(sampler_id=name, owner=session.owner, weights=weights, model_path=model_path)
        return session.samplers.setdefault(name, sampler)

    def find_run(self, model_id: str, *, owner: str) -> TrainingRun | None:
        """A training run of this owner whose model is there. Its name begins with its session's."""
        session = self._find(model_id, owner)
        return None if session is None else session.runs.get(model_id)

    def has(self, name: str, *, owner: str) -> bool:
        """Whether a model or sampler of this owner is there."""
        session = self._find(name, owner)
        return session is not None and name in {**session.runs, **session.samplers}

    def get_sampler(self, sampler_id: str, *, owner: str) -> TinkerSampler:
        """A sampler of this owner; otherwise `HttpError`."""
        session = self._find(sampler_id, owner)
        if session is None or sampler_id not in session.samplers:
            raise HttpError(
                410,
                f"sampling session {sampler_id[:200]!r} is gone: its session has ended, or the server started again, "
                f"or its model has {MAX_SNAPSHOTS} newer ones. Make another SamplingClient",
            )
        return session.samplers[sampler_id]

    def _find(self, name: str, owner: str) -> TinkerSession | None:
        """The session of a model or sampler, whose client is alive."""
        session = self._by_id.get(name.partition(":")[0])
        if session is None or session.owner != owner:
            return None
        session.seen_s = time.monotonic()
        return session

    async def end(self, session: TinkerSession, reason: str) -> None:
        """End a session, and free what it has."""
        if self._by_id.pop(session.session_id, None) is None:
            return
        await self._end_session(session, reason)

    async def end_idle(self) -> None:
        """End the sessions whose clients are silent."""
        for session in list(self._by_id.values()):
            if time.monotonic() - session.seen_s > self.idle_s:
                await self.end(session, f"its client was silent for {self.idle_s:g} s")

    async def watch(self) -> None:
        """End idle sessions, until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self.idle_s / 4))
            try:
                await self.end_idle()
            except Exception:
                _log.exception("an idle session could not be ended")
