"""The models of a Tinker server: several LoRA adapters on one base, or one model whose weights are all trained.

    base (frozen)  ──  adapter m1  parameters, their gradients, an optimizer
                   ──  adapter m2  ...                                         one of them is active at a time

One `TrainerBackend` makes the passes of all. Gradients lie at an adapter's own parameters, so they add up over calls
and wait for the model's next step, whatever other models do in between. A saved model is a folder:

    adapter_config.json  adapter_model.safetensors    as PEFT writes them; of a whole model what transformers writes
    optimizer.safetensors                             Adam's averages by the names of the parameters, if asked for
    tinker.json                                       what it is of, and SHA-256 of each file
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import secrets
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import peft
import torch
from accelerate import Accelerator
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from tinker.types import AdamParams, LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM

from unbroken.decoder_config import DecoderConfig
from unbroken.errors import CheckpointError, EngineError, InvalidInputError, TrainingError, UnbrokenError, WeightsError
from unbroken.tinker.losses import Datum, Loss, Output, add_metrics, check_datum, compute_loss, find_loss, find_used
from unbroken.training.backend import TrainerBackend, make_optimizer
from unbroken.training.config import SharedPrefixes, TrainerConfig
from unbroken.training.model.adapters import causal_lm, checksum_of_frozen, fuse_adapters
from unbroken.training.model.batch import RowTargets, ScoredRow
from unbroken.training.model.pretrained import ModelForm, gather_form, write_pretrained
from unbroken.training.model.weights import gather_adapter_weights, gather_weights
from unbroken.training.state import name_averages
from unbroken.types import NO_VERSION, TrainingSample
from unbroken.untrusted import MAX_FACTS_BYTES, read_json_file
from unbroken.weights.files import WeightFiles, describe_file, parse_files
from unbroken.weights.sources import WeightStream

T = TypeVar("T")
MAX_RANK, ALPHA = 512, 32
"""Adapters are scaled by ALPHA / rank, as the hosted API does: the learning rates of its cookbook are for that."""
_ADAPTER, _OPTIMIZER, _STATE = "adapter_model.safetensors", "optimizer.safetensors", "tinker.json"
_FORMAT = 1
_MIN_EPS = 1e-20
"""Without eps a weight whose gradients are all 0 becomes 0 / 0; in float32 less is none where a square is none."""
_PARTS = {"train_attn": ("attn", "attention"), "train_mlp": ("mlp", "ffn", "feed_forward", "expert", "moe")}
"""What the paths of linear layers have in each part of a model."""


@dataclass(slots=True)
class _Model:
    """One model that is trained."""

    adapter: str
    """PEFT's name; empty if all weights are trained."""
    lora: LoraConfig | None
    parameters: Mapping[str, nn.Parameter]
    """By their names in saved files."""
    optimizer: torch.optim.Optimizer
    num_steps: int = 0


