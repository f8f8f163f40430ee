"""Run agents that insist on a call (`tool_choice` "required") against a server whose model is random:
`required_client.py URL`. Only the constraint makes it call; it may also write blanks until it is cut.
"""

import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

URL = f"{sys.argv[1]}/v1"
NUM_TURNS = 8


class City(BaseModel):
    """What pydantic-ai asks for."""

    name: Literal["Paris", "Rome"]
    big: bool


@tool
def pick(flag: bool) -> str:
    """Pick one.

    Args:
        flag: which one
    """
    picked.append(flag)
    return f"picked {flag}"


picked: list[bool] = []
model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=URL, api_key="none"))
settings = {"max_tokens": 600, "parallel_tool_calls": False}
typed, cut = [], 0
for seed in range(NUM_TURNS):
    asker = Agent(model, output_type=City, retries=0, model_settings={**settings, "seed": seed})
    try:
        typed.append(asker.run_sync("Which?").output.model_dump())
    except UnexpectedModelBehavior as error:
        if "token limit" not in str(error):
            raise
        cut += 1
for seed in range(NUM_TURNS):
    sampled = {"max_tokens": 600, "parallel_tool_calls": False, "seed": seed}
    agent = ToolCallingAgent(
        tools=[pick],
        model=OpenAIModel(model_id="tiny", api_base=URL, api_key="none", **sampled),
        max_steps=1,
        verbosity_level=LogLevel.OFF,
    )
    del agent.tools["final_answer"]  # it may have any type, so the random model would write for ever
    try:
        agent.run("Pick.")
    except Exception as error:  # without a final answer it asks for text at the end, which may be anything
        print(error, file=sys.stderr)
print(json.dumps({"typed": typed, "cut": cut, "picked": picked}))
