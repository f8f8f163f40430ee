"""Measures what `unbroken gateway` costs a turn, beside a bare forwarder of the same requests in the same run.

    OMP_NUM_THREADS=1 python bench/gateway.py [--sessions 1 32 500] [--turns 50] [--stream] [--rounds 3] [--processes 4]
    OMP_NUM_THREADS=1 python bench/gateway.py --sessions 1 --turns 1000 --tool-ids 140      # to 200,000 ids
    OMP_NUM_THREADS=1 python bench/gateway.py --sessions 1 --turns 20 --earlier 1300 --tool-ids 220  # from 200,000

Four kinds of processes. The upstream speaks vLLM's token dialect, or is a server of ours with `--upstream server`; its
engine is scripted: after `--engine-seconds` it answers with a text and a call. The forwarder is starlette and httpx,
and asks the same upstream for a chat completion of the same length. The gateways are the command. This process is the
agents: each session asks, gets a call, and answers it with a tool result, again and again.

Lengths are drawn from seeded distributions: replies are geometric, tool results lognormal (sigma 1) and cut out of the
standard library's sources. With `--earlier` a conversation has so many messages before its first turn, which is not
measured, as the gateway renders it whole. Milliseconds are those beyond the engine's seconds. CPU is that of all
gateway processes, also where other work slows them; `first` and `last` are its mean over the first and the last tenth
of the turns, and `x` is the quotient to the forwarder in the same round. With `--processes`, several gateways share
`--store postgresql://...`, or have a folder each; the sessions are dealt out to them. With `--workers` one gateway has
several processes at one port. Vocabulary of Mistral's Tekken (131,072 ids), Qwen3's template. Requires the extra `dev`.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from server import free_port
from unbroken.client.connections import Connections
from unbroken.engines.scripted import ScriptedEngine
from unbroken.server.process import host_app
from unbroken.types import SampleRequest, SampleResult

TEXT = "the file has a line that says what is wrong with this one and how it can be made to work again"
CALL = '\n<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call><|im_end|>'
CHAT_CALL = {"id": "call00000", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
CONTEXT = 1_000_000
CHARACTERS = 4.0
"""Of an id in the sources, in the mean."""
CHAT = "/v1/chat/completions"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the gateway costs a turn.")
    parser.add_argument("--sessions", type=int, nargs="+", default=[32])
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--reply-ids", type=int, default=60, help="mean ids of a reply's text")
    parser.add_argument("--tool-ids", type=int, default=200, help="mean ids of a tool result")
    parser.add_argument("--engine-seconds", type=float, default=1.0)
    parser.add_argument("--earlier", type=int, default=0, help="messages before the first turn")
    parser.add_argument("--rounds", type=int, default=1, help="of forwarder and gateway in turn")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--upstream", choices=["vllm", "server"], default="vllm")
    parser.add_argument("--processes", type=int, default=1, help="gateways")
    parser.add_argument("--workers", type=int, default=1, help="of each gateway; several need --store")
    parser.add_argument("--store", help="postgresql:// URL instead of folders")
    parser.add_argument("--no-forwarder", action="store_true")
    parser.add_argument("--wait-s", type=float, default=0.0, help="seconds in which a profiler can be attached")
    parser.add_argument("--serve", choices=["vllm", "server", "forwarder"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args))
        return
    kind = "streamed" if args.stream else "whole"
    print(
        f"{args.turns} turns after {args.earlier} messages, {kind}, replies {args.reply_ids} and tool results "
        f"{args.tool_ids} ids, engine "
        f"{args.engine_seconds:g} s, upstream {args.upstream}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"
    )
    print(
        f"{'':10} {'sessions':>8} {'mean ms':>8} {'p50':>7} {'p99':>7} {'turns/s':>8} {'CPU ms':>7} {'x':>5} "
        f"{'first':>7} {'last':>7} {'MB':>6} {'load':>5}"
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_tokenizer(folder)
        upstream = stack.enter_context(process(own_command(args, args.upstream, folder)))
        forwarder = None
        if not args.no_forwarder:
            forwarder = stack.enter_context(process([*own_command(args, "forwarder", folder), "--url", upstream.url]))
        start = time.perf_counter()
        commands = [gateway_command(args, upstream.url, folder, number) for number in range(args.processes)]
        gateways = [stack.enter_context(process(command)) for command in commands]
        print(
            f"{args.processes} gateways of {args.workers} workers, store {'PostgreSQL' if args.store else 'a folder'}: "
            f"ready in {time.perf_counter() - start:.1f} s, {gateways[0].cpu_s():.1f} CPU s, "
            f"{gateways[0].resident_mb():.0f} MB, process {gateways[0].pid}",
            flush=True,
        )
        time.sleep(args.wait_s)
        for _, sessions in itertools.product(range(args.rounds), args.sessions):
            least = None
            if forwarder is not None:
                least = asyncio.run(measure([forwarder], args, sessions, is_gateway=False))
                show("forwarder", least)
            show("gateway", asyncio.run(measure(gateways, args, sessions, is_gateway=True)), least)


def save_tokenizer(folder: str) -> None:
    """Save one with Tekken's vocabulary of 131,072 ids and Qwen3's template, by the tests' helpers.

    They import transformers, which the forwarder's process does not need.
    """
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from support.corpus import corpus_template
    from support.tokenizers import tekken_tokenizer

    tekken_tokenizer(corpus_template("trl/qwen3").source).save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Measured:
    """Added milliseconds [sessions, turns], the seconds and CPU seconds of all turns, MB of all processes."""

    added_ms: np.ndarray[Any, Any]
    seconds: float
    cpu_s: Sequence[float]
    """At each number of finished turns."""
    resident_mb: float

    @property
    def cpu_ms(self) -> float:
        """Of a turn."""
        return 1000 * (self.cpu_s[-1] - self.cpu_s[0]) / self.added_ms.size


def show(name: str, measured: Measured, least: Measured | None = None) -> None:
    flat = measured.added_ms.ravel()
    tenth = max(flat.size // 10, 1)
    cpu_ms = 1000 * np.array(measured.cpu_s)
    numbers = (flat.mean(), np.median(flat), np.quantile(flat, 0.99), flat.size / measured.seconds)
    first, last = (cpu_ms[tenth] - cpu_ms[0]) / tenth, (cpu_ms[-1] - cpu_ms[-1 - tenth]) / tenth
    times = "" if least is None else f"{measured.cpu_ms / least.cpu_ms:.2f}"
    print(
        f"{name:10} {len(measured.added_ms):8} {numbers[0]:8.1f} {numbers[1]:7.1f} {numbers[2]:7.1f} "
        f"{numbers[3]:8.1f} {measured.cpu_ms:7.2f} {times:>5} {first:7.2f} {last:7.2f} {measured.resident_mb:6.0f} "
        f"{os.getloadavg()[0]:5.1f}",
        flush=True,
    )


async def measure(
    servers: Sequence[ServerProcess], args: argparse.Namespace, sessions: int, *, is_gateway: bool
) -> Measured:
    async with httpx.AsyncClient(transport=Connections(), timeout=600) as http:
        agents = [Agent(http, servers[number % len(servers)].url, args, number) for number in range(sessions)]
        if is_gateway:
            for agent in agents:
                await agent.open_session()
        await Agent(http, servers[0].url, args, sessions).ask_twice(is_gateway=is_gateway)  # warm
        if args.earlier:
            for agent in agents:
                await agent.take_first_turn()
        cpu_s = [sum(one.cpu_s() for one in servers)]

        def end_turn() -> None:
            cpu_s.append(sum(one.cpu_s() for one in servers))

        start = time.perf_counter()
        added_ms = await asyncio.gather(
            *(agent.run(end_turn, delay_s=args.engine_seconds * agent.number / sessions) for agent in agents)
        )
        seconds = time.perf_counter() - start
        if is_gateway:
            for agent in agents:
                await agent.check_session()
        return Measured(np.array(added_ms), seconds, cpu_s, sum(one.resident_mb() for one in servers))


class Agent:
    """One conversation."""

    def __init__(self, http: httpx.AsyncClient, url: str, args: argparse.Namespace, number: int) -> None:
        self.number = number
        self._http, self._url, self._args = http, url, args
        self._headers: dict[str, str] = {}
        self._session_id = ""
        self._rng = np.random.default_rng(number)
        self._messages: list[Any] = [{"role": "user", "content": f"Task {number}: find the fault."}]
        for k in range(0, args.earlier, 2):
            call = {**CHAT_CALL, "id": f"earlier{k}"}
            words = make_words(self._rng, int(self._rng.geometric(1 / args.reply_ids)))
            self._messages += [
                {"role": "assistant", "content": words, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": self._draw_result()},
            ]
        self._num_turns = args.turns

    async def open_session(self) -> None:
        created = (await self._http.post(f"{self._url}/v1/sessions", json={})).json()
        self._session_id = created["session_id"]
        self._headers = {"Authorization": f"Bearer {created['api_key']}"}

    async def check_session(self) -> None:
        """Check that all turns were recorded, each behind the one before; and end the session."""
        state = (await self._http.get(f"{self._url}/v1/sessions/{self._session_id}")).json()
        assert state["num_turns"] == self._num_turns, state
        assert not state["forks"], state
        await self._http.delete(f"{self._url}/v1/sessions/{self._session_id}")

    async def ask_twice(self, *, is_gateway: bool) -> None:
        if is_gateway:
            await self.open_session()
        for _ in range(2):
            await self._take_turn()

    async def take_first_turn(self) -> None:
        """Take a turn that is not measured."""
        await self._take_turn()
        self._num_turns += 1

    async def run(self, end_turn: Any, *, delay_s: float) -> list[float]:
        """Take all turns; returns the milliseconds of each beyond the engine's."""
        await asyncio.sleep(delay_s)  # agents do not start together
        added_ms = []
        for _ in range(self._args.turns):
            added_ms.append(1000 * (await self._take_turn() - self._args.engine_seconds))
            end_turn()
        return added_ms

    async def _take_turn(self) -> float:
        start = time.perf_counter()
        reply = await (self._stream if self._args.stream else self._ask)()
        seconds = time.perf_counter() - start
        result = {"tool_call_id": reply["tool_calls"][0]["id"], "content": self._draw_result()}
        self._messages += [reply, {"role": "tool", **result}]
        return seconds

    def _draw_result(self) -> str:
        num_ids = int(self._rng.lognormal(np.log(self._args.tool_ids) - 0.5, 1.0)) + 1
        sources = read_sources()
        start = int(self._rng.integers(len(sources)))
        return sources[start : start + int(num_ids * CHARACTERS)]

    def _request(self, **fields: Any) -> dict[str, Any]:
        body = {"messages": self._messages, "tools": TOOLS, **fields}
        headers = {"Content-Type": "application/json", **self._headers}
        return {"url": self._url + CHAT, "content": orjson.dumps(body), "headers": headers}

    async def _ask(self) -> dict[str, Any]:
        answer = await self._http.post(**self._request())
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = orjson.loads(answer.content)["choices"][0]["message"]
        return message

    async def _stream(self) -> dict[str, Any]:
        content = ""
        calls: list[dict[str, Any]] = []
        async with self._http.stream("POST", **self._request(stream=True)) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in orjson.loads(line.removeprefix("data: "))["choices"]:
                    content += choice["delta"].get("content") or ""
                    for part in choice["delta"].get("tool_calls") or ():
                        if part["index"] == len(calls):
                            calls.append({**part, "function": {**part["function"]}})
                        else:
                            calls[-1]["function"]["arguments"] += part["function"].get("arguments") or ""
        return {"role": "assistant", "content": content, "tool_calls": calls}


