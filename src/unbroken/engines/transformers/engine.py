"""The embedded engine: any decoder-only transformers model, sampled by continuous batching in a thread.

sample() ─► Job ─► worker thread ─► ContinuousBatch.step ─► SlotForward (the model, keys and values in slots)
   ▲                                   │   └ sampling (the processed distribution, its exact logprobs)
   └──────── answer ◄──────────────────┘

Callers only ever wait for answers: the model runs in the worker thread and nowhere else.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from unbroken.decoder_config import DecoderConfig
from unbroken.engines.checks import (
    check_awake,
    check_can_finish,
    check_complete,
    check_images,
    check_not_paused,
    check_request,
    check_routing,
    check_scorable,
    check_source,
    check_top_logprobs,
    check_unused,
)
from unbroken.engines.registry import EngineOptions
from unbroken.engines.transformers.batch import BatchStats, ContinuousBatch, Decode
from unbroken.engines.transformers.config import TransformersEngineConfig, parse_words
from unbroken.engines.transformers.forward import SlotForward, check_layers, is_out_of_memory
from unbroken.engines.transformers.images import ImageModel, PlainInputs
from unbroken.engines.transformers.jobs import Job
from unbroken.engines.transformers.weights import UpdateLoader, check_update
from unbroken.engines.transformers.worker import Feed, Worker
from unbroken.errors import EngineError, InvalidInputError, SamplingError
from unbroken.exactness import ModuleOutputs
from unbroken.images.processor import ImageProcessor
from unbroken.types import (
    ImageSpan,
    InFlight,
    Numerics,
    SampleChunk,
    SampleRequest,
    SampleResult,
    ScoredSequence,
    TokenIds,
    WeightPlacement,
    WeightReceipt,
)
from unbroken.weights.adapters import is_adapter, split_policies
from unbroken.weights.files import FileSource
from unbroken.weights.memory import MemorySource, find_gpu_uuid
from unbroken.weights.receiver import WeightReceiver, WireSource, make_local_call
from unbroken.weights.sources import (
    NamedTensors,
    SharedSource,
    TensorSource,
    TensorSpec,
    WeightSource,
    WeightStream,
    check_version_rises,
)

_T = TypeVar("_T")
_FENCE_POLL_S = 0.002
"""How often an update or a sleep checks whether the requests before it have ended."""


class TransformersEngine:
    """Samples from a transformers model in this process.

    The model belongs to the engine: it is put into evaluation mode and changes only by `update_weights`, so a trainer
    needs its own copy. Works from any event loop, and from several.

    Args:
        model: a `PreTrainedModel` with a language-modelling head, full causal attention, `sdpa` or `eager`.
        decode: turns completion ids into text, for stop strings; without it, requests with stop strings are refused.
        image_processor: of an image-text model; requests may then have images.

    Raises:
        InvalidInputError: the model cannot be batched exactly, or the context is longer than its own.
    """

    world_size = 1
    takes_structured_output = False
    weight_sources = (TensorSource, FileSource, MemorySource, WireSource)

    def __init__(
        self,
        model: Any,
        *,
        config: TransformersEngineConfig | None = None,
        decode: Decode | None = None,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        config = config or TransformersEngineConfig()
        self.numerics = config.numerics
        self.context_length = self.check_config(model.config, config)
        self._forward = SlotForward(
            model,
            context_length=self.context_length,
            processor=image_processor,
            records_routing=config.records_routing,
            numerics=config.numerics,
        )
        self.takes_images = image_processor is not None
        self._preparing: dict[str, bool] = {}
        """Requests whose images are being processed, and whether they were aborted."""
        self._has_decode = decode is not None
        self._batch = ContinuousBatch(
            self._forward,
            max_batch=config.max_batch,
            context_length=self.context_length,
            max_prefill_tokens=config.max_prefill_tokens,
            decode=decode,
        )
        self._worker = Worker(self._batch, name="unbroken-engine")
        self._call_receiver = make_local_call(lambda: str(self._forward.device))
        self.transfer = WeightReceiver(
            self.update_weights,
            self._call_receiver,
            policy_version=lambda: self.policy_version,
            version_to_exceed=lambda: self._version_to_exceed,
            check_takes=self._worker.check_health,
            check_weights=self._check_weights,
            num_workers=1,
        )
        self._incomplete: str | None = None
        """Why the model has neither the old weights nor the new ones, until a whole version comes."""
        self._loader = UpdateLoader()
        self._refusing = False
        """Whether requests are refused because the engine sleeps or is about to; changed by the worker only."""
        self._asleep = False

    @staticmethod
    def check_config(model_config: Any, config: TransformersEngineConfig) -> int:
        """The context of an engine on a model of this config, known before the model is loaded.

        Raises:
            InvalidInputError: it is longer than the model's own, or layers cannot be cached exactly up to it.
        """
        length = _context_length(model_config, config)
        check_layers(model_config, length)
        return length

    async def record_outputs(self, file: Path | None = None) -> None:
        """Record what modules compute from now on; or write it to a file, and stop (`exactness.ModuleOutputs`)."""
        if file is None:
            self._outputs = ModuleOutputs(self._forward.model.base_model)
        else:
            torch.save(self._outputs.end(), file)

    @property
    def vocab_size(self) -> int:
        """Prompt ids and stop ids lie in [0, vocab_size)."""
        return self._forward.vocab_size

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; 0 before the first update (I6)."""
        return self._batch.policy_version

    @property
    def _version_to_exceed(self) -> int:
        """A version that was lost half-way may be brought again, and so may the one before it."""
        return self.policy_version - (self._incomplete is not None)

    async def weight_placement(self) -> WeightPlacement:
        """Return dtype and devices of the weights, for a sender of new ones."""
        device = self._forward.device
        uuids = (find_gpu_uuid(device),) if device.type == "cuda" else ()
        dtype = str(self._forward.model.dtype).removeprefix("torch.")
        return WeightPlacement(dtype=dtype, device=device.type, gpu_uuids=uuids)

    async def check_health(self) -> None:
        """Return at once; raises `EngineError` if the engine is closed, has failed or waits for whole weights."""
        self._worker.check_health()
        check_complete(self._incomplete)

    @property
    def stats(self) -> BatchStats:
        """A snapshot of the counters."""
        return replace(self._batch.stats)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the policies that requests may ask for, which came with the last update."""
        return self._forward.adapters.names

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample `request.n` completions."""
        # One message there and one back: on a small model, more of them would cost as much as sampling.
        job = await self._begin(request)
        try:
            return await job.answer.future
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        """Yield a chunk for each id."""
        feed: Feed[SampleChunk | None] = self._worker.new_feed()
        job = await self._begin(request, feed)
        job.answer.future.add_done_callback(lambda _: feed.items.put_nowait(None))
        try:
            while (chunk := await feed.items.get()) is not None:
                yield chunk
            (await job.answer.future).check_answers(request)
        finally:
            if not job.answer.future.done():
                self._abandon(job)

    async def score(
        self,
        token_ids: TokenIds,
        *,
        images: Sequence[ImageSpan] = (),
        temperature: float = 1.0,
        num_top_logprobs: int = 0,
    ) -> ScoredSequence:
        """Return the logprob of each of T ids after the first, given the ids before it.

        One forward pass without a cache, between two steps; a pause does not delay it.
        """
        check_scorable(
            token_ids, temperature=temperature, vocab_size=self._forward.vocab_size, context_length=self.context_length
        )
        check_top_logprobs(num_top_logprobs, maximum=self._forward.vocab_size)
        inputs: PlainInputs | None = None
        if images:
            request = SampleRequest(request_id="score", prompt_ids=token_ids, images=tuple(images))
            inputs = await asyncio.to_thread(self._check_images(request).score_inputs, token_ids, request.images)
        return await self._call_awake(lambda: self._score(token_ids, temperature, num_top_logprobs, inputs))

    async def abort(self, request_id: str) -> None:
        """End a request: its call returns what was sampled so far, with ABORT."""
        if request_id in self._preparing:
            self._preparing[request_id] = True
        await self._worker.call(lambda: self._batch.abort(request_id))

    async def pause(self) -> None:
        """Stop sampling after the current step; requests wait and keep what they have."""
        await self._call_awake(self._worker.pause)

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._call_awake(self._worker.resume)

    @property
    def is_asleep(self) -> bool:
        """Whether the memory was given back."""
        return self._asleep

    async def sleep(self) -> None:
        """Finish the requests in flight, then give back the memory of weights, keys and values.

        Keys and values are dropped, and the weights wait in the CPU's memory.
        """
        await self._worker.call(self._refuse_requests)
        try:
            while not await self._worker.call(self._fall_asleep):  # noqa: ASYNC110  # it lives in another thread
                await asyncio.sleep(_FENCE_POLL_S)
        except asyncio.CancelledError:
            with suppress(EngineError):  # closed, or failed
                await self._worker.call(self._stay_awake)
            raise

    async def update_weights(
        self, source: WeightSource, *, policy_version: int, reuse_kv: bool = False, in_flight: InFlight = InFlight.PAUSE
    ) -> WeightReceipt:
        """Take new weights. Those left out keep their values; all given ones are held until the copy is done.

        A `WeightStream` whose values are made as they are read, and whole weights that a sender brings, are checked by
        their names and shapes, and then copied one by one. A stream of this process that fails in between ends the
        engine; after a sender's, it samples nothing until a whole version comes.

        An adapter is merged into the weights of the start, so running requests continue with it, as with whole weights.
        """
        check_source(source, self.weight_sources)
        self._worker.check_health()
        check_version_rises(policy_version, current=self._version_to_exceed)
        check_can_finish(in_flight, paused=self._worker.is_paused)
        times = [time.perf_counter()]
        is_whole = isinstance(source, FileSource | WireSource)  # tensors of this process may be some of them
        weights: NamedTensors | None
        if isinstance(source, WireSource):
            weights = await self._receive_adapter(source)
        elif isinstance(source, TensorSource):
            weights = source.tensors if isinstance(source.tensors, WeightStream) else list(source.tensors)
        else:
            assert isinstance(source, SharedSource)
            weights = await asyncio.to_thread(lambda: list(source.read(self._forward.device)))
        times.append(time.perf_counter())
        async with self._finish_first() if in_flight is InFlight.FINISH else nullcontext():
            if weights is None:
                assert isinstance(source, WireSource)
                async with self._between_steps():
                    policy_version = await self._load_parts(source, policy_version, reuse_kv)
            else:
                policy_version = source.policy_version or policy_version
                await self._worker.call(lambda: self._load(weights, policy_version, reuse_kv, is_whole=is_whole))
        seconds = {"receive": times[1] - times[0], "load": time.perf_counter() - times[1]}
        digest = source.digest if isinstance(source, WireSource) else None
        return WeightReceipt(policy_version=policy_version, digest=digest, seconds=seconds)

    async def _check_weights(
        self, specs: Mapping[str, TensorSpec], *, is_whole: bool, sums: Mapping[str, int] | None = None
    ) -> None:
        check_update(self._forward.model, specs, is_whole=is_whole, sums=sums)

    async def _receive_adapter(self, source: WireSource) -> NamedTensors | None:
        """Receive the adapter that a sender brings; None for whole weights, which are loaded as they come."""
        if not is_adapter(await source.wait_for_first()):
            return None
        received: dict[str, torch.Tensor] = {}
        async for part in source.parts():
            await source.take(part, received.update)
        return list(received.items())

    async def _load_parts(self, source: WireSource, policy_version: int, reuse_kv: bool) -> int:
        """Load whole weights as they come; returns their version. The worker makes no steps while it does."""
        check_version_rises(policy_version, current=self._version_to_exceed)
        self._loader.check_kind(is_adapter=False, policy_version=self._batch.policy_version)
        try:
            async for part in source.parts():
                await source.take(part, partial(self._loader.copy, self._forward.model))
        except BaseException as error:
            self._incomplete = f"the update to policy version {policy_version} ended half-way: {error}"
            self._batch.abort_all()
            self._batch.reset_prefix_cache()
            raise
        version = source.policy_version or policy_version
        self._begin_version(version, reuse_kv=reuse_kv)
        return version

    @asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        """Hold the worker between two steps while the block runs: commands wait."""
        entered, release = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def hold() -> None:
            loop.call_soon_threadsafe(entered.set)
            release.wait()

        holding = asyncio.create_task(self._worker.call(hold))
        entering = asyncio.create_task(entered.wait())
        try:
            await asyncio.wait({holding, entering}, return_when=asyncio.FIRST_COMPLETED)
            if holding.done():  # it was stopped
                await holding
            yield
        finally:
            entering.cancel()
            release.set()
            await asyncio.wait({holding})

    async def reset_prefix_cache(self) -> None:
        """Drop the KV of finished requests."""
        await self._call_awake(self._batch.reset_prefix_cache)

    async def close(self) -> None:
        """Abort all requests and free the model."""
        self.transfer.fail("the engine is closed")  # an update would hold the worker
        await self._call_receiver("close")
        with suppress(EngineError):  # closed before, or failed
            await self._worker.call(self._close)

    async def _begin(self, request: SampleRequest, feed: Feed[SampleChunk | None] | None = None) -> Job:
        """Check a request, process its images in a thread, and hand it to the worker."""
        self._check(request)
        images, aborted = None, False
        if request.images:
            model = self._check_images(request)
            check_unused(request.request_id, self._preparing)
            self._preparing[request.request_id] = False
            try:
                images = await asyncio.to_thread(model.prepare, request.prompt_ids, request.images)
            finally:
                aborted = self._preparing.pop(request.request_id)
        job = Job(request, self._worker.new_answer(), feed, images=images)
        self._worker.post(lambda: self._submit(job, aborted=aborted), job.answer)
        return job

    async def _call_awake(self, command: Callable[[], _T]) -> _T:
        def checked() -> _T:
            check_complete(self._incomplete)
            check_awake(self._refusing)
            return command()

        return await self._worker.call(checked)

    def _submit(self, job: Job, *, aborted: bool) -> None:
        check_complete(self._incomplete)
        check_awake(self._refusing)
        job.adapter = self._forward.adapters.get_number(job.request.adapter)  # an update may have come in between
        self._batch.submit(job)
        if aborted:
            self._batch.abort_job(job)

    def _check_images(self, request: SampleRequest) -> ImageModel:
        check_images(request.images, max_images=None if self.takes_images else 0)
        if self._forward.images is None:
            raise EngineError("the engine is closed")
        return self._forward.images

    def _check(self, request: SampleRequest) -> None:
        check_request(request, vocab_size=self._forward.vocab_size, context_length=self.context_length)
        check_top_logprobs(request.params.num_top_logprobs, maximum=self._forward.vocab_size)
        if request.adapter is not None and not self._forward.adapters.names:
            raise SamplingError(f"this engine has no adapters, got adapter {request.adapter!r} ({request.request_id})")
        if request.params.structured_output is not None:
            raise SamplingError(
                f"this engine has no structured output, got structured_output {request.params.structured_output}: "
                "use the vllm engine"
            )
        check_routing(request, is_recorded=self._forward.routers is not None, option="records_routing=True")
        if request.params.stop_strings and not self._has_decode:
            raise SamplingError(
                f"stop_strings {request.params.stop_strings} need text, and this engine knows only ids: build it with "
                "decode=..., or use stop_token_ids"
            )

    def _score(
        self, token_ids: TokenIds, temperature: float, num_top_logprobs: int, image_inputs: PlainInputs | None
    ) -> ScoredSequence:
        try:
            logprobs, tops = self._forward.score(
                token_ids, temperature=temperature, num_top_logprobs=num_top_logprobs, image_inputs=image_inputs
            )
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise EngineError(f"memory is too small to score {len(token_ids)} ids: {error}") from None
        if np.isnan(logprobs).any():
            raise EngineError(
                f"the model's logits are not finite under the weights of policy_version {self.policy_version}"
            )
        return ScoredSequence(logprobs=logprobs, top_logprobs=tops)

    def _abandon(self, job: Job) -> None:
        """Abort a job whose caller has left."""
        with suppress(EngineError):  # a closed engine has aborted it already
            self._worker.post(lambda: self._batch.abort_job(job), job.answer)

    @asynccontextmanager
    async def _finish_first(self) -> AsyncIterator[None]:
        """Enter the block when all requests of this moment have ended; later ones wait until it ends."""
        fence = await self._worker.call(self._batch.hold_new)
        try:
            while await self._worker.call(lambda: self._batch.has_any(fence)):  # noqa: ASYNC110  # in another thread
                await asyncio.sleep(_FENCE_POLL_S)
            yield
        finally:
            with suppress(EngineError):  # closed or failed: no request is held any more
                await self._worker.call(lambda: self._batch.admit_again(fence))

    def _load(self, weights: NamedTensors, policy_version: int, reuse_kv: bool, *, is_whole: bool) -> None:
        check_version_rises(policy_version, current=self._version_to_exceed)
        is_whole = is_whole or self._incomplete is not None
        stream = WeightStream.of(weights)
        if is_adapter([spec.name for spec in stream.specs]):
            weights = list(stream)
        if isinstance(weights, list) and (policies := split_policies(weights)) is not None:
            self._loader.check_kind(is_adapter=True, policy_version=self._batch.policy_version, names_policies=True)
            self._forward.adapters.load(self._forward.model, policies)
            self._batch.fail_without(self._forward.adapters.numbers)
        else:
            self._forward.adapters.check_none()
            self._loader.load(
                self._forward.model, weights, policy_version=self._batch.policy_version, is_whole=is_whole
            )
        self._begin_version(policy_version, reuse_kv=reuse_kv)

    def _begin_version(self, policy_version: int, *, reuse_kv: bool) -> None:
        self._incomplete = None
        if self._asleep:
            self._forward.wake()
            self._refusing = self._asleep = False
        self._batch.begin_version(policy_version, reuse_kv=reuse_kv)

    def _refuse_requests(self) -> None:
        check_not_paused(self._worker.is_paused)
        self._refusing = True

    def _fall_asleep(self) -> bool:
        """Sleep if no request runs; returns whether it sleeps."""
        if not self._asleep and self._batch.is_empty:
            self._batch.sleep()
            self._asleep = True
        return self._asleep

    def _stay_awake(self) -> None:
        self._refusing = self._asleep

    def _close(self) -> None:
        self._batch.abort_all()
        self._worker.stop()
        self._forward.free()


