"""Rounds of ragged requests to vLLM under this process, nothing around it: wall and CPU seconds of a round.

    python bench/vllm_rounds.py --model FOLDER -- --dtype bfloat16 --max-model-len 2048           # one GPU
    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 python bench/vllm_rounds.py --model FOLDER --requests 16 --rounds 3 -- \
        --enforce-eager --block-size 32                                                # on a CPU

It is for what a change of `unbroken.engines.vllm` costs or gains: with another tree's `src` in PYTHONPATH the same is
measured of that tree. Give both in turns, since a GPU's clock and its host drift. Prompts and completions have lengths
drawn from log-normal distributions, the same for each tree, and stop ids are ignored.

One line of JSON: the medians of all rounds after the first two, and the quickest round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from typing import Any

import psutil

NUM_WARMUP = 2
"""Rounds that do not count."""


def cpu_s(process: psutil.Process) -> float:
    """User and system seconds of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the engine, make the rounds and give their figures."""
    from unbroken.engines.vllm import VllmEngine, parse_engine_args
    from unbroken.types import SampleRequest, SamplingParams, token_ids

    engine = await VllmEngine.start(
        parse_engine_args(["--model", arguments.model, "--disable-log-stats", *arguments.words])
    )
    try:
        vocab_size = engine.vocab_size
        own = psutil.Process()
        others = own.children(recursive=True)
        rounds: list[tuple[float, float, float]] = []
        num_ids = 0
        for number in range(arguments.rounds + NUM_WARMUP):
            draw = random.Random(number)
            requests = []
            for each in range(arguments.requests):
                length = min(1024, 1 + int(draw.lognormvariate(4.6, 0.5)))
                max_tokens = min(512, 1 + int(draw.lognormvariate(arguments.log_tokens, 0.6)))
                params = SamplingParams(max_tokens=max_tokens)
                prompt = token_ids([draw.randrange(vocab_size) for _ in range(length)])
                requests.append(SampleRequest(request_id=f"{number}-{each}", prompt_ids=prompt, params=params))
            began = time.perf_counter(), cpu_s(own), sum(map(cpu_s, others))
            results = await asyncio.gather(*map(engine.sample, requests))
            ended = time.perf_counter(), cpu_s(own), sum(map(cpu_s, others))
            if number >= NUM_WARMUP:
                num_ids += sum(len(sequence.completion_ids) for result in results for sequence in result.sequences)
                rounds.append((ended[0] - began[0], ended[1] - began[1], ended[2] - began[2]))
    finally:
        await engine.close()
    seconds, of_this, of_others = zip(*rounds, strict=True)
    return {
        "ids_per_round": num_ids // len(rounds),
        "s": round(statistics.median(seconds), 4),
        "quickest_s": round(min(seconds), 4),
        "cpu_s": round(statistics.mean(of_this), 4),
        "cpu_s_of_vllm": round(statistics.mean(of_others), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model with real weights")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--log-tokens", type=float, default=3.6, help="mean of the logarithm of a completion's length")
    parser.add_argument("words", nargs="*", help="vLLM's options, after --")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print(json.dumps(asyncio.run(run(arguments))), flush=True)


if __name__ == "__main__":
    main()
