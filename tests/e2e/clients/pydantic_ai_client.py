"""Run a pydantic-ai agent against a server: `pydantic_ai_client.py URL`."""

import asyncio
import sys
from importlib.metadata import version

from agent_task import QUESTION, add, report
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
agent = Agent(model, tools=[add], model_settings={"max_tokens": 300})
answer = agent.run_sync(QUESTION).output


async def stream() -> str:
    """A streamed run; `run_stream` would end with the first text, also beside a call."""
    return (await agent.run(QUESTION, event_stream_handler=read_all)).output


async def read_all(_, events) -> None:
    async for _ in events:
        pass


def typed() -> str:
    """pydantic-ai asks for a typed answer by a tool that must be called (`tool_choice` "required")."""
    try:
        return str(Agent(model, tools=[add], output_type=int, retries=0).run_sync(QUESTION).output)
    except Exception as error:
        return str(error)


streamed = asyncio.run(stream())
report(version("pydantic-ai-slim"), answer, streamed=streamed, typed=typed())
