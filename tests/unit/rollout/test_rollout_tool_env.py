"""ToolEnv: every attempt at a call is answered, in order."""

import asyncio

import pytest

from unbroken.errors import ToolDefinitionError
from unbroken.rendering.base import ParsedResponse, ParsedToolCall, ToolCallStatus
from unbroken.rollout.env import Continue, Done, Env, Reply
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import ToolStatus, tool
from unbroken.types import FinishReason

QUESTION = [{"role": "user", "content": "How much?"}]


@tool
async def wait(steps: int) -> int:
    """Wait.

    Args:
        steps: How many turns of the event loop.
    """
    for _ in range(steps):
        await asyncio.sleep(0)
    return steps


@tool
def fail() -> None:
    """Fail."""
    raise ValueError("broken")


def env(*tools, reward=lambda messages: 1.0) -> ToolEnv:
    return ToolEnv(QUESTION, tools or (wait, fail), reward)


def good(name, **arguments) -> ParsedToolCall:
    return ParsedToolCall(raw=name, status=ToolCallStatus.OK, span=(0, 1), name=name, arguments=arguments)


def bad(raw, status=ToolCallStatus.INVALID_JSON) -> ParsedToolCall:
    return ParsedToolCall(raw=raw, status=status, span=(0, 1))


def reply(*calls, content="", finish_reason=FinishReason.STOP) -> Reply:
    parsed = ParsedResponse(content=content, tool_calls=calls)
    message = parsed.to_message([f"id{k}" for k in range(len(calls))])
    return Reply(message=message, parsed=parsed, finish_reason=finish_reason)


def test_it_is_an_env():
    assert isinstance(env(), Env)


async def test_it_starts_with_the_messages_and_the_schemas_of_its_tools():
    start = await env().start()
    assert start.messages == QUESTION
    assert start.tools == (wait.schema, fail.schema)


async def test_a_reply_without_calls_ends_the_episode():
    assert await env().step(reply(content="42")) == Done()


async def test_a_turn_cut_by_length_ends_the_episode_and_calls_nothing():
    called = []

    @tool
    def look() -> None:
        """Look."""
        called.append(True)

    assert await env(look).step(reply(good("look"), finish_reason=FinishReason.LENGTH)) == Done()
    assert called == []


async def test_calls_are_answered_in_the_order_they_were_made_however_long_they_take():
    outcome = await env().step(reply(good("wait", steps=5), good("wait", steps=0), good("wait", steps=2)))
    assert outcome == Continue(
        messages=[
            {"role": "tool", "tool_call_id": "id0", "name": "wait", "content": "5"},
            {"role": "tool", "tool_call_id": "id1", "name": "wait", "content": "0"},
            {"role": "tool", "tool_call_id": "id2", "name": "wait", "content": "2"},
        ]
    )


async def test_calls_run_in_parallel():
    both_there = asyncio.Barrier(2)

    @tool(timeout_s=5)
    async def meet() -> str:
        """Meet."""
        await both_there.wait()
        return "met"

    outcome = await env(meet).step(reply(good("meet"), good("meet")))
    assert [message["content"] for message in outcome.messages] == ["met", "met"]


async def test_an_unknown_tool_is_answered_with_the_names_of_those_there_are():
    outcome = await env().step(reply(good("look")))
    assert outcome.messages[0]["content"] == "Error: there is no tool 'look'. The tools are: wait, fail."
    assert outcome.tool_errors == (ToolStatus.UNKNOWN_TOOL,)


async def test_an_unknown_tool_where_there_are_none():
    outcome = await ToolEnv(QUESTION, (), lambda messages: 0.0).step(reply(good("look")))
    assert outcome.messages[0]["content"] == "Error: there is no tool 'look'. The tools are: none."


async def test_a_tool_that_fails_and_arguments_that_do_not_fit_are_answered_and_told_to_the_counters():
    outcome = await env().step(reply(good("fail"), good("wait", steps=1), good("wait", step=1)))
    assert [message["content"] for message in outcome.messages] == [
        "Error: fail failed with ValueError: broken",
        "1",
        "Error: wait: missing argument 'steps'",
    ]
    assert outcome.tool_errors == (ToolStatus.ERROR, ToolStatus.INVALID_ARGUMENTS)


async def test_arguments_kept_as_text_are_answered():
    call = {"id": "id0", "type": "function", "function": {"name": "wait", "arguments": "{'steps': 1"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    parsed = ParsedResponse(content="", tool_calls=(good("wait"),))
    outcome = await env().step(Reply(message=message, parsed=parsed, finish_reason=FinishReason.STOP))
    assert outcome.messages[0]["content"].startswith("Error: the arguments of wait must be a JSON object")
    assert outcome.tool_errors == (ToolStatus.INVALID_ARGUMENTS,)


async def test_a_malformed_call_whose_name_is_known_is_reported_by_it():
    failed = ParsedToolCall(raw="[1]", status=ToolCallStatus.INVALID_ARGUMENTS, span=(0, 1), name="wait")
    outcome = await env().step(reply(failed))
    assert outcome.messages[0]["content"].endswith("\n- invalid_arguments in a call of wait: [1]")


async def test_malformed_calls_are_named_behind_the_answers_of_those_that_parsed():
    outcome = await env().step(reply(bad('{"name": '), good("wait", steps=1), bad("{}", ToolCallStatus.MISSING_NAME)))
    assert outcome.messages == [
        {"role": "tool", "tool_call_id": "id1", "name": "wait", "content": "1"},
        {
            "role": "user",
            "content": 'These tool calls could not be read:\n- invalid_json: {"name": \n- missing_name: {}',
        },
    ]
    assert outcome.tool_errors == ()


async def test_a_reply_of_malformed_calls_only_is_answered_by_one_user_message():
    outcome = await env().step(reply(bad("{")))
    assert [message["role"] for message in outcome.messages] == ["user"]


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ToolDefinitionError, match=r"different names, got \['wait', 'wait'\]"):
        env(wait, wait)


def test_a_function_that_is_no_tool_yet_is_refused():
    with pytest.raises(ToolDefinitionError, match="decorate the function with @tool"):
        env(len)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_reward_function_sees_the_conversation(is_async):
    async def count_async(messages):
        return float(len(messages))

    def count(messages):
        return float(len(messages))

    assert await env(reward=count_async if is_async else count).reward(QUESTION) == 1.0


async def test_an_object_with_an_async_call_is_a_reward_function():
    class Judge:
        async def __call__(self, messages):
            return 0.5

    assert await env(reward=Judge()).reward(QUESTION) == 0.5
