"""GRPO with generation in the trainer's process and in a server, and TRL's GRPOTrainer beside them.

    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 python bench/grpo.py                  # a tiny model on a CPU
    python bench/grpo.py --shape 0.6b --device cuda --modes colocated,trl            # on one GPU

All train the same random Qwen3 on the same problems, each in its own process, in three settings: `single` is one turn,
`tools` four with a tool between them, `slow_tools` the same with a tool that takes 20 ms. The reward is the share of
words that begin with an a, as half of the vocabulary does. `server` is `unbroken serve` with vLLM, weights by files or
broadcast; `colocated` is vLLM that sleeps in each step, weights through memory; `trl` is TRL with colocated vLLM.
After the last step our engine's rollouts are scored by the trainer and by the run's first model: they must fit the
trainer. Seconds, k3 and the most memory in use on the GPU are printed as they come, and compared at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from grpo_task import (
    ENGINE_SIZES,
    SETTINGS,
    SHAPES,
    PeakMemory,
    Setting,
    make_lora,
    print_result,
    save_model,
    turn_options,
)
from unbroken.ledger.export import export_samples
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import Collector, Problems, Sampler
from unbroken.runs.config import EngineConfig, EngineKind, RolloutConfig, WeightTransport
from unbroken.runs.engines import RunEngine, open_engine
from unbroken.runs.processes import Rank
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.loop import train
from unbroken.training.metrics.mismatch import Mismatch, mismatch_of_rows
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.observer import RunObserver, StepRollouts
from unbroken.training.trainer import Trainer
from unbroken.types import SamplingParams, TrainingSample
from unbroken.weights.in_process import InProcessPublisher
from words_env import Words

MODES = {"server": EngineKind.STARTED, "colocated": EngineKind.COLOCATED}
TRL = "trl"


@dataclass(kw_only=True)
class Watch(RunObserver):
    """Measures what metrics do not show: how long the engine takes to fall asleep, and the GPU memory in use."""

    device: str
    found: RunEngine
    gib: dict[str, float] = field(default_factory=dict)
    """Used on the whole GPU, at the last step's points."""
    sleep_s: list[float] = field(default_factory=list)
    num_sampled: list[int] = field(default_factory=list)
    lines: list[Metrics] = field(default_factory=list)
    peak_gib: float = 0.0

    def __post_init__(self) -> None:
        self._memory = PeakMemory(self.device)
        self.setting = ""
        self.before_update = self.sleep

    def restart(self, setting: str) -> None:
        """Forget what was measured, before another setting."""
        self.setting = setting
        self.sleep_s, self.num_sampled, self.lines, self.peak_gib = [], [], [], 0.0
        self._memory.restart()

    def end_step(self, metrics: Metrics) -> float:
        """Keep a step's metrics; returns its peak in GiB."""
        peak = self._memory.restart()
        self.lines.append(metrics)
        self.peak_gib = max(self.peak_gib, peak)
        return peak

    async def on_rollouts(self, rollouts: StepRollouts) -> None:
        """Count the sampled ids."""
        self.num_sampled.append(sum(int(row.sampled_mask.sum()) for row in rows_of(rollouts.groups)))

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Print and keep a step's numbers."""
        print_step(step, metrics, watch=self, name=self.setting)

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
    if arguments.mode == "server":
        options = ["--engine", "vllm", *options]
        transport = WeightTransport(arguments.transport)
        return EngineConfig(kind=EngineKind.STARTED, serve_options=tuple(options), transport=transport)
    return EngineConfig(kind=EngineKind.COLOCATED, vllm_options=tuple(options))


