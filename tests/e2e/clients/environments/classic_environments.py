"""Environments of verifiers 0.1, of each kind that the package has: `load_environment(kind)`.

The tiny model of the tests says nothing sensible, so their rewards are of what it says in any case: its length, its
turns, whether it called a tool.
"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset
from verifiers.types import Messages, State, UserMessage


def rows(size: int = 8) -> Dataset:
    return Dataset.from_list([{"question": f"What is {k} + 4?", "answer": str(k + 4)} for k in range(size)])


def variety(completion: Messages, **_: Any) -> float:
    """A reward that differs between the attempts of a random model."""
    return len(set("".join(str(message.content) for message in completion))) / 100


def num_letters(completion: Messages, **_: Any) -> float:
    return float(sum(len(str(message.content)) for message in completion))


def longest(completions: list[Messages], **_: Any) -> list[float]:
    """A reward that compares the attempts."""
    lengths = [sum(len(str(message.content)) for message in each) for each in completions]
    return [length / max(max(lengths), 1) for length in lengths]


def look(cell: int) -> str:
    """Look into a cell.

    Args:
        cell: Its number.
    """
    return str(cell + 13)


class Guesses(vf.MultiTurnEnv):
    """Says three times that the answer is wrong."""

    async def env_response(self, messages: Messages, state: State, **_: Any) -> Messages:
        return [UserMessage(content=f"Wrong. Try {len(state['trajectory'])} again.")]


class Counter(vf.StatefulToolEnv):
    """Its tool gets the attempt's own counter, which the model does not see."""

    async def setup_state(self, state: State) -> None:
        state["counter"] = []

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State, **_: Any
    ) -> dict[str, Any]:
        return {**tool_args, "counter": state["counter"]}

    async def env_response(self, messages: Messages, state: State, **more: Any) -> Messages:
        if messages[-1].tool_calls:
            return await super().env_response(messages, state, **more)
        return [UserMessage(content="Use the tool.")]

    @vf.stop
    async def no_tools_called(self, state: State) -> bool:
        return len(state["trajectory"]) >= 2


def count(counter: list[int]) -> str:
    """Count one more."""
    counter.append(1)
    return str(len(counter))


async def ask_twice(task: Any, state: Any) -> Any:
    """A harness of its own: a program that asks the attempt's endpoint, with OpenAI's SDK."""
    client = state.get_endpoint_config()
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=client["base_url"], api_key=client["api_key"]) as asks:
        messages: list[Any] = [*task["prompt"]]
        for _ in range(2):
            answer = await asks.chat.completions.create(model=client["model"], messages=messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "Again."}]
    state["answer"] = str(messages[-2]["content"])
    return state


def load_harness() -> vf.Environment:
    """A taskset and a harness of `verifiers.v1`."""
    from verifiers import v1

    @v1.reward
    async def letters(task: Any, state: Any) -> float:
        return len(set(state["answer"])) / 100

    tasks = [{"prompt": [{"role": "user", "content": f"What is {k} + 4?"}], "answer": str(k + 4)} for k in range(8)]
    taskset = v1.Taskset(source=lambda: tasks, rewards=[letters])
    return v1.Env(taskset=taskset, harness=v1.Harness(program=ask_twice))


def load_environment(kind: str = "single") -> vf.Environment:
    rubric = vf.Rubric(funcs=[variety, num_letters], weights=[1.0, 0.0])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=rows(), rubric=rubric, system_prompt="Add.")
    if kind == "compared":
        return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[variety, longest]))
    if kind == "tool":
        return vf.ToolEnv(dataset=rows(), rubric=rubric, tools=[look], max_turns=4)
    if kind == "turns":
        return Guesses(dataset=rows(), rubric=rubric, max_turns=3)
    if kind == "stateful":
        env = Counter(dataset=rows(), rubric=rubric, max_turns=3)
        env.add_tool(count, args_to_skip=["counter"])
        return env
    assert kind == "harness", kind
    return load_harness()
