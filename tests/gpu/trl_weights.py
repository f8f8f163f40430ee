"""TRL's real client sends weights to our server over NCCL, and so does our publisher: a script for two GPUs.

    PYTHONPATH=src:tests:TRL python tests/gpu/trl_weights.py              # server on GPU 0, trainer on GPU 1
    PYTHONPATH=src:tests python tests/gpu/trl_weights.py --device cpu     # the same steps over gloo, without TRL

Each step prints what it saw; the first that fails ends the script with 1. It takes two starts of vLLM and some seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from unbroken.client import AsyncClient
from unbroken.weights.broadcast import BroadcastPublisher

_CONFIG = {
    "vocab_size": 2048, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "intermediate_size": 1536, "max_position_embeddings": 1024, "initializer_range": 0.1,
}  # fmt: skip
_PROMPTS = [[5, 6, 7, 8], [100, 200, 250], [9] * 12, [1, 2, 3, 4, 5, 6, 7]]
"""Shorter than a block of the prefix cache, and sampled one at a time: the same shapes, so bfloat16 rounds alike."""
_LENGTH = 32


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def check(is_so: bool, what: str) -> None:
    say(("ok    " if is_so else "FAILED  ") + what)
    if not is_so:
        raise SystemExit(1)


def make_model(folder: Path, seed: int, dtype: torch.dtype, *, tied: bool) -> Any:
    """A random Qwen3 in a folder, with a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    from weights import _save_tokenizer

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**_CONFIG, tie_word_embeddings=tied)).to(dtype).eval()
    model.save_pretrained(folder)
    _save_tokenizer(folder, _CONFIG["vocab_size"])
    return model


@contextmanager
def serving(folder: Path, port: int, dtype: str, options: list[str]) -> Iterator[str]:
    command = [
        sys.executable, "-m", "unbroken", "serve", "--model", str(folder), "--engine", "vllm", "--port", str(port),
        "--dtype", dtype, "--max-model-len", "1024", "--enforce-eager", *options,
    ]  # fmt: skip
    say(f"starting a server on {folder.name}")
    with tempfile.NamedTemporaryFile("w+", prefix="serve-", suffix=".log") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        url = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + 300
            while True:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the server does not serve")
                try:
                    if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.5)
            yield url
        except BaseException:
            say(f"the server's log ends with:\n{Path(log.name).read_text()[-5000:]}")
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def sample(url: str, prompt: list[int]) -> httpx.Response:
    body = {"prompts": [prompt], "temperature": 0.0, "max_tokens": _LENGTH}
    return httpx.post(f"{url}/generate/", json={**body, "generation_kwargs": {"ignore_eos": True}}, timeout=120)


def greedy(url: str) -> list[list[int]]:
    found: list[list[int]] = []
    for prompt in _PROMPTS:
        answer = sample(url, prompt)
        assert answer.status_code == 200, answer.text
        found += answer.json()["completion_ids"]
    return found


def version(url: str) -> int:
    found: int = httpx.get(f"{url}/version", timeout=30).json()["policy_version"]
    return found


class TrlSender:
    """TRL's `VLLMClient`, unmodified."""

    def __init__(self, url: str, device: str, group_port: int) -> None:
        from trl.generation.vllm_client import VLLMClient

        self._client = VLLMClient(base_url=url, group_port=group_port, connection_timeout=10)
        self._client.init_communicator(device=device)

    def send(self, model: Any) -> None:
        self._client.update_model_params(model)

    def reset(self) -> None:
        self._client.reset_prefix_cache()

    def refused(self, tensor: torch.Tensor) -> str:
        try:
            self._client.update_named_param("oops", tensor)
        except Exception as error:
            return str(error)
        return ""

    def close(self) -> None:
        self._client.close_communicator()


