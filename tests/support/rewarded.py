"""Groups to be rewarded, whose members said what a test wants."""

from __future__ import annotations

from typing import Any

from support.fake_renderer import END, VOCAB_SIZE, FakeRenderer, encode
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_group
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.types import SamplingParams

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"}]


async def group_of(*replies: str) -> TrajectoryGroup:
    """A group whose members said these; one that says nothing at all fails."""
    left = iter(replies)

    def say(prompt_ids: Any) -> list[int]:
        reply = next(left)
        if not reply:
            raise RuntimeError("no reply")
        return [*encode(reply), END]

    return await run_group(
        lambda: ToolEnv(PROMPT, [], no_reward),
        len(replies),
        engine=ScriptedEngine(say, vocab_size=VOCAB_SIZE),
        renderer=FakeRenderer(),
        sampling=SamplingParams(max_tokens=50),
        limits=Limits(),
    )


async def no_reward(messages: Any) -> float:
    return 0.0
