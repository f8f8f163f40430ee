"""Engines of several workers: conversations stay on one data-parallel rank; answers and orders of all workers."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def engine() -> Any:
    """The module, which imports vLLM."""
    from unbroken.engines.vllm import engine

    return engine


def test_a_session_keeps_its_rank_and_new_ones_go_to_the_emptiest(engine: Any) -> None:
    affinity = engine.RankAffinity(3)
    with affinity.choose("a") as a, affinity.choose("b") as b, affinity.choose("c") as c, affinity.choose("a") as again:
        assert sorted([a, b, c]) == [0, 1, 2]
        assert again == a
        with affinity.choose("d") as d:
            assert d in (b, c)
    with affinity.choose("a") as later:
        assert later == a


def test_many_sessions_spread_evenly_even_one_after_the_other(engine: Any) -> None:
    affinity = engine.RankAffinity(4)
    chosen = []
    for number in range(40):
        with affinity.choose(str(number)) as rank:
            chosen.append(rank)
    assert [chosen.count(rank) for rank in range(4)] == [10] * 4


@pytest.mark.parametrize(("num_ranks", "session"), [(1, "a"), (4, None)])
def test_without_a_session_or_other_ranks_vllm_chooses(engine: Any, num_ranks: int, session: str | None) -> None:
    with engine.RankAffinity(num_ranks).choose(session) as rank:
        assert rank is None


def test_old_sessions_are_forgotten(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_MAX_SESSIONS", 2)
    affinity = engine.RankAffinity(2)
    for session in ("a", "b", "c"):
        with affinity.choose(session):
            pass
    assert list(affinity._ranks) == ["b", "c"]
    assert affinity._num_sessions == [1, 1]


async def test_answers_come_from_the_workers_of_all_data_parallel_copies() -> None:
    """An error in the second copy would be taken for success if only the first were asked."""
    from unbroken.engines.vllm.calls import WorkerCalls

    asked = []

    class Client:
        async def call_utility_all_async(self, *call: Any) -> list[list[Any]]:
            asked.append(call)
            return [[{"answer": 1}, {"answer": 1}], [{"answer": 1}, {"error": "no room"}]]

    llm = SimpleNamespace(engine_core=Client(), output_handler=asyncio.ensure_future(asyncio.sleep(60)))
    answers = await WorkerCalls(llm).rpc("receive_weights", "kind", {})
    llm.output_handler.cancel()
    assert asked == [("collective_rpc", "receive_weights", None, ("kind", {}), None)]
    assert answers == [{"answer": 1}] * 3 + [{"error": "no room"}]


def test_all_workers_score_the_prompts_of_a_step_in_the_same_order() -> None:
    """Each has a part of the logits of every prompt; the order of a set of texts is another in each process."""
    from unbroken.engines.vllm.score_patch import _group_by_temperature

    keys = [f"score-{number}" for number in range(20)]
    groups = _group_by_temperature(dict.fromkeys(keys), lambda key: 0.5 if int(key[6:]) % 3 else 0)
    assert list(groups) == [1.0, 0.5]
    assert groups == {1.0: keys[::3], 0.5: [key for key in keys if int(key[6:]) % 3]}
