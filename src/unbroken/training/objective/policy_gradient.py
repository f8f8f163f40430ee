"""The policy gradient: advantages from the rewards of a group, a loss for each token, the distance to a reference.

    sum over loss tokens of  weight * (correction * policy loss + kl_weight * distance - entropy_weight * entropy)

The correction applies to the policy loss only. A token that it masks still counts in the weights, so masking makes an
update smaller, and not its other tokens larger. With `KlPlace.REWARD` the distance is not in the loss: its sum over a
trajectory is subtracted from the reward, and the advantages follow from that. A teacher's distance is in the advantages
of single tokens: teacher_weight * (teacher's logprob - old logprob) is added to each (arXiv:2306.13649). Where its K
most likely ids are learned it is a term of the loss instead: teacher_weight * KL(teacher || policy) over these ids and
all others together (arXiv:2601.20802, there over the policy's K ids).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import ClassVar, TypeVar

import numpy as np
import torch

from unbroken.counters import Counters
from unbroken.errors import InvalidInputError, UnbrokenError
from unbroken.rollout.failures import format_error, format_frames
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import OldLogprobs, TrainerConfig
from unbroken.training.loss_config import (
    Correction,
    CorrectionKind,
    FailedRows,
    KlPlace,
    LossNormalization,
    TruncatedRows,
    ZeroVarianceRows,
)
from unbroken.training.model.batch import Batch, RowTargets, ScoredRow, TrajectorySums, collate, idle_batch
from unbroken.training.model.scores import Entropy, TokenScores
from unbroken.training.objective.advantages import (
    ADVANTAGES,
    Advantages,
    StepAdvantages,
    TurnAdvantages,
    grpo_advantages,
)
from unbroken.training.objective.base import (
    BatchLoss,
    LeftOut,
    LossStats,
    Objective,
    ScoreFn,
    UpdateSize,
    UpdateWeights,
)
from unbroken.training.objective.comparison import (
    ALONE,
    ComparedGroup,
    Processes,
    compute_advantages,
    compute_turns,
    get_min_group_size,
)
from unbroken.training.objective.losses import (
    LOSSES,
    CorrectionWeights,
    PolicyLoss,
    PolicyLossFn,
    as_policy_loss,
    correction_weights,
    k3,
    kl_penalty,
    token_weight,
)
from unbroken.training.objective.samples import RowPolicy, TrajectoryRows, build_trajectories, has_variance
from unbroken.types import Logprobs, TrainingSample

T = TypeVar("T")
_TEACHER = "teacher"
"""The logprobs of a teacher's most likely ids, in `RowTargets.values`."""
_LEAST_TAIL = 1e-6
"""Of the probability of all other ids: what logprobs in float32 leave of 1 is not known any better."""
_SEQUENCE_KINDS = (CorrectionKind.SEQUENCE_TRUNCATE, CorrectionKind.SEQUENCE_MASK)


