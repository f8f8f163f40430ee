"""Sampling while training against one after the other: seconds a step, idle shares, and what is cancelled.

    OMP_NUM_THREADS=1 python bench/overlap.py                                        # a timed engine on a CPU
    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 python bench/overlap.py --engine vllm --shape tiny --limit-s 300
    python bench/overlap.py --device cuda --shape 0.6b --tasks one_turn --limit-s 560     # vLLM on GPU 1, trainer on 0

Two tasks: `one_turn`, whose lengths have a long tail, and `four_turns`, with a tool of 20 to 200 ms between the turns.
Each is trained synchronously (staleness 0), then with `max_staleness` 1, 2 and 4, on the same groups; with `--samplers
2`, rollouts run in two processes of their own, and with `0,2` in either way. `idle` is the share of the time in which
the trainer makes no step, and in which nothing is sampled. On a CPU the engine by default only waits as long as
sampling would take (each sampler has its own), and a step at least `--train-s`; with `--engine vllm` both are real. Of
each case the first steps do not count: `--num-warmup`, or one more than the staleness, if that is more; nor do steps at
the end, for which all groups are sampled already. It prints as it goes, and a table at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_task import CONTEXT_LENGTH, SHAPES, save_model
from overlap_task import TASKS, TaskOrder, TaskSource, TimedEngine, sample_order
from unbroken.engines.base import Engine
from unbroken.engines.http import HttpEngine
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.process.channel import Hello
from unbroken.rollout.process.pool import SamplerPool
from unbroken.rollout.process.worker import serve_orders
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.config import EngineConfig, EngineKind, WeightTransport
from unbroken.runs.engines import RunEngine, open_engine, start_server
from unbroken.runs.processes import Rank
from unbroken.training.config import LoopConfig, OldLogprobs, OptimizerConfig, TrainerConfig
from unbroken.training.loop import train
from unbroken.training.loss_config import Correction, CorrectionKind
from unbroken.training.metrics.stats import StepStats
from unbroken.training.metrics.writer import Metrics
from unbroken.training.observer import RunObserver
from unbroken.training.trainer import Trainer
from unbroken.types import InFlight
from unbroken.weights.base import InProcessPublisher, WeightUpdate

COLUMNS = (
    "task", "N", "S", "steps", "s/step", "x", "groups/s", "ids/s", "idle train", "idle sampl", "stale", "max",
    "cancelled", "ids", "k3",
)  # fmt: skip
KEY = "UNBROKEN_SAMPLER_KEY"
ROW = "{:>10} {:>3} {:>2} {:>5} {:>7} {:>5} {:>8} {:>7} {:>10} {:>10} {:>6} {:>3} {:>9} {:>6} {:>8}"


class TimedTrainer(Trainer):
    """A trainer whose step takes at least `least_s`."""

    least_s = 0.0

    def step(self, units: Sequence[Any]) -> StepStats:
        """See `Trainer`."""
        started = time.perf_counter()
        stats = super().step(units)
        time.sleep(max(0.0, self.least_s - (time.perf_counter() - started)))
        return stats


class CaseEndedError(Exception):
    """The case has its steps, or has had its share of the time."""


@dataclass(kw_only=True)
class Watch(RunObserver):
    """The steps of one case, and who was idle when."""

    task: str
    samplers: int = 0
    max_staleness: int
    num_warmup: int
    num_steps: int
    """Those that count."""
    until_s: float
    """When to stop, on the clock of `time.perf_counter`."""
    lines: list[Metrics] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    """When each step ended."""

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.task}{f', {self.samplers} samplers' if self.samplers else ''}, staleness {self.max_staleness}"

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Keep and print a step's numbers."""
        self.lines.append(metrics)
        self.ends_s.append(time.perf_counter())
        names = (
            "seconds/collect", "seconds/train", "seconds/publish", "seconds/step", "staleness/mean", "mismatch/k3",
            "train/shared_share",
        )  # fmt: skip
        shown = [f"{name.rpartition('/')[2]} {metrics.get(name) or 0:.3g}" for name in names]
        print(f"{self.name}, step {step + 1}:", *shown, sep="  ", flush=True)
        if len(self.lines) == self.num_warmup + self.num_steps or time.perf_counter() > self.until_s:
            raise CaseEndedError

    def report(self, base_s: float | None, *, num_groups: int) -> tuple[float, tuple[Any, ...]]:
        """Seconds a step, and the row of the table."""
        counted = self.lines[self.num_warmup :]
        if not counted:
            return 0.0, (self.task, self.samplers, self.max_staleness, 0, *["-"] * (len(COLUMNS) - 4))
        total_s = self.ends_s[-1] - self.ends_s[self.num_warmup - 1]
        step_s = total_s / len(counted)

        def add(name: str) -> float:
            return sum(line.get(name) or 0.0 for line in counted)

        waits_s = add("seconds/collect") + (0.0 if self.max_staleness else add("seconds/publish"))
        trained_s, unsampled_s = total_s - waits_s, total_s - add("seconds/collect")
        if self.max_staleness:
            unsampled_s = total_s * float(np.mean([line.get("idle/sampler") or 0.0 for line in counted]))
        row = (
            self.task, self.samplers, self.max_staleness, len(counted),
            f"{step_s:.3f}", f"{(base_s or step_s) / step_s:.2f}",
            f"{num_groups / step_s:.2f}", f"{add('rollout/num_sampled_tokens') / total_s:.0f}",
            f"{1 - trained_s / total_s:.0%}", f"{unsampled_s / total_s:.0%}",
            f"{np.mean([line.get('staleness/mean') or 0.0 for line in counted]):.2f}",
            int(max(line.get("staleness/max") or 0 for line in counted)),
            int(add("sampler/num_cancelled") + add("sampler/num_dropped")),
            int(add("sampler/num_cancelled_ids") + add("sampler/num_dropped_ids")),
            f"{np.median([line.get('mismatch/k3') or 0.0 for line in counted]):.1e}",
        )  # fmt: skip
        return step_s, row


