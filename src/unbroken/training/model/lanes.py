"""Rows in a forward pass: lanes of one length, with one row each (padded) or several (packed).

Worked example, rows a to e of 5, 4, 3, 2 and 1 ids, at most 10 ids in a pass, two passes:

    PADDED      aaaaa | ccc         4 ids of padding
                bbbb. | dd.
                      | e..
    LANES       aaaaa | ccc         1 id of padding
                bbbbe | dd.
    ONE_LANE    aaaaabbbbe | cccdd  none, for any lengths

    BY_ROWS     as ONE_LANE, but attention gets the borders of the rows in place of a mask

Rows that begin with the same ids may share these: then a pass is a tree of ids in one lane (`tree`).

Positions start at 0 in each row, by which transformers keeps attention within a row. With a mask its cost is quadratic
in the length of a lane: hence lanes no longer than the longest row, and `ONE_LANE` only for an attention that skips
masked blocks (flex_attention). Lanes may always be as long as the model is wide: attention over D ids costs a sixth of
the rest of a layer, 4 D x D against 24 D x D operations per id.

`plan_cheapest` packs only where the padding that it saves exceeds what it costs (`Costs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from unbroken.logit_edits import LogitEdits
from unbroken.training.model.scores import Entropy, KeptTokens
from unbroken.training.model.tree import Ids, TreeInputs, TreeSizes, merge_rows, pick_nodes, plan_trees
from unbroken.types import BoolMask, KeptIds, TrainingSample

T = TypeVar("T")
PADDING_ID = 0
"""Any id will do: no other id attends to it, and it is not in the loss."""
Pass: TypeAlias = list[list[int]]
"""The rows in each lane of one forward pass, by index."""


class RowLayout(StrEnum):
    """How rows are put into lanes."""

    PADDED = "padded"
    """One row in each lane."""
    LANES = "lanes"
    """Several rows in a lane; lanes are as long as the longest row of the pass, or a length that costs little."""
    ONE_LANE = "one_lane"
    """All rows of a pass in one lane, with a mask."""
    BY_ROWS = "by_rows"
    """All rows of a pass in one lane; attention gets the rows' borders (`varlen`), and needs no mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What attention adds to the cost of one id, which is 1 without, if lanes are as long as the model is wide.

    It grows with the length.
    """

    causal: float
    """Of rows of one length, by a causal kernel."""
    masked: float
    """Of lanes with a mask."""
    by_rows: float = 0.0
    """Of rows by their borders, in addition to `causal`, for any length."""
    in_blocks: float = 0.0
    """Of rows of one length, by FlexAttention in the blocks of a tree."""
    per_pass: float = 0.0
    """Of one more pass, in ids."""


GPU_COSTS = Costs(causal=0.08, masked=0.25, by_rows=0.04, in_blocks=0.16, per_pass=500)
"""On an H200, bfloat16, width 1024: 22.7 us an id padded, 23.7 by rows, 27.1 in lanes of 930 (docs/lab-notes)."""
CPU_COSTS = Costs(causal=0.02, masked=0.05, per_pass=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPass:
    """The rows of one forward pass."""

    lanes: Pass
    is_tree: bool = False
    """Whether the rows of the one lane are merged where they begin with the same ids."""
    num_shared: int = 0
    """Ids that this saves."""

    @property
    def rows(self) -> list[int]:
        """The rows of all lanes, one lane after the other."""
        return [index for lane in self.lanes for index in lane]

    def pick(self, values: Sequence[T]) -> list[list[T]]:
        """Those of the rows of each lane, of values for all rows."""
        return [[values[index] for index in lane] for lane in self.lanes]


MIN_SHARED = 0.1
"""Least share of the ids that trees must save: one process compiles attention once, and estimates are not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The input of a forward pass: B lanes of T ids."""

    token_ids_BT: torch.Tensor
    """int64, padded on the right."""
    mask_BT: torch.Tensor
    """bool, the ids to compute logprobs of; never the first of a row, never padding."""
    position_ids_BT: torch.Tensor | None
    """int64, from 0 in each row; None if each lane has one row."""
    tree: TreeInputs | None = None
    """Of a tree, whose nodes are the ids of the one lane; the mask is then true at nodes that predict such an id."""
    num_ids: int
    """Ids that are not padding."""
    num_shared: int = 0
    """Ids of rows that are not fed because another row has them."""
    kept: KeptTokens | None = None
    """What the sampler did where the mask is true, row by row, or at the places of a tree; None if nothing."""


def plan_passes(lengths: Sequence[int], tokens_per_pass: int, layout: RowLayout, *, free_length: int = 0) -> list[Pass]:
    """Put row indices into passes of at most `tokens_per_pass` ids, padding included; a longer row has its own pass.

    Longest rows first, so that memory runs out in the first pass or not at all; each row goes into the first lane with
    room. Lanes may be as long as `free_length`, even if no row is.
    """
    min_lengths = {
        RowLayout.PADDED: 0,
        RowLayout.LANES: min(free_length, tokens_per_pass),
        RowLayout.ONE_LANE: tokens_per_pass,
        RowLayout.BY_ROWS: tokens_per_pass,
    }
    min_length = min_lengths[layout]
    passes: list[Pass] = []
    room: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        found = None if layout is RowLayout.PADDED else _find_lane(room, length)
        if found is not None:
            number, lane = found
            passes[number][lane].append(index)
            room[number][lane] -= length
            continue
        lane_length = max(lengths[passes[-1][0][0]], min_length) if passes else 0
        if passes and (len(passes[-1]) + 1) * lane_length <= tokens_per_pass:
            passes[-1].append([index])
            room[-1].append(lane_length - length)
        else:
            passes.append([[index]])
            room.append([max(min_length - length, 0)])
    return passes


def plan_cheapest(
    lengths: Sequence[int], tokens_per_pass: int, layout: RowLayout, *, width: int, costs: Costs
) -> list[Pass]:
    """Plan passes in this layout, or padded if that is estimated to cost less, in a model of hidden size `width`."""
    padded = plan_passes(lengths, tokens_per_pass, RowLayout.PADDED)
    if layout is RowLayout.PADDED:
        return padded
    packed = plan_passes(lengths, tokens_per_pass, layout, free_length=width)
    cost = estimate_cost(packed, lengths, layout, width=width, costs=costs)
    return packed if cost < estimate_cost(padded, lengths, RowLayout.PADDED, width=width, costs=costs) else padded


def estimate_cost(
    passes: Sequence[Pass], lengths: Sequence[int], layout: RowLayout, *, width: int, costs: Costs
) -> float:
    """Seconds of all passes, in those of one id without attention."""
    total = 0.0
    for lanes in passes:
        length = max(sum(lengths[i] for i in lane) for lane in lanes)
        rows = [lengths[i] for lane in lanes for i in lane]
        if len(rows) == len(lanes):  # nothing is packed
            total += len(lanes) * length * (1 + costs.causal * length / width)
        elif layout is RowLayout.BY_ROWS:
            total += sum(row * (1 + costs.by_rows + costs.causal * row / width) for row in rows)
        else:
            total += len(lanes) * length * (1 + costs.masked * length / width)
    return total


def plan_trees_by_cost(
    rows: Sequence[Ids], nodes_per_pass: int, *, width: int, costs: Costs, in_blocks: bool
) -> tuple[list[RowPass], float]:
    """The plan of trees that is estimated to cost least, and its cost as that of `estimate_cost` and `per_pass`.

    Attention is `in_blocks`, or with a mask. A row that shares nothing with another of its pass is as it is alone.
    """

    def cost_of(sizes: TreeSizes) -> NDArray[np.float64]:
        masked = costs.masked * sizes.num_nodes
        by_blocks = costs.by_rows * width + 2 * costs.in_blocks * sizes.num_pairs / sizes.num_nodes
        of_tree = by_blocks if in_blocks else masked
        attention = np.where(sizes.num_rows == 1, costs.causal * sizes.num_nodes, of_tree)
        cost: NDArray[np.float64] = costs.per_pass + sizes.num_nodes * (1 + attention / width)
        return cost

    planned, cost = plan_trees(rows, nodes_per_pass, cost_of)
    passes = [
        RowPass(
            lanes=[list(each.rows)],
            is_tree=len(each.rows) > 1,
            num_shared=sum(len(rows[index]) - 1 for index in each.rows) - each.num_nodes,
        )
        for each in planned
    ]
    return passes, cost


def lay_out(
    lanes: Sequence[Sequence[tuple[TrainingSample, BoolMask]]], device: torch.device, *, as_tree: bool = False
) -> Lanes:
    """Put the rows of each lane, each with its mask, into tensors; those of one lane can be merged `as_tree`."""
    if as_tree:
        (lane,) = lanes
        return _lay_out_tree(lane, device)
    shape = len(lanes), max(sum(len(sample.token_ids) for sample, _ in lane) for lane in lanes)
    token_ids = np.full(shape, PADDING_ID, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.bool_)
    positions = np.tile(np.arange(shape[1], dtype=np.int64), (shape[0], 1))
    for number, lane in enumerate(lanes):
        start = 0
        for sample, of_sample in lane:
            stop = start + len(sample.token_ids)
            token_ids[number, start:stop] = sample.token_ids
            mask[number, start:stop] = of_sample
            positions[number, start:] = np.arange(shape[1] - start)
            start = stop
    is_packed = any(len(lane) > 1 for lane in lanes)
    rows = [given for lane in lanes for given in lane]
    return Lanes(
        token_ids_BT=torch.from_numpy(token_ids).to(device),
        mask_BT=torch.from_numpy(mask).to(device),
        position_ids_BT=torch.from_numpy(positions).to(device) if is_packed else None,
        num_ids=sum(len(sample.token_ids) for sample, _ in rows),
        kept=_make_kept(_pick_kept(rows), _pick_edits(rows), device),
    )


def _pick_kept(rows: Sequence[tuple[TrainingSample, BoolMask]]) -> KeptIds | None:
    """What the sampler kept at the ids of the rows' masks, row by row; None if nothing was cut."""
    parts = [
        (None if sample.kept_ids is None else sample.kept_ids.pick(mask), int(mask.sum())) for sample, mask in rows
    ]
    return KeptIds.join(parts)


