"""The engine: requests and scores over vLLM's `AsyncLLM`. Actions on the whole engine are in `control`."""

from __future__ import annotations

import argparse
import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from unbroken.engines.base import AdapterRoom
from unbroken.engines.checks import (
    check_images,
    check_kept_ids,
    check_request,
    check_routing,
    check_scorable,
    check_top_logprobs,
    check_unused,
)
from unbroken.engines.registry import EngineOptions
from unbroken.engines.vllm import conversion
from unbroken.engines.vllm.control import ControlledEngine, check_runs_here
from unbroken.engines.vllm.prompts import PromptMaker
from unbroken.engines.vllm.startup import (
    SampledCounter,
    load_adapter,
    load_adapters,
    parse_engine_args,
    require_exactness,
    shut_down,
    start_llm,
    use_whole_graphs,
)
from unbroken.errors import InvalidInputError, SamplingError
from unbroken.images.decoder import ImageLimits
from unbroken.types import ImageSpan, Numerics, SampleChunk, SampleRequest, SampleResult, ScoredSequence, TokenIds

_MAX_SESSIONS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter:
    """The adapter of a request; none for the model alone."""

    lora: LoRARequest | None = None
    policy_version: int | None = None
    """Of the policy's adapter, or of the model itself beside those of several policies, with which all ids are sampled;
    None where vLLM knows the versions of the weights."""


