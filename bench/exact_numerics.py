"""What exact numerics give and cost: share of equal bits, k3, seconds of sampling, training and a whole step.

    python bench/exact_numerics.py --shape 0.6b                              # vLLM, on a Hopper GPU
    python bench/exact_numerics.py --shape 8b --lora-rank 16 --rows 64
    python bench/exact_numerics.py --shape 8b --optimizer adamw_8bit --rows 64
    python bench/exact_numerics.py --shape 0.6b --engine-options=--tensor-parallel-size=2        # vLLM on two GPUs
    python bench/exact_numerics.py --shape tiny --engine embedded --rows 8 --tokens 16      # on a CPU
    python bench/exact_numerics.py --shape tiny --engine colocated --rows 8 --tokens 16 --kinds fast,fast    # plumbing

Engine and trainer are those of a run (`unbroken.runs.numerics.open_pair`), on a random Qwen3 that is written here, with
wide norms and logits. A step samples conversations of `--turns` turns whose lengths are drawn (geometric, at most four
times the mean), the same for all kinds; then the engine sleeps, the trainer trains on the rows, and publishes. Each of
`--kinds` is a process of its own, because a process chooses its kernels once; `fast,exact,exact,fast` has two of each.
The first `--warm-up` steps of a process do not count. Options of `unbroken train` may follow after `--`.

Memory of the trainer, in bytes a weight: 4 for itself, 4 for its gradient, 8 for AdamW's averages (2 with 8 bits), 2
for the copy that a pass rounds. 8B: 8.2e9 weights x 18 = 137 GiB, so AdamW does not fit on one GPU of 139; with 8 bits
(torchao) 92 GiB; with LoRA, whose base is bfloat16 and has no gradients, 15 GiB and the adapters. `check_memory`
refuses what does not fit before a model is written.

`steps.jsonl` in `--output` has a line for each step, written when it ends, and `table.md` is written after each: what
ends after `--limit-s` leaves what it has measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from colocated import vllm_options
from grpo_task import CONTEXT_LENGTH, SHAPES, UNTIED, PeakMemory
from staleness import find_gpus, run_command
from unbroken.errors import InvalidInputError
from unbroken.runs.config import RunConfig
from unbroken.runs.numerics import Comparison, open_pair, sample_row
from unbroken.runs.settings import read_options, section_of
from unbroken.training.metrics.stats import step_metrics
from unbroken.types import Numerics, TrainingSample

MEAN_GIVEN = 32
"""Ids of a prompt, or of a tool's result."""
BYTES = {"adamw": 18, "adamw_8bit": 12}
"""Of a weight in the trainer, with its gradient, the optimizer's averages and the rounded copy of a pass."""
EXIT_S = 60.0
"""How much longer than its limit a process may take to close its engine."""
ROWS = {
    "ids sampled": "ids",
    "s sampling": "sample_s",
    "s training": "train_s",
    "s asleep and awake, publishing": "rest_s",
    "s step": "step_s",
    "GiB at most": "peak_gib",
    "share of equal bits": "equal_share",
    "largest difference": "max_abs",
    "k3": "k3",
}


def count_weights(shape: str) -> int:
    """Of the model of this shape."""
    with torch.device("meta"):
        return int(Qwen3ForCausalLM(make_config(shape)).num_parameters())


def check_memory(arguments: argparse.Namespace) -> None:
    """Exit if weights, gradients and optimizer do not fit into the GPU's memory, with the numbers."""
    num = count_weights(arguments.shape)
    needed = num * (2 if arguments.lora_rank else BYTES[arguments.optimizer]) / 2**30
    print(f"{num:,} weights: the trainer needs {needed:.1f} GiB and activations, vLLM {num * 2 / 2**30:.1f} and keys")
    if torch.cuda.is_available() and needed > 0.9 * (there := torch.cuda.mem_get_info()[1] / 2**30):
        sys.exit(
            f"{arguments.shape} needs {needed:.0f} of {there:.0f} GiB: take --lora-rank, or --optimizer adamw_8bit"
        )


