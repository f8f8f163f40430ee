"""Actions on a whole engine, one at a time: pause, resume, sleep, update the weights, close.

update    stop the steps, receive ──► (wake) ──► load ──► the new version ──► drop old KV ──► resume
              │ WeightsError                      │ any error
              ▼                                   ▼
          resume with the old weights         no requests, until a whole version was loaded; after sleep, never more
adapter   receive ──► room for a version ──► (wake) ──► load, while requests run ──► used by new requests

Sleep is at vLLM's level 2, at which weights and KV are dropped, and buffers wait in the CPU's memory; with LoRA at
level 1, which keeps weights and adapters there: an adapter that wakes the engine does not bring the weights below it.
vLLM wakes in two parts, and resumes as soon as it has both. So it first gets the memory of the weights, which is
filled, and then that of the KV.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from unbroken.decoder_config import DecoderConfig
from unbroken.engines.checks import (
    check_awake,
    check_can_finish,
    check_complete,
    check_not_paused,
    check_same_kind,
    check_source,
)
from unbroken.engines.vllm.calls import WorkerCalls
from unbroken.engines.vllm.delivery import Deliveries, Delivery
from unbroken.engines.vllm.policy_adapters import PolicyAdapters
from unbroken.engines.vllm.prompts import PromptMaker
from unbroken.engines.vllm.requests import Requests
from unbroken.engines.vllm.startup import shut_down
from unbroken.errors import EngineError, InvalidInputError, SamplingError, WeightsError
from unbroken.types import InFlight, WeightPlacement, WeightReceipt
from unbroken.weights.files import FileSource
from unbroken.weights.memory import MemorySource
from unbroken.weights.receiver import WeightReceiver, WireSource
from unbroken.weights.sources import TensorSource, WeightSource, check_version_rises

_T = TypeVar("_T")
_KEEP_WEIGHTS, _DISCARD_ALL = 1, 2
_WEIGHTS, _KV = "weights", "kv_cache"

UPDATABLE_QUANTIZATIONS = frozenset({"fp8"})
"""Those that vLLM makes from a checkpoint without quantisation, layer by layer, at each load."""

Call = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Waits for vLLM, and raises our errors for its own."""


