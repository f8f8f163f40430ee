"""Time updates of servers' weights over the one wire or through a store, and measure what they hold, on both sides.

    OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 PYTHONPATH=src:tests:bench python bench/weights.py --dtype float32
    PYTHONPATH=src:tests:bench python bench/weights.py --device cuda:1 --shape 8b -- --gpu-memory-utilization 0.5
    ... --kind merged --lora-rank 32       # LoRA, merged with the weights one by one while they are sent
    ... --kind adapter --lora-rank 32      # LoRA, the adapter alone
    ... --engine receiver                  # without vLLM: a process that receives and verifies, and loads nothing
    ... --engines 4 --publish-to 1,4 --ways wire,store      # several servers, in equal parts on the GPUs

The first goes over gloo, the second over NCCL, which wants a GPU for each member: where two share one, gloo carries the
weights. The server is a process of its own (on GPU 0, with `--device cuda:1`):
`unbroken serve` with vLLM on a Qwen3 of this shape, which starts with dummy weights. The trainer is this process, its
weights are random. Times are from the call to the server's answer that it samples with the new weights; the first
update, in which the group is formed, does not count.

Extra memory is the peak during an update over what there was before it: of the GPU as a whole for the server, of
torch's allocator for the trainer; without GPUs that of the resident memory of the processes.
Options after `--` are vLLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from server import free_port
from unbroken.client import AsyncClient
from unbroken.weights.adapters import A, B
from unbroken.weights.base import WeightPublisher
from unbroken.weights.broadcast import BroadcastPublisher
from unbroken.weights.disk import DiskPublisher
from unbroken.weights.receiver import make_local_call
from unbroken.weights.sources import TensorSpec, WeightStream

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


STORE = "store"
"""The folder of versions, in that of the model."""


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
def serving(folder: Path, args: argparse.Namespace) -> Iterator[list[tuple[str, int]]]:
    """Run the servers, each in its own process; yields their URLs and the processes' ids."""
    with ExitStack() as stack:
        servers = [stack.enter_context(start_server(folder, args, number)) for number in range(args.engines)]
        until = time.monotonic() + 400
        for url, process, log in servers:
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the server does not serve:\n{log.read_text()[-6000:]}")
                time.sleep(0.5)
        say(f"{len(servers)} serve")
        try:
            yield [(url, process.pid) for url, process, _ in servers]
        except Exception:
            for _, _, log in servers:
                say(f"a server's log ends with:\n{log.read_text()[-4000:]}")
            raise
        finally:
            for _, process, _ in servers:
                process.terminate()


@contextmanager
def start_server(
    folder: Path, args: argparse.Namespace, number: int
) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """Start a server; yields the URL that it will serve, its process, and its log."""
    port = free_port()
    command = [sys.executable, "-m", "unbroken", "serve", "--model", str(folder), "--engine", "vllm"]
    command += ["--port", str(port), "--dtype", args.dtype, "--load-format", "dummy", "--max-model-len", "1024"]
    command += ["--weights-dir", str(folder / STORE), "--enforce-eager", *args.options]
    if args.kind == "adapter":
        command += ["--enable-lora", "--max-lora-rank", str(args.lora_rank), "--max-loras", "3"]
    if args.engine == "receiver":
        command = [sys.executable, __file__, "--receive", str(port), "--device", args.device, "--dtype", args.dtype]
    gpus = torch.cuda.device_count()
    own = {"CUDA_VISIBLE_DEVICES": str(number * gpus // args.engines)} if gpus and args.engines > 1 else {}
    say("starting " + " ".join(command[1:]))
    log = folder / f"serve-{number}.log"
    with log.open("wb") as written:
        process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, env={**os.environ, **own})
        try:
            yield f"http://127.0.0.1:{port}", process, log
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def receive(port: int, device: str, dtype: str) -> None:
    """Serve an engine that receives weights on GPU 0, or on the CPU, and loads nothing."""
    import uvicorn

    from support.servers import make_app, scripted_engine
    from unbroken.types import WeightPlacement

    on_gpu = device.startswith("cuda")
    own = "cuda:0" if on_gpu else "cpu"
    engine = scripted_engine("never")

    async def placement() -> WeightPlacement:
        uuids = (str(torch.cuda.get_device_properties(0).uuid),) if on_gpu else ()
        return WeightPlacement(dtype=dtype, device="cuda" if on_gpu else "cpu", gpu_uuids=uuids)

    engine.weight_placement = placement
    engine.transfer._call = engine.transfer._call_in_update = make_local_call(lambda: own)
    uvicorn.run(make_app(engine), host="127.0.0.1", port=port, log_level="warning")


class Memory:
    """The peak of the memory that is in use, over what there was when the block began, in bytes."""

    def __init__(self, device: str, server: int) -> None:
        self._device = device
        self._server = server
        self._on_gpu = device.startswith("cuda")
        self.trainer = self.server = 0

    def __enter__(self) -> Memory:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._before = self._of_trainer(), self._of_server()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._on_gpu:
            self.trainer = torch.cuda.max_memory_allocated(self._device) - self._before[0]

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.trainer = max(self.trainer, self._of_trainer() - self._before[0])
            self.server = max(self.server, self._of_server() - self._before[1])

    def _of_trainer(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._on_gpu else _resident(os.getpid())

    def _of_server(self) -> int:
        if self._on_gpu:
            free, total = torch.cuda.mem_get_info(0)
            return total - free
        return sum(_resident(pid) for pid in _descendants(self._server))


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [each for child in children.read_text().split() for each in _descendants(int(child))]
        except OSError:  # it has ended
            continue
    return found


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


def merge(weights: Sequence[tuple[str, torch.Tensor]], adapter: Sequence[tuple[str, torch.Tensor]]) -> WeightStream:
    """Merge the weights with the adapter, one by one as they are read."""
    found = dict(adapter)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            stem = name.removesuffix(".weight")
            added = found[stem + B] @ found[stem + A] if stem + A in found else None
            yield name, weight if added is None else weight.float().add_(added)

    return WeightStream((TensorSpec.of(*named) for named in weights), read())


async def update(
    servers: Sequence[tuple[str, int]],
    folder: Path,
    args: argparse.Namespace,
    specs: list[tuple[str, tuple[int, ...]]],
) -> None:
    """Make the updates each way, to each number of servers, and print what each took."""
    weights = random_weights(specs, args.device, getattr(torch, args.trainer_dtype or args.dtype))
    adapter = make_adapter(specs, args.lora_rank, args.device) if args.kind != "full" else []

    def make() -> Any:
        return {"full": weights, "adapter": adapter}.get(args.kind) or merge(weights, adapter)

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(url, max_retries=0)) for url, _ in servers]
        first = 1 + max([await client.policy_version() for client in clients])
        for way in args.ways.split(","):
            for number in map(int, args.publish_to.split(",")):
                name = f"{args.shape} {args.kind}, {way}, engines {number}"
                publisher = open_publisher(way, clients[:number], folder, args)
                lines = [await publish(publisher, make(), first + step, servers[0][1], args, f"{name}, update {step}")
                         for step in range(args.repeats + 1)]  # fmt: skip
                if isinstance(publisher, BroadcastPublisher):
                    publisher.close()
                first += args.repeats + 1
                report(name, lines)


