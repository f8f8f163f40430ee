"""Checks of rows, units, models, engines and accelerators before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from unbroken.engines.base import Engine
from unbroken.errors import InvalidInputError, InvariantError
from unbroken.training.config import LoraUpdates, Reference, SharedPrefixes, TrainerConfig
from unbroken.training.model.adapters import check_adapter_alone, check_adapters, check_base
from unbroken.training.model.sharding import check_sharding, get_part
from unbroken.training.model.weights import gather_weights
from unbroken.training.objective.base import Objective
from unbroken.training.teachers import RowScorer, Teachers
from unbroken.types import Numerics, TrainingSample

_GROUP_SIZE = 4
"""Of the groups that functions of the user's are tried on; a trainer knows of none."""


def check_parts(
    model: Any,
    config: TrainerConfig,
    objective: Objective[Any],
    *,
    accelerator: Accelerator,
    has_images: bool,
    reference: Any | Reference | None,
) -> None:
    """Check that a trainer can be made of these, before anything is changed.

    Raises:
        InvalidInputError: the config has settings that the objective does not use, a function of the user's fails or
            returns another shape, the accelerator accumulates gradients or scales the loss, trainable parameters are
            not float32, the reference is missing, not used or not a copy, or the sharding or the adapters are not
            supported.
    """
    objective.check_config(config)
    objective.try_functions(config, group_size=_GROUP_SIZE, device=accelerator.device)
    _check_accelerator(accelerator)
    if config.numerics is Numerics.EXACT and accelerator.mixed_precision == "bf16":
        if config.gradient_checkpointing:
            raise InvalidInputError("numerics must be fast with gradient_checkpointing in bfloat16, got exact")
        if has_images:
            raise InvalidInputError("numerics must be fast with images, got exact: text is exact with images = false")
        if config.lora_updates is LoraUpdates.ADAPTER:
            raise InvalidInputError("numerics must be fast with lora_updates adapter in bfloat16, got exact")
        from unbroken.engines.vllm.numerics import share_kernels

        share_kernels()
    check_adapters(model)
    if config.lora_updates is LoraUpdates.ADAPTER:
        check_adapter_alone(model)
    _check_parameters(model)
    check_sharding(accelerator, model, config)
    if config.parallel.sequence > 1 and has_images:
        raise InvalidInputError(
            f"images must be left out with trainer.parallel.sequence = {config.parallel.sequence}: their places would "
            "be in parts of several processes"
        )
    is_needed = objective.needs_reference(config)
    check_reference(reference, model, is_needed=is_needed, follows=config.reference_sync is not None)


def check_trainable(samples: Sequence[TrainingSample], *, policy_version: int) -> None:
    """Check that weights of this version can train on each row.

    Raises:
        InvalidInputError: a row has no id in its loss mask.
        InvariantError: a row was sampled by newer weights.
    """
    for index, sample in enumerate(samples):
        if not sample.loss_mask.any():
            raise InvalidInputError(f"samples[{index}] has no id in its loss_mask: omit the row")
        if (newest := int(sample.policy_versions.max())) > policy_version:
            raise InvariantError(
                f"samples[{index}] has ids sampled by policy version {newest}, and the trainer's weights are "
                f"version {policy_version}: did the engine get weights from elsewhere? (I6)"
            )


def check_lengths(units: Sequence[Sequence[TrainingSample]], *, max_trajectory_tokens: int | None) -> None:
    """Raise `InvalidInputError` if a unit has more loss tokens than `max_trajectory_tokens`, over all of its rows."""
    if max_trajectory_tokens is None:
        return
    for index, rows in enumerate(units):
        num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        if num_tokens > max_trajectory_tokens:
            raise InvalidInputError(
                f"units[{index}] has {num_tokens} loss tokens, and TrainerConfig.max_trajectory_tokens, which the loss "
                f"is divided by, is {max_trajectory_tokens}: raise it to the maximum that a trajectory may sample"
            )


def check_engine(engine: Engine, *, vocab_size: int, policy_version: int) -> None:
    """Raise `InvalidInputError` unless an engine has the trainer's vocabulary and no newer weights."""
    check_vocabulary(engine, vocab_size)
    if engine.policy_version > policy_version:
        raise InvalidInputError(
            f"the engine has policy version {engine.policy_version} and the trainer {policy_version}: the weights are "
            "of another run, or newer than the newest checkpoint. Restart the engine with its first weights"
        )


def check_vocabulary(engine: Engine, vocab_size: int) -> None:
    """Raise `InvalidInputError` unless the engine has as many ids as the trained model."""
    if engine.vocab_size != vocab_size:
        raise InvalidInputError(
            f"the engine's vocabulary has {engine.vocab_size} ids and the trainer's model {vocab_size}: they have "
            "different models. Start the engine with the one that is trained"
        )


def check_units(units: Sequence[Any], objective: Objective[Any]) -> None:
    """Raise `InvalidInputError` unless all units are of the objective's type."""
    for index, unit in enumerate(units):
        if not isinstance(unit, objective.unit_type):
            kinds = objective.unit_type if isinstance(objective.unit_type, tuple) else (objective.unit_type,)
            raise InvalidInputError(
                f"units[{index}] must be a {' or '.join(kind.__name__ for kind in kinds)} with "
                f"{type(objective).__name__}, got {type(unit).__name__}"
            )


