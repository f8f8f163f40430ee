"""The settings of every run, a small config for each part. A recipe extends `RunConfig` with its own settings.

@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    output: Path = Path("runs/mine")
    loop: LoopConfig = LoopConfig(num_steps=50)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from unbroken.engines.transformers import TransformersEngineConfig
from unbroken.errors import InvalidInputError
from unbroken.rendering.base import HistoryPolicy
from unbroken.rollout.limits import Limits
from unbroken.training.config import LoopConfig, TrainerConfig
from unbroken.training.metrics.trackers import TrackerConfig
from unbroken.training.objective.advantages import grpo_advantages, rloo_advantages
from unbroken.training.objective.losses import LOSSES
from unbroken.training.objective.online_dpo import OnlineDpo
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.objective.preferences import best_and_worst, outside_in
from unbroken.types import SamplingParams, check_reproducible


class Algorithm(StrEnum):
    """How rewards are turned into a loss."""

    GRPO = "grpo"
    """The advantage is the reward minus the group's mean, divided by the group's standard deviation."""
    RLOO = "rloo"
    """The advantage is the reward minus the mean of the other rewards in the group."""
    ONLINE_DPO = "online_dpo"
    """DPO on pairs of a better and a worse trajectory of a group, with the run's first model as the reference."""


class Pairing(StrEnum):
    """How online DPO pairs the trajectories of a group."""

    BEST_AND_WORST = "best_and_worst"
    """One pair: the best and the worst."""
    OUTSIDE_IN = "outside_in"
    """The best with the worst, the second best with the second worst, and so on while their rewards differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The rollouts of one step."""

    problems_per_step: int = 16
    """Groups in a step, over all processes."""
    group_size: int = 8
    """Trajectories of one problem, whose rewards are compared."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Only the temperature may change the distribution: top-k, top-p, min-p, penalties and structured output are
    refused, because the trainer computes logprobs without them."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.problems_per_step < 1:
            raise InvalidInputError(f"problems_per_step must be >= 1, got {self.problems_per_step}")
        if self.group_size < 2:
            raise InvalidInputError(
                f"group_size must be >= 2, got {self.group_size}: a trajectory is compared with the others in its group"
            )
        check_reproducible(self.sampling, whose="the trainer's")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA adapters, which are trained instead of the whole model; engines get merged weights."""

    rank: int = 16
    alpha: float = 32.0
    """The adapters are scaled by alpha / rank."""
    modules: tuple[str, ...] = ()
    """Names of the modules to adapt, such as q_proj,v_proj; empty: all linear layers."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise InvalidInputError(f"rank must be >= 1 and alpha > 0, got {self.rank} and {self.alpha}")


class Precision(StrEnum):
    """A type of the model's layers."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererConfig:
    """How messages become token ids; see docs/renderers.md."""

    name: str = "auto"
    """auto: the model's own chat template; pkg:NAME: a renderer of the package `renderers`."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, e.g. {enable_thinking = false}."""
    history: HistoryPolicy = HistoryPolicy.EXACT
    parser: str | None = None
    """The format of completions, instead of the one found in the template."""


class EngineKind(StrEnum):
    """Where rollouts are sampled."""

    EMBEDDED = "embedded"
    """The transformers engine, in the trainer's process, on a copy of the model."""
    COLOCATED = "colocated"
    """vLLM, started by the trainer's process; it sleeps during each step, which gets its GPU memory."""
    STARTED = "started"
    """`unbroken serve` on the model, in its own process, started and ended with the run."""
    SERVER = "server"
    """Servers that run already, at `urls`."""


