"""The trainer: rows in, new weights out. It knows ids, masks and numbers, but no text.

One step on six units of one row, with two minibatches and room for two rows in a forward pass:

    units 0..5, dealt out at random    minibatch [4 0 3]    passes [4 0] [3]    one update
                                       minibatch [1 5 2]    passes [5 1] [2]    one update

A unit of several rows is in one minibatch; its rows may be in several passes. The backend makes passes and updates.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from unbroken.counters import Counters, Event
from unbroken.errors import InvalidInputError, InvariantError, UnbrokenError
from unbroken.images.processor import ImageProcessor
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.backend import TrainerBackend
from unbroken.training.checks import check_lengths, check_parts, check_teachers, check_trainable, check_units
from unbroken.training.config import OldLogprobs, Reference, TrainerConfig
from unbroken.training.loss_config import ZeroVarianceRows
from unbroken.training.metrics.mismatch import Mismatch, check_one_policy, check_same_bits
from unbroken.training.metrics.stats import ProcessStats, StepStats, UpdateStats, merge_stats
from unbroken.training.metrics.writer import Metrics
from unbroken.training.model.batch import Batch, ScoredRow
from unbroken.training.model.pretrained import AddFiles, ModelForm
from unbroken.training.model.row_scores import RowScores
from unbroken.training.model.scores import TokenScores
from unbroken.training.objective.base import BatchLoss, LeftOut, LossStats, Objective, UpdateSize
from unbroken.training.objective.comparison import Processes
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.objective.samples import TrajectoryRows
from unbroken.training.objective.supervised import Supervised, SupervisedStats
from unbroken.training.state import check_json, read_state
from unbroken.training.teachers import (
    TeacherLogprobs,
    Teachers,
    TeacherSums,
    TeacherTask,
    attach_scores,
    make_teacher_row,
)
from unbroken.types import Logprobs, Numerics, TrainingSample
from unbroken.weights.sources import WeightStream

T = TypeVar("T")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Minibatch:
    """What one update trains on, of this process."""

    units: Sequence[Sequence[ScoredRow]]
    size: UpdateSize
    """Over all processes, of which one has rows at least."""
    supervised: Sequence[TrainingSample] | None = None
    """Rows whose loss is added to that of the units; None: no process has any."""

    @property
    def rows(self) -> list[ScoredRow]:
        """Those of all units."""
        return [row for unit in self.units for row in unit]


class Trainer:
    """Updates one Hugging Face causal LM by an objective, on accelerate.

    Each process passes its own rows to the same calls; loss, gradients and statistics are those of all rows together.
    Any of them may have images. `TrainerConfig.parallel` says how processes share the model and the
    reference; all of them must then call `logprobs` and `named_weights` too. Other ways to shard are refused.

    `Accelerator(mixed_precision="bf16")` computes the layers in bfloat16; weights, gradients, logits, logprobs and the
    loss stay float32. On a GPU the factors of the logits are rounded too (`model.head`), norms are computed in one
    kernel (`model.norms`), and rows may be packed by their borders (`model.varlen`).
    """

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        *,
        objective: Objective[Any] | None = None,
        policy_version: int = 0,
        accelerator: Accelerator | None = None,
        images: ImageProcessor | None = None,
        reference: Any | Reference | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        """Take over `model`, whose weights are the version `policy_version`: they move to the accelerator's device and
        are updated in place. No engine may share them, or they would change under one policy version (I6). Of a
        `peft.PeftModel` the LoRA adapters alone are trained; its weights leave merged, under the base's own names.

        `objective` is `PolicyGradient()`, which is GRPO, unless another is given. Some need a `reference` to hold the
        policy close to: a second model, which is taken over too and frozen, or `Reference.BASE`, the model without its
        adapters. `teachers` score what it trains on (`TrainerConfig.teacher_weight`); models among them are taken over
        and frozen too. `images` is the model's own processor; without it, rows with images are refused.

        Raises:
            InvalidInputError: the logprobs of the model or the reference would not be exact (`PolicyLogprobs`), the
                layers cannot be compiled (`compile_blocks`), or these cannot train together (`check_parts`).
        """
        self.objective = objective or PolicyGradient()
        self.policy_version = policy_version
        accelerator = accelerator or Accelerator()
        check_parts(
            model, config, self.objective, accelerator=accelerator, has_images=images is not None, reference=reference
        )
        check_teachers(teachers, model, config)
        self.backend = TrainerBackend(
            model,
            config,
            accelerator=accelerator,
            images=images,
            reference=reference,
            teachers=teachers,
        )
        self._teachers = teachers
        self._config = config
        self._processes = Processes(accelerator.process_index, self.from_all_processes)
        self._rng = np.random.default_rng(config.seed)
        self._num_steps = 0
        """Steps made, also before a checkpoint. The version tells nothing: a run that continues may skip some."""
        self._entropy_weight = config.entropy_weight
        self._last_entropy: float | None = None
        """Of the last update, with `entropy_control`."""
        self._recomputes = self.objective.get_old_logprobs(config) is OldLogprobs.RECOMPUTE

    @property
    def config(self) -> TrainerConfig:
        """What the methods of its objective get."""
        return self._config

    async def make_units(self, groups: Sequence[TrajectoryGroup], counters: Counters) -> list[Any]:
        """The units of this process's groups, for `step` (`Objective.make_units`), each with its teacher's task."""
        units = await self.objective.make_units(groups, counters, self._config, self._processes)
        if self._teachers is None:
            return units
        # In a thread: prompts are rendered.
        found = await asyncio.to_thread(lambda find: [find(group) for group in groups], self._teachers.find_task)
        tasks = {group.group_id: task for group, task in zip(groups, found, strict=True)}
        return [
            _give_task(unit, tasks.get(unit.group), counters) if isinstance(unit, TrajectoryRows) else unit
            for unit in units
        ]

    def step(
        self, units: Sequence[Any], *, supervised: Sequence[TrainingSample] | None = None, weight: float = 1.0
    ) -> StepStats:
        """Train on each unit `num_iterations` times, in up to `num_minibatches` updates each, and raise the policy
        version by one. The `supervised` rows are spread over the updates in the same way, and the mean of their losses
        is added to that of each with this `weight` (`Supervised`); with None no process has any.

        Units are the objective's: rows with advantages (a `TrajectoryRows`, or one row by itself), or preference pairs.
        Blocks: call it in a thread from async code. Errors number the rows of all units.

        Raises:
            InvalidInputError: a unit is not one of the objective's; no process has any; or a row has images that this
                trainer or their processor does not take, an id outside the vocabulary, nothing to train, or another
                temperature than the first.
            InvariantError: a row was sampled by newer weights, begins with a sampled id, or has other ids for an image
                than the processor makes.
            TrainingError: the gradients are not finite. Earlier updates were made: weights are between two versions.
        """
        started = time.perf_counter()
        seen = self.from_all_processes(self.train_units(units, supervised, weight))
        self._end_step()
        return self._merge_stats(seen, time.perf_counter() - started)

    def train_units(
        self, units: Sequence[Any], supervised: Sequence[TrainingSample] | None = None, weight: float = 1.0
    ) -> ProcessStats:
        """Make the updates of a step, as `step` says, but leave the version as it is."""
        with self.backend.computing():
            self._check_step(units)
            if supervised is not None:
                self._check_supervised(supervised)
            self.backend.measure()
            minibatches = self._make_minibatches(units, supervised)
            num_before, beside = self.backend.num_updates, Supervised(weight=weight)
            updates = [
                self._update(minibatch, beside, has_new_weights=self.backend.num_updates > num_before)
                for minibatch in minibatches
            ]
        rows = [row for unit in units for row in self.objective.get_rows(unit)]
        return ProcessStats(
            num_rows=len(rows),
            num_tokens=sum(len(row.token_ids) for row in rows),
            staleness=_staleness(rows, self.policy_version),
            updates=tuple(updates),
            teachers=self._sum_teachers(minibatches),
        )

    def _merge_stats(self, seen: Sequence[ProcessStats], seconds: float) -> StepStats:
        """The statistics of a step that has ended, of these processes."""
        return merge_stats(
            seen,
            policy_version=self.policy_version,
            has_reference=self.backend.has_reference,
            replays_routing=self.backend.replays_routing,
            is_exact=self._config.numerics is Numerics.EXACT,
            seconds=seconds,
        )

    def supervise(self, rows: Sequence[TrainingSample], *, learning_rate: float | None = None) -> Metrics:
        """Make one update on supervised rows alone (`Supervised`), raise the policy version by one, and return the
        metrics. `learning_rate` takes the place of the optimizer's.

        Blocks; every process calls it with its own rows. Raises as `step` does.
        """
        started = time.perf_counter()
        with self.backend.computing():
            self._check_supervised(rows)
            if not self.in_any_process(bool(rows)):
                raise InvalidInputError("Trainer.supervise needs at least one row in any process, got none")
            self.backend.measure()
            found = self._add_supervised(rows, Supervised())
            rate = learning_rate or self._config.optimizer.learning_rate_at(self.backend.num_updates)
            grad_norm = self.backend.optimizer_step(rate)
        self._end_step()
        return {
            "train/policy_version": self.policy_version,
            **sum(self.from_all_processes(found), SupervisedStats()).get_metrics(),
            "supervised/grad_norm": grad_norm,
            "supervised/learning_rate": rate,
            "seconds/train": time.perf_counter() - started,
        }

    def _end_step(self) -> None:
        """The updates of a step are made."""
        self.policy_version += 1
        self._num_steps += 1
        sync = self._config.reference_sync
        if sync is not None and self._num_steps % sync.every == 0:
            self.backend.mix_into_reference(sync.mixup)

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that writes files for all."""
        return self._processes.index == 0

    def in_any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process. All processes call it."""
        return any(self.from_all_processes(flag))

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model has embeddings for."""
        return self.backend.vocab_size

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """One array [T] per row: the logprob of each sampled id under the current weights, NaN elsewhere.

        Any weights may have sampled the ids. Raises as `TrainerBackend.check_rows` does.
        """
        with self._scoring(samples):
            return self.backend.logprobs(samples)

    def score(self, samples: Sequence[TrainingSample]) -> list[RowScores]:
        """As `logprobs`, with the entropy and the rank of each sampled id, which takes a little longer."""
        with self._scoring(samples):
            return self.backend.score(samples)

    def check_policy(
        self, samples: Sequence[TrainingSample], logprobs: Sequence[Logprobs], *, max_k3: float | None = None
    ) -> Mismatch | None:
        """Check that the sampler of these rows has the trainer's policy, as every step does (`max_policy_k3`, I9).

        `logprobs` are those of `Trainer.logprobs`, `max_k3` a bound in place of the config's. Returns this process's
        mismatch; None if there is nothing to compare: no bound, or no row of the trainer's own version. Every process
        calls it.

        Raises:
            PolicyMismatchError: it has another one.
            InvariantError: numerics are exact, and a logprob has other bits.
            TrainingError: another process raised one of these.
        """
        of_loss = [of_row[sample.loss_mask] for sample, of_row in zip(samples, logprobs, strict=True)]
        if self._config.numerics is Numerics.EXACT:
            self._check_same_bits(samples, of_loss)
        return self._check_one_policy(samples, of_loss, max_k3)

    def find_left_out(
        self, units: Sequence[Sequence[TrainingSample]], logprobs: Sequence[Logprobs]
    ) -> list[LeftOut] | None:
        """What the loss clips and corrects in the rows of trajectories, all rows of each, in a step's first update,
        given the current `logprobs` of the rows; None if the objective does not say so of single tokens.
        """
        sampled = (row.rollout_logprobs for of_unit in units for row in of_unit)
        old = iter(logprobs if self._recomputes else sampled)
        scored = [[ScoredRow(sample=row, old_logprobs=next(old)) for row in of_unit] for of_unit in units]
        return self.objective.find_left_out(scored, logprobs, self._config, device=self.backend.accelerator.device)

    def named_weights(self) -> WeightStream:
        """The model's parameters for `WeightPublisher.publish`, made one after the other as they are read, once.

        Some are not copies, and change with the next step.

        With FSDP2 all processes gather each parameter together, so each process must iterate over all of them. With
        `LoraUpdates.ADAPTER` they are the adapter's matrices (`weights.adapters`) instead of merged weights.
        """
        return self.backend.named_weights()

    def finish_together(self, weights: Iterable[tuple[str, torch.Tensor]], error: Exception | None) -> None:
        """Gather the rest of `named_weights` with the other processes; if one has an error, raise it there, and a
        `TrainingError` with its text on the others.
        """
        self.backend.finish_together(weights, error)

    def fail_together(self) -> AbstractContextManager[None]:
        """Run a block in every process; if it fails in one, raise on all (`sharding.fail_together`)."""
        return self.backend.fail_together()

    def from_main_process(self, value: T) -> T:
        """The first process's value, on all processes."""
        return self.from_all_processes(value)[0]

    def from_all_processes(self, value: T) -> list[T]:
        """The values of all processes, in their order, on each of them."""
        return self.backend.from_all_processes(value)

    def save(self, folder: Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Write the trainer's whole state, and `extra`, into a new folder. Every process calls it.

        Raises:
            InvalidInputError: `extra` does not survive JSON.
            CheckpointError: it cannot be written; nothing is left of it.
            TrainingError: another process raised one of these.
        """
        write = self.copy_state(extra=extra)
        with self.fail_together():
            write(folder)

    def copy_state(self, *, extra: Mapping[str, Any] | None = None) -> Callable[[Path], None]:
        """Copy the trainer's whole state, and `extra`, to the CPU's memory. Returns what writes the copy into a new
        folder, in any thread, while steps are made.

        Every process calls both, the first with its own `extra`: each copies and writes its part of the tensors. Of a
        model with adapters only the adapters are copied, with a checksum of the rest. Raises as `save` does.
        """
        with self.fail_together():
            check_json(extra or {}, name="extra")
        processes = self.from_all_processes({**self._describe_process(), "extra": deepcopy(dict(extra or {}))})
        return self.backend.copy_state(policy_version=self.policy_version, processes=processes)

    def save_pretrained(
        self, folder: Path, *, form: ModelForm | None = None, add_files: AddFiles | None = None
    ) -> None:
        """Write the model as transformers, PEFT and vLLM load it; the folder is there whole or not at all.

        Every process calls it; the first one writes, and `add_files` adds what belongs beside the weights, such as the
        tokenizer. A model with adapters is written as an adapter in PEFT's form, or merged by its form.

        Raises:
            InvalidInputError: the model cannot be written in this form (`check_form`).
            ExportError: it cannot be written; nothing is left of it.
            TrainingError: another process raised one of these.
        """
        self.backend.save_pretrained(folder, form or ModelForm(), add_files=add_files)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Restore the state that `save` wrote, bit for bit, and return this process's `extra`. Every process calls it.

        Model, config, objective and reference must be those of the saved trainer; only the model is checked. Of another
        number of processes, or with the model sharded in another way, weights and averages are the same, and process k
        of n that were saved gives its generator and `extra` to the processes k, k + n, k + 2n, ...

        Raises:
            CheckpointError: the folder has no whole checkpoint, or one of another model.
            InvalidInputError: numerics are exact, and the saved trainer's were not, or nobody knows.
            TrainingError: another process raised it.
        """
        state = self.backend.load(folder)
        mine = state.processes[self._processes.index % len(state.processes)]
        theirs = mine.get("numerics")  # None in a checkpoint that was written before it was said there
        if self._config.numerics is Numerics.EXACT and theirs != Numerics.EXACT:
            # The other way round the run claims no equal bits any more.
            known = (
                "does not say with which numerics it was trained" if theirs is None else f"was trained with {theirs}"
            )
            raise InvalidInputError(
                f"numerics must be {Numerics.FAST} to continue from {folder}, which {known}, got exact: nothing proves "
                'the bits of the steps before it. Continue with trainer.numerics = "fast", or begin a run with exact '
                "ones in another output folder"
            )
        self._rng.bit_generator.state = mine["rng"]
        if self._config.entropy_control is not None:
            self._entropy_weight = mine["entropy"]["weight"]
            self._last_entropy = mine["entropy"]["last"]
        self.policy_version = state.policy_version
        self._num_steps = mine["num_steps"]
        extra: Mapping[str, Any] = mine["extra"]
        return extra

    @property
    def weights_checksum(self) -> str | None:
        """A checksum of the weights, with which a run can be verified afterwards; None with fast numerics, and on
        a GPU, where no run can be.
        """
        can_be_verified = self._config.numerics is Numerics.EXACT and self.backend.accelerator.device.type == "cpu"
        return self.backend.sum_weights() if can_be_verified else None

    def find_difference(self, folder: Path) -> str | None:
        """What is the first in a checkpoint of one process that this trainer has otherwise, but for its `extra`; None
        if everything has the same bits. Raises `CheckpointError` if the checkpoint is damaged.
        """
        stored = read_state(folder)
        theirs = {"policy_version": stored.state.policy_version, **stored.state.processes[0]}
        for name, own in {"policy_version": self.policy_version, **self._describe_process()}.items():
            if name not in theirs:
                return f"it does not say {name}, and here it is {own!r}"
            if theirs[name] != own:
                return f"{name} is {theirs[name]!r}, and here {own!r}"
        return self.backend.find_difference(stored)

    def _describe_process(self) -> dict[str, Any]:
        """What a checkpoint has of this process."""
        return {
            "rng": self._rng.bit_generator.state,
            "entropy": {"weight": self._entropy_weight, "last": self._last_entropy},
            "num_steps": self._num_steps,
            # A script's trainer may have `auto`, which is fast: nobody chose for it.
            "numerics": str(Numerics.EXACT if self._config.numerics is Numerics.EXACT else Numerics.FAST),
        }

    def _make_minibatches(self, units: Sequence[Any], supervised: Sequence[TrainingSample] | None) -> list[_Minibatch]:
        """Score the rows, and deal the units out to the minibatches of all iterations, without those of no rows."""
        scored, idle = self._score_units(units), self._count_idle_tokens(units)
        made: list[_Minibatch] = []
        for _ in range(self._config.num_iterations):
            minibatches = list(self._make_trained(scored, idle))
            # Of few units some minibatches have none and make no update. Rows dealt out to those would not be trained.
            if supervised is not None:
                parts = [supervised[k :: len(minibatches)] for k in range(len(minibatches))]
                minibatches = [replace(each, supervised=part) for each, part in zip(minibatches, parts, strict=True)]
            made += minibatches
        return made

    def _make_trained(self, scored: Sequence[Sequence[ScoredRow]], idle: Sequence[int]) -> Iterator[_Minibatch]:
        """The minibatches of an iteration of which any process has rows to train."""
        for numbers in self._deal_out(scored, idle):
            units = [scored[number] for number in numbers if number < len(scored)]
            of_idle = [idle[number - len(scored)] for number in numbers if number >= len(scored)]
            if (size := self._agree_on_size(units, of_idle)) is not None:
                yield _Minibatch(units=units, size=size)

    def _count_idle_tokens(self, units: Sequence[Any]) -> list[int]:
        """The loss tokens of each unit without gradient, if these count in the divisor of the loss."""
        if self._config.zero_variance is ZeroVarianceRows.DROP:
            return []
        idle = [self.objective.get_idle_rows(unit) for unit in units if not self.objective.get_rows(unit)]
        return [sum(int(row.loss_mask.sum()) for row in rows) for rows in idle]

    def _score_units(self, units: Sequence[Any]) -> list[list[ScoredRow]]:
        """The scored rows of each unit that has some, as the objective changes them."""
        units = [unit for unit in units if self.objective.get_rows(unit)]
        rows = [self.objective.get_rows(unit) for unit in units]
        samples, tasks = [sample for of_unit in rows for sample in of_unit], self._find_tasks(units, rows)
        scored = iter(self._score_before_updates(samples, tasks))
        scored_units: list[list[ScoredRow]] = [[next(scored) for _ in of_unit] for of_unit in rows]
        if self.objective.changes_units(self._config):
            with self.fail_together():
                scored_units = self.objective.change_units(units, scored_units, self._config, self._processes)
        return scored_units

    def _score_before_updates(
        self, samples: Sequence[TrainingSample], tasks: Sequence[TeacherTask | None] = ()
    ) -> list[ScoredRow]:
        """Compute the old, reference and teachers' logprobs for all updates of the step."""
        references: Sequence[Logprobs | None] = [None] * len(samples)
        if self.backend.has_reference:
            references = self.backend.reference_logprobs(samples)
        given = zip(samples, self._old_logprobs(samples), references, self._ask_teachers(samples, tasks), strict=True)
        return [
            ScoredRow(sample=sample, old_logprobs=old, reference_logprobs=reference, teacher=teacher)
            for sample, old, reference, teacher in given
        ]

    def _find_tasks(self, units: Sequence[Any], rows: Sequence[Sequence[TrainingSample]]) -> list[TeacherTask | None]:
        """Who scores each row of these units; a row by itself has the only teacher."""
        if self._teachers is None:
            return [None for of_unit in rows for _ in of_unit]
        default = self._teachers.default_task
        tasks = [(unit.task if isinstance(unit, TrajectoryRows) else None) or default for unit in units]
        return [task for task, of_unit in zip(tasks, rows, strict=True) for _ in of_unit]

    def _ask_teachers(
        self, samples: Sequence[TrainingSample], tasks: Sequence[TeacherTask | None]
    ) -> list[TeacherLogprobs | None]:
        """What the teachers say of each row. All processes ask all of them, in the same order."""
        if self._teachers is None:
            return [None] * len(samples)
        rows: dict[str, list[TrainingSample]] = {name: [] for name in self._teachers.models}
        with self.fail_together():
            for sample, task in zip(samples, tasks, strict=True):
                if task is not None:
                    rows[task.teacher].append(make_teacher_row(sample, task))
        scored = {name: iter(of_teacher) for name, of_teacher in self.backend.teacher_logprobs(rows).items()}
        with self.fail_together():
            return [
                None
                if task is None
                else attach_scores(sample, task, next(scored[task.teacher]), vocab_size=self.backend.vocab_size)
                for sample, task in zip(samples, tasks, strict=True)
            ]

    def _sum_teachers(self, minibatches: Sequence[_Minibatch]) -> dict[str, TeacherSums]:
        """What each teacher says of the step's rows, each counted once, whatever the number of iterations."""
        names = () if self._teachers is None else self._teachers.models
        rows = {id(row): row for minibatch in minibatches for row in minibatch.rows}.values()
        sums = dict.fromkeys(names, TeacherSums())
        for row in rows:
            if row.teacher is not None:
                sums[row.teacher.teacher] += TeacherSums.of(row.teacher_gaps, row.teacher_masses)
        return sums

    def _old_logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        if self._recomputes and not self._has_own_old_logprobs:
            return self.backend.logprobs(samples)
        return [sample.rollout_logprobs for sample in samples]

    @property
    def _has_own_old_logprobs(self) -> bool:
        """Whether the old logprobs are those of the update's own passes: of a step with one update."""
        config = self._config
        is_alone = self._recomputes and config.num_minibatches == config.num_iterations == 1
        return is_alone and not self.objective.needs_old_logprobs(config)

    def _deal_out(self, scored: Sequence[Any], idle: Sequence[int]) -> list[list[int]]:
        """The numbers of the units of each minibatch, those without gradient last."""
        order: list[int] = self._rng.permutation(len(scored) + len(idle)).tolist()
        return [order[k :: self._config.num_minibatches] for k in range(self._config.num_minibatches)]

    def _agree_on_size(self, units: Sequence[Sequence[ScoredRow]], idle: Sequence[int] = ()) -> UpdateSize | None:
        """The size of an update over all processes; None if no process has rows to train. `idle` are the numbers of
        loss tokens of units without gradient, which only count in it.
        """
        rows = [row for unit in units for row in unit]
        num_tokens = sum(row.num_loss_tokens for row in rows) + sum(idle)
        mine = (len(units) + len(idle), num_tokens, len(rows) + len(idle))
        has_rows, sizes = zip(*self.from_all_processes((bool(rows), mine)), strict=True)
        return UpdateSize(*(sum(numbers) for numbers in zip(*sizes, strict=True))) if any(has_rows) else None

    def _update(self, minibatch: _Minibatch, beside: Supervised, *, has_new_weights: bool) -> UpdateStats:
        """One optimizer update on all processes' units of one minibatch. The loss of its supervised rows is added, as
        `beside` weighs it.

        `has_new_weights` after an update of the step: then no logprob is that of the weights that sampled.
        """
        units, rows = minibatch.units, minibatch.rows
        config = self._with_entropy_weight()
        weighed = self.objective.weigh(units, config, size=minibatch.size, score=self.backend.logprobs)
        passes = self.backend.forward_backward(
            rows,
            partial(self._compute_loss, config=config),
            weights=weighed.weights,
            trajectories=weighed.trajectories,
            entropy=self.objective.get_entropy(config),
        )
        computed = [rows[index].sample for index in passes.rows]
        if not has_new_weights:
            if config.numerics is Numerics.EXACT:
                self._check_same_bits(computed, passes.logprobs)
            self._check_one_policy(computed, passes.logprobs)
        supervised = SupervisedStats()
        if minibatch.supervised is not None:
            supervised = self._add_supervised(minibatch.supervised, beside)
        loss = sum(passes.stats, weighed.loss)
        self._adapt_entropy_weight(loss)
        learning_rate = config.optimizer.learning_rate_at(self.backend.num_updates)
        rollout_logprobs = [sample.rollout_logprobs[sample.loss_mask] for sample in computed]
        return UpdateStats(
            loss=loss,
            objective=weighed.stats,
            supervised=supervised,
            num_tokens=sum(len(row.sample.token_ids) for row in rows),
            num_padding=passes.num_padding,
            num_shared=passes.num_shared,
            logprobs=_concatenate(passes.logprobs, np.float32),
            rollout_logprobs=_concatenate(rollout_logprobs, np.float32),
            versions=_concatenate([sample.policy_versions[sample.loss_mask] for sample in computed], np.int32),
            grad_norm=self.backend.optimizer_step(learning_rate),
            learning_rate=learning_rate,
            router_loss=passes.router_loss,
            entropy_weight=None if config.entropy_control is None else self._entropy_weight,
            routing=passes.routing,
        )

    def _add_supervised(self, rows: Sequence[TrainingSample], objective: Supervised) -> SupervisedStats:
        """Add the gradient of supervised rows to that of the update; nothing if no process has any.

        They have passes of their own, because all rows of one call have one temperature.
        """
        scored = [ScoredRow(sample=row, old_logprobs=row.rollout_logprobs) for row in rows]
        units = [[row] for row in scored]
        if (size := self._agree_on_size(units)) is None:
            return SupervisedStats()
        weighed = objective.weigh(units, self._config, size=size, score=self.backend.logprobs)
        passes = self.backend.forward_backward(
            scored,
            partial(objective.batch_loss, config=self._config),
            weights=weighed.weights,
            entropy=objective.get_entropy(self._config),
        )
        return SupervisedStats(
            num_rows=len(rows),
            num_tokens=sum(len(row.token_ids) for row in rows),
            num_loss_tokens=sum(map(len, passes.logprobs)),
            nll_sum=-float(sum(values.sum(dtype=np.float64) for values in passes.logprobs)),
        )

    def _compute_loss(self, scores: TokenScores, batch: Batch, config: TrainerConfig) -> BatchLoss:
        """The objective's loss of one forward pass."""
        if self._has_own_old_logprobs:
            batch = replace(batch, old_logprobs_N=scores.logprobs_N.detach())
        return self.objective.batch_loss(scores, batch, config)

    def _with_entropy_weight(self) -> TrainerConfig:
        """The config with the entropy's weight in the next update."""
        if (control := self._config.entropy_control) is None:
            return self._config
        is_low = self._last_entropy is not None and self._last_entropy <= control.target
        return replace(self._config, entropy_weight=self._entropy_weight if is_low else 0.0)

    def _check_same_bits(self, samples: Sequence[TrainingSample], logprobs: Sequence[Logprobs]) -> None:
        check = partial(check_same_bits, samples, logprobs, self.policy_version)
        if self._config.warn_of_inexact:
            try:
                check()
            except InvariantError as error:
                _logger.warning("%s", error)
            return
        self._check_together(check)

    def _check_one_policy(
        self, samples: Sequence[TrainingSample], logprobs: Sequence[Logprobs], max_k3: float | None = None
    ) -> Mismatch | None:
        """`check_one_policy` with this bound or the run's; by default a trainer alone has none."""
        max_k3 = self._config.max_policy_k3 if max_k3 is None else max_k3
        if max_k3 is None or max_k3 == math.inf:
            return None
        check = partial(check_one_policy, samples, logprobs, policy_version=self.policy_version, max_k3=max_k3)
        return self._check_together(check)

    def _check_together(self, check: Callable[[], T]) -> T:
        """Call it in every process, before an update; if it fails in one, no gradient is left in any."""
        try:
            with self.fail_together():
                found = check()
        except UnbrokenError:
            self.backend.optimizer.zero_grad()
            raise
        return found

    def _adapt_entropy_weight(self, loss: LossStats) -> None:
        """By the mean entropy at the update's loss tokens, of all processes."""
        if (control := self._config.entropy_control) is not None:
            sums, counts = zip(*self.from_all_processes((loss.entropy_sum, loss.num_tokens)), strict=True)
            self._last_entropy = sum(sums) / sum(counts)
            self._entropy_weight = control.adapt(self._entropy_weight, self._last_entropy)

    @contextmanager
    def _scoring(self, samples: Sequence[TrainingSample]) -> Iterator[None]:
        with self.backend.computing():
            check = self._raise_on_all if self.backend.makes_passes_together else nullcontext
            with check():
                self.backend.check_rows(samples)
            yield

    def _check_step(self, units: Sequence[Any]) -> None:
        with self._raise_on_all():
            check_units(units, self.objective)
            self.objective.check_units([unit for unit in units if self.objective.get_rows(unit)], self._config)
            of_units = [self.objective.get_rows(unit) for unit in units]
            rows = [row for of_unit in of_units for row in of_unit]
            self.backend.check_rows(rows)
            check_trainable(rows, policy_version=self.policy_version)
            check_lengths(of_units, max_trajectory_tokens=self._config.max_trajectory_tokens)
        if not self.in_any_process(bool(rows)):
            raise InvalidInputError("a step needs at least one row to train in any process, got none: skip such a step")

    def _check_supervised(self, rows: Sequence[TrainingSample]) -> None:
        with self._raise_on_all():
            self.backend.check_rows(rows)
            check_trainable(rows, policy_version=self.policy_version)

    @contextmanager
    def _raise_on_all(self) -> Iterator[None]:
        """Raise on all processes if one refuses its rows, or the others would wait for it forever."""
        error: UnbrokenError | None = None
        try:
            yield
        except UnbrokenError as found:
            error = found
        everyone = self.from_all_processes(None if error is None else str(error))
        if error is not None:
            raise error
        for process, refused in enumerate(everyone):
            if refused is not None:
                raise InvalidInputError(f"process {process} refuses its rows: {refused}")


def _give_task(unit: TrajectoryRows, task: TeacherTask | None, counters: Counters) -> TrajectoryRows:
    """The unit with its teacher's task; without one, which is counted, if its ids are not those of the task."""
    if task is not None and task.unproven and not unit.trajectory:
        raise InvariantError(
            f"a unit of group {unit.group} must name its trajectory: its teacher, with another prompt, scores some only"
        )
    reason = None if task is None or task.unproven is None else task.unproven.get(unit.trajectory)
    if reason is not None:
        counters.count(Event.TEACHER_SKIP, reason)
    return replace(unit, task=task if reason is None else None)


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """[N], empty without arrays."""
    return np.concatenate([np.zeros(0, dtype=dtype), *arrays])


def _staleness(samples: Sequence[TrainingSample], policy_version: int) -> NDArray[np.int32]:
    """[N] versions between the weights that sampled each loss token and `policy_version`."""
    versions = _concatenate([sample.policy_versions[sample.loss_mask] for sample in samples], np.int32)
    staleness: NDArray[np.int32] = policy_version - versions
    return staleness
