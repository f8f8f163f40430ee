"""Run Microsoft's Agent Framework by its defaults, which names the answer before: `agent_framework_client.py URL`."""

import asyncio
import sys
from importlib.metadata import version

from agent_framework import Agent, tool
from agent_framework_openai import OpenAIChatClient
from agent_task import QUESTION, add, report


async def play(*, stream: bool) -> str:
    client = OpenAIChatClient(model="tiny", base_url=f"{sys.argv[1]}/v1", api_key="none")
    agent = Agent(client=client, instructions="Be brief.", tools=[tool(approval_mode="never_require")(add)])
    if stream:
        events = agent.run(QUESTION, stream=True)
        async for _ in events:
            pass
        return (await events.get_final_response()).messages[-1].text
    return (await agent.run(QUESTION)).messages[-1].text


answer = asyncio.run(play(stream=False))
report(version("agent-framework-core"), answer, streamed=asyncio.run(play(stream=True)))
