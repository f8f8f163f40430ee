"""Compare our server with offline vLLM (the limit) and vLLM's own OpenAI server, on one model, one after the other.

    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 python bench/server.py -- --block-size 32 --enforce-eager     # on a CPU
    python bench/server.py --shape 0.6b --dtype bfloat16 --prompts 512 --tokens 256 --folder FOLDER          # one GPU

Two loads: `batch`, all prompts x n in one request, and `requests`, one request for each prompt x n at the same time.
Every side returns ids and logprobs, as training needs them. Sampling is random with a fixed length: stop ids are
ignored. Offline vLLM is measured with logprobs, and without.

Each side has the whole machine while it runs: it starts, makes a small round of each load to warm up, then the rounds,
and ends. The model is made once (`--folder` keeps it), and the later sides find what the first has compiled. A line is
printed after each round, and the table so far after each side; a side may begin no round once its third of the time
limit is over. CPU seconds are those of a server's HTTP process, of the engine's processes, and of the client (for
offline vLLM: of the process with `LLM`, of the engine's). Options after `--` go to vLLM on every side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from unbroken.client import AsyncClient
from unbroken.client.connections import Connections
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
def run_server(command: list[str], url: str) -> Iterator[psutil.Process]:
    """Run a server process for the block, which begins when /health of its URL answers."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + 300
            while not answers(url):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise SystemExit(f"{command[:4]} does not serve:\n{log.read()[-3000:]}")
                time.sleep(0.2)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(url: str) -> bool:
    """Whether a server answers."""
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def open_client(url: str) -> httpx.AsyncClient:
    """Open an HTTP client with new connections: vLLM's server drops those that were idle for 5 s."""
    return httpx.AsyncClient(base_url=url, timeout=600, transport=Connections())


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What each side samples. Every method returns the number of ids in the answers."""

    prompts: list[list[int]]
    n: int
    num_tokens: int

    @property
    def num_ids(self) -> int:
        """How many ids the answers have."""
        return len(self.prompts) * self.n * self.num_tokens

    def offline(self, llm: Any, *, logprobs: bool) -> int:
        """`LLM.generate` in this process."""
        from vllm import SamplingParams as VllmSamplingParams

        params = VllmSamplingParams(
            n=self.n, max_tokens=self.num_tokens, ignore_eos=True, logprobs=0 if logprobs else None, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in self.prompts], params, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    async def ours_batch(self, client: AsyncClient) -> int:
        """One request to our server."""
        return await self._generate(client, self.prompts)

    async def ours_requests(self, client: AsyncClient) -> int:
        """One request to our server for each prompt."""
        return sum(await asyncio.gather(*(self._generate(client, [ids]) for ids in self.prompts)))

    async def vllm_batch(self, http: httpx.AsyncClient) -> int:
        """One completion request to vLLM's server."""
        return await self._complete(http, self.prompts)

    async def vllm_requests(self, http: httpx.AsyncClient) -> int:
        """One completion request to vLLM's server for each prompt."""
        return sum(await asyncio.gather(*(self._complete(http, [ids]) for ids in self.prompts)))

    async def _generate(self, client: AsyncClient, prompts: list[list[int]]) -> int:
        results = await client.generate(prompts, SamplingParams(max_tokens=self.num_tokens), n=self.n)
        return sum(len(sequence.completion_ids) for result in results for sequence in result.sequences)

    async def _complete(self, http: httpx.AsyncClient, prompts: list[list[int]]) -> int:
        body = {
            "model": NAME, "prompt": prompts, "n": self.n, "max_tokens": self.num_tokens, "ignore_eos": True,
            "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "temperature": 1.0,
        }  # fmt: skip
        answer = await http.post("/v1/completions", json=body)
        answer.raise_for_status()
        return sum(len(choice["token_ids"]) for choice in answer.json()["choices"])


def make_load(num_prompts: int, n: int, num_tokens: int) -> Load:
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(20, 60))] for _ in range(num_prompts)]
    return Load(prompts=prompts, n=n, num_tokens=num_tokens)