async def run_case(
    watch: Watch, source: TaskSource, trainer: Trainer, sampler: RunEngine, arguments: argparse.Namespace
) -> None:
    """Train one task with one staleness."""
    publisher = sampler.publisher
    assert publisher is not None, "this process has it"
    config = LoopConfig(
        # With staleness, at the end of a run nothing is sampled beside the steps, which then take less time.
        num_steps=watch.num_warmup + watch.num_steps + (watch.max_staleness + 1 if watch.max_staleness else 0),
        max_staleness=watch.max_staleness,
        max_drops=arguments.max_drops,
        publish_beside_step=not arguments.publish_between_steps,
    )
    try:
        await train(
            source,
            trainer=trainer,
            publisher=publisher,
            metrics=None,
            config=config,
            observer=watch,
        )
    except CaseEndedError:
        print(f"  the case has ended, after {len(watch.lines) - watch.num_warmup} steps that count", flush=True)
        if sampler.servers or sampler.engine.policy_version < trainer.policy_version:
            # The last publication was cancelled with the case.
            await publisher.publish(trainer.named_weights(), policy_version=trainer.policy_version)


async def run(arguments: argparse.Namespace, folder: Path, scratch: Path) -> None:
    """All cases, with one engine and one trainer."""
    started = time.perf_counter()
    pools = {number: await start_pool(number, arguments, folder, scratch) for number in arguments.samplers if number}
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    accelerator = Accelerator(
        cpu=arguments.device == "cpu", mixed_precision="bf16" if arguments.device == "cuda" else None
    )
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-5),
        old_logprobs=OldLogprobs.RECOMPUTE,
        correction=Correction(kind=CorrectionKind.TIS),
    )
    trainer = TimedTrainer(policy, config, accelerator=accelerator)
    trainer.least_s = arguments.train_s if arguments.engine == "timed" else 0.0
    renderer = TemplateRenderer(AutoTokenizer.from_pretrained(folder))
    cases = [
        (task, number, staleness)
        for task in arguments.tasks.split(",")
        for number in arguments.samplers
        for staleness in arguments.staleness
    ]
    rows: list[tuple[Any, ...]] = []
    opening = open_sampler(arguments, folder, scratch, policy, accelerator, list(pools.values()))
    async with opening as found, AsyncExitStack() as stack:
        for pool in pools.values():
            stack.push_async_callback(pool.close)
            await pool.open(found.servers)
        print(f"ready after {time.perf_counter() - started:.0f} s", flush=True)
        base_s: dict[tuple[str, int], float] = {}
        for index, (name, number, staleness) in enumerate(cases):
            left_s = arguments.limit_s - (time.perf_counter() - arguments.started)
            watch = Watch(
                task=name,
                samplers=number,
                max_staleness=staleness,
                num_warmup=max(arguments.num_warmup, staleness + 1),
                num_steps=arguments.num_steps,
                until_s=time.perf_counter() + left_s / (len(cases) - index),
            )
            source = TaskSource(
                sample_order=partial(sample_elsewhere, pools[number])
                if number
                else partial(sample_order, engine=found.engine, renderer=renderer),
                task=TASKS[name].scaled(arguments.length_factor),
                groups_per_step=arguments.problems,
                group_size=arguments.group_size,
                seed=0,
            )
            await run_case(watch, source, trainer, found, arguments)
            step_s, row = watch.report(base_s.get((name, number)), num_groups=arguments.problems)
            if staleness == 0:
                base_s[name, number] = step_s
            rows.append(row)
            print(ROW.format(*COLUMNS), ROW.format(*map(str, row)), sep="\n", flush=True)
    print(
        f"\n{arguments.engine}, {arguments.shape}, {arguments.device}: "
        f"{arguments.problems} groups of {arguments.group_size}"
    )
    print(ROW.format(*COLUMNS), *(ROW.format(*map(str, row)) for row in rows), sep="\n", flush=True)


