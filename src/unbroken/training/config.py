"""Configs of trainer, loop and trackers: small and frozen, one per component, checked when they are built."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from unbroken.errors import InvalidInputError
from unbroken.training.loss_config import (
    ClipConfig,
    Correction,
    CorrectionKind,
    DpoConfig,
    EntropyControl,
    FailedRows,
    KlConfig,
    LossNormalization,
    OverlongConfig,
    ReferenceSync,
    TruncatedRows,
    ZeroVarianceRows,
    check_fields,
    is_positive,
)
from unbroken.types import Numerics


class OldLogprobs(StrEnum):
    """The policy in the divisor of the update's ratio."""

    SAMPLER = "sampler"
    """`rollout_logprobs`: the ratio corrects for stale weights and for any mismatch between sampler and trainer."""
    RECOMPUTE = "recompute"
    """The trainer's own logprobs before the step; the ratio starts at 1. Costs one more forward pass, unless the step
    is one update, whose own pass has them."""


class Reference(StrEnum):
    """A reference policy that needs no second model."""

    BASE = "base"
    """The model without its LoRA adapters, which is the policy before training."""


class LoraUpdates(StrEnum):
    """What engines get of a model with LoRA adapters."""

    MERGED = "merged"
    """Whole weights with the adapters merged, rounded to the engine's type."""
    ADAPTER = "adapter"
    """The adapter alone, which the engine adds to the weights that it was started with. vLLM computes it beside them
    (--enable-lora), and requests in flight end with the adapter that they began with."""


class Packing(StrEnum):
    """Whether several rows share a lane of a forward pass (`lanes.RowLayout`), which saves padding."""

    AUTO = "auto"
    """Rows are packed if the model is proven to keep them apart, and where the padding that it saves exceeds what it
    costs (`lanes.Costs`): without padding by the rows' borders on a GPU in half precision, otherwise in lanes about as
    long as the longest row. Otherwise, and always with images, each row is padded. `train/padding_share` is the share
    of padding that remains."""
    ONE_LANE = "one_lane"
    """All rows of a pass in one lane without any padding, whatever attention then costs; an error if the model is not
    proven to keep rows apart."""
    NEVER = "never"
    """Every row is padded."""


class SharedPrefixes(StrEnum):
    """Whether ids that several rows begin with go through the model once (`model.tree`)."""

    AUTO = "auto"
    """Ids that several rows begin with, as siblings with their prompt, go through the model once, if it is proven to
    give each row the logprobs and the gradient that it has alone, and where that is estimated to cost less. Not on a
    GPU, where only `always` shares. `train/shared_share` is the share of ids that this saves."""
    ALWAYS = "always"
    """At any estimated cost, also on a GPU; an error if the model is not proven to allow it."""
    NEVER = "never"
    """Each row is computed whole."""


