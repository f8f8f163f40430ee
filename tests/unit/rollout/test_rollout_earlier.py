"""Bridges that depend on the history before a turn: rollouts pass it."""

from collections.abc import Sequence

import pytest

from support.corpus import corpus_template
from support.rollouts import play
from support.scripted_env import ScriptedEnv
from support.templates import chatml_with
from support.tokenizers import make_tokenizer
from unbroken.engines.scripted import ScriptedEngine
from unbroken.messages import ToolSchema
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.env import Continue, EnvStart
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import TokenIds, token_ids

TOOLS: tuple[ToolSchema, ...] = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},)
RESULT = Continue(messages=[{"role": "tool", "name": "look", "content": "42"}])
USER = Continue(messages=[{"role": "user", "content": "and then?"}])
NO_THINK = chatml_with(
    before_prompt="{%- if messages | selectattr('content', 'equalto', '/no_think') | list -%}"
    "{{- '<|im_start|>system\\nquick<|im_end|>\\n' -}}{%- endif -%}"
)


class EnvWithTools(ScriptedEnv):
    async def start(self) -> EnvStart:
        start = await super().start()
        return EnvStart(messages=start.messages, tools=TOOLS)


async def converse(renderer: TemplateRenderer, turns: Sequence[TokenIds], reply: Continue) -> Trajectory:
    engine = ScriptedEngine(turns, allow_forks=True)
    trajectory = await play(EnvWithTools([reply, reply]), engine, renderer=renderer)
    assert trajectory.error is None
    return trajectory


@pytest.mark.parametrize(
    ("template", "stop", "says", "reply"),
    [
        (corpus_template("trl/llama3_1").source, "<|eot_id|>", '{"name": "look", "parameters": {}}', RESULT),
        (NO_THINK, "<|im_end|>", "one", USER),
    ],
    ids=["a result after Llama 3.1's call", "a text that is nowhere in the history"],
)
async def test_i1_turns_that_are_bridged_only_after_a_known_history_are_bridged(
    template: str, stop: str, says: str, reply: Continue
) -> None:
    tokenizer = make_tokenizer(template, eos_token=stop)
    turns = [token_ids(tokenizer.encode(f"{text}{stop}")) for text in (says, says, "done")]
    renderer = TemplateRenderer(tokenizer)
    trajectory = await converse(renderer, turns, reply)
    assert trajectory.counters["bridges/derived"] == 2
    assert all(turn.fork is None for turn in trajectory.turns)
