"""A simulation's config from a run of `unbroken train`: its rollouts, and the times of its trainer and engine.

    timeline/rank-0.json    seconds of steps, checkpoints, snapshots, publications and evaluations
    metrics.jsonl           ids of each step, and what there is no timeline for
    rollouts/               lengths of rollouts, and their seconds: those of an id and of a turn
    recipe.json             groups, staleness and other settings

Times that depend on something are fitted: a step's on its ids, a rollout's on its turns, its ids and the others.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unbroken.errors import InvalidInputError
from unbroken.runs.records.files import FOLDER, find_records, read_records
from unbroken.simulation.config import EngineTimes, LengthConfig, SimulationConfig, TrainerTimes, WorkloadConfig
from unbroken.simulation.fitting import MeasuredRollout, fit_engine, fit_times
from unbroken.simulation.workload import MeasuredPlan, Plan
from unbroken.timeline import read_timeline

_NUM_WARMUP = 2
"""Steps at the beginning that do not count: models are compiled, caches fill."""
_MIN_STEPS = 3
_SETTINGS = "recipe.json"
_KINDS = ("checkpoint", "snapshot", "publish", "after the step", "log", "evaluation")
"""How the names of slices begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """What a run's files say."""

    config: SimulationConfig
    """For the run's own staleness."""
    plan: Plan | None
    """The recorded rollouts; None without any."""
    step_s: float
    """Seconds a step of the run."""


def measure_run(folder: Path) -> MeasuredRun:
    """Read a run; its first two steps do not count.

    Raises:
        InvalidInputError: the folder holds no run, or one of fewer than five steps.
    """
    lines = _read_metrics(folder / "metrics" / "metrics.jsonl")[_NUM_WARMUP:]
    if len(lines) < _MIN_STEPS:
        raise InvalidInputError(
            f"the run in {folder} must have trained at least {_MIN_STEPS + _NUM_WARMUP} steps, the first "
            f"{_NUM_WARMUP} of which do not count, got {len(lines)} others"
        )
    settings = _read_settings(folder / _SETTINGS)
    timeline = folder / "timeline" / "rank-0.json"
    slices = _measure_slices(read_timeline(timeline)) if timeline.exists() else {}
    rollouts = _read_rollouts(folder / FOLDER)
    max_staleness = int(settings.get("loop.max_staleness", 0))
    workload = _find_workload(lines, settings)
    config = SimulationConfig(
        max_staleness=(max_staleness,),
        adapt_ahead=bool(settings.get("loop.adapt_ahead", True)),
        max_drops=int(settings.get("loop.max_drops", 0)),
        max_groups_in_flight=settings.get("loop.max_groups_in_flight"),
        publish_beside_step=bool(settings.get("loop.publish_beside_step", True)),
        workload=workload,
        engine=_fit_engine(rollouts, lines, max_staleness=max_staleness),
        trainer=_fit_trainer(lines, slices, settings),
    )
    plan = MeasuredPlan(members=[each.lengths for each in rollouts], seed=config.seed) if rollouts else None
    return MeasuredRun(config=config, plan=plan, step_s=_find_step_s(lines, slices))


