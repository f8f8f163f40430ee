"""GRPO with generation in the trainer's process and in a server, and TRL's GRPOTrainer beside them.

    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 python bench/grpo.py                  # a tiny model on a CPU
    python bench/grpo.py --shape 0.6b --device cuda --modes colocated,trl            # on one GPU
    python bench/grpo.py --shape 0.6b --device cuda --modes colocated --settings tools --sampling-only \
        --engine-options '--compilation-config {"cudagraph_mode":"FULL"}'            # sampling, with options of vLLM
    python bench/grpo.py --shape 0.6b --device cuda --modes colocated,trl --processes 2 --problems 64 --settings tools

All train the same random Qwen3 on the same problems, each in its own process, in three settings: `single` is one turn,
`tools` four with a tool between them, `slow_tools` the same with a tool that takes 20 ms. The reward is the share of
words that begin with an a, as half of the vocabulary does. `server` is `unbroken serve` with vLLM, weights by files or
broadcast; `colocated` is vLLM that sleeps in each step, weights through memory; `trl` is TRL with colocated vLLM.
Turns and the tool's results have drawn lengths (`--turns`), of the same distribution on all sides; ids and seconds, the
engine's steps and CPU seconds, and what the prompts of later turns cost are printed for each step (`grpo_steps`).
After the last step our engine's rollouts are scored by the trainer and by the run's first model: they must fit the
trainer. Seconds, k3 and the most memory in use on the GPU are printed as they come, and compared at the end, also for
a setting that the time limit has cut short.
With `--processes`, `torchrun` starts so many, each with its GPU, its engine and its part of the problems; what is
printed of ids and engines is the first one's, and nothing is scored after the last step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import psutil
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

import grpo_steps
from grpo_task import (
    DRAWN,
    ENGINE_SIZES,
    SETTINGS,
    SHAPES,
    PeakMemory,
    Setting,
    Words,
    draw_answer,
    draw_length,
    make_lora,
    print_result,
    save_model,
    turn_options,
)
from server import free_port
from unbroken.ledger.tree import export_samples
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import Collector, Problems, Sampler
from unbroken.runs.config import EngineConfig, EngineKind, RolloutConfig, WeightTransport
from unbroken.runs.engines import RunEngine, open_engine
from unbroken.runs.processes import Rank
from unbroken.threads import keep_loop_responsive
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.loop import open_steps
from unbroken.training.metrics.mismatch import Mismatch, mismatch_of_rows
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.observer import RunObserver, StepRollouts
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SampleResult, SamplingParams, TrainingSample
from unbroken.weights.base import InProcessPublisher

MODES = {"server": EngineKind.STARTED, "colocated": EngineKind.COLOCATED}
TRL = "trl"
TURNS = ("ragged", "long", "stops", "even")


@dataclass(kw_only=True)
class Watch(RunObserver):
    """Measures what metrics do not show: the engine's steps and its way to sleep, the GPU memory in use."""

    arguments: argparse.Namespace
    found: RunEngine
    is_first: bool = True
    """Whether this is the first of the processes, which prints."""
    gib: dict[str, float] = field(default_factory=dict)
    """Used on the whole GPU, at the last step's points."""
    sleep_s: list[float] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)
    lines: list[Metrics] = field(default_factory=list)
    peak_gib: float = 0.0

    def __post_init__(self) -> None:
        self.device = self.arguments.device
        self._memory = PeakMemory(self.device)
        self._counts = grpo_steps.Steps(os.environ[grpo_steps.VARIABLE])
        self.setting, self.num_warmup = "", 0
        self.before_update = self.sleep

    def restart(self, setting: str, *, num_warmup: int) -> None:
        """Forget what was measured, before another setting."""
        self.setting, self.num_warmup = setting, num_warmup
        self.sleep_s, self.steps, self.lines, self.peak_gib = [], [], [], 0.0
        self._memory.restart()
        self._counts.restart()

    def end_step(self, metrics: Metrics) -> float:
        """Keep a step's metrics; returns its peak in GiB."""
        peak = self._memory.restart()
        self.lines.append(metrics)
        self.peak_gib = max(self.peak_gib, peak)
        return peak

    async def on_rollouts(self, rollouts: StepRollouts) -> None:
        """Count the sampled ids, and the engine's steps."""
        found = self._counts.read()
        self.steps.append({**found, **count_ids(rollouts.groups)})

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Keep a step's numbers, and print them and the result so far."""
        peak = self.end_step(metrics)
        if not self.is_first:
            return
        print_step(step, metrics, watch=self, peak=peak)
        if len(self.lines) > self.num_warmup:
            report_so_far(self.arguments, self.setting, self, num_warmup=self.num_warmup)

    def note_memory(self, when: str) -> None:
        """Note the GPU memory in use."""
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            self.gib[when] = (total - free) / 2**30

    async def sleep(self) -> None:
        """The loop's `before_update`."""
        self.note_memory("before the step")
        started = time.perf_counter()
        if self.found.before_update is not None:
            await self.found.before_update()
        self.sleep_s.append(time.perf_counter() - started)
        self.note_memory("asleep" if self.found.before_update is not None else "before the step")

    async def publish(self, named_parameters: Any, *, policy_version: int) -> Any:
        """Publish with the run's publisher."""
        self.note_memory("after the step")
        assert self.found.publisher is not None
        update = await self.found.publisher.publish(named_parameters, policy_version=policy_version)
        self.note_memory("awake again")
        self._counts.restart()
        return update


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The same options of vLLM in both modes."""
    options = ["--dtype", arguments.dtype, *ENGINE_SIZES]
    if arguments.device == "cuda":
        options += ["--gpu-memory-utilization", str(arguments.gpu_memory)]
    else:
        options += ["--block-size", "32"]
    if arguments.eager:
        options.append("--enforce-eager")
    options += ["--scheduler-cls", grpo_steps.SCHEDULER, *shlex.split(arguments.engine_options)]
    if arguments.mode == "server":
        options = ["--engine", "vllm", *options]
        transport = WeightTransport(arguments.transport)
        return EngineConfig(kind=EngineKind.STARTED, options=tuple(options), transport=transport)
    return EngineConfig(kind=EngineKind.COLOCATED, options=tuple(options))


async def run(arguments: argparse.Namespace, folder: Path, output: Path) -> None:
    """One mode, from the engine's start to the proof at the end."""
    policy, initial = load_policy(folder, arguments)
    accelerator = Accelerator(cpu=arguments.device == "cpu", mixed_precision=arguments.mixed_precision)
    rank = Rank(index=accelerator.process_index, num_processes=accelerator.num_processes)
    is_first = rank.index == 0
    started = time.perf_counter()
    config = engine_config(arguments)
    engine = open_engine(config, model=policy, source=folder, output=output, device=accelerator.device, rank=rank)
    if arguments.engines > 1:
        engine = open_several(config, folder, arguments.engines)
    async with AsyncExitStack() as stack:
        if arguments.through_files:
            engine = open_with_files(config, folder, output)
        found = await stack.enter_async_context(engine)
        print(f"engine started in {time.perf_counter() - started:.0f} s", flush=True)
        stack.enter_context(keep_loop_responsive())
        if arguments.sampling_only:
            for name in arguments.settings.split(","):
                await sample_only(arguments, name, make_collector(found, folder, arguments, name, rank))
            return
        watch = Watch(arguments=arguments, found=found, is_first=is_first)
        watch.note_memory("engine started")
        optimizer = OptimizerConfig(learning_rate=arguments.learning_rate)
        training = TrainerConfig(
            optimizer=optimizer, tokens_per_micro_batch=arguments.micro_batch, compile=arguments.compile
        )
        trainer = Trainer(policy, training, accelerator=accelerator)
        collect = make_collector(found, folder, arguments, "single", rank)
        with MetricsWriter(output / "metrics") if is_first else nullcontext() as metrics:
            warmed_up = 0
            for name in arguments.settings.split(","):
                num_warmup = int(SETTINGS[name].num_turns != warmed_up)
                warmed_up = SETTINGS[name].num_turns
                collect = make_collector(found, folder, arguments, name, rank)
                watch.restart(name, num_warmup=num_warmup)
                loop = LoopConfig(num_steps=num_warmup + arguments.num_steps)
                async with open_steps(
                    collect, trainer=trainer, publisher=watch, metrics=metrics, config=loop, observer=watch
                ) as opened:
                    await opened.run()
                if is_first:
                    report(arguments, name, watch, num_warmup=num_warmup)
        if rank.num_processes > 1:  # they would have to score as many passes as each other
            return
        numbers = range(10**6, 10**6 + collect.groups_per_step)  # no step has had them
        rows = rows_of(await asyncio.gather(*map(collect.sample, numbers)))
        first = None if initial is None else Trainer(initial, training, accelerator=accelerator)
        show_proof(rows, trainer, first)