@functools.cache
def read_sources() -> str:
    """The standard library's modules, one after the other."""
    return "\n".join(path.read_text() for path in sorted(Path(os.__file__).parent.glob("*.py")))


def make_words(rng: np.random.Generator, number: int) -> str:
    """A text of about as many ids."""
    return " ".join(rng.choice(TEXT.split(), number).tolist())


async def serve(args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    upstream = Upstream(args)
    if args.serve == "forwarder":
        app = make_forwarder(args.url)
    else:
        app = upstream.make_server() if args.serve == "server" else upstream.make_app()
    async with host_app(app) as url:
        print(url, flush=True)
        await stop.wait()


def make_forwarder(upstream: str) -> Any:
    """The least that one can do: starlette, httpx, and the bytes as they are."""
    http = httpx.AsyncClient(base_url=upstream, timeout=600, limits=httpx.Limits(max_connections=None))

    async def forward(request: Request) -> Response:
        sent = http.build_request(
            "POST", CHAT, content=await request.body(), headers={"Content-Type": "application/json"}
        )
        answer = await http.send(sent, stream=True)
        kind = answer.headers["content-type"]
        if kind.startswith("text/event-stream"):
            return StreamingResponse(pass_on(answer), media_type=kind)
        content = await answer.aread()
        await answer.aclose()
        return Response(content, media_type=kind)

    async def pass_on(answer: httpx.Response) -> AsyncIterator[bytes]:
        async for part in answer.aiter_raw():
            yield part
        await answer.aclose()

    return Starlette(routes=[Route(CHAT, forward, methods=["POST"])])


class Upstream:
    """The scripted engine: a reply's length and text are drawn by the length of its prompt."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._tokenizer = Tokenizer.from_file(f"{args.folder}/tokenizer.json")

    def make_app(self) -> Any:
        """Make vLLM's token endpoint, and chat completions for the forwarder."""
        models = {"data": [{"id": "m", "parent": None, "max_model_len": CONTEXT}]}
        return Starlette(
            routes=[
                Route("/v1/models", lambda _: Response(orjson.dumps(models), media_type="application/json")),
                Route("/health", lambda _: Response()),
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route(CHAT, self._chat, methods=["POST"]),
            ]
        )

    def make_server(self) -> Any:
        """Make a server of ours, with chat completions for the forwarder."""
        from unbroken.rendering.encoding.text_codec import TextCodec
        from unbroken.rendering.loader import load_tokenizer
        from unbroken.rendering.template import TemplateRenderer
        from unbroken.server.app import create_app
        from unbroken.server.config import ServerConfig

        tokenizer = load_tokenizer(self._args.folder)
        engine = SlowEngine(lambda prompt: self._draw(len(prompt)), allow_forks=True, vocab_size=len(tokenizer))
        engine.seconds, engine.context_length = self._args.engine_seconds, CONTEXT
        app = create_app(
            engine, lambda _: TemplateRenderer(tokenizer), TextCodec(tokenizer), ServerConfig(model_name="m")
        )
        app.router.routes.insert(0, Route(CHAT, self._chat, methods=["POST"]))
        return app

    def _draw(self, seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        ids: list[int] = self._tokenizer.encode(
            make_words(rng, int(rng.geometric(1 / self._args.reply_ids))) + CALL, add_special_tokens=False
        ).ids
        return ids

    async def _generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        prompt_ids, sampling = body["token_ids"], body["sampling_params"]
        if sampling["max_tokens"] > 1:
            await asyncio.sleep(self._args.engine_seconds)
        ids = self._draw(len(prompt_ids))[: sampling["max_tokens"]]
        head = {
            "request_id": "r",
            "model": "m",
            "prompt_token_ids": prompt_ids if body.get("return_token_ids") else None,
        }
        if not body.get("stream"):
            answer = {**head, "choices": [make_choice(ids, len(ids), sampling, is_last=True)], "prompt_logprobs": None}
            return JSONResponse(answer)  # as vLLM answers
        return StreamingResponse(self._stream(ids, sampling, head), media_type="text/event-stream")

    @staticmethod
    async def _stream(ids: list[int], sampling: Any, head: dict[str, Any]) -> AsyncIterator[bytes]:
        for number, token_id in enumerate(ids, start=1):
            choice = make_choice([token_id], number, sampling, is_last=number == len(ids))
            yield b"data: " + orjson.dumps({**head, "choices": [choice]}) + b"\n\n"
            head.pop("prompt_token_ids", None)
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"

    async def _chat(self, request: Request) -> Response:
        raw = await request.body()
        await asyncio.sleep(self._args.engine_seconds)
        rng = np.random.default_rng(len(raw))
        words = make_words(rng, int(rng.geometric(1 / self._args.reply_ids)))
        if b'"stream":true' in raw[-20:]:
            return StreamingResponse(self._stream_chat(words), media_type="text/event-stream")
        message = {"role": "assistant", "content": words, "tool_calls": [CHAT_CALL]}
        answer = {"id": "chatcmpl-0", "choices": [{"index": 0, "message": message}]}
        return Response(orjson.dumps(answer), media_type="application/json")

    @staticmethod
    async def _stream_chat(words: str) -> AsyncIterator[bytes]:
        parts: list[dict[str, Any]] = [{"content": f"{word} "} for word in words.split()]
        for delta in [*parts, {"tool_calls": [{"index": 0, **CHAT_CALL}]}]:
            yield b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta}]}) + b"\n\n"
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"