class Models:
    """Trains the models of one base. Methods block, and one thread at a time calls them."""

    def __init__(
        self,
        source: str | Path,
        *,
        accelerator: Accelerator | None = None,
        dtype: torch.dtype | None = None,
        tokens_per_pass: int | None = None,
    ) -> None:
        """`dtype` is that of the base, which is loaded with the first model; None: float32, or below adapters bfloat16
        if the accelerator computes in it.
        """
        # A tree of shared prefixes has no targets but its own ids.
        self._config = TrainerConfig(tokens_per_micro_batch=tokens_per_pass, shared_prefixes=SharedPrefixes.NEVER)
        self._source = str(Path(source).absolute()) if Path(source).is_dir() else str(source)
        self._accelerator = accelerator or Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
        self._dtype = dtype
        self._models: dict[str, _Model] = {}
        self._backend: TrainerBackend | None = None
        self._base = ""
        """The checksum of the base's weights as they were loaded."""
        self._num_created = 0

    def run(self, work: Callable[[Models], T]) -> T:
        """Do `work`; a `TrainerProcess` does it elsewhere."""
        return work(self)

    def create(self, model_id: str, lora: LoraConfig | None) -> LoraConfig | None:
        """Make a new model, whose adapter changes nothing yet; with None all weights of the base are trained. Returns
        what is trained: tied embeddings get no adapter, because an engine has one weight for input and output.
        """
        assert model_id not in self._models, "the server names models"
        if self._models and (lora is None or any(model.lora is None for model in self._models.values())):
            raise InvalidInputError(f"model {model_id!r}: one that trains all weights (rank 0) is alone on the base")
        adapter = ""
        if lora is None:
            self._backend = None  # that of adapters, before another base is loaded
            self._backend = self._open(_load_model(self._source, self._dtype or torch.float32))
        else:
            lora, adapter = self._add_adapter(lora)
        self._models[model_id] = _Model(
            adapter=adapter,
            lora=lora,
            parameters=_name_trained(self._get_model(), adapter),
            optimizer=make_optimizer(self._get_backend().policy, self._config.optimizer, self._accelerator.device),
        )
        return lora

    def delete(self, model_id: str) -> None:
        """Forget a model, and free its memory; the base stays for the next adapter."""
        model, backend = self._activate(model_id)
        del self._models[model_id]
        if model.lora is None:
            self._backend = None
            return
        if self._models:  # or PEFT warns that it chooses one
            self._get_model().set_adapter(next(iter(self._models.values())).adapter)
        self._get_model().delete_adapter(model.adapter)
        backend.optimizer = None

    def forward_backward(
        self, model_id: str, data: Sequence[Datum], loss: str, config: Mapping[str, float | str], backward: bool
    ) -> Output:
        """The logprobs of all targets and the sum of the loss, whose gradient is added to that of the calls since the
        model's last step, unless it is not `backward`.
        """
        _, backend = self._activate(model_id)
        chosen, settings = find_loss(loss, config)
        groups: dict[Any, list[int]] = {}
        """Rows of one call of the backend have inputs of the same names and width."""
        for number, datum in enumerate(data):
            width = check_datum(datum, chosen, f"data[{number}]").shape[1:]
            groups.setdefault((width, *sorted(datum.inputs)), []).append(number)
        logprobs = [np.zeros(0, np.float32) for _ in data]
        stats: list[Mapping[str, float]] = []
        compute = partial(compute_loss, chosen, settings)
        with backend.computing():
            backend.measure()
            for numbers in groups.values():
                rows = [_make_row(data[number], chosen) for number in numbers]
                passes = backend.forward_backward(rows, compute, weights=[1.0] * len(rows), backward=backward)
                stats += passes.stats
                for row, found in zip(passes.rows, passes.logprobs, strict=True):
                    targets: Any = data[numbers[row]].targets
                    logprobs[numbers[row]] = np.ascontiguousarray(found.reshape(targets.shape), dtype=np.float32)
        return Output(logprobs=logprobs, metrics=add_metrics([{"loss:sum": 0.0}, *stats]))

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Make a step with the sum of all gradients since the last one, which is 0 without any, and clear them. If they
        are not finite, it is a `TrainingError`, and the weights are as before.
        """
        _check_adam(params)
        model, backend = self._activate(model_id)
        for parameter in model.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for group in model.optimizer.param_groups:
            group.update(betas=(params.beta1, params.beta2), eps=params.eps, weight_decay=params.weight_decay)
        norm = backend.optimizer_step(params.learning_rate, max_grad_norm=params.grad_clip_norm or math.inf)
        model.num_steps += 1
        _check_finite(model, f"the step, with learning_rate {params.learning_rate} and eps {params.eps}, made weights")
        return {"grad_norm": norm, "num_steps": float(model.num_steps)}

    def adapter(self, model_id: str) -> WeightStream:
        """The weights for an engine, to be read once, before the next call: of the adapter alone, or all weights.
        `TrainingError` for those that are not finite, which no engine and no checkpoint gets.
        """
        model, _ = self._activate(model_id)
        _check_finite(model, "nothing is saved of weights")
        return (gather_weights if model.lora is None else gather_adapter_weights)(self._get_model())

    def save(self, model_id: str, folder: Path, optimizer: bool) -> None:
        """Write a model into a folder, which is there whole or not at all; `ExportError` if it cannot be written."""
        model, _ = self._activate(model_id)
        trained = self._get_model()
        form = ModelForm(dtype=None if model.lora else causal_lm(trained).dtype)

        def add_files(aside: Path) -> None:
            if optimizer:
                averages = name_averages(model.optimizer, tuple(model.parameters))
                save_file({name: each.cpu().contiguous() for name, each in averages.items()}, aside / _OPTIMIZER)
            described = {
                "format": _FORMAT,
                "base": self._base,
                "lora": None if model.lora is None else model.lora.model_dump(),
                "num_steps": model.num_steps,
                "files": [asdict(describe_file(path)) for path in sorted(aside.iterdir())],
            }
            (aside / _STATE).write_text(json.dumps(described, indent=1), "utf-8")

        write_pretrained(folder, trained, gather_form(trained, form), form, add_files=add_files)

    @torch.no_grad()
    def load(self, model_id: str, folder: Path, optimizer: bool) -> None:
        """Give a model the weights of a folder, and with `optimizer` its averages, or these begin anew. Gradients are
        cleared. A folder that is damaged or does not fit is a `CheckpointError`, and the model is as it was.
        """
        model, _ = self._activate(model_id)
        state = _read_state(folder)
        self._check_fits(model, state, folder)
        if optimizer and not (folder / _OPTIMIZER).exists():
            raise CheckpointError(f"{folder} was saved without the optimizer's state: load its weights alone")
        stored = self._read_weights(model, folder)
        averages = load_file(folder / _OPTIMIZER) if optimizer else {}
        for name, parameter in model.parameters.items():  # nothing is refused from here on
            parameter.copy_(stored[name])
            parameter.grad = None
        _set_averages(model, averages)
        model.num_steps = int(state["num_steps"]) if optimizer else 0

    def _check_fits(self, model: _Model, state: Mapping[str, Any], folder: Path) -> None:
        """Raise `CheckpointError` unless a saved model is of the kind and the base of this one."""
        saved = None if state["lora"] is None else LoraConfig(**{**state["lora"], "seed": None})
        if saved != (None if model.lora is None else model.lora.model_copy(update={"seed": None})):
            rule = "the lora_config of the model (None: all its weights are trained), seed aside"
            raise CheckpointError(f"{folder} must have {rule}: it has {saved}, and the model {model.lora}")
        if model.lora is not None and state["base"] != self._base:
            found = f"{folder} is of an adapter on weights with the checksum {state['base']!r}, and those of"
            rule = "it must be loaded on the base, and in the type, that it was trained on"
            raise CheckpointError(f"{found} {self._source} have {self._base!r}: {rule}")

    def _read_weights(self, model: _Model, folder: Path) -> Mapping[str, torch.Tensor]:
        """The trained weights of a saved model, which have the names and shapes of the model's."""
        stored: Mapping[str, torch.Tensor] = (
            dict(_load_model(str(folder), causal_lm(self._get_model()).dtype).named_parameters())
            if model.lora is None
            else load_file(folder / _ADAPTER)
        )
        shapes = [{(name, tensor.shape) for name, tensor in each.items()} for each in (model.parameters, stored)]
        if different := sorted(shapes[0] ^ shapes[1]):
            raise CheckpointError(f"{folder} must have the weights of this model, and differs in {different[0][0]}")
        return stored

    def _activate(self, model_id: str) -> tuple[_Model, TrainerBackend]:
        """Let the backend compute with a model, and train it alone."""
        if model_id not in self._models:
            raise InvalidInputError(f"there is no model {model_id!r}: it was deleted, or never created here")
        model, backend = self._models[model_id], self._get_backend()
        if model.lora is not None and self._get_model().active_adapters != [model.adapter]:
            self._get_model().set_adapter(model.adapter)
        backend.optimizer = model.optimizer
        return model, backend

    def _get_backend(self) -> TrainerBackend:
        assert self._backend is not None, "there is one while there are models"
        return self._backend

    def _get_model(self) -> Any:
        return self._get_backend().policy.model

    def _open(self, model: Any) -> TrainerBackend:
        """The backend of a model, which alone keeps it: an accelerator keeps all that it has prepared."""
        backend = TrainerBackend(model, self._config, accelerator=self._accelerator)
        self._accelerator.free_memory()
        return backend

    def _add_adapter(self, lora: LoraConfig) -> tuple[LoraConfig, str]:
        """Add an adapter and make it active; what it trains, and its name."""
        _check_lora(lora)
        is_new = self._backend is None
        base = self._load_base() if is_new else self._get_model().base_model.model
        lora, modules = find_modules(base, lora)
        name = f"m{self._num_created}"
        self._num_created += 1
        settings = peft.LoraConfig(
            r=lora.rank, lora_alpha=ALPHA, target_modules=modules, task_type=peft.TaskType.CAUSAL_LM
        )
        if is_new:
            self._backend = self._open(peft.get_peft_model(base, settings, adapter_name=name))
        else:
            self._get_model().add_adapter(name, settings)
        self._get_model().set_adapter(name)
        fuse_adapters(self._get_model())
        _draw_first_weights(self._get_model(), secrets.randbits(63) if lora.seed is None else lora.seed)
        return lora, name

    def _load_base(self) -> Any:
        """The frozen weights below adapters."""
        is_rounded = self._accelerator.mixed_precision == "bf16"
        base = _load_model(self._source, self._dtype or (torch.bfloat16 if is_rounded else torch.float32))
        base.requires_grad_(False).to(self._accelerator.device)
        self._base = checksum_of_frozen(base)
        return base


