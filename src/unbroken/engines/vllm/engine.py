"""The engine: requests and scoring over vLLM's `AsyncLLM`; what is done to all of it is `control`'s and `weights`'."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from unbroken.engines.base import ReceivedWeights
from unbroken.engines.checks import check_images, check_request, check_scorable, check_top_logprobs, check_unused
from unbroken.engines.vllm import conversion
from unbroken.engines.vllm.calls import Calls
from unbroken.engines.vllm.control import Control
from unbroken.engines.vllm.prompts import PromptMaker
from unbroken.engines.vllm.requests import Requests
from unbroken.engines.vllm.starting import SampledCounter, load_adapters, shut_down, start_llm, with_exactness
from unbroken.engines.vllm.state import State
from unbroken.engines.vllm.weights.engine_side import Weights
from unbroken.errors import SamplingError
from unbroken.images.decoding import ImageLimits
from unbroken.transfer.announcement import Announcement, Transport
from unbroken.transfer.layout import TensorSpec
from unbroken.types import ImageSpan, InFlight, SampleChunk, SampleRequest, SampleResult, ScoredSequence, TokenIds

if TYPE_CHECKING:
    import torch


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
        self._state = State(llm)
        self._prompts = PromptMaker(llm, limits=image_limits)
        self._requests = Requests(llm, self._prompts, check=self._state.check_not_failed)
        calls = Calls(llm)
        self._control = Control(llm, calls, self._requests, self._state, takes_images=self.takes_images)
        self._weights = Weights(llm, calls, self._control, self._state, transfer_dir=transfer_dir)
        self._counter = counter
        self._adapters = dict(adapters)
        self._context_length: int = llm.model_config.max_model_len
        self._has_tokenizer = llm.tokenizer is not None
        self._vocab_size = _vocab_size(llm)
        most: int = llm.model_config.max_logprobs
        self._most_logprobs = self._vocab_size if most == -1 else most
        self._converting = asyncio.Lock()
        """Held for one answer at a time: those of a batch often end in one step, and others shall run in between."""
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
            await shut_down(llm)
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
        return self._state.policy_version

    @property
    def world_size(self) -> int:
        """See `Engine`: tensor times pipeline times data parallelism."""
        return self._weights.world_size

    @property
    def weight_dtype(self) -> str:
        """See `WeightHolder`."""
        return self._weights.dtype

    @property
    def weight_device(self) -> str:
        """See `WeightHolder`."""
        return self._weights.device

    async def gpu_uuids(self) -> Sequence[str]:
        """See `WeightHolder`; of data-parallel copies those of the first."""
        return await self._weights.gpu_uuids()

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
        self._state.check_open()

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
        self._state.check_awake()
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
        await self._control.pause()

    async def resume(self) -> None:
        """See `Engine`."""
        await self._control.resume()

    async def sleep(self) -> None:
        """See `SleepingEngine`. On a CPU, where vLLM has no sleep mode, nothing is given back."""
        await self._control.sleep()

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
        await self._weights.load_weights(weights, policy_version, reuse_kv=reuse_kv, in_flight=in_flight)

    async def load_weight_files(
        self, folder: Path, *, policy_version: int, reuse_kv: bool = False, in_flight: InFlight = InFlight.PAUSE
    ) -> None:
        """See `WeightFileReader`: the folder must be seen by all workers. Otherwise as `load_weights`."""
        await self._weights.load_weight_files(folder, policy_version, reuse_kv=reuse_kv, in_flight=in_flight)

    async def receive_weights(
        self, announcement: Announcement, *, reuse_kv: bool = False, in_flight: InFlight = InFlight.PAUSE
    ) -> ReceivedWeights:
        """See `WeightReceiver`: the workers receive while no step runs. All weights must come, as in `load_weights`."""
        return await self._weights.receive(announcement, reuse_kv=reuse_kv, in_flight=in_flight)

    async def open_communicator(
        self, *, host: str, port: int, world_size: int, transport: Transport, sender_uuid: str = ""
    ) -> None:
        """See `ParameterReceiver`."""
        await self._weights.open_communicator(
            host=host, port=port, world_size=world_size, transport=transport, sender_uuid=sender_uuid
        )

    async def announce_parameter(self, spec: TensorSpec) -> None:
        """See `ParameterReceiver`."""
        await self._weights.announce_parameter(spec)

    async def load_parameters(self, *, in_flight: InFlight = InFlight.PAUSE) -> bool:
        """See `ParameterReceiver`. All weights must come, as in `load_weights`."""
        return await self._weights.load_parameters(in_flight=in_flight)

    async def close_communicator(self) -> None:
        """See `ParameterReceiver`."""
        await self._weights.close_communicator()

    async def reset_prefix_cache(self) -> None:
        """See `Engine`. vLLM forgets all or nothing: while requests run, theirs is computed anew."""
        await self._control.reset_prefix_cache()

    async def close(self) -> None:
        """See `Engine`."""
        if self._closing is None:
            self._state.closed = True
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._requests.end_all()
        await shut_down(self._llm)

    async def _answer(self, request: SampleRequest, kind: RequestOutputKind) -> AsyncGenerator[RequestOutput]:
        self._state.check_awake()
        self._check(request)
        params = conversion.sampling_params(request, kind)
        adapter = None if request.adapter is None else self._adapters[request.adapter]
        async with aclosing(self._requests.run(request, params, adapter)) as outputs:
            async for output in outputs:
                yield output

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


def _vocab_size(llm: AsyncLLM) -> int:
    size: int = llm.model_config.get_vocab_size()
    return size if llm.tokenizer is None else min(size, llm.tokenizer.max_token_id + 1)
