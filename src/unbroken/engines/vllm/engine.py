"""The engine: requests, control and weights over vLLM's `AsyncLLM`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from unbroken.engines.base import ReceivedWeights
from unbroken.engines.checks import (
    check_awake,
    check_can_finish,
    check_images,
    check_not_paused,
    check_request,
    check_scorable,
    check_top_logprobs,
    check_unused,
    check_version_rises,
)
from unbroken.engines.vllm import conversion
from unbroken.engines.vllm.checkpoint import WeightShapes, checkpoint_folder, shapes_in
from unbroken.engines.vllm.failures import translated
from unbroken.engines.vllm.parameters import ParameterUpdates
from unbroken.engines.vllm.prompts import PromptMaker
from unbroken.engines.vllm.requests import Requests
from unbroken.engines.vllm.sleeping import check_can_sleep, fall_asleep, wake_for_requests, wake_for_weights
from unbroken.engines.vllm.starting import SampledCounter, load_adapters, start_llm, with_exactness
from unbroken.engines.vllm.updates import NewWeights, OwnedWeights, WeightsInFiles, WeightsInMemory, WeightsSent, copied
from unbroken.errors import EngineError, SamplingError, WeightsError
from unbroken.images.decoding import ImageLimits
from unbroken.transfer.announcement import Announcement, Transport
from unbroken.transfer.layout import TensorSpec
from unbroken.types import ImageSpan, InFlight, SampleChunk, SampleRequest, SampleResult, ScoredSequence, TokenIds

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
_EXIT_S = 60.0
"""How long vLLM's processes may take to end by themselves: some seconds each. It would kill them after five."""


