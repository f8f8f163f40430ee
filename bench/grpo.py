"""GRPO with generation in a server and in the trainer's process: memory, seconds, tokens/s and mismatch of each.

    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 python bench/grpo.py                  # a tiny model on a CPU
    python bench/grpo.py --shape 0.6b --device cuda                                  # on one GPU

Both modes train the same random Qwen3 on the same problems with the same loop, each in its own process. The reward is
the share of words that begin with an a, as half of the vocabulary does. `server` is `unbroken serve` with vLLM, weights
through files or by broadcast; `colocated` is vLLM that sleeps in each step, weights through memory. After the last step
the engine's rollouts are scored by the trainer and by the run's first model: they must fit the trainer.
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
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from unbroken.demo.tiny_model import build_tokenizer
from unbroken.ledger.export import export_samples
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.env import Continue, Done, EnvStart, Outcome, Reply
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
from unbroken.training.trainer import Trainer
from unbroken.types import SamplingParams, TrainingSample
from unbroken.weights.in_process import InProcessPublisher

SHAPES = {
    "tiny": {
        "vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128,
    },
    "0.6b": {
        "vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    },
}  # fmt: skip
MODES = {"server": EngineKind.STARTED, "colocated": EngineKind.COLOCATED}
CONTEXT_LENGTH = 2048


class Words:
    """Two turns; the reward is the share of words that begin with an a."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._num_turns = 0

    async def start(self) -> EnvStart:
        """See `Env`."""
        return EnvStart(messages=[{"role": "user", "content": f"Say something about number {self._number}."}])

    async def step(self, reply: Reply) -> Outcome:
        """See `Env`."""
        self._num_turns += 1
        return Done() if self._num_turns == 2 else Continue(messages=[{"role": "user", "content": "Go on."}])

    async def reward(self, messages: Sequence[Any]) -> float:
        """See `Env`."""
        text = "".join(message["content"] for message in messages if message["role"] == "assistant")
        good, bad = text.count("a"), text.count("b")
        return good / max(1, good + bad)

    async def close(self) -> None:
        """See `Env`."""


@dataclass(kw_only=True)
class Watch:
    """Measures what metrics do not show: how long the engine takes to fall asleep, and the GPU memory in use."""

    device: str
    found: RunEngine
    gib: dict[str, float] = field(default_factory=dict)
    """Used on the whole GPU, at the last step's points."""
    sleep_s: list[float] = field(default_factory=list)
    num_sampled: list[int] = field(default_factory=list)

    def note_memory(self, when: str) -> None:
        """Note the GPU memory in use."""
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            self.gib[when] = (total - free) / 2**30

    async def sleep(self) -> None:
        """`before_step` of the loop."""
        self.note_memory("before the step")
        started = time.perf_counter()
        if self.found.before_step is not None:
            await self.found.before_step()
        self.sleep_s.append(time.perf_counter() - started)
        self.note_memory("asleep" if self.found.before_step is not None else "before the step")

    async def publish(self, named_parameters: Any, *, policy_version: int) -> Any:
        """Publish with the run's publisher."""
        self.note_memory("after the step")
        assert self.found.publisher is not None
        update = await self.found.publisher.publish(named_parameters, policy_version=policy_version)
        self.note_memory("awake again")
        return update