def _pick_edits(rows: Sequence[tuple[TrainingSample, BoolMask]]) -> LogitEdits | None:
    """What changed the logits of the ids of the rows' masks, row by row; None if nothing did."""
    return LogitEdits.of((sample.token_ids, sample.controls, np.flatnonzero(mask)) for sample, mask in rows)


def _make_kept(kept: KeptIds | None, edits: LogitEdits | None, device: torch.device) -> KeptTokens | None:
    if edits is not None and kept is None:
        kept = KeptIds.whole(len(edits.places_N))
    return None if kept is None else KeptTokens.of(kept, device, edits=edits)


def _lay_out_tree(rows: Sequence[tuple[TrainingSample, BoolMask]], device: torch.device) -> Lanes:
    """Merge the rows, each with its mask, into the tree of one lane."""
    ids, masks = [sample.token_ids for sample, _ in rows], [mask for _, mask in rows]
    tree = merge_rows(ids)
    kept, edits = _pick_kept(rows), _pick_edits(rows)
    inputs, first = pick_nodes(tree, ids, masks, kept, None if edits is None else edits.find_keys())
    mask = np.zeros((1, len(tree.token_ids_T)), dtype=np.bool_)
    mask[0, inputs.nodes_U] = True
    return Lanes(
        token_ids_BT=torch.from_numpy(tree.token_ids_T.astype(np.int64))[None].to(device),
        mask_BT=torch.from_numpy(mask).to(device),
        position_ids_BT=torch.from_numpy(tree.depths_T)[None].to(device),
        tree=inputs.to(device),
        num_ids=len(tree.token_ids_T),
        num_shared=tree.num_shared,
        kept=_make_kept(
            None if kept is None else kept.pick(first), None if edits is None else edits.pick(first), device
        ),
    )


