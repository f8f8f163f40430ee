"""Measures what the gateway adds to a turn, beside an HTTP hop that does nothing.

    OMP_NUM_THREADS=1 python bench/gateway.py [--sessions 32] [--turns 50] [--engine-seconds 1.0] [--live 1000]

One process serves, this one is the agents: each session asks, gets a call, and answers it with a tool result of 200
tokens, again and again. The engine is scripted and waits `--engine-seconds` before each reply, as a model takes time;
what a turn takes beyond that is the gateway's. The hop is an application that reads the same bodies, waits as long, and
answers with bytes of the same size. Vocabulary of Mistral's Tekken (131,072 ids), Qwen3's template, SQLite on this
machine's disk. With `--profile`, the server's profile is printed at its end. Requires the extra `dev`.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rendering import make_tokenizer
from unbroken.client.calls import Connections
from unbroken.engines.scripted import ScriptedEngine
from unbroken.gateway.app import create_gateway
from unbroken.ledger.store import open_store
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.config import ServerConfig
from unbroken.server.process import host_app, prepare_process
from unbroken.types import FinishReason, SampleChunk, SampledSequence, SampleRequest, SampleResult, VersionSpan

CALL = (
    'I will read the next file.\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call><|im_end|>'
)
RESULT = " ".join(f"line {number} has nothing of note" for number in range(36))
"""About 200 tokens."""
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


class SlowEngine(ScriptedEngine):
    """Takes its time before each reply, and no more than that; streams in chunks of one id."""

    seconds = 0.0
    reply: Any = None

    async def sample(self, request: SampleRequest) -> SampleResult:
        """See `Engine`."""
        await asyncio.sleep(self.seconds)
        return SampleResult(prompt_ids=request.prompt_ids, sequences=(self.reply,))

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        """See `Engine`."""
        await asyncio.sleep(self.seconds)
        async for chunk in super().stream(request):
            yield chunk


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the gateway adds to a turn.")
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--engine-seconds", type=float, default=1.0)
    parser.add_argument("--live", type=int, default=1000, help="sessions of 10 turns for the memory")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", choices=["gateway", "hop"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve, args.engine_seconds, args.profile))
        return
    print(f"{args.sessions} sessions x {args.turns} turns, engine {args.engine_seconds:g} s, {os.cpu_count()} cores")
    print(
        f"{'':10} {'mean ms':>8} {'p50':>7} {'p99':>7} {'first 10':>9} {'last 10':>8} {'turns/s':>8} "
        f"{'server CPU ms':>14}"
    )
    for kind in ("hop", "gateway"):
        with server(kind, args.engine_seconds, args.profile) as (url, process):
            before_s = cpu_seconds(process.pid)
            measured = asyncio.run(measure(url, args, is_gateway=kind == "gateway"))
            show(kind, measured, cpu_seconds(process.pid) - before_s)
    with server("gateway", 0.0, False) as (url, process):
        asyncio.run(measure_stream(url))
        asyncio.run(measure_memory(url, process, args.live))


def show(kind: str, measured: tuple[np.ndarray[Any, Any], float], cpu_s: float) -> None:
    added_ms, seconds = measured
    flat = np.sort(added_ms.ravel())
    numbers = (
        flat.mean(), np.median(flat), np.quantile(flat, 0.99), added_ms[:, :10].mean(), added_ms[:, -10:].mean()
    )  # fmt: skip
    cpu_ms = 1000 * cpu_s / flat.size
    print(
        f"{kind:10} {numbers[0]:8.1f} {numbers[1]:7.1f} {numbers[2]:7.1f} {numbers[3]:9.1f} {numbers[4]:8.1f} "
        f"{flat.size / seconds:8.1f} {cpu_ms:14.2f}",
        flush=True,
    )


async def measure(url: str, args: argparse.Namespace, *, is_gateway: bool) -> tuple[np.ndarray[Any, Any], float]:
    """[sessions, turns] milliseconds beyond the engine's, and the seconds of all together."""
    async with httpx.AsyncClient(base_url=url, transport=Connections(), timeout=600) as http:
        start = time.perf_counter()
        each = [run_session(http, args, number, is_gateway=is_gateway) for number in range(args.sessions)]
        return np.array(await asyncio.gather(*each)), time.perf_counter() - start