class ControlledEngine:
    """The half of `VllmEngine` that acts on the whole engine."""

    weight_sources = (TensorSource, FileSource, MemorySource, WireSource)

    def __init__(self, llm: AsyncLLM, prompts: PromptMaker, *, transfer_dir: Path | None) -> None:
        self._llm = llm
        self._calls = WorkerCalls(llm)
        self._prompts = prompts
        self._requests = Requests(llm, prompts, check=self._check_sampled)
        self._deliveries = Deliveries(llm, self._calls.rpc, transfer_dir=transfer_dir)
        self._in_lockstep = _steps_in_lockstep(llm)
        self.transfer = WeightReceiver(
            self.update_weights,
            partial(self._call_between_steps, "call_receiver"),
            call_in_update=partial(self._calls.rpc, "call_receiver"),
            policy_version=lambda: self._policy_version,
            version_to_exceed=lambda: self._version_to_exceed,
            check_takes=self._check_takes_weights,
            check_weights=self._deliveries.check,
            num_workers=self.world_size,
            takes_parameters=True,
        )
        """Receives weights from a sender; see `TransferEngine`."""
        self._policy = PolicyAdapters(llm, self._calls.rpc)
        self._policy_version = 0
        self._has_other_weights = False
        """Whether whole weights have replaced those of the start."""
        self._adapters: dict[str, LoRARequest] = {}
        """Adapters other than the policy's, by name."""
        self._num_adapters = 0
        """How many of them were loaded so far, those that were unloaded too."""
        self._paused = False
        self._refusing = False
        """Whether requests are refused because vLLM sleeps or is about to."""
        self._asleep = False
        self._failure: str | None = None
        """Set once the engine has failed for good."""
        self._incomplete: str | None = None
        """Why the model has neither the old weights nor the new ones, until a whole version comes."""
        self._lock = asyncio.Lock()
        """Held by the one action that runs."""
        self._actions: set[asyncio.Task[Any]] = set()
        """Tasks that are finished even if their call is cancelled."""
        self._closing: asyncio.Task[None] | None = None

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; 0 before the first update (I6)."""
        return self._policy_version

    @property
    def _version_to_exceed(self) -> int:
        """A version that was lost half-way may be brought again, and so may the one before it."""
        return self._policy_version - (self._incomplete is not None)

    @property
    def world_size(self) -> int:
        """Tensor times pipeline times data parallelism."""
        size: int = self._llm.vllm_config.parallel_config.world_size_across_dp
        return size

    async def weight_placement(self) -> WeightPlacement:
        """Return dtype and devices, of all data-parallel copies."""
        return WeightPlacement(
            dtype=str(self._llm.model_config.dtype).removeprefix("torch."),
            device=str(self._llm.vllm_config.device_config.device_type),
            gpu_uuids=tuple(uuid for uuid in await self._calls.rpc("device_uuid") if uuid),
        )

    async def check_health(self) -> None:
        """Return at once; raises `EngineError` if the engine is closed, has failed or waits for whole weights."""
        self._check_open()
        check_complete(self._incomplete)

    async def record_outputs(self, file: Path | None = None) -> None:
        """Record what modules compute from now on; or write it to a file, and stop (`exactness.ModuleOutputs`)."""
        await self._calls.rpc("record_outputs", file and str(file))

    async def pause(self) -> None:
        """Stop sampling after the current step; requests wait and keep what they have."""
        async with self._lock:
            self._check_awake()
            await self._stop_steps("keep")
            self._paused = True

    async def resume(self) -> None:
        """Continue after `pause`."""
        async with self._lock:
            self._check_awake()
            await self._calls.wait(self._llm.resume_generation())
            self._paused = False

    @property
    def is_asleep(self) -> bool:
        """Whether the memory was given back."""
        return self._asleep

    async def sleep(self) -> None:
        """Finish the requests in flight, then give back the memory of weights, keys and values.

        On a CPU, where vLLM has no sleep mode, nothing is given back.
        """
        self._check_open()
        check_complete(self._incomplete)
        _check_can_sleep(self._llm)
        check_not_paused(self._paused)
        self._refusing = True
        try:
            await self._requests.wait_until_none()
            await self._run_to_end(self._fall_asleep())
        finally:
            self._refusing = self._asleep

    async def reset_prefix_cache(self) -> None:
        """Drop the KV of finished requests. vLLM drops all or nothing: the KV of running requests is computed anew."""
        self._check_awake()
        if not await self._calls.wait(self._llm.reset_prefix_cache()):
            await self._drop_all_kv()

    async def update_weights(
        self, source: WeightSource, *, policy_version: int, reuse_kv: bool = False, in_flight: InFlight = InFlight.PAUSE
    ) -> WeightReceipt:
        """Take new weights. All of the model's must come, under the names of its checkpoint, or an adapter.

        Requests in flight keep the adapter that they have, so `in_flight` and `reuse_kv` do not matter for an adapter.
        It waits for requests if there is no room for one more version (`--max-loras`, `--max-cpu-loras`).

        Tensors go to the workers through memory, cast to the engine's dtype, or through files if there is a
        `transfer_dir`. Once they are copied, the update is finished even if the call is cancelled. If it fails while it
        loads, the engine samples nothing until a whole version was loaded: some of its weights may be new.

        Raises `SamplingError` also for missing weights and another quantisation than fp8, `WeightsError` if
        there is no room for a copy or a worker cannot open it, and `EngineError` if the checkpoint's names cannot be
        read.
        """
        check_source(source, self.weight_sources)
        self._check_can_update(policy_version, in_flight)
        delivery = await self._deliveries.prepare(source)
        return await self._run_to_end(self._update(delivery, policy_version, reuse_kv=reuse_kv, in_flight=in_flight))

    async def close(self) -> None:
        """Abort all requests and free the model."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self.transfer.fail("the engine is closed")
        await self._requests.end_all()
        await shut_down(self._llm)

    async def _run_to_end(self, action: Coroutine[Any, Any, _T]) -> _T:
        """Wait for an action, which is finished even if this call is cancelled."""
        task = asyncio.create_task(action)
        self._actions.add(task)
        task.add_done_callback(self._actions.discard)
        return await asyncio.shield(task)

    async def _update(
        self, delivery: Delivery, policy_version: int, *, reuse_kv: bool, in_flight: InFlight
    ) -> WeightReceipt:
        try:
            async with self._lock:
                self._check_can_update(policy_version, in_flight)
                check_same_kind(
                    is_adapter=delivery.is_adapter,
                    had_adapter=self._policy.in_use is not None,
                    policy_version=self._policy_version,
                    changed=self._has_other_weights,
                )
                if delivery.is_adapter:
                    return await self._receive_adapter(delivery, policy_version)
                return await self._receive_and_load(delivery, policy_version, reuse_kv=reuse_kv, in_flight=in_flight)
        finally:
            await delivery.close()

    async def _receive_and_load(
        self, delivery: Delivery, policy_version: int, *, reuse_kv: bool, in_flight: InFlight
    ) -> WeightReceipt:
        times = [time.perf_counter()]
        try:
            await self._stop_and_receive(delivery, in_flight)
        except WeightsError:  # they did not come: nothing was loaded
            if not self._asleep:
                await self._resume_unless_paused()
            raise
        times.append(time.perf_counter())
        try:
            if self._asleep:
                await _wake_for_weights(self._llm, self._calls.wait)
            await delivery.load(self._calls.rpc)
            times.append(time.perf_counter())
            policy_version = delivery.source.policy_version or policy_version
            await self._calls.wait(self._llm.update_weight_version(str(policy_version)))
            if self._asleep:
                await _wake_for_requests(self._llm, self._calls.wait)
            else:
                await self._continue(reuse_kv=reuse_kv and self._incomplete is None)
        except BaseException as error:
            await self._fail(f"the update to policy version {policy_version} ended half-way: {error}")
            raise EngineError(self._failure or self._incomplete) from error
        self._has_other_weights, self._incomplete = True, None
        return self._begin_version(policy_version, delivery.digest, times)

    async def _receive_adapter(self, delivery: Delivery, policy_version: int) -> WeightReceipt:
        """Load an adapter while requests run with theirs; they continue between its parts."""
        times = [time.perf_counter()]
        check_complete(self._incomplete)  # an adapter brings no whole weights
        async with self._between_steps():
            await delivery.receive(self._calls.rpc)
        times.append(time.perf_counter())
        policy_version = delivery.source.policy_version or policy_version
        num_new, num_others = len(delivery.adapted), self._num_adapters
        try:
            await self._policy.check(delivery.adapted, others=self._adapters, num_others=num_others)
            if self._paused:  # nobody could resume it while this waits
                self._policy.check_room(num_new, num_others=num_others)
        except SamplingError:
            await self._calls.rpc("drop_weights")
            raise
        await self._policy.make_room(num_new, num_others=num_others)
        if self._asleep:
            try:
                await _wake_for_weights(self._llm, self._calls.wait)
                await self._policy.load(delivery, policy_version)
                times.append(time.perf_counter())
                await _wake_for_requests(self._llm, self._calls.wait)
            except BaseException as error:
                await self._fail(f"the update to policy version {policy_version} failed: {error}")
                raise EngineError(self._failure) from error
        else:
            await self._policy.load(delivery, policy_version)
            times.append(time.perf_counter())
        return self._begin_version(policy_version, delivery.digest, times)

    def _begin_version(self, policy_version: int, digest: str | None, times: list[float]) -> WeightReceipt:
        """Note that the engine has the version, awake; `times` are those at which the parts of the update ended."""
        self._policy_version = policy_version
        if self._asleep:  # an engine that still waits for requests before it sleeps will sleep
            self._refusing = self._asleep = False
        times.append(time.perf_counter())
        seconds = dict(zip(("receive", "load", "resume"), (b - a for a, b in pairwise(times)), strict=True))
        return WeightReceipt(policy_version=policy_version, digest=digest, seconds=seconds)

    async def _stop_and_receive(self, delivery: Delivery, in_flight: InFlight) -> None:
        """Stop the steps, and open the source: at the same time, unless requests must finish first."""
        if self._asleep:
            await delivery.receive(self._calls.rpc)
            return
        if in_flight is InFlight.FINISH or self._in_lockstep:
            await self._stop_steps("wait" if in_flight is InFlight.FINISH else "keep")
            await delivery.receive(self._calls.rpc)
            return
        outcomes = await asyncio.gather(
            self._stop_steps("keep"), delivery.receive(self._calls.rpc), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    @asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        """Stop the steps for the block if data-parallel copies step together; the lock is held.

        A worker that waits for a sender and for all other workers would wait forever for one whose step waits for the
        first worker's part of it.
        """
        stops = self._in_lockstep and not self._asleep and not self._paused
        if stops:
            await self._stop_steps("keep")
        try:
            yield
        finally:
            if stops:
                await self._resume_unless_paused()

    async def _call_between_steps(self, method: str, *args: Any) -> list[Any]:
        """Call all workers, for transports whose workers wait for each other, outside of an update."""
        if not self._in_lockstep:
            return await self._calls.rpc(method, *args)
        async with self._lock, self._between_steps():
            return await self._calls.rpc(method, *args)

    async def _stop_steps(self, mode: Literal["keep", "wait"]) -> None:
        """Stop the steps, with "wait" once running requests have finished; new requests are kept.

        From vLLM 0.33 on, `AsyncLLM.pause_generation` in mode "wait" refuses them. This is its call of both versions.
        """
        await self._calls.wait(self._llm.engine_core.pause_scheduler_async(mode, clear_cache=False))

    async def _continue(self, *, reuse_kv: bool) -> None:
        """Continue with the new weights after a pause."""
        if not reuse_kv:
            await self._drop_all_kv()
        if self._prompts.max_images > 0:
            # The encoder's outputs under the old weights. The workers have dropped them, but the scheduler does not
            # know: a running request that needs one would end the engine.
            await self._calls.wait(self._llm.reset_encoder_cache())
        await self._resume_unless_paused()

    async def _resume_unless_paused(self) -> None:
        if not self._paused:
            await self._calls.wait(self._llm.resume_generation())

    async def _drop_all_kv(self) -> None:
        if not await self._calls.wait(self._llm.reset_prefix_cache(reset_running_requests=True)):
            raise EngineError("vLLM did not drop the KV of its requests")

    async def _fall_asleep(self) -> None:
        async with self._lock:
            self._check_open()
            check_not_paused(self._paused)
            if self._asleep:
                return
            self._refusing = self._asleep = True
            try:
                await _fall_asleep(self._llm, self._calls.wait)
            except BaseException as error:
                await self._fail(f"vLLM did not fall asleep: {error}")
                raise EngineError(self._failure) from error

    async def _fail(self, reason: str) -> None:
        """Note that the weights are not whole, and end all requests.

        An engine that slept has failed for good: nobody has tried whether vLLM wakes twice.
        """
        if self._asleep or self._llm.errored:
            self._failure = f"{reason}. Its weights may be neither the old nor the new ones: close it and start another"
        else:
            self._incomplete = reason
        if not self._llm.errored:
            await self._requests.end_all()

    def _check_can_update(self, policy_version: int, in_flight: InFlight) -> None:
        self._check_open()
        check_quantization(self._llm)
        check_version_rises(policy_version, current=self._version_to_exceed)
        check_can_finish(in_flight, paused=self._paused)

    def _check_awake(self) -> None:
        """Raise `EngineError` unless requests may come."""
        self._check_open()
        check_complete(self._incomplete)
        check_awake(self._refusing)

    def _check_takes_weights(self) -> None:
        """Raise unless weights may be received before their update begins."""
        self._check_open()
        check_quantization(self._llm)

    def _check_open(self) -> None:
        """Raise `EngineError` if the engine is closed, has failed or is dead."""
        if self._closing is not None:
            raise EngineError("the engine is closed")
        self._check_not_failed()
        if self._llm.errored:
            raise EngineError("vLLM's engine is dead; its log has the reason. Start another")

    def _check_not_failed(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)

    def _check_sampled(self) -> None:
        """Raise `EngineError` for what was sampled when an update has ended half-way."""
        self._check_not_failed()
        check_complete(self._incomplete)


def _steps_in_lockstep(llm: AsyncLLM) -> bool:
    """Whether a step of one data-parallel copy needs the others: those of a mixture of experts share its layers."""
    return llm.vllm_config.parallel_config.data_parallel_size > 1 and bool(llm.model_config.is_moe)


def check_runs_here(llm: AsyncLLM) -> None:
    """Raise `InvalidInputError` for what vLLM starts and cannot run: on a CPU its copies cannot share experts.

    vLLM 0.32 raises NotImplementedError in `DeviceCommunicatorBase.all_gatherv` at the first request, and is dead.
    """
    if _steps_in_lockstep(llm) and current_platform.is_cpu():
        size = llm.vllm_config.parallel_config.data_parallel_size
        raise InvalidInputError(
            f"--data-parallel-size {size} with a mixture of experts ({llm.model_config.model!r}) needs GPUs: vLLM on a "
            "CPU ends at the first request"
        )


def check_quantization(llm: AsyncLLM) -> None:
    """Raise `SamplingError` if weights in this quantisation are not updated, because nobody has tried it."""
    name = llm.model_config.quantization
    if name is None:
        return
    if name not in UPDATABLE_QUANTIZATIONS:
        raise SamplingError(
            f"an update of the weights with --quantization {name} is not supported, only one with "
            f"{sorted(UPDATABLE_QUANTIZATIONS)}: start vLLM with one of these, or without --quantization"
        )
    if DecoderConfig(llm.model_config.hf_config).is_quantized:
        raise SamplingError(
            f"an update of the weights needs a checkpoint that is not quantised itself, got {llm.model_config.model!r} "
            f"with --quantization {name}: vLLM quantises trained weights from a bfloat16 checkpoint's form"
        )


def _check_can_sleep(llm: AsyncLLM) -> None:
    """Raise `EngineError` if vLLM cannot sleep. On a CPU it can, but drops nothing."""
    if not current_platform.is_sleep_mode_available():
        return
    if not llm.model_config.enable_sleep_mode:
        raise EngineError("vLLM can give its memory back only if it was started with --enable-sleep-mode")


async def _fall_asleep(llm: AsyncLLM, call: Call) -> None:
    """Give back the memory of weights and KV."""
    level = _DISCARD_ALL if llm.vllm_config.lora_config is None else _KEEP_WEIGHTS
    await call(llm.sleep(level=level, mode="wait"))


async def _wake_for_weights(llm: AsyncLLM, call: Call) -> None:
    """Allocate the memory of the weights, whose contents are undefined unless vLLM has LoRA."""
    _free_unused()
    await call(llm.wake_up(tags=[_WEIGHTS]))


async def _wake_for_requests(llm: AsyncLLM, call: Call) -> None:
    """Allocate the memory of the KV, and resume; `EngineError` if vLLM still sleeps."""
    _free_unused()
    if not await call(llm.wake_up(tags=[_KV])):
        raise EngineError("vLLM did not wake")


def _free_unused() -> None:
    """Free GPU memory that torch in this process keeps unused: vLLM runs in other processes."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
