"""What one does to a whole engine, one at a time: pause, resume, put to sleep, update the weights.

update    stop the steps, receive ──► (wake) ──► load ──► the new version ──► drop old KV ──► go on
              │ WeightsError                      │ anything
              ▼                                   ▼
          go on with the old weights          the engine has failed, and answers nothing more
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM

from unbroken.engines.checks import check_can_finish, check_not_paused, check_version_rises
from unbroken.engines.vllm.calls import Calls
from unbroken.engines.vllm.requests import Requests
from unbroken.engines.vllm.sleeping import check_can_sleep, fall_asleep, wake_for_requests, wake_for_weights
from unbroken.engines.vllm.state import State
from unbroken.engines.vllm.weights.updates import NewWeights
from unbroken.errors import EngineError, WeightsError
from unbroken.types import InFlight

_T = TypeVar("_T")


class Control:
    """Over one engine's vLLM.

    Args:
        llm: vLLM.
        calls: of it.
        requests: those in flight.
        state: what it is doing, which is changed here.
        takes_images: whether vLLM keeps what the weights saw in images.
    """

    def __init__(self, llm: AsyncLLM, calls: Calls, requests: Requests, state: State, *, takes_images: bool) -> None:
        self._llm = llm
        self._calls = calls
        self._requests = requests
        self._state = state
        self._takes_images = takes_images
        self._lock = asyncio.Lock()
        """Held by whoever pauses, resumes, updates or puts to sleep."""
        self._begun: set[asyncio.Task[Any]] = set()
        """What is finished even if its call is cancelled."""

    async def pause(self) -> None:
        """See `Engine`."""
        async with self._lock:
            self._state.check_awake()
            await self._calls.done(self._llm.pause_generation(mode="keep", clear_cache=False))
            self._state.paused = True

    async def resume(self) -> None:
        """See `Engine`."""
        async with self._lock:
            self._state.check_awake()
            await self._calls.done(self._llm.resume_generation())
            self._state.paused = False

    async def sleep(self) -> None:
        """See `SleepingEngine`."""
        state = self._state
        state.check_open()
        check_can_sleep(self._llm)
        check_not_paused(state.paused)
        state.drowsy = True
        try:
            await self._requests.all_ended()
            await self.finished(self._fall_asleep())
        finally:
            state.drowsy = state.asleep

    async def reset_prefix_cache(self) -> None:
        """See `Engine`. vLLM forgets all or nothing: while requests run, theirs is computed anew."""
        self._state.check_awake()
        if not await self._calls.done(self._llm.reset_prefix_cache()):
            await self._forget_all_kv()

    async def finished(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for what is finished even if this call is cancelled: an `update`, and what follows it."""
        task = asyncio.create_task(work)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return await asyncio.shield(task)

    async def update(
        self, weights: NewWeights, policy_version: int, *, reuse_kv: bool, in_flight: InFlight
    ) -> dict[str, float]:
        """Sample with new weights from here on; how long the parts took. To be called through `finished`.

        Raises:
            SamplingError: the version does not rise, or requests cannot finish because the engine is paused.
            WeightsError: the weights did not come; the old ones are in use.
            EngineError: the update failed: the engine answers nothing more.
        """
        state = self._state
        async with self._lock:
            state.check_open()
            check_version_rises(policy_version, current=state.policy_version)
            check_can_finish(in_flight, paused=state.paused)
            times = [time.perf_counter()]
            try:
                await self._fence_and_receive(weights, in_flight)
                times.append(time.perf_counter())
                if state.asleep:
                    await wake_for_weights(self._llm, self._calls.done)
                await weights.load(self._calls.rpc)
                times.append(time.perf_counter())
                await self._calls.done(self._llm.update_weight_version(str(policy_version)))
                if state.asleep:
                    await wake_for_requests(self._llm, self._calls.done)
                else:
                    await self._go_on(reuse_kv=reuse_kv)
            except WeightsError:  # they did not come: nothing was loaded
                if not state.asleep:
                    await self._resume_unless_paused()
                raise
            except BaseException as error:
                await self._fail(f"the update to policy version {policy_version} failed: {error}")
                raise EngineError(state.failure) from error
            state.policy_version = policy_version
            if state.asleep:  # one that waits for requests before it sleeps goes on with that
                state.drowsy = state.asleep = False
            times.append(time.perf_counter())
        return dict(zip(("receive", "load", "resume"), (b - a for a, b in pairwise(times)), strict=True))

    async def _fence_and_receive(self, weights: NewWeights, in_flight: InFlight) -> None:
        """Stop what runs, and bring the weights to the workers: at once, where requests do not have to finish first."""
        if self._state.asleep:
            await weights.receive(self._calls.rpc)
            return
        if in_flight is InFlight.FINISH:
            await self._calls.done(self._llm.pause_generation(mode="wait", clear_cache=False))
            await weights.receive(self._calls.rpc)
            return
        outcomes: list[BaseException | None] = await asyncio.gather(
            self._calls.done(self._llm.pause_generation(mode="keep", clear_cache=False)),
            weights.receive(self._calls.rpc),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _go_on(self, *, reuse_kv: bool) -> None:
        """With the new weights, after a pause."""
        if not reuse_kv:
            await self._forget_all_kv()
        if self._takes_images:
            # What the old weights saw in images. The workers have dropped it, which the scheduler does not know: a
            # running request that needs it would end the engine.
            await self._calls.done(self._llm.reset_encoder_cache())
        await self._resume_unless_paused()

    async def _resume_unless_paused(self) -> None:
        if not self._state.paused:
            await self._calls.done(self._llm.resume_generation())

    async def _forget_all_kv(self) -> None:
        if not await self._calls.done(self._llm.reset_prefix_cache(reset_running_requests=True)):
            raise EngineError("vLLM did not drop the KV of its requests")

    async def _fall_asleep(self) -> None:
        state = self._state
        async with self._lock:
            state.check_open()
            check_not_paused(state.paused)
            if state.asleep:
                return
            state.drowsy = state.asleep = True
            try:
                await fall_asleep(self._llm, self._calls.done)
            except BaseException as error:
                await self._fail(f"vLLM did not fall asleep: {error}")
                raise EngineError(state.failure) from error

    async def _fail(self, reason: str) -> None:
        """Answer nothing more, and end what waits."""
        self._state.failure = (
            f"{reason}. Its weights may be neither the old nor the new ones: close it and start another"
        )
        if not self._llm.errored:
            await self._requests.end_all()
