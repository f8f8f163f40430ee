"""Time updates of a server's weights: announced for each parameter (TRL's way) against once for all, in one run.

    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 PYTHONPATH=tests python bench/weights.py --dtype float32       # gloo
    PYTHONPATH=src:tests python bench/weights.py --device cuda:1 --shape 8b -- --gpu-memory-utilization 0.5   # NCCL

The server is a process of its own: `unbroken serve` with vLLM on a Qwen3 of this shape, which starts with dummy
weights (on GPU 0, with `--device cuda:1`). The trainer is this process, its weights are random. Both ways use the same
transport, gloo or NCCL, and end with the same load and reset of the caches; only the transfer differs.

    TRL's    an HTTP request, a call to the workers, a broadcast and a barrier for each parameter
    ours     one HTTP request and one call to the workers for all, packed buckets, sums of every bucket compared

With `--lora-rank 16` it compares instead, by the same broadcast, a model with LoRA adapters on all linear layers:
merged weights, and the adapter alone, which a second server (`--enable-lora`) adds to its weights.

Times are from the announcement to the server's answer that it samples with the new weights; the first update, in which
the group is formed, does not count. Afterwards both must have given the server the same weights. Options after `--` go
to vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from server import free_port
from unbroken.client import AsyncClient
from unbroken.transfer.adapters import A, B
from unbroken.transfer.announcement import Staging
from unbroken.weights.collective import CollectivePublisher

_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 28, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128, "tie_word_embeddings": True,
    },
    "100m": {
        "vocab_size": 2048, "hidden_size": 512, "num_hidden_layers": 28, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 1536, "tie_word_embeddings": True,
    },
    "0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "tie_word_embeddings": False,
    },
}  # fmt: skip
_IDS = list(range(1, 60))


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def save_shell(folder: Path, shape: str, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...]]]:
    """Write a model's folder with a sparse file of weights: names and shapes, and no bytes on the disk."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**_SHAPES[shape], max_position_embeddings=4096, architectures=["Qwen3ForCausalLM"])
    config.dtype = dtype
    config.save_pretrained(folder)
    _save_tokenizer(folder, _SHAPES[shape]["vocab_size"])
    with torch.device("meta"):
        specs = [(name, tuple(weight.shape)) for name, weight in Qwen3ForCausalLM(config).named_parameters()]
    entries: dict[str, Any] = {}
    end = 0
    for name, size in specs:
        start, end = end, end + math.prod(size) * dtype.itemsize
        kind = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
        entries[name] = {"dtype": kind, "shape": size, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return specs


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: k for k, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)


@contextmanager
def serving(folder: Path, dtype: str, options: list[str]) -> Iterator[str]:
    """Run `unbroken serve` in its own process; yields its URL."""
    port = free_port()
    command = [
        sys.executable, "-m", "unbroken", "serve", "--model", str(folder), "--engine", "vllm", "--port", str(port),
        "--dtype", dtype, "--load-format", "dummy", "--max-model-len", "1024", "--enforce-eager", *options,
    ]  # fmt: skip
    say("starting " + " ".join(command[1:]))
    with tempfile.NamedTemporaryFile("w+", prefix="serve-", suffix=".log") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        url = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + 400
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the server does not serve:\n{Path(log.name).read_text()[-6000:]}")
                time.sleep(0.5)
            say("the server serves")
            yield url
        except Exception:
            say(f"the server's log ends with:\n{Path(log.name).read_text()[-4000:]}")
            raise
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def random_weights(
    specs: list[tuple[str, tuple[int, ...]]], device: str, dtype: torch.dtype
) -> list[tuple[str, torch.Tensor]]:
    """Make weights: ones for norms, small random numbers otherwise."""
    generator = torch.Generator(device).manual_seed(0)
    weights = []
    for name, shape in specs:
        made = torch.empty(shape, device=device, dtype=dtype)
        weights.append((name, made.fill_(1.0) if len(shape) == 1 else made.normal_(0, 0.02, generator=generator)))
    return weights


def make_adapter(specs: list[tuple[str, tuple[int, ...]]], rank: int, device: str) -> list[tuple[str, torch.Tensor]]:
    """Make the matrices of an adapter of all linear layers."""
    generator = torch.Generator(device).manual_seed(1)
    made = []
    for name, (rows, columns) in ((name, shape) for name, shape in specs if name.endswith("_proj.weight")):
        for ending, shape in ((A, (rank, columns)), (B, (rows, rank))):
            matrix = torch.empty(shape, device=device).normal_(0, 0.02, generator=generator)
            made.append((name.removesuffix(".weight") + ending, matrix))
    return made


def merge(
    weights: list[tuple[str, torch.Tensor]], adapter: list[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor]]:
    """Add the adapter to the weights."""
    found = dict(adapter)
    merged = []
    for name, weight in weights:
        stem = name.removesuffix(".weight")
        added = found[stem + B] @ found[stem + A] if stem + A in found else 0.0
        merged.append((name, (weight.float() + added).to(weight.dtype)))
    return merged


