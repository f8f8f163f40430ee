"""Prove on a few ids that rows of a model can share a lane, and the ids that they begin with.

A model that finds the rows' borders in a lane by their positions (transformers' attention does) computes the same
hidden states for a row as without the others. Other models silently do not: state-space and convolution layers, ALiBi
positions, attention in chunks that are counted from the lane's start.

A tree of random rows is compared with the same rows alone: their logprobs, and the gradient of all that is trained. A
change of one branch must leave the others as they were. What a few ids cannot show is refused by rule: windows and
chunks of attention, which may be longer, and layers of other kinds than full attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

from unbroken.decoder_config import DecoderConfig
from unbroken.exactness import choose_long_length, choose_probe_ids, get_tolerance
from unbroken.training.model.backbone import get_backbone, hidden_states
from unbroken.training.model.lanes import RowLayout
from unbroken.training.model.scores import Entropy
from unbroken.training.model.sequence import SequenceGroup, add_parts
from unbroken.training.model.tree import Ids, Nodes, merge_rows, pick_nodes
from unbroken.training.model.tree_attention import MaskKind
from unbroken.training.model.varlen import IMPLEMENTATION
from unbroken.types.arrays import count_common_prefix

LEAK_TOLERANCE = 1e-5
"""Maximum change of a row or branch if only *another* one changes. The shapes are the same: there should be none."""
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@torch.no_grad()
def find_packing_obstacle(model: Any, layout: RowLayout) -> str | None:
    """The reason why rows of this model cannot be packed in this layout; None if they can.

    A few ids cannot show everything: layers of other kinds than full and sliding attention, and attention in chunks,
    are always refused.
    """
    if "position_ids" not in inspect.signature(get_backbone(model).forward).parameters:
        return "its forward takes no position_ids"
    config = DecoderConfig(model.config)
    if unknown := sorted(config.layer_kinds - _KNOWN_LAYERS):
        return f"it has layers of {', '.join(unknown)}"
    if config.has_chunks:
        return "its attention is in chunks"
    try:
        return _compare_with_rows_alone(model, layout)
    except Exception as error:  # models may raise anything for unexpected positions
        return f"it fails with {type(error).__name__}: {error}"


@torch.no_grad()
def is_exact_by_rows(policy: Any, vocab_size: int, device: torch.device) -> bool:
    """Whether the logprobs of rows in one lane, attended by their borders, are those of each row alone.

    `policy` is a `PolicyLogprobs` that attends by rows where it gets positions.
    """
    rows = _make_packed_rows(policy.causal, vocab_size, device)
    try:
        alone = torch.cat([_logprobs_of_lane(policy, [row]) for row in rows])
        together = _logprobs_of_lane(policy, rows)
        other = _logprobs_of_lane(policy, [rows[0].flip(0), *rows[1:]])
    except Exception:  # models may raise anything for inputs that they do not expect
        return False
    off = float((together - alone).abs().max() / alone.abs().max())
    leak = float((together - other)[len(rows[0]) - 1 :].abs().max())
    return off <= 8 * torch.finfo(torch.bfloat16).eps and leak <= LEAK_TOLERANCE


def _make_packed_rows(model: Any, vocab_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    lengths = [5, 4, choose_long_length(model)]
    return torch.split(choose_probe_ids(sum(lengths), vocab_size, device), lengths)


def _logprobs_of_lane(policy: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all ids but the first of each row."""
    positions_BT = torch.cat([torch.arange(len(row), device=row.device) for row in rows])[None]
    given_BT = positions_BT if len(rows) > 1 else None
    logprobs_N: torch.Tensor = policy(torch.cat(list(rows))[None], positions_BT > 0, 1.0, None, given_BT).logprobs_N
    return logprobs_N


def _compare_with_rows_alone(model: Any, layout: RowLayout) -> str | None:
    embeddings = model.get_input_embeddings().weight
    rows = _make_packed_rows(model, len(embeddings), embeddings.device)
    alone = [hidden_states(model, row[None])[0] for row in rows]
    together = _compute_packed(model, rows, layout)
    largest = max(float(states.abs().max()) for states in alone)
    off = max(float((a - b).abs().max()) for a, b in zip(together, alone, strict=True)) / largest
    if not off <= get_tolerance(alone[0].dtype):
        return f"its hidden states are off by {off:.2g} of the largest where rows share a lane"
    other = _compute_packed(model, [row.flip(0) if k == 0 else row for k, row in enumerate(rows)], layout)
    leak = max(float((a - b).abs().max()) for a, b in zip(together[1:], other[1:], strict=True)) / largest
    return None if leak <= LEAK_TOLERANCE else f"a row's hidden states change by {leak:.2g} with the row before it"


