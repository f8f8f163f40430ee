"""New weights on their way into an engine, whichever way they come: checked by name and shape, then an update.

load_weights        a row in memory, or files in `transfer_dir`     updates.WeightsInMemory, WeightsInFiles
load_weight_files   files that the workers read                     updates.WeightsInFiles
receive             a trainer's broadcast to the workers            updates.WeightsSent
load_parameters     what TRL's client has sent                      parameters.ParametersSent
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.v1.engine.async_llm import AsyncLLM

from unbroken.engines.base import ReceivedWeights
from unbroken.engines.checks import check_version_rises
from unbroken.engines.vllm.calls import Calls
from unbroken.engines.vllm.control import Control
from unbroken.engines.vllm.state import State
from unbroken.engines.vllm.weights.checkpoint import WeightShapes, checkpoint_folder, shapes_in
from unbroken.engines.vllm.weights.parameters import ParametersSent, ParameterUpdates
from unbroken.engines.vllm.weights.updates import OwnedWeights, WeightsInFiles, WeightsInMemory, WeightsSent, copied
from unbroken.errors import SamplingError
from unbroken.transfer.announcement import Announcement, Transport
from unbroken.transfer.layout import TensorSpec
from unbroken.types import InFlight

if TYPE_CHECKING:
    import torch


class Weights:
    """The ways into one engine; `VllmEngine`'s methods of these names say what each raises.

    Args:
        llm: vLLM.
        calls: of it.
        control: makes the updates.
        state: what the engine is doing.
        transfer_dir: as `VllmEngine.start` has it.
    """

    def __init__(
        self, llm: AsyncLLM, calls: Calls, control: Control, state: State, *, transfer_dir: Path | None
    ) -> None:
        self._llm = llm
        self._calls = calls
        self._control = control
        self._state = state
        self._transfer_dir = transfer_dir
        self._known_shapes: WeightShapes | None = None
        self._only_dtype: str | None = None
        self._parameters = ParameterUpdates(calls.rpc, self._shapes)

    @property
    def world_size(self) -> int:
        """How many workers there are: tensor times pipeline times data parallelism."""
        size: int = self._llm.vllm_config.parallel_config.world_size_across_dp
        return size

    @property
    def dtype(self) -> str:
        """Of the model, under torch's name."""
        return str(self._llm.model_config.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """The kind of device that the workers have."""
        return str(self._llm.vllm_config.device_config.device_type)

    async def gpu_uuids(self) -> Sequence[str]:
        """Of the workers; of data-parallel copies those of the first."""
        return [uuid for uuid in await self._calls.rpc("device_uuid") if uuid]

    async def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int, *, reuse_kv: bool, in_flight: InFlight
    ) -> None:
        """From tensors of this process."""
        shapes = await self._shapes_for(policy_version)
        copy: Callable[[], OwnedWeights]
        if self._transfer_dir is None:
            row_of = partial(WeightsInMemory.of, dtype=await self._row_dtype(), kind=self.device)
            copy = partial(row_of, weights, shapes, num_workers=self.world_size)
        else:
            copy = partial(WeightsInFiles.of, weights, shapes, parent=self._transfer_dir)
        new = await copied(copy)
        await self._control.finished(
            self._update_and_close(new, policy_version, reuse_kv=reuse_kv, in_flight=in_flight)
        )

    async def load_weight_files(
        self, folder: Path, policy_version: int, *, reuse_kv: bool, in_flight: InFlight
    ) -> None:
        """From files that all workers see."""
        shapes = await self._shapes_for(policy_version)
        given = await asyncio.to_thread(shapes_in, folder)
        names = dict(zip(given, shapes.checkpoint_names(given.items()), strict=True))
        if shapes.tied is not None and shapes.tied[0] in names.values():
            raise SamplingError(f"weight {shapes.tied[0]!r} is tied to {shapes.tied[1]!r} in the model: leave it out")
        files = WeightsInFiles(folder, names, shapes.tied)
        await self._control.finished(
            self._control.update(files, policy_version, reuse_kv=reuse_kv, in_flight=in_flight)
        )

    async def receive(self, announcement: Announcement, *, reuse_kv: bool, in_flight: InFlight) -> ReceivedWeights:
        """From a trainer's broadcast."""
        policy_version = announcement.policy_version
        shapes = await self._shapes_for(policy_version)
        names = shapes.checkpoint_names((spec.name, spec.shape) for spec in announcement.layout.specs)
        sent = WeightsSent(announcement, names, shapes.tied)
        seconds = await self._control.finished(
            self._control.update(sent, policy_version, reuse_kv=reuse_kv, in_flight=in_flight)
        )
        return ReceivedWeights(digest=sent.digest, seconds=seconds)

    async def open_communicator(
        self, *, host: str, port: int, world_size: int, transport: Transport, sender_uuid: str
    ) -> None:
        """Meet a sender of single parameters."""
        self._state.check_awake()
        if world_size != self.world_size + 1:
            raise SamplingError(
                f"world_size must be {self.world_size + 1}, the engine's workers and the sender, got {world_size}"
            )
        if sender_uuid and sender_uuid in await self.gpu_uuids():
            raise SamplingError(f"client_device_uuid must be a GPU that no worker has, got {sender_uuid}")
        await self._parameters.open(host=host, port=port, world_size=world_size, transport=transport)

    async def announce_parameter(self, spec: TensorSpec) -> None:
        """Receive one of them."""
        self._state.check_awake()
        await self._parameters.announce(spec)

    async def load_parameters(self, *, in_flight: InFlight) -> bool:
        """From those that have come; whether there were any."""
        self._state.check_awake()
        if not self._parameters.are_pending:
            return False
        weights = await self._parameters.whole()
        await self._control.finished(self._update_and_forget(weights, self._state.policy_version + 1, in_flight))
        return True

    async def close_communicator(self) -> None:
        """Leave the sender."""
        self._state.check_open()
        await self._parameters.close()

    async def _update_and_close(
        self, weights: OwnedWeights, policy_version: int, *, reuse_kv: bool, in_flight: InFlight
    ) -> None:
        try:
            await self._control.update(weights, policy_version, reuse_kv=reuse_kv, in_flight=in_flight)
        finally:
            await asyncio.to_thread(weights.close)

    async def _update_and_forget(self, weights: ParametersSent, policy_version: int, in_flight: InFlight) -> None:
        await self._control.update(weights, policy_version, reuse_kv=False, in_flight=in_flight)
        self._parameters.forget()

    async def _shapes_for(self, policy_version: int) -> WeightShapes:
        """What an update to this version is checked against."""
        self._state.check_open()
        check_version_rises(policy_version, current=self._state.policy_version)
        return await self._shapes()

    async def _shapes(self) -> WeightShapes:
        if self._known_shapes is None:
            config = self._llm.model_config
            folder = await asyncio.to_thread(
                checkpoint_folder,
                config.model,
                revision=config.revision,
                download_dir=self._llm.vllm_config.load_config.download_dir,
            )
            tied = bool(getattr(config.hf_text_config, "tie_word_embeddings", False))
            self._known_shapes = await asyncio.to_thread(WeightShapes.of_checkpoint, folder, tied=tied)
        return self._known_shapes

    async def _row_dtype(self) -> str:
        """What weights are cast to on their way: the dtype of the model's, or what all of several can be made of."""
        if self._only_dtype is None:
            dtypes = {dtype for own in await self._calls.rpc("weight_dtypes") for dtype in own}
            self._only_dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        return self._only_dtype
