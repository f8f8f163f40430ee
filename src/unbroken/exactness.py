"""A transformers model computes what its config says, of each row as if it were alone, and as vLLM does.

Rotary factors of `longrope` and `dynamic` depend in transformers on the longest position of a pass, so also on the rows
beside. vLLM chooses them once, by its context (`max_model_len`), and so does `fix_rotary`:

    longrope, original length 64    context of 64: short factors for all rows    from 65 on: long factors for all rows
    dynamic                         the config's own base, for rows of up to `max_position_embeddings`

Attention by `sdpa` leaves out soft caps and sinks without a word: `choose_attention` finds the models that have them.

With exact numerics (`Numerics.EXACT`) a row has the same bits in any pass: ids one by one with a cache, or all at once,
alone or beside other rows. The sums are the same in any case, but kernels add them in an order that depends on shapes.
On a CPU three rules are enough, for any model, without code for one:

1.  Passes have a multiple of `_find_row_multiple` rows, 4 for each thread or 16 so far: what products leave over of
    that goes to other kernels, and with widths of a multiple of 8 the functions of each number end at whole vectors.
2.  Attention (`_attend`) adds its keys in blocks of `BLOCK` from the row's first key on, one after the other. A block
    behind the last key adds exactly nothing.
3.  Experts (`_apply_experts`) compute the ids that chose them in passes by rule 1, and what the experts of an id return
    is added in the order in which it chose them.

Norms, rotary embeddings, activations and log_softmax treat each row by itself anyway, with one thread or two: torch
computes the last numbers of a thread's part by other code, and with more threads parts end anywhere.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.functional import linear, pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import ModelOutput

from unbroken.decoder_config import DecoderConfig
from unbroken.errors import InvalidInputError

_LONG_ROW, _SHORT_ROW = 72, 5
_MANY_ROWS = 1024
"""Of a product in a pass of many rows."""
_LONGROPE, _DYNAMIC = ("short longrope", "long longrope"), "NTK of a fixed length"
"""The `rope_type` of modules whose factors are fixed: transformers changes those of its other names in each pass."""
_LEFT_OUT = {"softcap": "soft cap (attn_logit_softcapping)", "s_aux": "sinks"}
"""What models ask of their attention and `sdpa` does not do, by the name of the argument."""
_PROBE = "unbroken_probe"
EXACT_ATTENTION = "unbroken_exact"
"""The name for `set_attn_implementation`."""
_EXACT_EXPERTS = EXACT_ATTENTION
"""The name for `set_experts_implementation`."""
BLOCK = 64
_MAX_THREADS = 2
_WIDTH_MULTIPLE = 8
_NUM_SUMMED = 1024
"""Factors of each sum in the probe for rule 1. On an Intel CPU with AVX-512, sums of 96 need a multiple of 8 rows, and
those of 192 and more one of 16: kernels of few rows add the factors of long sums in parts."""
_logger = logging.getLogger(__name__)


def fix_rotary(model: Any, context_length: int) -> None:
    """Make the model's rotary factors those of an engine with this context, for rows of all lengths. Idempotent.

    Raises:
        InvalidInputError: the factors are fixed for another context already; or their kind cannot be fixed, or has none
            for the whole context.
    """
    for module in model.modules():
        kinds = _find_kinds(module)
        for layer, kind in kinds.items():
            if kind in (*_LONGROPE, "longrope"):
                kinds[layer] = _fix_longrope(module, layer, context_length)
            elif kind == _DYNAMIC or "dynamic" in kind:
                kinds[layer] = _fix_dynamic(module, layer, kind, context_length)
        if "" in kinds:
            module.rope_type = kinds[""]


@torch.no_grad()
def find_length_dependence(model: Any) -> str | None:
    """How the model computes a row differently in a pass with a longer one; None if it does not.

    The other row has more ids and, in a model of text that takes positions, the last positions of the model's context.
    """
    if (kind := _find_unfixed(model)) is not None:
        return (
            f"its rope_type is {kind}. Call `unbroken.exactness.fix_rotary(model, context_length)` first, with the "
            "context_length of the engine that samples"
        )
    config, embeddings = model.config.get_text_config(), model.get_input_embeddings().weight
    places = torch.arange(length := choose_long_length(model), device=embeddings.device)
    ids = choose_probe_ids(length, len(embeddings), embeddings.device)
    short = ids[:_SHORT_ROW].flip(0)
    takes_positions = config is model.config and "position_ids" in inspect.signature(model.forward).parameters
    last = (DecoderConfig(config).max_positions or length) - length
    positions = {"position_ids": torch.stack([places, places + last])} if takes_positions else {}
    alone = model(input_ids=short[None], use_cache=False).logits[0]
    both = torch.stack([pad(short, (0, length - len(short))), ids])
    beside = model(input_ids=both, use_cache=False, **positions).logits[0, : len(short)]
    off = float((beside.float() - alone.float()).abs().max() / alone.float().abs().max())
    return None if off <= get_tolerance(model.dtype, alone.dtype) else f"the logits are off by {off:.2g} of the largest"


@torch.no_grad()
def choose_attention(model: Any) -> None:
    """Let a model that has `sdpa` attend by `eager` if `sdpa` would leave out a part of its config, and log it."""
    if model.config.get_text_config()._attn_implementation != "sdpa":
        return
    asked: set[str] = set()

    def record(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        asked.update(name for name in _LEFT_OUT if options.get(name) is not None)
        return sdpa_attention_forward(*arguments, **options)  # type: ignore[no-any-return]

    AttentionInterface.register(_PROBE, record)
    AttentionMaskInterface.register(_PROBE, sdpa_mask)
    with attending_by(model, _PROBE):
        model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=model.get_input_embeddings().weight.device))
    if asked:
        model.set_attn_implementation("eager")
        names = " and ".join(_LEFT_OUT[name] for name in sorted(asked))
        _logger.warning("%s attends by eager, because sdpa would leave out its %s", type(model).__name__, names)


def call_rounded(module: Any, dtype: torch.dtype, **inputs: Any) -> Any:
    """Call a module with its weights rounded to a type, as a publisher rounds them; gradients reach the weights.

    Not those of layers with adapters, which round what they have merged (`merge_in_passes`).
    """
    named = module.named_parameters()
    rounded = {name: weight.to(dtype) for name, weight in named if ".base_layer." not in name and ".lora_" not in name}
    with torch.autocast(module.device.type, enabled=False):
        return functional_call(module, rounded, (), inputs)


def attend_exactly(model: Any, *, takes_images: bool) -> int:
    """Switch a model to attention and experts by rules 2 and 3, and check that a row then has the same bits beside
    another. Idempotent.

    Returns what the number of rows of a pass must be a multiple of.

    Raises:
        InvalidInputError: it has not, with the name of the module; or the model is not in float32 on a CPU, or has
            experts of another kind; or torch computes with more than two threads.
    """
    _check_can_be_exact(model, takes_images=takes_images)
    if DecoderConfig(model.config).num_chosen_experts:
        _use_exact_experts(model)
    multiple = _find_row_multiple(model.dtype)
    _check_widths(model, multiple)
    AttentionInterface.register(EXACT_ATTENTION, _attend)
    AttentionMaskInterface.register(EXACT_ATTENTION, sdpa_mask)
    model.set_attn_implementation(EXACT_ATTENTION)
    name, num_threads = type(model).__name__, torch.get_num_threads()
    if model.config.get_text_config()._attn_implementation != EXACT_ATTENTION:
        raise InvalidInputError(f"numerics must be fast for {name}, which has its own attention code")
    if (found := find_other_bits(model) or _find_other_product(model)) is not None:
        # Threads may share a product by its columns in one pass, and by its rows in another (`_find_other_product`).
        hint = f" with {num_threads} threads; OMP_NUM_THREADS=1 may do" if num_threads > 1 else ""
        raise InvalidInputError(f"numerics must be fast for {name}: {found} has other bits beside a longer row{hint}")
    return multiple


def _check_can_be_exact(model: Any, *, takes_images: bool) -> None:
    """Refuse by rule what is not exact, or was not tried: images, many threads, GPUs and other types."""
    name = type(model).__name__
    if takes_images:
        raise InvalidInputError(
            f"numerics must be fast with images, which {name} takes here: its text is exact with images = false"
        )
    if (num_threads := torch.get_num_threads()) > _MAX_THREADS:
        raise InvalidInputError(
            f"numerics must be fast with {num_threads} threads: exact needs {_MAX_THREADS} at most, as with "
            f"OMP_NUM_THREADS={_MAX_THREADS}"
        )
    if model.device.type != "cpu" or model.dtype != torch.float32:
        raise InvalidInputError(
            f"numerics must be fast for {name} on {model.device} in {model.dtype}: exact needs a CPU, and float32"
        )


def _check_widths(model: Any, multiple: int) -> None:
    """Refuse a context and layers that end within a vector, by rule 1; the head's columns are each one id's alone."""
    name = type(model).__name__
    if (length := DecoderConfig(model.config).max_positions or 0) % multiple:
        raise InvalidInputError(
            f"numerics must be fast for {name}, whose {length} positions are no multiple of {multiple}"
        )
    for path, weight in _list_matrices(model):
        if ".lora_" not in path and len(weight) % _WIDTH_MULTIPLE:
            raise InvalidInputError(
                f"numerics must be fast for {name}: {path} has {len(weight)} features, no multiple of {_WIDTH_MULTIPLE}"
            )


def _list_matrices(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights [outputs, inputs] of each product of a pass but the head's, with the module's path."""
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if _has_experts(module):
            yield from ((path, matrices[0]) for matrices in (module.gate_up_proj, module.down_proj))
        elif module is not head and (isinstance(module, torch.nn.Linear) or _is_router(module)):
            yield path, module.weight


