"""Requests in vLLM: prepared, sent, sent again if vLLM lost their images, aborted at any point."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Container
from contextlib import aclosing

from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from unbroken.engines.vllm.calls import translate_errors
from unbroken.engines.vllm.prompts import PromptMaker
from unbroken.types import SampleRequest

_DRAIN_S = 1.0
"""Longest wait for aborted calls to return."""
_POLL_S = 0.005
_MAX_TRIES = 3
"""How often a request with images is sent to vLLM; see `_has_lost_images`."""


class Requests:
    """The requests in flight. `check` is called before each output is returned, and may raise `EngineError`."""

    def __init__(self, llm: AsyncLLM, prompts: PromptMaker, *, check: Callable[[], None]) -> None:
        self._llm = llm
        self._prompts = prompts
        self._check = check
        self._in_flight: set[str] = set()
        self._aborted: set[str] = set()
        """Remembered here, because vLLM does not know a request while its images are prepared."""

    @property
    def in_flight(self) -> Container[str]:
        """The ids in use."""
        return self._in_flight

    async def run(
        self,
        request: SampleRequest,
        params: VllmSamplingParams,
        adapter: LoRARequest | None = None,
        *,
        rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield vLLM's outputs; none for a request that is aborted before it is sent. Raises as `Engine.sample`.

        `rank` is the data-parallel rank, which vLLM otherwise chooses.
        """
        self._in_flight.add(request.request_id)
        try:
            for num_more in reversed(range(_MAX_TRIES)):
                lost = False
                async with aclosing(self._try(request, params, adapter, rank)) as outputs:
                    async for output in outputs:
                        lost = bool(request.images) and num_more > 0 and _has_lost_images(output)
                        if lost:
                            break
                        yield output
                if not lost:
                    return
        finally:
            self._aborted.discard(request.request_id)
            self._in_flight.discard(request.request_id)

    async def run_whole(
        self,
        request: SampleRequest,
        params: VllmSamplingParams,
        adapter: LoRARequest | None = None,
        *,
        rank: int | None = None,
    ) -> RequestOutput | None:
        """Wait for the only output of a request with `FINAL_ONLY`; None, errors and `rank` as in `run`."""
        self._in_flight.add(request.request_id)
        try:
            num_more = _MAX_TRIES - 1 if request.images else 0
            output = await self._try_whole(request, params, adapter, rank)
            while output is not None and num_more > 0 and _has_lost_images(output):
                num_more -= 1
                output = await self._try_whole(request, params, adapter, rank)
            return output
        finally:
            self._aborted.discard(request.request_id)
            self._in_flight.discard(request.request_id)

    async def end(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        if request_id in self._in_flight:
            self._aborted.add(request_id)
            await self._llm.abort(request_id)

    async def wait_until_none(self) -> None:
        """Wait until no request is in flight."""
        while self._in_flight:  # noqa: ASYNC110  # each call removes its id
            await asyncio.sleep(_POLL_S)

    async def end_all(self) -> None:
        """Abort all requests, and wait until their calls have returned."""
        until = asyncio.get_running_loop().time() + _DRAIN_S
        while self._in_flight and not self._llm.errored:
            if asyncio.get_running_loop().time() > until:
                break  # a caller does not read its stream
            self._aborted.update(self._in_flight)
            await self._llm.abort(list(self._in_flight))
            await asyncio.sleep(_POLL_S)

    async def _try(
        self, request: SampleRequest, params: VllmSamplingParams, adapter: LoRARequest | None, rank: int | None
    ) -> AsyncGenerator[RequestOutput]:
        prompt = await self._prompts.make_input(request)
        if request.request_id in self._aborted:
            return
        with translate_errors(self._llm):
            outputs = self._llm.generate(
                prompt, params, request.request_id, lora_request=adapter, data_parallel_rank=rank
            )
            async with aclosing(outputs):
                async for output in outputs:
                    self._check()
                    yield output

    async def _try_whole(
        self, request: SampleRequest, params: VllmSamplingParams, adapter: LoRARequest | None, rank: int | None
    ) -> RequestOutput | None:
        # As `AsyncLLM.generate` does it, whose generator, one in each of our layers and the switches between them took
        # as long as vLLM's checks of a request.
        prompt, queue = await self._prompts.make_input(request), None
        if request.request_id in self._aborted:
            return None
        with translate_errors(self._llm):
            try:
                queue = await self._llm.add_request(
                    request.request_id, prompt, params, lora_request=adapter, data_parallel_rank=rank
                )
                output: RequestOutput = await queue.get()
            except (EngineDeadError, VLLMClientError):
                raise
            except BaseException as error:
                if queue is not None:
                    await self._llm.abort(queue.request_id, internal=True)
                if isinstance(error, Exception):
                    raise EngineGenerateError from error
                raise
        self._check()
        return output


def _has_lost_images(output: RequestOutput) -> bool:
    """Whether vLLM ended a request at once because its processes disagree about which images they keep.

    The frontend process sent only an image's name to the engine process, which does not have it: an earlier request was
    cancelled on its way, or the cache is small. vLLM then corrects itself, and the request must be sent again.
    """
    return any(c.finish_reason == "error" and not len(c.token_ids) for c in output.outputs)
