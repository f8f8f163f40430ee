"""A teacher with a prompt of its own over several turns: its rows are its own rendering, or they are not scored."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from support import templates
from support.gateways import CALL, TOOLS, ask, result, running_gateway
from support.scripted_env import ScriptedEnv
from support.served import save_tiny_model
from support.servers import encode, scripted_engine, server_tokenizer
from unbroken.cli import main
from unbroken.client import AsyncClient
from unbroken.errors import InvalidInputError
from unbroken.ledger.tree import export_samples
from unbroken.messages import Message
from unbroken.rendering.base import Renderer
from unbroken.rollout.agents.runner import run_agent_group
from unbroken.rollout.agents.session import Agent, AgentSession
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
from unbroken.server.process import host_app
from unbroken.training.config import LoopConfig
from unbroken.training.teachers import TeacherTask, make_teacher_row
from unbroken.types import SamplingParams, TokenIds, TrainingSample

QUESTION: list[Message] = [{"role": "user", "content": "1 + 1?"}]
HINT: list[Message] = [{"role": "system", "content": "It is 2."}, *QUESTION]
AGAIN = Continue(messages=[{"role": "user", "content": "Sure?"}])
REPLIES = ("Two.<|im_end|>", "Yes, 2.<|im_end|>", "Yes.<|im_end|>")
ONE_QUESTION = (
    "{%- if messages[0].role == 'system' and messages | selectattr('role', 'equalto', 'user') | list | length > 1 -%}"
    + ("{{- raise_exception('one question, please') -}}{%- endif -%}" + templates.CHATML)
)
"""Takes no second question after a system message."""
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
    named |= {"one": ONE_QUESTION}
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


async def test_a_rollout_that_the_teachers_template_does_not_continue_is_not_scored(folders):
    renderer = load_renderer(folders["one"])
    members = [await play(renderer, ScriptedEnv([AGAIN] * k, messages=QUESTION), name) for k, name in enumerate("ab")]
    task = await find_task(folders["one"], *members)
    assert task.unproven == {"b": "no_bridge"}
    check_row(*make_row(members[0], task))
    assert (await find_task(folders["one"], *members, hint="It is 2. 1 + 1?")).unproven == {}


async def test_a_rollout_with_other_tools_than_its_group_is_not_scored(folders):
    renderer = load_renderer(folders["thinking"])
    envs = (ToolEnv(QUESTION, [add], no_reward), ScriptedEnv(messages=QUESTION), ToolEnv(QUESTION, [add], no_reward))
    members = [await play(renderer, env, name) for env, name in zip(envs, "abc", strict=True)]
    task = await find_task(folders["thinking"], *members)
    assert task.unproven == {"b": "other_tools"}
    check_row(*make_row(members[2], task))


async def attempt(folder: Path, agent: Agent, number: int) -> tuple[Trajectory, ...]:
    """Attempts of an agent whose model calls a tool until it has its result."""

    def reply(prompt_ids: TokenIds) -> list[int]:
        return encode(REPLIES[0] if "tool_response" in server_tokenizer().decode(prompt_ids) else CALL)

    engine = scripted_engine(reply, allow_forks=True)
    async with (
        running_gateway(engine, folder) as gateway,
        host_app(gateway.app) as url,
        AsyncClient(url) as client,
    ):
        group = await run_agent_group(
            agent,
            number,
            gateway=client.sessions,
            task={},
            sampling=SamplingParams(max_tokens=60),
            limits=Limits(),
            group_id="0",
        )
    assert [each.error for each in group.trajectories] == [None] * number
    return group.trajectories


async def chat(session: AgentSession, messages: Sequence[Any], **fields: Any) -> Any:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx.AsyncClient(base_url=session.anthropic_base_url, headers=headers) as client:
        return await ask(client, messages, **fields)


async def look(session: AgentSession, **fields: Any) -> float:
    """Ask, as an agent with its own system message, and answer the call."""
    begin = [{"role": "system", "content": "You look."}, *QUESTION]
    called = await chat(session, begin, **fields)
    await chat(session, [*begin, called, result(called)], **fields)
    return 1.0


async def test_the_prompt_stands_for_the_messages_with_which_an_agent_begins(folders, tmp_path):
    trajectory, other = await attempt(tmp_path, look, 2)
    task = await find_task(folders["thinking"], trajectory, other)
    assert task.unproven == {}
    row, own = make_row(trajectory, task)
    check_row(row, own)
    conversation = [*HINT, *trajectory.messages[2:]]
    renderer = load_renderer(folders["thinking"])
    assert own.token_ids.tolist() == renderer.render_ids(conversation, tools=TOOLS)[: len(own.token_ids)].tolist()
    texts = [server_tokenizer().decode(each.token_ids) for each in (row, own)]
    assert [("You look." in text, "It is 2." in text, "17" in text) for text in texts] == [
        (True, False, True),
        (False, True, True),
    ]
    same = await find_task(folders["thinking"], trajectory, hint=list(trajectory.messages[:2]))
    assert all(
        np.array_equal(getattr(row, name), getattr(make_row(trajectory, same)[1], name), equal_nan=True)
        for name in ("token_ids", "sampled_mask", "loss_mask", "rollout_logprobs", "policy_versions", "advantages")
    )


async def test_attempts_that_begin_anew_or_with_options_of_their_own_are_not_scored(folders, tmp_path):
    async def behave(session: AgentSession) -> float:
        kind = int(session.trajectory_id[-1])
        if kind == 1:
            await chat(session, [{"role": "user", "content": "A title?"}])
        return await look(session, **({"chat_template_kwargs": {"enable_thinking": False}} if kind == 2 else {}))

    members = await attempt(tmp_path, behave, 3)
    task = await find_task(folders["thinking"], *members)
    assert task.unproven == {"0/1": "forked", "0/2": "other_prompt"}
    check_row(*make_row(members[0], task))


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


AGENT = """
import httpx


