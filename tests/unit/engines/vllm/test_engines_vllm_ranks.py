"""Conversations stay on one data-parallel rank."""

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