def _has_experts(module: Any) -> bool:
    """Whether these are the experts of a layer: transformers decorates their classes, which have no base class."""
    return hasattr(module, "_is_expert_parallel")


def _is_router(module: Any) -> bool:
    """Whether a module chooses experts by a matrix of its own, which is no `Linear`."""
    return hasattr(module, "top_k") and hasattr(module, "weight")


@torch.no_grad()
def find_other_bits(model: Any, rounded: torch.dtype | None = None) -> str | None:
    """The first module whose output has other bits for a row in a pass with a longer one; None if all are equal.

    With weights `rounded` to a type, rows may have any number of ids.
    """
    multiple = _find_row_multiple(model.dtype) if rounded is None else _SHORT_ROW
    length = max(choose_long_length(model) // multiple, 2) * multiple
    ids = (torch.arange(length) + 1).remainder(len(model.get_input_embeddings().weight))
    short = ids[:multiple].flip(0)
    run = model if rounded is None else functools.partial(call_rounded, model, rounded)
    found = []
    for rows in (short[None], torch.stack([pad(short, (0, length - len(short))), ids])):
        outputs, num_ids = ModuleOutputs(model), rows.shape[1]
        try:
            run(input_ids=rows.to(model.device), use_cache=False)
        finally:
            every = outputs.end()
        found.append(
            {
                name: each.reshape(-1, num_ids, *each.shape[1:])
                for name, each in every.items()
                if len(each) % num_ids == 0
            }
        )
    alone, beside = found
    names = (
        name
        for name, each in alone.items()  # one that runs several times in a pass has as many outputs in the other
        if name in beside and len(beside[name]) == len(each) and not torch.equal(beside[name][:, :multiple], each)
    )
    return next(names, None)


@torch.no_grad()
def _find_other_product(model: Any) -> str | None:
    """The first layer whose product has other bits in a pass of many rows than in one of few; None if there is none.

    Two threads of an Intel CPU with AVX-512 share the sums of a product of 1,024 factors with 256 columns if it has up
    to 320 rows, and its rows if it has more. Each shape of a product is tried once, except the head's, whose columns
    are work enough for all threads.
    """
    multiple = _find_row_multiple(model.dtype)
    generator, tried = torch.Generator().manual_seed(0), set()
    for path, weight in _list_matrices(model):
        if (shape := tuple(weight.shape)) in tried:
            continue
        tried.add(shape)
        rows = torch.randn(_MANY_ROWS, shape[1], generator=generator, dtype=weight.dtype)
        if not torch.equal(linear(rows, weight)[:multiple], linear(rows[:multiple], weight)):
            return path
    return None


class ModuleOutputs:
    """Records what the modules of a model compute from now on: of each pass the first row's [T, ...]."""

    def __init__(self, model: Any) -> None:
        self._found: dict[str, list[torch.Tensor]] = {}
        modules = model.named_modules()
        self._handles = [each.register_forward_hook(functools.partial(self._keep, name)) for name, each in modules]

    def end(self) -> dict[str, torch.Tensor]:
        """Stop, and return them by name in the order in which they were computed, the ids of all passes together."""
        for handle in self._handles:
            handle.remove()
        joined = {}
        for name in list(self._found):  # each is dropped once it is joined, or all would be in memory twice
            outputs = self._found.pop(name)
            if len({each.shape[1:] for each in outputs}) == 1:
                joined[name] = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return joined

    def _keep(self, name: str, module: Any, _inputs: Any, output: Any) -> None:
        states = _choose_states(module, output)
        if isinstance(states, torch.Tensor) and states.ndim > 1:
            first = states[0] if states.ndim > 2 else states
            self._found.setdefault(name or "the model", []).append(first.detach().cpu())


def _choose_states(module: Any, output: Any) -> Any:
    """What a module computes; None where it is not known which of several tensors that is."""
    if isinstance(output, ModelOutput):
        return output.get("logits")
    if not isinstance(output, (tuple, list)):
        return output
    tensors = [each for each in output if isinstance(each, torch.Tensor)]
    is_leaf = next(module.children(), None) is None
    # vLLM's blocks return a residual sum beside their states, and their modules are recorded by themselves; its fused
    # norms return the sum too, and have no modules.
    return tensors[0] if tensors and (len(tensors) == 1 or is_leaf) else None


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [B, H, T, D] over `key` and `value` [B, G, L, D], as [B, T, H, D], by rule 2.

    The mask is [B, 1, T, L], true or 0 where an id attends; without one, the last id attends to all keys. Shapes: B
    rows, T ids of each, L keys, H query heads, G key-value heads, D head size, N blocks, Q queries that share keys.
    """
    if s_aux is not None:
        raise InvalidInputError(f"numerics must be fast for {type(module).__name__}, whose attention has sinks")
    num_rows, num_heads, num_ids, size = query.shape
    num_groups, num_keys = key.shape[1], key.shape[2]
    shared = num_heads // num_groups * num_ids
    num_blocks = -(-num_keys // BLOCK)
    if attention_mask is None:
        hidden_BTL = torch.ones(num_ids, num_keys, dtype=torch.bool).triu(num_keys - num_ids + 1)[None]
    elif attention_mask.dtype == torch.bool:
        hidden_BTL = ~attention_mask[:, 0, :, :num_keys]
    else:
        hidden_BTL = attention_mask[:, 0, :, :num_keys] < 0
    missing_keys, missing_queries = num_blocks * BLOCK - num_keys, -shared % _find_row_multiple(query.dtype)
    if missing_keys:
        key, value = (pad(states, (0, 0, 0, missing_keys)) for states in (key, value))
        hidden_BTL = pad(hidden_BTL, (0, missing_keys), value=True)
    hidden_BGQL = hidden_BTL[:, None].expand(-1, num_heads // num_groups, -1, -1).flatten(1, 2)[:, None]
    query = query.reshape(num_rows, num_groups, shared, size)
    if missing_queries:
        query = pad(query, (0, 0, 0, missing_queries))
        hidden_BGQL = pad(hidden_BGQL, (0, 0, 0, missing_queries))

    scores = query @ key.transpose(-1, -2) * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden_BGQL, float("-inf"))
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    of_blocks_BGNQL = weights.view(*weights.shape[:3], num_blocks, BLOCK).transpose(2, 3)
    sums = (of_blocks_BGNQL @ value.reshape(num_rows, num_groups, num_blocks, BLOCK, -1)).unbind(2)
    totals = of_blocks_BGNQL.sum(-1, keepdim=True).unbind(2)
    states = functools.reduce(torch.add, sums) / functools.reduce(torch.add, totals)
    states_BHTD = states[:, :, :shared].reshape(num_rows, num_heads, num_ids, value.shape[-1])
    return states_BHTD.transpose(1, 2).contiguous(), None


def _use_exact_experts(model: Any) -> None:
    """Switch a mixture to experts by rule 3; refuse those that are not a gate, an activation and two products each."""
    name = type(model).__name__
    experts = {path: each for path, each in model.named_modules() if _has_experts(each)}
    if not experts:
        raise InvalidInputError(f"numerics must be fast for {name}, which has its own code of experts")
    for path, each in experts.items():
        if each.has_bias or each.is_transposed or not each.has_gate:
            raise InvalidInputError(
                f"numerics must be fast for {name}: the experts of {path} have biases, transposed weights or no gate"
            )
        if (width := each.down_proj.shape[-1]) % _WIDTH_MULTIPLE:
            raise InvalidInputError(
                f"numerics must be fast for {name}: the experts of {path} have {width} features, no multiple of "
                f"{_WIDTH_MULTIPLE}"
            )
    ExpertsInterface.register(_EXACT_EXPERTS, _apply_experts)
    model.set_experts_implementation(_EXACT_EXPERTS)


def _apply_experts(
    module: Any, states_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """What the K experts that each of T ids chose return, weighted and added, [T, D], by rule 3.

    An expert may have one id or all of them: its rows are filled up with zeros to a multiple.
    """
    num_chosen, multiple = chosen_TK.shape[1], _find_row_multiple(states_TD.dtype)
    experts_N = chosen_TK.flatten()
    places, found = [], []
    for expert in experts_N.unique().tolist():  # type: ignore[no-untyped-call]
        place = (experts_N == expert).nonzero()[:, 0]
        rows = pad(states_TD[place // num_chosen], (0, 0, 0, -len(place) % multiple))
        gated = module._apply_gate(linear(rows, module.gate_up_proj[expert]))
        found.append(linear(gated, module.down_proj[expert])[: len(place)])
        places.append(place)
    returned_ND = torch.cat(found)[torch.cat(places).argsort()]
    weighted_TKD = returned_ND.view(len(states_TD), num_chosen, -1) * weights_TK[..., None]
    return functools.reduce(torch.add, weighted_TKD.to(states_TD.dtype).unbind(1))


def _find_row_multiple(dtype: torch.dtype) -> int:
    """The number such that a product of any multiple of it has the same bits in each row, with the threads of now.

    Raises:
        InvalidInputError: no number is one on this machine.
    """
    return _measure_row_multiple(dtype, torch.get_num_threads())


@functools.cache
def _measure_row_multiple(dtype: torch.dtype, num_threads: int) -> int:
    most = 32 * num_threads
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(number, _NUM_SUMMED, generator=generator, dtype=dtype) for number in (8 * most, 80))
    together = linear(rows, weight)
    for multiple in (4 << k for k in range(most.bit_length())):
        numbers = range(multiple, 4 * most + 1, multiple)
        if all(torch.equal(linear(rows[:number], weight), together[:number]) for number in numbers):
            return max(multiple, 4 * num_threads)
    raise InvalidInputError(f"numerics must be fast on this machine: products of up to {4 * most} rows all differ")


@contextmanager
def attending_by(model: Any, implementation: str) -> Iterator[None]:
    """Let the model of text attend by another implementation during the block."""
    config = model.config.get_text_config()
    before, config._attn_implementation = config._attn_implementation, implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def choose_long_length(model: Any) -> int:
    """Ids of the long row of a probe, next to which it shows what depends on the length of a pass."""
    return min(_LONG_ROW, DecoderConfig(model.config).max_positions or _LONG_ROW)


def choose_probe_ids(num_ids: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """[num_ids] ids for a comparison of two ways to compute the same, from the middle of the vocabulary on.

    The first ids of a real vocabulary are control tokens, after which bfloat16 rounds the logits of real weights by up
    to 0.9 of the largest one (SmolLM2-135M, eager attention beside float32; 0.03 with these ids).
    """
    return (torch.arange(num_ids, device=device) + vocab_size // 2).remainder(vocab_size)


def get_tolerance(*dtypes: torch.dtype) -> float:
    """Maximum difference of two ways to compute the same, relative to the largest: operations are rounded otherwise.

    Of several types, such as a model's and that of its logits, the coarsest counts: FSDP2 may compute in bfloat16 with
    weights that it keeps in float32.
    """
    return max(1e-3, *(8 * torch.finfo(dtype).eps for dtype in dtypes))


def _find_kinds(module: Any) -> dict[str, str]:
    """The `rope_type` of a rotary module, by kind of layer ("" where it has one for all); empty for other modules.

    It is asked for by name, because each family has its own class of rotary module, and they have no base class.
    """
    kinds = getattr(module, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {"": kinds} if isinstance(kinds, str) else {}


def _find_unfixed(model: Any) -> str | None:
    """The first `rope_type` by which transformers chooses factors in each pass, by its longest position."""
    kinds = {kind for module in model.modules() for kind in _find_kinds(module).values()}
    return min((kind for kind in kinds if kind == "longrope" or "dynamic" in kind), default=None)


def _fix_longrope(module: Any, layer: str, context_length: int) -> str:
    config, kind = module.config, _find_kinds(module)[layer]
    parameters = config.rope_parameters[layer] if layer else config.rope_parameters
    original = parameters["original_max_position_embeddings"]
    fixed = _LONGROPE[context_length > original]
    if kind in _LONGROPE and kind != fixed:
        raise InvalidInputError(
            f"the context_length of all engines of a model must lie on one side of {original} (its longrope's "
            f"original_max_position_embeddings), got {context_length}, and its factors are those of a {kind}"
        )
    scaling = parameters.get("short_mscale" if fixed == _LONGROPE[0] else "long_mscale")
    if scaling is None:
        scale = max(config.max_position_embeddings / original, 1.0)
        scaling = math.sqrt(1 + math.log(scale) / math.log(original))
    prefix = f"{layer}_" if layer else ""
    device = getattr(module, f"{prefix}inv_freq").device
    factors, _ = ROPE_INIT_FUNCTIONS["longrope"](config, device, seq_len=context_length, layer_type=layer or None)
    setattr(module, f"{prefix}inv_freq", factors)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return fixed


def _fix_dynamic(module: Any, layer: str, kind: str, context_length: int) -> str:
    longest, prefix = module.config.max_position_embeddings, f"{layer}_" if layer else ""
    if kind not in (_DYNAMIC, "dynamic"):
        raise InvalidInputError(f"rope_type must not depend on the length of a pass, got {kind}: vLLM has none of it")
    if context_length > longest:
        raise InvalidInputError(
            f"context_length must be at most {longest} (max_position_embeddings) for a model with dynamic NTK, because "
            f"vLLM has no positions beyond, got {context_length}: start the engine with --max-model-len {longest}"
        )
    setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
    return _DYNAMIC