def compare_adapter(folder: Path, specs: list[tuple[str, tuple[int, ...]]], args: argparse.Namespace) -> None:
    """Time updates with an adapter, merged and alone, of servers that begin with the same weights."""
    from safetensors.torch import save_file

    dtype = getattr(torch, args.dtype)
    weights = random_weights(specs, args.device, dtype)
    save_file({name: weight.cpu() for name, weight in weights}, folder / "model.safetensors")
    adapter = make_adapter(specs, args.lora_rank, args.device)
    scores = {}
    for kind, sent, options in (
        ("merged", merge(weights, adapter), []),
        ("adapter", adapter, ["--enable-lora", "--max-lora-rank", str(args.lora_rank), "--max-loras", "3"]),
    ):
        # On the wire both have the server's dtype.
        num_bytes = sum(tensor.numel() for _, tensor in sent) * dtype.itemsize
        with serving(folder, args.dtype, ["--load-format", "auto", *options, *args.options]) as url:
            *times, scores[kind] = asyncio.run(ours(url, sent, args))
        print(
            f"{kind:8} {len(sent)} tensors, {num_bytes / 1e6:.1f} MB, median {statistics.median(times):.4f} s, fastest "
            f"{min(times):.4f} s",
            flush=True,
        )
    print(f"sums of the scores: merged {scores['merged']:.6f}, adapter {scores['adapter']:.6f}")


async def ours(url: str, weights: list[tuple[str, torch.Tensor]], args: argparse.Namespace) -> list[float]:
    """Return the seconds of each update but the first, and at last the sum of the scores."""
    times = []
    async with AsyncClient(url, max_retries=0) as client:
        publisher = CollectivePublisher(
            [client], device=args.device, bucket_bytes=args.bucket_mib * 2**20, staging=Staging(args.staging),
            timeout_s=60.0,
        )  # fmt: skip
        version = await client.policy_version()
        for number in range(args.repeats + 1):
            version += 1
            update = await publisher.publish(weights, policy_version=version)
            phases = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in update.phases_s.items())
            say(f"ours, update {number}: {update.seconds * 1e3:.1f} ms ({phases})")
            if number:
                times.append(update.seconds)
        publisher.close()
        scored = await client.score([_IDS])
    say(f"  sum of the scores: {float(scored[0].logprobs.sum()):.6f}")
    return [*times, float(scored[0].logprobs.sum())]


def one_by_one(url: str, weights: list[tuple[str, torch.Tensor]], args: argparse.Namespace) -> list[float]:
    """Return the same for updates as TRL's client makes them."""
    from support.parameter_sender import ParameterSender

    sender = ParameterSender(url, device=args.device)
    times = []
    for number in range(args.repeats_one_by_one + 1):
        began = time.perf_counter()
        sender.send(weights)
        sent = time.perf_counter()
        sender.post("/reset_prefix_cache/")
        seconds = time.perf_counter() - began
        say(f"one by one, update {number}: {seconds * 1e3:.1f} ms (load {(began + seconds - sent) * 1e3:.1f})")
        if number:
            times.append(seconds)
    sender.post("/close_communicator/")
    body = {"sequences": [_IDS], "temperature": 1.0, "num_top_logprobs": 0}
    scored = httpx.post(f"{url}/v1/score", json=body, timeout=60).json()["results"][0]["logprobs"]
    sender.close()
    say(f"  sum of the scores: {sum(scored):.6f}")
    return [*times, float(sum(scored))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(_SHAPES), default="tiny")
    parser.add_argument("--dtype", default="bfloat16", help="of the server's model (bfloat16)")
    parser.add_argument("--trainer-dtype", help="of the trainer's weights, which are cast to the server's (the same)")
    parser.add_argument("--device", default="cpu", help="of the trainer: cpu, or cuda:1")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--staging", choices=[str(one) for one in Staging], default="device")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--repeats-one-by-one", type=int, default=3)
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--lora-rank", type=int, help="compare merged weights with the adapter alone, of this rank")
    own, options = sys.argv[1:], []
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    args.options = options
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as folder:
        specs = save_shell(Path(folder), args.shape, getattr(torch, args.dtype))
        if args.lora_rank is not None:
            compare_adapter(Path(folder), specs, args)
            return
        with serving(Path(folder), args.dtype, options) as url:
            weights = random_weights(specs, args.device, getattr(torch, args.trainer_dtype or args.dtype))
            num_bytes = sum(math.prod(shape) for _, shape in specs) * getattr(torch, args.dtype).itemsize
            say(f"{len(specs)} parameters, {num_bytes / 1e9:.3f} GB on the wire")
            *mine, own_score = asyncio.run(ours(url, weights, args))
            print(f"ours        median {statistics.median(mine):.4f} s, fastest {min(mine):.4f} s")
            if args.only_ours:
                return
            *theirs, their_score = one_by_one(url, weights, args)
            print(f"one by one  median {statistics.median(theirs):.4f} s, fastest {min(theirs):.4f} s")
            print(f"ratio of the medians: {statistics.median(theirs) / statistics.median(mine):.1f}")
            same = math.isclose(own_score, their_score, rel_tol=1e-4)
            print("both gave the server the same weights" if same else "THE WEIGHTS DIFFER")


if __name__ == "__main__":
    main()
