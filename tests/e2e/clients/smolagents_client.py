"""Run smolagents' agents against a server: `smolagents_client.py URL`."""

import sys

import smolagents
from agent_task import QUESTION, add, report
from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool

options = {"model_id": "tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "max_tokens": 300}
quiet = {"verbosity_level": LogLevel.OFF, "max_steps": 9}
answer = ToolCallingAgent(tools=[tool(add)], model=OpenAIModel(**options, tool_choice="auto"), **quiet).run(QUESTION)
code = CodeAgent(tools=[tool(add)], model=OpenAIModel(**options), **quiet).run(QUESTION)


def required() -> str:
    """Left to itself, the agent asks for calls by `tool_choice` "required"."""
    try:
        return str(ToolCallingAgent(tools=[tool(add)], model=OpenAIModel(**options), **quiet).run(QUESTION))
    except Exception as error:
        return str(error)


report(smolagents.__version__, answer, code=str(code), required=required())
