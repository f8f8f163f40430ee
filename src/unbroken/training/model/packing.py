"""Whether a model can have several rows in one lane: proven on a few ids, or not done.

A model that finds the rows' borders from their positions (transformers' attention does) gives each row the hidden
states that it has alone. One that does not gives others without a word: state-space and convolution layers, positions
of its own (ALiBi), attention in chunks that count from the lane's start.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from unbroken.training.model.backbone import backbone_of, hidden_states
from unbroken.training.model.lanes import Layout

PROBE_LENGTHS = (5, 4, 3)
TOLERANCE = 1e-3
"""Largest difference from the row alone, relative to the largest hidden state: shapes differ, and so does rounding.
Beyond float32 it is that of the dtype, if that is more."""
LEAK_TOLERANCE = 1e-5
"""Largest change where only *another* row has changed: the shapes are the same, so there should be none at all."""
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@torch.no_grad()
def why_not_packed(model: Any, layout: Layout) -> str | None:
    """Why rows cannot be packed for this model in that layout, in words; None if they can.

    What a few ids cannot show is decided by rule: layers that are neither full nor sliding attention, and chunks.
    """
    if "position_ids" not in inspect.signature(backbone_of(model).forward).parameters:
        return "its forward takes no position_ids"
    config = model.config.get_text_config()
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS):
        return f"it has layers of {', '.join(unknown)}"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is in chunks"
    try:
        return _difference(model, layout)
    except Exception as error:  # a model may do anything with positions that it does not expect
        return f"it fails with {type(error).__name__}: {error}"


def _difference(model: Any, layout: Layout) -> str | None:
    embeddings = model.get_input_embeddings().weight
    ids = torch.arange(1, 1 + sum(PROBE_LENGTHS), device=embeddings.device).remainder(len(embeddings))
    rows = torch.split(ids, list(PROBE_LENGTHS))
    alone = [hidden_states(model, row[None])[0] for row in rows]
    together = _packed_states(model, rows, layout)
    largest = max(float(states.abs().max()) for states in alone)
    off = max(float((a - b).abs().max()) for a, b in zip(together, alone, strict=True)) / largest
    if not off <= max(TOLERANCE, 8 * torch.finfo(alone[0].dtype).eps):
        return f"its hidden states are off by {off:.2g} of the largest where rows share a lane"
    other = _packed_states(model, [row.flip(0) if k == 0 else row for k, row in enumerate(rows)], layout)
    leak = max(float((a - b).abs().max()) for a, b in zip(together[1:], other[1:], strict=True)) / largest
    return None if leak <= LEAK_TOLERANCE else f"a row's hidden states change by {leak:.2g} with the row before it"


def _packed_states(model: Any, rows: Sequence[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    """Of each row, where all lie in one lane, beside one with other borders unless the layout has a single lane."""
    lanes = [rows] if layout is Layout.ONE_LANE else [rows[::-1], rows]
    ids_BT = torch.stack([torch.cat(list(lane)) for lane in lanes])
    positions_BT = torch.stack(
        [torch.cat([torch.arange(len(row), device=row.device) for row in lane]) for lane in lanes]
    )
    states_BTD = hidden_states(model, ids_BT, position_ids_BT=positions_BT)
    return list(torch.split(states_BTD[-1], [len(row) for row in rows]))