class GlooSender:
    """The same over gloo, which TRL's client does not have."""

    def __init__(self, url: str, device: str, group_port: int) -> None:
        from support.parameter_sender import ParameterSender

        self._sender = ParameterSender(url, device=device)

    def send(self, model: Any) -> None:
        self._sender.send(model.named_parameters())

    def reset(self) -> None:
        self._sender.post("/reset_prefix_cache/")

    def refused(self, tensor: torch.Tensor) -> str:
        body = {"name": "oops", "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        return self._sender.http.post("/update_named_param/", json=body).text

    def close(self) -> None:
        self._sender.post("/close_communicator/")


_KILLED = """
import asyncio, sys, time
import torch
from unbroken.client import AsyncClient
from unbroken.weights.broadcast import BroadcastPublisher

class Slow(torch.Tensor):
    def detach(self):
        print("sending", flush=True)
        time.sleep(120)

async def main():
    url, device, version, folder = sys.argv[1:]
    from transformers import Qwen3ForCausalLM
    weights = list(Qwen3ForCausalLM.from_pretrained(folder).to(device).named_parameters())
    weights[-1] = (weights[-1][0], weights[-1][1].data.as_subclass(Slow))
    async with AsyncClient(url) as client:
        publisher = BroadcastPublisher([client], device=device, bucket_bytes=2**20, timeout_s=40)
        await publisher.publish(weights, policy_version=int(version))

asyncio.run(main())
"""


async def publish(url: str, model: Any, device: str, policy_version: int) -> None:
    async with AsyncClient(url, max_retries=0) as client:
        publisher = BroadcastPublisher([client], device=device, bucket_bytes=2**20, timeout_s=40.0)
        update = await publisher.publish(model.named_parameters(), policy_version=policy_version)
        say(f"      {update}")
        publisher.close()


def kill_a_trainer(url: str, device: str, policy_version: int, folder: Path) -> None:
    """A trainer process that is killed when it has sent all but the last weight."""
    command = [sys.executable, "-c", _KILLED, url, device, str(policy_version), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        said = trainer.stdout.readline()
        trainer.kill()
    check(said == "sending\n", f"the trainer is killed in mid-broadcast ({said!r})")


def updates(url: str, args: argparse.Namespace, models: list[Any], folders: list[Path]) -> list[list[int]]:
    """All updates of one server; what it samples with the second model's weights."""
    first, second = models
    old = greedy(url)
    made = (TrlSender if args.device.startswith("cuda") else GlooSender)(url, args.device, args.group_port)
    say("the communicator is there")
    with ThreadPoolExecutor(1) as pool:
        made.send(second)
        waiting = pool.submit(greedy, url)
        time.sleep(1)
        check(version(url) == 0 and not waiting.done(), "before the reset no step is made, and requests wait")
        made.reset()
        new = waiting.result()
    check(version(url) == 1 and new != old and greedy(url) == new, "after it they have the new weights, version 1")
    check("no weight named" in made.refused(next(second.parameters())), "an unknown name is refused")
    made.close()
    asyncio.run(publish(url, first, args.device, 2))
    check(greedy(url) == old and version(url) == 2, "our publisher brings the first weights back, as version 2")
    again = (TrlSender if args.device.startswith("cuda") else GlooSender)(url, args.device, args.group_port + 1)
    again.send(second)
    again.reset()
    again.close()
    check(greedy(url) == new and version(url) == 3, "a second communicator works")
    kill_a_trainer(url, args.device, 4, folders[0])
    refused = sample(url, _PROMPTS[0])
    check(
        refused.status_code == 503 and "weights_incomplete" in refused.text and version(url) == 3,
        f"nothing is sampled with a mixture of two versions: {refused.text[:200]}",
    )
    asyncio.run(publish(url, first, args.device, 4))
    check(greedy(url) == old and version(url) == 4, "and the next whole version is sampled with")
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:1", help="of the trainer; the server is on GPU 0")
    parser.add_argument("--group-port", type=int, default=51216)
    parser.add_argument("--untied", action="store_true", help="a head of its own")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(500, exit=True)
    on_gpu = args.device.startswith("cuda")
    dtype, options = ("bfloat16", ["--gpu-memory-utilization", "0.3"]) if on_gpu else ("float32", [])
    with tempfile.TemporaryDirectory(prefix="trl-weights-") as folder:
        folders = [Path(folder) / name for name in ("first", "second")]
        models = [
            make_model(path, seed, getattr(torch, dtype), tied=not args.untied).to(args.device)
            for seed, path in enumerate(folders)
        ]
        with serving(folders[0], 8123, dtype, options) as url:
            new = updates(url, args, models, folders)
        with serving(folders[1], 8124, dtype, options) as url:
            check(greedy(url) == new, "a fresh server on the second weights samples the same")
    say("PASSED")


if __name__ == "__main__":
    main()
