"""Parallelism by transformers' `DistributedConfig`: parameters of which each process holds a part (`DTensor`), and
operations that all processes make together.

    embed_tokens.weight [64, 32]    process 0 holds rows 0..31, process 1 rows 32..63    `gather_tensor`: [64, 32]

All processes gather together, and wait forever for one that does not take part. So each gathers the same tensors in
the same order, even if it fails on the way (`gather_rest`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.distributed import DistributedConfig

from unbroken.errors import InvalidInputError, TrainingError
from unbroken.training.config import ParallelConfig, TrainerConfig
from unbroken.training.model.adapters import causal_lm
from unbroken.training.model.backbone import has_tower
from unbroken.training.model.sequence import find_bad_heads

T = TypeVar("T")
_CPU = torch.device("cpu")
_SPLITTING = ("tensor", "expert")
"""The kinds of `ParallelConfig` by which processes compute parts of the same layers."""
_SHARING_ROWS = (*_SPLITTING, "sequence")
"""Those by which they compute the same rows."""
_FIRST_WITH_ALL = Version("5.23")
"""The first version of transformers with replicas of shards (HSDP), and experts by all-to-all."""


def make_distributed_config(parallel: ParallelConfig, *, is_bfloat16: bool) -> DistributedConfig:
    """What `from_pretrained` needs to load this process's part of a model alone.

    Weights stay float32; with `is_bfloat16` they are gathered in bfloat16, and gradients are added in float32.

    Raises:
        InvalidInputError: this version of transformers does not have what `parallel` asks for.
    """
    installed = transformers.__version__
    missing = [name for name in ("replicate", "expert") if getattr(parallel, name) > 1]
    if missing and Version(installed) < _FIRST_WITH_ALL:
        name = missing[0]
        raise InvalidInputError(
            f"trainer.parallel.{name} = {getattr(parallel, name)} needs transformers {_FIRST_WITH_ALL}, and "
            f"{installed} is installed, as vLLM requires: take vLLM as a server in its own environment "
            "(engine.kind server)"
        )
    has_all = Version(installed) >= _FIRST_WITH_ALL
    if parallel.tensor > 1 and (parallel.fsdp > 1) != has_all:  # gradients of norms of heads are wrong otherwise
        raise InvalidInputError(
            f"trainer.parallel.tensor = {parallel.tensor} needs transformers 5.19 with fsdp 1, and {_FIRST_WITH_ALL} "
            f"with fsdp above 1, got fsdp {parallel.fsdp} with {installed}"
        )
    newer = {"dp_replicate_size": parallel.replicate, "ep_implementation": "all_to_all"} if missing else {}
    return DistributedConfig(
        fsdp_size=parallel.fsdp,
        tp_size=parallel.tensor,
        ep_size=parallel.expert,
        fsdp_mixed_precision=is_bfloat16,
        **newer,
    )


def check_heads(config: Any, parallel: ParallelConfig) -> None:
    """Raise `InvalidInputError` if processes cannot have as many heads each, by the config of a model that need not be
    loaded yet.
    """
    text = config.get_text_config()
    values = text.to_dict()
    heads = values.get("num_attention_heads")
    key_heads = values.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(key_heads, int):
        return  # a model without attention, or whose layers differ
    reason = find_bad_heads(heads, key_heads, parallel.sequence)
    if reason is not None:
        raise InvalidInputError(
            f"trainer.parallel.sequence must be another number for this model, got {parallel.sequence}: {reason}"
        )
    splits_keys = any(name.endswith("k_proj") for name in text.base_model_tp_plan or ())
    for name, number in {"heads": heads, "heads of keys": key_heads if splits_keys else 0}.items():
        if number % parallel.tensor:
            raise InvalidInputError(
                f"trainer.parallel.tensor must divide the number of the model's {name}, {number}, because each process "
                f"computes whole ones, got {parallel.tensor}: fsdp splits any model"
            )


def check_sharding(accelerator: Accelerator, model: Any, config: TrainerConfig) -> None:
    """Check that parameters are shared as `TrainerConfig.parallel` says, with settings that are exact beside it.

    Raises:
        InvalidInputError: accelerate shards, `model` is not loaded for `config.parallel`, there are more or fewer
            processes, or another setting does not go with it.
    """
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.FSDP):
        raise InvalidInputError(
            f"accelerator.distributed_type must be DDP's, got {kind.value}: set trainer.parallel.fsdp to the number of "
            "processes, and start them by torchrun"
        )
    parallel = accelerator.parallelism_config
    if parallel is not None and parallel.total_size != parallel.dp_replicate_size:
        raise InvalidInputError(
            f"accelerator.parallelism_config must be left out, got one of {parallel.total_size} processes: "
            "set trainer.parallel, by which transformers shards the model"
        )
    ours = config.parallel
    ours.check_processes(accelerator.num_processes)
    if ours.is_sharded != is_split(model):
        raise InvalidInputError(
            f"{type(model).__name__} must be {'' if ours.is_sharded else 'whole without '}loaded for trainer.parallel, "
            f"got {ours}: load it by from_pretrained(distributed_config=make_distributed_config(parallel))"
        )
    if ours.is_sharded:
        _check_features(model, config)


def _check_features(model: Any, config: TrainerConfig) -> None:
    """Refuse what was not made for these ways to share a model: each with the kinds of `ParallelConfig` that exclude
    it, of which the first in use is named, and why.
    """
    adapters = [name for name, _ in model.named_parameters() if "lora_" in name]
    has_dora = any("lora_magnitude_vector" in name for name in adapters)
    has_own_shards = has_tower(model) and _has_shards_beside_text(causal_lm(model))
    features = (
        ("a vision tower", has_tower(model), _SHARING_ROWS,
         "its parts are those of trainer.parallel.fsdp and .replicate"),
        ("a vision tower with shards of its own", has_own_shards, ("fsdp",),
         "it would be gathered by processes with images only"),
        ("a LoRA with DoRA", has_dora, ("fsdp", *_SPLITTING), "it needs the norms of whole matrices"),
        ("LoRA", bool(adapters), ("tensor",), "adapters are of whole matrices"),
        ("trainer.compile", config.compile, _SPLITTING, "compiled layers have no exchange"),
        ("trainer.router_loss_weight", config.router_loss_weight > 0, _SPLITTING,
         "choices of experts are counted by process"),
        ("trainer.reference_sync", config.reference_sync is not None, _SPLITTING,
         "parts of the reference are not updated"),
    )  # fmt: skip
    for name, is_used, kinds, reason in features:
        used = [kind for kind in kinds if getattr(config.parallel, kind) > 1]
        if is_used and used:
            raise InvalidInputError(f"{name} must be left out with trainer.parallel.{used[0]} above 1: {reason}")


def _has_shards_beside_text(model: Any) -> bool:
    """Whether a part of a vision tower is gathered when it runs, instead of in each pass."""
    text = {model, *model.get_decoder().modules(), *model.get_output_embeddings().modules()}
    return any(isinstance(part, FSDPModule) and part not in text for part in model.modules())


def is_split(module: nn.Module) -> bool:
    """Whether this process has parts of some parameters only."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def get_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_mesh(tensor: torch.Tensor) -> DeviceMesh | None:
    """The processes that have parts of a tensor; None if each has it whole."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def make_root(module: nn.Module) -> None:
    """Make `module` the outermost of FSDP2's modules in it, so that a pass gathers the next layer in time."""
    inner = [each for each in module.modules() if isinstance(each, FSDPModule)]
    if not inner:
        return
    reshard(module)
    for each in inner:
        state: Any = each._get_fsdp_state()
        state._is_root = None  # the model may have run before, and have been the outermost
    device = next(module.parameters()).device.type
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    outermost: Any = fully_shard(module, mesh=mesh)
    outermost._get_fsdp_state()._lazy_init()  # or the first inner module that runs would be the outermost
    for each in inner:
        _join_tied(each)


