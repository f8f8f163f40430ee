"""The preflight: a few real rollouts before anything is trained or evaluated, and what they say, on one screen.

    train_model ── engine, trainer ── start check ── preflight ── first evaluation ── steps
    eval        ── engine, start check ── preflight ── evaluation
    doctor TASK ── engine, trainer ── start check ── preflight

Its rollouts have seeds that nothing else has, and are kept nowhere; the gradient of some of them is computed and thrown
away, to know what an update costs. So a run is the same with it and without it. What
is wrong is said by the rules of the diagnosis (`runs.diagnosis.rules`), as of the steps of a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rich.console import Console

from unbroken.errors import TrainingError
from unbroken.ledger.tree import export_samples
from unbroken.progress import begin
from unbroken.rendering.effects import shows_tools
from unbroken.rendering.parsing.syntax.arguments import list_names
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import Sampler
from unbroken.runs.config import RunConfig
from unbroken.runs.diagnosis.diary import format_finding
from unbroken.runs.diagnosis.evidence import Evidence, Numbers, RolloutNote, count_records
from unbroken.runs.diagnosis.rules import diagnose
from unbroken.runs.records.files import find_conversation, summarize
from unbroken.runs.records.record import make_record
from unbroken.training.metrics.step_log import measure_machine
from unbroken.types import FinishReason, TrainingSample

NUM_ROLLOUTS = 8
"""At least so many: of fewer, the rules about shares say nothing."""
_MAX_GROUP = 4
_SEED = 2
"""Beside 0 of the steps and 1 of the evaluations: no seed of a run is that of a preflight."""
_GRADIENT_BYTES, _OPTIMIZER_BYTES = 4, 8
"""Of each trained weight: its gradient, and two moments of the optimizer, in float32."""
_MOST_IDS = 2048
"""Ids of the rows whose gradient is measured, unless one alone has more."""
_MAX_CALLS, _MAX_TEXT = 3, 100
"""Of the rollout that is shown: its first calls, and characters of a line."""
_QUICK_S = 5.0
"""A gradient that took less is computed once more: the first pass of a process prepares what later ones have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What a run or an evaluation is going to do, and the rollouts that were sampled for it."""

    config: RunConfig
    source: str
    model: Any
    """The model itself, or None where it is in another process."""
    sampler: Sampler
    num_processes: int = 1
    trainer: Any | None = None
    """Whose gradient is measured; None without training, and where that could disturb others: an engine that has this
    trainer's memory, or processes that compute gradients together.
    """
    trains: bool = True

    async def run(self, console: Console) -> None:
        """Sample, and print one screen. Raises what the first step would raise: of an engine, a reward, or tools that
        the template does not show.
        """
        most = self.config.rollouts.group_size if self.trains else _MAX_GROUP
        size = min(_MAX_GROUP, most)
        num_groups = -(-NUM_ROLLOUTS // size)
        console.print(
            f"preflight: {num_groups * size} rollouts that count nowhere",
            soft_wrap=True,
            highlight=False,
        )
        begin("preflight", total=num_groups * size, unit="rollouts")
        started_s = time.perf_counter()
        sampler = replace(self.sampler, seed=(self.config.seed, _SEED))
        groups = await sampler.sample_groups(range(num_groups), size=size)
        seconds, update = time.perf_counter() - started_s, None
        if self.trainer is not None:
            begin("preflight, one gradient")
            update = await asyncio.to_thread(_measure_update, self.trainer, groups)
        for line in self.describe(groups, seconds=seconds, update=update):
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    def describe(
        self, groups: Sequence[TrajectoryGroup], *, seconds: float, update: _UpdateCost | None = None
    ) -> list[str]:
        """The lines of the screen, for rollouts that took so long: what is used, what was seen, and what is wrong."""
        records = [
            make_record(group.group_id, each, [], data=group.data) for group in groups for each in group.trajectories
        ]
        numbers = {**count_records(records), **measure_machine()}
        notes = tuple(map(RolloutNote.of, records))
        evidence = Evidence(
            is_preflight=True,
            is_evaluation=not self.trains,
            temperature=self.config.rollouts.sampling.temperature,
        ).add_step(numbers, notes=notes)
        rows = {
            **self._describe_means(),
            "tools": self._describe_tools(groups, numbers),
            "turns": _describe_turns(groups, numbers),
            "rewards": _describe_rewards(groups, numbers, trains=self.trains),
            **_describe_one(records),
            **(self._estimate(numbers, seconds, update) if self.trains else {}),
        }
        lines = [f"  {name:<8}{words}" for name, words in rows.items()]
        return lines + [format_finding(each, None) for each in diagnose(evidence)]

    def _describe_means(self) -> dict[str, str]:
        config, problems = self.config, self.sampler.problems
        rows = "without end" if problems.num_problems is None else f"{problems.num_problems}"
        step = f"{config.rollouts.problems_per_step} x {config.rollouts.group_size} rollouts"
        processes = "" if self.num_processes == 1 else f", {self.num_processes} processes"
        return {
            "device": f"{_name_device(self.model)}, engine {config.engine.kind}{processes}{_describe_load(self.model)}",
            "model": f"{_name_source(self.source)}{_describe_size(self.model)}",
            **({"teacher": ", ".join(config.teacher.models)} if config.teacher and self.trains else {}),
            "rows": f"{rows}; {step} a step, {config.loop.num_steps} steps" if self.trains else rows,
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
        wrong = [f"{unread} could not be read"] * (unread > 0) + [f"{failed} failed"] * (failed > 0)
        return f"{', '.join(list_names(tools))}: {seen}; {', '.join([f'{calls} calls', *wrong])}"

    def _estimate(self, numbers: Numbers, seconds: float, update: _UpdateCost | None) -> dict[str, str]:
        """What a step will cost, by the rollouts and the gradient that were measured."""
        rollouts, trained = self.config.rollouts, _count_weights(self.model)
        sampled, per_step = numbers["rollout/num_trajectories"], rollouts.problems_per_step * rollouts.group_size
        slowest_s = seconds * max(per_step / sampled, 1)
        peak = numbers["memory/gpu_peak_bytes"] or numbers["memory/peak_bytes"]
        if update is None or update.error:
            why = "which is not measured here" if update is None else f"whose gradient failed: {update.error}"
            bytes_left = (_GRADIENT_BYTES + _OPTIMIZER_BYTES) * trained
            shards = ", over all shards" if self.config.trainer.parallel.fsdp > 1 else ""
            spent, rest = f"the update, {why}", f"gradients and optimizer{shards}, besides the activations of a pass"
        else:
            update_s = update.seconds * per_step / update.num_rollouts * self.config.trainer.num_iterations
            spent = f"{update_s:.2g} s of updates"
            bytes_left, rest = _OPTIMIZER_BYTES * trained, "the optimizer"
        return {
            "a step": f"about {seconds:.2g} to {slowest_s:.2g} s of sampling, {spent}",
            "memory": f"about {_format_bytes(peak)} so far, {_format_bytes(bytes_left)} for {rest}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _UpdateCost:
    """What the gradient of some rollouts took."""

    num_rollouts: int
    seconds: float = 0.0
    error: str = ""
    """Why the gradient could not be computed."""


def _measure_update(trainer: Any, groups: Sequence[TrajectoryGroup]) -> _UpdateCost | None:
    """Compute the gradient of some rollouts, and drop it; None if there is nothing to train. Blocks.

    Weights, averages of the optimizer, random numbers and the size of passes are as before.
    """
    import torch

    from unbroken.training.model.batch import ScoredRow

    samples, num_rollouts = _choose_rows(groups)
    if not samples:
        return None
    backend, seconds = trainer.backend, 0.0
    device = backend.accelerator.device
    size, rows = backend.passes.size, [ScoredRow(sample=each, old_logprobs=each.rollout_logprobs) for each in samples]
    try:
        with backend.computing(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for _ in range(2):
                if seconds <= _QUICK_S:
                    began_s = time.perf_counter()
                    backend.forward_backward(rows, _mean_logprob, weights=[1.0] * len(rows))
                    seconds = time.perf_counter() - began_s
    except TrainingError as error:  # memory was not enough for one row
        return _UpdateCost(num_rollouts=num_rollouts, error=str(error))
    finally:
        backend.passes.size = size
        backend.policy.zero_grad(set_to_none=True)
    return _UpdateCost(num_rollouts=num_rollouts, seconds=seconds)


def _mean_logprob(scores: Any, batch: Any) -> tuple[Any, None]:
    return scores.logprobs_N.mean(), None


def _choose_rows(groups: Sequence[TrajectoryGroup]) -> tuple[list[TrainingSample], int]:
    """The rows of the first rollouts that are not too long together, and how many rollouts they are."""
    chosen: list[TrainingSample] = []
    num_rollouts = num_ids = 0
    for trajectory in (each for group in groups for each in group.trajectories):
        rows = [row for row in export_samples(trajectory.tree, advantage=0.0) if row.loss_mask.any()]
        num_ids += sum(len(row.token_ids) for row in rows)
        if rows and chosen and num_ids > _MOST_IDS:
            break
        chosen += rows
        num_rollouts += bool(rows)
    return chosen, num_rollouts


def _name_device(model: Any) -> str:
    import torch

    if model is None:
        return "that of the engine"
    device = next(model.parameters()).device
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _name_source(source: str) -> str:
    """A model's name on the hub or its folder, as a user of this folder names it."""
    here = Path.cwd()
    return str(Path(source).relative_to(here)) if Path(source).is_relative_to(here) else source