@asynccontextmanager
async def open_sampler(
    arguments: argparse.Namespace,
    folder: Path,
    scratch: Path,
    policy: Any,
    accelerator: Accelerator,
    pools: Sequence[SamplerPool],
) -> AsyncIterator[RunEngine]:
    """A timed engine, or a vLLM server that gets weights by broadcast."""
    if arguments.engine == "timed":
        timed = make_timed(policy.config.vocab_size, arguments.id_s)
        yield RunEngine(engine=timed, publisher=TellingPublisher(timed, pools))
        return
    options = ["--dtype", "bfloat16" if arguments.device == "cuda" else "float32"]
    options += ["--max-model-len", str(CONTEXT_LENGTH), "--max-num-seqs", "512"]
    options += (
        ["--gpu-memory-utilization", "0.7"] if arguments.device == "cuda" else ["--block-size", "32", "--enforce-eager"]
    )
    command = [sys.executable, "-m", "unbroken", "serve", "--model", str(folder), "--port", "0", "--engine", "vllm"]
    command += ["--exit-with-parent", *options]
    if arguments.device == "cuda":
        command = ["env", f"CUDA_VISIBLE_DEVICES={arguments.server_gpu}", *command]
    log = Path(arguments.log or scratch / "server.log")
    try:
        async with start_server(command, log, wait_s=arguments.limit_s) as url:
            config = EngineConfig(
                kind=EngineKind.SERVER, urls=(url,), transport=WeightTransport.BROADCAST,
                in_flight=InFlight(arguments.in_flight), reuse_kv=arguments.reuse_kv,
            )  # fmt: skip
            opening = open_engine(
                config, model=policy, source=folder, output=scratch, device=accelerator.device, rank=Rank()
            )
            async with opening as found:
                yield found
    except BaseException:
        await asyncio.to_thread(print_end, log)
        raise


def make_timed(vocab_size: int, id_s: float) -> TimedEngine:
    """An engine that only takes the time."""
    return TimedEngine(context_length=CONTEXT_LENGTH, vocab_size=vocab_size, first_s=0.02, id_s=id_s)


class TellingPublisher(InProcessPublisher):
    """Tells the timed engines of samplers which version they have."""

    def __init__(self, engine: Engine, pools: Sequence[SamplerPool]) -> None:
        super().__init__(engine)
        self._pools = pools

    async def publish(self, named_parameters: Iterable[tuple[str, Any]], *, policy_version: int) -> WeightUpdate:
        """See `WeightPublisher`."""
        update = await super().publish(named_parameters, policy_version=policy_version)
        for pool in self._pools:
            pool.tell("version", policy_version)
        return update


def print_end(log: Path) -> None:
    """Print the end of the server's log."""
    print(f"the server's log ends with:\n{log.read_text()[-3000:] if log.exists() else ''}", flush=True)