def _find_lane(room: Sequence[Sequence[int]], length: int) -> tuple[int, int] | None:
    places = ((number, lane) for number, lanes in enumerate(room) for lane, left in enumerate(lanes) if left >= length)
    return next(places, None)


MAX_PASS_IDS = 12_288
"""More is not faster: of a 0.6B model, the CPU launches the kernels of a pass in the time that the GPU needs for 8,000
to 10,000 ids (docs/lab-notes/training-speed.md), and larger models need fewer."""
MAX_COMPILED_PASS_IDS = 24_576
"""Compiled layers are done in two thirds of the time, but launched no faster: of this many ids a step took 3.56 s on an
H200, of 12,288 3.90 s (docs/lab-notes/training-speed.md)."""
WIDE = 2048
"""Models of this hidden size and more get half as many ids: a GPU is as busy with them, in half the memory."""
MIN_PASS_IDS = 768
_NUM_SIZES = 4
"""The largest size, and those by halves below it that a measurement begins with."""
USABLE_SHARE = 0.8
"""Of what is free; the rest is for what differs between passes, and for gaps between allocations."""
_ROW_IDS = 256


class Memory(Protocol):
    """What a measurement asks of a device's memory, in bytes."""

    def restart(self) -> None:
        """Begin to look for a peak, over what is in use now."""

    def peak(self) -> int:
        """The most that was in use since `restart`, over what was in use then."""

    def free(self) -> int:
        """What is free now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSize:
    """How many ids a pass may have, and what that is based on."""

    num_ids: int
    bytes_per_id: float
    fixed_bytes: float
    """What a pass needs in addition, of any number of ids."""
    free_bytes: int
    """Beside weights, gradients and the optimizer's state."""

    def __str__(self) -> str:
        return (
            f"passes of {self.num_ids:,} ids: {self.bytes_per_id / 2**20:.2f} MiB an id and "
            f"{self.fixed_bytes / 2**30:.1f} GiB, of {self.free_bytes / 2**30:.1f} GiB free"
        )