def check_reference(reference: Any | None, model: Any, *, is_needed: bool, follows: bool = False) -> None:
    """Raise `InvalidInputError` if a reference is missing or not used, shares a parameter with `model`, has another
    vocabulary, or is `Reference.BASE` for a model without adapters; or if it `follows` (`ReferenceSync`) and has not
    the weights of `model`.
    """
    if (reference is not None) != is_needed:
        raise InvalidInputError(
            "reference must be a model or Reference.BASE exactly if the objective needs one (OnlineDpo, or "
            f"TrainerConfig.kl_weight above 0), got {type(reference).__name__} for one that "
            f"{'needs' if is_needed else 'does not need'} it"
        )
    if reference is None:
        return
    if follows:
        _check_copy(reference, model)
    if reference is Reference.BASE:
        check_base(model)
        return
    _check_not_shared(reference, model)
    sizes = [len(each.get_input_embeddings().weight) for each in (model, reference)]
    if sizes[0] != sizes[1]:
        raise InvalidInputError(f"reference must have the model's vocabulary of {sizes[0]} ids, got {sizes[1]}")


def check_teachers(teachers: Teachers | None, model: Any, config: TrainerConfig) -> None:
    """Raise `InvalidInputError` if teachers are missing or not used, one shares a parameter with `model`, or
    `Teachers.top_k` is not for it or the config.
    """
    if (teachers is not None) != (config.teacher_weight is not None):
        raise InvalidInputError(
            "teachers must be given exactly with TrainerConfig.teacher_weight, got "
            f"{None if teachers is None else sorted(teachers.models)} with {config.teacher_weight}"
        )
    for teacher in () if teachers is None else teachers.models.values():
        if not isinstance(teacher, RowScorer):
            _check_not_shared(teacher, model, name="a teacher")
    if teachers is not None and teachers.top_k:
        _check_top_k(teachers.top_k, model, config)


def _check_top_k(top_k: int, model: Any, config: TrainerConfig) -> None:
    """Raise `InvalidInputError` for what cannot be scored at several ids of each place, or beyond the vocabulary."""
    size: int = model.config.get_text_config().vocab_size
    has_parts = config.parallel.num_same_rows > 1 or config.parallel.is_sharded
    for name, value, is_refused, rule in (
        ("shared_prefixes", config.shared_prefixes, config.shared_prefixes is SharedPrefixes.ALWAYS, "auto or never"),
        ("parallel", config.parallel, has_parts, "left out"),
        ("top_k", top_k, top_k > size, f"<= {size}, all ids,"),
    ):
        if is_refused:
            raise InvalidInputError(f"{name} must be {rule} with a teacher's most likely ids (top_k), got {value}")


def _check_copy(reference: Any, model: Any) -> None:
    """Raise `InvalidInputError` unless a reference has the model's weights, by name and shape."""
    is_base = reference is Reference.BASE
    ours = {name: tensor.shape for name, tensor in gather_weights(model)}
    if is_base or ours != {name: weight.shape for name, weight in reference.named_parameters()}:
        raise InvalidInputError(
            "reference must be a copy of the model (with adapters, of its base) for TrainerConfig.reference_sync, got "
            f"{reference if is_base else type(reference).__name__}"
        )


def _check_not_shared(reference: Any, model: Any, name: str = "reference") -> None:
    """Raise `InvalidInputError` if a reference or a teacher has a parameter in common with the model."""
    trained = {get_part(parameter).data_ptr() for parameter in model.parameters()}
    for own, parameter in reference.named_parameters():
        if get_part(parameter).data_ptr() in trained:
            raise InvalidInputError(
                f"{name} must be a copy, and shares {own} with the model: it would be trained too, and the "
                "distance to it would stay 0"
            )


def _check_accelerator(accelerator: Accelerator) -> None:
    """Raise `InvalidInputError` for an accelerator that the trainer cannot use.

    It must have joined the other processes, and neither accumulate gradients nor scale the loss by itself.
    """
    check_num_processes(accelerator.num_processes)
    if accelerator.gradient_accumulation_steps != 1:
        raise InvalidInputError(
            f"accelerator.gradient_accumulation_steps must be 1, got {accelerator.gradient_accumulation_steps}: the "
            "trainer splits a step into passes itself and weighs every token the same"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise InvalidInputError(
            f"accelerator.mixed_precision must be bf16 or no, got {accelerator.mixed_precision}: fp16 scales the loss, "
            "and fp8 is untested"
        )


def check_num_processes(num_processes: int) -> None:
    """Raise `InvalidInputError` if a launcher started more processes than accelerate has joined.

    Each would train by itself, on all rows, and write the same files. accelerate joins processes without GPUs only on
    request, and reports one process otherwise.
    """
    world_size = os.environ.get("WORLD_SIZE", "")
    if world_size.isdecimal() and int(world_size) > num_processes:
        raise InvalidInputError(
            f"WORLD_SIZE is {world_size}, and accelerate has {num_processes} "
            f"{'process' if num_processes == 1 else 'processes'}: set ACCELERATE_USE_CPU=true (or make "
            "Accelerator(cpu=True)) to train in several processes on a CPU, or unset WORLD_SIZE for one process"
        )


def _check_parameters(model: Any) -> None:
    """Raise `InvalidInputError` unless there are trainable parameters and all of them are float32."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidInputError(
            f"{type(model).__name__} must have a parameter that trains, and none has requires_grad: load an adapter "
            "with PeftModel.from_pretrained(..., is_trainable=True)"
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise InvalidInputError(
                f"{name} is {parameter.dtype}, and trainable parameters must be float32: smaller types round the "
                "updates of a small learning rate away. Load the model with dtype=torch.float32; to compute in "
                "bfloat16, give the trainer Accelerator(mixed_precision='bf16')"
            )