class VllmEngine(ControlledEngine):
    """Samples with vLLM. Made by `start`.

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
        numerics: Numerics = Numerics.FAST,
    ) -> None:
        super().__init__(llm, PromptMaker(llm, limits=image_limits), transfer_dir=transfer_dir)
        self.numerics = numerics
        self.tensor_parallel_size: int = llm.vllm_config.parallel_config.tensor_parallel_size
        self._counter = counter
        self._adapters = dict(adapters)
        self._num_adapters = len(self._adapters)
        self._ranks = RankAffinity(_count_ranks(llm))
        self._context_length: int = llm.model_config.max_model_len
        self._records_routing: bool = llm.vllm_config.aux_output_config.enable_return_routed_experts
        self._has_tokenizer = llm.tokenizer is not None
        self._vocab_size = _vocab_size(llm)
        max_logprobs: int = llm.model_config.max_logprobs
        self._max_logprobs = self._vocab_size if max_logprobs == -1 else max_logprobs
        self._num_logits: int = llm.model_config.get_vocab_size()
        """One for each id that can be sampled; of padded vocabularies more than `vocab_size`."""
        self._max_kept = self._num_logits if max_logprobs == -1 else min(max_logprobs, self._num_logits)
        self._converting = asyncio.Lock()
        """Held while one answer is converted: many often end in one step, and other tasks shall run in between."""

    @classmethod
    async def start(
        cls,
        args: AsyncEngineArgs,
        *,
        adapters: Sequence[tuple[str, str]] = (),
        transfer_dir: Path | None = None,
        image_limits: ImageLimits | None = None,
        numerics: Numerics = Numerics.FAST,
    ) -> VllmEngine:
        """Start vLLM's processes and load the model, which takes from 15 seconds to minutes.

        Args:
            args: vLLM's engine options.
            adapters: LoRA adapters as (name, folder); they need `enable_lora`.
            transfer_dir: folder for the files of new weights, which the machines of all workers must see. None if all
                workers are on this machine: new weights then reach them through its memory.
            image_limits: size limits of images; None is `ImageLimits()`.
            numerics: with exact, bfloat16 by the kernels that a trainer with exact numerics has.

        Raises:
            EngineError: vLLM does not start; the message has its reason.
            InvalidInputError: an option or adapter cannot be used.
        """
        args = use_whole_graphs(require_exactness(args, num_adapters=len(adapters), numerics=numerics))
        counter = SampledCounter()
        llm = await start_llm(args, counter)
        try:
            check_runs_here(llm)
            await llm.collective_rpc("score_at_temperature")
            await llm.collective_rpc("map_on_free")
            await llm.update_weight_version("0")
            await llm.get_supported_tasks()
            requests = await load_adapters(llm, adapters)
        except BaseException:
            await shut_down(llm)
            raise
        return cls(
            llm,
            counter=counter,
            adapters=requests,
            transfer_dir=transfer_dir,
            image_limits=image_limits,
            numerics=numerics,
        )

    @property
    def context_length(self) -> int:
        """Maximum number of ids in a sequence, prompt and completion together."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Prompt ids and stop ids lie in [0, vocab_size).

        Ids between the tokenizer's and the model's padded vocabulary have embeddings, but no text.
        """
        return self._vocab_size

    @property
    def takes_images(self) -> bool:
        """Whether requests may have images."""
        return self._prompts.max_images > 0

    @property
    def takes_structured_output(self) -> bool:
        """Whether there is a tokenizer, whose texts it needs."""
        return self._has_tokenizer

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that requests may ask for, those of several policies among them."""
        return (*self._adapters, *self._policy.names)

    @property
    def adapter_room(self) -> AdapterRoom:
        """How many adapters an update may have, beside those that were loaded otherwise."""
        return self._policy.get_room(self._num_adapters)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter; `InvalidInputError` if the name is in use, there is no room, or it cannot be loaded."""
        async with self._lock:
            self._check_awake()
            if name in self.adapters:
                raise InvalidInputError(f"adapter names must be unique, got {name!r}, which is loaded: unload it first")
            self._policy.check_room_beside(self._num_adapters + 1)
            self._adapters[name] = await load_adapter(self._llm, name, str(folder), number=self._num_adapters + 1)
            self._num_adapters += 1

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter, and drop its KV; `InvalidInputError` for an unknown one.

        vLLM keeps its weights until others need their place. Those of policies go with their version.
        """
        if self._adapters.pop(name, None) is None:
            raise InvalidInputError(f"adapter must be one of {sorted(self._adapters)} to be unloaded, got {name!r}")
        await self.reset_prefix_cache()  # it knows adapters by name

    @property
    def num_sampled(self) -> int:
        """Ids sampled so far, as vLLM's statistics count them after each step; 0 with `--disable-log-stats`."""
        return self._counter.num_sampled

    @property
    def num_unfinished(self) -> int:
        """Completions that vLLM has not finished."""
        number: int = self._llm.get_num_unfinished_requests()
        return number

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample `request.n` completions."""
        with self._choose_adapter(request) as adapter, self._ranks.choose(request.session_id) as rank:
            params = self._make_params(request, RequestOutputKind.FINAL_ONLY)
            output = await self._requests.run_whole(request, params, adapter.lora, rank=rank)
        async with self._converting:
            return conversion.convert_result(output, request, adapter.policy_version, vocab_size=self._num_logits)

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        """Yield the completions in chunks as they are sampled; the chunks of the n completions are interleaved.

        A chunk holds the ids of one or more steps.
        """
        ended: set[int] = set()
        with self._choose_adapter(request) as adapter, self._ranks.choose(request.session_id) as rank:
            params = self._make_params(request, RequestOutputKind.DELTA)
            answer = self._requests.run(request, params, adapter.lora, rank=rank)
            async with aclosing(answer) as outputs:
                async for output in outputs:
                    conversion.check_prompt(output, request)
                    for completion in output.outputs:
                        chunk = conversion.convert_chunk(
                            output, completion, request, adapter.policy_version, vocab_size=self._num_logits
                        )
                        if chunk.finish_reason is not None:
                            ended.add(chunk.index)
                        yield chunk
        for index in sorted(set(range(request.n)) - ended):
            yield SampleChunk.aborted(index)

    async def score(
        self,
        token_ids: TokenIds,
        *,
        images: Sequence[ImageSpan] = (),
        temperature: float = 1.0,
        num_top_logprobs: int = 0,
    ) -> ScoredSequence:
        """Return the logprob of each of T ids after the first, given the ids before it.

        Computed without the prefix cache, which holds no logits.
        """
        self._check_awake()
        check_scorable(
            token_ids, temperature=temperature, vocab_size=self._vocab_size, context_length=self._context_length - 1
        )
        check_images(images, max_images=self._prompts.max_images)
        check_top_logprobs(num_top_logprobs, maximum=self._max_logprobs)
        if len(token_ids) == 1:
            return conversion.make_empty_scores(num_top_logprobs)
        params = conversion.make_scoring_params(temperature=temperature, num_top_logprobs=num_top_logprobs)
        request = SampleRequest(request_id=f"score-{uuid.uuid4().hex}", prompt_ids=token_ids, images=tuple(images))
        with self._policy.use() as policy:
            output = await self._requests.run_whole(request, params, policy and policy.find(None))
        return conversion.convert_scores(output, len(token_ids), num_top_logprobs)

    async def abort(self, request_id: str) -> None:
        """End a request: its call returns what was sampled so far, with ABORT."""
        await self._requests.end(request_id)

    @contextmanager
    def _choose_adapter(self, request: SampleRequest) -> Iterator[_Adapter]:
        """Check a request, and yield its adapter: the one that it names, or the policy's if there is one."""
        self._check_awake()
        self._check(request)
        name = request.adapter
        if name in self._adapters:
            yield _Adapter(lora=self._adapters[name])
            return
        with self._policy.use() as version:
            yield (
                _Adapter()
                if version is None
                else _Adapter(lora=version.find(name), policy_version=version.policy_version)
            )

    def _make_params(self, request: SampleRequest, kind: RequestOutputKind) -> VllmSamplingParams:
        num_logprobs = conversion.count_logprobs(request.params, maximum=self._max_kept)
        return conversion.make_sampling_params(request, kind, num_logprobs=num_logprobs)

    def _check(self, request: SampleRequest) -> None:
        check_request(request, vocab_size=self._vocab_size, context_length=self._context_length)
        check_top_logprobs(request.params.num_top_logprobs, maximum=self._max_logprobs)
        check_unused(request.request_id, self._requests.in_flight)
        check_images(request.images, max_images=self._prompts.max_images)
        check_routing(request, is_recorded=self._records_routing, option="--enable-return-routed-experts")
        check_kept_ids(
            request,
            is_recorded=0 < request.params.top_k < self._max_kept or self._max_kept == self._num_logits,
            needs=f"top_k in [1, {self._max_kept}), below vLLM's --max-logprobs, or --max-logprobs -1",
        )
        if request.adapter is not None and request.adapter not in self.adapters:
            raise SamplingError(f"adapter must be None or one of {sorted(self.adapters)}, got {request.adapter!r}")
        if not self._has_tokenizer:
            for name in ("stop_strings", "structured_output"):
                if getattr(request.params, name):
                    raise SamplingError(f"{name} needs a tokenizer, which this engine was started without")