@dataclass(frozen=True, slots=True)
class PolicyGradient(Objective[TrainingSample | TrajectoryRows]):
    """GRPO and its relatives: an advantage function and a loss. `ALGORITHMS` has them by name."""

    unit_type: ClassVar = (TrainingSample, TrajectoryRows)
    """A row by itself is a trajectory of one row."""

    advantages: Advantages = grpo_advantages
    loss: PolicyLoss | PolicyLossFn = LOSSES["clipped"]
    """One of `losses.LOSSES`, or your own."""
    normalization: LossNormalization = LossNormalization.TOKEN
    """Unless the config has another."""

    def check_config(self, config: TrainerConfig) -> None:
        """Raise `InvalidInputError` if there are settings for DPO, a clip that the loss does not use, a constant that
        nothing is divided by, or a combination that has no meaning.
        """
        if config.dpo is not None:
            raise InvalidInputError(f"TrainerConfig.dpo must be None with PolicyGradient, got {config.dpo}")
        if config.reference_sync is not None and not self.needs_reference(config):
            raise InvalidInputError(
                f"TrainerConfig.reference_sync must be None with kl_weight 0, which uses no reference, got "
                f"{config.reference_sync}"
            )
        loss = as_policy_loss(self.loss)
        loss.complete(config.clip)
        if not config.has_constant_if(normalization := self._get_normalization(config)):
            raise InvalidInputError(
                "TrainerConfig.max_trajectory_tokens must be >= 1 with LossNormalization.CONSTANT, which divides by "
                f"it, and None with the others, got {config.max_trajectory_tokens} with {normalization.value}"
            )
        if isinstance(self.advantages, TurnAdvantages) and loss.is_uniform:
            raise InvalidInputError(
                f"the loss {loss.name} needs one advantage for a whole trajectory, and got advantages of turns: take "
                "gspo_token"
            )
        if isinstance(self.advantages, StepAdvantages) and self.advantages.of_parts:
            _check_parts(config)
        if self.advantages is ADVANTAGES["zero"] and not self._get_row_policy(config).keep_equal:
            raise InvalidInputError(
                "advantages zero (algorithm distillation) must have another term to train on, and got none: a teacher "
                "with TrainerConfig.teacher_weight above 0, kl_weight or entropy_weight, and zero_variance count; got "
                f"teacher_weight {config.teacher_weight} and zero_variance {config.zero_variance}"
            )
        if self._has_distance_in_rewards(config):
            self._check_distance_in_rewards(config)
        if config.teacher_weight is not None and loss.is_uniform:
            raise InvalidInputError(
                f"the loss {loss.name} needs one advantage for a whole trajectory, and a teacher gives one to each "
                "token: take gspo_token"
            )

    def try_functions(self, config: TrainerConfig, *, group_size: int, device: torch.device) -> None:
        """Call advantages and loss on a few numbers, the loss without any too: what it gets of a pass without rows.

        Raises:
            InvalidInputError: one fails, or returns another shape than that of its rewards or tokens; or the loss does
                not depend on the logprobs.
        """
        rewards = np.arange(group_size, dtype=np.float64) % 2
        if isinstance(self.advantages, TurnAdvantages):
            call: Callable[[], object] = partial(compute_turns, [rewards, rewards[:1]], self.advantages)
        else:
            group = ComparedGroup(name="", rewards=rewards)
            call = partial(compute_advantages, lambda: [group], self.advantages)
        _try("advantages", call)
        loss = as_policy_loss(self.loss)
        for num_tokens in (4, 0):
            batch = _make_trial(num_tokens, config, device)
            logprobs_N = batch.old_logprobs_N.clone().requires_grad_()
            losses_N = _try(f"loss {loss.name}", partial(loss, logprobs_N, batch, config.clip)).losses_N
            if not losses_N.requires_grad:
                raise InvalidInputError(
                    f"the loss {loss.name} must depend on the logprobs, and has no gradient of them"
                )

    @property
    def min_group_size(self) -> int:
        """One if the advantages compare groups with each other, otherwise two."""
        return get_min_group_size(self.advantages)

    def needs_reference(self, config: TrainerConfig) -> bool:
        """Whether `kl_weight` is above 0."""
        return config.kl_weight > 0

    def get_entropy(self, config: TrainerConfig) -> Entropy:
        """With gradient if there is a bonus for it."""
        return Entropy.TRAINED if config.entropy_weight > 0 else Entropy.MEASURED

    async def make_units(
        self, groups: Sequence[TrajectoryGroup], counters: Counters, config: TrainerConfig, processes: Processes = ALONE
    ) -> list[TrainingSample | TrajectoryRows]:
        """Build each trajectory's rows (`build_trajectories`).

        Groups whose rewards are all equal and unscored trajectories are trained on if the loss has another term for
        them. Otherwise their rows are idle.
        """
        policy = self._get_row_policy(config)
        return [*build_trajectories(groups, self.advantages, counters, policy=policy, processes=processes)]

    def get_rows(self, unit: TrainingSample | TrajectoryRows) -> Sequence[TrainingSample]:
        """The rows of the trajectory."""
        return unit.rows if isinstance(unit, TrajectoryRows) else (unit,)

    def get_idle_rows(self, unit: TrainingSample | TrajectoryRows) -> Sequence[TrainingSample]:
        """The rows of a trajectory that has no advantage."""
        return unit.idle_rows if isinstance(unit, TrajectoryRows) else ()

    def can_lack_variance(self, config: TrainerConfig) -> bool:
        """Unless there is a distance to train on, or the advantages compare groups with each other."""
        return self.min_group_size > 1 and not self.needs_reference(config) and not config.teacher_weight

    def has_variance(self, group: TrajectoryGroup, config: TrainerConfig) -> bool:
        """Whether the group has an advantage that is not zero, or cannot lack variance."""
        return not self.can_lack_variance(config) or has_variance(group, self.advantages, self._get_row_policy(config))

    def check_units(self, units: Sequence[TrainingSample | TrajectoryRows], config: TrainerConfig) -> None:
        """Raise `InvalidInputError` if the distance belongs into a reward that a unit does not have."""
        if not self._has_distance_in_rewards(config):
            return
        for index, unit in enumerate(units):
            if not isinstance(unit, TrajectoryRows) or unit.reward is None:
                raise InvalidInputError(
                    f"units[{index}] must be TrajectoryRows with a reward with TrainerConfig.kl.place reward, which is "
                    "subtracted from it: make the units by Trainer.make_units"
                )

    def get_old_logprobs(self, config: TrainerConfig) -> OldLogprobs:
        """Those of the loss, unless the config has others."""
        return config.old_logprobs or as_policy_loss(self.loss).old_logprobs

    def for_stale_rows(self, config: TrainerConfig) -> TrainerConfig:
        """The config with a bound on what ids of older weights do, unless it has one.

        A step sees only later what those before it did. A clip around the sampler (`PolicyLoss.stale_clip`) stops the
        policy until then: an id whose probability has changed enough has no gradient, and the dual clip bounds bad ids
        that have become likely (docs/lab-notes/staleness.md compares it with others).
        Other losses get the trainer's own logprobs before the step, and each id the weight min(trainer / sampler, 2):
        truncated importance sampling, and with several updates a step the decoupled loss (AReaL, arXiv:2505.24298).
        """
        loss, old_logprobs, correction = as_policy_loss(self.loss), config.old_logprobs, config.correction
        if old_logprobs is None and loss.stale_clip is not None:
            clip = replace(loss, clip=loss.stale_clip).complete(config.clip)
            return replace(config, old_logprobs=OldLogprobs.SAMPLER, clip=clip)
        if correction is None and old_logprobs is not OldLogprobs.SAMPLER:
            correction = Correction(kind=CorrectionKind.TIS)
        return replace(config, old_logprobs=old_logprobs or OldLogprobs.RECOMPUTE, correction=correction)

    def needs_old_logprobs(self, config: TrainerConfig) -> bool:
        """For distances in the rewards, and for sums over whole trajectories."""
        has_teacher = config.teacher_weight is not None  # with the weight 0 its distance is measured
        is_joint = as_policy_loss(self.loss).is_joint
        return self.changes_units(config) or has_teacher or is_joint or _is_by_sequence(config)

    def changes_units(self, config: TrainerConfig) -> bool:
        """Whether the distance to the reference belongs into the rewards, or that to a teacher into the advantages."""
        return self._has_distance_in_rewards(config) or bool(config.teacher_weight)

    def _has_distance_in_rewards(self, config: TrainerConfig) -> bool:
        return config.kl_weight > 0 and config.kl.place is KlPlace.REWARD

    def _check_distance_in_rewards(self, config: TrainerConfig) -> None:
        if config.truncated is TruncatedRows.MASK:
            raise InvalidInputError(
                "TrainerConfig.truncated must be train with kl.place reward, got mask: the distance of a trajectory "
                "that is left out is not known, and its reward counts for its siblings"
            )
        if config.failed is FailedRows.BASELINE:
            raise InvalidInputError(
                "TrainerConfig.failed must be drop or train with kl.place reward, got baseline: the distance of a "
                "trajectory that is left out is not known, and its reward counts for its siblings"
            )
        if config.teacher_weight:
            raise InvalidInputError(
                "TrainerConfig.kl.place must be loss with a teacher whose teacher_weight is above 0, got reward: "
                "trajectories without a reward are trained on for their teacher, and have none to subtract from"
            )
        if isinstance(self.advantages, TurnAdvantages):
            raise InvalidInputError(
                "TrainerConfig.kl.place must be loss with advantages of turns, got reward: a trajectory's distance "
                "is not split over its turns"
            )

    def change_units(
        self,
        units: Sequence[TrainingSample | TrajectoryRows],
        scored: Sequence[Sequence[ScoredRow]],
        config: TrainerConfig,
        processes: Processes = ALONE,
    ) -> list[list[ScoredRow]]:
        """Subtract the distance to the reference from the rewards, and compute the advantages again; or that to the
        teacher from the advantages, unless its most likely ids are learned: these become targets of the loss.

        Only a trajectory whose siblings all sampled nothing keeps its advantage.
        """
        if config.teacher_weight:
            return _add_teachers(scored, config.teacher_weight)
        by_group: dict[str, list[int]] = {}
        for index, unit in enumerate(units):
            assert isinstance(unit, TrajectoryRows), "check_units asks for it"
            by_group.setdefault(unit.group, []).append(index)
        min_size = get_min_group_size(self.advantages)
        compared = {name: indices for name, indices in by_group.items() if len(indices) >= min_size}
        rewards = [_subtract_distance(unit, rows, config) for unit, rows in zip(units, scored, strict=True)]

        def compare() -> list[ComparedGroup]:
            return [
                ComparedGroup(name=name, rewards=np.array([rewards[index] for index in indices]))
                for name, indices in compared.items()
            ]

        values = compute_advantages(compare, self.advantages, processes).advantages
        changed = [list(rows) for rows in scored]
        for indices, of_group in zip(compared.values(), values, strict=True):
            for index, advantage in zip(indices, of_group, strict=True):
                changed[index] = [_replace_advantage(row, float(advantage)) for row in scored[index]]
        return changed

    def weigh(
        self, units: Sequence[Sequence[ScoredRow]], config: TrainerConfig, *, size: UpdateSize, score: ScoreFn
    ) -> UpdateWeights:
        """Weigh the rows of each trajectory by the normalization, and add up what belongs to whole trajectories."""
        weights = [
            token_weight(
                self._get_normalization(config),
                num_trajectory_tokens=sum(row.num_loss_tokens for row in rows),
                num_trajectories=size.num_units,
                num_loss_tokens=size.num_loss_tokens,
                max_trajectory_tokens=config.max_trajectory_tokens,
            )
            for rows in units
        ]
        is_joint = as_policy_loss(self.loss).is_joint
        sums: list[TrajectorySums | None] = []
        # Passes may not see the rows of a trajectory together.
        if size.num_rows > size.num_units and (is_joint or _is_by_sequence(config)):
            sums = _sum_units(units, score if is_joint else None)
        return UpdateWeights(
            weights=[weight for weight, rows in zip(weights, units, strict=True) for _ in rows], trajectories=sums
        )

    def batch_loss(self, scores: TokenScores, batch: Batch, config: TrainerConfig) -> BatchLoss:
        """The weighted sum of the tokens' losses and of their distance to the reference, minus that of the entropies.

        If weights add up to 1 over all micro batches and processes of the update, the sum is a mean, however the rows
        were split. Raises `InvalidInputError` if shapes differ.
        """
        logprobs_N, entropies_N = scores[:2]
        tensors = (logprobs_N, batch.old_logprobs_N, batch.advantages_N, batch.weights_N)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if len(set(shapes)) != 1 or len(shapes[0]) != 1:
            raise InvalidInputError(
                f"logprobs, old_logprobs, advantages and weights must share one shape [N], got {shapes}"
            )
        correction_N, corrected_N = self._correct(batch, config)
        losses_N, clipped_N = as_policy_loss(self.loss)(logprobs_N, batch, config.clip)
        terms_N = correction_N * losses_N
        reference_N, k3_N = batch.reference_logprobs_N, None
        if reference_N is not None:
            k3_N = k3(logprobs_N.detach(), reference_N)
            if config.kl.place is KlPlace.LOSS:
                penalty_N = kl_penalty(config.kl.estimator, logprobs_N, reference_N, batch.old_logprobs_N)
                terms_N = terms_N + config.kl_weight * penalty_N
        if config.entropy_weight > 0:
            assert entropies_N is not None, "get_entropy asks for it"
            terms_N = terms_N - config.entropy_weight * entropies_N
        num_taught, forward_kl_sum = 0, 0.0
        if scores.beside_N is not None:
            assert config.teacher_weight is not None, "only a teacher has targets"
            teacher_N = batch.values[_TEACHER]
            forward_kl_N = _forward_kl(scores.beside_N, teacher_N)
            terms_N = terms_N + config.teacher_weight * forward_kl_N.to(terms_N.dtype)
            num_taught, forward_kl_sum = int(teacher_N.isfinite().any(-1).sum()), float(forward_kl_N.detach().sum())
        loss = (batch.weights_N * terms_N).sum()
        stats = LossStats.measure(
            scores,
            batch.old_logprobs_N,
            penalty_N=k3_N,
            loss=float(loss.detach()),
            num_clipped=int(clipped_N.sum()),
            num_corrected=int(corrected_N.sum()),
        )
        return BatchLoss(loss, replace(stats, num_taught=num_taught, forward_kl_sum=forward_kl_sum))

    @torch.no_grad()
    def find_left_out(
        self,
        units: Sequence[Sequence[ScoredRow]],
        logprobs: Sequence[Logprobs],
        config: TrainerConfig,
        *,
        device: torch.device,
    ) -> list[LeftOut] | None:
        """The tokens that the loss clips, and those that the correction changes; None where the advantages of the step
        are not those of the rows: their sign decides what is clipped.
        """
        if self._has_distance_in_rewards(config) or config.teacher_weight:
            return None
        rows = list(chain.from_iterable(units))
        masks = [row.sample.loss_mask for row in rows]
        counts = [int(mask.sum()) for mask in masks]
        size = UpdateSize(num_units=len(units), num_loss_tokens=sum(counts), num_rows=len(rows))
        weighed = self.weigh(units, config, size=size, score=lambda _: list(logprobs))
        batch = collate([[row] for row in rows], weighed.weights, device, trajectories=weighed.trajectories)
        current = np.concatenate([values[mask] for values, mask in zip(logprobs, masks, strict=True)])
        clipped_N = as_policy_loss(self.loss)(torch.from_numpy(current).to(device), batch, config.clip).clipped_N
        corrected_N = self._correct(batch, config).corrected_N
        found = []
        parts = (np.split(values_N.cpu().numpy(), np.cumsum(counts)[:-1]) for values_N in (clipped_N, corrected_N))
        for mask, *of_row in zip(masks, *parts, strict=True):
            arrays = [np.zeros_like(mask), np.zeros_like(mask)]
            for array, values in zip(arrays, of_row, strict=True):
                array[mask] = values
            found.append(LeftOut(*arrays))
        return found

    def _correct(self, batch: Batch, config: TrainerConfig) -> CorrectionWeights:
        return correction_weights(
            batch.old_logprobs_N,
            batch.rollout_logprobs_N,
            batch.num_row_tokens,
            config.chosen_correction,
            batch.trajectories,
        )

    def _get_normalization(self, config: TrainerConfig) -> LossNormalization:
        return config.normalization or self.normalization

    def _get_row_policy(self, config: TrainerConfig) -> RowPolicy:
        keeps = config.zero_variance is ZeroVarianceRows.COUNT
        has_distance = config.kl_weight > 0 and config.kl.place is KlPlace.LOSS
        has_entropy = config.entropy_weight > 0 or config.entropy_control is not None
        in_loss = has_distance or has_entropy or config.router_loss_weight > 0 or bool(config.teacher_weight)
        return RowPolicy(
            keep_equal=keeps and (in_loss or config.kl_weight > 0),
            # There is no reward to subtract a distance from.
            keep_unscored=keeps and in_loss and not self._has_distance_in_rewards(config),
            overlong=config.overlong,
            truncated=config.truncated,
            failed=config.failed,
            failed_reward=config.failed_reward,
        )