def save_model(folder: Path, arguments: argparse.Namespace) -> None:
    """Write a random model and its tokenizer: the demo's, with one word for each further id."""
    shape = SHAPES[arguments.shape]
    tokenizer = build_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab, first = backend["model"]["vocab"], len(tokenizer)
    vocab.update({f"{'ab'[number % 2]}{number:06}": number for number in range(first, shape["vocab_size"])})
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).to(getattr(torch, arguments.dtype)).save_pretrained(folder)


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The same options of vLLM in both modes."""
    options = ["--dtype", arguments.dtype, "--max-model-len", str(CONTEXT_LENGTH), "--max-num-seqs", "256"]
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
    initial, policy = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    accelerator = Accelerator(mixed_precision=arguments.mixed_precision)
    started = time.perf_counter()
    config = engine_config(arguments)
    engine = open_engine(config, model=policy, source=folder, output=output, device=accelerator.device, rank=Rank())
    async with open_with_files(config, folder, output) if arguments.through_files else engine as found:
        print(f"engine started in {time.perf_counter() - started:.0f} s", flush=True)
        watch = Watch(device=arguments.device, found=found)
        watch.note_memory("engine started")
        collect = make_collector(found, folder, arguments)
        optimizer = OptimizerConfig(learning_rate=arguments.learning_rate)
        training = TrainerConfig(optimizer=optimizer, tokens_per_micro_batch=arguments.micro_batch)
        trainer = Trainer(policy, training, accelerator=accelerator)

        async def collect_and_count() -> list[TrajectoryGroup]:
            groups = await collect()
            watch.num_sampled.append(sum(int(row.sampled_mask.sum()) for row in rows_of(groups)))
            return groups

        lines: list[Metrics] = []
        with MetricsWriter(output / "metrics") as metrics:
            await train(
                collect_and_count,
                trainer=trainer,
                publisher=watch,
                metrics=metrics,
                config=LoopConfig(num_steps=arguments.num_steps),
                on_step=lambda step, metrics: lines.append(print_step(step, metrics, watch)),
                before_step=watch.sleep,
            )
        report(arguments, lines, watch)
        rows = rows_of(await collect())
        show_proof(rows, trainer, Trainer(initial, training, accelerator=accelerator))


@asynccontextmanager
async def open_with_files(config: EngineConfig, folder: Path, output: Path) -> AsyncIterator[RunEngine]:
    """Open the colocated engine with weights through files, as for workers on other machines."""
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    sleep = ["--enable-sleep-mode"] if torch.cuda.is_available() else []
    options = parse_engine_args(["--model", str(folder), *sleep, *config.vllm_options])
    engine = await VllmEngine.start(options, transfer_dir=output)
    try:
        yield RunEngine(engine=engine, publisher=InProcessPublisher(engine), before_step=engine.sleep)
    finally:
        await engine.close()


def make_collector(found: RunEngine, folder: Path, arguments: argparse.Namespace) -> Collector:
    """Make the collector of the groups of each step."""
    from transformers import AutoTokenizer

    config = RolloutConfig(
        problems_per_step=arguments.problems,
        group_size=arguments.group_size,
        sampling=SamplingParams(max_tokens=arguments.tokens),
        limits=Limits(max_turns=2, timeout_s=90.0),
    )
    renderer = TemplateRenderer(AutoTokenizer.from_pretrained(folder))
    problems = Problems(env=Words)
    sampler = Sampler(engine=found.engine, renderer=renderer, config=config, problems=problems, seed=(arguments.seed,))
    return Collector(sampler, rank=Rank())


def rows_of(groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
    """The rows of all groups."""
    return [row for group in groups for t in group.trajectories for row in export_samples(t.tree, advantage=0.0)]


def print_step(step: int, metrics: Metrics, watch: Watch) -> Metrics:
    """Print a step's numbers, and return them."""
    names = ("reward/mean", "mismatch/k3", "mismatch/max_abs", "train/num_tokens")
    shown = [f"{name} {metrics.get(name) or 0:.4g}" for name in names]
    phases = [f"{name.removeprefix('seconds/')} {metrics.get(name) or 0:.2f} s" for name in PHASES]
    print(f"step {step + 1}:", *shown, *phases, f"sleep {watch.sleep_s[-1]:.2f} s", sep="  ", flush=True)
    return metrics


PHASES = ("seconds/collect", "seconds/train", "seconds/publish", "seconds/step")


