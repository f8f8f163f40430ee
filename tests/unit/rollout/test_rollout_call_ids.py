"""The ids of calls: the model's own where it wrote one that is free, else new ones."""

from dataclasses import replace
from typing import Any

from support.fake_renderer import END, FakeRenderer, call_ids
from support.parsing import tool
from support.scripted_env import QUESTION, ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rollout.env import Continue, EnvStart
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.types import SamplingParams

TOOL = tool("f", id={"type": "string"})
MORE = Continue(messages=[{"role": "user", "content": "more"}])


class OwnIds(FakeRenderer):
    """Its model writes a call's id as the argument `id`, and its parser reads arguments by schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.tools: list[Any] = []

    def parse_response(self, completion_ids: Any, *, prompt_ids: Any = None, tools: Any = ()) -> Any:
        self.tools.append(tools)
        parsed = super().parse_response(completion_ids, prompt_ids=prompt_ids, tools=tools)
        calls = tuple(replace(call, call_id=call.arguments.get("id", "")) for call in parsed.tool_calls)
        return replace(parsed, tool_calls=calls)


async def ids_after(*turns: list[str]) -> list[str]:
    """The ids of all calls of a rollout whose turns make calls with these own ids."""
    completions = [[*(i for own in turn for i in call_ids("f", {"id": own})), END] for turn in turns]
    trajectory = await run_rollout(
        ScriptedEnv([MORE] * (len(turns) - 1)),
        engine=ScriptedEngine(completions),
        renderer=OwnIds(),
        sampling=SamplingParams(max_tokens=1000),
        limits=Limits(),
    )
    return [call["id"] for turn in trajectory.turns for call in turn.message["tool_calls"]]


async def test_a_call_keeps_the_id_that_the_model_wrote() -> None:
    assert await ids_after(["functions.f:0", ""], ["functions.f:1"]) == ["functions.f:0", "call00000", "functions.f:1"]


async def test_an_id_that_is_taken_is_replaced() -> None:
    assert await ids_after(["a", "a"], ["a", "b"]) == ["a", "call00000", "call00001", "b"]


async def test_a_new_id_is_none_that_the_model_wrote_in_the_same_turn() -> None:
    assert await ids_after(["", "call00000"]) == ["call00001", "call00000"]
    assert await ids_after(["call00000"], ["", "call00001"]) == ["call00000", "call00002", "call00001"]


async def test_the_parser_is_told_the_tools_of_the_environment() -> None:
    class WithTool(ScriptedEnv):
        async def start(self) -> EnvStart:
            return EnvStart(messages=QUESTION, tools=(TOOL,))

    renderer = OwnIds()
    await run_rollout(
        WithTool([MORE]),
        engine=ScriptedEngine([[7, END], [8, END]]),
        renderer=renderer,
        sampling=SamplingParams(max_tokens=10),
        limits=Limits(),
    )
    assert renderer.tools == [(TOOL,), (TOOL,)]
