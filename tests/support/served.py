"""`unbroken serve` in a separate process, with a tiny random model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.forks import ForkedPython
from support.models import random_qwen3
from support.servers import server_tokenizer
from support.vllm_session import SMALL_VLLM

_STARTED = re.compile(r"unbroken serves (\S+) at (http://\S+)")
_VLLM_OPTIONS = (*SMALL_VLLM, "--max-model-len", "2048")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running server."""

    url: str
    model: str
    process: subprocess.Popen[bytes] | ForkedPython


def save_tiny_model(folder: Path, **sizes: Any) -> Path:
    """Save a random Qwen3 with the servers' tokenizer and a head size that vLLM's CPU kernels support, or `sizes`."""
    tokenizer = server_tokenizer()
    tokenizer.save_pretrained(folder)
    default = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
    }
    random_qwen3(vocab_size=len(tokenizer), **{**default, **sizes}).save_pretrained(folder)
    return folder


@contextmanager
def served(folder: Path, *options: str, engine: str = "vllm", as_command: bool = False) -> Iterator[Served]:
    """Start `unbroken serve` on a model folder, wait until it serves, and stop it by SIGTERM as a supervisor would.

    The process is a fork that has everything imported or, `as_command`, that of a new Python, as a user has it.
    """
    own = _VLLM_OPTIONS if engine == "vllm" else ()
    arguments = [
        "serve", str(folder), "--served-model-name", "tiny", "--engine", engine, "--port", "0", *own, *options
    ]  # fmt: skip
    with _running(arguments, as_command=as_command) as server:
        yield server


@contextmanager
def gateway_over(server: Served, folder: Path, store: Path, *options: str) -> Iterator[Served]:
    """Start `unbroken gateway` over a server, with the tokenizer in a model folder, and stop it as `served` does."""
    own = ["--tokenizer", str(folder), "--store", str(store), "--served-model-name", "tiny", "--no-control-key"]
    with _running(["gateway", "--upstream", server.url, "--port", "0", *own, *options]) as gateway:
        yield gateway


@contextmanager
def _running(arguments: Sequence[str], *, as_command: bool = False) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as logs:
        output, errors = Path(logs, "output"), Path(logs, "errors")
        if as_command:
            process: subprocess.Popen[bytes] | ForkedPython = _start_command(arguments, output, errors)
        else:
            process = ForkedPython(
                "unbroken", *arguments, output=output, errors=errors, environment=_ENVIRONMENT, new_session=True
            )
        try:
            yield Served(url=_wait_for_url(process, output, errors), model="tiny", process=process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            _check_none_is_left(process.pid)


def _start_command(arguments: Sequence[str], output: Path, errors: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as output_file, errors.open("wb") as error_file:
        return subprocess.Popen(
            [sys.executable, "-m", "unbroken", *arguments],
            stdout=output_file,
            stderr=error_file,
            env=os.environ | _ENVIRONMENT,
            start_new_session=True,
        )


def _check_none_is_left(session_id: int) -> None:
    """Check that the server's child processes end with it, or within seconds."""
    until = time.monotonic() + 60
    while left := _processes_of_session(session_id):
        assert time.monotonic() < until, f"the server left processes behind: {left}"
        time.sleep(0.2)


def _processes_of_session(session_id: int) -> list[str]:
    """Names of the processes of a session, including its leader."""
    names = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, fields = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields.split()[3]) == session_id and fields.split()[0] != "Z":
            names.append(head.partition("(")[2])
    return names


def _wait_for_url(process: subprocess.Popen[bytes] | ForkedPython, output: Path, errors: Path) -> str:
    while True:
        ended = process.poll() is not None
        if output.exists() and (match := _STARTED.search(output.read_text())):
            return match.group(2)
        assert not ended, f"the server ended before it served: {errors.read_text()[-3000:]}"
        time.sleep(0.05)