def _context_length(model_config: Any, config: TransformersEngineConfig) -> int:
    own_length = DecoderConfig(model_config).max_positions
    length = config.context_length or own_length
    if length is None:
        raise InvalidInputError("the model's config has no max_position_embeddings: set context_length")
    if own_length is not None and length > own_length:
        raise InvalidInputError(
            f"context_length must be at most {own_length}, the model's max_position_embeddings, got {length}"
        )
    return length


async def open_engine(options: EngineOptions) -> TransformersEngine:
    """Load the model of `unbroken serve`, which gives `--dtype`, `--device`, `--max-batch`,
    `--context-length` and `--numerics`.
    """
    if options.adapters:
        raise InvalidInputError(f"--adapter needs --engine vllm, got {dict(options.adapters)}")
    return await asyncio.to_thread(_load_engine, options)


def _check_device(name: str) -> None:
    """Raise `InvalidInputError` for a device that torch does not have, or not on this machine: before a model loads."""
    try:
        torch.empty(0, device=name)
    except (AssertionError, NotImplementedError, RuntimeError) as error:  # torch without CUDA raises an AssertionError
        first_line = str(error).partition("\n")[0]
        raise InvalidInputError(f"--device must be one that torch can use here, got {name!r}: {first_line}") from None


def _load_engine(options: EngineOptions) -> TransformersEngine:
    arguments = parse_words(options.words)
    device = arguments.device if arguments.device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    auto: Any = AutoModelForCausalLM if options.image_processor is None else AutoModelForImageTextToText
    _check_device(device)
    model = auto.from_pretrained(options.model, dtype=arguments.dtype).to(device)
    return TransformersEngine(
        model,
        config=TransformersEngineConfig(
            max_batch=arguments.max_batch,
            context_length=arguments.context_length,
            records_routing=arguments.enable_return_routed_experts,
            numerics=Numerics(arguments.numerics),
        ),
        decode=options.decode,
        image_processor=options.image_processor,
    )