def _compute_packed(model: Any, rows: Sequence[torch.Tensor], layout: RowLayout) -> list[torch.Tensor]:
    """The hidden states of rows that share a lane, next to a lane with other borders unless it is `ONE_LANE`."""
    lanes = [rows] if layout is RowLayout.ONE_LANE else [rows[::-1], rows]
    ids_BT = torch.stack([torch.cat(list(lane)) for lane in lanes])
    positions_BT = torch.stack(
        [torch.cat([torch.arange(len(row), device=row.device) for row in lane]) for lane in lanes]
    )
    states_BTD = hidden_states(model, ids_BT, position_ids_BT=positions_BT)
    return list(torch.split(states_BTD[-1], [len(row) for row in rows]))


_BLOCK_SCALE = 16
"""How much longer rows are where attention is in blocks, so that there are several of them."""


def choose_mask(model: Any) -> MaskKind | None:
    """How the nodes of a tree can be kept apart in this model where it is; None if they cannot."""
    attention, device = model.config.get_text_config()._attn_implementation, model.device
    if device.type == "cuda":
        is_supported = attention in ("sdpa", IMPLEMENTATION) and torch.cuda.get_device_capability(device) >= (8, 0)
        return MaskKind.BLOCKS if is_supported else None
    if attention in ("sdpa", IMPLEMENTATION):
        return MaskKind.BOOLEAN
    return MaskKind.ADDED if attention == "eager" else None


def find_tree_obstacle(model: Any) -> str | None:
    """The reason by rule why rows of this model cannot share ids; None if they can."""
    inputs = inspect.signature(get_backbone(model).forward).parameters
    if missing := [name for name in ("position_ids", "attention_mask") if name not in inputs]:
        return f"its forward takes no {missing[0]}"
    config = DecoderConfig(model.config)
    if unknown := sorted(config.layer_kinds - {"full_attention"}):
        return f"it has layers of {', '.join(unknown)}"
    if not config.layer_kinds and config.window:
        return f"its attention has a window of {config.window} tokens"
    if config.has_chunks:
        return "its attention is in chunks"
    if choose_mask(model) is None:
        attention = model.config.get_text_config()._attn_implementation
        return f"its attention {attention} on {model.device} takes no mask of a tree"
    return None


def find_difference(policy: Any) -> str | None:
    """How a tree of a `PolicyLogprobs` differs from rows alone; None if it does not. All processes call it.

    Its gradients are dropped.
    """
    reason, squares = None, [(0.0, 0.0)]
    try:
        reason, squares = _compare_rows(policy, _make_rows(policy))
    except Exception as error:  # models and compilers may raise anything for inputs that they do not expect
        reason = f"it fails with {type(error).__name__}: {error}"
    finally:
        policy.zero_grad(set_to_none=True)
    everyone = gather_object([(reason, squares)])
    if found := next((refused for refused, _ in everyone if refused is not None), None):
        return str(found)
    for of_processes in zip(*(parts for _, parts in everyone), strict=True):
        if not (off := _compare_norms(of_processes)) <= _get_tolerance(policy):  # also NaN
            return f"its gradient is off by {off:.2g} of its norm in a tree"
    return None


def _compare_rows(policy: Any, rows: Sequence[Ids]) -> tuple[str | None, list[tuple[float, float]]]:
    """As `_compare`, of the rows and of two of them: of two lengths, which a kernel may be compiled for."""
    # A sharded model's processes make all passes together, whatever each has found; and the last one has a gradient,
    # as FSDP2 keeps weights whole after a pass without, which a checkpoint that is loaded then would not change.
    leak = _find_leak(policy, rows)
    compared = [_compare(policy, each) for each in (rows, rows[:2])]
    reason = next((each for each, _ in compared if each is not None), leak)
    return reason, [squares for _, squares in compared]


def _compare_norms(of_processes: Sequence[tuple[float, float]]) -> float:
    """The norm of the difference of a gradient, relative to the gradient's, from the squares of its parts."""
    whole, different = (sum(numbers) for numbers in zip(*of_processes, strict=True))
    return (different / whole) ** 0.5 if whole else 0.0


