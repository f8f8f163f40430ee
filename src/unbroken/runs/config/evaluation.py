"""Evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.errors import InvalidInputError
from unbroken.runs.config.engine import EngineConfig, EngineKind
from unbroken.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Evaluations before the first step, after the last, and by choice between, in `evaluation.jsonl`."""

    num_problems: int = 0
    """Problems of a set that has no number of its own, the same in every evaluation; 0 for no evaluation."""
    num_samples: int = 1
    """Rollouts of each problem, for pass@k and a smaller error."""
    every: int = 0
    """Steps between two evaluations; 0: only before the first step and after the last. With it, `best` is the model
    of the best evaluation after at least one step."""
    best_set: str | None = None
    """The set whose mean reward decides which model is best; none: the first."""
    pass_reward: float = 1.0
    """A rollout passes, for pass@k, if its reward is at least this."""
    sampling: SamplingParams | None = None
    """How to sample in evaluations, without restriction; if left out, as in `rollouts`."""
    engine: EngineConfig | None = None
    """Servers for evaluations alone (kind server), which get each version that is evaluated while training goes on;
    if left out, the training's engine."""

    def __post_init__(self) -> None:
        for name, least in (("num_problems", 0), ("num_samples", 1), ("every", 0)):
            if (value := getattr(self, name)) < least:
                raise InvalidInputError(f"{name} must be >= {least}, got {value}")
        if self.engine is not None and self.engine.kind is not EngineKind.SERVER:
            raise InvalidInputError(
                f"engine.kind must be server for evaluations, got {self.engine.kind}: start one with `unbroken serve`, "
                "or leave engine out to evaluate on the training's"
            )

    def check_engine(self, training: EngineConfig) -> None:
        """Raise `InvalidInputError` unless the evaluations' servers are others than the training's."""
        if self.engine is None:
            return
        if shared := sorted(set(self.engine.urls) & set(training.urls)):
            raise InvalidInputError(
                f"evaluation.engine.urls must be other servers than engine.urls, got {shared} in both: they would get "
                "weights for both. Leave evaluation.engine out to evaluate on the training's"
            )
        if self.engine.weights_dir is not None and self.engine.weights_dir == training.weights_dir:
            raise InvalidInputError(
                "evaluation.engine.weights_dir must be another folder than engine.weights_dir, because each removes "
                f"old versions, got {self.engine.weights_dir} for both"
            )