async def run_session(
    http: httpx.AsyncClient, args: argparse.Namespace, number: int, *, is_gateway: bool
) -> list[float]:
    headers = await new_session(http) if is_gateway else {}
    await asyncio.sleep(number * args.engine_seconds / args.sessions)  # agents do not start together
    messages: list[Any] = [{"role": "user", "content": f"Task {number}: find the fault."}]
    added_ms = []
    for _ in range(args.turns):
        start = time.perf_counter()
        reply = await ask(http, headers, messages)
        added_ms.append(1000 * (time.perf_counter() - start - args.engine_seconds))
        messages += [reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": RESULT}]
    return added_ms


async def new_session(http: httpx.AsyncClient) -> dict[str, str]:
    created = (await http.post("/v1/sessions", json={})).json()
    return {"Authorization": f"Bearer {created['api_key']}"}


async def ask(http: httpx.AsyncClient, headers: dict[str, str], messages: list[Any]) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS}, headers=headers)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


async def measure_stream(url: str) -> None:
    """Milliseconds of a streamed token, with a session and without."""
    async with httpx.AsyncClient(base_url=url, transport=Connections(), timeout=600) as http:
        for name, headers in (("session", await new_session(http)), ("plain", {})):
            body = {"messages": [{"role": "user", "content": "Write."}], "stream": True}
            start = time.perf_counter()
            async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                events = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
            ms = 1000 * (time.perf_counter() - start) / len(events)
            print(f"streamed, {name:8} {ms:8.3f} ms an event, {len(events)} events", flush=True)


async def measure_memory(url: str, process: subprocess.Popen[str], number: int) -> None:
    """Megabytes that live sessions of 10 turns add."""
    before = resident_mb(process.pid)
    async with httpx.AsyncClient(base_url=url, transport=Connections(), timeout=600) as http:
        args = argparse.Namespace(engine_seconds=0.0, sessions=1, turns=10)
        start = time.perf_counter()
        for first in range(0, number, 32):
            some = range(first, min(first + 32, number))
            await asyncio.gather(*(run_session(http, args, 0, is_gateway=True) for _ in some))
        seconds = time.perf_counter() - start
    added = resident_mb(process.pid) - before
    print(
        f"{number} live sessions of 10 turns: {added:.0f} MB; "
        f"{10 * number / seconds:.0f} turns (durable writes) a second"
    )


async def serve(kind: str, engine_seconds: float, profiles: bool) -> None:
    profile = cProfile.Profile() if profiles else None
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with tempfile.TemporaryDirectory() as folder:
        app: Any = make_hop(engine_seconds) if kind == "hop" else make_gateway(engine_seconds, folder)
        async with host_app(app) as url:
            prepare_process()  # as the commands do
            print(url, flush=True)
            if profile is not None:
                profile.enable()
            await stop.wait()
            if profile is not None:
                profile.disable()
                pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)


def make_gateway(engine_seconds: float, folder: str) -> Any:
    tokenizer = make_tokenizer("qwen3")
    codec = TextCodec(tokenizer)
    call = tokenizer.encode(CALL, add_special_tokens=False)
    story = tokenizer.encode("word " * 2000 + "<|im_end|>", add_special_tokens=False)
    asked = tokenizer.encode("Write.", add_special_tokens=False)

    def reply(prompt: Any) -> Any:
        return story if asked[0] in prompt[:20].tolist() else call

    engine = SlowEngine(reply, allow_forks=True, vocab_size=len(tokenizer))
    engine.seconds = engine_seconds
    engine.reply = SampledSequence(
        completion_ids=call,
        rollout_logprobs=np.full(len(call), -0.5, np.float32),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(start=0, stop=len(call), policy_version=0),),
    )
    base = TemplateRenderer(tokenizer)

    def make_renderer(options: Any) -> Any:
        return base if not options else TemplateRenderer(tokenizer, template_kwargs=options)

    return create_gateway(engine, make_renderer, codec, ServerConfig(model_name="m"), store=open_store(folder))


def make_hop(engine_seconds: float) -> Any:
    call = {"id": "call00000", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
    message = {"role": "assistant", "content": "I will read the next file.", "tool_calls": [call]}
    answer = json.dumps({"id": "chatcmpl-0", "choices": [{"index": 0, "message": message}]}).encode()

    async def hop(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] == "lifespan":
            for done in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{done}.complete"})
            return
        while (await receive()).get("more_body", False):
            pass
        await asyncio.sleep(engine_seconds)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return hop


@contextmanager
def server(kind: str, engine_seconds: float, profiles: bool) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    words = [sys.executable, __file__, "--serve", kind, "--engine-seconds", str(engine_seconds)]
    process = subprocess.Popen(words + ["--profile"] * profiles, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
