"""The trainer's backend: a model, its reference and its optimizer, on accelerate. It knows rows, but no objective.
Passes over rows are made in `passes.py`.

    logprobs(rows)                    of the policy, or of its reference
    forward_backward(rows, loss)      adds to the gradients; any number of times, each with its own rows and loss
    optimizer_step(learning_rate)     makes an update of the gradients, and clears them
    named_weights()                   streamed, for engines
    copy_state(), load(folder)        checkpoints

Every process passes its own rows to the same calls, and the gradients are those of all rows together.
"""

from __future__ import annotations

import math
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from unbroken.decoder_config import DecoderConfig
from unbroken.errors import CheckpointError, InvalidInputError, InvariantError, TrainingError, missing_extra
from unbroken.images.processor import ImageProcessor
from unbroken.routing import Routers
from unbroken.training.config import (
    LoraUpdates,
    OptimizerConfig,
    OptimizerName,
    Reference,
    SharedPrefixes,
    TrainerConfig,
)
from unbroken.training.model.adapters import BasePolicy, causal_lm, checksum_of, checksum_of_frozen, is_adapted
from unbroken.training.model.backbone import enable_checkpointing
from unbroken.training.model.batch import ScoredRow, TrajectorySums
from unbroken.training.model.compilation import compile_blocks
from unbroken.training.model.images import RowImages
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.model.pretrained import (
    ADAPTER_CONFIG,
    AddFiles,
    ModelForm,
    ModelOrigin,
    check_form,
    gather_form,
    read_adapter_config,
    write_adapter_config,
    write_pretrained,
)
from unbroken.training.model.routing import check_experts, check_same_experts
from unbroken.training.model.row_scores import RowScores
from unbroken.training.model.scores import Entropy
from unbroken.training.model.sequence import SequenceGroup, split_lanes
from unbroken.training.model.sharding import (
    SameRows,
    average_whole_gradients,
    clip_gradients,
    fail_together,
    gather_rest,
    gather_tensor,
    get_mesh,
    get_part,
    on_device,
    raise_together,
    reshard,
    shard_like,
)
from unbroken.training.model.weights import checkpoint_parameters, gather_adapter_weights, gather_weights
from unbroken.training.passes import LossFn, Passes, PassMaker
from unbroken.training.state import (
    StoredState,
    TrainerState,
    copy_tensors,
    load_averages,
    name_averages,
    read_state,
    write_state,
)
from unbroken.training.teachers import RowScorer, Teachers, check_plain, check_teacher_rows
from unbroken.types import Logprobs, Numerics, TopLogprobs, TrainingSample
from unbroken.weights.sources import WeightStream

T = TypeVar("T")
StatsT = TypeVar("StatsT")


