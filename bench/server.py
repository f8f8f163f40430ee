"""Compare our server with offline vLLM (the limit) and vLLM's own OpenAI server, on one model, in one run.

    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 python bench/server.py            # tiny model, CPU build
    python bench/server.py --shape 0.6b --dtype bfloat16 --tokens 256 --limit-s 240                          # one GPU

Two loads: a batch of 64 prompts x n=4 in one request, and 64 concurrent single requests. Every side returns ids and
logprobs, as training needs them. Sampling is random with a fixed length: stop ids are ignored. Offline runs once with
logprobs and once without.

All three engines run at once and the rounds alternate, so that other load affects all sides alike. Ratios are medians
of the rounds' ratios to offline with logprobs. Options after `--` go to vLLM on every side. The offline engine starts
first and compiles; the servers then start together, from its cache. Rounds are printed as they end, and none begins
after the time limit.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from unbroken.client import AsyncClient
from unbroken.client.calls import Connections
from unbroken.types import SamplingParams

NAME = "bench"
_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128,
    },
    "0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    },
}  # fmt: skip


def save_model(folder: Path, shape: str, dtype: str) -> None:
    """Save a random Qwen3 of this shape, with a byte tokenizer and a plain chat template; an existing one is kept."""
    if (folder / "model.safetensors").exists():
        return
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: k for k, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([f"<unused{k}>" for k in range(_SHAPES[shape]["vocab_size"] - 258)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(**_SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)


@contextmanager
def run_server(command: list[str]) -> Iterator[Callable[[str], None]]:
    """Run a server process for the block, which gets a function that waits until /health of a URL answers."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

        def wait(url: str) -> None:
            until = time.monotonic() + 300
            while True:
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{command[:4]} does not serve:\n{log.read()[-3000:]}")
                try:
                    if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                        return
                except httpx.HTTPError:
                    time.sleep(0.5)

        try:
            yield wait
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def open_client(url: str) -> httpx.AsyncClient:
    """Open an HTTP client with new connections: vLLM's server drops those that were idle for 5 s."""
    return httpx.AsyncClient(base_url=url, timeout=600, transport=Connections())


class Loads:
    """The two loads on each side. Every method returns the number of ids in the answers."""

    def __init__(self, *, num_prompts: int, n: int, num_tokens: int) -> None:
        rng = random.Random(0)
        self.prompts = [[rng.randrange(256) for _ in range(rng.randrange(20, 60))] for _ in range(num_prompts)]
        self.n = n
        self.num_tokens = num_tokens

    def offline(self, llm: Any, *, n: int, logprobs: bool) -> int:
        """`LLM.generate` in this process."""
        from vllm import SamplingParams as VllmSamplingParams

        params = VllmSamplingParams(
            n=n, max_tokens=self.num_tokens, ignore_eos=True, logprobs=0 if logprobs else None, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in self.prompts], params, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    async def ours_batch(self, client: AsyncClient) -> int:
        """One request to our server."""
        results = await client.generate(self.prompts, SamplingParams(max_tokens=self.num_tokens), n=self.n)
        return sum(len(sequence.completion_ids) for result in results for sequence in result.sequences)

    async def ours_single(self, client: AsyncClient) -> int:
        """One request to our server for each prompt."""
        params = SamplingParams(max_tokens=self.num_tokens)
        answers = await asyncio.gather(*(client.generate([ids], params) for ids in self.prompts))
        return sum(len(results[0].sequences[0].completion_ids) for results in answers)

    async def vllm_batch(self, url: str) -> int:
        """One completion request to vLLM's server."""
        async with open_client(url) as http:
            return await self._complete(http, self.prompts, self.n)

    async def vllm_single(self, url: str) -> int:
        """One completion request to vLLM's server for each prompt."""
        async with open_client(url) as http:
            return sum(await asyncio.gather(*(self._complete(http, [ids], 1) for ids in self.prompts)))

    async def _complete(self, http: httpx.AsyncClient, prompts: list[list[int]], n: int) -> int:
        body = {
            "model": NAME, "prompt": prompts, "n": n, "max_tokens": self.num_tokens, "ignore_eos": True,
            "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "temperature": 1.0,
        }  # fmt: skip
        answer = await http.post("/v1/completions", json=body)
        answer.raise_for_status()
        return sum(len(choice["token_ids"]) for choice in answer.json()["choices"])


def time_run(run: Callable[[], int], expected: int) -> float:
    start = time.perf_counter()
    found = run()
    elapsed = time.perf_counter() - start
    assert found == expected, f"got {found} ids, expected {expected}"
    return elapsed