async def run(arguments: argparse.Namespace, folder: Path, output: Path) -> None:
    """One mode, from the engine's start to the proof at the end."""
    policy, initial = load_policy(folder, arguments)
    accelerator = Accelerator(mixed_precision=arguments.mixed_precision)
    started = time.perf_counter()
    config = engine_config(arguments)
    engine = open_engine(config, model=policy, source=folder, output=output, device=accelerator.device, rank=Rank())
    async with open_with_files(config, folder, output) if arguments.through_files else engine as found:
        print(f"engine started in {time.perf_counter() - started:.0f} s", flush=True)
        watch = Watch(device=arguments.device, found=found)
        watch.note_memory("engine started")
        optimizer = OptimizerConfig(learning_rate=arguments.learning_rate)
        training = TrainerConfig(
            optimizer=optimizer, tokens_per_micro_batch=arguments.micro_batch, compile=arguments.compile
        )
        trainer = Trainer(policy, training, accelerator=accelerator)
        collect = make_collector(found, folder, arguments, SETTINGS["single"])
        with MetricsWriter(output / "metrics") as metrics:
            warmed_up = 0
            for name in arguments.settings.split(","):
                num_warmup = int(SETTINGS[name].num_turns != warmed_up)
                warmed_up = SETTINGS[name].num_turns
                collect = make_collector(found, folder, arguments, SETTINGS[name])
                watch.restart(name)
                await train(
                    collect,
                    trainer=trainer,
                    publisher=watch,
                    metrics=metrics,
                    config=LoopConfig(num_steps=num_warmup + arguments.num_steps),
                    observer=watch,
                )
                report(arguments, name, watch, num_warmup=num_warmup)
        numbers = range(10**6, 10**6 + collect.groups_per_step)  # no step has had them
        rows = rows_of(await asyncio.gather(*map(collect.sample, numbers)))
        first = None if initial is None else Trainer(initial, training, accelerator=accelerator)
        show_proof(rows, trainer, first)


def load_policy(folder: Path, arguments: argparse.Namespace) -> tuple[Any, Any | None]:
    """The policy, and a copy of it that stays as it is; None with LoRA, whose base would be on the GPU twice."""
    load = AutoModelForCausalLM.from_pretrained
    if arguments.lora is None:
        return load(folder, dtype=torch.float32), load(folder, dtype=torch.float32)
    from peft import get_peft_model

    return get_peft_model(load(folder, dtype=getattr(torch, arguments.dtype)), make_lora(arguments.lora)), None


@asynccontextmanager
async def open_with_files(config: EngineConfig, folder: Path, output: Path) -> AsyncIterator[RunEngine]:
    """Open the colocated engine with weights through files, as for workers on other machines."""
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    sleep = ["--enable-sleep-mode"] if torch.cuda.is_available() else []
    options = parse_engine_args(["--model", str(folder), *sleep, *config.vllm_options])
    engine = await VllmEngine.start(options, transfer_dir=output)
    try:
        yield RunEngine(engine=engine, publisher=InProcessPublisher(engine), before_update=engine.sleep)
    finally:
        await engine.close()


def make_collector(found: RunEngine, folder: Path, arguments: argparse.Namespace, setting: Setting) -> Collector:
    """Make the collector of the groups of each step."""
    from transformers import AutoTokenizer

    config = RolloutConfig(
        problems_per_step=arguments.problems,
        group_size=arguments.group_size,
        sampling=SamplingParams(**turn_options(arguments)),
        limits=Limits(max_turns=setting.num_turns, timeout_s=90.0),
    )
    renderer = TemplateRenderer(AutoTokenizer.from_pretrained(folder))
    problems = Problems(
        env=lambda number: Words(number, num_turns=setting.num_turns, draw_tool_s=lambda: setting.tool_s)
    )
    sampler = Sampler(engine=found.engine, renderer=renderer, config=config, problems=problems, seed=(arguments.seed,))
    return Collector(sampler, rank=Rank())


