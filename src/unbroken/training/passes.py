"""Forward and backward passes over rows, as large as memory allows, made by all processes of a trainer together.

Rows are planned into lanes and passes (`lanes`), and each pass is collated, computed and added to the gradients. If a
process has no memory left, all of them drop the gradients of this call, and begin again with passes of half the size.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from unbroken.errors import TrainingError
from unbroken.progress import advance
from unbroken.routing import ReplayCounts, Routers
from unbroken.training.config import TrainerConfig
from unbroken.training.model.adapters import BasePolicy
from unbroken.training.model.batch import Batch, ScoredRow, TrajectorySums, collate, idle_batch
from unbroken.training.model.images import RowImages
from unbroken.training.model.lanes import (
    MAX_COMPILED_PASS_IDS,
    MAX_PASS_IDS,
    WIDE,
    PassSize,
    RowPass,
    holding_gradients,
    make_probe_pass,
    measure_pass_size,
)
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.routing import RoutingStats, balance_loss, count_ids
from unbroken.training.model.row_scores import RowScores, score_rows
from unbroken.training.model.scores import Entropy, TokenScores
from unbroken.training.model.sharding import SameRows, adding_gradients, on_device
from unbroken.types import Logprobs, TrainingSample

_logger = logging.getLogger(__name__)
StatsT = TypeVar("StatsT")
LossFn: TypeAlias = Callable[[TokenScores, Batch], tuple[torch.Tensor, StatsT]]
"""From the policy at the N loss tokens of one forward pass, and the rows of the pass, to its part of the loss, a scalar
with gradient, and whatever the caller wants to know of the pass. Parts add up over passes and processes. N may be 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes(Generic[StatsT]):
    """The forward passes of one `forward_backward` in one process, before the weights change."""

    stats: tuple[StatsT, ...] = ()
    """What the loss said of each pass; also of those that a process without rows makes while others have some."""
    rows: tuple[int, ...] = ()
    """The numbers of the rows, in the order of the passes."""
    logprobs: tuple[Logprobs, ...] = ()
    """Of the loss tokens of each row, in this order."""
    num_padding: int = 0
    num_shared: int = 0
    """Ids of rows that another row of their pass has in common with them."""
    router_loss: float | None = None
    """Of the rows of all processes, without its weight; None without `TrainerConfig.router_loss_weight`."""
    routing: RoutingStats = field(default_factory=RoutingStats)


class _MemoryIsOut(Exception):  # noqa: N818
    """A process ran out of memory in a pass, and all of them can begin again with smaller ones."""

    def __init__(self, *, longest: int) -> None:
        super().__init__(longest)
        self.longest = longest


