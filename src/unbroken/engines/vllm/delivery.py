"""New weights on their way to vLLM's workers: checked by name and shape, then opened by all of them, then loaded.

Workers are other processes, so tensors of this process are first copied to memory that workers can open, or to
files in `transfer_dir`. Every other source goes to the workers as it is; what a sender brings is loaded as it comes.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unbroken.decoder_config import DecoderConfig
from unbroken.errors import EngineError, SamplingError, WeightsError
from unbroken.weights.adapters import AdaptedWeight, is_adapter, match_adapters
from unbroken.weights.checkpoint import WeightShapes
from unbroken.weights.files import FileSource, write_tensors
from unbroken.weights.memory import MemorySource, WeightRow
from unbroken.weights.receiver import WireSource
from unbroken.weights.sources import (
    SharedSource,
    TensorSource,
    TensorSpec,
    TiedNames,
    WeightSource,
    WeightStream,
    check_floating,
)
from unbroken.weights.wire import read_answers

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_RESERVED_BYTES = 4 * 2**30
"""What a copy of the weights leaves free on a GPU, for the steps that run until it is loaded."""

Rpc = Callable[..., Awaitable[list[Any]]]
"""Calls a method of `WorkerExtension` in every worker; returns what each returned."""


@dataclass(slots=True, kw_only=True)
class Delivery:
    """The weights of one update, in a source that the workers can read."""

    source: SharedSource | WireSource
    shapes: WeightShapes
    names: Mapping[str, str] = field(default_factory=dict)
    """For each of the source's names that is to be loaded, that of the checkpoint. Of a sender's they come with the
    parts.
    """
    tied: TiedNames | None = None
    is_adapter: bool = False
    adapted: Mapping[str, Sequence[AdaptedWeight]] = field(default_factory=dict)
    """The weights that an adapter adds to, by the policy that it is of (`match_adapters`); of a sender's they are known
    once it was received.
    """

    async def receive(self, rpc: Rpc) -> None:
        """Have all workers open the source, or keep the adapter that a sender brings. Nothing is loaded.

        If a worker fails (`WeightsError`), no worker keeps them.
        """
        if isinstance(self.source, WireSource):
            if self.is_adapter:
                await rpc("drop_weights")
                async for part in self.source.parts():
                    await self.source.take(part, {})
                given = {name: spec.shape for name, spec in self.source.specs.items()}
                self.adapted = match_adapters(given, self.shapes.find)
            return
        answers = await rpc("receive_weights", type(self.source).__name__, self.source.to_object(), self.tied)
        try:
            read_answers(answers)
        except WeightsError:
            await rpc("drop_weights")
            raise

    async def load(self, rpc: Rpc) -> None:
        """Have all workers load the weights. If it raises, the model may be a mixture."""
        await rpc("begin_load")
        try:
            if isinstance(self.source, WireSource):
                async for part in self.source.parts():
                    await self.source.take(part, self.shapes.find_names({s.name: s.shape for s in part.specs}))
            else:
                await rpc("load_received", dict(self.names))
        except BaseException:
            with suppress(EngineError):  # vLLM is dead
                await rpc("end_load")  # a layer that waits for its weights would take those of the next update
            raise
        await rpc("end_load")
        await self.close()

    async def load_adapters(self, rpc: Rpc, numbers: Mapping[str, int]) -> None:
        """Have all workers keep the adapters that they received, that of each policy under its number.

        If a worker cannot (`WeightsError`), no worker keeps any: the model and other adapters are as they were.
        """
        kept = {
            policy: (
                numbers[policy],
                {one.given: one.name.removesuffix(".weight") for one in adapted},
                max(one.rank for one in adapted),
            )
            for policy, adapted in self.adapted.items()
        }
        answers = await rpc("keep_adapters", kept)
        try:
            read_answers(answers)
        except WeightsError as error:
            await rpc("drop_adapters", list(numbers.values()))
            raise WeightsError(f"vLLM does not load the adapter: {error}") from None
        await self.close()

    @property
    def digest(self) -> str | None:
        """The checksum of what a sender brought."""
        return self.source.digest if isinstance(self.source, WireSource) else None

    async def close(self) -> None:
        """Free what the source holds. Idempotent."""
        if isinstance(self.source, SharedSource):
            await asyncio.to_thread(self.source.close)


class Deliveries:
    """Makes the deliveries of one engine."""

    def __init__(self, llm: AsyncLLM, rpc: Rpc, *, transfer_dir: Path | None) -> None:
        self._llm = llm
        self._rpc = rpc
        self.transfer_dir = transfer_dir
        self._shapes: WeightShapes | None = None
        self._row_dtype: str | None = None

    async def prepare(self, source: WeightSource) -> Delivery:
        """Check a source, and copy what workers cannot read. Raises as `update_weights`."""
        shapes = await self.shapes()
        if isinstance(source, WireSource):
            return Delivery(source=source, shapes=shapes, is_adapter=is_adapter(await source.wait_for_first()))
        if isinstance(source, TensorSource):
            stream = WeightStream.of(source.tensors)
            found = _find_targets(stream.list_shapes(), shapes)  # before anything is copied
            return Delivery(source=await self._copy(stream), shapes=shapes, **found)
        assert isinstance(source, SharedSource)
        return Delivery(source=source, shapes=shapes, **_find_targets(await asyncio.to_thread(source.shapes), shapes))

    async def check(
        self, specs: Mapping[str, TensorSpec], *, is_whole: bool, sums: Mapping[str, int] | None = None
    ) -> None:
        """Check weights that a sender announces; see `CheckWeights`."""
        shapes = await self.shapes()
        check_floating(specs.values())
        given = {name: spec.shape for name, spec in specs.items()}
        if is_adapter(given):
            if is_whole:
                match_adapters(given, shapes.find)
            return
        if not is_whole:
            for name, shape in given.items():
                shapes.check_one(name, shape)
            return
        _, tied = shapes.match(given)
        if tied is not None and sums is not None and sums[tied[0]] != sums[tied[1]]:
            raise SamplingError(f"weights {tied[0]!r} and {tied[1]!r} are tied in the model, but their values differ")

    async def shapes(self) -> WeightShapes:
        """Return names and shapes of the model's weights, read once from its checkpoint."""
        if self._shapes is None:
            config = self._llm.model_config
            folder = await asyncio.to_thread(
                _checkpoint_folder,
                config.model,
                revision=config.revision,
                download_dir=self._llm.vllm_config.load_config.download_dir,
            )
            tied = DecoderConfig(config.hf_text_config).is_tied
            self._shapes = await asyncio.to_thread(WeightShapes.of_checkpoint, folder, tied=tied)
        return self._shapes

    async def _copy(self, weights: WeightStream) -> SharedSource:
        """Copy weights of this process to where workers can read them, an adapter in its own dtypes: vLLM casts it."""
        if self.transfer_dir is not None:
            return await run_copy(partial(_copy_to_files, weights, parent=self.transfer_dir))
        config = self._llm.vllm_config
        is_on_host = is_adapter([spec.name for spec in weights.specs])  # where vLLM keeps adapters
        copy = partial(
            copy_to_memory,
            weights.cast(await self._memory_dtype()),
            device_type="cpu" if is_on_host else config.device_config.device_type,
            num_workers=config.parallel_config.world_size_across_dp,
        )
        return await run_copy(copy)

    async def _memory_dtype(self) -> str:
        """Return the dtype of the model's weights, or float32 if they have several."""
        if self._row_dtype is None:
            dtypes = {dtype for own in await self._rpc("weight_dtypes") for dtype in own}
            self._row_dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        return self._row_dtype


