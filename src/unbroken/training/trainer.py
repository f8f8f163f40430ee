"""The trainer: rows in, new weights out. It knows ids, masks and numbers, but no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray

from unbroken.counters import Counters
from unbroken.errors import CheckpointError, InvalidInputError, UnbrokenError
from unbroken.images.processor import ImageProcessor
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.routing import Routers
from unbroken.training.checks import check_lengths, check_parts, check_rows, check_trainable, check_units
from unbroken.training.config import (
    LoraUpdates,
    OldLogprobs,
    OptimizerConfig,
    Reference,
    SharedPrefixes,
    TrainerConfig,
)
from unbroken.training.metrics.stats import ProcessStats, StepStats, merge_stats
from unbroken.training.model.adapters import (
    BasePolicy,
    causal_lm,
    checksum_of_frozen,
    is_adapted,
)
from unbroken.training.model.backbone import enable_checkpointing
from unbroken.training.model.batch import ScoredRow
from unbroken.training.model.compilation import compile_blocks
from unbroken.training.model.images import RowImages
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.pretrained import (
    AddFiles,
    ModelForm,
    ModelOrigin,
    check_form,
    gather_form,
    write_pretrained,
)
from unbroken.training.model.routing import check_experts, check_same_experts
from unbroken.training.model.row_scores import RowScores
from unbroken.training.model.sharding import (
    fail_together,
    gather_optimizer_state,
    gather_rest,
    is_sharded,
    on_device,
    raise_together,
    reshard,
    shard_frozen,
    shard_like,
)
from unbroken.training.model.weights import (
    checkpoint_parameters,
    gather_adapter_weights,
    gather_checkpoint,
    gather_weights,
)
from unbroken.training.objective.base import LeftOut, Objective
from unbroken.training.objective.comparison import Processes
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.state import check_json, check_trained, load_averages, load_parameters, read_state, write_state
from unbroken.training.updates import Updater
from unbroken.types import Logprobs, TrainingSample

T = TypeVar("T")


class Trainer:
    """Updates one Hugging Face causal LM by an objective, on accelerate.

    Each process passes its own rows to the same calls; loss, gradients and statistics are those of all rows together.
    Any of them may have images. FSDP2 (`accelerate launch --use_fsdp --fsdp_version 2`) shards the model and the
    reference, and all processes must call `logprobs` and `named_weights` too. Other ways to shard are refused.

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
    ) -> None:
        """Take over `model`, whose weights are the version `policy_version`: they move to the accelerator's device and
        are updated in place. No engine may share them, or they would change under one policy version (I6). Of a
        `peft.PeftModel` the LoRA adapters alone are trained; its weights leave merged, under the base's own names.

        `objective` is `PolicyGradient()`, which is GRPO, unless another is given. Some need a `reference` to hold the
        policy close to: a second model, which is taken over too and frozen, or `Reference.BASE`, the model without its
        adapters. `images` is the model's own processor; without it, rows with images are refused.

        Raises:
            InvalidInputError: the logprobs of the model or the reference would not be exact (`PolicyLogprobs`), the
                layers cannot be compiled (`compile_blocks`), or these cannot train together (`check_parts`).
        """
        self.objective = objective or PolicyGradient()
        self.policy_version = policy_version
        self._config = config
        self._accelerator = accelerator or Accelerator()
        check_parts(
            model, config, self.objective, accelerator=self._accelerator, has_images=images is not None,
            reference=reference,
        )  # fmt: skip
        self._images = None if images is None else RowImages(images, max_bytes=config.image_cache_bytes)
        self._routers = self._find_routers(model)
        if config.gradient_checkpointing or (self._routers is not None and causal_lm(model).is_gradient_checkpointing):
            enable_checkpointing(causal_lm(model), routers=self._routers)
        policy = self._logprobs_of(model, self._routers)
        self._trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        self._origin = ModelOrigin.of(model)
        self._adapter_config = model.peft_config[self._origin.adapter] if self._origin.adapter else None
        self._frozen = checksum_of_frozen(model) if is_adapted(model) and self.is_main_process else ""
        self._reference: PolicyLogprobs | BasePolicy | None = None
        if reference is not None and reference is not Reference.BASE:
            self._reference = self._freeze(reference)
        self._vocab_size = policy.vocab_size
        self._policy, self._optimizer = self._accelerator.prepare(policy, _make_optimizer(policy, config.optimizer))
        self._prepare_passes()
        if reference is Reference.BASE:
            self._reference = BasePolicy(self._accelerator.unwrap_model(self._policy), model)
        self._updater = Updater(
            self._policy,
            self._optimizer,
            config,
            self.objective,
            accelerator=self._accelerator,
            images=self._images,
            reference=self._reference,
        )

    async def make_units(self, groups: Sequence[TrajectoryGroup], counters: Counters) -> list[Any]:
        """The units of this process's groups, for `step` (`Objective.make_units`)."""
        processes = Processes(self._accelerator.process_index, self.from_all_processes)
        return await self.objective.make_units(groups, counters, self._config, processes)

    def has_variance(self, group: TrajectoryGroup) -> bool:
        """Whether a group need not be replaced for its equal rewards (`Objective.has_variance`)."""
        return self.objective.has_variance(group, self._config)

    @property
    def max_steady_staleness(self) -> int:
        """The largest `max_staleness` with which no run of several seeds collapsed (docs/training.md)."""
        return 8 if self.objective.get_old_logprobs(self._config) is OldLogprobs.SAMPLER else 4

    @property
    def can_lack_variance(self) -> bool:
        """Whether groups can be replaced for their equal rewards (`Objective.can_lack_variance`)."""
        return self.objective.can_lack_variance(self._config)

    def step(self, units: Sequence[Any]) -> StepStats:
        """Train on each unit `num_iterations` times, in up to `num_minibatches` updates each, and raise the policy
        version by one.

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
        with self._computing():
            self._check_step(units)
            updates = self._updater.run(units)
        rows = [row for unit in units for row in self.objective.get_rows(unit)]
        seen = ProcessStats(
            num_rows=len(rows),
            num_tokens=sum(len(row.token_ids) for row in rows),
            staleness=_staleness(rows, self.policy_version),
            updates=updates,
        )
        self.policy_version += 1
        sync = self._config.reference_sync
        if sync is not None and self.policy_version % sync.every == 0:
            self._mix_into_reference(sync.mixup)
        seconds = time.perf_counter() - started
        return merge_stats(
            self.from_all_processes(seen),
            policy_version=self.policy_version,
            has_reference=self._reference is not None,
            replays_routing=self._routers is not None,
            seconds=seconds,
        )

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that writes files for all."""
        return bool(self._accelerator.is_main_process)

    def in_any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process. All processes call it."""
        return any(self.from_all_processes(flag))

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model has embeddings for."""
        return self._vocab_size

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """One array [T] per row: the logprob of each sampled id under the current weights, NaN elsewhere.

        Any weights may have sampled the ids. Raises as `check_rows` does.
        """
        with self._scoring(samples):
            return self._updater.logprobs(samples)

    def score(self, samples: Sequence[TrainingSample]) -> list[RowScores]:
        """As `logprobs`, with the entropy and the rank of each sampled id, which takes a little longer."""
        with self._scoring(samples):
            return self._updater.score(samples)

    def find_left_out(self, rows: Sequence[TrainingSample], logprobs: Sequence[Logprobs]) -> list[LeftOut] | None:
        """What the loss clips and corrects in all rows of one trajectory in a step's first update, given the current
        `logprobs` of the rows; None if the objective does not say so of single tokens.
        """
        is_own = self.objective.get_old_logprobs(self._config) is OldLogprobs.RECOMPUTE
        old = logprobs if is_own else [row.rollout_logprobs for row in rows]
        scored = [ScoredRow(sample=row, old_logprobs=of_row) for row, of_row in zip(rows, old, strict=True)]
        return self.objective.find_left_out(scored, logprobs, self._config, device=self._accelerator.device)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters for `WeightPublisher.publish`. Some are not copies, and change with the next step.

        With FSDP2 all processes gather each parameter together, so each process must iterate over all of them. With
        `LoraUpdates.ADAPTER` they are the adapter's matrices (`transfer.adapters`) instead of merged weights.
        """
        if self._config.lora_updates is LoraUpdates.ADAPTER:
            return gather_adapter_weights(self._model())
        return gather_weights(self._model())

    def finish_together(self, weights: Iterable[tuple[str, torch.Tensor]], error: Exception | None) -> None:
        """Gather the rest of `named_weights` with the other processes; if one has an error, raise it there, and a
        `TrainingError` with its text on the others.
        """
        with on_device(self._accelerator.device):
            if is_sharded(self._accelerator):
                gather_rest(weights)
            raise_together(error)

    def fail_together(self) -> AbstractContextManager[None]:
        """Run a block in every process; if it fails in one, raise on all (`sharding.fail_together`)."""
        return fail_together(self._accelerator.device)

    def from_main_process(self, value: T) -> T:
        """The first process's value, on all processes."""
        return self.from_all_processes(value)[0]

    def from_all_processes(self, value: T) -> list[T]:
        """The values of all processes, in their order, on each of them."""
        with on_device(self._accelerator.device):
            values: list[T] = gather_object([value])
        return values

    def save(self, folder: Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Write the trainer's whole state, and `extra`, into a new folder. Every process calls it.

        Raises:
            InvalidInputError: `extra` does not survive JSON.
            CheckpointError: it cannot be written; nothing is left of it.
            TrainingError: another process raised one of these.
        """
        write = self.copy_state(extra=extra)
        with self.fail_together():
            if write is not None:
                write(folder)

    def copy_state(self, *, extra: Mapping[str, Any] | None = None) -> Callable[[Path], None] | None:
        """Copy the trainer's whole state, and `extra`, to the CPU's memory. Returns what writes the copy into a new
        folder, in any thread, while steps go on.

        Every process calls it, with its own `extra`; the first one gets the copy, the others None. Of a model with
        adapters only the adapters are copied, with a checksum of the rest. Raises as `save` does.
        """
        with self.fail_together():
            check_json(extra or {}, name="extra")
        entropy = {"weight": self._updater.entropy_weight, "last": self._updater.last_entropy}
        rng = self._updater.rng.bit_generator.state
        processes = self.from_all_processes({"rng": rng, "entropy": entropy, "extra": deepcopy(dict(extra or {}))})
        weights, averages = gather_checkpoint(self._model()), gather_optimizer_state(self._optimizer)
        reference = gather_checkpoint(self._synced_reference()) if self._config.reference_sync else None
        write: Callable[[Path], None] | None = None
        failure: Exception | None = None
        try:
            if self.is_main_process:
                with on_device(self._accelerator.device):
                    write = partial(
                        write_state,
                        weights=_copy_to_cpu(weights),
                        averages=_copy_to_cpu(averages),
                        reference=None if reference is None else _copy_to_cpu(reference),
                        policy_version=self.policy_version,
                        num_updates=self._updater.num_updates,
                        processes=processes,
                        frozen=self._frozen,
                        trained=self._trained,
                        model=self._origin,
                        adapter_config=self._adapter_config,
                    )
        except Exception as error:
            failure = error
        self.finish_together(chain(weights, averages, reference or ()), failure)
        return write

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
        form = form or ModelForm()
        model = self._model()
        check_form(model, form)
        with on_device(self._accelerator.device):
            weights = gather_form(model, form)
            failure: Exception | None = None
            try:
                if self.is_main_process:
                    write_pretrained(folder, model, weights, form, add_files=add_files)
            except Exception as error:
                failure = error
            self.finish_together(weights, failure)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Restore the state that `save` wrote, bit for bit, and return this process's `extra`. Every process calls it.

        Model, config, objective, reference and number of processes must be those of the saved trainer; config,
        objective and reference are not checked.

        Raises:
            CheckpointError: the folder has no whole checkpoint, or one of another model or number of processes.
            TrainingError: another process raised it.
        """
        with self.fail_together():
            state = read_state(folder)
            if len(state.processes) != self._accelerator.num_processes:
                raise CheckpointError(
                    f"{folder} was saved by {len(state.processes)} processes and cannot be resumed exactly by "
                    f"{self._accelerator.num_processes}: start as many"
                )
        if state.frozen != (frozen := self.from_main_process(self._frozen)):
            raise CheckpointError(
                f"{folder} is of a model whose frozen weights have the checksum {state.frozen!r}, and not {frozen!r}: "
                "give the trainer the model that the run began with"
            )
        with self.fail_together(), on_device(self._accelerator.device):
            check_trained(self._trained, state)
            load_parameters(checkpoint_parameters(self._model()), state.weights)
            load_averages(self._optimizer, state.optimizer)
            if self._config.reference_sync is not None:
                if state.reference is None:
                    raise CheckpointError(f"{folder} has no reference to go on with: it began without reference_sync")
                load_parameters(checkpoint_parameters(self._synced_reference()), state.reference)
        mine = state.processes[self._accelerator.process_index]
        self._updater.rng.bit_generator.state = mine["rng"]
        self._updater.num_updates = state.num_updates
        if self._config.entropy_control is not None:
            self._updater.entropy_weight = mine["entropy"]["weight"]
            self._updater.last_entropy = mine["entropy"]["last"]
        self.policy_version = state.policy_version
        extra: Mapping[str, Any] = mine["extra"]
        return extra

    def _model(self) -> Any:
        """The model without wrappers; its parameters are those of the optimizer."""
        policy = self._accelerator.unwrap_model(self._policy)
        reshard(policy)
        return policy.model

    def _synced_reference(self) -> Any:
        """The model of a reference that changes."""
        assert isinstance(self._reference, PolicyLogprobs), "check_reference asks for a model"
        reshard(self._reference)
        return self._reference.model

    @torch.no_grad()
    def _mix_into_reference(self, share: float) -> None:
        """Move the reference by `share` of the way to the policy, of which adapters are merged."""
        parameters = checkpoint_parameters(self._synced_reference())
        with on_device(self._accelerator.device):
            for name, tensor in gather_weights(self._model()):
                part = shard_like(tensor, parameters[name]).to(parameters[name].dtype)
                parameters[name].mul_(1 - share).add_(part, alpha=share)

    def _prepare_passes(self) -> None:
        """Compile the layers if the config says so, and find out which ways to compute rows together are exact."""
        with self._computing(), self._accelerator.autocast():
            for each in (self._accelerator.unwrap_model(self._policy), self._reference):
                if isinstance(each, PolicyLogprobs):
                    if self._config.compile:
                        compile_blocks(each)
                    each.allow_by_rows()
                    each.check_trees()

    def _find_routers(self, model: Any) -> Routers | None:
        return Routers.find(causal_lm(model)) if self._config.routing_replay else None

    def _freeze(self, reference: Any) -> PolicyLogprobs:
        """Take over a reference that is a model of its own."""
        frozen = reference.requires_grad_(False)
        routers = self._find_routers(frozen)
        if routers is not None and self._routers is not None:
            check_same_experts(routers, self._routers)
        logprobs = self._logprobs_of(frozen, routers)
        shard_frozen(self._accelerator, logprobs)
        return logprobs

    def _logprobs_of(self, model: Any, routers: Routers | None) -> PolicyLogprobs:
        counts = self._config.router_loss_weight > 0
        policy = PolicyLogprobs(
            model,
            chunk_size=self._config.logprob_chunk_size,
            images=self._images,
            packing=self._config.packing,
            routers=routers,
            shared_prefixes=SharedPrefixes.NEVER if counts else self._config.shared_prefixes,
            counts_choices=counts,
        )
        if self._images is not None and is_sharded(self._accelerator):
            policy.show_always(self._images)
        return policy

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute on the trainer's device, and keep processed images, which occur in many rows, until the end."""
        try:
            with on_device(self._accelerator.device):
                yield
        finally:
            if self._images is not None:
                self._images.forget()

    @contextmanager
    def _scoring(self, samples: Sequence[TrainingSample]) -> Iterator[None]:
        with self._computing():
            check = self._raise_on_all if is_sharded(self._accelerator) else nullcontext
            with check():
                self._check_rows(samples)
            yield

    def _check_step(self, units: Sequence[Any]) -> None:
        with self._raise_on_all():
            check_units(units, self.objective)
            self.objective.check_units([unit for unit in units if self.objective.get_rows(unit)], self._config)
            of_units = [self.objective.get_rows(unit) for unit in units]
            rows = [row for of_unit in of_units for row in of_unit]
            self._check_rows(rows)
            check_trainable(rows, policy_version=self.policy_version)
            check_lengths(of_units, max_trajectory_tokens=self._config.max_trajectory_tokens)
        if not self.in_any_process(bool(rows)):
            raise InvalidInputError("a step needs at least one row to train in any process, got none: skip such a step")

    def _check_rows(self, samples: Sequence[TrainingSample]) -> None:
        check_rows(samples, vocab_size=self._vocab_size, images=self._images)
        if self._routers is not None:
            check_experts(samples, self._routers)

    @contextmanager
    def _raise_on_all(self) -> Iterator[None]:
        """Raise on all processes if one refuses its rows, or the others would wait for it forever."""
        error: UnbrokenError | None = None
        try:
            yield
        except UnbrokenError as found:
            error = found
        everyone = gather_object([None if error is None else str(error)])
        if error is not None:
            raise error
        for process, refused in enumerate(everyone):
            if refused is not None:
                raise InvalidInputError(f"process {process} refuses its rows: {refused}")


def _copy_to_cpu(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors]


def _make_optimizer(policy: PolicyLogprobs, config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [parameter for parameter in policy.parameters() if parameter.requires_grad],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def _staleness(samples: Sequence[TrainingSample], policy_version: int) -> NDArray[np.int32]:
    """[N] versions between the weights that sampled each loss token and `policy_version`."""
    versions = [sample.policy_versions[sample.loss_mask] for sample in samples]
    staleness: NDArray[np.int32] = policy_version - np.concatenate([np.zeros(0, dtype=np.int32), *versions])
    return staleness
