"""Engines of several workers: conversations stay on one data-parallel rank; answers and orders of all workers."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unbroken.errors import InvalidInputError, SamplingError


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
    from unbroken.engines.vllm.patches import _group_by_temperature

    keys = [f"score-{number}" for number in range(20)]
    groups = _group_by_temperature(dict.fromkeys(keys), lambda key: 0.5 if int(key[6:]) % 3 else 0)
    assert list(groups) == [1.0, 0.5]
    assert groups == {1.0: keys[::3], 0.5: [key for key in keys if int(key[6:]) % 3]}


@pytest.mark.parametrize(
    "words",
    [
        ("--data-parallel-rank", "0"),
        ("--data-parallel-start-rank", "1"),
        ("--data-parallel-external-lb",),
        ("--data-parallel-hybrid-lb",),
    ],
)
def test_copies_that_this_server_does_not_control_are_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    from unbroken.engines.vllm.startup import parse_engine_args, require_exactness

    args = parse_engine_args(["--model", str(tmp_path), "--data-parallel-size", "2", *words])
    with pytest.raises(InvalidInputError, match=f"{words[0]} must be left out with --data-parallel-size 2"):
        require_exactness(args, num_adapters=0)


@pytest.mark.parametrize(
    ("quantization", "checkpoint", "message"),
    [
        (None, None, None),
        ("fp8", None, None),
        ("fp8", {"quant_method": "fp8"}, "needs a checkpoint that is not quantised itself"),
        ("nvfp4_per_token", None, "with --quantization nvfp4_per_token is not supported, only one with"),
        ("modelopt_fp4", {"quant_method": "modelopt"}, "with --quantization modelopt_fp4 is not supported"),
    ],
)
def test_weights_are_updated_under_fp8_alone_of_all_quantisations(
    quantization: str | None, checkpoint: Any, message: str | None
) -> None:
    from transformers import Qwen3Config

    from unbroken.engines.vllm.control import check_quantization

    hf_config = Qwen3Config(**({} if checkpoint is None else {"quantization_config": checkpoint}))
    llm: Any = SimpleNamespace(
        model_config=SimpleNamespace(quantization=quantization, hf_config=hf_config, model="somewhere")
    )
    if message is None:
        check_quantization(llm)
        return
    with pytest.raises(SamplingError, match=message):
        check_quantization(llm)


class _LockstepEngine:
    """Notes the calls of an engine whose copies step together."""

    def __init__(self, *, in_lockstep: bool) -> None:
        from unbroken.engines.vllm.control import ControlledEngine

        self.calls: list[str] = []
        engine = self.engine = object.__new__(ControlledEngine)
        engine._in_lockstep, engine._asleep, engine._paused = in_lockstep, False, False
        engine._lock = asyncio.Lock()
        engine._calls = SimpleNamespace(rpc=self._rpc, wait=self._wait)
        engine._llm = SimpleNamespace(
            engine_core=SimpleNamespace(pause_scheduler_async=lambda mode, clear_cache: f"stop {mode}"),
            resume_generation=lambda: "resume",
        )

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        await asyncio.sleep(0)
        return []

    async def _wait(self, call: Any) -> None:
        self.calls.append(f"begin {call}")
        await asyncio.sleep(0)
        self.calls.append(f"end {call}")


async def test_workers_that_wait_for_each_other_are_called_between_steps_if_copies_step_together() -> None:
    lockstep = _LockstepEngine(in_lockstep=True)
    await lockstep.engine._call_between_steps("call_receiver", "take")
    assert lockstep.calls == ["begin stop keep", "end stop keep", "call_receiver", "begin resume", "end resume"]
    alone = _LockstepEngine(in_lockstep=False)
    await alone.engine._call_between_steps("call_receiver", "take")
    assert alone.calls == ["call_receiver"]


@pytest.mark.parametrize("in_lockstep", [True, False])
async def test_an_update_is_received_after_the_last_step_only_if_copies_step_together(in_lockstep: bool) -> None:
    from unbroken.types import InFlight

    engine = _LockstepEngine(in_lockstep=in_lockstep)

    async def receive(rpc: Any) -> None:
        await rpc("receive_weights")

    delivery: Any = SimpleNamespace(receive=receive)
    await engine.engine._stop_and_receive(delivery, InFlight.PAUSE)
    expected = ["begin stop keep", "end stop keep", "receive_weights"]
    assert engine.calls == (expected if in_lockstep else [expected[0], expected[2], expected[1]])


@pytest.mark.parametrize(("size", "is_moe", "refused"), [(1, True, False), (2, False, False), (2, True, True)])
def test_copies_that_share_experts_are_refused_on_a_cpu(size: int, is_moe: bool, refused: bool) -> None:
    from unbroken.engines.vllm.control import check_runs_here

    llm: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=size)),
        model_config=SimpleNamespace(is_moe=is_moe, model="somewhere"),
    )
    if not refused:
        check_runs_here(llm)
        return
    with pytest.raises(InvalidInputError, match="--data-parallel-size 2 with a mixture of experts"):
        check_runs_here(llm)
