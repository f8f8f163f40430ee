"""An engine that only takes time. All requests that it samples get their next id together.

The engine's *progress* is the number of ids that a request from the beginning would have by now. A request of n ids
that began at progress p ends at p + n. Progress rises by one in `id_s + id_s_per_request * requests` seconds, and
stands still while prompts are computed or weights are taken.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from unbroken.simulation.config import EngineTimes
from unbroken.types import VersionSpan

_ROUNDING = 1e-6
"""Of an id: progress is a sum of many floats."""


@dataclass(slots=True, eq=False)
class _Request:
    began: float
    """The engine's progress when its first id began."""
    num_ids: int
    num_prompt_ids: int
    is_done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def end(self) -> float:
        return self.began + self.num_ids


class SimulatedEngine:
    """One engine. It is used in one event loop, whose clock it takes."""

    def __init__(self, times: EngineTimes, *, policy_version: int = 0) -> None:
        """It begins with this version of the weights."""
        self.policy_version = policy_version
        self._times = times
        self._running: set[_Request] = set()
        self._ends: list[tuple[float, int, _Request]] = []
        """A heap by the progress at which requests end."""
        self._order = itertools.count()
        self._updates: list[tuple[float, int]] = [(0.0, policy_version)]
        """The progress at which each version came."""
        self._progress = 0.0
        self._stall_s = 0.0
        """Seconds for which progress stands still from now on."""
        self._settled_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._num_admitted = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def update_s(self) -> float:
        """How long it stands still for new weights."""
        return self._times.update_s

    async def sample(self, num_ids: int, *, num_prompt_ids: int, num_new_ids: int) -> tuple[VersionSpan, ...]:
        """Sample `num_ids` after a prompt of which `num_new_ids` are not cached; returns the versions of the ids."""
        await self._enter()
        try:
            await asyncio.sleep(self._times.first_s)
            self._settle()
            self._stall_s += num_new_ids * self._times.prompt_id_s
            request = _Request(self._progress, num_ids, num_prompt_ids)
            self._running.add(request)
            heapq.heappush(self._ends, (request.end, next(self._order), request))
            self._set_timer()
            try:
                await request.is_done.wait()
            finally:
                if request in self._running:  # it was cancelled
                    self._settle()
                    self._running.discard(request)
                    self._set_timer()
            return self._find_spans(request)
        finally:
            self._leave()

    async def update(self, policy_version: int) -> None:
        """Take new weights."""
        self._settle()
        self._stall_s += self._times.update_s
        self._set_timer()
        await asyncio.sleep(self._times.update_s)
        self._settle()
        self.policy_version = policy_version
        self._updates.append((self._progress, policy_version))
        if self._times.recomputes_kv:
            num_ids = sum(each.num_prompt_ids + int(self._progress - each.began) for each in self._running)
            self._stall_s += num_ids * self._times.prompt_id_s
        self._set_timer()

    async def _enter(self) -> None:
        """Wait for a place."""
        limit = self._times.max_requests
        if limit is not None and self._num_admitted >= limit:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(place)
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._leave()
                raise
        else:
            self._num_admitted += 1

    def _leave(self) -> None:
        """Give the place to the next one that waits."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._num_admitted -= 1

    def _settle(self) -> None:
        """Bring progress up to the present."""
        now_s = asyncio.get_running_loop().time()
        seconds, self._settled_s = now_s - self._settled_s, now_s
        stalled_s = min(seconds, self._stall_s)
        self._stall_s -= stalled_s
        if self._running:
            self._progress += (seconds - stalled_s) / self._id_s

    def _set_timer(self) -> None:
        """End the requests whose time has come, and be there for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and (self._ends[0][2] not in self._running or self._ends[0][0] <= self._progress + _ROUNDING):
            _, _, request = heapq.heappop(self._ends)
            self._running.discard(request)
            request.is_done.set()
        if self._ends:
            wait_s = self._stall_s + (self._ends[0][0] - self._progress) * self._id_s
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._advance)

    def _advance(self) -> None:
        self._settle()
        self._set_timer()

    @property
    def _id_s(self) -> float:
        return self._times.id_s + self._times.id_s_per_request * len(self._running)

    def _find_spans(self, request: _Request) -> tuple[VersionSpan, ...]:
        """The versions of its ids; one that was being computed during an update is of the newer weights."""
        starts: dict[int, int] = {}
        for progress, version in self._updates:
            start = max(0, int(progress - request.began + _ROUNDING))
            if start < request.num_ids:
                starts[start] = version
        bounds = [*starts, request.num_ids]
        pairs = zip(starts.values(), itertools.pairwise(bounds), strict=True)
        return tuple(VersionSpan(start=start, stop=stop, policy_version=version) for version, (start, stop) in pairs)