def rows_of(groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
    """The rows of all groups."""
    return [row for group in groups for t in group.trajectories for row in export_samples(t.tree, advantage=0.0)]


def print_step(step: int, metrics: Metrics, *, watch: Watch, name: str) -> None:
    """Print and keep a step's numbers."""
    peak = watch.end_step(metrics)
    names = ("reward/mean", "mismatch/k3", "mismatch/max_abs", "train/num_tokens", "train/padding_share")
    shown = [f"{key} {metrics.get(key) or 0:.4g}" for key in names]
    phases = [f"{key.removeprefix('seconds/')} {metrics.get(key) or 0:.2f} s" for key in PHASES]
    rest = f"sleep {watch.sleep_s[-1]:.2f} s", f"peak {peak:.1f} GiB"
    print(f"{name}, step {step + 1}:", *shown, *phases, *rest, sep="  ", flush=True)


PHASES = ("seconds/collect", "seconds/train", "seconds/publish", "seconds/step")


def report(arguments: argparse.Namespace, name: str, watch: Watch, *, num_warmup: int) -> None:
    """Print medians of a setting's steps after those that warm up."""
    lines = watch.lines[num_warmup:]

    def median(values: Sequence[float | None]) -> float:
        return float(np.median([value or 0.0 for value in values]))

    phases = {key.removeprefix("seconds/"): median([line[key] for line in lines]) for key in PHASES}
    sampled = watch.num_sampled[num_warmup:]
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
    print_result(
        arguments.mode,
        name,
        step_s=phases["step"],
        collect_s=phases["collect"],
        train_s=phases["train"],
        k3=k3,
        peak_gib=watch.peak_gib,
        num_ids=lines[-1]["train/num_tokens"],
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
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder = arguments.folder or Path(scratch) / "model"
        save_model(folder, arguments)
        for mode, settings in parts_of(arguments):
            print(f"\n== {mode}: {settings}", flush=True)
            (output := Path(scratch) / mode).mkdir(exist_ok=True)
            command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode, "--settings", settings]
            left_s = arguments.limit_s - (time.perf_counter() - started)
            command += ["--folder", str(folder), "--output", str(output)]
            code, found = run_part(command, max(1.0, min(arguments.timeout_s, left_s)))
            failed += code != 0
            results += found
            log = output / "server.log"
            if code != 0 and log.exists():
                print(log.read_text()[-3000:], flush=True)
    compare(results)
    return failed


def parts_of(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Modes with their settings. TRL takes its tools, and the rows of a pass, when it starts: two processes."""
    settings = arguments.settings.split(",")
    parts: list[tuple[str, str]] = []
    for mode in arguments.modes.split(","):
        with_tools = [name for name in settings if SETTINGS[name].num_turns > 1]
        without = [name for name in settings if name not in with_tools]
        parts += [(mode, ",".join(part)) for part in ([without, with_tools] if mode == TRL else [settings]) if part]
    return parts


def run_part(command: list[str], timeout_s: float) -> tuple[int, list[dict[str, Any]]]:
    """Run a process and print what it prints; returns its exit status, -9 at the time limit, and its results."""
    started = time.perf_counter()
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    limit = threading.Timer(timeout_s, end_group, (process.pid,))
    limit.start()
    results: list[dict[str, Any]] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("RESULT "):
                results.append(json.loads(line.removeprefix("RESULT ")))
        code = process.wait()
    finally:
        limit.cancel()
        end_group(process.pid)
    print(f"exit status {code} after {time.perf_counter() - started:.0f} s", flush=True)
    return code, results


def compare(results: Sequence[dict[str, Any]]) -> None:
    """Print a table of all sides, with ratios to TRL's seconds and memory."""
    theirs = {result["setting"]: result for result in results if result["side"] == TRL}
    print(
        f"\n{'setting':12}{'side':12}{'step s':>8}{'collect':>9}{'GiB':>7}{'k3':>10}{'step / TRL':>12}{'GiB / TRL':>11}"
    )
    for result in sorted(results, key=lambda each: list(SETTINGS).index(each["setting"])):
        other = theirs.get(result["setting"])
        ratios = f"{'-':>12}{'-':>11}"
        if other is not None:
            memory = result["peak_gib"] / other["peak_gib"] if other["peak_gib"] else float("nan")
            ratios = f"{result['step_s'] / other['step_s']:>12.2f}{memory:>11.2f}"
        k3 = f"{result['k3']:.2e}" if "k3" in result else "-"
        print(
            f"{result['setting']:12}{result['side']:12}{result['step_s']:>8.2f}{result['collect_s']:>9.2f}"
            f"{result['peak_gib']:>7.1f}{k3:>10}{ratios}",
            flush=True,
        )


def end_group(pid: int) -> None:
    """Kill the processes that a mode has left."""
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
    parser.add_argument("--turns", choices=("ragged", "even"), default="ragged", help="geometric lengths, or all equal")
    parser.add_argument("--tokens", type=int, help="of each turn, or their mean; 256 on a GPU, 24 on a CPU")
    parser.add_argument("--lora", type=int, help="train adapters of this rank over a base in the engine's dtype")
    parser.add_argument("--learning-rate", type=float, help="1e-3 for tiny, else 1e-4")
    parser.add_argument("--dtype", help="of the engine; bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), help="of the trainer; bf16 on a GPU")
    parser.add_argument("--micro-batch", type=int, help="ids in a pass; left out: chosen by the trainer")
    parser.add_argument("--trl-rows", type=int, help="TRL's rows in a pass; 32 for a single turn, 16 with tools")
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="vLLM's share")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, help="without torch.compile; so on a CPU")
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
    if options.mode == TRL:
        import grpo_trl

        grpo_trl.run(options, options.settings.split(","))
        sys.stdout.flush()
        os._exit(0)  # vLLM's and TRL's threads may hold up a regular exit
    asyncio.run(run(options, options.folder, options.output))
