"""The environment of the guessing recipe: one number, answers to guesses, and a tool in every second problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fake_renderer import CALL, CALL_END, END, VOCAB_SIZE, FakeRenderer, encode
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.runs.python_files import load_module
from unbroken.types import SamplingParams

GUESS = load_module(Path(__file__).parents[3] / "recipes" / "guess.py")
ASK = [CALL, *encode('{"name": "is_even", "arguments": {}}'), CALL_END, END]


async def play(*replies: str, number: int = 7, with_hint: bool = False) -> Trajectory:
    left = iter([ASK if reply == "ask" else [*encode(reply), END] for reply in replies])
    return await run_rollout(
        GUESS.GuessEnv(number, 20, with_hint=with_hint),
        engine=ScriptedEngine(lambda prompt_ids: next(left), vocab_size=VOCAB_SIZE, context_length=4096),
        renderer=FakeRenderer(),
        sampling=SamplingParams(max_tokens=60),
        limits=Limits(max_turns=4),
    )


@pytest.mark.parametrize(
    ("replies", "reward", "answers"),
    [
        (["7"], 1.0, []),
        (["3", "12", "It is 7."], 1 / 3, ["Mine is higher.", "Mine is lower."]),
        (["What?", "7"], 1 / 2, ["That is not a number."]),
    ],
)
async def test_a_guess_is_answered_until_it_is_right(replies, reward, answers):
    trajectory = await play(*replies)
    assert trajectory.reward == reward
    assert trajectory.status is TrajectoryStatus.COMPLETED
    assert [message["content"] for message in trajectory.messages if message["role"] == "user"][1:] == answers


async def test_a_number_that_is_not_found_is_worth_nothing():
    trajectory = await play("1", "2", "3", "4")
    assert (trajectory.reward, trajectory.status) == (0.0, TrajectoryStatus.MAX_TURNS)


async def test_a_problem_with_a_hint_offers_a_tool_and_another_none():
    assert (await play("7")).tools == ()
    trajectory = await play("ask", "8", with_hint=True, number=8)
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["is_even"]
    assert [message["content"] for message in trajectory.messages if message["role"] == "tool"] == ["true"]
    assert trajectory.reward == 1.0
