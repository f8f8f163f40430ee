"""The demo's task, attempted by an agent that knows only a URL and a key: a loop over the OpenAI SDK.

    unbroken train recipes/lookup_agent.py --output runs/lookup-agent

Nothing in `attempt` knows of training. Every request goes to the run's gateway, which records the sampled ids and
continues exactly those, whatever the SDK makes of the messages in between. The same as a command in any language:
docs/gateway.md.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unbroken.demo.config import LookupConfig
from unbroken.demo.lookup import LookupTask, lookup_tool, style_of
from unbroken.demo.warm import write_warm_model
from unbroken.rollout.agents.session import AgentSession, AgentTask
from unbroken.runs.collector import Problems
from unbroken.runs.processes import main_process_first
from unbroken.runs.recipe import Task

MAX_TURNS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(LookupConfig):
    """The demo's settings."""

    output: Path = Path("runs/lookup-agent")
    model: Path | None = None
    """A warmed-up model, such as the `model` folder of another run; none: make one."""


async def attempt(session: AgentSession, *, task: LookupTask) -> float:
    """Let the model call the tool until it answers; returns the reward."""
    from openai import AsyncOpenAI  # here, because it takes longer to import than all else that a typo waits for

    tools: Any = [lookup_tool(task).schema]
    messages: list[Any] = [{"role": "user", "content": session.task["prompt"]}]
    async with AsyncOpenAI(base_url=session.openai_base_url, api_key=session.api_key, max_retries=10) as client:
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(model=session.model, messages=messages, tools=tools)
            reply = answer.choices[0].message
            messages.append(reply.model_dump())
            calls: Any = reply.tool_calls or ()
            for call in calls:
                found = task.look_up(json.loads(call.function.arguments).get("key", ""))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(found)})
            if not calls:
                break
    return await task.reward(messages)


def lookup_attempts(name: str, seed: int) -> Problems:
    """Tasks for the agent, as `unbroken.demo.lookup.lookup_problems`."""

    def agent(number: int) -> AgentTask:
        task = LookupTask.draw(random.Random(f"{seed} {name} {number}"), style_of(number))
        return AgentTask(agent=partial(attempt, task=task), task={"prompt": task.prompt})

    return Problems(agent=agent)


async def make_task(config: Config) -> Task:
    """Write a warm model, unless the run has one already, to be trained on lookups."""
    model = config.model or config.output / "model"
    with main_process_first():
        if not model.exists():
            await asyncio.to_thread(partial(write_warm_model, model, config.warm_up, seed=config.seed))
    return Task(
        model=model,
        train_on=lookup_attempts("train", config.seed),
        evaluate_on=lookup_attempts("evaluation", config.seed),
    )
