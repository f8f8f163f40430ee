"""Tasksets of verifiers 0.4 for its own harness `null`, of each kind: `kind` is single, tool or stateful."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import verifiers.v1 as vf
from count_v1 import Counted, Counter
from look_v1 import Look

__all__ = ["Sums"]


class TaskConfig(vf.TaskConfig):
    kind: Literal["single", "tool", "stateful"] = "single"
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data, Counted, TaskConfig]):
    @classmethod
    def toolsets(cls, config: TaskConfig) -> list[vf.Toolset]:
        return {"single": [], "tool": [Look(config.tools)], "stateful": [Counter(config.tools)]}[config.kind]

    @vf.reward(weight=1.0)
    async def variety(self, trace: Any) -> float:
        return len(set(trace.last_reply)) / 100

    @vf.metric
    async def calls(self, trace: Any) -> float:
        return float(trace.state.calls)


class Config(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()


class Sums(vf.Taskset[Sum, Config]):
    def load(self) -> Iterable[Sum]:
        for k in range(8):
            yield Sum(Data(prompt=f"What is {k} + 4?", answer=str(k + 4)), self.config.task)
