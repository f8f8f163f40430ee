"""The rollout function beside a trainer that is not there: what it asks of one, tells engines, and refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from support.fake_renderer import END, encode
from support.rollouts import HELLO, MORE
from support.scripted_env import ScriptedEnv
from support.trl_stand_in import make, stand_in
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import EngineError, InvalidInputError, InvariantError, RolloutError
from unbroken.rollout.env import Rewrite
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.types import SamplingParams

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
        rollouts._loop.run(engine.load_weights([("weight", torch.zeros(1))], policy_version=7))
        rollouts(["a"], stand_in())
    assert engine.policy_version == 8


def test_i6_ids_of_other_weights_than_those_published_last_are_refused():
    class Forgetful:
        def __init__(self, engine):
            self.engine = engine

        async def publish(self, named_parameters, *, policy_version):
            await self.engine.load_weights(named_parameters, policy_version=policy_version + 1)

    with (
        make(publisher=Forgetful) as rollouts,
        pytest.raises(InvariantError, match="sampled by policy_version 2, and TRL trains version 1"),
    ):
        rollouts(["a"], stand_in())


def test_nobody_to_publish_is_refused():
    with make(publisher=None) as rollouts, pytest.raises(InvalidInputError, match="publisher must be given"):
        rollouts(["a"], stand_in())


def test_a_failure_is_a_row_that_teaches_nothing_and_so_is_a_fork():
    endings = iter([[MORE], [ValueError("boom")], [AGAIN]])
    with make(lambda _: ScriptedEnv(next(endings))) as rollouts:
        rows = rollouts(["a", "a", "a"], stand_in(processing_class=SimpleNamespace(pad_token_id=9)))
    assert rows["completion_ids"][1:] == [[9], [9]]
    assert rows["env_mask"][1:] == [[0], [0]]
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
    ("changed", "told"),
    [
        ({"temperature": 0.7}, r"sampling.temperature must be that of GRPOConfig, 0.7, got 1.0"),
        ({"tools": [print]}, "tools and environment_factory of GRPOTrainer must not be given"),
        ({"environment_factories": {None: object}}, "tools and environment_factory"),
        ({"reward_funcs": [print]}, r"reward_funcs\[0\] must be env_reward or .* got print"),
        ({"is_fsdp_enabled": True}, "must be a whole model in every process, got one under FSDP"),
        ({"is_deepspeed_enabled": True}, "got one under DeepSpeed"),
    ],
)
def test_a_trainer_that_does_not_fit_is_refused(changed, told):
    with make() as rollouts, pytest.raises(InvalidInputError, match=told):
        rollouts(["a"], stand_in(**changed))


def test_an_adapter_is_refused():
    model = torch.nn.Linear(2, 1)
    model.peft_config = {}
    with make() as rollouts, pytest.raises(InvalidInputError, match="got one under an adapter"):
        rollouts(["a"], stand_in(model=model))


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


def test_an_engine_is_made_in_the_loop_of_the_rollouts_and_closed_with_them():
    engines = []

    async def connect():
        engines.append(ScriptedEngine(lambda _: HELLO))
        return engines[-1]

    with make(engine=connect) as rollouts:
        rollouts(["a"], stand_in())
        rollouts(["a"], stand_in())
    (engine,) = engines
    with make(engine=engine) as rollouts, pytest.raises(EngineError, match="closed"):
        rollouts(["a"], stand_in())


def test_an_engine_of_the_callers_stays_open():
    engine = ScriptedEngine(lambda _: HELLO)
    for _ in range(2):
        with make(engine=engine) as rollouts:
            rollouts(["a"], stand_in())
    rollouts.close()
