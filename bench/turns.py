"""Time conversations of several turns on a server with vLLM, beside the same ids in one turn; and each process's CPU.

    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 python bench/turns.py         # tiny model, CPU build
    python bench/turns.py --shape 0.6b --dtype bfloat16 --conversations 128 --limit-s 240          # one GPU

All conversations begin together; each sends its next turn, whose prompt is all ids so far and 30 more, once it has
the one before. So beyond one turn, what is sampled is the same, and what is added are prompts that come one by one.
vLLM's processes wait busily for each other: their CPU times say little, and on two cores they hold up the other two, so
that rounds of several turns take up to ten times as long. Options after `--` go to the server, such as
`-- --compilation-config '{"cudagraph_mode": "FULL"}'`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from server import save_model
from unbroken.engines.http import HttpEngine
from unbroken.runs.engines import start_server
from unbroken.types import SampleRequest, SamplingParams, token_ids

PROMPT_LENGTH = 150
REPLY_LENGTH = 30
"""Ids that each further turn adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One run of all conversations."""

    seconds: float
    cpu_s: dict[str, float]
    """Of each process."""


class Processes:
    """The server's processes and this one."""

    def __init__(self) -> None:
        this = psutil.Process()
        self._named = {"client": this}
        for process in this.children(recursive=True):
            words = " ".join(process.cmdline())
            kinds = {"EngineCore": "engine core", "Worker": "workers", "unbroken serve": "HTTP"}
            name = next((kind for part, kind in kinds.items() if part in words), None)
            if name is not None:
                self._named[name] = process

    def read_cpu_s(self) -> dict[str, float]:
        """CPU seconds since each began."""
        times = {name: process.cpu_times() for name, process in self._named.items()}
        return {name: each.user + each.system for name, each in times.items()}


async def converse(engine: HttpEngine, name: str, seed: int, *, num_turns: int, num_ids: int) -> None:
    """Make the turns of one conversation, each of which samples `num_ids` ids."""
    rng = random.Random(seed)
    ids = [rng.randrange(256) for _ in range(PROMPT_LENGTH)]
    for turn in range(num_turns):
        params = SamplingParams(max_tokens=num_ids, seed=seed)
        request = SampleRequest(request_id=f"{name}/{turn}", prompt_ids=token_ids(ids), params=params)
        (sequence,) = (await engine.sample(request)).sequences
        assert len(sequence.completion_ids) == num_ids
        ids += [*sequence.completion_ids.tolist(), *(rng.randrange(256) for _ in range(REPLY_LENGTH))]


async def run_round(
    engine: HttpEngine, processes: Processes, seed: int, *, num_conversations: int, num_turns: int, num_ids: int
) -> Round:
    """Run all conversations; `seed` makes their prompts, so that nothing of another round is cached."""
    before, start = processes.read_cpu_s(), time.perf_counter()
    await asyncio.gather(
        *(
            converse(engine, f"{seed}-{k}", seed * num_conversations + k, num_turns=num_turns, num_ids=num_ids)
            for k in range(num_conversations)
        )
    )
    seconds = time.perf_counter() - start
    cpu_s = {name: after - before[name] for name, after in processes.read_cpu_s().items()}
    return Round(seconds=seconds, cpu_s=cpu_s)


async def measure(engine: HttpEngine, arguments: argparse.Namespace, until: float) -> None:
    """Run rounds of each number of turns by turns, and print a line for each number."""
    processes = Processes()
    found: dict[int, list[Round]] = {num_turns: [] for num_turns in arguments.turns}
    for number in range(arguments.rounds + 1):
        if number > 1 and time.monotonic() > until:
            print(f"the time is up after {number - 1} rounds")
            break
        for place, (num_turns, rounds) in enumerate(found.items()):
            taken = await run_round(
                engine,
                processes,
                number * len(found) + place,
                num_conversations=arguments.conversations,
                num_turns=num_turns,
                num_ids=arguments.ids // num_turns,
            )
            print(f"round {number or 'to warm up'}: {num_turns} turns {taken.seconds:.2f} s", flush=True)
            if number:
                rounds.append(taken)
    first = statistics.median(each.seconds for each in found[arguments.turns[0]])
    for num_turns, rounds in found.items():
        seconds = statistics.median(each.seconds for each in rounds)
        per_request = 1000 / (arguments.conversations * num_turns)
        cpu = {name: statistics.median(each.cpu_s[name] for each in rounds) * per_request for name in rounds[0].cpu_s}
        shown = ", ".join(f"{name} {ms:.2f}" for name, ms in cpu.items())
        print(f"{num_turns} turns of {arguments.ids // num_turns} ids: {seconds:.2f} s, {seconds / first:.2f}x")
        print(f"    CPU ms a turn: {shown}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=("tiny", "0.6b"), default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--folder", help="where the model is kept for the next run")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--ids", type=int, default=320, help="sampled in each conversation")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4, 16], help="numbers of turns")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=300.0)
    arguments, options = parser.parse_known_args()
    until = time.monotonic() + arguments.limit_s
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments.folder or scratch) / arguments.shape
        save_model(folder, arguments.shape, arguments.dtype)
        command = [sys.executable, "-m", "unbroken", "serve", str(folder), "--port", "0", "--engine", "vllm"]
        command += ["--dtype", arguments.dtype, "--max-model-len", "4096", "--max-num-seqs", "512"]
        command += [option for option in options if option != "--"]
        async with start_server(command, Path(scratch) / "server.log", wait_s=arguments.limit_s) as url:
            engine = await HttpEngine.connect([url])
            try:
                await measure(engine, arguments, until)
            finally:
                await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
