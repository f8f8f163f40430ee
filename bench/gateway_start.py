"""Measures the start of `unbroken gateway --upstream`: seconds until it serves, CPU, and memory.

    OMP_NUM_THREADS=1 python bench/gateway_start.py [--rounds 3]

The tokenizer has Tekken's vocabulary (131,072 ids) and Qwen3's template. At its first start in a fresh cache another
process loads it with transformers, whose CPU is counted too; later starts find it there. Requires the extra `dev`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from rendering import make_tokenizer
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig
from unbroken.server.process import host_app


async def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the start of a gateway.")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tokenizer = make_tokenizer("qwen3")
    renderer = TemplateRenderer(tokenizer)
    engine = ScriptedEngine(lambda _: [2], vocab_size=len(tokenizer))
    app = create_app(engine, lambda _: renderer, TextCodec(tokenizer), ServerConfig(model_name="m"))
    print(f"{'':12} {'seconds':>8} {'CPU s':>6} {'MB':>5} {'MB at most':>11}")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(f"{folder}/tokenizer")
        async with host_app(app) as url:
            for number in range(args.rounds + 1):
                await measure("later start" if number else "first start", url, folder)


async def measure(name: str, url: str, folder: str) -> None:
    words = [sys.executable, "-m", "unbroken", "gateway", "--port", "0", "--upstream", url, "--no-control-key"]
    words += ["--tokenizer", f"{folder}/tokenizer", "--store", f"{folder}/store"]
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, env={**os.environ, "HF_HOME": f"{folder}/cache"}
    )
    assert process.stdout is not None
    while not (line := await process.stdout.readline()).startswith(b"unbroken serves"):
        assert line, "the gateway ended"
    seconds = time.perf_counter() - began
    await asyncio.sleep(0.5)
    show(name, seconds, process.pid)
    process.terminate()
    await process.wait()


def show(name: str, seconds: float, pid: int) -> None:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # its own, and of the processes that it waited for
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now, most = (int(status[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))
    print(f"{name:12} {seconds:8.2f} {cpu_s:6.2f} {now:5.0f} {most:11.0f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
