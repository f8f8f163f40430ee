"""The trainer: rows in, new weights out. It knows ids, masks and numbers, and no text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray

from unbroken.errors import CheckpointError, InvalidInputError, UnbrokenError
from unbroken.images.processing import ImageProcessor
from unbroken.training.checks import (
    check_accelerator,
    check_kind,
    check_parameters,
    check_reference,
    check_rows,
    check_trainable,
)
from unbroken.training.config import Reference, TrainerConfig
from unbroken.training.metrics.stats import ProcessStats, StepStats, merge_stats
from unbroken.training.model.adapters import BasePolicy, causal_lm, check_adapters, checksum_of_frozen, is_adapted
from unbroken.training.model.backbone import enable_checkpointing
from unbroken.training.model.images import RowImages
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.sharding import (
    check_sharding,
    drain,
    full_averages,
    is_sharded,
    on_device,
    raise_together,
    reshard,
    shard_frozen,
)
from unbroken.training.model.weights import full_kept, full_weights, kept_parameters
from unbroken.training.objective.pairs import PreferencePair
from unbroken.training.state import check_json, load_averages, load_parameters, read_state, write_state
from unbroken.training.updates import Updater
from unbroken.types import Logprobs, TrainingSample

T = TypeVar("T")


class Trainer:
    """Policy-gradient updates of one Hugging Face causal LM, on accelerate.

    Where there are several processes, each passes its own rows to the same calls; loss, gradients and statistics are
    those of all rows together. DDP takes images on any of them; FSDP2 (`accelerate launch --use_fsdp --fsdp_version 2`)
    shards text models and the reference, and then `logprobs`, `named_weights`, `save` and `load` are called by all
    processes too. Other ways to shard are refused.

    `Accelerator(mixed_precision="bf16")` computes the layers in bfloat16; weights, gradients, the output embeddings'
    logits, logprobs and the loss stay float32. On a GPU `torch.set_float32_matmul_precision("high")` makes those logits
    nearly as fast as bfloat16's.
    """

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        *,
        policy_version: int = 0,
        accelerator: Accelerator | None = None,
        images: ImageProcessor | None = None,
        reference: Any | Reference | None = None,
    ) -> None:
        """Take over `model`, whose weights are the version `policy_version`: they move to the accelerator's device and
        are updated in place. No engine may share them, or they would change under one policy version (I6).

        A `peft.PeftModel` with LoRA adapters trains those alone; its weights leave merged, under the base's own names.

        `images` is the model's own processor. Without it, rows with images are refused. `reference`, which
        `kl_weight` and `dpo` need, is what the policy is held close to: a model of its own, which is taken over too
        and frozen, or `Reference.BASE`, the model below the adapters.

        Raises:
            InvalidInputError: the model or the reference cannot be followed exactly (`PolicyLogprobs` says when), the
                model's trainable parameters are not float32, the reference is missing, not used or no copy, the
                accelerator accumulates gradients or scales the loss by itself, or shards in a way that
                `check_sharding` refuses, or the adapters are such as `check_adapters` refuses.
        """
        self.policy_version = policy_version
        self._config = config
        self._accelerator = accelerator or Accelerator()
        check_accelerator(self._accelerator)
        self._images = None if images is None else RowImages(images, max_bytes=config.image_cache_bytes)
        check_adapters(model)
        if config.gradient_checkpointing:
            enable_checkpointing(causal_lm(model))
        policy = self._logprobs_of(model)
        check_parameters(model)
        check_sharding(self._accelerator, causal_lm(model), has_images=images is not None)
        check_reference(reference, model, has_reference=config.has_reference)
        self._frozen = checksum_of_frozen(model) if is_adapted(model) and self.is_main_process else ""
        self._reference: PolicyLogprobs | BasePolicy | None = None
        if reference is not None and reference is not Reference.BASE:
            frozen = reference.requires_grad_(False)
            self._reference = self._logprobs_of(frozen)
            shard_frozen(self._accelerator, self._reference)
        self._vocab_size = policy.vocab_size
        optimizer = torch.optim.AdamW(
            [parameter for parameter in policy.parameters() if parameter.requires_grad],
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
        )
        self._policy, self._optimizer = self._accelerator.prepare(policy, optimizer)
        if reference is Reference.BASE:
            self._reference = BasePolicy(self._accelerator.unwrap_model(self._policy), model)
        self._updater = Updater(
            self._policy,
            self._optimizer,
            config,
            accelerator=self._accelerator,
            images=self._images,
            reference=self._reference,
        )

    @property
    def takes_pairs(self) -> bool:
        """Whether `step` takes preference pairs (`TrainerConfig.dpo`), or rows with advantages."""
        return self._config.dpo is not None

    def step(self, samples: Sequence[TrainingSample] | Sequence[PreferencePair]) -> StepStats:
        """Train on each row or pair once, in up to `num_minibatches` updates, and raise the policy version by one.

        Blocks for as long as that takes: call it in a thread from async code. Errors number rows; those of a pair
        follow each other, the chosen one's first.

        Raises:
            InvalidInputError: there are rows where pairs are expected, or the other way round; no process has a row;
                or a row has images that this trainer or their processor does not
                take, an id outside the vocabulary, nothing to train, or another temperature than the first.
            InvariantError: a row was sampled by newer weights than these, begins with a sampled id, or has other ids
                for an image than the processor makes of it.
            TrainingError: the gradients are not finite. Earlier updates of this step were made, so the weights are
                now between two versions.
        """
        started = time.perf_counter()
        with self._computing():
            self._check_step(samples)
            updates = self._updater.run(_units(samples))
        rows = [row for unit in _units(samples) for row in unit]
        seen = ProcessStats(
            num_rows=len(rows),
            num_tokens=sum(len(row.token_ids) for row in rows),
            staleness=_staleness(rows, self.policy_version),
            updates=updates,
        )
        self.policy_version += 1
        seconds = time.perf_counter() - started
        return merge_stats(
            self.from_all_processes(seen),
            policy_version=self.policy_version,
            has_reference=self._reference is not None,
            seconds=seconds,
        )

    @property
    def is_main_process(self) -> bool:
        """Whether this is the one process that writes what all share."""
        return bool(self._accelerator.is_main_process)

    def any_rows(self, samples: Sequence[TrainingSample] | Sequence[PreferencePair]) -> bool:
        """Whether any process has rows or pairs for the next step; each passes its own."""
        return self.in_any_process(bool(samples))

    def in_any_process(self, flag: bool) -> bool:
        """Whether the flag of any process is set: what one cannot do alone, all must know of."""
        return any(self.from_all_processes(flag))

    @property
    def vocab_size(self) -> int:
        """Ids that the model knows."""
        return self._vocab_size

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """One array [T] per row: the logprob of each sampled id under the current weights, NaN elsewhere.

        Which weights sampled the ids does not matter here.

        Raises:
            InvalidInputError: a row has images that are not taken, an id outside the vocabulary, nothing sampled, or
                another temperature than the first.
            InvariantError: a row begins with a sampled id, or has other ids for an image than the processor makes.
        """
        with self._computing():
            check = self._refuse_together if is_sharded(self._accelerator) else nullcontext
            with check():
                self._check_rows(samples)
            return self._updater.logprobs(samples)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters, as `WeightPublisher.publish` takes them; some are live: the next step changes them.

        With FSDP2 each is gathered when it is asked for, by all processes together: each must go through all of them.
        """
        return full_weights(self._model())

    def finish_together(self, weights: Iterable[tuple[str, torch.Tensor]], error: Exception | None) -> None:
        """Take part in what is left of `named_weights` to gather, and raise on every process if one has an error.

        Raises:
            Exception: `error` itself.
            TrainingError: another process has one; the message holds it.
        """
        with on_device(self._accelerator.device):
            if is_sharded(self._accelerator):
                drain(weights)
            raise_together(error)

    def from_main_process(self, value: T) -> T:
        """The first process's value, on all of them."""
        return self.from_all_processes(value)[0]

    def from_all_processes(self, value: T) -> list[T]:
        """The values of all processes, in their order, on all of them."""
        with on_device(self._accelerator.device):
            values: list[T] = gather_object([value])
        return values

    def save(self, folder: Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Write all that decides how training goes on into a new folder, with `extra`, which JSON must hold.

        Every process calls it and adds its own generator and its own `extra`; the first one writes. Of a model with
        adapters only those are written, with a checksum of the rest.

        Raises:
            InvalidInputError: `extra` does not come back from JSON as it is.
            CheckpointError: it cannot be written; nothing is left of it.
        """
        check_json(extra or {}, name="extra")
        with on_device(self._accelerator.device):
            processes = gather_object([{"rng": self._updater.rng.bit_generator.state, "extra": extra or {}}])
            weights, averages = full_kept(self._model()), full_averages(self._optimizer)
            refused = None
            if self.is_main_process:
                refused = write_state(
                    folder,
                    weights=weights,
                    averages=averages,
                    policy_version=self.policy_version,
                    num_updates=self._updater.num_updates,
                    processes=processes,
                    frozen=self._frozen,
                )
            drain(weights, averages)
            if (refused := gather_object([refused])[0]) is not None:
                raise CheckpointError(refused)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Go on from what `save` wrote, bit for bit, and return this process's `extra`.

        The model's architecture, what of it does not train below adapters, the config, the reference and the number
        of processes must be those of the saved trainer; config and reference are not checked.

        Raises:
            CheckpointError: the folder holds no whole checkpoint of as many processes, or one of another model.
        """
        state = read_state(folder)
        if len(state.processes) != self._accelerator.num_processes:
            raise CheckpointError(
                f"{folder} was saved by {len(state.processes)} processes and cannot go on exactly with "
                f"{self._accelerator.num_processes}: start as many"
            )
        if state.frozen != (frozen := self.from_main_process(self._frozen)):
            raise CheckpointError(
                f"{folder} holds what trains, of a model whose other weights have the checksum {state.frozen!r}; this "
                f"model's have {frozen!r}: give the trainer the model that the run began with"
            )
        with on_device(self._accelerator.device):
            load_parameters(kept_parameters(self._model()), state.weights)
            load_averages(self._optimizer, state.optimizer)
        mine = state.processes[self._accelerator.process_index]
        self._updater.rng.bit_generator.state = mine["rng"]
        self._updater.num_updates = state.num_updates
        self.policy_version = state.policy_version
        extra: Mapping[str, Any] = mine["extra"]
        return extra

    def _model(self) -> Any:
        """The model as it was given, whatever wraps it, its parameters as the optimizer has them."""
        policy = self._accelerator.unwrap_model(self._policy)
        reshard(policy)
        return policy.model

    def _logprobs_of(self, model: Any) -> PolicyLogprobs:
        return PolicyLogprobs(
            model, chunk_size=self._config.logprob_chunk_size, images=self._images, packing=self._config.packing
        )

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """On the trainer's device; the same image stands in many rows of a group, and is processed once within this."""
        try:
            with on_device(self._accelerator.device):
                yield
        finally:
            if self._images is not None:
                self._images.forget()

    def _check_step(self, samples: Sequence[TrainingSample] | Sequence[PreferencePair]) -> None:
        with self._refuse_together():
            check_kind(samples, pairs=self.takes_pairs)
            rows = [row for unit in _units(samples) for row in unit]
            self._check_rows(rows)
            check_trainable(rows, policy_version=self.policy_version, max_row_tokens=self._config.max_row_tokens)
        if not self.any_rows(samples):
            raise InvalidInputError("a step needs at least one row, got none: skip it when all rows were dropped")

    def _check_rows(self, samples: Sequence[TrainingSample]) -> None:
        check_rows(samples, vocab_size=self._vocab_size, images=self._images)

    @contextmanager
    def _refuse_together(self) -> Iterator[None]:
        """What one process refuses, all refuse, or the others would wait for it forever."""
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


def _units(samples: Sequence[TrainingSample] | Sequence[PreferencePair]) -> list[tuple[TrainingSample, ...]]:
    """What an update takes whole: a row, or the rows of a pair."""
    return [sample.rows if isinstance(sample, PreferencePair) else (sample,) for sample in samples]


def _staleness(samples: Sequence[TrainingSample], policy_version: int) -> NDArray[np.int32]:
    """[N] versions between the weights that sampled each loss token and `policy_version`."""
    versions = [sample.policy_versions[sample.loss_mask] for sample in samples]
    staleness: NDArray[np.int32] = policy_version - np.concatenate([np.zeros(0, dtype=np.int32), *versions])
    return staleness
