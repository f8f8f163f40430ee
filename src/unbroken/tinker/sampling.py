"""Samples from the weights of many models on one engine, which has those of one at a time.

    requests of model A version 3     A3 A3 ...... A3        the engine is at A3
    requests of model B version 1         B1 .....  wait until the running ones have ended; then all go together

New weights of a model whose sampler is `inflight` come between two ids of its running requests: each id has a version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from unbroken.engines.base import Engine, UpdatableEngine, stream_request
from unbroken.engines.checks import check_vocabulary, describe_numerics, require_scoring
from unbroken.errors import EngineError, InvalidInputError
from unbroken.images.lru_cache import LruCache
from unbroken.server.context import ServerContext
from unbroken.server.http.errors import HttpError
from unbroken.server.images import ImageIntake, RequestPrompt
from unbroken.server.service import SamplingService
from unbroken.tinker.store import Checkpoint
from unbroken.types import (
    FinishReason,
    InFlight,
    SampleChunk,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    ScoredSequence,
    TokenIds,
    TopLogprobs,
)
from unbroken.weights.adapters import A, B
from unbroken.weights.files import FileSource, read_tensors, write_tensors
from unbroken.weights.folders import atomic_folder

Sampled = TypeVar("Sampled", SampledSequence, SampleChunk)
_MAX_VERSIONS = 10_000
_MAX_NAMED = 1024
_FULL_S = 0.1
_EMPTY_LOGPROB = -99999.0
_MAX_SCORES = 2**24
"""Most logprobs that are computed to find those of given ids: positions times vocabulary."""


@dataclass(slots=True, kw_only=True, eq=False)
class SamplerWeights:
    """What a sampler samples from: weights in a folder, or those of the base model."""

    model_id: str = ""
    """The training run; empty for the base model."""
    folder: Path | None = None
    version: int = 0
    """Of the model, when its weights were written."""
    path: str | None = None
    """The checkpoint's, if they are of one."""


@dataclass(slots=True, eq=False)
class _Group:
    """Requests for the same weights, which run together."""

    weights: SamplerWeights
    size: int = 0
    turn: asyncio.Event = field(default_factory=asyncio.Event)


class WeightSwitch:
    """Gives the engine the weights that requests need, one kind of weights at a time."""

    def __init__(self, engine: UpdatableEngine, *, make_base: Callable[[Path], Path]) -> None:
        """`make_base` makes the update that restores the base model's weights after one from a folder."""
        self.base = SamplerWeights()
        """The base model's weights, which the engine has at the start."""
        self.engine, self._make_base = engine, make_base
        self._named: LruCache[str, SamplerWeights] = LruCache(_MAX_NAMED)
        """Weights of checkpoints by their folders, so that all who sample from one have the same."""
        self._base_folder: Path | None = None
        self._groups: list[_Group] = []
        """It is the turn of the first one."""
        self._loading = asyncio.Lock()
        self._loaded = self.base, 0
        """What the engine has, and its version."""
        self._versions: dict[int, int] = {engine.policy_version: 0}
        """The model's version of each version of the engine."""

    @asynccontextmanager
    async def use(self, weights: SamplerWeights) -> AsyncIterator[None]:
        """Enter the block when the engine has these weights; it keeps them until the block ends."""
        # The group that runs takes no more once others wait.
        group = next((each for each in self._groups[1:] or self._groups if each.weights is weights), None)
        if group is None:
            group = _Group(weights)
            self._groups.append(group)
        self._groups[0].turn.set()
        group.size += 1
        try:
            await group.turn.wait()
            await asyncio.shield(self._load(weights))
            yield
        finally:
            group.size -= 1
            if not group.size:
                self._groups.remove(group)
            for first in self._groups[:1]:
                first.turn.set()

    async def publish(self, weights: SamplerWeights, folder: Path, version: int) -> None:
        """Give an `inflight` sampler newer weights, also between two ids of its running requests."""
        weights.folder, weights.version = folder, version
        if self._groups and self._groups[0].weights is weights:
            await self._load(weights)

    def name_versions(self, sequence: Sampled) -> Sampled:
        """The same with the model's versions instead of the engine's."""
        spans = (replace(each, policy_version=self._versions[each.policy_version]) for each in sequence.version_spans)
        return replace(sequence, version_spans=tuple(spans))

    def name_weights(self, checkpoint: Checkpoint, folder: Path) -> tuple[str, SamplerWeights]:
        """The weights of a checkpoint, which lie in `folder`, and by which name a request for them finds them."""
        name = str(folder)
        weights = self._named.get(name) or SamplerWeights(
            model_id=checkpoint.model_id, folder=folder, version=checkpoint.version, path=checkpoint.path
        )
        self._named.put(name, weights)
        return name, weights

    def find_weights(self, name: str | None) -> SamplerWeights:
        """The weights of `name_weights`; the base model's without a name."""
        weights = self.base if name is None else self._named.get(name)
        if weights is None:
            raise EngineError(f"{_MAX_NAMED} other checkpoints were asked for since: ask again")
        return weights

    async def _load(self, weights: SamplerWeights) -> None:
        """Load weights, unless the engine has them."""
        async with self._loading:
            folder, version = weights.folder, weights.version
            if self._loaded == (weights, version):
                return
            if folder is not None and not folder.exists():
                why = "its session has ended, or made newer ones"
                raise HttpError(410, f"weights of model {weights.model_id} are gone: {why}")
            if folder is not None and self._base_folder is None:  # now, while the folder is there
                self._base_folder = await asyncio.to_thread(self._make_base, folder)
            source = folder or self._base_folder
            assert source is not None, "the engine has the base model's weights until others are loaded"
            policy_version = self.engine.policy_version + 1
            self._versions[policy_version] = version
            self._versions.pop(policy_version - _MAX_VERSIONS, None)
            await self.engine.update_weights(
                FileSource(source), policy_version=policy_version, in_flight=InFlight.PAUSE
            )
            self._loaded = weights, version


