"""Which slot a new prompt gets, and what of it is reused."""

from __future__ import annotations

import numpy as np

from unbroken.engines.transformers.slots import Claim, SlotTable
from unbroken.types import SamplingParams, token_ids

PARAMS = SamplingParams(max_tokens=10)


def table(max_slots: int = 4) -> SlotTable:
    return SlotTable(max_slots=max_slots, context_length=200)


def run(slots: SlotTable, ids: list[int], *, num_cached: int | None = None, release: bool = True) -> Claim:
    """Claim a slot, and let its keys and values be computed for all ids but the last, or for as many as are given."""
    claim = slots.claim(token_ids(ids), PARAMS)
    slots.num_cached[claim.slot] = len(ids) - 1 if num_cached is None else num_cached
    if release:
        slots.release(claim.slot)
    return claim


def test_the_next_turn_takes_over_its_slot() -> None:
    slots = table()
    first = run(slots, list(range(30)))
    run(slots, [9] * 30)
    claim = slots.claim(token_ids([*range(30), 50, 51]), PARAMS)
    assert claim == Claim(slot=first.slot, num_cached=29, copy_from=first.slot)


def test_a_branch_is_copied_and_leaves_the_other_slot_as_it_is() -> None:
    slots = table()
    first = run(slots, list(range(30)))
    claim = slots.claim(token_ids([*range(20), 77, 78]), PARAMS)
    assert claim.slot != first.slot
    assert (claim.copy_from, claim.num_cached) == (first.slot, 20)
    assert slots.num_cached[first.slot] == 29


def test_a_running_slot_is_copied_not_taken() -> None:
    slots = table()
    first = run(slots, list(range(30)), release=False)
    claim = slots.claim(token_ids(range(30)), PARAMS)
    assert claim.slot != first.slot
    assert (claim.copy_from, claim.num_cached) == (first.slot, 29)


def test_the_last_id_of_a_prompt_is_never_reused() -> None:
    slots = table()
    run(slots, list(range(40)))
    assert slots.claim(token_ids(range(20)), PARAMS).num_cached == 19


def test_ids_beyond_what_is_cached_are_not_reused() -> None:
    slots = table()
    run(slots, list(range(40)), num_cached=17)
    assert slots.claim(token_ids(range(40)), PARAMS).num_cached == 17


def test_few_common_ids_are_not_worth_a_copy() -> None:
    slots = table()
    first = run(slots, list(range(30)))
    claim = slots.claim(token_ids([0, 1, 2, 99, 98]), PARAMS)
    assert claim.num_cached == 0
    assert claim.copy_from == claim.slot != first.slot


def test_the_least_recently_used_slot_is_emptied_first() -> None:
    slots = table(max_slots=3)
    old, middle, new = (run(slots, [k] * 30).slot for k in range(3))
    assert len({old, middle, new}) == 3
    assert run(slots, [7] * 30).slot == old
    assert run(slots, [8] * 30).slot == middle


def test_the_only_slot_keeps_the_common_prefix_when_it_is_taken_for_a_branch() -> None:
    slots = table(max_slots=1)
    first = run(slots, list(range(30)))
    claim = slots.claim(token_ids([*range(20), 77, 78]), PARAMS)
    assert claim == Claim(slot=first.slot, num_cached=20, copy_from=first.slot)


def test_i6_forgetting_for_new_weights_spares_nothing() -> None:
    slots = table()
    run(slots, list(range(30)))
    running = run(slots, [5] * 30, release=False)
    slots.forget(running=True)
    assert not slots.num_cached.any()
    assert slots.length[running.slot] == 30
    assert slots.claim(token_ids(range(30)), PARAMS).num_cached == 0


def test_forgetting_the_prefix_cache_spares_what_runs() -> None:
    slots = table()
    run(slots, list(range(30)))
    running = run(slots, [5] * 30, release=False)
    slots.forget(running=False)
    assert np.flatnonzero(slots.num_cached).tolist() == [running.slot]


def test_growing_keeps_what_is_there() -> None:
    slots = table(max_slots=64)
    claims = [run(slots, [k] * (20 + k), release=False) for k in range(40)]
    slots.reserve(180)
    for k, claim in enumerate(claims):
        assert slots.ids[claim.slot, : 20 + k].tolist() == [k] * (20 + k)
        assert slots.limit[claim.slot] == 30 + k
    assert slots.num_slots <= 64
    assert slots.capacity >= 180