class Schedule(StrEnum):
    """The learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    """It falls by the same amount in each update."""
    COSINE = "cosine"
    """It falls as half a period of a cosine (arXiv:1608.03983, without restarts)."""


class OptimizerName(StrEnum):
    """An implementation of AdamW."""

    ADAMW = "adamw"
    """PyTorch's, fused on GPUs: 8 bytes a trained parameter."""
    ADAMW_8BIT = "adamw_8bit"
    """torchao's (the torchao extra), whose averages are in blocks of 256 with one scale: 2 bytes a trained parameter.
    It compiles an update for each shape of parameters, which takes some seconds each in the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW, and its learning rate."""

    name: OptimizerName = OptimizerName.ADAMW
    learning_rate: float = 1e-6
    """The highest of the run, after its warm-up. Lower it where the reward falls for good, and raise it where
    nothing changes; LoRA takes a higher one than a whole model."""
    weight_decay: float = 0.0
    """AdamW's: the share of each weight, times the learning rate, that an update takes away. For weights that grow."""
    betas: tuple[float, float] = (0.9, 0.999)
    """How slowly the averages of gradients and of their squares change. Lower the second, to 0.95, where the
    scale of gradients changes within a hundred updates."""
    eps: float = 1e-8
    """Added to the root of the average of squared gradients. Raise it where runs on other layouts shall be compared:
    gradients below it do not become updates of full size, whose sign is rounding's."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this L2 norm over all parameters; inf does not scale."""
    warmup_updates: int = 0
    """The learning rate rises linearly and reaches its full value at the update of this number."""
    schedule: Schedule = Schedule.CONSTANT
    decay_updates: int | None = None
    """For linear and cosine: updates, the warm-up's included, after which the learning rate has fallen to
    `final_share`. A run makes at most loop.num_steps * trainer.num_minibatches * trainer.num_iterations."""
    final_share: float = 0.0
    """For linear and cosine: the share of the learning rate that is left from then on."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            name=(isinstance(self.name, OptimizerName), "an OptimizerName"),
            learning_rate=(is_positive(self.learning_rate), "finite and > 0"),
            weight_decay=(_is_weight(self.weight_decay), "finite and >= 0"),
            betas=(all(0 <= beta < 1 for beta in self.betas), "in [0, 1), both"),
            eps=(is_positive(self.eps), "finite and > 0"),
            max_grad_norm=(self.max_grad_norm > 0, "> 0"),
            warmup_updates=(self.warmup_updates >= 0, ">= 0"),
            schedule=(isinstance(self.schedule, Schedule), "a Schedule"),
            decay_updates=(
                self.decay_updates is None
                if self.schedule is Schedule.CONSTANT
                else self.decay_updates is not None and self.decay_updates > self.warmup_updates,
                f"above warmup_updates ({self.warmup_updates}) with a schedule that falls, and None with constant",
            ),
            final_share=(
                0 <= self.final_share < 1 and (self.final_share == 0 or self.schedule is not Schedule.CONSTANT),
                "in [0, 1), and 0 with the constant schedule",
            ),
        )

    def learning_rate_at(self, num_updates: int) -> float:
        """The learning rate of the next update after `num_updates` updates.

        Worked example, learning rate 1, two updates of warm-up, decay_updates 6, linear: 0.5, 1, 1, 0.75, 0.5, 0.25,
        then 0; cosine: 0.5, 1, 1, 0.854, 0.5, 0.146, then 0.
        """
        if num_updates < self.warmup_updates:
            return self.learning_rate * (num_updates + 1) / self.warmup_updates
        if self.decay_updates is None:
            return self.learning_rate
        done = min((num_updates - self.warmup_updates) / (self.decay_updates - self.warmup_updates), 1.0)
        left = 1 - done if self.schedule is Schedule.LINEAR else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final_share + (1 - self.final_share) * left)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the processes share the model, by transformers' `DistributedConfig`; all 1: each has it whole (DDP).

    With fsdp 2 and tensor 2, processes 0 and 1 compute the same rows, 2 and 3 others; 0 and 2 share each matrix's part.
    """

    fsdp: int = 1
    """Processes that each hold a part of parameters, gradients and averages (FSDP2), and have different rows."""
    replicate: int = 1
    """Copies of what `fsdp` shards, such as one for each node (HSDP)."""
    tensor: int = 1
    """Processes that compute the same rows, each with a part of every matrix (tensor parallelism)."""
    expert: int = 1
    """Processes that hold different experts of a mixture of experts, and exchange ids by all-to-all: a part or all of
    fsdp * tensor, and a multiple of `tensor`."""
    sequence: int = 1
    """Processes that compute the same rows, each a part of the ids, for long rows (Ulysses): with numbers in sequence,
    of any number of processes, among which `fsdp` may shard the model."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            fsdp=(self.fsdp >= 1, ">= 1"),
            replicate=(self.replicate >= 1, ">= 1"),
            tensor=(self.tensor >= 1, ">= 1"),
            sequence=(
                self.sequence >= 1 and (self.sequence == 1 or self.tensor == self.expert == 1),
                f">= 1, and 1 with tensor ({self.tensor}) or expert ({self.expert}) above 1: not tried together",
            ),
            expert=(
                self.expert >= 1 and (self.expert == 1 or self.expert % self.tensor == 0),
                f">= 1, and above 1 a multiple of tensor, {self.tensor}",
            ),
        )
        check_fields(
            self,
            replicate=(self.replicate == 1 or self.fsdp > 1, "1 with fsdp 1: without shards, all at 1 is DDP"),
            expert=(
                self.fsdp * self.tensor % self.expert == 0,
                f"a divisor of fsdp * tensor, {self.fsdp * self.tensor}",
            ),
        )

    @property
    def is_sharded(self) -> bool:
        """Whether a process has parts of the model only, so that all make each forward pass together."""
        return self.num_processes > 1

    @property
    def num_processes(self) -> int:
        """The processes that the model is spread over; 1 for any number with DDP."""
        return self.replicate * self.fsdp * self.tensor

    @property
    def num_same_rows(self) -> int:
        """How many processes, with numbers in sequence, compute the same rows."""
        return self.tensor * self.sequence

    def check_processes(self, num_processes: int) -> None:
        """Raise `InvalidInputError` unless there are as many processes as the model is spread over."""
        if num_processes % self.sequence:
            raise InvalidInputError(
                f"trainer.parallel.sequence = {self.sequence} must divide the number of processes, {num_processes}"
            )
        if self.is_sharded and self.num_processes != num_processes:
            raise InvalidInputError(
                f"trainer.parallel has replicate {self.replicate} * fsdp {self.fsdp} * tensor {self.tensor} = "
                f"{self.num_processes} processes, and there are {num_processes}: start as many, by torchrun"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How one step trains. `dpo` is for `OnlineDpo`; from `clip` to `entropy_weight`, all but `old_logprobs` and `dpo`
    is for `PolicyGradient`.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        "seed": "it is the run's seed",
        "sampler_tensor_parallel": "a run asks its engine",
        "warn_of_inexact": "`unbroken numerics` counts the logprobs of a model and an engine that are not equal",
        "logprob_chunk_size": "it is 1,024, whose logits take 0.6 GB with a vocabulary of 150,000",
        "image_cache_bytes": "it is 1 GiB; other images are processed again",
    }
    """Fields that are no settings of a run, and why."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    old_logprobs: OldLogprobs | None = None
    """None: the sampler's, or for gspo and gspo_token the recomputed ones; in a run with `loop.max_staleness`, the
    sampler's with a tighter clip for the loss clipped, and for others the recomputed ones with the correction tis."""
    normalization: LossNormalization | None = None
    """None: that of the algorithm, which is TOKEN for `PolicyGradient()`."""
    max_trajectory_tokens: int | None = None
    """Maximum loss tokens of a trajectory, all of its rows together, by which CONSTANT divides; the other
    normalizations do not use it. None: in a run with algorithm dr_grpo, all that a rollout can sample."""
    correction: Correction | None = None
    """For the gap between sampler and trainer; only with `OldLogprobs.RECOMPUTE`. None: no correction; in a run with
    `loop.max_staleness`, tis, if the old logprobs are recomputed."""
    kl_weight: float = 0.0
    """Weight of the distance to the reference policy; 0 uses no reference. Above 0, groups whose rewards are all equal,
    and, with the distance in the loss, trajectories without a score, are trained on too, by this term alone, unless
    `zero_variance` drops them."""
    kl: KlConfig = field(default_factory=KlConfig)
    overlong: OverlongConfig | None = None
    """Subtract something from the rewards of long trajectories. None: nothing; in a run with algorithm dapo, from the
    last fifth of what a rollout can sample."""
    truncated: TruncatedRows = TruncatedRows.TRAIN
    zero_variance: ZeroVarianceRows = ZeroVarianceRows.COUNT
    failed: FailedRows = FailedRows.DROP
    failed_reward: float = 0.0
    """The reward of trajectories that failed, unless `failed` drops them."""
    entropy_weight: float = 0.0
    """Weight of the entropy of the policy at each loss token, which is subtracted from the loss (a bonus). The metric
    `train/entropy` is always measured."""
    dpo: DpoConfig | None = None
    """For `OnlineDpo`; None: the defaults of `DpoConfig`."""
    router_loss_weight: float = 0.0
    """For a mixture of experts: weight of its load-balancing loss (transformers' router_aux_loss_coef) over all ids of
    an update. It takes one more forward pass, and rows share no prefixes."""
    entropy_control: EntropyControl | None = None
    """Adapt `entropy_weight`, which is then the first one, to hold the entropy at a target; None: it stays."""
    reference_sync: ReferenceSync | None = None
    """Let the reference follow the policy; None: it stays as it is."""
    teacher_weight: float | None = None
    """Weight of the teacher: each token's advantage falls by this times logprob - teacher's logprob; 0 only measures
    that. Lower it where the teacher outweighs the rewards. None: 1 in a run with a teacher."""
    num_minibatches: int = 1
    """Optimizer updates in a pass over the step's rows; each row, or pair, goes into one of them at random. More learn
    more from rollouts that are slow to sample, with older ids."""
    num_iterations: int = 1
    """Passes over the rows of a step (mu in GRPO, arXiv:2402.03300), each dealt out to minibatches anew. The old
    logprobs of all are those before the first, so the clip bounds how far all of them go."""
    tokens_per_micro_batch: int | None = None
    """Maximum ids in one forward pass, padding included and shared ones counted once; a longer row is not cut and has a
    pass to itself. None: 12,288, or on a GPU half of it, a quarter, and so on, until a pass fits into what is free in
    the first step beside gradients and optimizer; with `compile`, a GPU begins with 24,576, and with half for models as
    wide as 2,048 or wider. A pass that runs out of memory halves it, and the step continues (not with FSDP2, whose
    processes wait for each other in every pass)."""
    packing: Packing = Packing.AUTO
    shared_prefixes: SharedPrefixes = SharedPrefixes.AUTO
    numerics: Numerics = Numerics.AUTO
    """With exact, the engine that a run makes computes so too, and a step ends the run if a logprob has other bits than
    the sampler's, by the same weights. With auto, a run is exact where that was measured to cost at most 5 % of a step
    (docs/engines.md), and fast otherwise: its first line says which, and why. A trainer alone, which knows no engine,
    is fast with auto."""
    sampler_tensor_parallel: int = 1
    """With exact numerics: over how many GPUs the vLLM that samples splits the model. The trainer rounds the same parts
    of some sums. A run asks its engine."""
    warn_of_inexact: bool = False
    """With exact numerics: warn of such a logprob, and continue; `mismatch/equal_share` counts the equal ones."""
    max_policy_k3: float | None = None
    """The largest k3 of the sampler's logprobs to the trainer's, by weights of one version, that is taken for rounding:
    above it they have two policies, which ends the run (I9). None: in a run, the bound of its arithmetic
    (docs/engines.md); a trainer alone checks nothing. `inf` lets a run continue whatever it is."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its activations: a third more time."""
    compile: bool = False
    """Compile the model's layers by `torch.compile`: on a GPU a third less time in each pass. It takes half a minute
    when the run begins, and 10 seconds more in the first pass of each kind. Logprobs are those of the layers as they
    are, up to rounding."""
    routing_replay: bool = False
    """For a mixture of experts: compute each id with the experts that the sampler chose for it, and the gates of the
    present weights (arXiv:2510.11370). Engines must record them. Without, sampler and trainer may choose differently,
    and logprobs of equal weights differ by much more than rounding."""
    logprob_chunk_size: int = 1_024
    """Tokens whose logits are in memory at the same time."""
    image_cache_bytes: int = 2**30
    """Maximum bytes of processed images kept in memory during a step; other images are processed again."""
    lora_updates: LoraUpdates = LoraUpdates.MERGED
    """For a model with LoRA adapters."""
    seed: int = 0
    """Seed of the random order in which rows are dealt out to minibatches."""

    def __post_init__(self) -> None:
        _check_kinds(
            self,
            truncated=TruncatedRows,
            zero_variance=ZeroVarianceRows,
            failed=FailedRows,
            packing=Packing,
            numerics=Numerics,
            lora_updates=LoraUpdates,
        )
        self._check_objective()
        self._check_passes()
        self._check_teacher()
        if self.numerics is Numerics.EXACT and (name := self._find_inexact()) is not None:
            raise InvalidInputError(f"numerics must be fast with {name} = {getattr(self, name)}, got exact")

    def _check_objective(self) -> None:
        """Check what is minimised."""
        check_fields(
            self,
            old_logprobs=(self.old_logprobs is None or isinstance(self.old_logprobs, OldLogprobs), "an OldLogprobs"),
            normalization=(
                self.normalization is None or isinstance(self.normalization, LossNormalization),
                "a LossNormalization",
            ),
            max_trajectory_tokens=(
                self.normalization is None or self.has_constant_if(self.normalization),
                ">= 1 with LossNormalization.CONSTANT, which divides by it, and None with the others",
            ),
            correction=(
                self.chosen_correction.kind is CorrectionKind.NONE or self.old_logprobs is OldLogprobs.RECOMPUTE,
                "CorrectionKind.NONE with OldLogprobs.SAMPLER, whose ratio is the correction already",
            ),
            kl_weight=(_is_weight(self.kl_weight), "finite and >= 0"),
            kl=(self.kl_weight > 0 or self.kl == KlConfig(), "left out with kl_weight 0, which measures no distance"),
            failed_reward=(
                math.isfinite(self.failed_reward) and (self.failed_reward == 0 or self.failed is not FailedRows.DROP),
                "finite, and left out with failed drop",
            ),
            entropy_weight=(_is_weight(self.entropy_weight), "finite and >= 0"),
            entropy_control=(
                self.entropy_control is None or self.entropy_weight <= self.entropy_control.max_weight,
                f"None, or have a max_weight of at least the entropy_weight {self.entropy_weight:g}",
            ),
            router_loss_weight=(_is_weight(self.router_loss_weight), "finite and >= 0"),
            max_policy_k3=(self.max_policy_k3 is None or self.max_policy_k3 > 0, "above 0, inf, or None"),
        )

    def _check_passes(self) -> None:
        """Check how the passes over a step's rows are made."""
        check_fields(
            self,
            num_minibatches=(self.num_minibatches >= 1, ">= 1"),
            num_iterations=(self.num_iterations >= 1, ">= 1"),
            tokens_per_micro_batch=(
                self.tokens_per_micro_batch is None or self.tokens_per_micro_batch >= 1,
                ">= 1, or None",
            ),
            sampler_tensor_parallel=(self.sampler_tensor_parallel >= 1, ">= 1"),
            warn_of_inexact=(
                not self.warn_of_inexact or self.numerics is Numerics.EXACT,
                "False with fast numerics, of which no step is checked",
            ),
            shared_prefixes=(
                self.router_loss_weight == 0 or self.shared_prefixes is not SharedPrefixes.ALWAYS,
                "auto or never with router_loss_weight above 0, which counts the ids of each row",
            ),
            compile=(
                not (self.compile and (self.routing_replay or self.router_loss_weight > 0)),
                "False with routing_replay or router_loss_weight",
            ),
            parallel=(
                not (self.compile and self.parallel.sequence > 1),
                "sequence 1 with compile, whose layers exchange nothing",
            ),
            logprob_chunk_size=(self.logprob_chunk_size >= 1, ">= 1"),
            image_cache_bytes=(self.image_cache_bytes >= 0, ">= 0"),
            seed=(self.seed >= 0, ">= 0"),
        )

    def _check_teacher(self) -> None:
        """Check what concerns a teacher."""
        check_fields(
            self,
            teacher_weight=(self.teacher_weight is None or _is_weight(self.teacher_weight), "finite and >= 0, or None"),
            routing_replay=(
                not self.routing_replay or self.teacher_weight is None,
                "False with a teacher, which chooses its own experts",
            ),
        )

    def _find_inexact(self) -> str | None:
        """The first setting that exact numerics do not go with."""
        refused = {
            "packing": self.packing is Packing.ONE_LANE,
            "shared_prefixes": self.shared_prefixes is SharedPrefixes.ALWAYS,
            "compile": self.compile,
            "routing_replay": self.routing_replay,
            "router_loss_weight": self.router_loss_weight > 0,
            "parallel": self.parallel != ParallelConfig(),
        }
        return next((name for name, is_refused in refused.items() if is_refused), None)

    @property
    def chosen_correction(self) -> Correction:
        """The correction, whether given or not."""
        return self.correction or Correction()

    def has_constant_if(self, normalization: LossNormalization) -> bool:
        """Whether `max_trajectory_tokens` is given exactly if this normalization divides by it."""
        if normalization is not LossNormalization.CONSTANT:
            return self.max_trajectory_tokens is None
        return self.max_trajectory_tokens is not None and self.max_trajectory_tokens >= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OutageConfig:
    """How long and how often a run waits for engines that go away."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "ask_every_s": "it is 2 s, and a server answers in some milliseconds",
        "max_losses": "it is 5: a prompt that crashes the engine does so each time",
    }
    """Fields that are no settings of a run, and why."""

    wait_s: float = 1800.0
    """Maximum wait for them to come back, each time; then the run ends, and the same command continues it. Raise it
    where it takes longer to replace a machine."""
    ask_every_s: float = 2.0
    """Pause between two checks of their health."""
    max_losses: int = 5
    """How often one step may lose its rollouts; a prompt that crashes the engine would do so each time."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            wait_s=(self.wait_s >= 0, ">= 0"),
            ask_every_s=(is_positive(self.ask_every_s), "finite and > 0"),
            max_losses=(self.max_losses >= 1, ">= 1"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """How long to train, and which rollouts are recent enough."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "num_zero_variance_scored": "it is 8, so that `mismatch/kl` has a value in each step",
    }
    """Fields that are no settings of a run, and why."""

    num_steps: int
    """Steps of the run; raise it to continue a run that has ended. With 0, a run evaluates and trains nothing."""
    max_staleness: int = 0
    """With 0, a step samples, trains and publishes in turn. Above it the engine samples while the trainer trains, and
    an id is trained at most this many policy versions after the one that sampled it (docs/sampling-ahead.md)."""
    max_replacements: float | None = None
    """How many groups whose rewards are all equal a step replaces by those of further problems, at most and for each of
    its own groups: with 3, a step of 16 groups samples up to 64 (DAPO's dynamic sampling, arXiv:2503.14476). After that
    it trains on what there is. None: 0, or 3 with algorithm dapo."""
    outages: OutageConfig = field(default_factory=OutageConfig)
    max_empty_steps: int | None = 3
    """After this many steps in a row without a row to train (equal rewards, failures) the run stops with an error that
    says why; None: never."""
    num_zero_variance_scored: int = 8
    """Trajectories per step and process, of groups whose rewards are all equal, that are scored to measure their
    mismatch although they are not trained on. With 0, `mismatch/kl` is empty in steps that have such groups."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            num_steps=(self.num_steps >= 0, ">= 0"),
            max_staleness=(self.max_staleness >= 0, ">= 0"),
            max_replacements=(
                self.max_replacements is None or (math.isfinite(self.max_replacements) and self.max_replacements >= 0),
                "finite and >= 0, or None",
            ),
            max_empty_steps=(self.max_empty_steps is None or self.max_empty_steps >= 1, ">= 1, or None"),
            num_zero_variance_scored=(self.num_zero_variance_scored >= 0, ">= 0"),
        )

    @property
    def replaces_groups(self) -> bool:
        """Whether groups whose rewards are all equal are replaced."""
        return bool(self.max_replacements)

    def get_max_replaced(self, groups_per_step: int) -> int:
        """How many groups a process may replace in a step of which it has `groups_per_step`."""
        return math.floor((self.max_replacements or 0) * groups_per_step)


class Tracker(StrEnum):
    """Trackers that accelerate supports."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    MLFLOW = "mlflow"
    COMET_ML = "comet_ml"
    AIM = "aim"
    CLEARML = "clearml"
    SWANLAB = "swanlab"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerConfig:
    """Trackers that log each step."""

    names: tuple[Tracker, ...] = (Tracker.TENSORBOARD,)
    """No trackers: `--trackers.names '[]'`."""
    project: str = "unbroken"
    """The project of the run, for trackers that have projects."""
    run_name: str | None = None
    """The name of the run in W&B and MLflow, and the beginning of its name in trackio; None: they choose one."""

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names):
            raise InvalidInputError(f"names must be different trackers, got {[str(name) for name in self.names]}")
        missing = [name for name in self.names if importlib.util.find_spec(name) is None]
        if missing:
            raise InvalidInputError(
                f"names must be installed trackers, and {missing[0]} is not installed: pip install {missing[0]}"
            )


def _is_weight(value: float) -> bool:
    """Whether a number is finite and at least 0."""
    return math.isfinite(value) and value >= 0


def _check_kinds(config: Any, **kinds: type[StrEnum]) -> None:
    """Raise `InvalidInputError` for the first field that is not of its kind: a string is no enum."""
    check_fields(
        config,
        **{name: (isinstance(getattr(config, name), kind), f"a {kind.__name__}") for name, kind in kinds.items()},
    )
