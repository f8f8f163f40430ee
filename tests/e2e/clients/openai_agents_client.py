"""Run an agent of openai-agents against a server, through Responses (its default): `openai_agents_client.py URL`."""

import asyncio
import sys
from importlib.metadata import version

import agent_task
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
agent = Agent(
    name="adder",
    instructions="Be brief.",
    model=OpenAIResponsesModel(model="tiny", openai_client=client),
    tools=[function_tool(agent_task.add)],
)


async def play() -> tuple[str, str]:
    """The answers of a whole and of a streamed run."""
    answer = (await Runner.run(agent, agent_task.QUESTION)).final_output
    streamed = Runner.run_streamed(agent, agent_task.QUESTION)
    async for _ in streamed.stream_events():
        pass
    return answer, streamed.final_output


answer, streamed = asyncio.run(play())
agent_task.report(version("openai-agents"), answer, streamed=streamed)
