"""The trainer: rows in, new weights out. It knows ids, masks and numbers, and no text.

One step on six rows with two minibatches and room for two rows in a forward pass:

    rows 0..5, dealt out at random    minibatch [4 0 3]    passes [4 0] [3]    one update
                                      minibatch [1 5 2]    passes [5 1] [2]    one update
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray

from unbroken.errors import CheckpointError, InvalidInputError, TrainingError, UnbrokenError
from unbroken.images.processing import ImageProcessor
from unbroken.training.batch import Batch, ScoredRow, collate, idle_batch, micro_batches
from unbroken.training.checks import (
    check_accelerator,
    check_parameters,
    check_reference,
    check_rows,
    check_trainable,
)
from unbroken.training.config import OldLogprobs, TrainerConfig
from unbroken.training.images import PixelInputs, RowImages
from unbroken.training.logprobs import PolicyLogprobs
from unbroken.training.losses import LossStats
from unbroken.training.normalization import token_weight
from unbroken.training.objective import batch_loss
from unbroken.training.scoring import score_rows
from unbroken.training.state import check_json, load_averages, load_parameters, read_state, write_state
from unbroken.training.stats import ProcessStats, StepStats, UpdateStats, merge_stats
from unbroken.types import ImageSpan, Logprobs, TrainingSample


class Trainer:
    """Policy-gradient updates of one Hugging Face causal LM, on accelerate.

    Where there are several processes, each passes its own rows to the same calls; loss, gradients and statistics are
    those of all rows together. Tested with two CPU processes (DDP), with images on one of them, on both or on none;
    FSDP, DeepSpeed and autocast are untested. A sharded vision tower would need a forward pass on every process.
    """

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        *,
        policy_version: int = 0,
        accelerator: Accelerator | None = None,
        images: ImageProcessor | None = None,
        reference: Any | None = None,
    ) -> None:
        """Take over `model`, whose weights are the version `policy_version`: they move to the accelerator's device and
        are updated in place. No engine may share them, or they would change under one policy version (I6).

        `images` is the model's own processor. Without it, rows with images are refused. `reference`, which
        `kl_weight` needs, is a model of its own that the policy is held close to; it is taken over too, and frozen.

        Raises:
            InvalidInputError: the model or the reference cannot be followed exactly (`PolicyLogprobs` says when), the
                model's trainable parameters are not float32, the reference is missing, not used or no copy, or the
                accelerator accumulates gradients or scales the loss by itself.
        """
        self.policy_version = policy_version
        self._config = config
        self._accelerator = accelerator or Accelerator()
        check_accelerator(self._accelerator)
        self._images = None if images is None else RowImages(images, max_bytes=config.image_cache_bytes)
        policy = PolicyLogprobs(model, chunk_size=config.logprob_chunk_size, images=self._images)
        check_parameters(model)
        check_reference(reference, model, kl_weight=config.kl_weight)
        self._reference: PolicyLogprobs | None = None
        if reference is not None:
            frozen = reference.requires_grad_(False)
            self._reference = PolicyLogprobs(frozen, chunk_size=config.logprob_chunk_size, images=self._images)
            self._reference.to(self._accelerator.device)
        self._vocab_size = policy.vocab_size
        optimizer = torch.optim.AdamW(
            [parameter for parameter in policy.parameters() if parameter.requires_grad],
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
        )
        self._policy, self._optimizer = self._accelerator.prepare(policy, optimizer)
        self._num_updates = 0
        self._rng = np.random.default_rng(config.seed)

    def step(self, samples: Sequence[TrainingSample]) -> StepStats:
        """Train on each row once, in up to `num_minibatches` updates, and raise the policy version by one.

        Blocks for as long as that takes: call it in a thread from async code.

        Raises:
            InvalidInputError: no process has a row, or a row has images that this trainer or their processor does not
                take, an id outside the vocabulary, nothing to train, or another temperature than the first.
            InvariantError: a row was sampled by newer weights than these, begins with a sampled id, or has other ids
                for an image than the processor makes of it.
            TrainingError: the gradients are not finite. Earlier updates of this step were made, so the weights are
                now between two versions.
        """
        started = time.perf_counter()
        with self._remembered_images():
            self._check_step(samples)
            updates = self._updates(samples)
        seen = ProcessStats(
            num_rows=len(samples),
            num_tokens=sum(len(sample.token_ids) for sample in samples),
            staleness=_staleness(samples, self.policy_version),
            updates=updates,
        )
        self.policy_version += 1
        seconds = time.perf_counter() - started
        return merge_stats(
            gather_object([seen]),
            policy_version=self.policy_version,
            has_reference=self._reference is not None,
            seconds=seconds,
        )

    def any_rows(self, samples: Sequence[TrainingSample]) -> bool:
        """Whether any process has rows for the next step; each passes its own."""
        counts: list[int] = gather_object([len(samples)])
        return sum(counts) > 0

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """One array [T] per row: the logprob of each sampled id under the current weights, NaN elsewhere.

        Which weights sampled the ids does not matter here.

        Raises:
            InvalidInputError: a row has images that are not taken, an id outside the vocabulary, nothing sampled, or
                another temperature than the first.
            InvariantError: a row begins with a sampled id, or has other ids for an image than the processor makes.
        """
        with self._remembered_images():
            check_rows(samples, vocab_size=self._vocab_size, images=self._images)
            return self._score(self._accelerator.unwrap_model(self._policy), samples)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's parameters, as `WeightPublisher.publish` takes them; live, so the next step changes them."""
        model = self._accelerator.unwrap_model(self._policy).model
        return ((name, parameter.detach()) for name, parameter in model.named_parameters())

    def save(self, folder: Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Write all that decides how training goes on into a new folder, with `extra`, which JSON must hold.

        Every process calls it and adds its own generator and its own `extra`; the first one writes.

        Raises:
            InvalidInputError: `extra` does not come back from JSON as it is.
            CheckpointError: it cannot be written; nothing is left of it.
        """
        check_json(extra or {}, name="extra")
        processes = gather_object([{"rng": self._rng.bit_generator.state, "extra": extra or {}}])
        refused = None
        if self._accelerator.is_main_process:
            refused = write_state(
                folder,
                weights=self.named_weights(),
                optimizer=self._optimizer,
                policy_version=self.policy_version,
                num_updates=self._num_updates,
                processes=processes,
            )
        if (refused := gather_object([refused])[0]) is not None:
            raise CheckpointError(refused)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Go on from what `save` wrote, bit for bit, and return this process's `extra`.

        The model's architecture, the config, the reference and the number of processes must be those of the saved
        trainer; only the first and the last are checked.

        Raises:
            CheckpointError: the folder holds no whole checkpoint of as many processes, or one of another model.
        """
        state = read_state(folder)
        if len(state.processes) != self._accelerator.num_processes:
            raise CheckpointError(
                f"{folder} was saved by {len(state.processes)} processes and cannot go on exactly with "
                f"{self._accelerator.num_processes}: start as many"
            )
        load_parameters(self._accelerator.unwrap_model(self._policy).model, state.weights)
        load_averages(self._optimizer, state.optimizer)
        mine = state.processes[self._accelerator.process_index]
        self._rng.bit_generator.state = mine["rng"]
        self._num_updates = state.num_updates
        self.policy_version = state.policy_version
        extra: Mapping[str, Any] = mine["extra"]
        return extra

    def _score(self, policy: PolicyLogprobs, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        return score_rows(
            policy,
            samples,
            tokens_per_micro_batch=self._config.tokens_per_micro_batch,
            images=self._images,
            device=self._accelerator.device,
        )

    def _scored(self, samples: Sequence[TrainingSample]) -> list[ScoredRow]:
        """What the losses of all updates of the step are taken against, computed before the first."""
        references = [None] * len(samples) if self._reference is None else self._score(self._reference, samples)
        return [
            ScoredRow(sample=sample, old_logprobs=old, reference_logprobs=reference)
            for sample, old, reference in zip(samples, self._old_logprobs(samples), references, strict=True)
        ]

    def _old_logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        match self._config.old_logprobs:
            case OldLogprobs.SAMPLER:
                return [sample.rollout_logprobs for sample in samples]
            case OldLogprobs.RECOMPUTE:
                return self._score(self._accelerator.unwrap_model(self._policy), samples)

    def _deal(self, num_rows: int) -> list[list[int]]:
        order: list[int] = self._rng.permutation(num_rows).tolist()
        return [order[k :: self._config.num_minibatches] for k in range(self._config.num_minibatches)]

    def _updates(self, samples: Sequence[TrainingSample]) -> tuple[UpdateStats, ...]:
        scored = self._scored(samples)
        updates = (self._update([scored[i] for i in rows]) for rows in self._deal(len(samples)))
        return tuple(update for update in updates if update is not None)

    def _update(self, rows: Sequence[ScoredRow]) -> UpdateStats | None:
        """One optimizer update on all processes' rows of one minibatch; None where no process has any.

        Every process makes the same number of forward passes, idle ones once its rows are used up, because wrapped
        models talk to each other in each of them.
        """
        device = self._accelerator.device
        passes = micro_batches([len(row.sample.token_ids) for row in rows], self._config.tokens_per_micro_batch)
        everyone = gather_object([(len(passes), len(rows), sum(row.num_loss_tokens for row in rows))])
        num_passes = max(num_passes for num_passes, _, _ in everyone)
        if num_passes == 0:
            return None
        weights = [
            token_weight(
                self._config.normalization,
                num_row_tokens=row.num_loss_tokens,
                num_rows=sum(num_rows for _, num_rows, _ in everyone),
                num_loss_tokens=sum(num_tokens for _, _, num_tokens in everyone),
                max_row_tokens=self._config.max_row_tokens,
            )
            for row in rows
        ]
        batches = [collate([rows[i] for i in chosen], [weights[i] for i in chosen], device) for chosen in passes]
        batches += [idle_batch(device)] * (num_passes - len(batches))
        loss, logprobs = self._accumulate(batches, rows[0].sample.temperature if rows else 1.0)
        learning_rate = self._config.optimizer.learning_rate_at(self._num_updates)
        return UpdateStats(
            loss=loss,
            logprobs=logprobs,
            rollout_logprobs=torch.cat([batch.rollout_logprobs_N for batch in batches]).cpu().numpy(),
            versions=torch.cat([batch.versions_N for batch in batches]).cpu().numpy(),
            grad_norm=self._apply_gradients(learning_rate),
            learning_rate=learning_rate,
        )

    def _accumulate(self, batches: Sequence[Batch], temperature: float) -> tuple[LossStats, Logprobs]:
        """Backward through all passes of one update; gradients are exchanged with the last one.

        Processes' gradients are averaged, and the weights of tokens add up over all processes: so each adds its sum
        times the number of processes.
        """
        stats = LossStats()
        logprobs = []
        for number, batch in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self._accelerator.no_sync(self._policy):
                pixels = self._pixels(batch.images, batch.token_ids_BT)
                logprobs_N = self._policy(batch.token_ids_BT, batch.loss_mask_BT, temperature, pixels)
                loss, of_batch = batch_loss(logprobs_N, batch, self._config)
                self._accelerator.backward(loss * self._accelerator.num_processes)
            stats += of_batch
            logprobs.append(logprobs_N.detach())
        return stats, torch.cat(logprobs).cpu().numpy()

    def _apply_gradients(self, learning_rate: float) -> float:
        """Clip, update, and return the gradient's norm before clipping."""
        max_norm = self._config.optimizer.max_grad_norm
        grad_norm = float(self._accelerator.clip_grad_norm_(self._policy.parameters(), max_norm))
        if not math.isfinite(grad_norm):
            self._optimizer.zero_grad()
            raise TrainingError(
                f"the gradient's norm is {grad_norm} at update {self._num_updates}, which was not made: look for "
                "logprobs far from the sampler's (a ratio beyond float32), huge rewards, or weights that are not finite"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_updates += 1
        return grad_norm

    def _pixels(self, images: Sequence[Sequence[ImageSpan]], token_ids_BT: torch.Tensor) -> PixelInputs | None:
        if self._images is None:
            return None
        return self._images.inputs(images, token_ids_BT.shape, self._accelerator.device)

    @contextmanager
    def _remembered_images(self) -> Iterator[None]:
        """The same image stands in many rows of a group, and is processed once within this context."""
        try:
            yield
        finally:
            if self._images is not None:
                self._images.forget()

    def _check_step(self, samples: Sequence[TrainingSample]) -> None:
        """Check the rows of all processes; what one refuses, all refuse, or the others would wait for it forever."""
        error: UnbrokenError | None = None
        try:
            check_rows(samples, vocab_size=self._vocab_size, images=self._images)
            check_trainable(samples, policy_version=self.policy_version, max_row_tokens=self._config.max_row_tokens)
        except UnbrokenError as found:
            error = found
        everyone = gather_object([(len(samples), None if error is None else str(error))])
        if error is not None:
            raise error
        for process, (_, refused) in enumerate(everyone):
            if refused is not None:
                raise InvalidInputError(f"process {process} refuses its rows: {refused}")
        if not any(num_rows for num_rows, _ in everyone):
            raise InvalidInputError("a step needs at least one row, got none: skip it when all rows were dropped")


def _staleness(samples: Sequence[TrainingSample], policy_version: int) -> NDArray[np.int32]:
    """[N] versions between the weights that sampled each loss token and `policy_version`."""
    versions = [sample.policy_versions[sample.loss_mask] for sample in samples]
    staleness: NDArray[np.int32] = policy_version - np.concatenate([np.zeros(0, dtype=np.int32), *versions])
    return staleness
