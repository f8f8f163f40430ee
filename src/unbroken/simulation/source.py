"""The groups of a simulation: token trees with the ids and versions that a real rollout would have, all of them 0."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unbroken.counters import Counters
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.rollout.effort import add_effort
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, TrajectoryStatus
from unbroken.simulation.config import WorkloadConfig
from unbroken.simulation.engine import SimulatedEngine
from unbroken.simulation.workload import Plan
from unbroken.types import FinishReason, SampledSequence, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSource:
    """A `GroupSource`."""

    engine: SimulatedEngine
    plan: Plan
    config: WorkloadConfig
    may_sample: asyncio.Event
    """Rollouts begin while it is set."""

    @property
    def groups_per_step(self) -> int:
        """See `GroupSource`."""
        return self.config.groups_per_step

    async def sample(self, number: int) -> TrajectoryGroup:
        """See `GroupSource`."""
        await self.may_sample.wait()
        async with asyncio.TaskGroup() as tasks:
            members = [tasks.create_task(self._roll_out(number, k)) for k in range(self.config.group_size)]
        return TrajectoryGroup(group_id=str(number), trajectories=tuple(member.result() for member in members))

    async def _roll_out(self, number: int, member: int) -> Trajectory:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        tree = TokenTree()
        end = tree.add_given(np.zeros(self.config.prompt_ids, np.int32), Origin.PROMPT, parent=None)
        num_ids, num_new_ids = self.config.prompt_ids, self.config.prompt_ids
        turns = self.plan.turns(number, member)
        for index, turn in enumerate(turns):
            spans = await self.engine.sample(turn.num_ids, num_prompt_ids=num_ids, num_new_ids=num_new_ids)
            end = tree.add_sampled(_make_sequence(spans), parent=end)
            add_effort(turn.num_ids)
            num_ids, num_new_ids = num_ids + turn.num_ids, self.config.reply_ids
            await asyncio.sleep(turn.tool_s)
            if num_new_ids and index + 1 < len(turns):
                end = tree.add_given(np.zeros(num_new_ids, np.int32), Origin.BRIDGE, parent=end)
                num_ids += num_new_ids
        return Trajectory(
            trajectory_id=f"{number}.{member}", tree=tree, turns=(), messages=(), tools=(), reward=0.0, error=None,
            status=TrajectoryStatus.COMPLETED, counters=Counters(), wall_time_s=loop.time() - started_s,
        )  # fmt: skip


def _make_sequence(spans: Sequence[VersionSpan]) -> SampledSequence:
    num_ids = spans[-1].stop
    return SampledSequence(
        completion_ids=np.zeros(num_ids, np.int32),
        rollout_logprobs=np.zeros(num_ids, np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=tuple(spans),
    )
