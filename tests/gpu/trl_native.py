"""TRL's own `GRPOTrainer` in server mode (1.11 and later) trains against `unbroken serve` over NCCL.

    PYTHONPATH=src:tests python tests/gpu/trl_native.py                  # server on GPU 0, trainer on GPU 1
    PYTHONPATH=src:tests python tests/gpu/trl_native.py --same-gpu       # both on GPU 0, weights by NCCL's sockets
    PYTHONPATH=src:tests python tests/gpu/trl_native.py --tensor-parallel-size 2         # server on GPUs 0 and 1
    PYTHONPATH=src:tests python tests/gpu/trl_native.py --device cpu     # the same steps over gloo

It needs trl, datasets and accelerate beside vLLM. Each step prints what it saw, the last line is PASSED, and the first
step that fails, or takes longer than four minutes, ends the script with 1.
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
from pathlib import Path
from typing import Any

import httpx

from support.served import save_tiny_model, served
from unbroken.client import AsyncClient
from unbroken.weights.broadcast import BroadcastPublisher

_STEP_S = 240
_TRAINER = Path(__file__).parents[1] / "e2e" / "clients" / "trl_native_trainer.py"
_SIZES = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "head_dim": 128,
    "intermediate_size": 1024,
    "initializer_range": 0.05,
}
_PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23]]
_NUM_STEPS = 20
"""Of the trainer."""


def begin(step: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {step}", flush=True)
    signal.alarm(_STEP_S)


def check(is_so: bool, what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]   {'ok     ' if is_so else 'FAILED '} {what}", flush=True)
    if not is_so:
        raise SystemExit(1)


def ask_scores(url: str) -> httpx.Response:
    body = {"sequences": _PROMPTS, "temperature": 1.0, "num_top_logprobs": 0}
    return httpx.post(f"{url}/v1/score", json=body, timeout=60)


def scores(url: str) -> list[list[float]]:
    answer = ask_scores(url)
    assert answer.status_code == 200, answer.text
    return [result["logprobs"] for result in answer.json()["results"]]


def version(url: str) -> int:
    found: int = httpx.get(f"{url}/version", timeout=30).json()["policy_version"]
    return found


def distance(rows: list[list[float]], others: list[list[float]]) -> float:
    """The mean of the absolute differences."""
    gaps = [abs(a - b) for one, other in zip(rows, others, strict=True) for a, b in zip(one, other, strict=True)]
    return sum(gaps) / len(gaps)


def train(url: str, model: Path, out: Path, device: str, env: dict[str, str], first_version: int) -> None:
    """Run TRL's trainer, and compare what it and the server made of its weights."""
    command = [sys.executable, str(_TRAINER), url, str(model), str(out), device, str(_NUM_STEPS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_STEP_S, check=False)
    if done.returncode != 0:
        print(done.stdout[-2000:], done.stderr[-6000:], sep="\n", flush=True)
    check(done.returncode == 0, "the trainer trained")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    trained, after, left = found["trained"], found["after"], found["left"]
    versions = [found["before"]["version"], trained["version"], after["version"], left["version"]]
    expected = [first_version, first_version + _NUM_STEPS, *[first_version + _NUM_STEPS + 1] * 2]
    check(versions == expected, f"TRL {found['trl']}: one version for each update ({versions})")
    rows = found["rows"]
    check(
        rows["sampled"] == rows["trained"] == rows["exact"] == _NUM_STEPS * 8,
        f"{rows['exact']} of {rows['trained']} rows are trained with the ids and logprobs of {rows['sampled']} sampled",
    )
    check(
        len(rows["apart"]) == _NUM_STEPS and max(rows["apart"]) < 0.1,
        f"at each of {len(rows['apart'])} samplings the server scores as the trainer: {max(rows['apart']):.5f} apart",
    )
    moved, apart = distance(found["before"]["server"], after["server"]), distance(after["server"], after["trainer"])
    check(
        apart < 0.05 and moved > 3 * apart,
        f"and at the end: {apart:.5f} apart; training moved its scores by {moved:.5f}",
    )
    check(left["server"] == after["server"], "a refused update leaves the weights")
    check("no weight named 'oops'" in found["refused"], "and is an exception in TRL, which did not hang")
    ratios = [line["sampling/importance_sampling_ratio/mean"] for line in found["history"]]
    check(all(0.8 < ratio < 1.2 for ratio in ratios), f"TRL's importance ratios {ratios}")


_BROKEN = """
import sys, threading, time
import requests, torch
from transformers import AutoModelForCausalLM
from support.packed_sender import GlooEndpoint, describe, send_packed
from support.processes import free_port

url, folder, device, world_size = sys.argv[1:4] + [int(sys.argv[4])]
weights = [(n, p.data.to(device)) for n, p in AutoModelForCausalLM.from_pretrained(folder).named_parameters()]
info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": world_size,
        "packed": True, "packed_buffer_size_bytes": 2**20}

def post(path, body):
    answer = requests.post(url + path, json=body, timeout=120)
    print("ANSWER", answer.status_code, answer.text[:600], flush=True)

meeting = threading.Thread(target=post, args=("/init_weight_transfer_engine", {"init_info": info, "timeout_s": 8}))
meeting.start()
if device == "cpu":
    endpoint = GlooEndpoint("127.0.0.1", info["master_port"], world_size)
else:
    from vllm.distributed.weight_transfer.nccl_common import trainer_init
    endpoint = trainer_init(info)
meeting.join()
post("/start_weight_update", {})
receiving = threading.Thread(target=post, args=("/update_weights", {"update_info": describe(weights)}))
receiving.start()

def stop_half_way():
    for name, weight in weights[: len(weights) // 2]:
        yield name, weight
    print("HALF", flush=True)
    receiving.join()
    print("ENDED", flush=True)
    time.sleep(300)

if device == "cpu":
    send_packed(stop_half_way(), endpoint, 2**20)
else:
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
    packed_nccl_broadcast_producer(stop_half_way(), endpoint, 0, lambda item: item[1], buffer_size_bytes=2**20)
"""


def break_off(url: str, model: Path, device: str, env: dict[str, str], world_size: int, *, kill: bool) -> None:
    """A trainer that stops half-way: it is killed, or lives on without a word until the server's deadline of 8 s.

    The model then has weights of two versions, with which nothing is sampled.
    """
    before = version(url)
    command = [sys.executable, "-c", _BROKEN, url, str(model), "cpu" if device == "cpu" else "cuda", str(world_size)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        lines = iter(trainer.stdout.readline, "")
        try:
            for line in lines:
                print(f"      trainer: {line.strip()[:200]}", flush=True)
                if line == "HALF\n":
                    break
            began = time.monotonic()
            if kill:
                trainer.kill()
            else:
                answer = next(lines)
                print(f"      trainer: {answer.strip()[:300]}", flush=True)
                check("ANSWER 400" in answer and "bad_weights" in answer, "the silent trainer gets the error")
        finally:
            trainer.kill()
    refused = ask_scores(url)  # the engine answers again when its workers have given up
    seconds = time.monotonic() - began
    check(seconds < 30, f"the server answers again after {seconds:.1f} s")
    is_refused = refused.status_code == 503 and "weights_incomplete" in refused.text
    check(is_refused, f"that it has no whole version: {refused.text[:200]}")
    check(version(url) == before, "with the version before")
    check(httpx.get(f"{url}/health", timeout=10).status_code == 503, "and is not healthy")


async def bring_whole_weights(url: str, folder: Path) -> None:
    """Publish the weights of a folder as the next version."""
    from transformers import AutoModelForCausalLM

    weights = list(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    async with AsyncClient(url) as client:
        publisher = BroadcastPublisher([client], timeout_s=60.0)
        await publisher.publish(weights, policy_version=version(url) + 1)
        publisher.close()


def repair(url: str, model: Path, first: list[list[float]]) -> None:
    asyncio.run(bring_whole_weights(url, model))
    check(httpx.get(f"{url}/health", timeout=10).status_code == 200, "a whole version makes it healthy")
    apart = distance(first, scores(url))
    check(apart < 0.01, f"and it scores with that version: {apart:.5f} apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="GPUs of the server; the trainer has the next"
    )
    parser.add_argument("--same-gpu", action="store_true", help="trainer and server on one GPU, for NCCL two machines")
    args = parser.parse_args()
    signal.signal(signal.SIGALRM, _give_up)
    size = args.tensor_parallel_size
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    options: tuple[str, ...] = ()
    if args.device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = str(size)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(size)))  # of the server
        if args.same_gpu:  # NCCL refuses one GPU for two ranks of a machine
            env |= {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": "trainer", "NCCL_SOCKET_IFNAME": "lo"}
            os.environ |= {"NCCL_HOSTID": "server", "NCCL_SOCKET_IFNAME": "lo"}
        options = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.3", "--tensor-parallel-size", str(size))
    with tempfile.TemporaryDirectory(prefix="trl-native-") as folder:
        model = save_tiny_model(Path(folder) / "model", **(_SIZES if args.device == "cuda" else {}))
        begin("starting the server")
        with served(model, *options) as server:
            first = scores(server.url)
            begin("TRL's trainer")
            train(server.url, model, Path(folder) / "out", args.device, env, 0)
            begin("a trainer that is killed half-way")
            break_off(server.url, model, args.device, env, size + 1, kill=True)
            repair(server.url, model, first)
            begin("a trainer that says nothing more half-way")
            break_off(server.url, model, args.device, env, size + 1, kill=False)
            repair(server.url, model, first)
            begin("TRL's trainer again")
            train(server.url, model, Path(folder) / "out", args.device, env, version(server.url))
            begin("stopping the server")
    print("PASSED", flush=True)


def _give_up(*_: Any) -> None:
    print(f"FAILED: the step took longer than {_STEP_S} s", flush=True)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
