"""Our code in vLLM's worker processes: `VllmEngine` names this class as their extension and calls it by RPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch

from unbroken.engines.transfer import RECEIVERS as COMMON_RECEIVERS
from unbroken.engines.transfer import ParameterSource
from unbroken.engines.vllm.pools import map_on_free
from unbroken.engines.vllm.score_patch import patch_prompt_logprobs
from unbroken.engines.vllm.weights.checkpoint import ExpertNames
from unbroken.engines.vllm.weights.lora import find_lora_modules, keep_adapter
from unbroken.engines.vllm.weights.reloading import is_loaded_in_place, pack_experts_again, pack_heads_again
from unbroken.exactness import ModuleOutputs
from unbroken.transfer.packed import PackedReceiver, Transport, answer, make_gloo_broadcast
from unbroken.transfer.sources import ReceivedWeights, Receiver, SharedSource, TensorSpec, TiedNames, WeightSource

EXTENSION = "unbroken.engines.vllm.weights.workers.WorkerExtension"
_JOIN_TIMEOUT_S = 60
_BROADCAST_TIMEOUT_S = 60


class ParameterReceiver(PackedReceiver):
    """Receives parameter by parameter, as TRL's `VLLMClient` (1.0 to 1.10) sends them from the last rank.

    There is one broadcast and one barrier for each, over vLLM's `StatelessProcessGroup` and `PyNcclCommunicator` (TRL's
    PRs #5225, #5227, #5228). TRL has no gloo; here it serves machines without GPUs.
    """

    _communicator: Any = None
    """vLLM's group, and what broadcasts a tensor in it."""

    def open(self, fields: Mapping[str, Any]) -> str:
        """Connect to a sender; `RuntimeError` if another member does not join within a minute."""
        from vllm.distributed.utils import StatelessProcessGroup

        self.drop()
        size = fields["world_size"]
        group = StatelessProcessGroup.create(
            host=fields["host"], port=fields["port"], rank=self._rank, world_size=size, store_timeout=_JOIN_TIMEOUT_S
        )
        if Transport(fields["transport"]) is Transport.NCCL:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

            self._communicator = group, partial(PyNcclCommunicator(group, device=self._device).broadcast, src=size - 1)
        else:
            gloo = make_gloo_broadcast(group, source=size - 1, timeout_s=_BROADCAST_TIMEOUT_S)
            self._communicator = group, gloo
        return ""

    def take_one(self, fields: Mapping[str, Any]) -> None:
        """Receive one parameter, and keep it; `RuntimeError` if the sender or another worker is gone."""
        group, broadcast = self._communicator
        spec = TensorSpec.from_object(fields)
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        broadcast(tensor)
        group.barrier()
        self._weights[spec.name] = tensor

    def close(self) -> None:
        """Disconnect from the sender, and drop all parameters."""
        self._communicator = None
        self.drop()


RECEIVERS: dict[type[WeightSource], type[Receiver[Any]]] = {**COMMON_RECEIVERS, ParameterSource: ParameterReceiver}
"""The kinds of source that vLLM takes, and the receiver of each."""
_KINDS = {kind.__name__: kind for kind in RECEIVERS}


class WorkerExtension:
    """Mixed into vLLM's worker class. Kinds of source are named by their class."""

    model_runner: Any
    vllm_config: Any
    device: Any
    reload_weights: Callable[..., None]
    _outputs: ModuleOutputs
    _receivers: dict[str, Receiver[Any]] | None = None
    _received: ReceivedWeights | None = None

    def score_at_temperature(self) -> None:
        """Make prompt logprobs those of their request's temperature; once."""
        patch_prompt_logprobs(self.model_runner)

    def record_outputs(self, file: str | None) -> None:
        """Record what modules compute; or write it to a file, and stop."""
        if file is None:
            model = self.model_runner.get_model()
            self._outputs = ModuleOutputs(getattr(model, "model", model))
        elif self._rank_of_engine() == 0:
            torch.save(self._outputs.end(), file)

    def map_on_free(self) -> None:
        """Let this worker end in its sleep without errors of CUDA; once."""
        map_on_free()

    def device_uuid(self) -> str:
        """Return which GPU this worker has; empty on a CPU."""
        return str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else ""

    def weight_dtypes(self) -> list[str]:
        """Return the floating-point dtypes of the model's weights."""
        found = {weight.dtype for weight in self.model_runner.get_model().parameters() if weight.is_floating_point()}
        return sorted(str(dtype).removeprefix("torch.") for dtype in found)

    def receive_weights(self, kind: str, fields: Mapping[str, Any], tied: TiedNames | None) -> dict[str, Any]:
        """Receive a source's weights and keep them; `error` is what went wrong."""
        return answer(lambda: self._receive(kind, fields, tied))

    def call_receiver(self, kind: str, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of a receiver, for transports with more steps than one: its `answer`, or `error`."""
        from vllm.utils.nccl import unpinned_nccl_env

        with unpinned_nccl_env():  # the trainer does not have vLLM's settings of NCCL
            return answer(lambda: getattr(self._receiver(kind), method)(*args))

    def load_received(self, names: Mapping[str, str]) -> None:
        """Load what `receive_weights` keeps, under the checkpoint's `names`; weights without one are left out."""
        assert self._received is not None
        received, self._received = self._received, None
        self._load(named for own, tensor in received.tensors if own in names for named in _name(tensor, names[own]))

    def lora_modules(self) -> list[str]:
        """Return the last parts of the names of modules that take adapters."""
        return find_lora_modules(self.model_runner)

    def keep_adapter(self, number: int, modules: Mapping[str, str], rank: int) -> dict[str, Any]:
        """Keep what `receive_weights` keeps as the adapter `number`; `modules` has the checkpoint's names."""
        assert self._received is not None
        received, self._received = self._received, None
        return answer(lambda: keep_adapter(self.model_runner, number, received.tensors, modules, rank))

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter, if it is kept."""
        self.model_runner.remove_lora(number)

    def drop_weights(self) -> None:
        """Forget what `receive_weights` keeps."""
        self._received = None

    def _receive(self, kind: str, fields: Mapping[str, Any], tied: TiedNames | None) -> None:
        self._received = None
        source = cast("type[SharedSource]", _KINDS[kind]).from_object(fields)
        self._received = self._receiver(kind).receive(source, tied=tied)

    def _receiver(self, kind: str) -> Receiver[Any]:
        self._receivers = self._receivers or {}
        if kind not in self._receivers:
            self._receivers[kind] = RECEIVERS[_KINDS[kind]](self.device, rank=self._rank_of_engine())
        return self._receivers[kind]

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if is_loaded_in_place(self.model_runner.get_model(), self.vllm_config):
            self.model_runner.get_model().load_weights(weights)
            self.model_runner.reset_encoder_cache()
            self.model_runner.reset_mm_cache()
        else:
            self.reload_weights(weights_iterator=weights)
            pack_heads_again(self.model_runner.get_model())
            pack_experts_again(self.model_runner.get_model())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # an error on the GPU must show before the load is acknowledged

    def _rank_of_engine(self) -> int:
        """Return the worker's number among all of its engine, whose data-parallel copies come one after the other."""
        parallel = self.vllm_config.parallel_config
        rank: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return rank


def _name(tensor: torch.Tensor, name: str) -> Iterable[tuple[str, torch.Tensor]]:
    experts = ExpertNames.of_pattern(name)
    return [(name, tensor)] if experts is None else experts.split(tensor)