def _describe_load(model: Any) -> str:
    """What to do where other programs have the cores: torch's threads wait for each other, and a step takes longer."""
    import torch

    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    is_on_cpu = model is not None and next(model.parameters()).device.type == "cpu"
    if not is_on_cpu or torch.get_num_threads() == 1 or load < 1.5 * cores:
        return ""
    return f"; other programs are on its cores (load {load:.1f} of {cores}): OMP_NUM_THREADS=1 before the command helps"


def _describe_turns(groups: Sequence[TrajectoryGroup], numbers: Numbers) -> str:
    turns = [turn for group in groups for each in group.trajectories for turn in each.turns]
    ended = sum(turn.sequence.finish_reason is FinishReason.STOP for turn in turns)
    cut = sum(round(numbers.get(f"counters/status/{name}") or 0) for name in ("truncated", "max_tokens"))
    whole = numbers["rollout/num_trajectories"]
    words = f"{ended} of {len(turns)} end by themselves"
    return f"{words}; {cut} of {whole} rollouts are cut ({cut / whole:.0%})" if cut else words


def _describe_rewards(groups: Sequence[TrajectoryGroup], numbers: Numbers, *, trains: bool) -> str:
    if numbers["reward/mean"] is None:
        return "none"
    known = [[reward for reward in group.rewards if reward is not None] for group in groups]
    compared = [rewards for rewards in known if len(rewards) > 1]
    differ = sum(len(set(rewards)) > 1 for rewards in compared)
    bounds = f"{numbers['reward/min']:.4g} to {numbers['reward/max']:.4g}"
    name = "groups that teach (rewards differ)" if trains else "groups whose rewards differ"
    within = f"; {name}: {differ} of {len(compared)}" if compared else ""
    return f"{bounds}, mean {numbers['reward/mean']:.3g}{_describe_parts(groups)}{within}"


