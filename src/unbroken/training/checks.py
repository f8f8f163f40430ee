"""What the trainer refuses before it computes anything: rows, models and accelerators that it cannot follow exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from unbroken.errors import InvalidInputError, InvariantError
from unbroken.training.images import RowImages
from unbroken.types import TrainingSample


def check_rows(samples: Sequence[TrainingSample], *, vocab_size: int, images: RowImages | None) -> None:
    """Check that each row can be scored.

    Raises:
        InvalidInputError: a row has images that are not taken, an id outside the vocabulary, nothing sampled, or
            another temperature than the first.
        InvariantError: a row begins with a sampled id, or has other ids for an image than the processor makes.
    """
    for index, sample in enumerate(samples):
        row = f"samples[{index}]"
        if not sample.sampled_mask.any():
            raise InvalidInputError(f"{row} has no sampled id: leave the row out")
        if sample.images and images is None:
            raise InvalidInputError(
                f"{row} has {len(sample.images)} images: the trainer takes text only, unless it is given the "
                "model's image processor as `images`"
            )
        if sample.temperature != samples[0].temperature:
            raise InvalidInputError(
                f"{row} was sampled at temperature {sample.temperature} and samples[0] at "
                f"{samples[0].temperature}: the rows of one call must share one temperature"
            )
        if sample.token_ids.max() >= vocab_size:
            raise InvalidInputError(
                f"{row}.token_ids holds {sample.token_ids.max()}, and the model's vocabulary ends at "
                f"{vocab_size - 1}: is it the model that sampled?"
            )
        if sample.sampled_mask[0]:
            raise InvariantError(f"{row} begins with a sampled id: without a prompt it has no logprob (I2)")
        if images is not None:
            images.check(sample, name=row)


def check_trainable(samples: Sequence[TrainingSample], *, policy_version: int) -> None:
    """Check that each row can be trained on by weights of this version.

    Raises:
        InvalidInputError: a row has no id in its loss mask.
        InvariantError: a row was sampled by newer weights.
    """
    for index, sample in enumerate(samples):
        if not sample.loss_mask.any():
            raise InvalidInputError(f"samples[{index}] has no id in its loss_mask: leave the row out")
        if (newest := int(sample.policy_versions.max())) > policy_version:
            raise InvariantError(
                f"samples[{index}] holds ids sampled by policy version {newest}, and the trainer's weights are "
                f"version {policy_version}: was the engine given weights from elsewhere? (I6)"
            )


def check_accelerator(accelerator: Accelerator) -> None:
    """Raise `InvalidInputError` if the accelerator accumulates gradients or scales the loss by itself."""
    if accelerator.gradient_accumulation_steps != 1:
        raise InvalidInputError(
            f"accelerator.gradient_accumulation_steps must be 1, got {accelerator.gradient_accumulation_steps}: the "
            "trainer splits a step into passes itself and weighs every token the same"
        )
    if accelerator.scaler is not None:
        raise InvalidInputError("accelerator.mixed_precision must not be fp16, which scales the loss: use bf16 or no")


def check_parameters(model: Any) -> None:
    """Raise `InvalidInputError` unless all trainable parameters are float32."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise InvalidInputError(
                f"{name} is {parameter.dtype}, and trainable parameters must be float32: smaller types round the "
                "updates of a small learning rate away. Load the model with dtype=torch.float32"
            )