def _count_ranks(llm: AsyncLLM) -> int:
    """Number of data-parallel ranks that this process can choose from."""
    config = llm.vllm_config.parallel_config
    number: int = config.data_parallel_size_local if config.local_engines_only else config.data_parallel_size
    return number


def _vocab_size(llm: AsyncLLM) -> int:
    size: int = llm.model_config.get_vocab_size()
    return size if llm.tokenizer is None else min(size, llm.tokenizer.max_token_id + 1)


async def open_engine(options: EngineOptions) -> VllmEngine:
    """Start vLLM for `unbroken serve`, with any of vLLM's own options."""
    parser = argparse.ArgumentParser(prog="unbroken serve --engine vllm", add_help=False, allow_abbrev=False)
    parser.add_argument("--numerics", type=Numerics, choices=[Numerics.FAST, Numerics.EXACT], default=Numerics.FAST)
    chosen, words = parser.parse_known_args(list(options.words))
    if not any(word.startswith(("--max-logprobs", "--max_logprobs")) for word in words):
        # vLLM's default is 20; TRL's client asks for 100 when it scores.
        words = [*words, "--max-logprobs", str(options.max_top_logprobs)]
    tokenizer = [] if options.tokenizer is None else ["--tokenizer", options.tokenizer]
    # The server has its own metrics, and vLLM's statistics take a fifth of this process's time.
    own = ["--model", options.model, *tokenizer, "--disable-log-stats"]
    lora = ["--enable-lora"] if options.adapters else []
    arguments = parse_engine_args([*own, *lora, *words])
    return await VllmEngine.start(
        arguments, adapters=options.adapters, image_limits=options.image_limits, numerics=chosen.numerics
    )


class RankAffinity:
    """Keeps each conversation on one data-parallel rank, whose prefix cache has its earlier turns.

    A new session gets the rank with the fewest requests of sessions in flight. vLLM itself sends every request to the
    rank with the fewest, wherever the prefix is cached.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_in_flight = [0] * num_ranks
        self._num_sessions = [0] * num_ranks
        self._ranks: OrderedDict[str, int] = OrderedDict()
        """By session, the least recently used one first."""

    @contextmanager
    def choose(self, session_id: str | None) -> Iterator[int | None]:
        """The rank of a request while it runs; None leaves the choice to vLLM."""
        if session_id is None or len(self._num_in_flight) == 1:
            yield None
            return
        rank = self._find(session_id)
        self._num_in_flight[rank] += 1
        try:
            yield rank
        finally:
            self._num_in_flight[rank] -= 1

    def _find(self, session_id: str) -> int:
        if session_id not in self._ranks:
            ranks = range(len(self._num_in_flight))
            rank = min(ranks, key=lambda rank: (self._num_in_flight[rank], self._num_sessions[rank]))
            self._ranks[session_id] = rank
            self._num_sessions[rank] += 1
            if len(self._ranks) > _MAX_SESSIONS:
                _, dropped = self._ranks.popitem(last=False)
                self._num_sessions[dropped] -= 1
        self._ranks.move_to_end(session_id)
        return self._ranks[session_id]