class VllmEngine:
    """Samples with vLLM; see `Engine` for the methods. Made by `start`.

    `score` takes one id less than the context holds, because vLLM samples an id after those it scores.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        counter: SampledCounter,
        adapters: Mapping[str, LoRARequest],
        transfer_dir: Path | None,
        image_limits: ImageLimits | None = None,
    ) -> None:
        self._llm = llm
        self._prompts = PromptMaker(llm, limits=image_limits)
        self._requests = Requests(llm, self._prompts, check=self._check_not_failed)
        self._counter = counter
        self._adapters = dict(adapters)
        self._transfer_dir = transfer_dir
        self._context_length: int = llm.model_config.max_model_len
        self._has_tokenizer = llm.tokenizer is not None
        self._vocab_size = _vocab_size(llm)
        most: int = llm.model_config.max_logprobs
        self._most_logprobs = self._vocab_size if most == -1 else most
        self._shapes: WeightShapes | None = None
        self._only_dtype: str | None = None
        self._policy_version = 0
        self._paused = False
        self._drowsy = False
        """Whether requests are refused because vLLM sleeps or is about to."""
        self._asleep = False
        self._control = asyncio.Lock()
        """Held by whoever pauses, resumes, updates or puts to sleep."""
        self._converting = asyncio.Lock()
        """Held for one answer at a time: those of a batch often end in one step, and others shall run in between."""
        self._begun: set[asyncio.Task[Any]] = set()
        """What is finished even if its call is cancelled."""
        self._parameters = ParameterUpdates(self._rpc, self._weight_shapes)
        self._failure: str | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        args: AsyncEngineArgs,
        *,
        adapters: Sequence[tuple[str, str]] = (),
        transfer_dir: Path | None = None,
        image_limits: ImageLimits | None = None,
    ) -> VllmEngine:
        """Start vLLM's processes and load the model, which takes from 15 seconds to minutes.

        Args:
            args: vLLM's engine options.
            adapters: LoRA adapters as (name, folder); they need `enable_lora`.
            transfer_dir: where the files of new weights are put for the workers; all of their machines must see it.
                None: all workers are on this machine, and new weights reach them through its memory.
            image_limits: what an image may take; None is `ImageLimits()`.

        Raises:
            EngineError: vLLM does not start; the message has its reason.
            InvalidInputError: an option or adapter that cannot be used.
        """
        args = with_exactness(args, num_adapters=len(adapters))
        counter = SampledCounter()
        llm = await start_llm(args, counter)
        try:
            await llm.collective_rpc("score_at_temperature")
            await llm.update_weight_version("0")
            await llm.get_supported_tasks()
            requests = await load_adapters(llm, adapters)
        except BaseException:
            await _shut_down(llm)
            raise
        return cls(llm, counter=counter, adapters=requests, transfer_dir=transfer_dir, image_limits=image_limits)

    @property
    def context_length(self) -> int:
        """See `Engine`."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """See `Engine`. Ids from the tokenizer's end to the model's padded vocabulary have embeddings, but no text."""
        return self._vocab_size

    @property
    def takes_images(self) -> bool:
        """See `Engine`."""
        return self._prompts.max_images > 0

    @property
    def policy_version(self) -> int:
        """See `Engine`."""
        return self._policy_version

    @property
    def world_size(self) -> int:
        """See `Engine`: tensor times pipeline times data parallelism."""
        size: int = self._llm.vllm_config.parallel_config.world_size_across_dp
        return size

    @property
    def weight_dtype(self) -> str:
        """See `WeightHolder`."""
        return str(self._llm.model_config.dtype).removeprefix("torch.")

    @property
    def weight_device(self) -> str:
        """See `WeightHolder`."""
        return str(self._llm.vllm_config.device_config.device_type)

    async def gpu_uuids(self) -> Sequence[str]:
        """See `WeightHolder`; of data-parallel copies those of the first."""
        return [uuid for uuid in await self._rpc("device_uuid") if uuid]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that requests may ask for."""
        return tuple(self._adapters)

    @property
    def num_sampled(self) -> int:
        """Ids sampled so far, as vLLM's statistics count them after each step; 0 with `--disable-log-stats`."""
        return self._counter.num_sampled

    @property
    def num_unfinished(self) -> int:
        """Completions that vLLM has not finished."""
        number: int = self._llm.get_num_unfinished_requests()
        return number

    async def check_health(self) -> None:
        """See `Engine`."""
        self._check_open()

    async def sample(self, request: SampleRequest) -> SampleResult:
        """See `Engine`."""
        last: RequestOutput | None = None
        async with aclosing(self._answer(request, RequestOutputKind.FINAL_ONLY)) as outputs:
            async for output in outputs:
                last = output
        async with self._converting:
            return conversion.sample_result(last, request)

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        """See `Engine`. A chunk holds what came in one or more steps."""
        ended: set[int] = set()
        async with aclosing(self._answer(request, RequestOutputKind.DELTA)) as outputs:
            async for output in outputs:
                conversion.check_prompt(output, request)
                for completion in output.outputs:
                    chunk = conversion.sample_chunk(completion, request)
                    if chunk.finish_reason is not None:
                        ended.add(chunk.index)
                    yield chunk
        for index in sorted(set(range(request.n)) - ended):
            yield conversion.aborted_chunk(index)

    async def score(
        self,
        token_ids: TokenIds,
        *,
        images: Sequence[ImageSpan] = (),
        temperature: float = 1.0,
        num_top_logprobs: int = 0,
    ) -> ScoredSequence:
        """See `Engine`. The ids are computed anew, without the prefix cache, which holds no logits."""
        self._check_awake()
        check_scorable(
            token_ids, temperature=temperature, vocab_size=self._vocab_size, context_length=self._context_length - 1
        )
        check_images(images, token_ids, most=self._prompts.max_images, name="token_ids")
        check_top_logprobs(num_top_logprobs, most=self._most_logprobs)
        if len(token_ids) == 1:
            return conversion.nothing_scored(num_top_logprobs)
        params = conversion.scoring_params(temperature=temperature, num_top_logprobs=num_top_logprobs)
        last: RequestOutput | None = None
        request = SampleRequest(request_id=f"score-{uuid.uuid4().hex}", prompt_ids=token_ids, images=tuple(images))
        async with aclosing(self._requests.run(request, params)) as outputs:
            async for output in outputs:
                last = output
        return conversion.scored_sequence(last, len(token_ids), num_top_logprobs)

    async def abort(self, request_id: str) -> None:
        """See `Engine`."""
        await self._requests.abort(request_id)

    async def pause(self) -> None:
        """See `Engine`."""
        async with self._control:
            self._check_awake()
            await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
            self._paused = True

    async def resume(self) -> None:
        """See `Engine`."""
        async with self._control:
            self._check_awake()
            await self._call(self._llm.resume_generation())
            self._paused = False

    async def sleep(self) -> None:
        """See `SleepingEngine`. On a CPU, where vLLM has no sleep mode, nothing is given back."""
        self._check_open()
        check_can_sleep(self._llm)
        check_not_paused(self._paused)
        self._drowsy = True
        try:
            await self._requests.all_ended()
            await self._finish(self._fall_asleep())
        finally:
            self._drowsy = self._asleep

    async def load_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        policy_version: int,
        reuse_kv: bool = False,
        in_flight: InFlight = InFlight.PAUSE,
    ) -> None:
        """See `Engine`. All of the model's weights, under the names of its checkpoint.

        They go to the workers through memory, cast to the engine's dtype, or through files if there is a
        `transfer_dir`. Once they are there, the update is finished even if the call is cancelled. Should it fail, the
        engine answers nothing more: some of its weights may be new.

        Raises:
            SamplingError: also when weights are missing.
            WeightsError: there is no room for the copy, or a worker cannot open it; nothing was loaded.
            EngineError: also when the update fails, or the model's names cannot be found.
        """
        self._check_open()
        check_version_rises(policy_version, current=self._policy_version)
        shapes = await self._weight_shapes()
        copy: Callable[[], OwnedWeights]
        if self._transfer_dir is None:
            row_of = partial(WeightsInMemory.of, dtype=await self._row_dtype(), kind=self.weight_device)
            copy = partial(row_of, weights, shapes, num_workers=self.world_size)
        else:
            copy = partial(WeightsInFiles.of, weights, shapes, parent=self._transfer_dir)
        new = await copied(copy)
        await self._finish(self._update_and_close(new, policy_version, reuse_kv=reuse_kv, in_flight=in_flight))

    async def load_weight_files(
        self, folder: Path, *, policy_version: int, reuse_kv: bool = False, in_flight: InFlight = InFlight.PAUSE
    ) -> None:
        """See `WeightFileReader`: the folder must be seen by all workers. Otherwise as `load_weights`."""
        self._check_open()
        check_version_rises(policy_version, current=self._policy_version)
        shapes = await self._weight_shapes()
        given = await asyncio.to_thread(shapes_in, folder)
        names = dict(zip(given, shapes.checkpoint_names(given.items()), strict=True))
        if shapes.tied is not None and shapes.tied[0] in names.values():
            raise SamplingError(f"weight {shapes.tied[0]!r} is tied to {shapes.tied[1]!r} in the model: leave it out")
        files = WeightsInFiles(folder, names, shapes.tied)
        await self._finish(self._update(files, policy_version, reuse_kv=reuse_kv, in_flight=in_flight))

    async def receive_weights(
        self, announcement: Announcement, *, reuse_kv: bool = False, in_flight: InFlight = InFlight.PAUSE
    ) -> ReceivedWeights:
        """See `WeightReceiver`: the workers receive while no step runs. All weights must come, as in `load_weights`."""
        self._check_open()
        policy_version = announcement.policy_version
        check_version_rises(policy_version, current=self._policy_version)
        shapes = await self._weight_shapes()
        names = shapes.checkpoint_names((spec.name, spec.shape) for spec in announcement.layout.specs)
        sent = WeightsSent(announcement, names, shapes.tied)
        seconds = await self._finish(self._update(sent, policy_version, reuse_kv=reuse_kv, in_flight=in_flight))
        return ReceivedWeights(digest=sent.digest, seconds=seconds)

    async def open_communicator(
        self, *, host: str, port: int, world_size: int, transport: Transport, sender_uuid: str = ""
    ) -> None:
        """See `ParameterReceiver`."""
        self._check_awake()
        if world_size != self.world_size + 1:
            raise SamplingError(
                f"world_size must be {self.world_size + 1}, the engine's workers and the sender, got {world_size}"
            )
        if sender_uuid and sender_uuid in await self.gpu_uuids():
            raise SamplingError(f"client_device_uuid must be a GPU that no worker has, got {sender_uuid}")
        await self._parameters.open(host=host, port=port, world_size=world_size, transport=transport)

    async def announce_parameter(self, spec: TensorSpec) -> None:
        """See `ParameterReceiver`."""
        self._check_awake()
        await self._parameters.announce(spec)

    async def load_parameters(self, *, in_flight: InFlight = InFlight.PAUSE) -> bool:
        """See `ParameterReceiver`. All weights must come, as in `load_weights`."""
        self._check_awake()
        if not self._parameters.are_pending:
            return False
        weights = await self._parameters.whole()
        await self._finish(self._update(weights, self._policy_version + 1, reuse_kv=False, in_flight=in_flight))
        self._parameters.forget()
        return True

    async def close_communicator(self) -> None:
        """See `ParameterReceiver`."""
        self._check_open()
        await self._parameters.close()

    async def reset_prefix_cache(self) -> None:
        """See `Engine`. vLLM forgets all or nothing: while requests run, theirs is computed anew."""
        self._check_awake()
        if not await self._call(self._llm.reset_prefix_cache()):
            await self._forget_all_kv()

    async def close(self) -> None:
        """See `Engine`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._requests.end_all()
        await _shut_down(self._llm)

    async def _answer(self, request: SampleRequest, kind: RequestOutputKind) -> AsyncGenerator[RequestOutput]:
        self._check_awake()
        self._check(request)
        params = conversion.sampling_params(request, kind)
        adapter = None if request.adapter is None else self._adapters[request.adapter]
        async with aclosing(self._requests.run(request, params, adapter)) as outputs:
            async for output in outputs:
                yield output

    async def _row_dtype(self) -> str:
        """What weights are cast to on their way: the dtype of the model's, or what all of several can be made of."""
        if self._only_dtype is None:
            dtypes = {dtype for own in await self._rpc("weight_dtypes") for dtype in own}
            self._only_dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        return self._only_dtype

    async def _update_and_close(
        self, weights: OwnedWeights, policy_version: int, *, reuse_kv: bool, in_flight: InFlight
    ) -> None:
        try:
            await self._update(weights, policy_version, reuse_kv=reuse_kv, in_flight=in_flight)
        finally:
            await asyncio.to_thread(weights.close)

    async def _update(
        self, weights: NewWeights, policy_version: int, *, reuse_kv: bool, in_flight: InFlight
    ) -> dict[str, float]:
        """How long the parts took."""
        async with self._control:
            self._check_open()
            check_version_rises(policy_version, current=self._policy_version)
            check_can_finish(in_flight, paused=self._paused)
            times = [time.perf_counter()]
            try:
                await self._fence_and_receive(weights, in_flight)
                times.append(time.perf_counter())
                if self._asleep:
                    await wake_for_weights(self._llm, self._call)
                await weights.load(self._rpc)
                times.append(time.perf_counter())
                await self._call(self._llm.update_weight_version(str(policy_version)))
                if self._asleep:
                    await wake_for_requests(self._llm, self._call)
                else:
                    await self._go_on(reuse_kv=reuse_kv)
            except WeightsError:  # they did not come: nothing was loaded
                if not self._asleep:
                    await self._resume_unless_paused()
                raise
            except BaseException as error:
                await self._fail(f"the update to policy version {policy_version} failed: {error}")
                raise EngineError(self._failure) from error
            self._policy_version = policy_version
            self._drowsy = self._asleep = False
            times.append(time.perf_counter())
        return dict(zip(("receive", "load", "resume"), (b - a for a, b in pairwise(times)), strict=True))

    async def _fence_and_receive(self, weights: NewWeights, in_flight: InFlight) -> None:
        """Stop what runs, and bring the weights to the workers: at once, where requests do not have to finish first."""
        if self._asleep:
            await weights.receive(self._rpc)
            return
        if in_flight is InFlight.FINISH:
            await self._call(self._llm.pause_generation(mode="wait", clear_cache=False))
            await weights.receive(self._rpc)
            return
        outcomes: list[BaseException | None] = await asyncio.gather(
            self._call(self._llm.pause_generation(mode="keep", clear_cache=False)),
            weights.receive(self._rpc),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _resume_unless_paused(self) -> None:
        if not self._paused:
            await self._call(self._llm.resume_generation())

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self._call(self._llm.collective_rpc(method, args=args))
        return answers

    async def _go_on(self, *, reuse_kv: bool) -> None:
        """With the new weights, after a pause."""
        if not reuse_kv:
            await self._forget_all_kv()
        if self.takes_images:
            # What the old weights saw in images. The workers have dropped it, which the scheduler does not know: a
            # running request that needs it would end the engine.
            await self._call(self._llm.reset_encoder_cache())
        await self._resume_unless_paused()

    async def _fall_asleep(self) -> None:
        async with self._control:
            self._check_open()
            check_not_paused(self._paused)
            if self._asleep:
                return
            self._drowsy = self._asleep = True
            try:
                await fall_asleep(self._llm, self._call)
            except BaseException as error:
                await self._fail(f"vLLM did not fall asleep: {error}")
                raise EngineError(self._failure) from error

    async def _finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for what is finished even if this call is cancelled."""
        task = asyncio.create_task(work)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return await asyncio.shield(task)

    async def _forget_all_kv(self) -> None:
        if not await self._call(self._llm.reset_prefix_cache(reset_running_requests=True)):
            raise EngineError("vLLM did not drop the KV of its requests")

    async def _fail(self, reason: str) -> None:
        """Answer nothing more, and end what waits."""
        self._failure = f"{reason}. Its weights may be neither the old nor the new ones: close it and start another"
        if not self._llm.errored:
            await self._requests.end_all()

    async def _call(self, call: Awaitable[_T]) -> _T:
        """Wait for vLLM, but no longer than it lives: what is asked of a dead engine is never answered."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, self._llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
            with translated():
                if not task.done():
                    raise EngineDeadError
                return task.result()
        except SamplingError as error:  # what it refuses here was not a request's
            raise EngineError(str(error)) from error
        finally:
            task.cancel()

    async def _weight_shapes(self) -> WeightShapes:
        if self._shapes is None:
            config = self._llm.model_config
            folder = await asyncio.to_thread(
                checkpoint_folder,
                config.model,
                revision=config.revision,
                download_dir=self._llm.vllm_config.load_config.download_dir,
            )
            tied = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
            self._shapes = await asyncio.to_thread(WeightShapes.of_checkpoint, folder, tied=tied)
        return self._shapes

    def _check(self, request: SampleRequest) -> None:
        check_request(request, vocab_size=self._vocab_size, context_length=self._context_length)
        check_top_logprobs(request.params.num_top_logprobs, most=self._most_logprobs)
        check_unused(request.request_id, self._requests.in_flight)
        check_images(request.images, request.prompt_ids, most=self._prompts.max_images)
        if request.adapter is not None and request.adapter not in self._adapters:
            raise SamplingError(f"adapter must be None or one of {sorted(self._adapters)}, got {request.adapter!r}")
        if not self._has_tokenizer:
            for name in ("stop_strings", "structured_output"):
                if getattr(request.params, name):
                    raise SamplingError(f"{name} needs a tokenizer, which this engine was started without")

    def _check_awake(self) -> None:
        self._check_open()
        check_awake(self._drowsy)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise EngineError("the engine is closed")
        self._check_not_failed()
        if self._llm.errored:
            raise EngineError("vLLM's engine is dead; its log has the reason. Start another")

    def _check_not_failed(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)


def _vocab_size(llm: AsyncLLM) -> int:
    size: int = llm.model_config.get_vocab_size()
    return size if llm.tokenizer is None else min(size, llm.tokenizer.max_token_id + 1)


async def _shut_down(llm: AsyncLLM) -> None:
    """Stop vLLM's processes.

    Its task that reads their outputs goes first: it would take their end for a failure, and say so with a traceback.
    """
    handler = llm.output_handler
    if handler is not None:
        handler.cancel()
        await asyncio.gather(handler, return_exceptions=True)
    llm.output_processor.propagate_error(EngineDeadError())  # whoever still waits
    await asyncio.to_thread(llm.shutdown, _EXIT_S)
    # Its destructor shuts down again, and fails at the interpreter's exit, where vLLM's modules are gone already.
    llm.shutdown = _nothing_more
    # It closes its sockets in this loop's next turn, and leaves their context open.
    await asyncio.sleep(0)
    await asyncio.to_thread(llm.engine_core.resources.ctx.destroy)


def _nothing_more() -> None:
    pass