async def sample_only(arguments: argparse.Namespace, name: str, collect: Collector) -> None:
    """Sample as many groups as each step has, without training between: one step to warm up, then those measured."""
    counts = grpo_steps.Steps(os.environ[grpo_steps.VARIABLE])
    collect_s: list[float] = []
    steps: list[dict[str, float]] = []
    for step in range(1 + arguments.num_steps):
        counts.restart()
        began = time.perf_counter()
        numbers = range(step * collect.groups_per_step, (step + 1) * collect.groups_per_step)
        groups = await asyncio.gather(*map(collect.sample, numbers))
        seconds = time.perf_counter() - began
        found = {**counts.read(), **count_ids(groups)}
        print(f"{name}, sampling alone, step {step + 1}: {seconds:.2f} s", flush=True)
        print_sampling(found, seconds)
        if step:
            collect_s.append(seconds)
            steps.append(found)
            print_result(
                arguments.mode,
                name,
                step_s=float("nan"),
                peak_gib=0.0,
                collect_s=float(np.median(collect_s)),
                **medians_of(steps),
            )


def count_ids(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The sampled ids of groups, and the mean of the ids between two turns."""
    rows = rows_of(groups)
    sampled = sum(int(row.sampled_mask.sum()) for row in rows)
    after = sum(int(np.count_nonzero(~row.sampled_mask[row.sampled_mask.argmax() :])) for row in rows)
    between = sum(len(trajectory.turns) - 1 for group in groups for trajectory in group.trajectories)
    return {"sampled": sampled, "given": after / max(1, between)}


def print_sampling(found: dict[str, float], collect_s: float) -> None:
    """Print what sampling was made of."""
    grpo_steps.print_steps(found, num_sampled=int(found["sampled"]), num_given=found["given"], collect_s=collect_s)


def medians_of(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each number."""
    return {name: float(np.median([step[name] for step in steps])) for name in steps[0]}


def load_policy(folder: Path, arguments: argparse.Namespace) -> tuple[Any, Any | None]:
    """The policy, and a copy of it that stays as it is; None with LoRA, whose base would be on the GPU twice."""
    load = AutoModelForCausalLM.from_pretrained
    if arguments.lora is None:
        return load(folder, dtype=torch.float32), load(folder, dtype=torch.float32)
    from peft import get_peft_model

    return get_peft_model(load(folder, dtype=getattr(torch, arguments.dtype)), make_lora(arguments.lora)), None


class Halves:
    """Several engines, each with a part of the conversations."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self._engines = engines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engines[0], name)

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample with the engine of the conversation."""
        conversation = request.request_id.rpartition("/")[0]
        sampled: SampleResult = await self._engines[crc32(conversation.encode()) % len(self._engines)].sample(request)
        return sampled


@asynccontextmanager
async def open_several(config: EngineConfig, folder: Path, number: int) -> AsyncIterator[RunEngine]:
    """Open engines that share this process's GPU, one after the other; they get no weights."""
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    options = parse_engine_args(["--model", str(folder), "--disable-log-stats", *config.options])
    engines = [await VllmEngine.start(options) for _ in range(number)]
    try:
        yield RunEngine(engine=Halves(engines), publisher=None)
    finally:
        for engine in engines:
            await engine.close()


@asynccontextmanager
async def open_with_files(config: EngineConfig, folder: Path, output: Path) -> AsyncIterator[RunEngine]:
    """Open the colocated engine with weights through files, as for workers on other machines."""
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    sleep = ["--enable-sleep-mode"] if torch.cuda.is_available() else []
    options = parse_engine_args(["--model", str(folder), *sleep, *config.options])
    engine = await VllmEngine.start(options, transfer_dir=output)
    try:
        yield RunEngine(engine=engine, publisher=InProcessPublisher(engine), before_update=engine.sleep)
    finally:
        await engine.close()


class DrawnLengths:
    """An engine whose turns end after as many ids as are drawn for their place (`draw_length`)."""

    def __init__(self, engine: Any, arguments: argparse.Namespace) -> None:
        self._engine = engine
        self._arguments = arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample a turn of the drawn length; requests are named seed-problem/sibling/turn."""
        problem, sibling, turn = map(int, request.request_id.rsplit("-", 1)[1].split("/"))
        length = draw_length(self._arguments, problem=problem, sibling=sibling, turn=turn)
        params = replace(request.params, max_tokens=min(length, request.params.max_tokens))
        sampled: SampleResult = await self._engine.sample(replace(request, params=params))
        return sampled


def make_collector(found: RunEngine, folder: Path, arguments: argparse.Namespace, name: str, rank: Rank) -> Collector:
    """Make the collector of the groups of each step in a setting."""
    from transformers import AutoTokenizer

    setting: Setting = SETTINGS[name]
    config = RolloutConfig(
        problems_per_step=arguments.problems,
        group_size=arguments.group_size,
        sampling=SamplingParams(**turn_options(arguments)),
        limits=Limits(max_turns=setting.num_turns, timeout_s=90.0),
    )
    renderer = TemplateRenderer(AutoTokenizer.from_pretrained(folder))
    problems = Problems(
        env=lambda number: Words(
            number,
            num_turns=setting.num_turns,
            draw_tool_s=lambda: setting.tool_s,
            draw_answer=lambda turn: draw_answer(number % arguments.problems, turn, ragged=arguments.turns != "even"),
        )
    )
    engine: Any = DrawnLengths(found.engine, arguments) if arguments.turns in DRAWN else found.engine
    sampler = Sampler(engine=engine, renderer=renderer, config=config, problems=problems, seed=(arguments.seed,))
    return Collector(sampler, rank=rank)


def rows_of(groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
    """The rows of all groups."""
    return [row for group in groups for t in group.trajectories for row in export_samples(t.tree, advantage=0.0)]


def print_step(step: int, metrics: Metrics, *, watch: Watch, peak: float) -> None:
    """Print a step's numbers."""
    names = ("reward/mean", "mismatch/k3", "mismatch/max_abs", "train/num_tokens", "train/padding_share")
    shown = [f"{key} {metrics.get(key) or 0:.4g}" for key in names]
    phases = [f"{key.removeprefix('seconds/')} {metrics.get(key) or 0:.2f} s" for key in PHASES]
    rest = f"sleep {watch.sleep_s[-1]:.2f} s", f"peak {peak:.1f} GiB"
    print(f"{watch.setting}, step {step + 1}:", *shown, *phases, *rest, sep="  ", flush=True)
    print_sampling(watch.steps[-1], metrics.get("seconds/collect") or 0.0)


PHASES = ("seconds/collect", "seconds/train", "seconds/publish", "seconds/step")


def report(arguments: argparse.Namespace, name: str, watch: Watch, *, num_warmup: int) -> None:
    """Print medians of a setting's steps after those that warm up."""
    lines = watch.lines[num_warmup:]

    def median(values: Sequence[float | None]) -> float:
        return float(np.median([value or 0.0 for value in values]))

    phases = {key.removeprefix("seconds/"): median([line[key] for line in lines]) for key in PHASES}
    sampled = [step["sampled"] for step in watch.steps[num_warmup:]]
    generated = median([n / (line["seconds/collect"] or 1) for n, line in zip(sampled, lines, strict=True)])
    trained = median([(line["train/num_tokens"] or 0) / (line["seconds/train"] or 1) for line in lines])
    sleep = median(watch.sleep_s[num_warmup:])
    print(
        f"\n{arguments.mode}, {name}, {arguments.shape}, {arguments.device}, {arguments.dtype}: medians of {len(lines)}"
    )
    print("seconds:", *(f"{key} {value:.3f}" for key, value in phases.items()), f"sleep {sleep:.3f}")
    print(f"generated {generated:,.0f} ids/s, trained on {trained:,.0f} ids/s (of all ids of the rows)")
    num_bytes = lines[-1]["weights/num_bytes"] or 0
    print(f"an update: {num_bytes / 2**20:,.0f} MiB in {phases['publish']:.3f} s")
    worst = max(line["mismatch/k3"] or 0.0 for line in lines)
    k3 = median([line["mismatch/k3"] for line in lines])
    print(f"mismatch/k3 at most {worst:.3g}, median {k3:.3g}")
    if watch.gib:
        print("GiB used on the GPU:", ", ".join(f"{when} {gib:.1f}" for when, gib in watch.gib.items()))


def report_so_far(arguments: argparse.Namespace, name: str, watch: Watch, *, num_warmup: int) -> None:
    """Print the medians of a setting's steps so far for the table of all sides: the time may be up before the next."""
    lines = watch.lines[num_warmup:]
    median = {key: float(np.median([line[key] or 0.0 for line in lines])) for key in (*PHASES, "mismatch/k3")}
    print_result(
        arguments.mode,
        name,
        step_s=median["seconds/step"],
        collect_s=median["seconds/collect"],
        train_s=median["seconds/train"],
        k3=median["mismatch/k3"],
        peak_gib=watch.peak_gib,
        num_ids=lines[-1]["train/num_tokens"],
        **medians_of(watch.steps[num_warmup:]),
    )


def show_proof(rows: list[TrainingSample], trainer: Trainer, first: Trainer | None) -> None:
    """Check which weights the engine has: k3 of its last rollouts against the trained and the first weights."""
    trained = mismatch_of_rows(rows, trainer.logprobs(rows))
    print(f"its last rollouts against the trained weights: k3 {trained.k3:.3g}, max |difference| {trained.max_abs:.3g}")
    if first is None:
        return
    begun = mismatch_of_rows(rows, first.logprobs(rows))
    print(f"its last rollouts against the first weights: k3 {begun.k3:.3g}, max |difference| {begun.max_abs:.3g}")
    verdict = is_trained(trained, begun)
    print(f"the engine has {'the trained weights' if verdict else 'OTHER WEIGHTS THAN THE TRAINED ONES'}", flush=True)
    if not verdict:
        raise SystemExit(1)


def is_trained(trained: Mismatch, begun: Mismatch) -> bool:
    """Whether the rollouts are ten times closer to the trained weights than to the first."""
    return trained.k3 * 10 < begun.k3


def run_modes(arguments: argparse.Namespace) -> int:
    """Run each mode in its own process group, which is killed at its time limit; returns how many failed."""
    failed = 0
    started = time.perf_counter()
    results: list[dict[str, Any]] = []
    # the engine's process finds its scheduler here
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parent), os.getenv("PYTHONPATH")])
    )
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder = arguments.folder or Path(scratch) / "model"
        save_model(folder, arguments)
        for mode, settings in parts_of(arguments):
            print(f"\n== {mode}: {settings}", flush=True)
            (output := Path(scratch) / mode).mkdir(exist_ok=True)
            os.environ[grpo_steps.VARIABLE] = str(output / "steps")
            command = [sys.executable, *launcher_of(arguments), __file__, *sys.argv[1:]]
            command += ["--mode", mode, "--settings", settings]
            left_s = arguments.limit_s - (time.perf_counter() - started)
            command += ["--folder", str(folder), "--output", str(output)]
            code, found = run_part(command, max(1.0, min(arguments.timeout_s, left_s)), arguments.results)
            failed += code != 0
            results += found
            log = output / "server.log"
            if code != 0 and log.exists():
                print(log.read_text()[-3000:], flush=True)
    compare(results)
    return failed


