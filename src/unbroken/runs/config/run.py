"""The whole config of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.errors import InvalidInputError
from unbroken.runs.algorithms import Algorithm, Pairing, make_objective
from unbroken.runs.config.engine import EngineConfig, EngineKind
from unbroken.runs.config.evaluation import EvaluationConfig
from unbroken.runs.config.model import LoraConfig, ModelSettings, Precision, RendererConfig
from unbroken.runs.config.outputs import CheckpointConfig, ExportConfig, RolloutLogConfig, TimelineConfig
from unbroken.runs.config.rollouts import RolloutConfig, SessionConfig
from unbroken.runs.profiling import parse_steps
from unbroken.runs.python_files import FunctionName
from unbroken.training.config import LoopConfig, LoraUpdates, TrackerConfig, TrainerConfig
from unbroken.training.loss_config import OverlongConfig

if TYPE_CHECKING:
    from unbroken.training.objective.online_dpo import OnlineDpo
    from unbroken.training.objective.policy_gradient import PolicyGradient

DAPO_REPLACEMENTS = 3.0
"""`loop.max_replacements` with algorithm dapo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of every run."""

    output: Path
    """Folder of the run: metrics, evaluations, checkpoints, models. The same command continues the run in it."""
    seed: int = 0
    """Seed of the problems, their order and the sampling; `trainer.seed` is for the minibatches."""
    algorithm: Algorithm = Algorithm.GRPO
    advantages: FunctionName | None = None
    """Instead of the algorithm's: grpo, dr_grpo, rloo, batch_scaled_grpo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, turn_grpo, turn_returns, or your own, written module:function or file.py:function."""
    loss: FunctionName | None = None
    """Instead of the algorithm's: clipped, gspo, gspo_token, cispo, sapo, or your own, written as `advantages`."""
    pairs: Pairing = Pairing.OUTSIDE_IN
    """For online_dpo."""
    curriculum: FunctionName | None = None
    """What makes the curriculum, which chooses the next problem by the results so far: module:function or
    file.py:function (docs/training.md). None: problems in their order."""
    precision: Precision = Precision.FLOAT32
    """The type in which the model's layers are computed; weights, logits and losses are always float32."""
    model_settings: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraConfig | None = None
    images: bool | None = None
    """Whether the model takes images, in prompts and from tools; none: if prompts of the data have images, or if
    transformers has no text model of its kind."""
    renderer: RendererConfig = field(default_factory=RendererConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    sessions: SessionConfig = field(default_factory=SessionConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    loop: LoopConfig
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    rollout_log: RolloutLogConfig = field(default_factory=RolloutLogConfig)
    timeline: TimelineConfig = field(default_factory=TimelineConfig)
    log_completions: int = 0
    """Completions of each step that are shown in a table, and logged to trackers that have tables."""
    log_unique_prompts: bool = False
    """Whether that table has each prompt once, with the first of its completions."""
    trackers: TrackerConfig = field(default_factory=TrackerConfig)
    profile_steps: str | None = None
    """Steps to profile with torch.profiler, FIRST:STOP: 3:5 for the steps 3 and 4; a trace in `profiles`."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InvalidInputError(f"seed must be >= 0, got {self.seed}")
        if self.log_completions < 0:
            raise InvalidInputError(f"log_completions must be >= 0, got {self.log_completions}")
        if (steps := parse_steps(self.profile_steps)) and steps[0] >= self.loop.num_steps:
            raise InvalidInputError(
                f"profile_steps must begin before step {self.loop.num_steps} (loop.num_steps), got {self.profile_steps}"
            )
        if self.trainer.dpo is not None and self.algorithm is not Algorithm.ONLINE_DPO:
            raise InvalidInputError(
                f"trainer.dpo must be left out with algorithm {self.algorithm}, got {self.trainer.dpo}"
            )
        if self.loop.max_staleness > 0 and self.engine.kind is EngineKind.COLOCATED:
            raise InvalidInputError(
                "loop.max_staleness must be 0 with engine.kind colocated, which sleeps while a step is trained, got "
                f"{self.loop.max_staleness}: take started or server, on GPUs of their own"
            )
        if self.rollouts.own_process and self.engine.kind not in (EngineKind.STARTED, EngineKind.SERVER):
            raise InvalidInputError(
                f"rollouts.own_process must be false with engine.kind {self.engine.kind}, whose engine is in the "
                "trainer's process, got true: take started or server"
            )
        self.evaluation.check_engine(self.engine)
        if self.model_settings.dtype is not Precision.FLOAT32 and self.lora is None:
            raise InvalidInputError(
                f"model_settings.dtype must be float32 without lora, got {self.model_settings.dtype}: smaller types "
                "round updates away; precision = bfloat16 computes the layers in it"
            )
        if self.export.merged and self.lora is None:
            raise InvalidInputError("export.merged must be false without lora, got true: there is nothing to merge")
        if self.trainer.lora_updates is LoraUpdates.ADAPTER and self.lora is None:
            raise InvalidInputError("trainer.lora_updates must be merged without lora, got adapter")
        objective = self.objective
        objective.check_config(self.training)
        if self.loop.replaces_groups and not objective.can_lack_variance(self.training):
            raise InvalidInputError(
                "loop.max_replacements must be 0 where groups of equal rewards are trained on, got "
                f"{self.loop.max_replacements:g}: with trainer.kl_weight above 0, reinforce_plus_plus or online_dpo "
                "no group is left out by itself"
            )
        if self.rollouts.group_size < (least := objective.min_group_size):
            raise InvalidInputError(
                f"rollouts.group_size must be >= {least}, got {self.rollouts.group_size}: a trajectory is compared "
                "with the others in its group (only reinforce_plus_plus compares those of all problems)"
            )

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the adapters that engines get; None if they get whole weights."""
        return self.lora.rank if self.lora is not None and self.trainer.lora_updates is LoraUpdates.ADAPTER else None

    @property
    def training(self) -> TrainerConfig:
        """`trainer`, with what the algorithm needs and with the correction of `loop.max_staleness`, unless it says
        otherwise.
        """
        trainer, most = self.trainer, self.max_sampled_tokens
        if self.loop.max_staleness > 0:
            trainer = self.objective.for_stale_rows(trainer)
        if self.algorithm is Algorithm.DAPO and trainer.overlong is None:
            trainer = replace(trainer, overlong=OverlongConfig(max_tokens=most, buffer=max(most // 5, 1)))
        if self.algorithm is Algorithm.DR_GRPO and (trainer.normalization or trainer.max_trajectory_tokens) is None:
            trainer = replace(trainer, max_trajectory_tokens=most)
        return trainer

    @property
    def max_sampled_tokens(self) -> int:
        """How many ids a rollout can sample in all of its turns."""
        rollouts = self.rollouts
        return min(rollouts.limits.max_tokens, self.max_turns * rollouts.sampling.max_tokens)

    @property
    def max_turns(self) -> int:
        """How many turns a rollout can have."""
        return self.rollouts.limits.max_turns

    @property
    def chosen_loop(self) -> LoopConfig:
        """`loop`, which with algorithm dapo replaces groups of equal rewards unless it says otherwise."""
        if self.algorithm is not Algorithm.DAPO or self.loop.max_replacements is not None:
            return self.loop
        replaces = self.objective.can_lack_variance(self.training)
        return replace(self.loop, max_replacements=DAPO_REPLACEMENTS if replaces else 0)

    @property
    def objective(self) -> PolicyGradient | OnlineDpo:
        """What the trainer minimises, by `algorithm`, `advantages`, `loss` and `pairs`."""
        return make_objective(self.algorithm, advantages=self.advantages, loss=self.loss, pairs=self.pairs)