def _find_targets(given: Mapping[str, tuple[int, ...]], shapes: WeightShapes) -> dict[str, Any]:
    """What a `Delivery` has of weights with these names and shapes; `SamplingError` if they are not the model's."""
    if is_adapter(given):
        return {"is_adapter": True, "adapted": match_adapters(given, shapes.find)}
    names, tied = shapes.match(given)
    return {"names": names, "tied": tied}


def _copy_to_files(weights: WeightStream, *, parent: Path) -> FileSource:
    """Write weights to files in a new folder in `parent`; if they cannot be read or written, nothing is left."""
    source = FileSource(Path(tempfile.mkdtemp(prefix="unbroken-weights-", dir=parent)), is_temporary=True)
    try:
        for _ in write_tensors(source.folder, weights.read_cast()):
            pass
    except BaseException:
        source.close()
        raise
    return source


def copy_to_memory(weights: WeightStream, *, device_type: str, num_workers: int) -> MemorySource:
    """Copy weights to memory that workers open; nothing is left if it raises.

    The copy is on the device of the first weight if that has room and is of `device_type`, the workers' own, and on the
    host otherwise.

    Raises:
        SamplingError: a weight has no floating-point numbers; an engine with a `transfer_dir` takes others.
        WeightsError: there is no room.
    """
    check_floating(weights.specs)
    row: WeightRow | None = None
    try:
        for _, (name, tensor) in zip(weights.specs, weights, strict=True):
            if row is None:
                row = WeightRow(weights.specs, _choose_device(weights.specs, tensor.device, device_type))
            row.put(name, tensor)
    except BaseException:
        if row is not None:
            row.close()
        raise
    assert row is not None, "an update without weights is refused before"
    return row.source(num_workers)


def _choose_device(specs: Sequence[TensorSpec], device: torch.device, device_type: str) -> torch.device:
    """A GPU must have room for the copy, and for the weights of an engine that sleeps there and is about to wake."""
    if device.type != device_type or device.type != "cuda":
        return device if device.type == device_type else torch.device("cpu")
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    size = sum(spec.num_bytes for spec in specs)
    return device if free > 2 * size + _RESERVED_BYTES else torch.device("cpu")


async def run_copy(copy: Callable[[], SharedSource]) -> SharedSource:
    """Run `copy` in a thread; if this call is cancelled, the copy is closed once it is made."""

    def close(done: asyncio.Future[SharedSource]) -> None:
        if done.exception() is None:
            done.result().close()

    copying = asyncio.ensure_future(asyncio.to_thread(copy))
    try:
        return await asyncio.shield(copying)
    except asyncio.CancelledError:
        copying.add_done_callback(close)
        raise


def _checkpoint_folder(model: str, *, revision: str | None, download_dir: str | None) -> Path:
    """Return the folder with a model's files, if `model` is a folder or a name on the hub that vLLM has downloaded.

    Raises:
        EngineError: they are not on this machine.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise EngineError(f"the files of {model!r} are not on this machine: {error}") from error