class SwitchedEngine:
    """The engine as all doors but the Tinker API's see it: a request has the weights that its `adapter` names, or the
    base model's, and its ids have the versions of the model whose weights these are.

    It takes no new weights: else another door would change what the Tinker API's samplers sample from.
    """

    policy_version = 0
    """The base model's."""

    def __init__(self, switch: WeightSwitch) -> None:
        self._switch, self._engine = switch, switch.engine
        self.context_length, self.vocab_size = self._engine.context_length, self._engine.vocab_size
        self.takes_images = self._engine.takes_images
        self.takes_structured_output = self._engine.takes_structured_output
        self.numerics, self.tensor_parallel_size = describe_numerics(self._engine)
        self.check_health, self.abort, self.close = self._engine.check_health, self._engine.abort, self._engine.close
        self.pause, self.resume = self._engine.pause, self._engine.resume
        self.reset_prefix_cache = self._engine.reset_prefix_cache

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample `request.n` completions."""
        async with self._switch.use(self._switch.find_weights(request.adapter)):
            result = await self._engine.sample(replace(request, adapter=None))
            sequences = tuple(map(self._switch.name_versions, result.sequences))
        return replace(result, sequences=sequences)

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        """Yield the completions in chunks as they are sampled."""
        asked = replace(request, adapter=None)
        async with (
            self._switch.use(self._switch.find_weights(request.adapter)),
            aclosing(stream_request(self._engine, asked)) as chunks,
        ):
            async for chunk in chunks:
                yield self._switch.name_versions(chunk)

    async def score(self, token_ids: TokenIds, **options: Any) -> ScoredSequence:
        """Return the base model's logprob of each of T ids after the first; see `ScoringEngine`."""
        async with self._switch.use(self._switch.base):
            return await require_scoring(self._engine).score(token_ids, **options)


def write_base(loaded: Path, target: Path, model: Path) -> Path:
    """What restores the base model after the update in `loaded`: an adapter of zeros, or the model's own files."""
    first = next(iter(FileSource(loaded).shapes()))
    if not first.endswith((A, B)):
        return model
    module = first.removesuffix(A).removesuffix(B)
    given = read_tensors(FileSource(loaded).paths())
    with atomic_folder(target) as temporary:
        zeros = ((name, each.new_zeros(each.shape)) for name, each in given if name in (module + A, module + B))
        list(write_tensors(temporary, zeros))
    return target