def launcher_of(arguments: argparse.Namespace) -> list[str]:
    """What starts the processes of a mode."""
    if arguments.processes == 1:
        return []
    number = str(arguments.processes)
    return ["-m", "torch.distributed.run", "--nproc_per_node", number, "--master_port", str(free_port())]


def parts_of(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Modes with their settings. TRL takes its tools, and the rows of a pass, when it starts: two processes."""
    settings = arguments.settings.split(",")
    parts: list[tuple[str, str]] = []
    for mode in arguments.modes.split(","):
        with_tools = [name for name in settings if SETTINGS[name].num_turns > 1]
        without = [name for name in settings if name not in with_tools]
        parts += [(mode, ",".join(part)) for part in ([without, with_tools] if mode == TRL else [settings]) if part]
    return parts


def run_part(command: list[str], timeout_s: float, file: Path | None) -> tuple[int, list[dict[str, Any]]]:
    """Run a process and print what it prints; returns its exit status, -9 at the time limit, and its results.

    The results are also added to a `file`, one a line.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    limit = threading.Timer(timeout_s, end_group, (process.pid,))
    limit.start()
    results: list[dict[str, Any]] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("RESULT "):
                print(line, end="", flush=True)
            else:
                results.append(json.loads(line.removeprefix("RESULT ")))
                if file is not None:
                    with file.open("a") as lines:
                        lines.write(line.removeprefix("RESULT "))
        code = process.wait()
    finally:
        limit.cancel()
        end_group(process.pid)
    print(f"exit status {code} after {time.perf_counter() - started:.0f} s", flush=True)
    return code, results


def compare(results: Sequence[dict[str, Any]]) -> None:
    """Print a table of all sides, with ratios to TRL's seconds and memory: medians of the steps that were made."""
    last = {(result["setting"], result["side"]): result for result in results}  # a later one has more steps
    print("\nmedians of the measured steps; CPU: of the engine's process / this one (TRL's engine is in this one)")
    titles = ("setting", "side", "step s", "/ TRL", "collect", "/ TRL", "train", "sampled", "ids/s", "steps", "mixed",
              "ms", "CPU s", "later prompt", "GiB", "/ TRL", "k3")  # fmt: skip
    rows = [titles]
    for (setting, side), result in sorted(last.items(), key=lambda item: list(SETTINGS).index(item[0][0])):
        theirs = last.get((setting, TRL), {})

        def ratio(name: str, own: dict[str, Any] = result, theirs: dict[str, Any] = theirs) -> str:
            return f"{own[name] / theirs[name]:.2f}" if theirs.get(name) else "-"

        rows.append(
            (
                setting,
                side,
                f"{result['step_s']:.2f}",
                ratio("step_s"),
                f"{result['collect_s']:.2f}",
                ratio("collect_s"),
                f"{result.get('train_s', float('nan')):.2f}",
                f"{result['sampled']:,.0f}",
                f"{result['sampled'] / result['collect_s']:,.0f}",
                f"{result['steps']:.0f}",
                f"{result['mixed']:.0f}",
                f"{1000 * result['collect_s'] / max(1.0, result['steps']):.1f}",
                f"{result['engine_cpu_s']:.2f} / {result['own_cpu_s']:.2f}",
                f"{result['later_prompt']:.0f}: {result['given']:.1f}, {result['later_computed']:.1f}",
                f"{result['peak_gib']:.1f}",
                ratio("peak_gib"),
                f"{result['k3']:.2e}" if "k3" in result else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)), flush=True)
    print("later prompt: mean ids of a later turn's prompt: those that are new in it, those that the engine computed")


