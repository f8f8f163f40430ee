"""TRL's weights for our engines: their version, whether the engines lack them, and the tensors to publish."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from unbroken.errors import InvalidInputError
from unbroken.training.model.adapters import check_adapters
from unbroken.training.model.weights import gather_weights

if TYPE_CHECKING:
    import torch
    from trl import GRPOTrainer


class WeightVersions:
    """Tracks the version that the engines have, and whether the trainer has made a step since."""

    def __init__(self) -> None:
        self.policy_version = 0
        self._published: tuple[Any, int] | None = None

    def is_stale(self, trainer: GRPOTrainer) -> bool:
        """Whether the engines lack the trainer's newest weights; true before the first publication.

        Step numbers belong to one run: `Trainer.train` begins each run with a new state.
        """
        if self._published is None:
            return True
        state, step = self._published
        return state is not trainer.state or step != trainer.state.global_step

    def next_version(self, current: int) -> int:
        """One more than the highest version that any process or its engine has; the same in every process."""
        versions: list[int] = gather_object([max(current, self.policy_version)])
        return max(versions) + 1

    def note_published(self, trainer: GRPOTrainer, policy_version: int) -> None:
        """Note that the engines have the trainer's current weights, as this version."""
        self._published = (trainer.state, trainer.state.global_step)
        self.policy_version = policy_version


def trained_weights(trainer: GRPOTrainer) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that TRL trains, under the names of an engine's model; LoRA adapters are merged.

    Raises:
        InvalidInputError: parameters are sharded, or adapters cannot be merged exactly.
    """
    sharded = {"FSDP": trainer.is_fsdp_enabled, "DeepSpeed": trainer.is_deepspeed_enabled}
    found = [name for name, there in sharded.items() if there]
    if found:
        raise InvalidInputError(
            f"the trainer's model must be whole in every process, but {found[0]} shards it: use DDP, or unbroken's own "
            "trainer"
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    check_adapters(model)
    return gather_weights(model)