def _check_parts(config: TrainerConfig) -> None:
    """Raise `InvalidInputError` for what changes the sum of the rewards, and belongs to none of its parts."""
    rules = (
        ("overlong", config.overlong, config.overlong is None, "None"),
        ("failed", config.failed, config.failed is FailedRows.DROP, "drop"),
        ("kl.place", config.kl.place, config.kl.place is KlPlace.LOSS, "loss"),
    )
    for name, value, is_possible, rule in rules:
        if not is_possible:
            raise InvalidInputError(
                f"TrainerConfig.{name} must be {rule} with advantages of parts of rewards (gdpo), got {value}: it "
                "changes the sum of the rewards, and none of its parts; a reward function can do so"
            )


def _try(name: str, call: Callable[[], T]) -> T:
    """Call a function that may be the user's; raises `InvalidInputError` with the lines where it failed."""
    try:
        return call()
    except UnbrokenError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"the {name} must take a few numbers as a step gives them, and failed with {format_error(error)}"
            f"{format_frames(error)}"
        ) from error


def _make_trial(num_tokens: int, config: TrainerConfig, device: torch.device) -> Batch:
    """Two rows of a trajectory each with so many tokens together, of alternating advantages."""
    logprobs_N = torch.linspace(-1.0, -2.0, num_tokens, device=device)
    return replace(
        idle_batch(device),
        rollout_logprobs_N=logprobs_N,
        old_logprobs_N=logprobs_N,
        advantages_N=torch.arange(num_tokens, device=device).remainder(2) * 2.0 - 1.0,
        weights_N=torch.ones(num_tokens, device=device),
        versions_N=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        num_row_tokens=(num_tokens // 4, num_tokens - num_tokens // 4),
        reference_logprobs_N=logprobs_N if config.kl_weight > 0 else None,
    )


def _is_by_sequence(config: TrainerConfig) -> bool:
    return config.chosen_correction.effect in _SEQUENCE_KINDS


def _subtract_distance(
    unit: TrainingSample | TrajectoryRows, rows: Sequence[ScoredRow], config: TrainerConfig
) -> float:
    assert isinstance(unit, TrajectoryRows), "check_units asks for it"
    assert unit.reward is not None, "check_units asks for it"
    distance = 0.0
    for row in rows:
        assert row.reference_logprobs is not None, "check_reference asks for one"
        mask = row.sample.loss_mask
        old_N, reference_N = (
            torch.from_numpy(values[mask].astype(np.float64)) for values in (row.old_logprobs, row.reference_logprobs)
        )
        distance += float(kl_penalty(config.kl.estimator, old_N, reference_N, old_N).sum())
    return unit.reward - config.kl_weight * distance


def _add_teachers(scored: Sequence[Sequence[ScoredRow]], weight: float) -> list[list[ScoredRow]]:
    """The rows with what their teachers say: in the advantages, or if they gave their most likely ids, as targets."""
    if number := max((row.num_top for rows in scored for row in rows), default=0):
        return [[_add_teacher_ids(row, number) for row in rows] for rows in scored]
    return [[_subtract_teacher(row, weight) for row in rows] for rows in scored]


def _subtract_teacher(row: ScoredRow, weight: float) -> ScoredRow:
    """The row with the advantages minus the weighted distance to its teacher at each loss token."""
    if row.teacher is None:
        return row
    advantages = row.sample.advantages.astype(np.float64)
    advantages[row.sample.loss_mask] -= weight * row.teacher_gaps
    return replace(row, sample=replace(row.sample, advantages=advantages.astype(np.float32)))


def _add_teacher_ids(row: ScoredRow, number: int) -> ScoredRow:
    """The row with its teacher's most likely ids beside its own; without a teacher they are `number` ids of none."""
    sample, shape = row.sample, (row.num_loss_tokens, number)
    ids, logprobs = np.zeros(shape, dtype=np.int64), np.full(shape, -np.inf, dtype=np.float32)
    if row.teacher is not None and row.teacher.top is not None:
        in_loss = sample.loss_mask[sample.sampled_mask]
        ids, logprobs = row.teacher.top.token_ids[in_loss].astype(np.int64), row.teacher.top.logprobs[in_loss]
    trained = np.ones(len(ids), dtype=np.bool_)
    return replace(row, targets=RowTargets(ids=ids, trained=trained, values={_TEACHER: logprobs}, is_beside=True))


def _forward_kl(logprobs_N: torch.Tensor, teacher_N: torch.Tensor) -> torch.Tensor:
    """[N] float64 KL(teacher || policy) by the logprobs [N, K] of the teacher's K ids and one outcome more, all other
    ids together, whose probability is what is left of 1 (`_LEAST_TAIL` at least). -inf of the teacher: no such id.

    So it is a divergence, which is 0 only where all of these agree, and at most that of the whole vocabulary. Without
    the last outcome the policy could come down to 0 by being too certain, or by having the K ids in the right ratio.
    """
    is_there_N = teacher_N.isfinite()
    teacher_N, logprobs_N = (values_N.double().where(is_there_N, 0.0) for values_N in (teacher_N, logprobs_N))
    masses_N, own_N = (values_N.exp().where(is_there_N, 0.0) for values_N in (teacher_N, logprobs_N))
    tail_N, own_tail_N = ((1 - each_N.sum(-1)).clamp(min=_LEAST_TAIL) for each_N in (masses_N, own_N))
    return (masses_N * (teacher_N - logprobs_N)).sum(-1) + tail_N * (tail_N.log() - own_tail_N.log())


def _replace_advantage(row: ScoredRow, advantage: float) -> ScoredRow:
    advantages = np.where(row.sample.loss_mask, np.float32(advantage), np.float32(0))
    return replace(row, sample=replace(row.sample, advantages=advantages))


def _sum_units(units: Sequence[Sequence[ScoredRow]], score: ScoreFn | None) -> list[TrajectorySums | None]:
    """For each row of units the sums of its trajectory, by logprobs of now if they are scored; None for a whole one."""
    current = None if score is None else iter(score([row.sample for rows in units for row in rows]))
    sums: list[TrajectorySums | None] = []
    for rows in units:
        of_rows = None if current is None else [next(current) for _ in rows]
        sums += [_sum_trajectory(rows, of_rows) if len(rows) > 1 else None] * len(rows)
    return sums


def _sum_trajectory(rows: Sequence[ScoredRow], logprobs: Sequence[Logprobs] | None) -> TrajectorySums:
    """The sums over all rows of one trajectory; the ratio's only with `logprobs`, the current ones."""
    masks = [row.sample.loss_mask for row in rows]
    old = [row.old_logprobs[mask].astype(np.float64) for row, mask in zip(rows, masks, strict=True)]
    sampled = [row.sample.rollout_logprobs[mask] for row, mask in zip(rows, masks, strict=True)]
    current = None if logprobs is None else [values[mask] for values, mask in zip(logprobs, masks, strict=True)]
    return TrajectorySums(
        num_tokens=sum(map(len, old)),
        log_ratio=None if current is None else sum(float((a - b).sum()) for a, b in zip(current, old, strict=True)),
        sampler_gap=sum(float((a - b).sum()) for a, b in zip(old, sampled, strict=True)),
    )


def _combine(advantages: str, loss: str, normalization: LossNormalization) -> PolicyGradient:
    return PolicyGradient(ADVANTAGES[advantages], LOSSES[loss], normalization)


ALGORITHMS: Mapping[str, PolicyGradient] = {
    "grpo": _combine("grpo", "clipped", LossNormalization.TOKEN),
    "dr_grpo": _combine("dr_grpo", "clipped", LossNormalization.CONSTANT),
    "dapo": _combine("grpo", "clipped", LossNormalization.TOKEN),
    "rloo": _combine("rloo", "clipped", LossNormalization.TOKEN),
    "reinforce_plus_plus": _combine("reinforce_plus_plus", "clipped", LossNormalization.TOKEN),
    "reinforce_plus_plus_baseline": _combine("reinforce_plus_plus_baseline", "clipped", LossNormalization.TOKEN),
    "gspo": _combine("grpo", "gspo", LossNormalization.SEQUENCE),
    "gspo_token": _combine("grpo", "gspo_token", LossNormalization.SEQUENCE),
    "cispo": _combine("grpo", "cispo", LossNormalization.TOKEN),
    "sapo": _combine("grpo", "sapo", LossNormalization.SEQUENCE),
    "distillation": _combine("zero", "clipped", LossNormalization.TOKEN),
}
"""What a name of `unbroken train --algorithm` stands for, except online DPO: advantages, a loss, a normalization."""
