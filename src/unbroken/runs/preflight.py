"""The preflight: a few real rollouts before anything is trained or evaluated, and what they say, on one screen.

    train_model ── engine, trainer ── start check ── preflight ── first evaluation ── steps
    eval        ── engine, start check ── preflight ── evaluation
    doctor TASK ── engine, trainer ── start check ── preflight

Its rollouts have seeds that nothing else has, and are kept nowhere, so a run is the same with it and without it. What
is wrong is said by the rules of the diagnosis (`runs.diagnosis.rules`), as of the steps of a run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from unbroken.progress import begin
from unbroken.rendering.effects import shows_tools
from unbroken.rendering.parsing.syntax.arguments import list_names
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import Sampler
from unbroken.runs.config import RunConfig
from unbroken.runs.diagnosis.diary import format_finding
from unbroken.runs.diagnosis.evidence import Evidence, Numbers, RolloutNote, count_records
from unbroken.runs.diagnosis.rules import diagnose
from unbroken.runs.records.record import make_record
from unbroken.training.step_metrics import measure_memory
from unbroken.types import FinishReason

NUM_ROLLOUTS = 8
"""At least so many: of fewer, the rules about shares say nothing."""
_MAX_GROUP = 4
_SEED = 2
"""Beside 0 of the steps and 1 of the evaluations: no seed of a run is that of a preflight."""
_TRAINING_BYTES = 12
"""Of each trained weight: its gradient and two moments of the optimizer, in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What a run or an evaluation is going to do, and the rollouts that were sampled for it."""

    config: RunConfig
    source: str
    model: Any
    """The model itself, or None where it is in another process."""
    sampler: Sampler
    num_processes: int = 1
    trains: bool = True

    async def run(self, console: Console) -> None:
        """Sample, and print one screen. Raises what the first step would raise: of an engine, a reward, or tools that
        the template does not show.
        """
        most = self.config.rollouts.group_size if self.trains else _MAX_GROUP
        size = min(_MAX_GROUP, most)
        num_groups = -(-NUM_ROLLOUTS // size)
        console.print(
            f"preflight: {num_groups * size} rollouts are sampled (--preflight false leaves it out)",
            soft_wrap=True,
            highlight=False,
        )
        begin("preflight", total=num_groups * size, unit="rollouts")
        started_s = time.perf_counter()
        sampler = replace(self.sampler, seed=(self.config.seed, _SEED))
        groups = await sampler.sample_groups(range(num_groups), size=size)
        for line in self.describe(groups, seconds=time.perf_counter() - started_s):
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    def describe(self, groups: Sequence[TrajectoryGroup], *, seconds: float) -> list[str]:
        """The lines of the screen, for rollouts that took so long: what is used, what was seen, and what is wrong."""
        records = [
            make_record(group.group_id, each, [], data=group.data) for group in groups for each in group.trajectories
        ]
        numbers = {**count_records(records), **measure_memory()}
        evidence = Evidence(is_preflight=True).add_step(numbers, notes=tuple(map(RolloutNote.of, records)))
        rows = {
            **self._describe_means(),
            "tools": self._describe_tools(groups, numbers),
            "turns": _describe_turns(groups, numbers),
            "rewards": _describe_rewards(groups, numbers),
            **(self._estimate(numbers, seconds) if self.trains else {}),
        }
        lines = [f"  {name:<8}{words}" for name, words in rows.items()]
        return lines + [format_finding(each, None) for each in diagnose(evidence)]

    def _describe_means(self) -> dict[str, str]:
        config, problems = self.config, self.sampler.problems
        rows = "without end" if problems.num_problems is None else f"{problems.num_problems}"
        step = f"{config.rollouts.problems_per_step} x {config.rollouts.group_size}"
        processes = "" if self.num_processes == 1 else f", {self.num_processes} processes"
        return {
            "device": f"{_name_device(self.model)}, engine {config.engine.kind}{processes}",
            "model": f"{self.source}{_describe_size(self.model)}",
            "rows": f"{rows}; {step} rollouts a step, {config.loop.num_steps} steps" if self.trains else rows,
            "output": str(config.output),
        }

    def _describe_tools(self, groups: Sequence[TrajectoryGroup], numbers: Numbers) -> str:
        tools = next((each.tools for group in groups for each in group.trajectories if each.tools), ())
        if not tools:
            return "none"
        if shows_tools(self.sampler.renderer, tools):
            seen = "the prompt shows them"
        elif self.config.rollouts.tools_in_messages:
            seen = "the messages describe them (rollouts.tools_in_messages)"
        else:
            seen = "the prompt does NOT show them"
        calls, unread = (
            round(numbers.get(name) or 0) for name in ("rollout/num_tool_calls", "counters/parse_failures")
        )
        failed = round(numbers.get("counters/tool_errors") or 0)
        return f"{', '.join(list_names(tools))}: {seen}; {calls} calls, {unread} could not be read, {failed} failed"

    def _estimate(self, numbers: Numbers, seconds: float) -> dict[str, str]:
        """What a step will cost, by the rollouts that were measured; what trains is not measured before it trains."""
        rollouts = self.config.rollouts
        sampled, per_step = numbers["rollout/num_trajectories"], rollouts.problems_per_step * rollouts.group_size
        slowest_s = seconds * max(per_step / sampled, 1)
        peak, trained = numbers["memory/gpu_peak_bytes"] or numbers["memory/peak_bytes"], _count_weights(self.model)
        memory = f"{_format_bytes(peak)} so far, and about {_format_bytes(_TRAINING_BYTES * trained)} for "
        shards = self.config.trainer.parallel.fsdp
        return {
            "a step": f"an estimate: {seconds:.2g} s (all rollouts at once) to {slowest_s:.2g} s (as fast as these) of "
            "sampling, and the update, which is not measured yet",
            "memory": f"an estimate: {memory}gradients and optimizer{', over all shards' if shards > 1 else ''}, "
            "besides the activations of a micro-batch",
        }


def _name_device(model: Any) -> str:
    import torch

    if model is None:
        return "that of the engine"
    device = next(model.parameters()).device
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _describe_turns(groups: Sequence[TrajectoryGroup], numbers: Numbers) -> str:
    turns = [turn for group in groups for each in group.trajectories for turn in each.turns]
    ended = sum(turn.sequence.finish_reason is FinishReason.STOP for turn in turns)
    cut = sum(round(numbers.get(f"counters/status/{name}") or 0) for name in ("truncated", "max_tokens"))
    whole = numbers["rollout/num_trajectories"]
    return f"{ended} of {len(turns)} turns end by themselves; {cut} of {whole} rollouts are cut ({cut / whole:.0%})"


def _describe_rewards(groups: Sequence[TrajectoryGroup], numbers: Numbers) -> str:
    if numbers["reward/mean"] is None:
        return "none"
    known = [[reward for reward in group.rewards if reward is not None] for group in groups]
    compared = [rewards for rewards in known if len(rewards) > 1]
    differ = sum(len(set(rewards)) > 1 for rewards in compared)
    bounds = f"{numbers['reward/min']:.4g} to {numbers['reward/max']:.4g}"
    within = f"; they differ within {differ} of {len(compared)} groups" if compared else ""
    return f"{bounds}, mean {numbers['reward/mean']:.3g}{within}"


def _describe_size(model: Any) -> str:
    if model is None:
        return ""
    number = sum(each.numel() for each in model.parameters())
    return f", {number / 1e9:.2f} B parameters" if number >= 1e8 else f", {number / 1e6:.2f} M parameters"


def _count_weights(model: Any) -> int:
    """How many of a model's weights are trained."""
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


def _format_bytes(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