OFFLINE, WITHOUT, THEIRS, OURS = "offline LLM", "offline, no logprobs", "vLLM's own server", "unbroken serve"
Runs = Mapping[tuple[str, str], Callable[[Load], int]]
"""The functions to time, by side and load."""


class Results:
    """The rounds of all sides, printed as they end."""

    def __init__(self, load: Load, file: Path | None) -> None:
        self._load = load
        self._file = file
        self._rounds: dict[tuple[str, str], list[dict[str, float]]] = {}

    def measure(self, runs: Runs, front: psutil.Process, *, num_rounds: int, until: float) -> None:
        """Warm up and run the rounds of one side; of each load at least one."""
        for run in runs.values():
            run(make_load(16, self._load.n, min(16, self._load.num_tokens)))
        for number in range(num_rounds):
            for (side, name), run in runs.items():
                if number and time.monotonic() > until:
                    print("the time is up", flush=True)
                    return
                self.add(side, name, time_run(run, self._load, front))

    def add(self, side: str, name: str, found: dict[str, float]) -> None:
        """Keep and print a round."""
        self._rounds.setdefault((name, side), []).append(found)
        shown = ", ".join(f"{key} {value:.2f}" for key, value in found.items())
        print(f"{name}, {side}: {shown}", flush=True)
        if self._file is not None:
            with self._file.open("a") as lines:
                lines.write(json.dumps({"load": name, "side": side, **found}) + "\n")

    def print_table(self) -> None:
        """Print the medians of the rounds so far."""
        num_requests, num_ids = len(self._load.prompts), self._load.num_ids
        print(
            f"\n{num_requests} prompts x n={self._load.n} x {self._load.num_tokens} ids: medians; CPU of the front a "
            "prompt, of all processes per id"
        )
        print(f"{'load':10}{'side':22}{'s':>8}{'ids/s':>10}{'/ offline':>10}{'/ vLLM':>8}{'front ms':>10}{'all us':>8}")
        medians = {
            key: {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
            for key, rounds in self._rounds.items()
        }
        for (name, side), found in sorted(medians.items()):

            def ratio(other: str, name: str = name, own: float = found["s"]) -> str:
                theirs = medians.get((name, other))
                return "-" if theirs is None else f"{own / theirs['s']:.2f}"

            cpu_s = found["front_cpu_s"] + found["engine_cpu_s"] + found["client_cpu_s"]
            print(
                f"{name:10}{side:22}{found['s']:>8.2f}{num_ids / found['s']:>10,.0f}{ratio(OFFLINE):>10}"
                f"{ratio(THEIRS):>8}{1e3 * found['front_cpu_s'] / num_requests:>10.2f}{1e6 * cpu_s / num_ids:>8.1f}",
                flush=True,
            )


def time_run(run: Callable[[Load], int], load: Load, front: psutil.Process) -> dict[str, float]:
    """Seconds of a round, and the CPU seconds of the front, its child processes, and this process if it is another."""
    before, start = read_cpu(front), time.perf_counter()
    found = run(load)
    seconds, after = time.perf_counter() - start, read_cpu(front)
    assert found == load.num_ids, f"got {found} ids, expected {load.num_ids}"
    return {"s": seconds, **{name: after[name] - before[name] for name in after}}


def read_cpu(front: psutil.Process) -> dict[str, float]:
    def read(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    children = sum(read(child) for child in front.children(recursive=True))
    client = 0.0 if front.pid == os.getpid() else time.process_time()
    return {"front_cpu_s": read(front), "engine_cpu_s": children, "client_cpu_s": client}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="batch,requests")
    parser.add_argument("--sides", default="offline,vllm,ours")
    parser.add_argument("--folder", type=Path, help="keep the model here, and use it again")
    parser.add_argument("--results", type=Path, help="add each round to this file, as JSON")
    parser.add_argument("--limit-s", type=float, default=480.0, help="of all sides together, their starts included")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments, vllm_options = parser.parse_known_args()
    vllm_options = [option for option in vllm_options if option != "--"]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    common = ["--dtype", arguments.dtype, "--max-model-len", "2048", *same_sizes(), *vllm_options]
    results = Results(make_load(arguments.prompts, arguments.n, arguments.tokens), arguments.results)
    if arguments.until is not None:
        run_offline(arguments, common, results)
        return
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = time.monotonic()
        save_model(folder, arguments.shape, arguments.dtype)
        print(f"model there after {time.monotonic() - started:.0f} s", flush=True)
        sides = arguments.sides.split(",")
        for number, side in enumerate(sides, start=1):
            until = started + arguments.limit_s * number / len(sides)
            began = time.monotonic()
            if side == "offline":
                start_offline(folder, until, results)
            else:
                run_side(side, folder, common, results, arguments=arguments, until=until)
            print(f"{side} took {time.monotonic() - began:.0f} s with its start", flush=True)
            results.print_table()


def same_sizes() -> list[str]:
    """On a GPU: sizes that would differ by side, and with them what is compiled."""
    import torch

    return ["--max-num-seqs", "256", "--max-num-batched-tokens", "8192"] if torch.cuda.is_available() else []


def start_offline(folder: Path, until: float, results: Results) -> None:
    """Measure offline vLLM in a process of its own, whose memory is free afterwards."""
    options = sys.argv[1:]
    own = [sys.executable, __file__, "--until", str(until), "--folder", str(folder), *options]
    with subprocess.Popen(own, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ROUND "):
                name, side, found = json.loads(line.removeprefix("ROUND "))
                results.add(side, name, found)
    if process.returncode:
        raise SystemExit(f"offline vLLM ended with {process.returncode}")


def run_offline(arguments: argparse.Namespace, common: list[str], results: Results) -> None:
    """Measure offline vLLM, and print each round for the process that started this one."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(
        parser.parse_args(["--model", str(arguments.folder), "--logprobs-mode", "processed_logprobs", *common])
    )
    llm = LLM.from_engine_args(args)
    runs: dict[tuple[str, str], Callable[[Load], int]] = {}
    for name in arguments.loads.split(","):  # offline there is one way, but each load has its line
        runs[OFFLINE, name] = lambda load: load.offline(llm, logprobs=True)
    runs[WITHOUT, arguments.loads.split(",")[0]] = lambda load: load.offline(llm, logprobs=False)
    results.add = lambda side, name, found: print(f"ROUND {json.dumps([name, side, found])}", flush=True)  # type: ignore[method-assign]
    results.measure(runs, psutil.Process(), num_rounds=arguments.rounds, until=arguments.until)
    llm.llm_engine.engine_core.shutdown()  # or the interpreter's exit would wait for its process


def run_side(
    side: str, folder: Path, common: list[str], results: Results, *, arguments: argparse.Namespace, until: float
) -> None:
    """Start a server and measure it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    model = ["--model", str(folder), "--served-model-name", NAME, "--port", str(port)]
    loads = arguments.loads.split(",")
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        if side == "ours":
            command = [sys.executable, "-m", "unbroken", "serve", *model, "--engine", "vllm", *common]
            client = AsyncClient(url)
            stack.callback(lambda: runner.run(client.close()))
            ours = {"batch": Load.ours_batch, "requests": Load.ours_requests}
            runs = {(OURS, name): lambda load, name=name: runner.run(ours[name](load, client)) for name in loads}
        else:
            command = [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", *model, "--host", "127.0.0.1",
                "--logprobs-mode", "processed_logprobs", *common,
            ]  # fmt: skip
            http = open_client(url)
            stack.callback(lambda: runner.run(http.aclose()))
            theirs = {"batch": Load.vllm_batch, "requests": Load.vllm_requests}
            runs = {(THEIRS, name): lambda load, name=name: runner.run(theirs[name](load, http)) for name in loads}
        front = stack.enter_context(run_server(command, url))
        results.measure(runs, front, num_rounds=arguments.rounds, until=until)


if __name__ == "__main__":
    main()