class PassMaker:
    """Makes the passes of one model, and knows how many ids fit into one."""

    def __init__(
        self,
        wrapped: Any,
        config: TrainerConfig,
        accelerator: Accelerator,
        *,
        images: RowImages | None,
        routers: Routers | None,
        same_rows: SameRows,
    ) -> None:
        """For a policy as the accelerator `wrapped` it; `same_rows` are the processes that share rows."""
        self.memory: PassSize | None = None
        """What `measure` found, on a GPU without `TrainerConfig.tokens_per_micro_batch`."""
        self.size = config.tokens_per_micro_batch
        """Maximum number of ids of a pass; None before it is measured, when passes have `MAX_PASS_IDS`."""
        self._fits = False
        """Whether passes of this size were made before."""
        self._policy: PolicyLogprobs = accelerator.unwrap_model(wrapped)
        self._wrapped = wrapped
        self._config = config
        self._accelerator = accelerator
        self._images = images
        self._routers = routers
        self._same_rows = same_rows

    @property
    def is_together(self) -> bool:
        """Whether several processes make each forward pass together, also those of `score`."""
        return self._config.parallel.is_sharded or not self._same_rows.is_alone

    @property
    def _max_ids(self) -> int:
        return self.size or MAX_PASS_IDS

    def measure(self, state_bytes: int) -> None:
        """Find out, once, how many ids a pass may have, by what is free on the fullest GPU beside gradients and the
        `state_bytes` that the optimizer will still need.
        """
        self.size = self.size or self._measure(state_bytes)

    def _measure(self, state_bytes: int) -> int:
        if self._accelerator.device.type != "cuda":
            return MAX_PASS_IDS
        max_ids = MAX_COMPILED_PASS_IDS if self._config.compile else MAX_PASS_IDS
        with holding_gradients(self._policy):
            found = measure_pass_size(
                partial(make_probe_pass, self._policy, self._accelerator),
                _CudaMemory(self._accelerator.device),
                reserved_bytes=state_bytes,
                max_ids=max_ids // 2 if self._policy.hidden_size >= WIDE else max_ids,
                agree=lambda value: max(self._gather(value)),
            )
        _logger.info("%s", found)
        self.memory = found
        return found.num_ids

    def score(
        self, policy: PolicyLogprobs | BasePolicy, samples: Sequence[TrainingSample], *, entropy: Entropy = Entropy.NONE
    ) -> list[RowScores]:
        """The scores of each row under a policy, which may be the reference."""
        if not self._same_rows.is_alone:
            shared, mine = self._same_rows.share(samples)
            return self._score_all(policy, shared, entropy)[mine.start : mine.stop]
        return self._score_all(policy, samples, entropy)

    def _score_all(
        self, policy: PolicyLogprobs | BasePolicy, samples: Sequence[TrainingSample], entropy: Entropy
    ) -> list[RowScores]:
        while True:
            try:
                with self._accelerator.autocast():  # as in the policy's own passes, also for a reference
                    return score_rows(
                        policy,
                        samples,
                        tokens_per_micro_batch=self._max_ids,
                        images=self._images,
                        device=self._accelerator.device,
                        together=self.is_together,
                        routers=self._routers,
                        entropy=entropy,
                    )
            except torch.OutOfMemoryError as error:
                if self.is_together:
                    raise self._out_of_memory(
                        "the processes that share the model or its rows cannot go back"
                    ) from error
            self._halve_passes(max(len(sample.token_ids) for sample in samples))

    def forward_backward(
        self,
        rows: Sequence[ScoredRow],
        loss: LossFn[StatsT],
        *,
        weights: Sequence[float],
        trajectories: Sequence[TrajectorySums | None] = (),
        entropy: Entropy = Entropy.NONE,
        backward: bool = True,
    ) -> Passes[StatsT]:
        """Add the gradient of the loss of these rows to that of the calls since the last update; without `backward`,
        compute the loss alone.

        `weights` and `trajectories` have one entry per row, for `Batch.weights_N` and `Batch.trajectories`; `entropy`
        says what `TokenScores` has for the loss. The balance of routers is that of the rows of one call.

        Every process makes the same number of passes, idle ones once its rows are used up, because DDP and FSDP
        communicate in each of them. If no process has rows, there are none. Processes that compute the same rows
        (`ParallelConfig.num_same_rows`) share theirs first; the first one counts what all of them compute.
        """
        with torch.set_grad_enabled(backward):
            if self._same_rows.is_alone:
                return self._make_passes(rows, loss, weights, trajectories, entropy)
            return self._make_shared_passes(rows, loss, weights, trajectories, entropy)

    def _make_shared_passes(
        self,
        rows: Sequence[ScoredRow],
        loss: LossFn[StatsT],
        weights: Sequence[float],
        trajectories: Sequence[TrajectorySums | None],
        entropy: Entropy,
    ) -> Passes[StatsT]:
        """Make the passes of the rows of all processes that share theirs; return what belongs to this process."""
        each = list(zip(rows, weights, trajectories or [None] * len(rows), strict=True))
        shared, mine = self._same_rows.share(each)
        parts: tuple[tuple[Any, ...], ...] = tuple(zip(*shared, strict=True)) or ((), (), ())
        passes = self._make_passes(parts[0], loss, parts[1], parts[2] if trajectories else (), entropy)
        own = {
            row - mine.start: of_row for row, of_row in zip(passes.rows, passes.logprobs, strict=True) if row in mine
        }
        # With tensor parallelism each process replays the experts of all ids, otherwise those of its part of them.
        is_counted = self._same_rows.is_first or self._config.parallel.tensor == 1
        replayed = passes.routing if is_counted else RoutingStats()
        routing = replace(
            count_ids([row.sample for row in rows]),
            num_replayed=replayed.num_replayed,
            num_different=replayed.num_different,
        )
        return replace(
            passes if self._same_rows.is_first else Passes(),
            routing=routing,
            rows=tuple(own),
            logprobs=tuple(own.values()),
        )

    def _make_passes(
        self,
        rows: Sequence[ScoredRow],
        loss: LossFn[StatsT],
        weights: Sequence[float],
        trajectories: Sequence[TrajectorySums | None],
        entropy: Entropy,
    ) -> Passes[StatsT]:
        """Make the passes of `forward_backward`, with fewer ids each while memory runs out."""
        has_gradients = torch.is_grad_enabled() and self._has_gradients()
        temperature = rows[0].sample.temperature if rows else 1.0
        add_pass = partial(self._add_pass, loss=loss, temperature=temperature, entropy=entropy)
        while True:
            try:
                passes = self._try_passes(rows, add_pass, weights, trajectories)
                self._fits = True
                return passes
            except _MemoryIsOut as error:
                longest = error.longest
            if has_gradients:
                raise self._out_of_memory("gradients of earlier calls since the last update would be lost")
            if torch.is_grad_enabled():
                self._policy.zero_grad(set_to_none=True)
            self._halve_passes(longest)

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._policy.parameters() if parameter.requires_grad)

    def _try_passes(
        self,
        rows: Sequence[ScoredRow],
        add_pass: Callable[..., tuple[StatsT, torch.Tensor]],
        weights: Sequence[float],
        trajectories: Sequence[TrajectorySums | None],
    ) -> Passes[StatsT]:
        """Add the gradients of all passes.

        Raises:
            _MemoryIsOut: in all processes, if one ran out of memory; some gradients are added.
        """
        samples = [row.sample for row in rows]
        planned = self._policy.plan_rows([sample.token_ids for sample in samples], self._max_ids)
        num_passes = max(gather_object([len(planned)]))
        if num_passes == 0:
            return Passes()
        own = [self._collate(each, rows, weights, trajectories) for each in planned]
        batches = [*own, *[idle_batch(self._accelerator.device)] * (num_passes - len(own))]
        choices_2E = self._count_choices(batches) if self._config.router_loss_weight > 0 else None
        self._take_routing_counts()  # of what was scored before
        longest = max((len(sample.token_ids) for sample in samples), default=0)
        stats, logprobs = self._accumulate(batches, partial(add_pass, choices_2E=choices_2E), longest)
        return Passes(
            stats=stats,
            rows=tuple(chain.from_iterable(each.rows for each in planned)),
            logprobs=tuple(logprobs[: len(rows)]),
            num_padding=sum(batch.num_padding for batch in own),
            num_shared=sum(batch.num_shared for batch in own),
            router_loss=None if choices_2E is None else float(balance_loss(choices_2E, choices_2E[1])),
            routing=self._take_routing_counts() + count_ids(samples),
        )

    def _collate(
        self,
        planned: RowPass,
        rows: Sequence[ScoredRow],
        weights: Sequence[float],
        trajectories: Sequence[TrajectorySums | None],
    ) -> Batch:
        """The batch of a pass, of which `planned` has the numbers of the rows."""
        return collate(
            planned.pick(rows),
            [weights[i] for i in planned.rows],
            self._accelerator.device,
            trajectories=[trajectories[i] for i in planned.rows] if trajectories else (),
            routers=self._routers,
            as_tree=planned.is_tree,
            counts_choices=self._config.router_loss_weight > 0,
        )

    def _accumulate(
        self, batches: Sequence[Batch], add_pass: Callable[[Batch], tuple[StatsT, torch.Tensor]], longest: int
    ) -> tuple[tuple[StatsT, ...], list[Logprobs]]:
        """Backward through all passes; the last one exchanges gradients. Returns what the loss says of each pass, and
        the logprobs of each row, also of those of idle passes, which have none. The longest row has `longest` ids.

        Processes that share nothing but gradients ask each other before the last pass whether memory was enough for
        the others. The first time, that is an idle pass more, because a process that fails while gradients are
        exchanged lets the others wait. Rows are planned longest first: later passes need no more than the first.
        """
        is_alone = self._accelerator.num_processes == 1
        if not (is_alone or self._fits or self.is_together):
            batches = [*batches, idle_batch(self._accelerator.device)]
        found, has_failed = [], False
        try:
            with self._accelerator.no_sync(self._wrapped):
                for batch in batches if is_alone else batches[:-1]:
                    found.append(add_pass(batch))
        except torch.OutOfMemoryError as error:
            if self.is_together:
                raise self._out_of_memory("the processes that share the model or its rows cannot go back") from error
            has_failed = True
        if not self.is_together:
            self._check_others(has_failed, longest)
        if not is_alone:
            try:
                found.append(add_pass(batches[-1]))
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory("the other processes wait for its gradients") from error
        stats, logprobs = zip(*found, strict=True)
        return stats, _split_by_row(torch.cat(logprobs), batches)

    def _check_others(self, has_failed: bool, longest: int) -> None:
        """Raise `_MemoryIsOut` in all processes if one of them `has_failed`, with the longest row of these."""
        if any(failed := self._gather(has_failed and longest)):
            raise _MemoryIsOut(longest=max(failed))

    def _gather(self, value: int) -> list[int]:
        """The values of all processes."""
        with on_device(self._accelerator.device):
            values: list[int] = gather_object([value])
        return values

    def _add_pass(
        self,
        batch: Batch,
        *,
        loss: LossFn[StatsT],
        temperature: float,
        entropy: Entropy,
        choices_2E: torch.Tensor | None,
    ) -> tuple[StatsT, torch.Tensor]:
        """Add the gradient of a pass; return what the loss says of it, and the logprobs.

        Gradients are averaged over the processes, while the loss adds up over all of them: so each process multiplies
        its own by the number of processes, which have other rows, or other ids of them.
        """
        # DDP's model has it by `prepare`, which sharded ones do not go through.
        with self._accelerator.autocast() if self._config.parallel.is_sharded else nullcontext():
            scores = self._run_pass(self._wrapped, batch, temperature, entropy)
        value, of_batch = loss(scores, batch)
        if choices_2E is not None and scores.choices_2E is not None:
            balance = balance_loss(choices_2E, scores.choices_2E[1])
            value = value + self._config.router_loss_weight * balance
        parallel = self._config.parallel
        with adding_gradients(self._policy.parameters()) if parallel.tensor > 1 else nullcontext():
            if torch.is_grad_enabled():
                self._accelerator.backward(value * (self._accelerator.num_processes // parallel.tensor))
                advance(len(batch.num_row_tokens))
        return of_batch, scores.logprobs_N.detach()

    def _run_pass(
        self, policy: Any, batch: Batch, temperature: float = 1.0, entropy: Entropy = Entropy.NONE
    ) -> TokenScores:
        pixels = None
        if self._images is not None:
            pixels = self._images.inputs(batch.images, batch.token_ids_BT.shape, self._accelerator.device)
        given = (batch.position_ids_BT, entropy, batch.experts_BTLK, batch.tree, batch.counted_BT, batch.kept)
        inputs = (batch.token_ids_BT, batch.loss_mask_BT, temperature, pixels, *given, batch.targets)
        scores: TokenScores = policy(*inputs)
        return scores

    @torch.no_grad()
    def _count_choices(self, batches: Sequence[Batch]) -> torch.Tensor:
        """[2, E] the choices of experts in all passes of one call and all processes (`count_choices`).

        A layer's balance is that of all ids of the call, so its gradient needs them before the first pass.
        """
        found = []
        for batch in batches:
            with self._accelerator.autocast():
                without_logprobs = replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT), kept=None)
                found.append(self._run_pass(self._policy, without_logprobs).choices_2E)
        mine = [choices_2E.cpu() for choices_2E in found if choices_2E is not None]
        return torch.stack(gather_object(mine)).sum(0).to(self._accelerator.device)

    def _halve_passes(self, longest: int) -> None:
        """Halve the pass size after a process ran out of memory, whose longest row has `longest` ids.

        Raises:
            TrainingError: that row had its own pass already.
        """
        size = self._max_ids
        if longest >= size:
            raise TrainingError(
                f"a row of {longest:,} ids needs more memory than is free, alone in its pass: set "
                "trainer.gradient_checkpointing, or bound the rows (rollouts.sampling.max_tokens, rollouts.limits)"
            )
        self.size = size // 2
        gc.collect()
        if self._accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        _logger.warning(
            "a pass of %d ids ran out of memory: passes have at most %d from now on. "
            "trainer.tokens_per_micro_batch = %d makes a run begin so",
            size,
            size // 2,
            size // 2,
        )

    def _out_of_memory(self, reason: str) -> TrainingError:
        size = self._max_ids
        return TrainingError(
            f"process {self._accelerator.process_index} ran out of memory in a pass of at most {size:,} ids, and "
            f"{reason}: set trainer.tokens_per_micro_batch to {size // 2} or trainer.gradient_checkpointing to true"
        )

    def _take_routing_counts(self) -> RoutingStats:
        """What was replayed in the passes since the last call."""
        counts = ReplayCounts() if self._routers is None else self._routers.take_counts()
        return RoutingStats(num_replayed=counts.num_replayed, num_different=counts.num_different)


def _split_by_row(logprobs_N: torch.Tensor, batches: Sequence[Batch]) -> list[Logprobs]:
    """The logprobs of each row of all batches."""
    ends = np.cumsum([number for batch in batches for number in batch.num_row_tokens])
    return np.split(logprobs_N.cpu().numpy(), ends[:-1])


@dataclass(frozen=True, slots=True)
class _CudaMemory:
    """The memory of a GPU."""

    device: torch.device

    def restart(self) -> None:
        """Begin to look for a peak."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """The most since `restart`, if as much is in use now as then."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)

    def free(self) -> int:
        """Of the whole GPU, once what PyTorch keeps for later is given back."""
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return free