def make_config(shape: str) -> Qwen3Config:
    """Of a model of this shape that ends no turn."""
    sizes = {**SHAPES[shape], "max_position_embeddings": CONTEXT_LENGTH, "tie_word_embeddings": shape not in UNTIED}
    return Qwen3Config(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def save_model(folder: Path, shape: str) -> None:
    """Write a random model in bfloat16: norms are not 1, and distributions wide enough for rounding to show."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM._from_config(make_config(shape), dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            else:
                weight.normal_(0, 0.8 / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # which this process would keep while others measure


def make_comparison(arguments: argparse.Namespace) -> Comparison:
    """The settings of the run."""
    words = [f"--seed={arguments.seed}", f"--trainer.optimizer.name={arguments.optimizer}"]
    words += [f"--engine.kind={arguments.engine}"]
    if arguments.engine == "colocated":
        own = [*vllm_options(arguments, eager=False), "--skip-tokenizer-init", *shlex.split(arguments.engine_options)]
        words += ["--precision=bfloat16", f"--engine.options={json.dumps(own)}"]
    if arguments.lora_rank:
        words += [f"--lora.rank={arguments.lora_rank}"]
    values = read_options([*words, *arguments.options], section_of(RunConfig))
    return Comparison(source=str(arguments.folder), values=values, num_rows=arguments.rows, max_tokens=arguments.tokens)


async def sample(opened: Any, config: RunConfig, arguments: argparse.Namespace, step: int) -> list[TrainingSample]:
    """The rows of a step, whose lengths depend on seed and step alone."""
    rng = np.random.default_rng([arguments.seed, step])
    means = np.tile([MEAN_GIVEN, arguments.tokens], (arguments.rows, arguments.turns, 1))
    lengths = np.minimum(rng.geometric(1 / means), 4 * means).tolist()
    rows = (
        sample_row(opened.engine, config.rollouts.sampling, [arguments.seed, step, number], turns, 0.01)
        for number, turns in enumerate(lengths)
    )
    return list(await asyncio.gather(*rows))


async def measure(arguments: argparse.Namespace, numerics: Numerics) -> None:
    """Make the steps of one kind."""
    until = time.monotonic() + arguments.left_s
    memory = PeakMemory("cuda" if torch.cuda.is_available() else "cpu")
    comparison = make_comparison(arguments)
    try:
        config = comparison.configure(numerics, arguments.output / "run")
        async with open_pair(config, comparison.source) as (opened, trainer):
            assert opened.publisher is not None, "one process publishes itself"
            for step in range(arguments.warm_up + arguments.steps):
                times = [time.perf_counter()]
                rows = await sample(opened, config, arguments, step)
                times.append(time.perf_counter())
                if opened.before_update is not None:
                    await opened.before_update()
                times.append(time.perf_counter())
                metrics = step_metrics(await asyncio.to_thread(trainer.step, rows))
                times.append(time.perf_counter())
                await opened.publisher.publish(trainer.named_weights(), policy_version=trainer.policy_version)
                times.append(time.perf_counter())
                sample_s, sleep_s, train_s, publish_s = np.diff(times).tolist()
                note(
                    arguments,
                    numerics,
                    step=step,
                    ids=sum(int(row.sampled_mask.sum()) for row in rows),
                    trained_ids=sum(len(row.token_ids) for row in rows),
                    sample_s=sample_s,
                    train_s=train_s,
                    rest_s=sleep_s + publish_s,
                    step_s=times[-1] - times[0],
                    peak_gib=memory.restart(),
                    **{name: metrics[f"mismatch/{name}"] for name in ("equal_share", "max_abs", "k3")},
                )
                if time.monotonic() > until:
                    break
    except InvalidInputError as error:
        note(arguments, numerics, refused=str(error))


def note(arguments: argparse.Namespace, numerics: Numerics, **numbers: Any) -> None:
    """Append a line, and write the table anew."""
    with (arguments.output / "steps.jsonl").open("a") as file:
        file.write(json.dumps({"numerics": numerics, **numbers}) + "\n")
    (arguments.output / "table.md").write_text(make_table(arguments))


def make_table(arguments: argparse.Namespace) -> str:
    """Medians of the steps after the warm-up, and exact by fast."""
    lines = [json.loads(line) for line in (arguments.output / "steps.jsonl").read_text().splitlines()]
    kinds = {
        kind: [line for line in lines if line["numerics"] == kind and line.get("step", -1) >= arguments.warm_up]
        for kind in (Numerics.FAST, Numerics.EXACT)
    }
    text = [f"| {arguments.shape}, {arguments.engine} | fast | exact | exact / fast |", "|---|---|---|---|"]
    text += [f"| steps | {len(kinds[Numerics.FAST])} | {len(kinds[Numerics.EXACT])} | |"]
    for title, name in ROWS.items():
        fast, exact = (statistics.median([line[name] for line in found]) if found else None for found in kinds.values())
        ratio = f"{exact / fast:.2f}" if name.endswith("_s") and fast and exact is not None else ""
        text.append(f"| {title} | {show(fast)} | {show(exact)} | {ratio} |")
    refused = dict.fromkeys(f"{line['numerics']} is refused: {line['refused']}" for line in lines if "refused" in line)
    return "\n".join([*text, *refused]) + "\n"


def show(value: float | None) -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def main() -> None:
    """Measure each kind in a process of its own, and print the table."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="0.6b" if on_gpu else "tiny")
    add("--engine", choices=("embedded", "colocated"), default="colocated" if on_gpu else "embedded")
    add("--kinds", default="fast,exact", help="in this order; each may come several times")
    add("--rows", type=int, default=128, help="conversations of a step")
    add("--turns", type=int, default=3)
    add("--tokens", type=int, default=64, help="mean of the ids of a turn")
    add("--steps", type=int, default=5, help="of each process, after the warm-up")
    add("--warm-up", type=int, default=2)
    add("--lora-rank", type=int, default=0, help="0: all weights are trained")
    add("--optimizer", choices=sorted(BYTES), default="adamw")
    add("--dtype", default="bfloat16", help="of vLLM")
    add("--engine-options", default="", help="more options of vLLM, as --tensor-parallel-size=2")
    add("--seed", type=int, default=0)
    add("--limit-s", type=float, default=540.0, help="for all kinds together")
    add("--folder", type=Path, help="keep the model here, and use it again")
    add("--output", type=Path, default=Path("runs/exact-numerics"))
    add("--only", type=Numerics, help=argparse.SUPPRESS)
    add("--left-s", type=float, help=argparse.SUPPRESS)
    add("options", nargs="*", help="more options of `unbroken train`, after --")
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    arguments.folder = arguments.folder or arguments.output / f"model-{arguments.shape}"
    if arguments.turns * 4 * (MEAN_GIVEN + arguments.tokens) > CONTEXT_LENGTH:
        parser.error(f"--turns times 4 times ({MEAN_GIVEN} + --tokens) must be at most {CONTEXT_LENGTH}")
    if arguments.only is not None:
        asyncio.run(measure(arguments, arguments.only))
        return
    deadline = time.monotonic() + arguments.limit_s
    check_memory(arguments)
    save_model(arguments.folder, arguments.shape)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "steps.jsonl").write_text("")
    for number, kind in enumerate(arguments.kinds.split(",")):
        left_s = deadline - time.monotonic()
        own, log = ["--only", Numerics(kind), "--left-s", f"{left_s:.0f}"], arguments.output / f"{number}-{kind}.log"
        command = [sys.executable, __file__, *own, *sys.argv[1:]]
        if left_s <= 0 or not run_command(command, log, deadline=deadline + EXIT_S, gpus=",".join(find_gpus())):
            print(f"{kind} did not end: {log} says why" if left_s > 0 else f"{kind} was left out, no time")
    print(make_table(arguments), end="")


if __name__ == "__main__":
    main()