def report(arguments: argparse.Namespace, lines: Sequence[Metrics], watch: Watch) -> None:
    """Print medians of the steps after the first, which compiles and warms up."""

    def median(values: Sequence[float | None]) -> float:
        return float(np.median([value or 0.0 for value in values[1:] or values]))

    phases = {name.removeprefix("seconds/"): median([line[name] for line in lines]) for name in PHASES}
    generated = median([n / (line["seconds/collect"] or 1) for n, line in zip(watch.num_sampled, lines, strict=True)])
    trained = median([(line["train/num_tokens"] or 0) / (line["seconds/train"] or 1) for line in lines])
    print(f"\n{arguments.mode}, {arguments.shape}, {arguments.device}, {arguments.dtype}: medians of the later steps")
    print("seconds:", *(f"{name} {value:.3f}" for name, value in phases.items()), f"sleep {median(watch.sleep_s):.3f}")
    print(f"generated {generated:,.0f} ids/s, trained on {trained:,.0f} ids/s (of all ids of the rows)")
    num_bytes = lines[-1]["weights/num_bytes"] or 0
    print(f"an update: {num_bytes / 2**20:,.0f} MiB in {phases['publish']:.3f} s")
    worst = max(line["mismatch/k3"] or 0.0 for line in lines)
    print(f"mismatch/k3 at most {worst:.3g}, median {median([line['mismatch/k3'] for line in lines]):.3g}")
    if watch.gib:
        print("GiB used on the GPU:", ", ".join(f"{when} {gib:.1f}" for when, gib in watch.gib.items()), flush=True)


def show_proof(rows: list[TrainingSample], trainer: Trainer, first: Trainer) -> None:
    """Check which weights the engine has: k3 of its last rollouts against the trained and the first weights."""
    trained, begun = (mismatch_of_rows(rows, of.logprobs(rows)) for of in (trainer, first))
    for name, found in (("trained", trained), ("first", begun)):
        print(f"its last rollouts against the {name} weights: k3 {found.k3:.3g}, max |difference| {found.max_abs:.3g}")
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
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder = Path(scratch) / "model"
        save_model(folder, arguments)
        for mode in arguments.modes.split(","):
            print(f"\n== {mode}", flush=True)
            command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode, "--folder", scratch]
            process = subprocess.Popen(command, start_new_session=True)
            try:
                failed += process.wait(arguments.timeout_s) != 0
            except subprocess.TimeoutExpired:
                print(f"{mode} took more than {arguments.timeout_s} s", flush=True)
                failed += 1
            finally:
                end_group(process.pid)
            log = Path(scratch) / mode / "server.log"
            if failed and log.exists():
                print(log.read_text()[-3000:])
    return failed


def end_group(pid: int) -> None:
    """Kill the processes that a mode has left."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--num-steps", type=int, default=6)
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, help="of each of the two turns; 128 on a GPU, 24 on a CPU")
    parser.add_argument("--learning-rate", type=float, help="1e-4 for 0.6b, 1e-3 for tiny")
    parser.add_argument("--dtype", help="of the engine; bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), help="of the trainer; bf16 on a GPU")
    parser.add_argument("--micro-batch", type=int, default=8_192)
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="vLLM's share")
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, help="without torch.compile; so on a CPU")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one mode")
    transports = [transport.value for transport in WeightTransport]
    parser.add_argument("--transport", choices=transports, default="files", help="of weights to the server")
    parser.add_argument("--through-files", action="store_true", help="weights of the colocated engine")
    parser.add_argument("--scratch", help="folder for the model and the server's weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    defaults = {
        "tokens": 128 if on_gpu else 24,
        "learning_rate": 1e-4 if arguments.shape == "0.6b" else 1e-3,
        "dtype": "bfloat16" if on_gpu else "float32",
        "mixed_precision": "bf16" if on_gpu else "no",
        "eager": not on_gpu,
    }
    return argparse.Namespace(**{**vars(arguments), **defaults, **given})


if __name__ == "__main__":
    options = parse_arguments()
    if options.mode is None:
        sys.exit(run_modes(options))
    (options.folder / options.mode).mkdir()
    asyncio.run(run(options, options.folder / "model", options.folder / options.mode))
