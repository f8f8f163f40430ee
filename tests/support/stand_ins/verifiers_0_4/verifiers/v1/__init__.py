"""The tasksets, their environments and what comes out of them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class AgentConfig:
    client: Any = None


@dataclass
class EnvConfig:
    taskset: Any
    agents: dict[str, AgentConfig]
    ok: bool = True
    runs: int = 1


@dataclass
class Data:
    question: str

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {"prompt": self.question}


@dataclass
class Task:
    data: Data


class Taskset(list[Task]):
    bounded = True


@dataclass
class Said:
    type: str
    message: str


@dataclass
class Reward:
    score: float
    weight: float


@dataclass
class Trace:
    agent: Any
    reply: str
    errors: list[Said] = field(default_factory=list)

    @property
    def rewards(self) -> dict[str, Reward | None]:
        return {"right": Reward(float(self.reply == "It is 17."), 2.0), "judged": None}

    @property
    def metrics(self) -> dict[str, float | None]:
        return {"length": len(self.reply), "unknown": None}

    @property
    def reward(self) -> float:
        return sum(each.score * each.weight for each in self.rewards.values() if each is not None)


@dataclass
class Name:
    name: str


@dataclass
class Episode:
    traces: list[Trace]
    ok: bool
    errors: list[Said]


class Env:
    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self.serves = False

    @asynccontextmanager
    async def serving(self) -> Any:
        assert not self.serves, "an environment serves once"
        self.serves = True
        yield

    async def run_episode(self, task: Task, context: Any) -> Episode:
        assert self.serves
        if not self.config.ok:
            return Episode(traces=[], ok=False, errors=[Said("SandboxError", "no sandbox")])
        traces = []
        for name in [*self.config.agents] * self.config.runs:
            async with httpx.AsyncClient(base_url=context.client.base_url) as client:
                body = {"model": context.model, "messages": [{"role": "user", "content": task.data.question}]}
                answer = await client.post("chat/completions", json=body, headers={"Authorization": "Bearer EMPTY"})
            answer.raise_for_status()
            traces.append(Trace(agent=Name(name), reply=answer.json()["choices"][0]["message"]["content"]))
        return Episode(traces=traces, ok=True, errors=[])
