"""Groups with tools through a server: siblings sample concurrently, and each continues its own conversation."""

from __future__ import annotations

import numpy as np

from support.servers import encode, listening, make_app, scripted_engine, server_tokenizer
from unbroken.engines.http import HttpEngine
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_group
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import tool
from unbroken.rollout.trajectory import TrajectoryStatus
from unbroken.types import SamplingParams

GROUP_SIZE = 4
MAX_TOKENS = 100


@tool
async def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


async def test_i1_every_sibling_continues_its_own_turn_with_its_own_budget_and_tools_through_a_server():
    """There is a trainer whose server mode continues all rollouts of a group from the context of the first one."""
    numbers = iter(10**k for k in range(GROUP_SIZE))
    continued: list[list[int]] = []
    question = [{"role": "user", "content": "Double a number."}]
    renderer = TemplateRenderer(server_tokenizer())
    asked_first = renderer.render(question, tools=[double.schema]).token_ids

    def sample(prompt_ids):
        if len(prompt_ids) > len(asked_first):
            continued.append(prompt_ids.tolist())
            return encode("done<|im_end|>")
        call = f'{{"name": "double", "arguments": {{"number": {next(numbers)}}}}}'
        return encode(f"<tool_call>\n{call}\n</tool_call><|im_end|>")

    # The scripted engine cannot see from request ids which turns belong to one conversation.
    sampler = scripted_engine(sample, allow_forks=True)
    async with listening(make_app(sampler)) as url:
        engine = await HttpEngine.connect([url])
        group = await run_group(
            lambda: ToolEnv(question, [double], lambda _: 1.0),
            GROUP_SIZE,
            engine=engine,
            renderer=renderer,
            sampling=SamplingParams(max_tokens=MAX_TOKENS),
            limits=Limits(max_tokens=MAX_TOKENS),
        )
        await engine.close()
    budgets = {tuple(request.prompt_ids.tolist()): request.params.max_tokens for request in sampler.requests}
    replies = []
    for trajectory in group.trajectories:
        assert trajectory.status is TrajectoryStatus.COMPLETED
        first, second = trajectory.turns
        asked = trajectory.tree.token_ids(second.prompt_end)
        own = np.concatenate([trajectory.tree.token_ids(first.prompt_end), first.sequence.completion_ids])
        assert asked[: len(own)].tolist() == own.tolist()
        assert asked.tolist() in continued
        assert budgets[tuple(asked.tolist())] == MAX_TOKENS - len(first.sequence.completion_ids)
        replies.append(trajectory.messages[2]["content"])
    assert sorted(replies) == sorted(str(2 * 10**k) for k in range(GROUP_SIZE))
    assert len({tuple(prompt) for prompt in continued}) == len(continued) == GROUP_SIZE
