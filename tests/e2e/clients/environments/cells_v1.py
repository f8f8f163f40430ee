"""A taskset of verifiers 0.4 with a harness of its own, which runs in the process and asks twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult

__all__ = ["AskTwice", "Cells"]


class Data(vf.TaskData):
    answer: str


class Cell(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def variety(self, task: Data, trace: Any) -> float:
        return len(set(trace.last_reply)) / 100

    @vf.metric
    async def letters(self, trace: Any) -> float:
        return float(len(trace.last_reply))


class Cells(vf.Taskset[Cell, vf.TasksetConfig]):
    def load(self) -> Iterable[Cell]:
        for k in range(8):
            yield Cell(Data(prompt=f"What is {k} + 4?", answer=str(k + 4)), self.config.task)


class AskTwice(vf.Harness[HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Data
    ) -> ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "Again."}]
        return ProgramResult(exit_code=0, stdout="", stderr="")
