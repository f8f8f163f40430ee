"""A colocated vLLM that is closed in its sleep, as SIGTERM does it during a step, ends without errors of CUDA."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support import letters_recipe
from support.installed import require_vllm
from support.served import save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CLOSED_ASLEEP = """
import asyncio, sys
from unbroken.engines.vllm import VllmEngine, parse_engine_args

async def main():
    engine = await VllmEngine.start(parse_engine_args(["--model", *sys.argv[1:]]))
    await engine.sleep()
    await engine.close()

if __name__ == "__main__":
    asyncio.run(main())
"""
OPTIONS = ["--enforce-eager", "--max-model-len", "512", "--gpu-memory-utilization", "0.3", "--dtype", "bfloat16"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_an_engine_that_is_closed_in_its_sleep_prints_no_error(tmp_path: Path) -> None:
    require_vllm()
    script = tmp_path / "closed_asleep.py"
    script.write_text(CLOSED_ASLEEP)
    command = [sys.executable, str(script), str(save_tiny_model(tmp_path / "model")), "--enable-sleep-mode", *OPTIONS]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 0, printed
    assert "CUDA Error" not in printed


def test_a_run_that_gets_sigterm_closes_its_engine(tmp_path: Path) -> None:
    require_vllm()
    output, model = tmp_path / "run", save_tiny_model(tmp_path / "model")
    options = "[" + ", ".join(f'"{word}"' for word in OPTIONS) + "]"
    command = [
        sys.executable, "-m", "unbroken", "train", letters_recipe.__file__, f"--output={output}", f"--model={model}",
        "--engine.kind=colocated", f"--engine.options={options}", "--loop.num-steps=10000",
        "--checkpoints.every=1",
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
    until = time.monotonic() + 400
    while not (output / "checkpoints" / "step-00000003").exists():
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < until, (tmp_path / "log").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    status, printed = process.wait(timeout=120), (tmp_path / "log").read_text()
    assert status == 143, printed
    assert "terminated; the same command continues" in printed
    assert "CUDA Error" not in printed
