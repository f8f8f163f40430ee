"""Data sets of `reasoning-gym` as problems."""

from __future__ import annotations

import pytest

from support.env_rollouts import call, play_env, texts
from unbroken.errors import InvalidInputError
from unbroken.integrations.reasoning_gym import INSTRUCTION, ReasoningGymEnv
from unbroken.rollout.tools import tool

reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs reasoning-gym", exc_type=ModuleNotFoundError)


def entry_of(env: ReasoningGymEnv) -> dict[str, str]:
    return env._entry


async def started(dataset="leg_counting", number=0, **arguments) -> ReasoningGymEnv:
    env = ReasoningGymEnv(dataset, number, **arguments)
    await env.start()
    return env


async def test_the_score_of_the_answer_is_the_reward():
    answer = entry_of(await started())["answer"]
    env = ReasoningGymEnv("leg_counting")
    trajectory = await play_env(env, f"<answer>1</answer> or rather <answer> {answer} </answer>")
    assert trajectory.reward == 1.0
    assert texts(trajectory, "user") == [f"{entry_of(env)['question']}\n\n{INSTRUCTION}"]


@pytest.mark.parametrize("reply", ["I do not know.", "<answer>-7</answer>", "<answer>4"])
async def test_no_answer_and_a_wrong_one_are_scored_by_the_data_set(reply):
    trajectory = await play_env(ReasoningGymEnv("chain_sum"), reply)
    assert 0 <= trajectory.reward < 0.2


async def test_without_an_instruction_the_whole_reply_is_the_answer():
    answer = entry_of(await started("chain_sum"))["answer"]
    trajectory = await play_env(ReasoningGymEnv("chain_sum", instruction=""), f" {answer}\n")
    assert trajectory.reward == 1.0


async def test_the_question_may_be_answered_with_tools():
    @tool
    def think() -> str:
        """Think."""
        return "done"

    answer = entry_of(await started("chain_sum"))["answer"]
    env = ReasoningGymEnv("chain_sum", tools=[think])
    trajectory = await play_env(env, call("think"), f"<answer>{answer}</answer>")
    assert texts(trajectory, "tool") == ["done"]
    assert trajectory.reward == 1.0


async def test_a_problem_is_an_item_of_the_data_set_with_the_seed_of_its_split():
    places = [(0, "train", 0), (1, "train", 0), (0, "evaluation", 0), (0, "train", 1)]
    asked = [entry_of(await started("chain_sum", n, split=s, seed=k))["question"] for n, s, k in [*places, *places]]
    assert asked[:4] == asked[4:]
    assert len(set(asked)) == 4


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ("no_such", {}, "does not make dataset='no_such'"),
        ("chain_sum", {"min_terms": -1}, "does not make dataset='chain_sum' with options={'min_terms': -1}"),
        ("chain_sum", {"no_such": 1}, "unexpected keyword argument 'no_such'"),
        ("chain_sum", {"seed": 1}, "options.seed must be left out"),
    ],
)
async def test_what_the_package_refuses_is_said(dataset, options, message):
    with pytest.raises(InvalidInputError, match=message.replace("{", r"\{")):
        await started(dataset, options=options)
