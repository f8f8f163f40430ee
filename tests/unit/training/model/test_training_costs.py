"""What the trainer decides by cost: whether to pack, in which layout, and how many ids go through a pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator

from support.models import tiny_qwen3
from unbroken.training.config import Packing
from unbroken.training.model.lanes import (
    CPU_COSTS,
    GPU_COSTS,
    MAX_PASS_IDS,
    MIN_PASS_IDS,
    Costs,
    RowLayout,
    choose_pass_size,
    estimate_cost,
    holding_gradients,
    make_probe_pass,
    measure_pass_size,
    plan_cheapest,
    plan_passes,
)
from unbroken.training.model.logprobs import PolicyLogprobs

WIDTH = 1024
EQUAL = [311 + number % 2 for number in range(64)]
LONG_TAIL = [2000, 900, 700, 400, 300, 200, 150, 100, 90, 80, 50, 40, 30, 20] * 4
GIB = 2**30


def plan(lengths, layout, costs=GPU_COSTS, tokens=16_384):
    return plan_cheapest(lengths, tokens, layout, width=WIDTH, costs=costs)


def is_packed(passes) -> bool:
    return any(len(lane) > 1 for lanes in passes for lane in lanes)


@pytest.mark.parametrize("layout", [RowLayout.LANES, RowLayout.BY_ROWS])
def test_rows_of_one_length_are_not_packed_on_a_gpu(layout):
    assert not is_packed(plan(EQUAL, layout))


@pytest.mark.parametrize("layout", [RowLayout.LANES, RowLayout.BY_ROWS])
def test_rows_with_a_long_tail_are_packed_on_a_gpu(layout):
    assert is_packed(plan(LONG_TAIL, layout))


def test_borders_save_smaller_amounts_of_padding_than_a_mask_does():
    lengths = [1000 - 10 * (number % 21) for number in range(64)]  # a fifth of the shortest would be padding
    assert not is_packed(plan(lengths, RowLayout.LANES))
    lengths = [400 - 5 * (number % 41) for number in range(16)]
    assert is_packed(plan(lengths, RowLayout.BY_ROWS))


def test_a_mask_costs_less_on_a_cpu():
    lengths = [1000, 1000, 800, 800, 200, 200] * 2
    assert is_packed(plan(lengths, RowLayout.LANES, CPU_COSTS, tokens=6000))
    assert not is_packed(plan(EQUAL, RowLayout.LANES, CPU_COSTS))


@pytest.mark.parametrize("layout", [RowLayout.LANES, RowLayout.BY_ROWS])
def test_the_plan_that_is_estimated_to_cost_least_is_taken(layout):
    for lengths in (EQUAL, LONG_TAIL, [5], [40, 3, 3, 3]):
        padded = plan_passes(lengths, 4096, RowLayout.PADDED)
        packed = plan_passes(lengths, 4096, layout, free_length=WIDTH)
        costs = [
            estimate_cost(padded, lengths, RowLayout.PADDED, width=WIDTH, costs=GPU_COSTS),
            estimate_cost(packed, lengths, layout, width=WIDTH, costs=GPU_COSTS),
        ]
        chosen = plan(lengths, layout, tokens=4096)
        assert chosen == (packed if costs[1] < costs[0] else padded)


def test_the_cost_of_padding_is_that_of_its_ids():
    costs = Costs(causal=0.0, masked=0.0)
    assert estimate_cost([[[0], [1]]], [6, 2], RowLayout.PADDED, width=8, costs=costs) == 12
    assert estimate_cost([[[0, 1]]], [6, 2], RowLayout.BY_ROWS, width=8, costs=costs) == 8
    assert estimate_cost([[[0, 1]]], [6, 2], RowLayout.LANES, width=8, costs=Costs(causal=0.0, masked=0.5)) == 8 * 1.5


def test_no_rows_make_no_passes():
    assert plan([], RowLayout.BY_ROWS) == []


def test_packing_that_was_asked_for_by_name_is_not_weighed():
    policy = PolicyLogprobs(tiny_qwen3(), chunk_size=4, packing=Packing.ONE_LANE)
    assert is_packed(policy.plan([5, 5, 5], 100))
    policy = PolicyLogprobs(tiny_qwen3(), chunk_size=4, packing=Packing.NEVER)
    assert not is_packed(policy.plan([50, 5, 5], 100))


def of_mebibytes(of_an_id: float) -> Callable[[int], float]:
    return lambda num_ids: num_ids * of_an_id * 2**20


def test_a_pass_is_as_large_as_memory_allows_but_not_larger_than_it_needs_to_be():
    assert choose_pass_size(of_mebibytes(1), free_bytes=100 * GIB) == MAX_PASS_IDS
    assert choose_pass_size(of_mebibytes(1), free_bytes=16 * GIB) == 12_288
    assert choose_pass_size(of_mebibytes(1), free_bytes=14 * GIB) == 6_144
    assert choose_pass_size(of_mebibytes(4), free_bytes=16 * GIB) == 3_072
    assert choose_pass_size(of_mebibytes(1), free_bytes=100 * GIB, max_ids=24_576) == 24_576


def test_a_pass_is_tried_even_if_nothing_seems_to_be_free():
    assert choose_pass_size(of_mebibytes(1), free_bytes=0) == MIN_PASS_IDS


def test_small_differences_in_memory_do_not_change_the_size():
    sizes = {choose_pass_size(of_mebibytes(1.4), free_bytes=free * GIB) for free in (30, 35, 40, 60)}
    assert sizes == {12_288}


def test_attention_by_rows_is_not_tried_on_a_cpu():
    policy = PolicyLogprobs(tiny_qwen3(), chunk_size=4)
    with torch.autocast("cpu", torch.bfloat16):
        policy.allow_by_rows()
    assert policy.layout is RowLayout.LANES


class FakeMemory:
    """A GPU on which a pass of n ids needs the most of `needs`, pairs of fixed bytes and bytes an id."""

    def __init__(self, *needs, free):
        self._needs, self._free = needs, free
        self.sizes = []
        self._last = 0

    def make_pass(self, num_ids):
        self.sizes.append(num_ids)
        self._last = max(fixed + of_id * num_ids for fixed, of_id in self._needs)

    def restart(self):
        self._last = 0

    def peak(self):
        return self._last

    def free(self):
        return self._free


def measure(memory, **given):
    return measure_pass_size(memory.make_pass, memory, **given)


MIB = 2**20


def test_the_slope_is_found_beside_what_every_pass_needs():
    memory = FakeMemory((3 * GIB, 6 * MIB), free=60 * GIB)
    found = measure(memory)
    assert (found.num_ids, found.bytes_per_id, found.fixed_bytes) == (6_144, 6 * MIB, 3 * GIB)
    assert memory.sizes == [1_536, 3_072, 6_144]


def test_with_checkpointing_larger_passes_show_a_slope_that_the_head_hides_in_small_ones():
    # The head needs 4 GiB; a layer that is computed again needs more from 4,096 ids on.
    found = measure(FakeMemory((4 * GIB, 0.25 * MIB), (0, 1.25 * MIB), free=30 * GIB), max_ids=24_576)
    assert found.bytes_per_id == pytest.approx(1.25 * MIB, rel=0.2)
    assert found.num_ids == 12_288


def test_sizes_that_would_not_fit_are_not_tried():
    memory = FakeMemory((2 * GIB, 6 * MIB), free=20 * GIB)
    assert measure(memory).num_ids == 1_536
    assert memory.sizes == [1_536]


def test_what_the_optimizer_will_need_is_not_free():
    def make():
        return FakeMemory((0, 4 * MIB), free=100 * GIB)

    assert measure(make()).num_ids == 12_288
    assert measure(make(), reserved_bytes=60 * GIB).num_ids == 6_144
    assert measure(make(), reserved_bytes=200 * GIB).num_ids == MIN_PASS_IDS


def test_processes_agree_on_what_is_free_and_on_each_peak():
    # Another process has 30 GiB free, and needs 1 GiB more in every pass.
    def agree(value):
        return max(value, -30 * GIB) if value < 0 else value + GIB

    found = measure(FakeMemory((0, 4 * MIB), free=100 * GIB), agree=agree)
    assert (found.free_bytes, found.bytes_per_id, found.fixed_bytes) == (30 * GIB, 4 * MIB, GIB)
    assert found.num_ids == 3_072


@pytest.mark.parametrize("packing", [Packing.NEVER, Packing.ONE_LANE])
def test_a_probe_holds_gradients_of_zero_and_leaves_none(packing):
    policy, accelerator = PolicyLogprobs(tiny_qwen3(), chunk_size=64, packing=packing), Accelerator()
    with holding_gradients(policy):
        held = [parameter.grad for parameter in policy.parameters()]
        make_probe_pass(policy, accelerator, 512)
        assert all(parameter.grad is before for parameter, before in zip(policy.parameters(), held, strict=True))
        assert not any(gradient.any() for gradient in held)
    assert all(parameter.grad is None for parameter in policy.parameters())