def _find_workload(lines: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> WorkloadConfig:
    num_groups = _mean(lines, "groups/num")
    num_members = _mean(lines, "rollout/num_trajectories")
    group_size = int(settings.get("rollouts.group_size") or max(1, round(num_members / max(num_groups, 1))))
    median = max(1, round(_mean(lines, "rollout/completion_tokens_mean")))
    return WorkloadConfig(
        groups_per_step=int(settings.get("rollouts.problems_per_step") or max(1, round(num_members / group_size))),
        group_size=group_size,
        prompt_ids=max(1, round(_mean(lines, "rollout/prompt_tokens_mean"))),
        lengths=LengthConfig(median=median, sigma=0.5, max_ids=max(4096, 4 * median)),
    )


def _fit_trainer(
    lines: Sequence[Mapping[str, Any]], slices: Mapping[str, Mapping[int, float]], settings: Mapping[str, Any]
) -> TrainerTimes:
    """Times of the trainer; a step's are those of its slice but for the checkpoint in it."""
    ids = [_count_ids(line) for line in lines]
    steps = slices.get("step", {})
    made = [steps.get(int(line["step"]), float(line.get("seconds/train") or 0.0)) for line in lines]
    save_every = int(settings.get("checkpoints.every") or 1)
    save_s = _find_duration(slices, "checkpoint")
    if steps:
        are_saved = [(int(line["step"]) + 1) % save_every == 0 for line in lines]
        made = [max(0.0, seconds - save_s * is_saved) for seconds, is_saved in zip(made, are_saved, strict=True)]
    step_s, id_s = fit_times([[1.0] * len(ids), ids], made)
    has_own_servers = "evaluation.engine.kind" in settings
    evaluation_every = 0 if has_own_servers else int(settings.get("evaluation.every") or 0)
    evaluation_s = _find_duration(slices, "evaluation") if evaluation_every else 0.0
    is_beside = int(settings.get("loop.max_staleness") or 0) > 0  # and so no part of what comes after a step
    evaluation_share_s = evaluation_s / evaluation_every if evaluation_every and not is_beside else 0.0
    after_s = _find_duration(slices, "after the step") + _find_duration(slices, "log")
    return TrainerTimes(
        step_s=step_s,
        id_s=id_s,
        snapshot_s=_find_duration(slices, "snapshot"),
        publish_s=_find_duration(slices, "publish") or _mean(lines, "seconds/publish"),
        save_s=save_s,
        save_every=save_every,
        end_s=max(0.0, after_s - evaluation_share_s),
        evaluation_s=evaluation_s,
        evaluation_every=evaluation_every,
    )


def _fit_engine(
    rollouts: Sequence[MeasuredRollout], lines: Sequence[Mapping[str, Any]], *, max_staleness: int
) -> EngineTimes:
    if not rollouts:
        num_ids = max(_mean(lines, "rollout/completion_tokens_mean"), 1)
        return EngineTimes(id_s=_mean(lines, "seconds/rollout_mean") / num_ids)
    return fit_engine(rollouts, num_together=None if max_staleness else _mean(lines, "rollout/num_trajectories"))


def _find_step_s(lines: Sequence[Mapping[str, Any]], slices: Mapping[str, Mapping[int, float]]) -> float:
    """Seconds a step: between the ends of the steps' slices, or as the metrics have it."""
    ends = slices.get("step end", {})
    numbers = [int(line["step"]) for line in lines if int(line["step"]) in ends]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return (ends[numbers[-1]] - ends[numbers[0]]) / (len(numbers) - 1)
    return _mean(lines, "seconds/step")


def _measure_slices(events: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Seconds of slices by their kind and a number: that of the step, of the steps before an evaluation, or a count.

    The evaluations of all sets after a step are one.
    """
    found: dict[str, dict[int, float]] = defaultdict(dict)
    open_slices: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        row = (event["pid"], event.get("tid", 0))
        if event["ph"] == "B":
            open_slices[row].append(event)
        elif event["ph"] == "E" and open_slices[row]:
            begin = open_slices[row].pop()
            name, seconds = begin["name"], (event["ts"] - begin["ts"]) / 1e6
            if (match := re.fullmatch(r"step (\d+)", name)) is not None:
                found["step"][int(match[1])] = seconds
                found["step end"][int(match[1])] = event["ts"] / 1e6
            for kind in _KINDS:
                if name.startswith(kind):
                    number = begin.get("args", {}).get("num_steps", len(found[kind]))
                    found[kind][number] = found[kind].get(number, 0.0) + seconds
    return found


def _find_duration(slices: Mapping[str, Mapping[int, float]], kind: str) -> float:
    """The mean duration of a kind without the first two, which are slower; 0 without any."""
    seconds = list(slices.get(kind, {}).values())
    return float(np.mean(seconds[_NUM_WARMUP:] or seconds)) if seconds else 0.0


def _read_rollouts(folder: Path) -> list[MeasuredRollout]:
    """The recorded rollouts but those of the first two steps."""
    rollouts = []
    for (step, _), path in find_records(folder).items():
        for record in read_records(path) if step >= _NUM_WARMUP else ():
            lengths = [turn["num_sampled"] for turn in record.get("turns", ()) if turn["num_sampled"] > 0]
            if record.get("kind") == "trajectory" and lengths:
                rollouts.append(MeasuredRollout(step=step, lengths=lengths, seconds=float(record["wall_time_s"])))
    return rollouts


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of steps that trained; a last one without its end is being written, or was when the run was killed."""
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"--from must be the folder of a run with metrics/metrics.jsonl: {error}") from None
    return [line for line in lines if line.get("train/num_rows")]


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(path.read_text("utf-8"))["settings"]
    except (OSError, ValueError, KeyError):
        return {}
    return settings


def _count_ids(line: Mapping[str, Any]) -> float:
    """The ids of a step's rollouts, as a simulation counts them."""
    prompts = (line.get("rollout/num_trajectories") or 0) * (line.get("rollout/prompt_tokens_mean") or 0)
    return float((line.get("rollout/num_sampled_tokens") or 0) + prompts)


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [float(line[name]) for line in lines if line.get(name) is not None]
    return float(np.mean(values)) if values else 0.0