class TrainerProcess:
    """`Models` in a separate process, which may have another GPU. It ends with this one, however that ends."""

    def __init__(self, source: str | Path, device: str) -> None:
        """Start it; `device` is what CUDA_VISIBLE_DEVICES is there."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve_models, args=(theirs, source, device), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, work: Callable[[Models], T]) -> T:
        """What `work`, which can be pickled, returns or raises there; `EngineError` once the process has ended."""
        try:
            self._pipe.send(work)
            succeeded, found = self._pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            ended = f"the trainer's process has ended (exit code {self.process.exitcode})"
            raise EngineError(f"{ended} with all its models: go on from what was saved") from None
        if succeeded:
            return cast(T, found)
        raise found


def _serve_models(pipe: Connection, source: str | Path, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    os.environ["CUDA_VISIBLE_DEVICES"] = device
    models = Models(source)
    with suppress(EOFError, OSError):  # the server has ended
        while True:
            work = pipe.recv()
            try:
                answer = True, work(models)
            except UnbrokenError as error:
                answer = False, error
            except Exception as error:  # which may be one that cannot be pickled
                traceback.print_exc()
                answer = False, RuntimeError(f"{type(error).__name__}: {error}")
            pipe.send(answer)


def _name_trained(model: Any, adapter: str) -> dict[str, nn.Parameter]:
    """The trained parameters by their names in saved files, which do not have the adapter's."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return {name.replace(f".{adapter}.", "."): each for name, each in trained.items()} if adapter else trained


