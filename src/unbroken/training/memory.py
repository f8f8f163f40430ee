"""How much memory of a GPU a run needs, before it loads anything.

    Qwen3-4B, all weights trained, passes of 6,144 ids, one GPU
        weights 15.0    gradients 15.0    optimizer 30.0    pass 46.3    of a process 1.0    107.2 GiB (measured: 107.1)

Counted for `precision = bfloat16` on a GPU, of a decoder whose layers are attention and a gated MLP. Widths in the
formulas: D hidden, Q queries, K keys, F of the MLP, V vocabulary. A number before a width is bytes: 4 of float32, 2 of
bfloat16. Compiled layers keep less, so that this is a bound for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from unbroken.decoder_config import DecoderConfig
from unbroken.training.config import OptimizerName, TrainerConfig
from unbroken.training.model.lanes import (
    MAX_COMPILED_PASS_IDS,
    MAX_PASS_IDS,
    MIN_PASS_IDS,
    USABLE_SHARE,
    WIDE,
    choose_pass_size,
)

GIB = 2**30
_OF_PROCESS = GIB
"""The CUDA context, and workspaces of libraries."""
_LOGIT_COPIES = 3
"""Of a chunk of logits, at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What the memory of a model depends on."""

    num_parameters: int
    num_expert_parameters: int
    """Of them, those of experts."""
    hidden_size: int
    num_layers: int
    queries: int
    keys: int
    num_key_heads: int
    mlp: int
    """Width of the MLP; of a mixture of experts, of all experts that an id goes through."""
    vocab_size: int
    is_tied: bool
    norms_queries: bool
    """Whether queries and keys are normalised."""
    adapter_widths: int
    """Inputs and outputs of all layers with adapters: each rank has as many parameters."""

    @classmethod
    def of(cls, model: Any, *, modules: Sequence[str] = ()) -> ModelSizes:
        """Of a model, which may be without storage (on the device "meta"); `modules` are those to adapt, or all linear
        ones.
        """
        config = model.config.get_text_config()
        decoder = DecoderConfig(model.config)
        adapted = _find_adapted(model, modules)
        return cls(
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            num_expert_parameters=sum(p.numel() for name, p in model.named_parameters() if ".experts." in name),
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            queries=decoder.num_heads * decoder.head_size,
            keys=decoder.num_key_heads * decoder.head_size,
            num_key_heads=decoder.num_key_heads,
            mlp=_find_mlp_width(config),
            vocab_size=config.vocab_size,
            is_tied=config.tie_word_embeddings,
            norms_queries=any(name.endswith(".q_norm") for name, _ in model.named_modules()),
            adapter_widths=sum(module.in_features + module.out_features for module in adapted),
        )

    @property
    def num_embeddings(self) -> int:
        """Parameters of the embeddings, input and output."""
        return self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)


def _find_mlp_width(config: Any) -> int:
    """Of all experts that an id goes through, or of the only MLP."""
    of_expert: int | None = getattr(config, "moe_intermediate_size", None)
    num_experts: int = getattr(config, "num_experts_per_tok", None) or 1
    width: int = config.intermediate_size if not of_expert else num_experts * of_expert
    return width


def _find_adapted(model: Any, names: Sequence[str]) -> list[nn.Linear]:
    """The linear layers with these names, or all of them but the head."""
    head = model.get_output_embeddings()
    linear = [
        (name.rpartition(".")[2], module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    return [module for name, module in linear if not names or name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Over how many processes parts of a model are spread, and what else is on a GPU."""

    fsdp: int = 1
    tensor: int = 1
    expert: int = 1
    sequence: int = 1
    """Processes that each hold a part of the ids of a pass."""
    is_replicated: bool = False
    """Whether several processes have the same weights (DDP), which exchange gradients through a second copy."""
    lora_rank: int = 0
    """0: all weights are trained."""
    is_base_exact: bool = False
    """Whether the base under adapters is float32."""
    num_copies: int = 0
    """Further models: a separate reference, the embedded engine's."""
    engine_share: float = 0.0
    """Of the GPU, of an engine in the trainer's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemoryEstimate:
    """Bytes of one GPU."""

    weights: int
    copies: int
    gradients: int
    optimizer: int
    of_pass: int
    num_ids: int
    """In a pass."""
    engine: int
    """While it samples, beside weights and optimizer."""

    @property
    def total(self) -> int:
        """The most at a time: in a step, or while the engine samples."""
        return self._held + max(self.gradients + self.of_pass, self.engine)

    @property
    def total_awake(self) -> int:
        """The most at a time if the engine keeps its memory while a step is trained."""
        return self._held + self.gradients + self.of_pass + self.engine

    @property
    def _held(self) -> int:
        """Of the trainer, all the time."""
        return self.weights + self.copies + self.optimizer + _OF_PROCESS

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "copies of the model": self.copies,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            f"a pass of {self.num_ids:,} ids": self.of_pass,
            "or, while it samples, the engine": self.engine,
        }
        return ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items() if value)


def estimate_memory(
    sizes: ModelSizes, config: TrainerConfig, layout: Layout, *, device_bytes: float, num_ids: int | None = None
) -> _MemoryEstimate:
    """What one GPU needs. Passes have `num_ids`, or as many as the config says, or as a run would choose."""
    shards = layout.fsdp * layout.tensor
    experts = sizes.num_expert_parameters / max(shards, layout.expert)
    local = (sizes.num_parameters - sizes.num_expert_parameters) / shards + experts
    trained = sizes.adapter_widths * layout.lora_rank / shards if layout.lora_rank else local
    whole = local * (4 if layout.is_base_exact or not layout.lora_rank else 2)
    estimate = _MemoryEstimate(
        weights=int(whole + 4 * trained if layout.lora_rank else whole),
        copies=int(whole) * layout.num_copies,
        gradients=int(4 * trained) * (2 if layout.is_replicated else 1),
        optimizer=int(trained * (2 if config.optimizer.name is OptimizerName.ADAMW_8BIT else 8)),
        of_pass=0,
        num_ids=0,
        engine=int(layout.engine_share * device_bytes),
    )
    free = device_bytes - replace(estimate, engine=0).total
    size = num_ids or config.tokens_per_micro_batch or _choose_size(sizes, config, layout, free)
    return replace(estimate, of_pass=int(_count_pass_bytes(sizes, config, layout, size)), num_ids=size)


def _choose_size(sizes: ModelSizes, config: TrainerConfig, layout: Layout, free: float) -> int:
    size = MAX_COMPILED_PASS_IDS if config.compile else MAX_PASS_IDS
    size = size // 2 if sizes.hidden_size >= WIDE else size
    return choose_pass_size(partial(_count_pass_bytes, sizes, config, layout), free_bytes=free, max_ids=size)


def _count_pass_bytes(sizes: ModelSizes, config: TrainerConfig, layout: Layout, num_ids: int) -> float:
    """What a pass of so many ids needs beside weights, gradients and averages, in a process with its part of them."""
    D, Q, K, F = sizes.hidden_size, sizes.queries, sizes.keys, sizes.mlp
    rank, num_ids = layout.lora_rank, math.ceil(num_ids / layout.sequence)
    norms = 2 * 4 * D + (4 * (Q + K) / layout.tensor if sizes.norms_queries else 0)  # their inputs
    # Each product keeps its rounded input; adapters share one (`adapters.fuse_adapters`), and keep x A'.
    inputs = 2 * 2 * D + 7 * 2 * rank if rank else 5 * 2 * D
    attention = (2 * (Q + 2 * K) + 2 * Q) / layout.tensor
    if layout.sequence > 1:  # a part of the heads of all ids: keys are repeated for that, and its result comes twice
        repeats = math.lcm(sizes.num_key_heads, layout.sequence) // sizes.num_key_heads
        attention = 2 * (Q + 2 * K * repeats) + 2 * 2 * Q
    mlp = 4 * 2 * F / layout.tensor  # gate, its activation, up, and their product
    of_layer = norms + inputs + attention + mlp
    ends = 4 * 4 * D + 2 * D  # the last norm's input and output, what is picked of it, and its gradient
    matrix = sizes.vocab_size * D / (layout.tensor if layout.tensor > 1 else 1)
    scoring = 2 * matrix + _LOGIT_COPIES * 4 * config.logprob_chunk_size * sizes.vocab_size
    head = scoring + (0 if rank else 2 * 4 * matrix)  # and the gradient of the output embeddings, twice
    # Autocast keeps a rounded copy of each trained matrix for the backward pass; FSDP2 gathers two blocks at a time.
    blocks = sizes.num_parameters - sizes.num_embeddings
    rounded = 0 if rank and not layout.is_base_exact else 2 * blocks / layout.tensor
    if layout.fsdp > 1:
        rounded = 2 * (2 * blocks / sizes.num_layers + sizes.num_embeddings) * (1 if rank else 2)
    if config.gradient_checkpointing:
        kept = sizes.num_layers * 4 * D * num_ids
        forward = (rounded if not rank else 0) + scoring + ends * num_ids
        return kept + max(forward, head + ends * num_ids, of_layer * num_ids)
    return rounded + head + (sizes.num_layers * of_layer + ends) * num_ids


def fits_beside_engine(
    sizes: ModelSizes, config: TrainerConfig, layout: Layout, *, device_bytes: float, longest_row: int
) -> bool:
    """Whether a step can be trained while the engine keeps its memory; `longest_row` is in ids.

    A row that is longer than a pass is a pass by itself. A share of the GPU is left free, for what is not counted and
    for what the allocator cannot use.
    """
    chosen = estimate_memory(sizes, config, layout, device_bytes=device_bytes).num_ids
    found = estimate_memory(sizes, config, layout, device_bytes=device_bytes, num_ids=max(chosen, longest_row))
    return found.total_awake <= USABLE_SHARE * device_bytes


def _find_remedies(
    sizes: ModelSizes, config: TrainerConfig, layout: Layout, *, device_bytes: float
) -> Iterator[tuple[str, _MemoryEstimate]]:
    """Settings with which it needs less, each with what it needs then."""
    changes: list[tuple[str, TrainerConfig, Layout]] = []
    if not config.gradient_checkpointing:
        name = "trainer.gradient_checkpointing = true"
        changes.append((name, replace(config, gradient_checkpointing=True), layout))
    if config.tokens_per_micro_batch is not None and config.tokens_per_micro_batch > MIN_PASS_IDS:
        name = f"trainer.tokens_per_micro_batch = {MIN_PASS_IDS}"
        changes.append((name, replace(config, tokens_per_micro_batch=MIN_PASS_IDS), layout))
    if config.optimizer.name is not OptimizerName.ADAMW_8BIT:
        small = replace(config.optimizer, name=OptimizerName.ADAMW_8BIT)
        changes.append(('trainer.optimizer.name = "adamw_8bit"', replace(config, optimizer=small), layout))
    if not layout.lora_rank:
        changes.append(("lora.rank = 16", config, replace(layout, lora_rank=16)))
    elif layout.is_base_exact:
        changes.append(('model_settings.dtype = "bfloat16"', config, replace(layout, is_base_exact=False)))
    if layout.engine_share > 0.3:
        name = 'engine.options = ["--gpu-memory-utilization", "0.3"]'
        changes.append((name, config, replace(layout, engine_share=0.3)))
    now = estimate_memory(sizes, config, layout, device_bytes=device_bytes).total
    for name, changed, other in changes:
        found = estimate_memory(sizes, changed, other, device_bytes=device_bytes)
        if found.total < now:
            yield name, found


def describe_shortage(sizes: ModelSizes, config: TrainerConfig, layout: Layout, *, device_bytes: float) -> str | None:
    """What a run lacks on GPUs of this size, and which settings would help; None if it fits."""
    found = estimate_memory(sizes, config, layout, device_bytes=device_bytes)
    if found.total <= device_bytes:
        return None
    remedies = sorted(_find_remedies(sizes, config, layout, device_bytes=device_bytes), key=lambda each: each[1].total)
    named = ", ".join(f"{name} ({each.total / GIB:.1f})" for name, each in remedies)
    return f"about {found.total / GIB:.1f} GiB are needed on a GPU of {device_bytes / GIB:.1f} GiB: {found}. " + (
        f"With one of these it would be less: {named}" if named else "Take more GPUs (trainer.parallel)"
    )