async def ask_twice(session):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": session.task["prompt"]}]
    async with httpx.AsyncClient(headers={"Authorization": "Bearer " + session.api_key}) as client:
        for _ in range(2):
            answer = await client.post(session.openai_base_url + "/chat/completions", json={"messages": messages})
            assert answer.status_code == 200, answer.text
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
    return 0.0
"""


@pytest.mark.parametrize("who", ["environment", "agent"])
def test_a_run_of_two_turns_with_a_hint_is_verified(folders, tmp_path, who):
    """In two steps of one row each: with its own prompt and weights in the column, the policy is at no distance."""
    (tmp_path / "twice.py").write_text(ENVIRONMENT + AGENT)
    first = {"environment": [], "agent": [{"role": "system", "content": "Add."}]}[who]
    rows = [{"prompt": "0 + 1?", "hint": json.dumps([*first, {"role": "user", "content": "0 + 1?"}])}]
    rows += [{"prompt": "1 + 1?", "hint": "It is 2. 1 + 1?"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    recipe = tmp_path / "recipe.toml"
    named = {"environment": 'environment = "twice.py:Twice"', "agent": 'agent.function = "twice.py:ask_twice"'}[who]
    recipe.write_text(
        f'model = "{folders["plain"]}"\nalgorithm = "distillation"\ndata.file = "rows.jsonl"\n'
        f'{named}\ndata.shuffle = false\nteacher = {{models = ["{folders["plain"]}"], prompt = "hint"}}\n'
        'trainer.numerics = "exact"\n'
        "rollouts = {problems_per_step = 1, group_size = 1, sampling = {max_tokens = 6}, limits = {max_turns = 2}}\n"
        "loop.num_steps = 2\n"
    )
    assert main(["train", "--preflight=false", str(recipe), f"--output={tmp_path / 'run'}"]) == 0
    lines = (tmp_path / "run" / "metrics" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [each["teacher/token_share"] for each in found] == [1, 1]
    assert found[0]["teacher/kl"] == 0 != found[1]["teacher/kl"]
    assert [each["counters/teacher_skips"] for each in found] == [0, 0]
    assert main(["verify", str(tmp_path / "run")]) == 0
