"""What a run writes besides its metrics: checkpoints, models, rollouts and timelines."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.errors import InvalidInputError
from unbroken.runs.config.model import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, from which the same command continues the run."""

    every: int = 20
    """Steps between two checkpoints. The first step and the last have one too."""
    every_s: float | None = 600.0
    """Seconds after which there is one all the same, if a step ends then; none: never."""
    num_kept: int = 2
    """How many of the newest checkpoints are kept."""

    def __post_init__(self) -> None:
        for name in ("every", "num_kept"):
            if (value := getattr(self, name)) < 1:
                raise InvalidInputError(f"{name} must be >= 1, got {value}")
        if self.every_s is not None and not self.every_s > 0:
            raise InvalidInputError(f"every_s must be > 0 or none, got {self.every_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """The models that come out, for transformers and vLLM: `final` after the last step, and more by choice."""

    every: int = 0
    """Steps between two models in `models/step-N`; 0 for none."""
    num_kept: int | None = None
    """How many of the newest of them are kept; none: all."""
    merged: bool = False
    """With LoRA: whole models, with the adapters merged. Otherwise the adapters alone, as PEFT writes them."""
    dtype: Precision | None = None
    """The type of the weights in the files; none: that in which they are trained, exactly."""
    shard_gb: float = 5.0
    """Maximum size of a safetensors file, in 10^9 bytes."""
    push_to_hub: str | None = None
    """A repository on the Hugging Face Hub that gets the final model, such as NAME/MODEL; it is created if missing."""
    private: bool = False
    """Whether a repository that is created is private."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise InvalidInputError(f"every must be >= 0, got {self.every}")
        if self.num_kept is not None and self.num_kept < 1:
            raise InvalidInputError(f"num_kept must be >= 1 or none, got {self.num_kept}")
        if not self.shard_gb > 0:
            raise InvalidInputError(f"shard_gb must be > 0, got {self.shard_gb}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLogConfig:
    """A sample of the rollouts in `rollouts/`: ids, logprobs of both sides, messages, rewards (docs/rollouts.md)."""

    groups: int | None = 1
    """Groups of a step that each process keeps, evenly spread; none: all; 0: no files."""
    every: int = 1
    """Steps from one that is kept to the next."""
    trainer_logprobs: bool = True
    """Whether the trainer scores them before the step, which costs a forward pass over the groups that are kept."""

    def __post_init__(self) -> None:
        if self.groups is not None and self.groups < 0:
            raise InvalidInputError(f"groups must be >= 0 or none, got {self.groups}")
        if self.every < 1:
            raise InvalidInputError(f"every must be >= 1, got {self.every}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineConfig:
    """A file in `timeline/` for each process, with what it did when, for https://ui.perfetto.dev."""

    write: bool = True
    """Whether there are such files."""
    max_mb: float | None = 64.0
    """Maximum size of the files of a process, in 10^6 bytes, of which the newest are kept; none: no maximum."""

    def __post_init__(self) -> None:
        if self.max_mb is not None and not self.max_mb > 0:
            raise InvalidInputError(f"max_mb must be > 0 or none, got {self.max_mb}")

    @property
    def max_bytes(self) -> int | None:
        """`max_mb` in bytes."""
        return None if self.max_mb is None else int(self.max_mb * 1e6)