class TrainerBackend:
    """Computes with one model in all processes of a trainer, and updates it."""

    def __init__(
        self,
        model: Any,
        config: TrainerConfig,
        *,
        accelerator: Accelerator,
        images: ImageProcessor | None = None,
        reference: Any | Reference | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        """Take over `model`, `reference` and `teachers`, as `Trainer` does, which has checked them (`check_parts`)."""
        self.accelerator = accelerator
        self.num_updates = 0
        """Updates of the weights, in all steps."""
        self._config = config
        self._images = None if images is None else RowImages(images, max_bytes=config.image_cache_bytes)
        self._asked = teachers
        self._routers = self._find_routers(model)
        self._let_checkpoint(model)
        self._move(model)
        policy = self._logprobs_of(model, self._routers)
        reshard(policy)
        self._trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        self._origin = ModelOrigin.of(model)
        self._adapter_config = model.peft_config[self._origin.adapter] if self._origin.adapter else None
        self._frozen: str | None = None
        """The checksum of what adapters leave as it is, once a checkpoint needs it."""
        self._same_rows = SameRows(config.parallel.num_same_rows)
        self._reference: PolicyLogprobs | BasePolicy | None = None
        if reference is not None and reference is not Reference.BASE:
            self._reference = self._freeze(reference)
        self._teachers = self._take_teachers(teachers, vocab_size=policy.vocab_size)
        self._wrapped: Any
        self.optimizer: Any
        optimizer = make_optimizer(policy, config.optimizer, accelerator.device)
        prepared = accelerator.prepare(optimizer) if self.is_sharded else accelerator.prepare(policy, optimizer)
        self._wrapped, self.optimizer = (policy, prepared) if self.is_sharded else prepared
        self.policy: PolicyLogprobs = accelerator.unwrap_model(self._wrapped)
        """Without what the accelerator wraps it in."""
        self.passes = PassMaker(
            self._wrapped, config, accelerator, images=self._images, routers=self._routers, same_rows=self._same_rows
        )
        self._writers: torch.distributed.ProcessGroup | None = None
        """Of all processes, for the threads that write checkpoints; made with the first one."""
        self._prepare_passes()
        if reference is Reference.BASE:
            self._reference = BasePolicy(self.policy, model)

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model has embeddings for."""
        return self.policy.vocab_size

    @property
    def _num_top(self) -> int:
        """How many of their most likely ids the teachers give."""
        return 0 if self._asked is None else self._asked.top_k

    @property
    def is_sharded(self) -> bool:
        """Whether each process has a part of the model only."""
        return self._config.parallel.is_sharded

    @property
    def makes_passes_together(self) -> bool:
        """Whether several processes make each forward pass together, also those of `logprobs`."""
        return self.passes.is_together

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference policy."""
        return self._reference is not None

    @property
    def replays_routing(self) -> bool:
        """Whether experts that rows have recorded are replayed."""
        return self._routers is not None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute on this process's device, and keep processed images, which occur in many rows, until the end."""
        try:
            with on_device(self.accelerator.device):
                yield
        finally:
            if self._images is not None:
                self._images.forget()

    def measure(self) -> None:
        """Find out, once, whether prefixes can be shared and how many ids a pass may have. Until then passes have
        `MAX_PASS_IDS`.

        For a trainer's first step: a gradient that the proof computes may not fit beside an engine that is awake.
        """
        with self.accelerator.autocast():
            for policy in self._list_models():
                policy.allow_trees()
        # The optimizer makes its averages with its first update; those that it has are not free now.
        self.passes.measure(0 if self.optimizer.state else _count_state_bytes(self.policy, self._config.optimizer))

    def check_rows(self, samples: Sequence[TrainingSample]) -> None:
        """Check that each row can be scored.

        Raises:
            InvalidInputError: a row has images but there is no processor, an id outside the vocabulary, no sampled id,
                another temperature than the first row, or experts or kept ids that the model does not have; or with a
                teacher's most likely ids, something that changed its distribution.
            InvariantError: a row begins with a sampled id, or has other ids for an image than the processor makes.
        """
        for index, sample in enumerate(samples):
            row = f"samples[{index}]"
            if not sample.sampled_mask.any():
                raise InvalidInputError(f"{row} has no sampled id: omit the row")
            if sample.temperature != samples[0].temperature:
                raise InvalidInputError(
                    f"{row} was sampled at temperature {sample.temperature} and samples[0] at "
                    f"{samples[0].temperature}: the rows of one call must share one temperature"
                )
            self._check_ids(sample, row)
            if self._num_top:
                check_plain(sample, whose="a teacher's most likely ids (top_k)")
            if sample.sampled_mask[0]:
                raise InvariantError(f"{row} begins with a sampled id: without a prompt it has no logprob (I2)")
            self._check_images(sample, row)
        if self._routers is not None:
            check_experts(samples, self._routers)

    def _check_images(self, sample: TrainingSample, row: str) -> None:
        if self._images is not None:
            self._images.check(sample, name=row)
        elif sample.images:
            raise InvalidInputError(
                f"{row} has {len(sample.images)} images: give the trainer the model's image processor as `images`"
            )

    def _check_ids(self, sample: TrainingSample, row: str) -> None:
        largest = {
            "token_ids": sample.token_ids.max(),
            "kept_ids": 0 if sample.kept_ids is None else sample.kept_ids.token_ids.max(initial=0),
            "controls": max((span.controls.largest_id for span in sample.controls), default=0),
        }
        for name, value in largest.items():
            if value >= self.vocab_size:
                raise InvalidInputError(
                    f"{row}.{name} contains {value}, and the model's vocabulary ends at {self.vocab_size - 1}: is this "
                    "the model that sampled?"
                )

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """One array [T] per row: the logprob of each sampled id under the current weights, NaN elsewhere."""
        return [scores.logprobs for scores in self.passes.score(self.policy, samples)]

    def reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[Logprobs]:
        """As `logprobs`, under the reference."""
        assert self._reference is not None, "asked for only if `has_reference`"
        return [scores.logprobs for scores in self.passes.score(self._reference, samples)]

    def teacher_logprobs(
        self, rows: Mapping[str, Sequence[TrainingSample]]
    ) -> dict[str, list[tuple[Logprobs, TopLogprobs | None]]]:
        """As `logprobs`, of the rows of each teacher, by its name, and with `num_top` its most likely ids at each
        sampled id, [S, num_top]. Every process calls it, also without rows.

        Raises:
            InvalidInputError: a teacher has no embedding for an id, or no place for a row; or of a prompt of its own an
                image is missing.
            InvariantError: its prompt has other ids for an image than the processor makes.
            EngineError: one that is elsewhere does not answer.
            TrainingError: another process raised one of these.
        """
        scored: dict[str, list[tuple[Logprobs, TopLogprobs | None]]] = {}
        with self.fail_together():
            for name, teacher in self._teachers.items():
                for index, row in enumerate(rows[name]):
                    self._check_images(row, f"row {index} of teacher {name!r}")
                if isinstance(teacher, PolicyLogprobs):
                    limit = DecoderConfig(teacher.causal.config).max_positions
                    check_teacher_rows(
                        name, rows[name], vocab_size=teacher.vocab_size, max_ids=limit, is_elsewhere=False
                    )
                else:
                    check_teacher_rows(
                        name, rows[name], vocab_size=teacher.vocab_size, max_ids=teacher.max_ids, is_elsewhere=True
                    )
                    scored[name] = teacher.score(rows[name], num_top=self._num_top)
        for name, teacher in self._teachers.items():  # with the other processes, in the same order
            if isinstance(teacher, PolicyLogprobs):
                scored[name] = [(scores.logprobs, scores.top) for scores in self.passes.score(teacher, rows[name])]
        return scored

    def score(self, samples: Sequence[TrainingSample]) -> list[RowScores]:
        """The logprob, the entropy and the rank of each sampled id under the current weights."""
        return self.passes.score(self.policy, samples, entropy=Entropy.RANKED)

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
        compute the loss alone (`PassMaker.forward_backward`).
        """
        return self.passes.forward_backward(
            rows, loss, weights=weights, trajectories=trajectories, entropy=entropy, backward=backward
        )

    def optimizer_step(self, learning_rate: float, *, max_grad_norm: float | None = None) -> float:
        """Clip the gradients, by default to the config's norm, make an update, clear them, and return their norm before
        clipping, over all processes.

        Raises:
            TrainingError: the gradients are not finite. They are cleared, and the weights are as before.
        """
        max_norm = self._config.optimizer.max_grad_norm if max_grad_norm is None else max_grad_norm
        trained = [parameter for parameter in self._wrapped.parameters() if parameter.requires_grad]
        if self._config.parallel.fsdp > 1:
            average_whole_gradients(trained)
        grad_norm = clip_gradients(trained, max_norm)
        if not math.isfinite(grad_norm):
            self.optimizer.zero_grad()
            raise TrainingError(
                f"the gradient's norm is {grad_norm} at update {self.num_updates}, which was not made: look for "
                "logprobs far from the sampler's (a ratio beyond float32), huge rewards, or weights that are not finite"
            )
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # torchao's, in what it has compiled
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_updates += 1
        return grad_norm

    @torch.no_grad()
    def mix_into_reference(self, share: float) -> None:
        """Move the reference by `share` of the way to the policy, of which adapters are merged."""
        parameters = checkpoint_parameters(self._synced_reference())
        with on_device(self.accelerator.device):
            for name, tensor in gather_weights(self._model()):
                part = shard_like(tensor, parameters[name]).to(parameters[name].dtype)
                parameters[name].mul_(1 - share).add_(part, alpha=share)

    def named_weights(self) -> WeightStream:
        """The model's parameters for engines, one after the other (`Trainer.named_weights`)."""
        gather = gather_adapter_weights if self._config.lora_updates is LoraUpdates.ADAPTER else gather_weights
        return gather(self._model())

    def copy_state(self, *, policy_version: int, processes: Sequence[Mapping[str, Any]]) -> Callable[[Path], None]:
        """Copy model, optimizer and a reference that changes to the CPU's memory. Returns what writes the copy, with
        these of the trainer, into a new folder, in any thread: every process copies and writes its part.

        Of a model with adapters only the adapters are copied, with a checksum of the rest.
        """
        if self.accelerator.num_processes > 1 and self._writers is None:
            self._writers = torch.distributed.new_group(backend="gloo")
        self._frozen = self._frozen or self._sum_frozen()
        key, frozen = self.from_all_processes((uuid.uuid4().hex, self._frozen))[0]
        with self.fail_together():
            tensors = {
                f"{part}.{name}": tensor for part, named in self._parts().items() for name, tensor in named.items()
            }
            copied = copy_tensors(tensors, group=self._writers)
        state = TrainerState(
            policy_version=policy_version,
            num_updates=self.num_updates,
            processes=tuple(processes),
            frozen=frozen,
            trained=self._trained,
            model=self._origin,
        )
        return partial(
            write_state, tensors=copied, state=state, adapter_config=self._adapter_config, key=key, group=self._writers
        )

    def load(self, folder: Path) -> TrainerState:
        """Restore what `copy_state` copied, bit for bit, and return the rest for the trainer. Raises as `Trainer.load`
        does.
        """
        num_processes = self.accelerator.num_processes
        with self.fail_together():
            stored = read_state(folder, process=self.accelerator.process_index, num_processes=num_processes)
            state = stored.state
        if state.model.dtype != self._origin.dtype:
            raise CheckpointError(
                f"{folder} is of a model in {state.model.dtype}, and this one is in {self._origin.dtype}: set "
                f"model_settings.dtype to {state.model.dtype}"
            )
        if state.frozen != (frozen := self.from_all_processes(self._sum_frozen())[0]):
            raise CheckpointError(
                f"{folder} is of a model whose frozen weights have the checksum {state.frozen!r}, and not {frozen!r}: "
                "give the trainer the model that the run began with"
            )
        with self.fail_together(), on_device(self.accelerator.device):
            _check_trained(self._trained, stored)
            parts = self._parts()
            if "reference" in parts and not stored.names("reference"):
                raise CheckpointError(f"{folder} has no reference to go on with: it began without reference_sync")
            for part in parts.keys() - {"optimizer"}:
                stored.load(part, parts[part])
            load_averages(self.optimizer, self._trained, stored)
        self.num_updates = state.num_updates
        return state

    def sum_weights(self) -> str:
        """A checksum of the weights that checkpoints have (`checksum_of`)."""
        with on_device(self.accelerator.device):
            return checksum_of(list(checkpoint_parameters(self._model()).items()))

    def find_difference(self, stored: StoredState) -> str | None:
        """The first tensor or number of a checkpoint that is another one here; None if all have the same bits."""
        state = stored.state
        numbers: dict[str, tuple[Any, Any]] = {
            "num_updates": (self.num_updates, state.num_updates),
            "trained": (self._trained, state.trained),
            "frozen": (self._sum_frozen(), state.frozen),
            "model": (self._origin, replace(state.model, source=self._origin.source)),  # it may have moved
        }
        for name, (own, theirs) in numbers.items():
            if own != theirs:
                return f"{name} is {theirs!r}, and here {own!r}"
        if self._read_own_adapter_config() != read_adapter_config(stored.folder):
            return f"{ADAPTER_CONFIG} is not that of the adapters here"
        with on_device(self.accelerator.device):
            for part, tensors in self._parts().items():
                if (tensor := stored.find_difference(part, tensors)) is not None:
                    return f"{part} has other bits in {tensor}"
        return None

    def _read_own_adapter_config(self) -> dict[str, Any] | None:
        """What `read_adapter_config` gives of a checkpoint of this model."""
        if self._adapter_config is None:
            return None
        with tempfile.TemporaryDirectory() as name:
            write_adapter_config(Path(name), self._adapter_config)
            return read_adapter_config(Path(name))

    def _sum_frozen(self) -> str:
        """The checksum of the weights that checkpoints leave out, in the first process; empty if there are none."""
        model = self._model()
        if not is_adapted(model) or not (self.is_sharded or self.accelerator.is_main_process):
            return ""
        return checksum_of_frozen(model, gather=gather_tensor)

    def _parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of a checkpoint: weights, the optimizer's averages, and a reference that changes."""
        parts: dict[str, dict[str, torch.Tensor]] = {
            "weights": dict(checkpoint_parameters(self._model())),
            "optimizer": name_averages(self.optimizer, self._trained),
        }
        if self._config.reference_sync is not None:
            parts["reference"] = dict(checkpoint_parameters(self._synced_reference()))
        return parts

    def save_pretrained(self, folder: Path, form: ModelForm, *, add_files: AddFiles | None = None) -> None:
        """Write the model as transformers, PEFT and vLLM load it; the folder is there whole or not at all.

        Every process calls it; the first one writes, and `add_files` adds what belongs beside the weights, such as the
        tokenizer. A model with adapters is written as an adapter in PEFT's form, or merged by its form.

        Raises:
            InvalidInputError: the model cannot be written in this form (`check_form`).
            ExportError: it cannot be written; nothing is left of it.
            TrainingError: another process raised one of these.
        """
        model = self._model()
        check_form(model, form)
        with on_device(self.accelerator.device):
            weights = gather_form(model, form)
            failure: Exception | None = None
            try:
                if self.accelerator.is_main_process:
                    write_pretrained(folder, model, weights, form, add_files=add_files)
            except Exception as error:
                failure = error
            self.finish_together(weights, failure)

    def from_all_processes(self, value: T) -> list[T]:
        """The values of all processes, in their order, on each of them."""
        with on_device(self.accelerator.device):
            values: list[T] = gather_object([value])
        return values

    def finish_together(self, weights: Iterable[tuple[str, torch.Tensor]], error: Exception | None) -> None:
        """Gather the rest of `weights` with the other processes; if one has an error, raise it there, and a
        `TrainingError` with its text on the others.
        """
        with on_device(self.accelerator.device):
            if self.is_sharded:
                gather_rest(weights)
            raise_together(error)

    def fail_together(self) -> AbstractContextManager[None]:
        """Run a block in every process; if it fails in one, raise on all (`sharding.fail_together`)."""
        return fail_together(self.accelerator.device)

    def _model(self) -> Any:
        """The model without wrappers; its parameters are those of the optimizer."""
        reshard(self.policy)
        return self.policy.model

    def _synced_reference(self) -> Any:
        """The model of a reference that changes."""
        assert isinstance(self._reference, PolicyLogprobs), "check_reference asks for a model"
        reshard(self._reference)
        return self._reference.model

    def _prepare_passes(self) -> None:
        """Compile the layers if the config says so, and find out which ways to compute rows together are exact."""
        with self.computing(), self.accelerator.autocast():
            if self._is_as_vllm:
                self.policy.compute_as_vllm(self._config.sampler_tensor_parallel)
            for each in self._list_models():
                if self._config.parallel.sequence > 1:
                    split_lanes(each, SequenceGroup(self._same_rows.group))
                if self._config.compile:
                    compile_blocks(each)
                each.allow_by_rows()
                each.check_trees()

    def _list_models(self) -> list[PolicyLogprobs]:
        """The policy, its reference and its teachers, as far as they are models of their own here."""
        every = (self.policy, self._reference, *self._teachers.values())
        return [each for each in every if isinstance(each, PolicyLogprobs)]

    def _let_checkpoint(self, model: Any) -> None:
        """Compute layers again in the backward pass, if the config says so, or the model does already with routers,
        which then must choose the replayed experts again.
        """
        causal = causal_lm(model)
        if self._config.gradient_checkpointing or (self._routers is not None and causal.is_gradient_checkpointing):
            enable_checkpointing(causal, routers=self._routers)

    def _find_routers(self, model: Any) -> Routers | None:
        return Routers.find(causal_lm(model)) if self._config.routing_replay else None

    def _move(self, model: Any) -> None:
        """Move a model to this process's device; the parts of a sharded one are where they belong."""
        # Before the probes: beside vLLM those of a model of 135M took 100 s on the CPU, and said nothing of the GPU.
        if not self.is_sharded:
            model.to(self.accelerator.device)

    def _freeze(self, reference: Any) -> PolicyLogprobs:
        """Take over a reference or a teacher that is a separate model."""
        frozen = reference.requires_grad_(False)
        self._move(frozen)
        routers = self._find_routers(frozen)
        if routers is not None and self._routers is not None:
            check_same_experts(routers, self._routers)
        return self._logprobs_of(frozen, routers)

    def _take_teachers(self, teachers: Teachers | None, *, vocab_size: int) -> dict[str, PolicyLogprobs | RowScorer]:
        """Freeze the teachers that are models; in one order in all processes, which ask them together."""
        taken: dict[str, PolicyLogprobs | RowScorer] = {}
        for name, teacher in sorted(({} if teachers is None else teachers.models).items()):
            taken[name] = each = teacher if isinstance(teacher, RowScorer) else self._freeze(teacher)
            if isinstance(each, PolicyLogprobs):
                each.num_top, each.top_below = self._num_top, min(vocab_size, each.vocab_size)
        return taken

    def _logprobs_of(self, model: Any, routers: Routers | None) -> PolicyLogprobs:
        counts = self._config.router_loss_weight > 0
        # Equal ids of two rows may have other targets: a teacher sees another prompt, or scores only one of them.
        is_alone = counts or self._num_top > 0
        return PolicyLogprobs(
            model,
            chunk_size=self._config.logprob_chunk_size,
            images=self._images,
            packing=self._config.packing,
            routers=routers,
            shared_prefixes=SharedPrefixes.NEVER if is_alone else self._config.shared_prefixes,
            counts_choices=counts,
            numerics=Numerics.FAST if self._is_as_vllm else self._config.numerics,
            lora_updates=self._config.lora_updates,
        )

    @property
    def _is_as_vllm(self) -> bool:
        """Whether the policy computes with the bits of vLLM, which has no exact numerics but in bfloat16."""
        return self._config.numerics is Numerics.EXACT and self.accelerator.mixed_precision == "bf16"


def make_optimizer(policy: PolicyLogprobs, config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """An optimizer of what is trained now."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {
        "lr": config.learning_rate, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay
    }  # fmt: skip
    if config.name is OptimizerName.ADAMW:
        # One operation cannot have parameters of two meshes.
        meshes = {get_mesh(parameter) for parameter in parameters}
        options |= {"fused": device.type == "cuda" or None} if len(meshes) <= 1 else {"foreach": False}
        return torch.optim.AdamW(parameters, **options)
    try:
        from torchao.optim import AdamW8bit
    except ModuleNotFoundError as error:
        raise missing_extra(error, "trainer.optimizer.name adamw_8bit needs the torchao extra", "torchao") from error
    optimizer: torch.optim.Optimizer = AdamW8bit(parameters, **options)
    return optimizer


def _count_state_bytes(policy: PolicyLogprobs, config: OptimizerConfig) -> int:
    """Bytes of this process's device that the optimizer keeps from its first update on: AdamW's two averages."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    of_one = 2 if config.name is OptimizerName.ADAMW_8BIT else 8
    return sum(of_one * get_part(parameter).numel() for parameter in trained)


def _check_trained(names: Sequence[str], stored: StoredState) -> None:
    """Raise `CheckpointError` unless the trained parameters, by name and in this order, are those of the checkpoint."""
    if tuple(names) == (trained := stored.state.trained):
        return
    changed = sorted(set(names) ^ set(trained)) or ["their order"]
    raise CheckpointError(
        f"{stored.folder} must hold averages of the trained parameters: {changed[0]} differs, of {len(names)} here and "
        f"{len(trained)} there. The same parameters must have requires_grad as in the run before"
    )