class SlowEngine(ScriptedEngine):
    """Takes its time before each reply, and no more than that; streams in chunks of one id."""

    seconds = 0.0

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample after the engine's seconds."""
        await asyncio.sleep(self.seconds)
        return await super().sample(request)

    async def stream(self, request: SampleRequest) -> Any:
        """Stream after the engine's seconds."""
        await asyncio.sleep(self.seconds)
        async for chunk in super().stream(request):
            yield chunk


def make_choice(ids: list[int], number: int, sampling: Any, *, is_last: bool) -> dict[str, Any]:
    """A choice as vLLM makes it; `number` is that of all its ids."""
    top = -1.0 / (sampling["temperature"] or 1.0)
    entries = [{"token_id": one, "logprob": top - one % 97 / 64, "rank": 1} for one in ids]
    content = [{**entry, "top_logprobs": [entry]} for entry in entries]
    return {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": "stop" if is_last else None,
        "stop_reason": None,
        "weight_versions": [{"version": "default", "start": 0, "end": number}] if is_last else None,
        "routed_experts": None,
    }


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A process that serves, and what it uses."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self._pids]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")

    def resident_mb(self) -> float:
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._pids)
        return pages * resource.getpagesize() / 2**20

    @property
    def _pids(self) -> list[int]:
        """It and its workers."""
        return [self.pid, *map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]


def own_command(args: argparse.Namespace, kind: str, folder: str) -> list[str]:
    lengths = ["--reply-ids", str(args.reply_ids), "--engine-seconds", str(args.engine_seconds)]
    return [sys.executable, __file__, "--serve", kind, "--folder", folder, *lengths]


def gateway_command(args: argparse.Namespace, upstream: str, folder: str, number: int) -> list[str]:
    port = free_port()
    words = ["gateway", "--upstream", upstream, "--tokenizer", folder, "--no-control-key", "--port", str(port)]
    store = ["--store", f"{folder}/sessions-{number}"]
    if args.workers > 1:
        store = ["--store", args.store, "--workers", str(args.workers)]
    elif args.store is not None:
        store = ["--store", args.store, "--advertise", f"http://127.0.0.1:{port}"]
    return [sys.executable, "-m", "unbroken", *words, *store]


@contextmanager
def process(words: list[str]) -> Iterator[ServerProcess]:
    """Start a server, which prints its address in its first line."""
    started = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        yield ServerProcess(next(word for word in line.split() if word.startswith("http://")), started.pid)
    finally:
        started.terminate()
        started.wait()


if __name__ == "__main__":
    main()