def _make_params(context: ServerContext, body: types.SampleRequest, room: int) -> SamplingParams:
    """Convert to ours; the ids that end a turn stop it too, unless `stop` is an empty list."""
    given, ends = body.sampling_params, context.get_stop_token_ids()
    stop = (given.stop,) if isinstance(given.stop, str) else given.stop or ()
    ids = {*(each for each in stop if isinstance(each, int)), *(() if given.stop == [] else ends)}
    return SamplingParams(
        max_tokens=max(1, room) if given.max_tokens is None else given.max_tokens,
        temperature=given.temperature,
        top_k=max(given.top_k, 0),
        top_p=given.top_p,
        seed=None if given.seed is None else given.seed % 2**63,
        stop_token_ids=tuple(sorted(ids)),
        stop_strings=tuple(each for each in stop if isinstance(each, str)),
        num_top_logprobs=body.topk_sample_logprobs,
    )


async def sample(
    context: ServerContext, switch: WeightSwitch, weights: SamplerWeights, body: types.SampleRequest
) -> tuple[SampleRequest, list[SampledSequence], bytes]:
    """Sample completions of a prompt, and score it under the same weights; what the engine was asked, what was sampled
    with the model's versions, and the answer.
    """
    engine, service = switch.engine, context.service.with_engine(switch.engine)
    prompt = await _read_prompt(body.prompt, engine.vocab_size, context.images)
    length = len(prompt.token_ids)
    _check(body, length)
    targets = _read_targets(body.target_prompt_logprobs, length, engine.vocab_size)
    params = _make_params(context, body, engine.context_length - length)
    requests = service.make_requests([prompt], params, n=body.num_samples)
    async with switch.use(weights):
        (result,) = await _sample_with_room(service, requests)
        answer = await _score(engine, body, prompt, targets)
    for sequence in result.sequences:
        if sequence.finish_reason is FinishReason.ABORT:
            raise EngineError("the request was aborted")
        has_stopped = sequence.finish_reason is FinishReason.STOP
        each = answer.sequences.add()
        each.tokens = np.asarray(sequence.completion_ids, np.int32).tobytes()
        each.logprobs = np.asarray(sequence.rollout_logprobs, np.float32).tobytes()
        each.stop_reason = messages.STOP_REASON_STOP if has_stopped else messages.STOP_REASON_LENGTH
        if sequence.top_logprobs is not None:
            _write_tops(each.topk_sampled_logprobs, sequence.top_logprobs)
    return requests[0], list(map(switch.name_versions, result.sequences)), answer.SerializeToString()


async def _sample_with_room(service: SamplingService, requests: list[SampleRequest]) -> list[SampleResult]:
    """Sample once the server's queue has room: the call was taken, so it cannot be refused now."""
    while True:
        try:
            return await service.sample(requests)
        except HttpError as error:
            if error.status != 429:
                raise
            await asyncio.sleep(_FULL_S)


def _check(body: types.SampleRequest, length: int) -> None:
    if body.prompt_alt_tokens_k:
        raise InvalidInputError(
            f"prompt_alt_tokens_k is not computed here: it must be 0, got {body.prompt_alt_tokens_k}"
        )
    last_n = body.prompt_logprobs_last_n
    if last_n is not None and not (body.prompt_logprobs and 1 <= last_n < length):
        rule = f"must lie in [1, {length}) and come with prompt_logprobs"
        raise InvalidInputError(f"prompt_logprobs_last_n {rule}, got {last_n}")
    if min(body.topk_prompt_logprobs, body.topk_sample_logprobs) < 0:
        raise InvalidInputError("topk_prompt_logprobs and topk_sample_logprobs must be >= 0")
    if body.topk_prompt_logprobs and not body.prompt_logprobs:
        raise InvalidInputError("topk_prompt_logprobs needs prompt_logprobs, which is false")


def _read_targets(given: Any, length: int, vocab_size: int) -> np.ndarray | None:
    """The ids whose logprobs are asked for, [T - 1, K], with -1 for none."""
    if given is None:
        return None
    rows, width = given.shape if len(given.shape or []) == 2 else (0, 0)
    is_right = given.dtype == "int64" and given.sparse_crow_indices is None and rows == length - 1 and width >= 1
    if not is_right or len(given.data) != rows * width:
        found = f"{given.dtype} of shape {given.shape} with {len(given.data)} values"
        rule = f"a dense int64 tensor of shape [{length - 1}, K]"
        raise InvalidInputError(f"target_prompt_logprobs must be {rule}, got {found}")
    if length * vocab_size > _MAX_SCORES:
        needed = f"target_prompt_logprobs needs all logprobs of {length} positions of {vocab_size} ids"
        raise InvalidInputError(f"{needed}: at most {_MAX_SCORES} are computed")
    ids = np.array(given.data, np.int64).reshape(rows, width)
    check_vocabulary(np.maximum(ids, 0), vocab_size=vocab_size, name="target_prompt_logprobs")
    return ids