def _join_tied(module: FSDPModule) -> None:
    """Let FSDP2 gather a tied pair once, as it does one that is tied before it is sharded: from_pretrained ties later.

    Of a pair in one group, such as the embeddings of a model with a vision tower, FSDP2 has two copies where they are
    padded, and updates would change one of them only.
    """
    state: Any = module._get_fsdp_state()
    for group in state._fsdp_param_groups:
        first_by_parameter: dict[int, Any] = {}
        for each in list(group.fsdp_params):
            first = first_by_parameter.setdefault(id(each.sharded_param), each)
            if first is not each:
                first._module_info.shared_modules.append(each._module_info.module)
                first._module_info.shared_param_names.append(each._module_info.param_name)
                group.fsdp_params.remove(each)
                first.reset_sharded_param()  # to the copy that the parameter has


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to `max_norm`, and return their norm over all processes, with one norm for each mesh."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(get_mesh(parameter.grad), []).append(parameter)
    if len(by_mesh) <= 1:
        return float(gather_tensor(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))
    norms = [
        gather_tensor(torch.nn.utils.get_total_norm([each.grad for each in group if each.grad is not None]))
        for group in by_mesh.values()
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return float(norm)


@contextmanager
def adding_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Add the gradients of one backward pass to those of parameters that every process has whole.

    For tensor parallelism: transformers sums `grad` over the processes after each pass, which would sum that of
    earlier passes again.
    """
    before = {each: each.grad for each in parameters if each.requires_grad and not isinstance(each, DTensor)}
    for parameter in before:
        parameter.grad = None
    yield
    for parameter, gradient in before.items():
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def average_whole_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients of parameters that every process has whole, such as adapters, which FSDP2 leaves alone."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad.div_(torch.distributed.get_world_size())


def _make_group(size: int) -> torch.distributed.ProcessGroup:
    """The group of `size` processes, with numbers in sequence, that has this one. All processes call it."""
    make: Any = torch.distributed.new_subgroups
    own: torch.distributed.ProcessGroup = make(group_size=size)[0]
    return own


class SameRows:
    """The processes that compute the same rows, with a part of each matrix, or a part of the ids: each has rows of its
    own, and all of them compute those of all.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._group = _make_group(size) if size > 1 else None
        self._index = torch.distributed.get_rank() % size if size > 1 else 0

    @property
    def is_alone(self) -> bool:
        """Whether no other process computes the rows of this one."""
        return self._size == 1

    @property
    def group(self) -> torch.distributed.ProcessGroup:
        """These processes, if there are several."""
        assert self._group is not None, "a process that is alone has no group"
        return self._group

    @property
    def is_first(self) -> bool:
        """Whether this process counts what all of them compute."""
        return self._index == 0

    def share(self, mine: Sequence[T]) -> tuple[list[T], range]:
        """The values of all of these processes, and which of them are those of this one."""
        everyone: list[Any] = [None] * self._size
        torch.distributed.all_gather_object(everyone, list(mine), group=self._group)
        before = sum(len(values) for values in everyone[: self._index])
        return list(chain(*everyone)), range(before, before + len(mine))


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, between passes. After a pass without backward the outermost ones are still gathered,
    and norm and head, which FSDP2 has in one group, after a pass that does not call the head.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            state._modules_to_run_forward.clear()
            state._state_ctx.iter_forward_root = None
            for each in (state, *state._fsdp_param_groups):
                each._training_state = TrainingState.IDLE
            part.reshard()


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from all processes if it is sharded; else the tensor itself, detached."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    with on_device(tensor.device):
        return tensor.full_tensor()


def shard_like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the part of a whole `tensor` that this process has of `target`. Nothing is communicated."""
    if not isinstance(target, DTensor):
        return tensor
    whole = tensor.to(target.device)
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` the current device of this thread, which NCCL and FSDP use; in a new thread it is the first GPU."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def gather_rest(*tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Gather the remaining tensors, for which the other processes wait."""
    deque(chain(*tensors), maxlen=0)


def raise_together(error: Exception | None) -> None:
    """Raise on every process if one has an error: there the error itself, elsewhere a `TrainingError` with its text."""
    errors = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for process, message in enumerate(errors):
        if message is not None:
            raise TrainingError(f"process {process} failed: {message}")


@contextmanager
def fail_together(device: torch.device = _CPU) -> Iterator[None]:
    """Run the block in every process; if it fails in one, raise on all, as `raise_together` does.

    For what may fail in one process only, such as writing a file: the others would wait for it forever. Nothing in the
    block may wait for other processes. `device` is that of the process, needed in threads.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    with on_device(device):
        raise_together(failure)