def _make_rows(policy: Any) -> list[Ids]:
    """Two rows that share more than half of their ids, a long one that leaves them early, and one that shares none."""
    scale = _BLOCK_SCALE if policy.tree_mask is MaskKind.BLOCKS else 1
    rng = np.random.default_rng(0)
    lengths = (
        6 * scale,
        5 * scale,
        9 * scale,
        max(4 * scale, choose_long_length(policy.causal) - 3 * scale),
        5 * scale,
    )
    trunk, *ends = (rng.integers(policy.vocab_size, size=length).astype(np.int32) for length in lengths)
    return [
        np.concatenate([trunk, ends[0]]),
        np.concatenate([trunk, ends[1]]),
        np.concatenate([trunk[: len(trunk) // 2], ends[2]]),
        ends[3],
    ]


def _compare(policy: Any, rows: Sequence[Ids]) -> tuple[str | None, tuple[float, float]]:
    """Why the logprobs of a tree, with and without gradient, are not those of its rows alone, None if they are; and the
    squared norms of this process's part of the gradient of rows alone, and of what that of the tree differs by.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    policy.zero_grad(set_to_none=True)

    def score(compute: Callable[[Any, Sequence[Ids]], torch.Tensor], sign: int) -> tuple[torch.Tensor, float]:
        scored = compute(policy, rows)
        weights = torch.linspace(-1, 1, len(scored), device=scored.device)
        if trained:
            torch.autograd.backward(sign * (weights * scored).sum())
        return scored.detach(), _add_squares(trained, policy.sequence)

    with torch.no_grad():  # old and reference logprobs come from such passes, which a compiler may compute otherwise
        scored = _score_tree(policy, rows)
    alone, whole = score(_score_alone, 1)
    shared, different = score(_score_tree, -1)  # its gradient is added to the other, which leaves the difference
    off = float(torch.stack([shared - alone, scored - alone]).abs().max() / alone.abs().max())
    if off <= _get_tolerance(policy):
        return None, (whole, different)
    return f"its logprobs are off by {off:.2g} of the largest in a tree", (whole, different)


@torch.no_grad()
def _find_leak(policy: Any, rows: Sequence[Ids]) -> str | None:
    """Why a branch of a tree is not apart from the others; None if it is."""
    others = slice(len(rows[0]) - 1, None)
    own = merge_rows(rows).paths[0][count_common_prefix(rows[0], rows[1]) :]
    change = _score_tree(policy, rows) - _score_tree(policy, rows, changed=own)
    leak = float(change[others].abs().max())
    return None if leak <= LEAK_TOLERANCE else f"a row's logprobs change by {leak:.2g} with another branch of its tree"


def _score_alone(policy: Any, rows: Sequence[Ids]) -> torch.Tensor:
    """[N] logprobs of all ids but the first of each row, each in its own pass."""
    given = [torch.from_numpy(row.astype(np.int64))[None].to(policy.causal.device) for row in rows]
    return torch.cat(
        [policy(ids_1T, torch.arange(ids_1T.shape[1], device=ids_1T.device)[None] > 0, 1.0)[0] for ids_1T in given]
    )


def _score_tree(policy: Any, rows: Sequence[Ids], changed: Nodes | None = None) -> torch.Tensor:
    """[N] as `_score_alone`, from one tree, in which the ids of some nodes can be `changed`."""
    tree, device = merge_rows(rows), policy.causal.device
    ids_T = tree.token_ids_T.astype(np.int64)
    if changed is not None:
        ids_T[changed] = (ids_T[changed] + 1) % policy.vocab_size
    ids_BT, depths_BT = (torch.from_numpy(each)[None].to(device) for each in (ids_T, tree.depths_T))
    inputs, _ = pick_nodes(tree, rows, [np.arange(len(row)) > 0 for row in rows])
    given = (1.0, None, depths_BT, Entropy.NONE, None, inputs.to(device))
    logprobs_N: torch.Tensor = policy(ids_BT, torch.zeros_like(ids_BT, dtype=torch.bool), *given)[0]
    return logprobs_N


def _add_squares(parameters: Sequence[torch.nn.Parameter], sequence: SequenceGroup | None) -> float:
    """Of the gradients' parts in this process, after those of the ids in others were added, as FSDP2 does itself."""
    parts = [parameter.grad for parameter in parameters if parameter.grad is not None]
    whole = [part.to_local() if isinstance(part, DTensor) else add_parts(part, sequence) for part in parts]
    return sum(float(part.double().square().sum()) for part in whole)


def _get_tolerance(policy: Any) -> float:
    """Maximum difference, relative to the largest logprob or to the gradient's norm: other shapes are rounded
    differently. A GPU may round the factors of float32 products.
    """
    device, dtype = policy.causal.device, policy.causal.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    if dtype in (torch.bfloat16, torch.float16):
        return 0.1
    return 1e-2 if device.type == "cuda" else 1e-3