def measure(loads: Loads, sides: dict[str, dict[str, Callable[[], int]]], num_rounds: int, until: float) -> None:
    """Run all sides of each load in turn and print the tables; no round begins after `until` unless it is the first."""
    num_prompts = len(loads.prompts)
    for title, runs in sides.items():
        expected = num_prompts * loads.num_tokens * (loads.n if "batch" in title else 1)
        times: dict[str, list[float]] = {name: [] for name in runs}
        print(f"\n{title}: {expected} ids", flush=True)
        for round_number in range(num_rounds + 1):
            if round_number > 1 and time.monotonic() > until:
                print(f"the time is up after {round_number - 1} rounds")
                break
            taken = {name: time_run(run, expected) for name, run in runs.items()}
            shown = ", ".join(f"{name} {elapsed:.2f}" for name, elapsed in taken.items())
            print(f"round {round_number or 'to warm up'}: {shown}", flush=True)
            if round_number:
                for name, elapsed in taken.items():
                    times[name].append(elapsed)
        limit = times["offline LLM, with logprobs"]
        print(f"{'':34}{'median s':>10}{'ids/s':>10}{'of offline':>12}{'of vLLM server':>16}")
        theirs = times["vLLM's own server"]
        for name, own in times.items():
            median = statistics.median(own)
            of_limit = statistics.median(a / b for a, b in zip(limit, own, strict=True))
            of_theirs = statistics.median(a / b for a, b in zip(theirs, own, strict=True))
            print(f"{name:34}{median:>10.3f}{expected / median:>10,.0f}{of_limit:>12.2f}{of_theirs:>16.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keep the model here, and use it again")
    parser.add_argument("--limit-s", type=float, default=400.0, help="no round begins after it")
    arguments, vllm_options = parser.parse_known_args()
    until = time.monotonic() + arguments.limit_s
    vllm_options = [option for option in vllm_options if option != "--"]
    loads = Loads(num_prompts=arguments.prompts, n=arguments.n, num_tokens=arguments.tokens)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = time.monotonic()
        save_model(folder, arguments.shape, arguments.dtype)
        print(f"model written after {time.monotonic() - started:.0f} s", flush=True)
        common = ["--dtype", arguments.dtype, "--max-model-len", "2048", *same_sizes(), *vllm_options]
        sides = start_sides(stack, folder, common, loads)
        measure(loads, sides, arguments.rounds, until)


def same_sizes() -> list[str]:
    """On a GPU: sizes that would differ by side, and with them what is compiled, and each side's part of the memory.

    Engines that start together cannot measure what is free.
    """
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        "--max-num-seqs", "256", "--max-num-batched-tokens", "8192",
        "--gpu-memory-utilization", "0.28", "--kv-cache-memory-bytes", str(24 * 2**30),
    ]  # fmt: skip


def start_sides(
    stack: ExitStack, folder: Path, common: list[str], loads: Loads
) -> dict[str, dict[str, Callable[[], int]]]:
    """Start both servers and the offline engine. Returns the functions to time, by load and side."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    ports = free_port(), free_port()
    ours_url, theirs_url = (f"http://127.0.0.1:{port}" for port in ports)
    model = ["--model", str(folder), "--served-model-name", NAME]
    ours = [sys.executable, "-m", "unbroken", "serve", *model, "--engine", "vllm", "--port", str(ports[0]), *common]
    theirs = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", *model, "--host", "127.0.0.1",
        "--port", str(ports[1]), "--logprobs-mode", "processed_logprobs", *common,
    ]  # fmt: skip
    started = time.monotonic()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(
        parser.parse_args(["--model", str(folder), "--logprobs-mode", "processed_logprobs", *common])
    )
    llm = LLM.from_engine_args(args)
    stack.callback(llm.llm_engine.engine_core.shutdown)  # or the interpreter's exit would wait for its process
    print(f"the offline engine is there after {time.monotonic() - started:.0f} s", flush=True)
    wait_for_theirs = stack.enter_context(run_server(theirs))
    wait_for_ours = stack.enter_context(run_server(ours))
    wait_for_theirs(theirs_url)
    wait_for_ours(ours_url)
    print(f"both servers are there after {time.monotonic() - started:.0f} s", flush=True)
    runner = stack.enter_context(asyncio.Runner())
    client = AsyncClient(ours_url)
    stack.callback(lambda: runner.run(client.close()))
    return {
        f"batch, {len(loads.prompts)} prompts x n={loads.n} in one request": {
            "offline LLM, with logprobs": lambda: loads.offline(llm, n=loads.n, logprobs=True),
            "offline LLM, without": lambda: loads.offline(llm, n=loads.n, logprobs=False),
            "vLLM's own server": lambda: runner.run(loads.vllm_batch(theirs_url)),
            "unbroken serve": lambda: runner.run(loads.ours_batch(client)),
        },
        f"{len(loads.prompts)} concurrent single requests": {
            "offline LLM, with logprobs": lambda: loads.offline(llm, n=1, logprobs=True),
            "offline LLM, without": lambda: loads.offline(llm, n=1, logprobs=False),
            "vLLM's own server": lambda: runner.run(loads.vllm_single(theirs_url)),
            "unbroken serve": lambda: runner.run(loads.ours_single(client)),
        },
    }


if __name__ == "__main__":
    main()
