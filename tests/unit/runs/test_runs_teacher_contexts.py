"""A teacher with a prompt of its own over several turns: its rows are its own rendering, or they are not scored."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import templates
from support.scripted_env import ScriptedEnv
from support.served import save_tiny_model
from support.servers import encode, scripted_engine, server_tokenizer
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.ledger.tree import export_samples
from unbroken.messages import Message
from unbroken.rendering.base import Renderer
from unbroken.rollout.env import Continue, Env, Rewrite
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import tool
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.runs.config import RendererConfig, RunConfig, TeacherConfig
from unbroken.runs.models import load_model_renderer
from unbroken.runs.python_files import ModelName
from unbroken.runs.teachers import open_teachers
from unbroken.training.config import LoopConfig
from unbroken.training.teachers import TeacherTask, make_teacher_row
from unbroken.types import SamplingParams, TrainingSample

QUESTION: list[Message] = [{"role": "user", "content": "1 + 1?"}]
HINT: list[Message] = [{"role": "system", "content": "It is 2."}, *QUESTION]
AGAIN = Continue(messages=[{"role": "user", "content": "Sure?"}])
REPLIES = ("Two.<|im_end|>", "Yes, 2.<|im_end|>", "Yes.<|im_end|>")
REPEATS_TEXT = templates.chatml_with(
    after_turn="{{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' -}}"
)
"""Repeats the first message behind each reply."""


def save_model(folder: Path, template: str) -> Path:
    save_tiny_model(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    named = {"plain": templates.CHATML, "thinking": templates.QWEN_THINKING, "repeats": REPEATS_TEXT}
    folder = tmp_path_factory.mktemp("contexts")
    return {name: save_model(folder / name, template) for name, template in named.items()}


async def play(
    renderer: Renderer, env: Env, name: str, replies: Sequence[str] = REPLIES, limits: Limits | None = None
) -> Trajectory:
    left = iter(replies)
    trajectory = await run_rollout(
        env,
        engine=scripted_engine(lambda prompt_ids: encode(next(left)), allow_forks=True),
        renderer=renderer,
        sampling=SamplingParams(max_tokens=60),
        limits=limits or Limits(),
        trajectory_id=name,
    )
    assert trajectory.error is None, trajectory.error
    return trajectory


def load_renderer(folder: Path) -> Renderer:
    return load_model_renderer(folder, RendererConfig(), SamplingParams())


async def find_task(folder: Path, *members: Trajectory, hint: Any = HINT) -> TeacherTask:
    """The task of a group with these rollouts, for the model as its own teacher."""
    teacher = TeacherConfig(models=(ModelName(str(folder)),), prompt="hint")
    config = RunConfig(output=folder / "run", loop=LoopConfig(num_steps=1), teacher=teacher)
    async with AsyncExitStack() as stack:
        teachers = await open_teachers(stack, config, folder, context_length=2048)
    assert teachers is not None
    task = teachers.find_task(TrajectoryGroup(group_id="0", trajectories=members, data={"columns": {"hint": hint}}))
    assert task is not None
    return task


def make_row(trajectory: Trajectory, task: TeacherTask) -> tuple[TrainingSample, TrainingSample]:
    (row,) = export_samples(trajectory.tree, 1.0)
    return row, make_teacher_row(row, task)


def check_row(row: TrainingSample, own: TrainingSample) -> None:
    """The same ids in the same order, with their logprobs and advantages, after another prompt."""
    for name in ("token_ids", "rollout_logprobs", "advantages", "policy_versions"):
        ours, theirs = (getattr(each, name)[each.sampled_mask] for each in (row, own))
        assert np.array_equal(ours, theirs), name
    start, other = (int(each.sampled_mask.argmax()) for each in (row, own))
    assert np.array_equal(row.token_ids[start:], own.token_ids[other:])


async def test_the_row_of_three_turns_is_the_teachers_own_rendering_of_its_conversation(folders):
    renderer = load_renderer(folders["plain"])
    trajectory = await play(renderer, ScriptedEnv([AGAIN, AGAIN], messages=QUESTION), "a")
    task = await find_task(folders["plain"], trajectory)
    assert task.unproven == {}
    row, own = make_row(trajectory, task)
    check_row(row, own)
    conversation = [*HINT, *trajectory.messages[len(QUESTION) :]]
    assert own.token_ids.tolist() == renderer.render_ids(conversation)[: len(own.token_ids)].tolist()
    text = server_tokenizer().decode(own.token_ids)
    assert text.startswith("<|im_start|>system\nIt is 2.<|im_end|>")
    assert text.count("Sure?") == 2


@tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


def no_reward(messages: Sequence[Message]) -> float:
    """Return nothing."""
    return 0.0


async def test_results_of_tools_are_between_the_turns_and_the_prompt_shows_the_tools(folders):
    renderer = load_renderer(folders["thinking"])
    call = 'Hm.</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call><|im_end|>'
    env = ToolEnv(QUESTION, [add], no_reward)
    trajectory = await play(renderer, env, "a", (call, "So.</think>\n\n2<|im_end|>"))
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    task = await find_task(folders["thinking"], trajectory, hint="It is 2. 1 + 1?")
    assert task.unproven == {}
    row, own = make_row(trajectory, task)
    check_row(row, own)
    prompt = server_tokenizer().decode(task.prompt_ids)
    assert "Add two numbers" in prompt
    assert "It is 2. 1 + 1?" in prompt


async def test_other_ids_between_the_turns_are_not_scored_and_said_once(folders, caplog):
    renderer = load_renderer(folders["repeats"])
    envs = [ScriptedEnv(outcomes, messages=QUESTION) for outcomes in ([AGAIN], [AGAIN], [])]
    members = [await play(renderer, env, name) for env, name in zip(envs, ("a", "b", "one"), strict=True)]
    assert [len(each.turns) for each in members] == [2, 2, 1]
    assert len(export_samples(members[0].tree, 1.0)) == 1
    with caplog.at_level(logging.WARNING):
        task = await find_task(folders["repeats"], *members)
    assert task.unproven == {"a": "other_ids", "b": "other_ids"}
    assert caplog.text.count("the teacher does not score rollout a: it is not shown that") == 1
    assert "rollout b" not in caplog.text
    check_row(*make_row(members[2], task))  # of one turn
    same = await find_task(folders["repeats"], *members, hint=QUESTION)
    assert same.unproven == {}  # the teacher's conversation is the policy's
    assert make_row(members[0], same)[1].token_ids.tolist() == make_row(members[0], same)[0].token_ids.tolist()


async def test_ids_that_close_the_reasoning_are_given_to_the_teacher_too(folders):
    renderer = load_renderer(folders["thinking"])
    env, replies = ScriptedEnv([AGAIN], messages=QUESTION), ("<think>\nHm hm hm hm hm", "2<|im_end|>") * 2
    trajectory = await play(renderer, env, "a", replies, Limits(thinking_tokens=3))
    assert all(turn.sequence.num_given > 0 for turn in trajectory.turns)
    task = await find_task(folders["thinking"], trajectory)
    assert task.unproven == {}
    check_row(*make_row(trajectory, task))


async def test_a_rollout_that_forked_is_not_scored(folders):
    renderer = load_renderer(folders["plain"])
    rewritten = ScriptedEnv([Rewrite(messages=[{"role": "user", "content": "Anew: 2?"}])], messages=QUESTION)
    members = [await play(renderer, rewritten, "a"), await play(renderer, ScriptedEnv(messages=QUESTION), "b")]
    assert (await find_task(folders["plain"], *members)).unproven == {"a": "forked"}


async def test_nobody_scores_several_turns_that_were_not_compared(folders):
    renderer = load_renderer(folders["plain"])
    trajectory = await play(renderer, ScriptedEnv([AGAIN], messages=QUESTION), "a")
    task = replace(await find_task(folders["plain"], trajectory), unproven=None)
    with pytest.raises(InvalidInputError, match=r"must have rows of one turn, or TeacherTask\.unproven"):
        make_row(trajectory, task)


@pytest.mark.parametrize("num_turns", [1, 2])
async def test_a_hint_that_leaves_no_room_for_the_last_turn_is_a_skip(folders, num_turns):
    renderer = load_renderer(folders["plain"])
    trajectory = await play(renderer, ScriptedEnv([AGAIN] * (num_turns - 1), messages=QUESTION), "a")
    task = await find_task(folders["plain"], trajectory, hint=[{"role": "user", "content": "long " * 3000}])
    assert task.unproven == {"a": "too_long"}


ENVIRONMENT = """
from unbroken.rollout.env import Continue, Done, EnvStart