def open_publisher(way: str, clients: Sequence[AsyncClient], folder: Path, args: argparse.Namespace) -> WeightPublisher:
    """Open what publishes this way."""
    if way == "store":
        return DiskPublisher(clients, folder / STORE, num_kept=1, timeout_s=args.timeout_s)
    return BroadcastPublisher(
        clients, device=args.device, bucket_bytes=args.bucket_mib * 2**20, timeout_s=args.timeout_s
    )


async def publish(
    publisher: WeightPublisher, sent: Any, version: int, server: int, args: argparse.Namespace, name: str
) -> tuple[float, int, int, int]:
    """Publish once; returns seconds, bytes, and what trainer and first server held beyond what they had."""
    with Memory(args.device, server) as memory:
        made = await publisher.publish(sent, policy_version=version)
    phases = ", ".join(f"{phase} {seconds * 1e3:.1f}" for phase, seconds in made.phases_s.items())
    say(
        f"{name}: {made.seconds * 1e3:.1f} ms ({phases}); extra: trainer "
        f"{memory.trainer / 1e9:.3f} GB, server {memory.server / 1e9:.3f} GB"
    )
    assert not made.missed_by, made.missed_by
    return made.seconds, made.num_bytes, memory.trainer, memory.server


def report(name: str, lines: Sequence[tuple[float, int, int, int]]) -> None:
    """Print the medians of the updates after the first."""
    times, num_bytes, trainer, receiver = zip(*lines[1:], strict=True)
    print(
        f"{name}: {num_bytes[0] / 1e9:.3f} GB, median {statistics.median(times):.4f} s, fastest {min(times):.4f} s; "
        f"extra at most: trainer {max(trainer) / 1e9:.3f} GB, server {max(receiver) / 1e9:.3f} GB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(_SHAPES), default="tiny")
    parser.add_argument("--kind", choices=["full", "merged", "adapter"], default="full")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--engine", choices=["vllm", "receiver"], default="vllm")
    parser.add_argument("--engines", type=int, default=1, help="servers, in equal parts on the GPUs")
    parser.add_argument("--publish-to", default="1", help="how many of them get the updates, such as 1,4")
    parser.add_argument("--ways", default="wire", help="of wire, store (a folder that all see)")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="longest wait for a step of an update")
    parser.add_argument("--scratch", help="folder for the servers' folder and the store")
    parser.add_argument("--dtype", default="bfloat16", help="of the server's model (bfloat16)")
    parser.add_argument("--trainer-dtype", help="of the trainer's weights, which are cast to the server's (the same)")
    parser.add_argument("--device", default="cpu", help="of the trainer: cpu, or cuda:1")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    own, options = sys.argv[1:], []
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    args.options = options
    if args.receive is not None:
        receive(args.receive, args.device, args.dtype)
        return
    if not set(args.ways.split(",")) <= {"wire", "store"}:
        parser.error(f"--ways must be of wire, store, got {args.ways}")
    if max(map(int, args.publish_to.split(","))) > args.engines:
        parser.error(f"--publish-to must be at most --engines, {args.engines}, got {args.publish_to}")
    with tempfile.TemporaryDirectory(prefix="bench-weights-", dir=args.scratch) as folder:
        specs = save_shell(Path(folder), args.shape, getattr(torch, args.dtype))
        (Path(folder) / STORE).mkdir()
        with serving(Path(folder), args) as servers:
            asyncio.run(update(servers, Path(folder), args, specs))


if __name__ == "__main__":
    main()
