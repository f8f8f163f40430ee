"""What a checkpoint costs: seconds that training waits, seconds and bytes of writing, loading, and the final model.

    OMP_NUM_THREADS=1 python bench/checkpoints.py --layers 4 --processes 1 2
    OMP_NUM_THREADS=1 python bench/checkpoints.py --processes 1 2 --trees . ../older        # of two versions

Each side trains one step of a Qwen3 of random weights and saves it `--rounds` times in a folder of its own. `waits`:
`Trainer.copy_state`; `writes`: what it returns, on each process at once; `peak`: how much the largest process grew from
the copy to the end of writing; `final`: `Trainer.save_pretrained` in bfloat16 and files of 10^8 bytes, and how much the
process grew then.
Medians of the rounds, of the slowest process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from unbroken.training.config import TrainerConfig
from unbroken.training.model.pretrained import ModelForm
from unbroken.training.trainer import Trainer
from unbroken.types import NO_VERSION, TrainingSample, token_ids

COLUMNS = ("waits_s", "writes_s", "loads_s", "final_s", "checkpoint_gb", "final_gb", "peak_gb", "final_peak_gb")

FORM = ModelForm(dtype=torch.bfloat16, max_shard_bytes=10**8)


def main() -> None:
    """Start each side; with `--worker`, be one process of a side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path(__file__).parents[1]])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return
    print(f"{'tree':24} {'processes':>9} " + " ".join(f"{name:>13}" for name in COLUMNS))
    for num_processes in arguments.processes:
        for tree in arguments.trees:
            found = start(arguments, tree.resolve(), num_processes)
            print(f"{tree.resolve().name:24} {num_processes:9} " + " ".join(f"{found[name]:13.3f}" for name in COLUMNS))


def start(arguments: argparse.Namespace, tree: Path, num_processes: int) -> dict[str, float]:
    """Run one side, and return the medians."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", "--standalone"]
        command = command if num_processes > 1 else [sys.executable]
        shape = [f"--layers={arguments.layers}", f"--hidden={arguments.hidden}", f"--rounds={arguments.rounds}"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])
        }
        environment |= {} if torch.cuda.is_available() else {"ACCELERATE_USE_CPU": "true"}
        subprocess.run([*command, __file__, *shape, "--worker", folder], env=environment, check=True)
        rounds: list[dict[str, float]] = json.loads((Path(folder) / "result.json").read_text())
    return {name: statistics.median(each[name] for each in rounds) for name in COLUMNS}


def work(arguments: argparse.Namespace) -> None:
    """Save, load and write a model; the first process writes the numbers of each round."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=arguments.hidden, num_hidden_layers=arguments.layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, intermediate_size=3 * arguments.hidden, tie_word_embeddings=True,
    )  # fmt: skip
    trainer = Trainer(Qwen3ForCausalLM(config), TrainerConfig())
    trainer.step([make_row()])
    rounds = [save_once(trainer, arguments.worker, number) for number in range(arguments.rounds)]
    if trainer.is_main_process:
        (arguments.worker / "result.json").write_text(json.dumps(rounds))
    trainer.from_all_processes(None)
    os._exit(0)


def save_once(trainer: Trainer, folder: Path, number: int) -> dict[str, float]:
    """The numbers of one round; each is that of the slowest, or the largest, of all processes."""
    checkpoint, final = folder / f"step-{number}", folder / "final"
    seconds: dict[str, float] = {}
    peaks: dict[str, float] = {}
    with growth(peaks, "peak_gb"):
        write: Callable[[Path], None] | None = measure(seconds, "waits_s", trainer.copy_state)
        trainer.from_all_processes(None)
        measure(seconds, "writes_s", lambda: write and write(checkpoint))
        write = None
    trainer.from_all_processes(None)
    measure(seconds, "loads_s", lambda: trainer.load(checkpoint))
    with growth(peaks, "final_peak_gb"):
        measure(seconds, "final_s", lambda: trainer.save_pretrained(final, form=FORM))
    numbers = seconds | peaks | {"checkpoint_gb": size_of(checkpoint), "final_gb": size_of(final)}
    every = trainer.from_all_processes(numbers)
    if trainer.is_main_process:
        shutil.rmtree(checkpoint)
        shutil.rmtree(final)
    trainer.from_all_processes(None)
    return {name: max(each[name] for each in every) for name in numbers}


def measure(seconds: dict[str, float], name: str, call: Callable[[], Any]) -> Any:
    """Call, and note how long it took."""
    started = time.perf_counter()
    result = call()
    seconds[name] = time.perf_counter() - started
    return result


@contextmanager
def growth(peaks: dict[str, float], name: str) -> Iterator[None]:
    """Note by how many 10^9 bytes this process's memory grew at most meanwhile."""
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before would hide it
    process, ended = psutil.Process(), threading.Event()
    before = most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.005):
            most = max(most, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    peaks[name] = (most - before) / 1e9


def size_of(folder: Path) -> float:
    """In 10^9 bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e9


def make_row() -> TrainingSample:
    """A row of random ids."""
    rng, length = np.random.default_rng(0), 16
    sampled = np.arange(length) >= 4
    return TrainingSample(
        token_ids=token_ids(rng.integers(0, 32_000, length)),
        sampled_mask=sampled,
        loss_mask=sampled,
        rollout_logprobs=np.where(sampled, -10.0, np.nan),
        policy_versions=np.where(sampled, 0, NO_VERSION),
        advantages=np.where(sampled, 1.0, 0.0),
    )


if __name__ == "__main__":
    main()
