"""The rollout function beside a trainer that is not there: what it asks of one, tells engines, and refuses."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch

from support.fake_renderer import END, encode
from support.rollouts import HELLO, MORE
from support.scripted_env import ScriptedEnv
from support.servers import listening, make_app
from support.trl_stand_in import make, stand_in
from unbroken.client import AsyncClient
from unbroken.engines.http import HttpEngine
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import InvalidInputError, InvariantError, RolloutError
from unbroken.rollout.env import Rewrite
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.threads import LoopThread
from unbroken.types import SamplingParams
from unbroken.weights.base import InProcessPublisher
from unbroken.weights.disk import DiskPublisher
from unbroken.weights.sources import TensorSource

AGAIN = Rewrite(messages=[{"role": "user", "content": "again"}])


def test_each_occurrence_of_a_prompt_is_an_episode_of_its_own_and_a_row():
    heard = []

    def make_env(prompt):
        heard.append(prompt)
        return ScriptedEnv([MORE], reward=len(heard))

    with make(make_env) as rollouts:
        rows = rollouts(["a", "a", "b", "b"], stand_in())
    assert heard == ["a", "a", "b", "b"]
    assert [one.reward for one in rows["trajectory"]] == [1, 2, 3, 4]
    bridge = [ord("\n"), 257, *encode("more"), END, ord("\n"), 258]
    assert rows["completion_ids"] == [[*HELLO, *bridge, *HELLO]] * 4
    assert rows["env_mask"] == [[1] * 6 + [0] * len(bridge) + [1] * 6] * 4
    assert rows["prompt_ids"] == [[257, *encode("hi"), END, ord("\n"), 258]] * 4


def test_i6_weights_are_published_once_for_each_step_and_at_first():
    engine, trainer = ScriptedEngine(lambda _: HELLO), stand_in()
    versions = []
    with make(engine=engine) as rollouts:
        for step in (0, 0, 1, 3):
            trainer.state.global_step = step
            rollouts(["a"], trainer)
            versions.append(engine.policy_version)
        trainer.state = SimpleNamespace(global_step=3)  # another run of the same trainer
        rollouts(["a"], trainer)
    assert [*versions, engine.policy_version] == [1, 1, 2, 3, 4]
    assert engine.loaded_names == ["weight", "bias"]


def test_versions_go_on_from_what_an_engine_has():
    engine = ScriptedEngine(lambda _: HELLO)
    with make(engine=engine) as rollouts:
        rollouts._loop.run(engine.update_weights(TensorSource([("weight", torch.zeros(1))]), policy_version=7))
        rollouts(["a"], stand_in())
    assert engine.policy_version == 8


def opening(engine, publisher):
    """What opens an engine with a publisher of its own kind."""

    @asynccontextmanager
    async def opened():
        yield engine, publisher

    return opened


def test_i6_ids_of_other_weights_than_those_published_last_are_refused():
    engine = ScriptedEngine(lambda _: HELLO)

    class Hasty:
        async def publish(self, named_parameters, *, policy_version):
            await engine.update_weights(TensorSource(named_parameters), policy_version=policy_version + 1)

    with (
        make(engine=opening(engine, Hasty())) as rollouts,
        pytest.raises(InvariantError, match="sampled by policy_version 2, but TRL trains version 1"),
    ):
        rollouts(["a"], stand_in())


def test_nobody_to_publish_is_refused():
    engine = opening(ScriptedEngine(lambda _: HELLO), None)
    with make(engine=engine) as rollouts, pytest.raises(InvalidInputError, match="one process must have a publisher"):
        rollouts(["a"], stand_in())


def test_a_failure_is_a_row_that_teaches_nothing_and_so_is_a_fork(caplog):
    endings = iter([[MORE], [ValueError("boom")], [AGAIN]])
    with make(lambda _: ScriptedEnv(next(endings))) as rollouts:
        rows = rollouts(["a", "a", "a"], stand_in(processing_class=SimpleNamespace(pad_token_id=9)))
    assert rows["completion_ids"][1:] == [[9], [9]]
    assert rows["env_mask"][1:] == [[0], [0]]
    assert "2 of 3 rollouts are not trained on: {'failed': 1, 'forked': 1}, the first error:" in caplog.text
    assert [one.status for one in rows["trajectory"]][1:] == [TrajectoryStatus.FAILED, TrajectoryStatus.COMPLETED]


def test_an_environment_that_cannot_be_made_fails_its_own_row_only():
    made = iter([ScriptedEnv(), None])
    with make(lambda _: next(made)) as rollouts:
        rows = rollouts(["a", "a"], stand_in())
    assert [one.status for one in rows["trajectory"]] == [TrajectoryStatus.COMPLETED, TrajectoryStatus.FAILED]


def test_a_generation_without_a_row_to_train_on_ends_the_run_and_says_why():
    endings = iter([[ValueError("boom")], [AGAIN]])
    with (
        make(lambda _: ScriptedEnv(next(endings))) as rollouts,
        pytest.raises(RolloutError, match=r"\{'failed': 1, 'forked': 1\}, .* ValueError: boom"),
    ):
        rollouts(["a", "a"], stand_in())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": 0.7}, r"sampling.temperature must be that of GRPOConfig, 0.7, got 1.0"),
        ({"tools": [print]}, "tools and environment_factory of GRPOTrainer must be left out"),
        ({"environment_factories": {None: object}}, "tools and environment_factory"),
        ({"reward_funcs": [print]}, r"reward_funcs\[0\] must be env_reward or .* got print"),
        ({"is_fsdp_enabled": True}, "must be whole in every process, but FSDP shards it"),
        ({"is_deepspeed_enabled": True}, "but DeepSpeed shards it"),
    ],
)
def test_a_trainer_that_does_not_fit_is_refused(changed, message):
    with make() as rollouts, pytest.raises(InvalidInputError, match=message):
        rollouts(["a"], stand_in(**changed))


@pytest.mark.parametrize("field", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 1.0}])
def test_what_shapes_the_distribution_in_a_way_that_trl_does_not_know_is_refused(field):
    (name,) = field
    with pytest.raises(InvalidInputError, match=f"sampling.{name} must be"):
        make(sampling=SamplingParams(**field))


def test_a_seed_is_another_for_each_rollout_and_each_generation_and_the_same_in_another_run():
    def seeds() -> list[int]:
        engine, trainer = ScriptedEngine(lambda _: HELLO), stand_in()
        with make(engine=engine, sampling=SamplingParams(max_tokens=9, seed=5)) as rollouts:
            for step in (0, 0, 1):
                trainer.state.global_step = step
                rollouts(["a", "a"], trainer)
        return sorted(request.params.seed for request in engine.requests)

    first = seeds()
    assert len(set(first)) == len(first) == 3 * 2 * 2
    assert first == seeds()


def test_an_engine_of_the_callers_stays_open():
    engine = ScriptedEngine(lambda _: HELLO)
    for _ in range(2):
        with make(engine=engine) as rollouts:
            rollouts(["a"], stand_in())
    rollouts.close()
    asyncio.run(engine.check_health())  # an error once it is closed


def test_what_opens_an_engine_is_called_once_and_closed_behind_the_rollouts():
    noted = []

    @asynccontextmanager
    async def opened():
        engine = ScriptedEngine(lambda _: HELLO)
        noted.append(asyncio.get_running_loop())
        yield engine, InProcessPublisher(engine)
        noted.append(asyncio.get_running_loop())

    with make(engine=opened) as rollouts:
        for _ in range(2):
            rollouts(["a"], stand_in())
        assert len(noted) == 1
    assert noted[0] is noted[1]


def test_i6_a_server_samples_and_gets_the_weights_through_files(tmp_path):
    """As in docs/trl.md."""
    sampler = ScriptedEngine(lambda _: HELLO)
    server = LoopThread()
    listener = listening(make_app(sampler, weights_dir=tmp_path))
    url = server.run(listener.__aenter__())

    @asynccontextmanager
    async def opened():
        engine = await HttpEngine.connect([url])
        async with AsyncClient(url) as client:
            yield engine, DiskPublisher([client], tmp_path)
        await engine.close()

    trainer = stand_in()
    with make(engine=opened) as rollouts:
        for step in range(3):
            trainer.state.global_step = step
            rows = rollouts(["a", "a"], trainer)
    server.run(listener.__aexit__(None, None, None))
    server.close()
    versions = {int(v) for one in rows["trajectory"] for turn in one.turns for v in turn.sequence.policy_versions}
    assert versions == {3}
    assert sampler.loaded_names == ["bias", "weight"]