def _describe_one(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The first rollout that did not fail, in at most three lines: what was asked, the calls, and the last words.

    So one sees what the model does before any of it is rewarded.
    """
    record = next((each for each in records if each.get("error") is None and each.get("turns")), None)
    if record is None:
        return {}
    found = summarize(record)
    calls = _list_calls(record)
    reward = "no reward" if found["reward"] is None else f"reward {found['reward']:.3g}"
    expected = "" if found["expected"] is None else f", expected {_cut(found['expected'])}"
    return {
        "rollout": _cut(found["prompt"]),
        **({"": f"-> {', '.join(calls)}"} if calls else {}),
        " ": f"-> {_cut(found['given'])}{expected}: {reward}",
    }


def _list_calls(record: Mapping[str, Any]) -> list[str]:
    """The first calls, and how many more there are."""
    calls = [call for each in find_conversation(record) for call in each.get("tool_calls") or ()]
    written = [_write_call(**call["function"]) for call in calls if "function" in call]
    more = [f"{len(written) - _MAX_CALLS} more"] * (len(written) > _MAX_CALLS)
    return written[:_MAX_CALLS] + more


def _write_call(name: Any = None, arguments: Any = None, **_: Any) -> str:
    """A call on one line, with what a terminal would not print as it is escaped."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return repr(f"{name}({text if len(text) <= _MAX_TEXT else f'{text[:_MAX_TEXT]}...'})")[1:-1]


def _cut(text: str | None) -> str:
    """A text in quotation marks and on one line; a long one by its end, where questions and answers stand."""
    line = " ".join((text or "").split())
    return repr(line if len(line) <= _MAX_TEXT else f"...{line[-_MAX_TEXT:]}")


def _describe_parts(groups: Sequence[TrajectoryGroup]) -> str:
    """The mean and spread of each part before its weight, where there are several: their sum may hide one.

    Worked example, parts of 1 0 1 0 and 0 0 0 0: ` (correct 0.5 ± 0.5, polite 0 in all)`.
    """
    parts: dict[str, list[float]] = {}
    for each in (each for group in groups for each in group.trajectories):
        for name, value in each.reward_parts.items():
            if isinstance(value, (int, float)):  # an environment may note others
                parts.setdefault(name, []).append(float(value))
    shown = (
        f"{name} {fmean(values):.3g} {f'± {pstdev(values):.2g}' if len(set(values)) > 1 else 'in all'}"
        for name, values in parts.items()
    )
    return f" ({', '.join(shown)})" if len(parts) > 1 else ""


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
