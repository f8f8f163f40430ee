"""Counts the steps of vLLM's scheduler in its own process, for either side of bench/grpo.py.

A step samples for sequences that run, computes prompts, or does both (mixed). The numbers of each engine stand in a
file that the benchmark reads, whose name begins with the environment variable GRPO_STEPS:

    our engine      --scheduler-cls grpo_steps.make_scheduler        TRL      count_steps_here()
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

VARIABLE = "GRPO_STEPS"
SCHEDULER = "grpo_steps.make_scheduler"
_OWN_NAME = re.compile(r"/(\d+)(?:-[0-9a-f]+)?$")
"""How the names of our requests end: with the turn, and what vLLM adds."""
FIELDS = (
    "steps", "mixed", "only_prompts",  # steps; the rest of them sample only
    "sequences", "ids", "admissions",  # sums over steps: of sequences, of ids; steps that admit requests
    "prompts", "later_prompts", "later_ids", "later_cached",  # later: those of turns after the first
    "schedule_us", "update_us", "shortest",
)  # fmt: skip


class Steps:
    """What a side's engines have done since `restart`, and the CPU seconds of their processes and of this one."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.restart()

    def restart(self) -> None:
        """Begin to count."""
        self._before = self._read()
        self._cpu = self._engine_cpu_s(), time.process_time()

    def read(self) -> dict[str, float]:
        """The numbers since `restart`; `engine_cpu_s` is this process's too if the engine is in it."""
        now = self._read()
        found = {name: now[name] - self._before[name] for name in FIELDS[:-1]}
        engine_cpu_s, own_cpu_s = self._engine_cpu_s() - self._cpu[0], time.process_time() - self._cpu[1]
        steps, later = max(1, found["steps"]), max(1, found["later_prompts"])
        return {
            **found,
            "sequences_a_step": found["sequences"] / steps,
            "later_prompt": found["later_ids"] / later,
            "later_computed": (found["later_ids"] - found["later_cached"]) / later,
            "engine_cpu_s": engine_cpu_s,
            "own_cpu_s": own_cpu_s,
        }

    def _read(self) -> dict[str, int]:
        files = [np.fromfile(path, np.int64) for path in self._path.parent.glob(f"{self._path.name}.*")]
        return dict(zip(FIELDS, sum(files, np.zeros(len(FIELDS), np.int64)).tolist(), strict=True))

    def _engine_cpu_s(self) -> float:
        pids = [int(path.suffix[1:]) for path in self._path.parent.glob(f"{self._path.name}.*")]
        times = [psutil.Process(pid).cpu_times() for pid in pids if psutil.pid_exists(pid)]
        return sum(float(each.user + each.system) for each in times)


def print_steps(found: dict[str, float], *, num_sampled: int, num_given: float, collect_s: float) -> None:
    """Print what sampling was made of. `num_given` ids come between two turns of a conversation, on average."""
    steps = max(1.0, found["steps"])
    schedule_s, update_s = found["schedule_us"] / 1e6, found["update_us"] / 1e6
    print(
        f"    sampled {num_sampled:,} ids in {collect_s:.2f} s, {num_sampled / max(collect_s, 1e-9):,.0f} a second\n"
        f"    {steps:.0f} steps of {1000 * collect_s / steps:.1f} ms with {found['sequences_a_step']:.0f} sequences: "
        f"{found['mixed']:.0f} mixed, {found['only_prompts']:.0f} of prompts alone; CPU s: engine's process "
        f"{found['engine_cpu_s']:.2f} (schedule {schedule_s:.2f}, update {update_s:.2f}), this process "
        f"{found['own_cpu_s']:.2f}\n"
        f"    {found['prompts']:.0f} prompts in {found['admissions']:.0f} steps; later ones: "
        f"{found['later_prompt']:.1f} ids, of which {num_given:.1f} are new and "
        f"{found['later_computed']:.1f} were computed",
        flush=True,
    )


def make_scheduler(*, vllm_config: Any, **options: Any) -> Any:
    """Make our engine's scheduler, counted; called in the engine's process."""
    from unbroken.engines.vllm.scheduler import make_scheduler as make

    scheduler = make(vllm_config=vllm_config, **options)
    count_steps(scheduler)
    return scheduler


def count_steps_here() -> None:
    """Count those of each scheduler that is made in this process from now on."""
    from vllm.v1.core.sched.scheduler import Scheduler

    make = Scheduler.__init__

    def make_counted(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        count_steps(self)

    Scheduler.__init__ = make_counted


def count_steps(scheduler: Any) -> None:
    """Count the steps of one scheduler."""
    path = f"{os.environ[VARIABLE]}.{os.getpid()}"
    counts = dict.fromkeys(FIELDS, 0)
    np.zeros(len(FIELDS), np.int64).tofile(path)
    memory = np.memmap(path, dtype=np.int64, mode="r+", shape=(len(FIELDS),))
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def counted_schedule(*arguments: Any, **options: Any) -> Any:
        began = time.thread_time_ns()
        planned = schedule(*arguments, **options)
        counts["schedule_us"] += (time.thread_time_ns() - began) // 1000
        count_step(counts, planned)
        return planned

    def counted_update(*arguments: Any, **options: Any) -> Any:
        began = time.thread_time_ns()
        outputs = update(*arguments, **options)
        counts["update_us"] += (time.thread_time_ns() - began) // 1000
        memory[:] = tuple(counts.values())
        return outputs

    scheduler.schedule, scheduler.update_from_output = counted_schedule, counted_update


def count_step(counts: dict[str, int], planned: Any) -> None:
    """Count a step by vLLM's plan of it."""
    num_sequences, num_ids = len(planned.num_scheduled_tokens), planned.total_num_scheduled_tokens
    if not num_ids:
        return
    counts["steps"] += 1
    counts["sequences"] += num_sequences
    counts["ids"] += num_ids
    if num_ids > num_sequences:
        num_prompts = sum(number > 1 for number in planned.num_scheduled_tokens.values())
        counts["mixed" if num_prompts < num_sequences else "only_prompts"] += 1
    counts["admissions"] += bool(planned.scheduled_new_reqs)
    for request in planned.scheduled_new_reqs:
        length = len(request.prompt_token_ids)
        shortest = counts["shortest"] or length
        counts["shortest"] = min(shortest, length)
        counts["prompts"] += 1
        own = _OWN_NAME.search(request.req_id)
        # Of TRL's first prompts, the lengths differ by the digits of a number.
        if (own is not None and own[1] != "0") or (own is None and length > shortest + 8):
            counts["later_prompts"] += 1
            counts["later_ids"] += length
            counts["later_cached"] += request.num_computed_tokens
