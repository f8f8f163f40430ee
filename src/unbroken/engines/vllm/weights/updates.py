"""Ways in which new weights reach vLLM's workers: the parts of an update that differ."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from unbroken.engines.vllm.weights.checkpoint import WeightShapes
from unbroken.errors import SamplingError, WeightsError
from unbroken.transfer.announcement import Announcement
from unbroken.transfer.layout import ALIGNMENT, Layout, TensorSpec
from unbroken.transfer.memory import WeightRow

Rpc = Callable[..., Awaitable[list[Any]]]
"""Calls a method of `WorkerExtension` in every worker; returns what each returned."""


class NewWeights(Protocol):
    """The weights of one update."""

    async def receive(self, rpc: Rpc) -> None:
        """Bring them to the workers; the model is not touched.

        Raises:
            WeightsError: they did not come, or not as they were sent.
        """
        ...

    async def load(self, rpc: Rpc) -> None:
        """Load them into the model. Whatever it raises, the model may be a mixture then."""
        ...


class OwnedWeights(NewWeights, Protocol):
    """New weights that hold memory or files of their own."""

    def close(self) -> None:
        """Give them back. Idempotent; may take as long as removing files does."""
        ...


Owned = TypeVar("Owned", bound=OwnedWeights)


async def copied(copy: Callable[[], Owned]) -> Owned:
    """What `copy` makes, in a thread; closed where nobody waits for it any more."""
    copying = asyncio.ensure_future(asyncio.to_thread(copy))
    try:
        return await asyncio.shield(copying)
    except asyncio.CancelledError:
        copying.add_done_callback(lambda done: done.exception() or done.result().close())
        raise


class WeightsInFiles:
    """Safetensors files that the workers read; `names` are the checkpoint's for those in the files, if they differ."""

    def __init__(self, folder: Path, names: dict[str, str], tied: tuple[str, str] | None) -> None:
        self._folder = folder
        self._names = names
        self._tied = tied

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.Tensor]], shapes: WeightShapes, *, parent: Path) -> WeightsInFiles:
        """Write weights into a new folder in `parent`, which `close` removes.

        Raises:
            SamplingError: as `WeightShapes.checked`.
        """
        files = cls(Path(tempfile.mkdtemp(prefix="unbroken-weights-", dir=parent)), {}, None)
        try:
            shapes.write(files._folder, weights)
        except BaseException:
            files.close()
            raise
        return files

    async def receive(self, rpc: Rpc) -> None:
        """See `NewWeights`: they are there."""

    async def load(self, rpc: Rpc) -> None:
        """See `NewWeights`."""
        await rpc("load_weight_files", str(self._folder), self._names, self._tied)

    def close(self) -> None:
        """See `OwnedWeights`; for what `of` wrote."""
        shutil.rmtree(self._folder, ignore_errors=True)


class WeightsSent:
    """Weights that a trainer sends to the workers; `names` are the checkpoint's, in the order of the announcement."""

    def __init__(self, announcement: Announcement, names: Sequence[str], tied: tuple[str, str] | None) -> None:
        self._announcement = announcement
        self._names = list(names)
        self._tied = tied
        self.digest = ""
        """Of what came."""

    async def receive(self, rpc: Rpc) -> None:
        """See `NewWeights`."""
        answers = await rpc("receive_weights", self._announcement.to_object(), self._names, self._tied)
        await _check_all_have_them(answers, rpc)
        self.digest = answers[0]["digest"]

    async def load(self, rpc: Rpc) -> None:
        """See `NewWeights`."""
        await rpc("load_received", self._names, self._tied)


class WeightsInMemory:
    """Weights in a row of memory that the workers open, each with a handle of its own."""

    def __init__(self, row: WeightRow, layout: Layout, *, num_workers: int) -> None:
        self._row = row
        self._specs = [[spec.name, spec.dtype, list(spec.shape)] for spec in layout.specs]
        self._num_workers = num_workers

    @classmethod
    def of(
        cls,
        weights: Iterable[tuple[str, torch.Tensor]],
        shapes: WeightShapes,
        *,
        dtype: str,
        kind: str,
        num_workers: int,
    ) -> WeightsInMemory:
        """Copy weights into a row, cast to `dtype`, where the first one of them is, if that is a device of `kind`.

        Raises:
            SamplingError: as `WeightShapes.checked`.
            WeightsError: there is no room.
        """
        specs = (TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in shapes.shapes.items())
        layout = Layout(specs=tuple(specs), bucket_bytes=ALIGNMENT)
        row: WeightRow | None = None
        try:
            for name, tensor in shapes.checked(weights):
                if row is None:
                    row = WeightRow(layout, tensor.device if tensor.device.type == kind else torch.device("cpu"))
                if not tensor.is_floating_point():
                    raise SamplingError(
                        f"weight {name!r} must have a floating-point dtype, got {tensor.dtype}: an engine with a "
                        "transfer_dir takes others"
                    )
                row.put(name, tensor)
        except BaseException:
            if row is not None:
                row.close()
            raise
        assert row is not None  # `checked` has refused an update without weights
        return cls(row, layout, num_workers=num_workers)

    async def receive(self, rpc: Rpc) -> None:
        """See `NewWeights`: the workers open the row."""
        handles = [self._row.handle() for _ in range(self._num_workers)]
        await _check_all_have_them(await rpc("open_row", handles, self._specs), rpc)

    async def load(self, rpc: Rpc) -> None:
        """See `NewWeights`."""
        await rpc("load_row")
        self.close()

    def close(self) -> None:
        """See `OwnedWeights`."""
        self._row.close()


async def _check_all_have_them(answers: Sequence[Mapping[str, str]], rpc: Rpc) -> None:
    """Raise `WeightsError` with the first worker's error; what the others have already is dropped then."""
    for answer in answers:
        if "error" in answer:
            await rpc("drop_weights")
            raise WeightsError(answer["error"])