class WeightTransport(StrEnum):
    """How servers get new weights."""

    FILES = "files"
    """Through files in a folder that trainer and servers share."""
    BROADCAST = "broadcast"
    """From the trainer to all workers at once, over NCCL or gloo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Where rollouts are sampled, and how new weights get there."""

    kind: EngineKind = EngineKind.EMBEDDED
    embedded: TransformersEngineConfig = field(default_factory=TransformersEngineConfig)
    vllm_options: tuple[str, ...] = ()
    """For colocated: options of vLLM, e.g. ["--gpu-memory-utilization", "0.5", "--max-model-len", "2048"]."""
    serve_options: tuple[str, ...] = ()
    """For started: options of `unbroken serve`, e.g. ["--engine", "vllm", "--max-model-len", "2048"]."""
    urls: tuple[str, ...] = ()
    """For server: the servers' addresses."""
    api_key_file: Path | None = None
    """A file with the servers' API key, if they need one."""
    wait_s: float = 600.0
    """How long to wait at the start for servers that do not answer yet, or for the started one to serve;
    `loop.outages` is for later."""
    publish_timeout_s: float = 600.0
    """For servers: how long one may take to load new weights; after that it counts as failed."""
    transport: WeightTransport = WeightTransport.FILES
    weights_dir: Path | None = None
    """For server with files: the folder that the servers were started with as --weights-dir."""
    host: str = "127.0.0.1"
    """For broadcast: an address of this machine that the servers' machines can reach."""

    def __post_init__(self) -> None:
        is_server = self.kind is EngineKind.SERVER
        if is_server != bool(self.urls):
            raise InvalidInputError(f"urls must be given exactly with kind server, got {self.urls} with {self.kind}")
        if (is_server and self.transport is WeightTransport.FILES) != (self.weights_dir is not None):
            raise InvalidInputError(
                f"weights_dir must be given exactly with kind server and transport files, got {self.weights_dir} with "
                f"{self.kind} and {self.transport}: it is the folder of `unbroken serve --weights-dir`"
            )
        if not self.wait_s >= 0:
            raise InvalidInputError(f"wait_s must be >= 0, got {self.wait_s}")
        if not self.publish_timeout_s > 0:
            raise InvalidInputError(f"publish_timeout_s must be > 0, got {self.publish_timeout_s}")
        if self.vllm_options and self.kind is not EngineKind.COLOCATED:
            raise InvalidInputError(f"vllm_options must be left out with kind {self.kind}, got {self.vllm_options}")
        if self.serve_options and self.kind is not EngineKind.STARTED:
            raise InvalidInputError(f"serve_options must be left out with kind {self.kind}, got {self.serve_options}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, from which the same command continues the run."""

    every: int = 1
    """Steps between two checkpoints. With servers it must be 1: they refuse weights older than theirs."""
    num_kept: int = 2
    """How many of the newest checkpoints are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """The evaluation before the first step and after the last, in `evaluation.jsonl`."""

    num_problems: int = 0
    """Problems, rolled out once each, the same before and after; 0 for no evaluation."""
    sampling: SamplingParams | None = None
    """How to sample in the evaluation, without restriction; if left out, as in `rollouts`."""

    def __post_init__(self) -> None:
        if self.num_problems < 0:
            raise InvalidInputError(f"num_problems must be >= 0, got {self.num_problems}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of every run."""

    output: Path
    """Folder of the run: metrics, evaluations, checkpoints. The same command continues the run in it."""
    seed: int = 0
    """Seed of the problems, their order and the sampling; `trainer.seed` is for the minibatches."""
    algorithm: Algorithm = Algorithm.GRPO
    loss: str = "clipped"
    """The policy loss of grpo and rloo, by its name in `training/objective/losses.py`."""
    pairs: Pairing = Pairing.OUTSIDE_IN
    """For online_dpo."""
    precision: Precision = Precision.FLOAT32
    """The type in which the model's layers are computed; weights, logits and losses are always float32."""
    lora: LoraConfig | None = None
    renderer: RendererConfig = field(default_factory=RendererConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    loop: LoopConfig
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    trackers: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InvalidInputError(f"seed must be >= 0, got {self.seed}")
        if self.trainer.dpo is not None and self.algorithm is not Algorithm.ONLINE_DPO:
            raise InvalidInputError(
                f"trainer.dpo must be left out with algorithm {self.algorithm}, got {self.trainer.dpo}"
            )
        if self.loss not in LOSSES:
            raise InvalidInputError(f"loss must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        self.objective.check_config(self.trainer)

    @property
    def objective(self) -> PolicyGradient | OnlineDpo:
        """What the trainer minimises, by `algorithm`, `loss` and `pairs`."""
        match self.algorithm:
            case Algorithm.GRPO:
                return PolicyGradient(grpo_advantages, LOSSES[self.loss])
            case Algorithm.RLOO:
                return PolicyGradient(rloo_advantages, LOSSES[self.loss])
            case Algorithm.ONLINE_DPO:
                return OnlineDpo(pairs=outside_in if self.pairs is Pairing.OUTSIDE_IN else best_and_worst)