async def sample_elsewhere(pool: SamplerPool, order: TaskOrder) -> TrajectoryGroup:
    """Have a sampler sample a group."""
    return await pool.sample(order, name=f"group {order.number}")


async def start_sampler(words: Sequence[str], key: str, name: str, log: Path) -> asyncio.subprocess.Process:
    """Start this program as a sampler."""
    environment = {**os.environ, KEY: key, "SAMPLER_NAME": name, "CUDA_VISIBLE_DEVICES": ""}
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable, __file__, *words, stdout=output, stderr=output, env=environment, start_new_session=True
        )


async def start_pool(number: int, arguments: argparse.Namespace, folder: Path, scratch: Path) -> SamplerPool:
    """Start so many samplers."""
    listener, key = socket.create_server(("127.0.0.1", 0)), secrets.token_hex()
    words = ["--serve-orders", str(listener.getsockname()[1]), "--folder", str(folder)]
    words += ["--engine", arguments.engine, "--id-s", str(arguments.id_s)]
    return await SamplerPool.start(
        listener,
        key=key,
        identity={},
        logs={f"{number}-{k}": scratch / f"sampler-{number}-{k}.log" for k in range(number)},
        start_local=partial(start_sampler, words, key),
    )


class TaskWork:
    """Samples orders of tasks in a sampler."""

    def __init__(self, engine: Any, renderer: TemplateRenderer) -> None:
        self._engine = engine
        self.sample = partial(sample_order, engine=engine, renderer=renderer)

    def tell(self, news: int) -> None:
        """See `Work`: the newest version, for a timed engine."""
        self._engine.set_version(news)


@asynccontextmanager
async def open_work(arguments: argparse.Namespace, urls: Sequence[str]) -> AsyncIterator[TaskWork]:
    """Connect a sampler to the server, or make its own timed engine."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    engine: Any = await HttpEngine.connect(urls) if urls else make_timed(len(tokenizer), arguments.id_s)
    try:
        yield TaskWork(engine, TemplateRenderer(tokenizer))
    finally:
        await engine.close()


def main() -> None:
    """Read the options, make the model and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine", choices=("timed", "vllm"), help="vllm with cuda, otherwise timed")
    parser.add_argument("--server-gpu", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", default="float32", help="of the model's files")
    parser.add_argument("--tasks", default="one_turn,four_turns")
    parser.add_argument("--staleness", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 2, 4])
    parser.add_argument(
        "--samplers",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[0],
        help="processes that sample: 0, 2, or 0,2 for one after the other",
    )
    parser.add_argument(
        "--serve-orders", type=int, metavar="PORT", help="be a sampler of the program that listens there"
    )
    parser.add_argument("--problems", type=int, default=16, help="groups in a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=12)
    parser.add_argument("--num-warmup", type=int, default=2)
    parser.add_argument("--max-drops", type=int, default=LoopConfig(num_steps=1).max_drops)
    parser.add_argument("--publish-between-steps", action="store_true")
    parser.add_argument("--in-flight", choices=tuple(InFlight), default="pause")
    parser.add_argument("--reuse-kv", action="store_true")
    parser.add_argument("--length-factor", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--train-s", type=float, default=2.0, help="for the timed engine: the least seconds of a step")
    parser.add_argument("--id-s", type=float, default=0.004, help="for the timed engine: seconds for an id")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="when the last case stops")
    parser.add_argument("--folder", type=Path, help="keep the model here, and use it again")
    parser.add_argument("--log", help="where the server's log goes")
    arguments = parser.parse_args()
    arguments.started = time.perf_counter()
    arguments.engine = arguments.engine or ("vllm" if arguments.device == "cuda" else "timed")
    if arguments.serve_orders:
        address, opening = ("127.0.0.1", arguments.serve_orders), partial(open_work, arguments)
        key, hello = os.environ.pop(KEY), Hello(os.environ["SAMPLER_NAME"], {})
        asyncio.run(serve_orders(address, key=key, hello=hello, open_work=opening, wait_s=60.0))
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast gains nothing here
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch) / "model"
        save_model(folder, arguments)
        asyncio.run(run(arguments, folder, Path(scratch)))


if __name__ == "__main__":
    main()
