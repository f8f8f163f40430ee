"""Prove on a few ids that a model can have several rows in one lane.

A model that finds the rows' borders by their positions (transformers' attention does) computes the same hidden states
for a row as without the others. Other models silently do not: state-space and convolution layers, ALiBi positions,
attention in chunks that are counted from the lane's start.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from unbroken.exactness import choose_long_length, get_tolerance
from unbroken.training.model.backbone import get_backbone, hidden_states
from unbroken.training.model.lanes import Layout

LEAK_TOLERANCE = 1e-5
"""Maximum change of a row if only *another* row changes. The shapes are the same, so there should be no change."""
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@torch.no_grad()
def find_packing_obstacle(model: Any, layout: Layout) -> str | None:
    """The reason why rows of this model cannot be packed in this layout; None if they can.

    A few ids cannot show everything: layers of other kinds than full and sliding attention, and attention in chunks,
    are always refused.
    """
    if "position_ids" not in inspect.signature(get_backbone(model).forward).parameters:
        return "its forward takes no position_ids"
    config = model.config.get_text_config()
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS):
        return f"it has layers of {', '.join(unknown)}"
    if getattr(config, "attention_chunk_size", None):
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
    rows = _make_rows(policy.causal, vocab_size, device)
    try:
        alone = torch.cat([_logprobs_of_lane(policy, [row]) for row in rows])
        together = _logprobs_of_lane(policy, rows)
        other = _logprobs_of_lane(policy, [rows[0].flip(0), *rows[1:]])
    except Exception:  # models may raise anything for inputs that they do not expect
        return False
    off = float((together - alone).abs().max() / alone.abs().max())
    leak = float((together - other)[len(rows[0]) - 1 :].abs().max())
    return off <= 8 * torch.finfo(torch.bfloat16).eps and leak <= LEAK_TOLERANCE


def _make_rows(model: Any, vocab_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    lengths = [5, 4, choose_long_length(model)]
    return torch.split(torch.arange(1, 1 + sum(lengths), device=device).remainder(vocab_size), lengths)


def _logprobs_of_lane(policy: Any, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all ids but the first of each row."""
    positions_BT = torch.cat([torch.arange(len(row), device=row.device) for row in rows])[None]
    given_BT = positions_BT if len(rows) > 1 else None
    logprobs_N: torch.Tensor = policy(torch.cat(list(rows))[None], positions_BT > 0, 1.0, None, given_BT).logprobs_N
    return logprobs_N


def _compare_with_rows_alone(model: Any, layout: Layout) -> str | None:
    embeddings = model.get_input_embeddings().weight
    rows = _make_rows(model, len(embeddings), embeddings.device)
    alone = [hidden_states(model, row[None])[0] for row in rows]
    together = _compute_packed(model, rows, layout)
    largest = max(float(states.abs().max()) for states in alone)
    off = max(float((a - b).abs().max()) for a, b in zip(together, alone, strict=True)) / largest
    if not off <= get_tolerance(alone[0].dtype):
        return f"its hidden states are off by {off:.2g} of the largest where rows share a lane"
    other = _compute_packed(model, [row.flip(0) if k == 0 else row for k, row in enumerate(rows)], layout)
    leak = max(float((a - b).abs().max()) for a, b in zip(together[1:], other[1:], strict=True)) / largest
    return None if leak <= LEAK_TOLERANCE else f"a row's hidden states change by {leak:.2g} with the row before it"


def _compute_packed(model: Any, rows: Sequence[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    """The hidden states of rows that share a lane, beside a lane with other borders unless it is `ONE_LANE`."""
    lanes = [rows] if layout is Layout.ONE_LANE else [rows[::-1], rows]
    ids_BT = torch.stack([torch.cat(list(lane)) for lane in lanes])
    positions_BT = torch.stack(
        [torch.cat([torch.arange(len(row), device=row.device) for row in lane]) for lane in lanes]
    )
    states_BTD = hidden_states(model, ids_BT, position_ids_BT=positions_BT)
    return list(torch.split(states_BTD[-1], [len(row) for row in rows]))