def _set_averages(model: _Model, averages: Mapping[str, torch.Tensor]) -> None:
    """Give a model's Adam the averages of a file; of parameters that the file does not name they begin anew."""
    of_parameters = {
        number: {key: averages[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        for number, name in enumerate(model.parameters)
        if f"{name}.step" in averages
    }
    groups = model.optimizer.state_dict()["param_groups"]
    model.optimizer.load_state_dict({"state": of_parameters, "param_groups": groups})


def _check_lora(lora: LoraConfig) -> None:
    if not 1 <= lora.rank <= MAX_RANK:
        raise InvalidInputError(f"lora_config.rank must be in [1, {MAX_RANK}], got {lora.rank}")
    if not 0 <= (lora.seed or 0) < 2**63:
        raise InvalidInputError(f"lora_config.seed must be in [0, 2^63), got {lora.seed}")
    if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
        raise InvalidInputError("lora_config must train mlp, attn or unembed, got False for all three")


@torch.no_grad()
def _draw_first_weights(model: Any, seed: int) -> None:
    """Draw A of the active adapter anew, in PEFT's way, but by a generator that no other thread draws from; B is 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_A." in name:
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
            parameter.copy_(nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator))


def find_modules(model: Any, lora: LoraConfig) -> tuple[LoraConfig, list[str]]:
    """The linear layers of a base that an adapter is for, by their whole names, and what of the config is trained."""
    found = _find_layers(model)
    if DecoderConfig(model.config).is_tied and (lora.train_attn or lora.train_mlp):
        # The SDK asks for all three parts unless it is told otherwise: a tied head is refused only where it is alone.
        lora = lora.model_copy(update={"train_unembed": False})
    asked = [kind for kind in found if getattr(lora, kind)]
    for kind in asked:
        if not found[kind]:
            raise InvalidInputError(
                f"lora_config.{kind} must be False for {type(model).__name__}, which has no linear layers there that "
                "an adapter could change: experts in one tensor and a head tied to embeddings are not such layers"
            )
    return lora, [path for kind in asked for path in found[kind]]


def _find_layers(model: Any) -> dict[str, list[str]]:
    """The linear layers of each part of a base that an adapter could change, by the names of the parts' settings."""
    found: dict[str, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        kind = "train_unembed" if module is head else _find_part(path)
        if kind is not None and _may_adapt(path, module):
            found[kind].append(path)
    if DecoderConfig(model.config).is_tied:
        found["train_unembed"] = []
    if any("expert" in path and weight.dim() == 3 for path, weight in model.named_parameters()):
        found["train_mlp"] = []
    return found


def _may_adapt(path: str, module: nn.Module) -> bool:
    """Whether a module is a linear layer of the base: no router, and no part of an adapter that is there already."""
    layer = module.base_layer if isinstance(module, BaseTunerLayer) else module
    is_router = path.endswith((".gate", ".router", ".shared_expert_gate"))
    is_part = any(part in path for part in (".base_layer", ".lora_A.", ".lora_B."))
    return isinstance(layer, nn.Linear) and not is_router and not is_part


def _find_part(path: str) -> str | None:
    """The part of the model that a layer belongs to, by its name."""
    return next((kind for kind, words in _PARTS.items() if any(word in path.lower() for word in words)), None)


def _check_adam(params: AdamParams) -> None:
    for name, value in params:
        is_beta, least = name.startswith("beta"), _MIN_EPS if name == "eps" else 0
        if not least <= value <= (1 if is_beta else 1e12) or (is_beta and value == 1):  # more overflows within a step
            most = "1)" if is_beta else "1e12]"
            raise InvalidInputError(f"adam_params.{name} must lie in [{least:g}, {most}, got {value}")


def _check_finite(model: _Model, what: str) -> None:
    if not torch.stack([each.isfinite().all() for each in model.parameters.values()]).all():
        raise TrainingError(f"{what} that are not finite: load a checkpoint into this model")


def _load_model(source: str, dtype: torch.dtype) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        rule = "model must be a folder or the hub's name of a causal language model"
        raise InvalidInputError(f"{rule}, got {source!r}: {error}") from None


def _make_row(datum: Datum, loss: Loss) -> ScoredRow:
    """The row of a datum, whose T ids are followed by one more, fed to nothing, so that all T predict something."""
    assert datum.targets is not None, "it is checked"
    mask = np.arange(len(datum.targets) + 1) > 0
    sample = TrainingSample(
        token_ids=np.append(datum.input_ids, 0),
        sampled_mask=mask,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, 0, np.nan).astype(np.float32),  # the loss has its own
        policy_versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        advantages=np.zeros(len(mask), dtype=np.float32),
    )
    targets = RowTargets(ids=datum.targets, trained=find_used(datum, loss), values=datum.inputs)
    return ScoredRow(sample=sample, old_logprobs=sample.rollout_logprobs, targets=targets)


def _read_state(folder: Path) -> Mapping[str, Any]:
    try:
        state = read_json_file(folder / _STATE, max_bytes=MAX_FACTS_BYTES)
        if state["format"] != _FORMAT:
            raise InvalidInputError(f"format must be {_FORMAT}, got {state['format']!r}")
        WeightFiles(folder=folder, policy_version=0, files=parse_files(state["files"])).verify()
        return {name: state[name] for name in ("base", "lora", "num_steps")}
    except (OSError, ValueError, KeyError, TypeError, WeightsError) as error:
        raise CheckpointError(f"{folder} must hold a whole saved model: {type(error).__name__}: {error}") from error