def choose_pass_size(count_bytes: Callable[[int], float], *, free_bytes: float, max_ids: int = MAX_PASS_IDS) -> int:
    """The largest number of ids whose pass fits, or `MIN_PASS_IDS`, which is tried even if it does not fit."""
    size = max_ids
    while size > MIN_PASS_IDS and count_bytes(size) > USABLE_SHARE * free_bytes:
        size //= 2
    return size


def measure_pass_size(
    make_pass: Callable[[int], object],
    memory: Memory,
    *,
    reserved_bytes: int = 0,
    max_ids: int = MAX_PASS_IDS,
    agree: Callable[[int], int] = int,
) -> PassSize:
    """Measure how many ids may go through the model at a time: what keeps an H200 busy, or what memory allows.

        a pass of 1,536 ids needs 12 GiB, one of 3,072 needs 21: 6 MiB an id and 3 GiB    60 GiB free:  6,144 ids
                                                                                          30 GiB free:  3,072 ids

    `make_pass` makes a forward and a backward pass of so many ids, all with a loss, while gradients are held: else the
    gradients that it makes would hide its activations. Each size that fits is followed by its double, whose need is
    extrapolated, because with checkpointing small passes need no more memory than the head alone.
    `reserved_bytes` are for what comes later, such as the optimizer's state.

    Sizes are halved, so that small differences in free memory change nothing, and a run that is continued makes the
    same passes. All processes call it, and `agree` returns the largest of their numbers.
    """
    free_bytes = -agree(-max(memory.free() - reserved_bytes, 0))
    sizes = [max_ids]
    while sizes[0] // 2 >= MIN_PASS_IDS and len(sizes) < _NUM_SIZES:
        sizes.insert(0, sizes[0] // 2)
    peaks: dict[int, int] = {}
    slope = fixed = 0.0
    for size in sizes[:-1]:
        if peaks and fixed + size * slope > USABLE_SHARE * free_bytes:
            break
        memory.restart()
        make_pass(size)
        peaks[size] = agree(memory.peak())
        if size // 2 in peaks:
            slope = max((peaks[size] - peaks[size // 2]) / (size - size // 2), 0.0)
            fixed = max(peaks[size] - size * slope, 0.0)
        else:
            slope, fixed = peaks[size] / size, 0.0
    chosen = choose_pass_size(lambda num_ids: fixed + num_ids * slope, free_bytes=free_bytes, max_ids=max_ids)
    return PassSize(num_ids=chosen, bytes_per_id=slope, fixed_bytes=fixed, free_bytes=free_bytes)


@contextmanager
def holding_gradients(policy: Any) -> Iterator[None]:
    """Give each trained parameter a gradient of zeros, as after the first pass of an update, and drop it afterwards."""
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        policy.zero_grad(set_to_none=True)


def make_probe_pass(policy: Any, accelerator: Any, num_ids: int) -> None:
    """A forward and a backward pass of so many ids, in rows of 256, whose gradients are zero.

    In one lane if the policy's rows are so: compiled layers have a variant for it.
    """
    is_packed = policy.layout in (RowLayout.ONE_LANE, RowLayout.BY_ROWS)
    shape = (1, num_ids) if is_packed else (num_ids // _ROW_IDS, _ROW_IDS)
    position_ids_BT = torch.arange(num_ids, device=accelerator.device).remainder(_ROW_IDS).view(shape)
    token_ids_BT, mask_BT = torch.zeros_like(position_ids_BT), position_ids_BT > 0
    positions = position_ids_BT if is_packed else None
    with accelerator.autocast():
        scores = policy(token_ids_BT, mask_BT, 1.0, None, positions, Entropy.MEASURED)
    (scores.logprobs_N.sum() * 0.0).backward()
