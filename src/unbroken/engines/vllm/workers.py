"""Our code in vLLM's worker processes: `VllmEngine` names this class as their extension and calls it by RPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from unbroken.engines.vllm.patches import map_on_free, patch_prompt_logprobs
from unbroken.exactness import ModuleOutputs
from unbroken.weights.adapters import A, B, split_policies
from unbroken.weights.checkpoint import ExpertNames
from unbroken.weights.files import FileSource
from unbroken.weights.memory import MemorySource, find_gpu_uuid
from unbroken.weights.sources import NamedTensors, SharedSource, TiedNames
from unbroken.weights.wire import Transport, WireReceiver, answer, make_gloo_broadcast

EXTENSION = "unbroken.engines.vllm.workers.WorkerExtension"
_PREFIX = "base_model.model."
"""Of all names in files of PEFT."""
_JOIN_TIMEOUT_S = 60
_BROADCAST_TIMEOUT_S = 60


class _SenderLast:
    """A group as TRL's `VLLMClient` (1.0 to 1.10) forms it: the sender has the last rank.

    There is one broadcast and one barrier for each parameter, over vLLM's `StatelessProcessGroup` and
    `PyNcclCommunicator` (TRL's PRs #5225, #5227, #5228). TRL has no gloo; here it serves machines without GPUs.
    """

    def __init__(self, fields: Mapping[str, Any], rank: int, device: torch.device) -> None:
        """Join; `RuntimeError` if another member does not within a minute."""
        from vllm.distributed.utils import StatelessProcessGroup

        size = fields["world_size"]
        self._group: Any = StatelessProcessGroup.create(
            host=fields["host"], port=fields["port"], rank=rank, world_size=size, store_timeout=_JOIN_TIMEOUT_S
        )
        self._broadcast: Callable[[torch.Tensor], object] | None
        if Transport(fields["transport"]) is Transport.NCCL:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

            self._wire = device
            self._broadcast = partial(PyNcclCommunicator(self._group, device=device).broadcast, src=size - 1)
        else:
            self._wire = torch.device("cpu")
            self._broadcast = make_gloo_broadcast(self._group, source=size - 1, timeout_s=_BROADCAST_TIMEOUT_S)

    def begin_receive(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PackedGroup`; each parameter is a chunk, and has its barrier."""
        chunk = torch.empty(num_bytes, dtype=torch.uint8, device=self._wire)
        return chunk, chunk

    def end_receive(self, chunk: torch.Tensor) -> None:
        """Receive; `RuntimeError` if the sender or another worker is gone."""
        assert self._broadcast is not None
        self._broadcast(chunk)
        self._group.barrier()

    def check_trainer(self) -> None:
        """A sender that is gone is noticed when it shall send."""

    def close(self) -> None:
        """Disconnect from the sender."""
        self._group = self._broadcast = None


class _Receiver(WireReceiver):
    """Receives from both kinds of sender."""

    def join(self, fields: Mapping[str, Any]) -> Any:
        if fields.get("is_sender_last"):
            return _SenderLast(fields, self._rank, self._device)
        return super().join(fields)


_KINDS: Mapping[str, type[SharedSource]] = {kind.__name__: kind for kind in (FileSource, MemorySource)}
"""The kinds of source that workers open."""


class WorkerExtension:
    """Mixed into vLLM's worker class. Kinds of source are named by their class."""

    model_runner: Any
    vllm_config: Any
    device: Any
    _outputs: ModuleOutputs
    _receiver: WireReceiver | None = None
    _received: NamedTensors | None = None
    """What a source has, or an adapter as far as it came."""

    def score_at_temperature(self) -> None:
        """Make prompt logprobs those of their request's temperature; once."""
        patch_prompt_logprobs(self.model_runner)

    def record_outputs(self, file: str | None) -> None:
        """Record what modules compute; or write it to a file, and stop."""
        if file is None:
            # Names are those of transformers' modules, which vLLM's transformers backend holds as `model`.
            model = self.model_runner.get_model()
            self._outputs = ModuleOutputs(getattr(model, "model", model))
        elif self._rank_of_engine() == 0:
            torch.save(self._outputs.end(), file)

    def map_on_free(self) -> None:
        """Let this worker end in its sleep without errors of CUDA; once."""
        map_on_free()

    def device_uuid(self) -> str:
        """Return which GPU this worker has; empty on a CPU."""
        return find_gpu_uuid(self.device) if self.device.type == "cuda" else ""

    def weight_dtypes(self) -> list[str]:
        """Return the floating-point dtypes of the model's weights."""
        found = {weight.dtype for weight in self.model_runner.get_model().parameters() if weight.is_floating_point()}
        return sorted(str(dtype).removeprefix("torch.") for dtype in found)

    def receive_weights(self, kind: str, fields: Mapping[str, Any], tied: TiedNames | None) -> dict[str, Any]:
        """Receive a source's weights and keep them; `error` is what went wrong."""
        return answer(lambda: self._receive(kind, fields, tied))

    def call_receiver(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of the receiver of a sender's weights: its `answer`, or `error`.

        What `take` gets last are the checkpoint's names of the weights to load. Without any they are an adapter's, and
        kept; with None they are dropped.
        """
        from vllm.utils.nccl import unpinned_nccl_env

        if self._receiver is None:
            self._receiver = _Receiver(self.device, rank=self._rank_of_engine())
        receiver = self._receiver
        if method == "take":
            *args, names = args  # type: ignore[assignment]
            args = (*args, None if names is None else partial(self._load, names) if names else self._keep)
        with unpinned_nccl_env():  # the trainer does not have vLLM's settings of NCCL
            return answer(lambda: getattr(receiver, method)(*args))

    def begin_load(self) -> None:
        """Let the model take new weights, one after the other."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if not self._is_loaded_in_place():
            with self._configured():
                initialize_layerwise_reload(self.model_runner.get_model())

    def load_received(self, names: Mapping[str, str]) -> None:
        """Load what `receive_weights` keeps, under the checkpoint's `names`; weights without one are left out."""
        assert self._received is not None
        received, self._received = self._received, None
        self._load(names, received)

    def end_load(self) -> None:
        """Make the model ready for steps, after all weights or after a failure: vLLM's layers wait for the rest."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        if not self._is_loaded_in_place():
            with self._configured():
                finalize_layerwise_reload(model, self.vllm_config.model_config)
            self.model_runner.reset_lora_state()
            _pack_heads_again(model)
            _pack_experts_again(model)
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # an error on the GPU must show before the load is acknowledged

    def lora_modules(self) -> list[str]:
        """Return the last parts of the names of modules that take adapters."""
        return _find_lora_modules(self.model_runner)

    def keep_adapters(self, adapters: Mapping[str, tuple[int, Mapping[str, str], int]]) -> dict[str, Any]:
        """Keep what `receive_weights` keeps as adapters, by policy: its number, its modules under the checkpoint's
        names, and its rank.
        """
        assert self._received is not None
        received, self._received = list(self._received), None

        def keep() -> None:
            policies = split_policies(received) or {"": dict(received)}
            for policy, (number, modules, rank) in adapters.items():
                _keep_adapter(self.model_runner, number, policies[policy].items(), modules, rank)

        return answer(keep)

    def drop_adapters(self, numbers: Sequence[int]) -> None:
        """Forget adapters, those of them that are kept."""
        for number in numbers:
            self.model_runner.remove_lora(number)

    def drop_weights(self) -> None:
        """Forget what `receive_weights` keeps."""
        self._received = None

    def _receive(self, kind: str, fields: Mapping[str, Any], tied: TiedNames | None) -> None:
        self._received = None
        self._received = _KINDS[kind].from_object(fields).read(self.device, rank=self._rank_of_engine(), tied=tied)

    def _keep(self, weights: NamedTensors) -> None:
        self._received = [*(self._received or ()), *weights]

    def _load(self, names: Mapping[str, str], weights: NamedTensors) -> None:
        with self._configured():
            self.model_runner.get_model().load_weights(
                named for own, tensor in weights if own in names for named in _name(tensor, names[own])
            )

    def _configured(self) -> AbstractContextManager[None]:
        from vllm.config import set_current_vllm_config

        configured: AbstractContextManager[None] = set_current_vllm_config(self.vllm_config)
        return configured

    def _is_loaded_in_place(self) -> bool:
        return is_loaded_in_place(self.model_runner.get_model(), self.vllm_config)

    def _rank_of_engine(self) -> int:
        """Return the worker's number among all of its engine, whose data-parallel copies come one after the other."""
        parallel = self.vllm_config.parallel_config
        rank: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return rank


def _name(tensor: torch.Tensor, name: str) -> Iterable[tuple[str, torch.Tensor]]:
    experts = ExpertNames.of_pattern(name)
    return [(name, tensor)] if experts is None else experts.split(tensor)


# Adapters, made from tensors; vLLM 0.32 itself loads them from folders only.


def _find_lora_modules(model_runner: Any) -> list[str]:
    """Return the last parts of the names of modules that take adapters, as a checkpoint names them."""
    manager = model_runner.lora_manager._adapter_manager
    packed: Mapping[str, list[str]] = manager.packed_modules_mapping
    return sorted({part for module in manager.supported_lora_modules for part in packed.get(module, [module])})


def _keep_adapter(model_runner: Any, number: int, tensors: NamedTensors, modules: Mapping[str, str], rank: int) -> None:
    """Register an adapter with vLLM's manager and put it into a slot.

    It is pinned in the manager's memory, from which vLLM could not load it again; slots are given and taken by vLLM.
    The scaling is in B, so the adapter's alpha is its rank.
    """
    from vllm.lora.peft_helper import PEFTHelper

    workers_manager = model_runner.lora_manager
    manager = workers_manager._adapter_manager
    # Only vLLM's models whose names differ from the checkpoint's have the first, and only those with parts that take
    # no adapter the second; vLLM asks for both in the same way.
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = workers_manager._lora_model_cls.from_lora_tensors(
        lora_model_id=number,
        # Copies: the tensors may be views of memory that is about to go.
        tensors={_PREFIX + _rename(name, modules): tensor.to("cpu", copy=True) for name, tensor in tensors},
        peft_helper=PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="cpu",
        dtype=workers_manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
    )
    if len(manager) + 1 > manager.capacity:
        manager.remove_oldest_adapter()
    manager.add_adapter(adapter)
    manager._pin_lora_in_cpu_cache(number)
    manager.activate_adapter(number)


def _rename(name: str, modules: Mapping[str, str]) -> str:
    ending = A if name.endswith(A) else B
    return modules[name.removesuffix(ending)] + ending


# Special cases of vLLM 0.32 when weights are loaded into a model that is in use.


def is_loaded_in_place(model: Any, vllm_config: Any) -> bool:
    """Whether the model's own `load_weights` may copy into the weights in use.

    On a GPU, dense layers without quantisation and plain attention keep weights as the checkpoint has them. Everything
    else needs vLLM's layerwise reload, which builds each layer anew from the checkpoint's form and copies it: right for
    all models, but slower, and it takes the memory of one more layer.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or vllm_config.lora_config is not None:
        return False
    if vllm_config.model_config.quantization is not None:
        return False
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    for module in model.modules():
        method = _get_method(module)
        if method is not None and type(method) not in plain:
            return False
        if hasattr(module, "process_weights_after_loading") and type(module) is not Attention:
            return False
    return True


def _pack_heads_again(model: Any) -> None:
    """Renew the packed copy of a tied output head, which vLLM 0.32 does not renew on a CPU.

    Its reload packs layers whose weights came; those of a tied head come under the embedding's name. On other devices
    the head multiplies by the embedding itself.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _pack_experts_again(model: Any) -> None:
    """Pack the experts of each layer, which vLLM 0.32 does at the first load only (`_setup_kernel`).

    On a CPU its kernel would read the new weights as if they were packed. Other devices have nothing to pack then.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        kernel = getattr(_get_method(module), "moe_kernel", None)  # only experts' methods have kernels
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def _get_method(module: Any) -> Any:
    """How a layer of vLLM multiplies by its weights; None of modules without, which no base class tells apart."""
    return getattr(module, "quant_method", None)
