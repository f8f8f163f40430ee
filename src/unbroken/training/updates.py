"""The optimizer updates of one step: units that share an update, and rows that share a forward pass.

One step on six units of one row, with two minibatches and room for two rows in a forward pass:

    units 0..5, dealt out at random    minibatch [4 0 3]    passes [4 0] [3]    one update
                                       minibatch [1 5 2]    passes [5 1] [2]    one update

A unit of several rows is in one minibatch; its rows may be in several passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from unbroken.errors import TrainingError
from unbroken.routing import ReplayCounts
from unbroken.training.config import OldLogprobs, TrainerConfig
from unbroken.training.loss_config import ZeroVarianceRows
from unbroken.training.metrics.stats import UpdateStats
from unbroken.training.model.adapters import BasePolicy
from unbroken.training.model.batch import Batch, ScoredRow, collate, idle_batch
from unbroken.training.model.images import PixelInputs, RowImages
from unbroken.training.model.lanes import MAX_COMPILED_PASS_IDS, MAX_PASS_IDS, measure_pass_size
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.routing import RoutingStats, balance_loss, count_ids
from unbroken.training.model.row_scores import RowScores, score_rows
from unbroken.training.model.scores import Entropy, TokenScores
from unbroken.training.model.sharding import fail_together, gather_tensor, is_sharded
from unbroken.training.objective.base import LossStats, Objective, UpdateSize
from unbroken.training.objective.comparison import Processes
from unbroken.types import ImageSpan, Logprobs, TrainingSample


class Updater:
    """Makes a trainer's updates, and holds what they change: policy, optimizer, random generator, a count, and the
    entropy's weight.
    """

    def __init__(
        self,
        policy: Any,
        optimizer: Any,
        config: TrainerConfig,
        objective: Objective[Any],
        *,
        accelerator: Accelerator,
        images: RowImages | None,
        reference: PolicyLogprobs | BasePolicy | None,
    ) -> None:
        """`policy` and `optimizer` are as the accelerator prepared them."""
        self.num_updates = 0
        self.entropy_weight = config.entropy_weight
        self.last_entropy: float | None = None
        """Of the last update, with `entropy_control`."""
        self.rng = np.random.default_rng(config.seed)
        self._policy = policy
        self._unwrapped: PolicyLogprobs = accelerator.unwrap_model(policy)
        self._optimizer = optimizer
        self._config = config
        self._objective = objective
        self._accelerator = accelerator
        self._images = images
        self._reference = reference
        self._pass_size = config.tokens_per_micro_batch
        self._recomputes = objective.get_old_logprobs(config) is OldLogprobs.RECOMPUTE

    def run(self, units: Sequence[Any]) -> tuple[UpdateStats, ...]:
        """Train on each unit's rows `num_iterations` times, in up to `num_minibatches` updates each; processes without
        rows take part too.

        Raises:
            InvalidInputError: the objective refuses what its advantage function returns, or prefixes must be shared and
                cannot be.
            TrainingError: the gradients are not finite. Earlier updates were made.
        """
        self._allow_trees()
        self._pass_size = self._pass_size or self._choose_pass_size()
        get_rows, get_idle = self._objective.get_rows, self._objective.get_idle_rows
        idle = [sum(int(row.loss_mask.sum()) for row in get_idle(unit)) for unit in units if not get_rows(unit)]
        if self._config.zero_variance is ZeroVarianceRows.DROP:
            idle = []
        units = [unit for unit in units if get_rows(unit)]
        rows = [get_rows(unit) for unit in units]
        scored = iter(self._score_before_updates([sample for of_unit in rows for sample in of_unit]))
        scored_units = [[next(scored) for _ in of_unit] for of_unit in rows]
        if self._objective.changes_units(self._config):
            with fail_together(self._accelerator.device):
                processes = Processes(self._accelerator.process_index, lambda value: gather_object([value]))
                scored_units = self._objective.change_units(units, scored_units, self._config, processes)
        dealt = (
            numbers for _ in range(self._config.num_iterations) for numbers in self._deal_out(len(units) + len(idle))
        )
        updates = (
            self._update(
                [scored_units[i] for i in numbers if i < len(units)],
                [idle[i - len(units)] for i in numbers if i >= len(units)],
            )
            for numbers in dealt
        )
        return tuple(update for update in updates if update is not None)

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """One array [T] per row: the logprob of each sampled id under the current weights, NaN elsewhere."""
        return [scores.logprobs for scores in self._score(self._unwrapped, samples)]

    def score(self, samples: Sequence[TrainingSample]) -> list[RowScores]:
        """The logprob, the entropy and the rank of each sampled id under the current weights."""
        return self._score(self._unwrapped, samples, entropy=Entropy.RANKED)

    def _allow_trees(self) -> None:
        """In the first step: a gradient that the proof computes may not fit beside an engine that is awake."""
        with self._accelerator.autocast():
            for policy in (self._unwrapped, self._reference):
                if isinstance(policy, PolicyLogprobs):
                    policy.allow_trees()

    def _choose_pass_size(self) -> int:
        """By what is free on the fullest GPU, now that an engine in this process sleeps."""
        if self._accelerator.device.type != "cuda":
            return MAX_PASS_IDS
        own = measure_pass_size(
            self._unwrapped,
            self._accelerator,
            chunk_size=self._config.logprob_chunk_size,
            max_ids=MAX_COMPILED_PASS_IDS if self._config.compile else MAX_PASS_IDS,
        )
        smallest: int = min(gather_object([own]))
        return smallest

    def _score(
        self,
        policy: PolicyLogprobs | BasePolicy,
        samples: Sequence[TrainingSample],
        *,
        entropy: Entropy = Entropy.NONE,
    ) -> list[RowScores]:
        with self._accelerator.autocast():  # as in the policy's own passes, also for a reference
            return score_rows(
                policy,
                samples,
                tokens_per_micro_batch=self._pass_size or MAX_PASS_IDS,
                images=self._images,
                device=self._accelerator.device,
                together=is_sharded(self._accelerator),
                routers=self._unwrapped.routers,
                entropy=entropy,
            )

    def _score_before_updates(self, samples: Sequence[TrainingSample]) -> list[ScoredRow]:
        """Compute the old and reference logprobs for all updates of the step."""
        references: Sequence[Logprobs | None] = [None] * len(samples)
        if self._reference is not None:
            references = [scores.logprobs for scores in self._score(self._reference, samples)]
        return [
            ScoredRow(sample=sample, old_logprobs=old, reference_logprobs=reference)
            for sample, old, reference in zip(samples, self._old_logprobs(samples), references, strict=True)
        ]

    def _old_logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        if self._recomputes and not self._has_own_old_logprobs:
            return self.logprobs(samples)
        return [sample.rollout_logprobs for sample in samples]

    @property
    def _has_own_old_logprobs(self) -> bool:
        """Whether the old logprobs are those of the update's own passes: of a step with one update."""
        config = self._config
        is_alone = self._recomputes and config.num_minibatches == config.num_iterations == 1
        return is_alone and not self._objective.needs_old_logprobs(config)

    def _deal_out(self, num_units: int) -> list[list[int]]:
        order: list[int] = self.rng.permutation(num_units).tolist()
        return [order[k :: self._config.num_minibatches] for k in range(self._config.num_minibatches)]

    def _update(self, units: Sequence[Sequence[ScoredRow]], idle: Sequence[int]) -> UpdateStats | None:
        """One optimizer update on all processes' units of one minibatch; None where no process has any. Units without
        gradient, of which `idle` has the numbers of loss tokens, count in its size.

        Every process makes the same number of forward passes, idle ones once its rows are used up, because DDP and
        FSDP communicate in each of them.
        """
        device = self._accelerator.device
        rows = [row for unit in units for row in unit]
        passes = self._unwrapped.plan_rows([row.sample.token_ids for row in rows], self._pass_size or MAX_PASS_IDS)
        num_tokens = sum(row.num_loss_tokens for row in rows) + sum(idle)
        everyone = gather_object([(len(passes), len(units) + len(idle), num_tokens, len(rows) + len(idle))])
        passes_of, units_of, tokens_of, rows_of = zip(*everyone, strict=True)
        if (num_passes := max(passes_of)) == 0:
            return None
        size = UpdateSize(num_units=sum(units_of), num_loss_tokens=sum(tokens_of), num_rows=sum(rows_of))
        config = self._with_entropy_weight()
        weighed = self._objective.weigh(units, config, size=size, score=self.logprobs)
        batches = [
            collate(
                [[rows[i] for i in lane] for lane in planned.lanes],
                [weighed.weights[i] for i in planned.rows],
                device,
                trajectories=[weighed.trajectories[i] for i in planned.rows] if weighed.trajectories else (),
                routers=self._unwrapped.routers,
                as_tree=planned.is_tree,
                counts_choices=config.router_loss_weight > 0,
            )
            for planned in passes
        ]
        num_padding = sum(batch.num_padding for batch in batches)
        num_shared = sum(batch.num_shared for batch in batches)
        batches += [idle_batch(device)] * (num_passes - len(batches))
        choices_2E = self._count_choices(batches) if config.router_loss_weight > 0 else None
        self._take_routing_counts()  # of what was scored before
        temperature = rows[0].sample.temperature if rows else 1.0
        loss, logprobs = self._accumulate(weighed.loss, batches, temperature, config, choices_2E)
        self._adapt_entropy_weight(loss)
        learning_rate = self._config.optimizer.learning_rate_at(self.num_updates)
        return UpdateStats(
            loss=loss,
            objective=weighed.stats,
            num_tokens=sum(len(row.sample.token_ids) for row in rows),
            num_padding=num_padding,
            num_shared=num_shared,
            logprobs=logprobs,
            rollout_logprobs=torch.cat([batch.rollout_logprobs_N for batch in batches]).cpu().numpy(),
            versions=torch.cat([batch.versions_N for batch in batches]).cpu().numpy(),
            grad_norm=self._apply_gradients(learning_rate),
            learning_rate=learning_rate,
            router_loss=None if choices_2E is None else float(balance_loss(choices_2E, choices_2E[1])),
            entropy_weight=None if config.entropy_control is None else self.entropy_weight,
            routing=self._take_routing_counts() + count_ids([row.sample for row in rows]),
        )

    def _with_entropy_weight(self) -> TrainerConfig:
        """The config with the entropy's weight in the next update."""
        if (control := self._config.entropy_control) is None:
            return self._config
        is_low = self.last_entropy is not None and self.last_entropy <= control.target
        return replace(self._config, entropy_weight=self.entropy_weight if is_low else 0.0)

    def _adapt_entropy_weight(self, loss: LossStats) -> None:
        """By the mean entropy at the update's loss tokens, of all processes."""
        if (control := self._config.entropy_control) is not None:
            sums, counts = zip(*gather_object([(loss.entropy_sum, loss.num_tokens)]), strict=True)
            self.last_entropy = sum(sums) / sum(counts)
            self.entropy_weight = control.adapt(self.entropy_weight, self.last_entropy)

    @torch.no_grad()
    def _count_choices(self, batches: Sequence[Batch]) -> torch.Tensor:
        """[2, E] the choices of experts in all passes of an update and all processes (`count_choices`).

        A layer's balance is that of all ids of the update, so its gradient needs them before the first pass.
        """
        found = []
        for batch in batches:
            with self._accelerator.autocast():
                without_logprobs = replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))
                found.append(self._run_pass(self._unwrapped, without_logprobs).choices_2E)
        mine = [choices_2E.cpu() for choices_2E in found if choices_2E is not None]
        return torch.stack(gather_object(mine)).sum(0).to(self._accelerator.device)

    def _accumulate(
        self,
        stats: LossStats,
        batches: Sequence[Batch],
        temperature: float,
        config: TrainerConfig,
        choices_2E: torch.Tensor | None,
    ) -> tuple[LossStats, Logprobs]:
        """Backward through all passes of one update; the last one exchanges gradients.

        These are averaged over the processes, while the weights of tokens add up over all of them: so each process
        multiplies its loss by the number of processes.
        """
        logprobs = []
        entropy = self._objective.get_entropy(config)
        for number, batch in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self._accelerator.no_sync(self._policy):
                scores = self._run_pass(self._policy, batch, temperature, entropy)
                if self._has_own_old_logprobs:
                    batch = replace(batch, old_logprobs_N=scores.logprobs_N.detach())
                loss, of_batch = self._objective.batch_loss(scores, batch, config)
                if choices_2E is not None and scores.choices_2E is not None:
                    loss = loss + config.router_loss_weight * balance_loss(choices_2E, scores.choices_2E[1])
                self._accelerator.backward(loss * self._accelerator.num_processes)
            stats += of_batch
            logprobs.append(scores.logprobs_N.detach())
        return stats, torch.cat(logprobs).cpu().numpy()

    def _run_pass(
        self, policy: Any, batch: Batch, temperature: float = 1.0, entropy: Entropy = Entropy.NONE
    ) -> TokenScores:
        pixels = self._pixels(batch.images, batch.token_ids_BT)
        given = (batch.position_ids_BT, entropy, batch.experts_BTLK, batch.tree, batch.counted_BT)
        scores: TokenScores = policy(batch.token_ids_BT, batch.loss_mask_BT, temperature, pixels, *given)
        return scores

    def _take_routing_counts(self) -> RoutingStats:
        """What was replayed in the passes since the last call."""
        routers = self._unwrapped.routers
        counts = ReplayCounts() if routers is None else routers.take_counts()
        return RoutingStats(num_replayed=counts.num_replayed, num_different=counts.num_different)

    def _apply_gradients(self, learning_rate: float) -> float:
        """Clip, update, and return the gradient's norm before clipping."""
        max_norm = self._config.optimizer.max_grad_norm
        grad_norm = float(gather_tensor(torch.nn.utils.clip_grad_norm_(self._policy.parameters(), max_norm)))
        if not math.isfinite(grad_norm):
            self._optimizer.zero_grad()
            raise TrainingError(
                f"the gradient's norm is {grad_norm} at update {self.num_updates}, which was not made: look for "
                "logprobs far from the sampler's (a ratio beyond float32), huge rewards, or weights that are not finite"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_updates += 1
        return grad_norm

    def _pixels(self, images: Sequence[Sequence[ImageSpan]], token_ids_BT: torch.Tensor) -> PixelInputs | None:
        if self._images is None:
            return None
        return self._images.inputs(images, token_ids_BT.shape, self._accelerator.device)