async def _score(
    engine: Engine, body: types.SampleRequest, prompt: RequestPrompt, targets: np.ndarray | None
) -> messages.SampleResponse:
    answer, ids = messages.SampleResponse(), prompt.token_ids
    logprobs = np.full(len(ids), np.nan, np.float32)
    if len(ids) > 1 and (body.prompt_logprobs or targets is not None):
        # The logprob of an id that was not sampled is found among those of all ids.
        num_tops = engine.vocab_size if targets is not None else body.topk_prompt_logprobs
        scored = await require_scoring(engine).score(ids, images=prompt.images, num_top_logprobs=num_tops)
        first = len(ids) - (body.prompt_logprobs_last_n or len(ids) - 1)
        logprobs[first:] = scored.logprobs[first - 1 :]
        if (tops := scored.top_logprobs) is not None and body.topk_prompt_logprobs:
            _write_tops(answer.topk_prompt_logprobs, tops, number=body.topk_prompt_logprobs, num_empty=first)
        if tops is not None and targets is not None:
            _write_targets(answer.target_prompt_logprobs, tops, targets)
    if body.prompt_logprobs:
        answer.prompt_logprobs = logprobs.tobytes()
    return answer


def _write_targets(tensor: messages.Tensor, tops: TopLogprobs, targets: np.ndarray) -> None:
    """Write the logprobs of targets [T - 1, K], 0 for -1; `tops` have those of the whole vocabulary."""
    by_id = np.empty_like(tops.logprobs)
    np.put_along_axis(by_id, tops.token_ids, tops.logprobs, axis=1)
    picked = np.where(targets < 0, 0, np.take_along_axis(by_id, np.maximum(targets, 0), axis=1))
    tensor.dtype, tensor.dense = messages.DTYPE_FLOAT32, picked.astype(np.float32).tobytes()
    tensor.shape.extend(picked.shape)


async def _read_prompt(prompt: types.ModelInput, vocab_size: int, intake: ImageIntake) -> RequestPrompt:
    """The prompt's ids, with those of its images among them; `InvalidInputError` if it cannot be used."""
    parts, images = [np.zeros(0, np.int64)], []
    for number, chunk in enumerate(prompt.chunks):
        if isinstance(chunk, types.EncodedTextChunk):
            parts.append(np.array(chunk.tokens))  # of any size
        elif isinstance(chunk, types.ImageChunk):
            parts.append(np.array([intake.placeholder_id or 0]))
            images.append((f"prompt.chunks[{number}]", chunk))
        else:
            raise InvalidInputError(f"prompt.chunks[{number}] must be ids (encoded_text) or an image, got {chunk.type}")
    ids: NDArray[Any] = np.concatenate(parts)
    check_vocabulary(ids, vocab_size=vocab_size, name="prompt")
    sources, settings = [chunk.data for _, chunk in images], intake.encode_settings(None)
    (placed,) = await intake.place([ids.astype(np.int32)], [sources], settings, names=lambda _: "images of prompt")
    for (name, chunk), span in zip(images, placed.images, strict=True):
        if chunk.expected_tokens not in (None, span.length):
            rule = f"must be {span.length}, the ids that the model's image processor makes of it"
            raise InvalidInputError(f"{name}.expected_tokens {rule}, got {chunk.expected_tokens}")
    return placed


def _write_tops(
    message: messages.TopkLogprobs, tops: TopLogprobs, *, number: int | None = None, num_empty: int = 0
) -> None:
    """Write the most likely ids, or a `number` of them, with `num_empty` positions without any before them."""
    start, padding = max(num_empty - 1, 0), ((num_empty, 0), (0, 0))
    ids = np.pad(tops.token_ids[start:, :number], padding)
    logprobs = np.pad(tops.logprobs[start:, :number], padding, constant_values=_EMPTY_LOGPROB)
    message.token_ids = ids.astype(np.int32).tobytes()
    message.logprobs = np.where(np.isfinite(logprobs), logprobs, _EMPTY_LOGPROB).astype(np.float32).tobytes()
    message.length, message.k = ids.shape