def end_group(pid: int) -> None:
    """Kill the processes that a mode has left: `torchrun` gives each of its own a session."""
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join([*MODES, TRL])}")
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--num-steps", type=int, default=2, help="measured steps of each setting")
    parser.add_argument("--problems", type=int, help="32 on a GPU, 4 on a CPU")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument(
        "--turns",
        choices=TURNS,
        default=TURNS[0],
        help="lengths that are geometric, or log-normal, and equal on all sides; "
        "geometric by many stop ids; or all equal",
    )
    parser.add_argument("--tokens", type=int, help="of each turn, or their mean; 256 on a GPU, 24 on a CPU")
    parser.add_argument("--lora", type=int, help="train adapters of this rank over a base in the engine's dtype")
    parser.add_argument("--learning-rate", type=float, help="1e-3 for tiny, else 1e-4")
    parser.add_argument("--dtype", help="of the engine; bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), help="of the trainer; bf16 on a GPU")
    parser.add_argument("--micro-batch", type=int, help="ids in a pass; left out: chosen by the trainer")
    parser.add_argument("--trl-rows", type=int, help="TRL's rows in a pass; 32 for a single turn, 16 with tools")
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="vLLM's share")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, help="without torch.compile; so on a CPU")
    parser.add_argument("--engine-options", default="", help="more options of our vLLM, in one argument")
    parser.add_argument("--sampling-only", action="store_true", help="of our sides: sample, and do not train")
    parser.add_argument("--engines", type=int, default=1, help="with --sampling-only and colocated: on the one GPU")
    parser.add_argument("--processes", type=int, default=1, help="with colocated and trl: of a run, each on its GPU")
    parser.add_argument("--results", type=Path, help="add each result to this file when it is there, as JSON")
    parser.add_argument("--compile", action="store_true", help="the trainer's model by torch.compile, on either side")
    parser.add_argument("--trl-tool-steps", type=int, default=1, help="measured steps of TRL with tools")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one process")
    parser.add_argument("--limit-s", type=float, default=480.0, help="of all; what has no result by then is left out")
    transports = [transport.value for transport in WeightTransport]
    parser.add_argument("--transport", choices=transports, default="files", help="of weights to the server")
    parser.add_argument("--through-files", action="store_true", help="weights of the colocated engine")
    parser.add_argument("--folder", type=Path, help="keep the model here, and use it again")
    parser.add_argument("--scratch", help="folder for the model and the server's weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engines > 1 and not (arguments.sampling_only and arguments.modes == "colocated"):
        parser.error("--engines needs --sampling-only and --modes colocated")
    if arguments.processes > 1 and (arguments.sampling_only or "server" in arguments.modes.split(",")):
        parser.error("--processes needs --modes of colocated and trl, without --sampling-only")
    on_gpu = arguments.device == "cuda"
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    defaults = {
        "problems": 32 if on_gpu else 4,
        "tokens": 256 if on_gpu else 24,
        "learning_rate": 1e-3 if arguments.shape == "tiny" else 1e-4,
        "dtype": "bfloat16" if on_gpu else "float32",
        "mixed_precision": "bf16" if on_gpu else "no",
        "eager": not on_gpu,
    }
    return argparse.Namespace(**{**vars(arguments), **defaults, **given})


if __name__ == "__main__":
    options = parse_arguments()
    if options.mode is None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no mode outlives this
        sys.exit(run_modes(options))
    os.environ[grpo_steps.VARIABLE] += f"-{os.environ.get('RANK', '0')}"  # those of this process's engine
    if options.mode == TRL:
        import grpo_trl

        grpo_trl.run(options, options.settings.split(","))
        sys.stdout.flush()
        os._exit(0)  # vLLM's and TRL's threads may hold up a regular exit
    asyncio.run(run(options, options.folder, options.output))
