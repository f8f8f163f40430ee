"""Step time with vLLM in the trainers' own processes: one process on one GPU against two on two, in one run.

    PYTHONPATH=src python bench/colocated.py --shape 0.6b                                      # two GPUs
    export OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind          # without GPUs
    PYTHONPATH=src python bench/colocated.py --shape tiny --problems 8 --max-tokens 32 --steps 2

Each run is `unbroken train` on a random Qwen3 with the same prompts, seeds, steps and batch over all processes, started
by `torchrun`; a random model ends no turn, so each completion has `--max-tokens` ids. `--kinds` also has one engine
over both GPUs, LoRA whose engines get merged weights or the adapter alone, and TRL with vLLM in both processes
(`two-trl`). The first step, with its compilations, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from grpo_steps import VARIABLE
from grpo_task import ENGINE_SIZES, SHAPES, save_model

TRL = "two-trl"
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "two": (2, ()),
    "two-shared": (2, ("--engine.processes-per-engine=2",)),
    "two-lora-merged": (2, ("--lora.rank=16",)),
    "two-lora-adapter": (2, ("--lora.rank=16", "--trainer.lora-updates=adapter")),
    "one-lora-adapter": (1, ("--lora.rank=16", "--trainer.lora-updates=adapter")),
    TRL: (2, ()),
}
"""Processes, and options."""
_NUMBERS = ("seconds/step", "seconds/collect", "seconds/train", "seconds/publish", "mismatch/k3", "weights/num_bytes")
GPU_MEMORY = 0.5
"""vLLM's share."""
_MIN_S = 30.0
_REWARD = '''
def share_of_a(completions):
    """The share of words that begin with an a."""
    return [text.count("a") / max(1, text.count("a") + text.count("b")) for text in completions]
'''


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def vllm_options(arguments: argparse.Namespace, *, eager: bool) -> list[str]:
    """The options of all engines; `eager` leaves compilation out."""
    options = ["--dtype", arguments.dtype, *ENGINE_SIZES]
    if not torch.cuda.is_available():
        return [*options, "--enforce-eager", "--block-size", "32"]
    return [*options, "--gpu-memory-utilization", str(GPU_MEMORY), *(["--enforce-eager"] if eager else [])]


def write_recipe(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write model, prompts, reward and settings."""
    model = arguments.folder or folder / "model"
    save_model(model, arguments)
    prompts = ({"prompt": f"Say something about number {number}."} for number in range(4096))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "rewards.py").write_text(_REWARD)
    settings: dict[str, Any] = {
        "model": str(model),
        "data.file": "prompts.jsonl",
        "loop.num_steps": arguments.steps,
        "rollouts.problems_per_step": arguments.problems,
        "rollouts.group_size": 8,
        "rollouts.sampling.max_tokens": arguments.max_tokens,
        "engine.kind": "colocated",
        "precision": "bfloat16" if torch.cuda.is_available() else "float32",
        "trainer.numerics": "fast",
        "checkpoints.every": 1000,
        "rollout_log.groups": 0,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    recipe = folder / "recipe.toml"
    recipe.write_text("\n".join([*lines, "", "[[rewards]]", 'function = "rewards.py:share_of_a"']) + "\n")
    return recipe


def our_command(kind: str, recipe: Path, arguments: argparse.Namespace) -> list[str]:
    """The command of a kind of ours, for `torchrun`."""
    vllm = vllm_options(arguments, eager=kind in arguments.eager.split(","))
    output = f"--output={recipe.parent / kind}"
    options = [output, f"--engine.options={json.dumps(vllm)}", *KINDS[kind][1]]
    return ["-m", "unbroken", "train", str(recipe), *options]


def trl_command(recipe: Path, arguments: argparse.Namespace) -> list[str]:
    """TRL's command with the same model, rows and share of the memory."""
    on_gpu = torch.cuda.is_available()
    model = arguments.folder or recipe.parent / "model"
    (output := recipe.parent / TRL).mkdir()
    return [
        str(Path(__file__).with_name("grpo.py")), "--mode=trl", "--settings=single", "--turns=even",
        f"--shape={arguments.shape}",
        f"--device={'cuda' if on_gpu else 'cpu'}", f"--num-steps={arguments.steps - 1}",
        f"--problems={arguments.problems}", f"--tokens={arguments.max_tokens}", f"--gpu-memory={GPU_MEMORY}",
        f"--folder={model}", f"--output={output}",
    ]  # fmt: skip


def run(kind: str, command: list[str], folder: Path, limit_s: float) -> list[dict[str, Any]]:
    """Train, show what it prints, and return the lines of its metrics; empty if it failed."""
    output = folder / kind
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(KINDS[kind][0]), "--master_port", str(port)]
    command = [sys.executable, *launcher, *command]
    say(f"{kind}: {' '.join(command[1:])}")
    began = time.monotonic()
    log = folder / f"{kind}.log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            command,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, VARIABLE: str(folder / f"{kind}-steps")},
        )
        shown = 0
        try:
            while process.poll() is None and time.monotonic() - began < limit_s:
                time.sleep(1)
                shown = _show_steps(kind, output, shown)
        finally:
            if process.poll() is None:
                say(f"{kind}: stopped after {limit_s:g} s")
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    _show_steps(kind, output, shown)
    say(f"{kind}: exit status {process.wait()} after {time.monotonic() - began:.0f} s")
    if process.returncode:
        print(_without_progress(log.read_text(errors="replace"))[-30_000:], flush=True)
    return _read(output)


def _without_progress(text: str) -> str:
    """A log without progress bars and warnings, which would hide why a process has failed."""
    lines = re.split("[\r\n]+", text)
    return "\n".join(line for line in lines if line and "%|" not in line and "WARNING" not in line)


def _read(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _show_steps(kind: str, output: Path, shown: int) -> int:
    lines = _read(output)
    for line in lines[shown:]:
        numbers = ", ".join(f"{name} {line[name]:.4g}" for name in _NUMBERS if line.get(name) is not None)
        say(f"{kind}, step {line['step']}: {numbers}")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--problems", type=int, default=64, help="of a step, over all processes; 8 completions each")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--kinds", default="one,two", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--eager", default="", help="kinds whose vLLM does not compile, and starts sooner")
    parser.add_argument("--folder", type=Path, help="keep the model here, and use it again")
    parser.add_argument("--limit-s", type=float, default=150.0, help="longest duration of a run")
    parser.add_argument("--total-s", type=float, default=3600.0, help="longest duration of all runs")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.total_s
    with tempfile.TemporaryDirectory(prefix="bench-colocated-") as folder:
        recipe = write_recipe(Path(folder), arguments)
        found = {}
        for kind in arguments.kinds.split(","):
            if (left_s := until - time.monotonic()) < _MIN_S:
                say(f"{kind}: left out, no time")
                continue
            command = trl_command(recipe, arguments) if kind == TRL else our_command(kind, recipe, arguments)
            lines = run(kind, command, Path(folder), min(arguments.limit_s, left_s))[1:]
            if lines:
                found[kind] = {name: statistics.median(line.get(name) or 0.0 for line in lines) for name in _NUMBERS}
    print(f"{'median of the steps':20}" + "".join(f"{name:>20}" for name in _NUMBERS))
    for kind, numbers in found.items():
        print(f"{kind:20}" + "".join(f"{numbers[name]:20.4g}" for name in _NUMBERS))
    if {"one", "two"} <= found.keys():
        print(f"two processes take {found['two']['seconds/step'] / found['one']['seconds/step']:.2f} of one's step")


if __name__ == "__main__":
    main()