class Twice:
    def __init__(self, prompt: str) -> None:
        self.prompt, self.num_turns = prompt, 0

    async def start(self):
        return EnvStart(messages=[{"role": "user", "content": self.prompt}])

    async def step(self, reply):
        self.num_turns += 1
        return Continue(messages=[{"role": "user", "content": "Sure?"}]) if self.num_turns == 1 else Done()

    async def reward(self, messages):
        return 0.0

    async def close(self):
        pass
"""


def test_a_run_of_two_turns_with_a_hint_is_verified(folders, tmp_path):
    (tmp_path / "twice.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"{k} + 1?", "hint": f"It is {k + 1}. {k} + 1?"} for k in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'model = "{folders["plain"]}"\nalgorithm = "distillation"\ndata.file = "rows.jsonl"\n'
        f'environment = "twice.py:Twice"\nteacher = {{models = ["{folders["plain"]}"], prompt = "hint"}}\n'
        'trainer.numerics = "exact"\n'
        "rollouts = {problems_per_step = 2, group_size = 1, sampling = {max_tokens = 6}, limits = {max_turns = 2}}\n"
        "loop.num_steps = 1\n"
    )
    assert main(["train", "--preflight=false", str(recipe), f"--output={tmp_path / 'run'}"]) == 0
    (line,) = (tmp_path / "run" / "metrics" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["teacher/token_share"] == 1
    assert metrics["teacher/kl"] != 0
    assert metrics["counters/teacher_skips"] == 0
    assert main(["verify", str(tmp_path / "run")]) == 0
