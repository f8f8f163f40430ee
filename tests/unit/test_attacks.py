"""Every reader of what somebody else wrote against every hostile file: a clear error, soon, in little memory.

The tables are `READERS` in `support/attacked_readers.py` and `list_attacks` in `support/attacks.py`.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import importlib.util
import inspect
import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast, get_type_hints

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from support import attacked_readers
from support.attacks import BODIES, WRONG, Outcome, attack, measure_yard, watch
from support.gateways import make_gateway
from support.servers import asgi_client, make_app, scripted_engine
from support.tinker_loops import make_message
from unbroken.limited_process import LimitedProcess, ProcessLimits
from unbroken.server.config import ServerLimits
from unbroken.server.context import ServerContext
from unbroken.server.options import ServeOptions
from unbroken.tinker.api import TinkerApi
from unbroken.tinker.losses import PROTOBUF
from unbroken.tinker.options import TinkerOptions
from unbroken.tinker.sampling import WeightSwitch
from unbroken.tinker.server import create_tinker_app
from unbroken.tinker.sessions import TinkerSession
from unbroken.tinker.store import TinkerStore

LONGEST, MOST_BYTES, LONGEST_ERROR = 1000, 600 << 20, 3000
"""Of CPU time in units of `measure_yard`, so that neither a slow machine nor a tracer is over it: some 5 s without."""
HANGS_S = 300.0
"""By the clock: what takes that long, on whatever machine, waits for something that never comes."""


@pytest.fixture(scope="module")
def attacked() -> Iterator[LimitedProcess[tuple[str, bool, Outcome] | None]]:
    """A process that a reader which hangs, or takes all memory, cannot keep."""
    limits = ProcessLimits(timeout_s=HANGS_S, memory_bytes=8 << 30)
    process = LimitedProcess(attack, limits, name="a reader", preload=[attacked_readers.__name__])
    yield process
    process.close()


@pytest.mark.parametrize("name", attacked_readers.READERS)
def test_a_hostile_file_is_refused_by_name_soon_and_in_little_memory(
    attacked: LimitedProcess[tuple[str, bool, Outcome] | None], tmp_path: Path, name: str
) -> None:
    reader, wrong = attacked_readers.READERS[name], []
    num_refused = number = 0
    place = str(tmp_path / "place")
    while (found := attacked.call(attacked_readers.__name__, name, place, number)) is not None:
        title, must_refuse, outcome = found
        names = reader.says or "place"
        problems = [
            outcome.crash,
            _describe_effort(outcome.effort),
            "" if outcome.num_bytes < MOST_BYTES else f"took {outcome.num_bytes >> 20} MiB",
            f"{outcome.num_left_open} files left open" if outcome.num_left_open > 0 else "",
            "not refused" if must_refuse and not reader.is_lenient and not outcome.error else "",
            "refused" if number == 0 and outcome.error else "",
            f"does not name {names}" if outcome.error and names not in outcome.error else "",
            "a long error" if len(outcome.error) > LONGEST_ERROR else "",
        ]
        num_refused += bool(outcome.error)
        number += 1
        wrong += [f"{title}: {problem}: {outcome.error[:300]}" for problem in problems if problem]
    assert not wrong, "\n".join(wrong)
    assert number > 8, "a reader has attacks"
    assert reader.is_lenient or num_refused > 6


def test_what_a_reader_takes_is_measured_against_other_python_in_the_same_process() -> None:
    """Else a tracer, or a slow machine, would be a slow reader; and one that is slow must be seen."""

    def count() -> None:
        for number in range(4_000_000):
            _step(number)

    assert watch(lambda: None).effort < 1
    assert 20 < watch(count).effort < 80
    assert not _describe_effort(LONGEST - 1)
    assert _describe_effort(LONGEST)


def _step(number: int) -> int:
    return number


USER = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/sample": {"prompts": [[1, 2]], "params": {"max_tokens": 2}},
    "/v1/score": {"sequences": [[1, 2]]},
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 2},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/chat/completions/render": {"messages": USER},
    "/v1/chat/completions/tokens": {"messages": USER, "tokens": [1, 2], "max_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/{version}/models/{model}:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/generate": {"prompts": [[1, 2]], "max_tokens": 2},
    "/chat": {"messages": [USER], "max_tokens": 2},
    "/get_sequence_logprobs": {"sequences": [[1, 2]], "prompt_lengths": [1]},
    "/v1/weights": {"folder": "x", "policy_version": 1},
}
"""What a route takes: the rest of a body with one wrong field."""
NOT_ASKED = ("/pause", "/sleep", "/init_weight_transfer_engine", "/init_communicator")
"""An engine that is paused or sleeps answers nothing more; one that meets a trainer waits a minute for it."""


def list_bodies(app: FastAPI, path: str) -> Iterator[tuple[str, bytes]]:
    """Hostile bodies for a route: those of the table, and each field that its description has with each wrong value."""
    yield from BODIES.items()
    spec = app.openapi()
    content = spec["paths"].get(path, {}).get("post", {}).get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if "$ref" in schema:
        schema = spec["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for field in schema.get("properties", {}):
        for name, value in WRONG.items():
            yield f"{field} is {name}", json.dumps({**GOOD.get(path, {}), field: value}).encode()


def list_paths(app: FastAPI) -> list[str]:
    found = [route.path for route in app.routes if isinstance(route, APIRoute) and "POST" in (route.methods or ())]
    return sorted({path for path in found if path not in NOT_ASKED})


def find_problems(answer: httpx.Response, took_s: float) -> list[str]:
    """What is wrong with the answer to a hostile body."""
    is_error = answer.status_code >= 400
    problems = {
        f"status {answer.status_code}": answer.status_code in (500, 502, 504),
        "a long error": is_error and len(answer.content) > LONGEST_ERROR,
        "no message": is_error and b"message" not in answer.content,
    }
    found = [problem for problem, is_there in problems.items() if is_there]
    return [*found, *filter(None, [_describe_effort(took_s / measure_yard())])]


def _describe_effort(effort: float) -> str:
    """What is wrong if so many times `measure_yard` were needed; else nothing."""
    return f"took {effort:.0f} times the time of 100,000 calls" if effort >= LONGEST else ""


async def attack_routes(app: FastAPI, kinds: tuple[str, ...] = ("application/json",)) -> tuple[int, list[str]]:
    """Send each route each body; returns how many were sent, and what went wrong."""
    wrong: list[str] = []
    number = 0
    async with asgi_client(app) as client:
        for path in list_paths(app):
            url = re.sub(r"{[^}]*}", "x", path)
            for name, body in list_bodies(app, path):
                for kind in kinds:
                    began_s, number = time.process_time(), number + 1
                    answer = await asyncio.wait_for(
                        client.post(url, content=body, headers={"Content-Type": kind}), HANGS_S
                    )
                    took_s = time.process_time() - began_s
                    problems = find_problems(answer, took_s)
                    wrong += [f"{path}: {name}: {each}: {answer.text[:300]}" for each in problems]
    return number, wrong


@pytest.mark.parametrize("kind", ["server", "gateway"])
async def test_a_hostile_body_is_answered_soon_on_every_route_and_never_as_a_failure_of_the_server(
    tmp_path: Path, kind: str
) -> None:
    engine = scripted_engine("ok<|im_end|>", allow_forks=True)  # requests name the same session
    limits = ServerLimits(max_n=4)
    if kind == "server":
        app = make_app(engine, limits=limits)
    else:
        app = make_gateway(engine, tmp_path / "store", limits=limits)
        app.router.routes[:] = [each for each in app.routes if getattr(each, "path", "").startswith("/v1/sessions")]
    kinds = ("application/json", "application/vnd.unbroken.v1") if kind == "server" else ("application/json",)
    async with app.router.lifespan_context(app):
        number, wrong = await attack_routes(app, ("application/json",))
        if kind == "server":
            app.router.routes[:] = [each for each in app.routes if getattr(each, "path", "") == "/v1/sample"]
            number_compact, wrong_compact = await attack_routes(app, kinds[1:])
            number, wrong = number + number_compact, wrong + wrong_compact
    assert not wrong, "\n".join(wrong)
    assert number > (5000 if kind == "server" else 100)


TINKER_MODEL = {"model_id": "x", "seq_id": 1}
GOOD_TINKER: dict[str, dict[str, Any]] = {
    "asample": {
        "sampling_session_id": "x:sample:0", "num_samples": 1, "sampling_params": {"max_tokens": 2},
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    },
    "create_sampling_session": {"session_id": "x", "sampling_session_seq_id": 1, "base_model": "tiny"},
    "create_session": {"tags": [], "user_metadata": None, "sdk_version": "0"},
    "create_model": {"session_id": "x", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}},
    "optim_step": {**TINKER_MODEL, "adam_params": {"learning_rate": 1e-3}},
    "save_weights": {**TINKER_MODEL, "path": "a"},
}  # fmt: skip
"""What a call of the Tinker API takes."""


def list_tinker_bodies() -> Iterator[tuple[str, str, bytes, str]]:
    """Calls, names, bodies and their types: each field that the SDK's type has with each wrong value, and protobuf."""
    number = 0
    for name, call in inspect.getmembers(TinkerApi, inspect.iscoroutinefunction):
        body: Any = bytes if name.startswith("_") else get_type_hints(call).get("body", bytes)
        if not issubclass(body, BaseModel):
            continue
        yield from ((name, title, content, "application/json") for title, content in BODIES.items())
        for field in body.model_fields:
            for title, value in WRONG.items():
                # A number that came before would be answered as that call was.
                good = {**GOOD_TINKER.get(name, TINKER_MODEL), "seq_id": (number := number + 1)}
                yield name, f"{field} is {title}", json.dumps({**good, field: value}).encode(), "application/json"
    message = make_message("x", 1).SerializeToString()
    hostile = {
        **BODIES,
        "half a message": message[: len(message) // 2],
        "a message twice": message * 2,
        "a message without a loss": make_message("x", 1, loss="").SerializeToString(),
        "a million empty data": message + b"\x1a\0" * 1_000_000,
        "groups in groups": b"\x0b" * 100_000,
        "a length of 2**63": b"\x1a" + b"\xff" * 9 + b"\x01",
    }
    for kind in (PROTOBUF, "application/json"):
        yield from (("forward_backward", title, content, kind) for title, content in hostile.items())


async def test_a_hostile_body_is_answered_soon_by_every_call_of_the_tinker_api(tmp_path: Path) -> None:
    def make_api(context: ServerContext, *, switch: WeightSwitch) -> TinkerApi:
        return TinkerApi(
            context,
            switch=switch,
            store=store,
            options=TinkerOptions(),
            serving=ServeOptions(model="tiny"),
            open_backend=cast(Any, None),  # no model is made
        )

    store = TinkerStore(str(tmp_path / "store"), files=tmp_path / "files")
    app = make_app(
        scripted_engine("ok<|im_end|>", allow_forks=True),
        make=partial(create_tinker_app, make_api, None, lambda folder: folder),
    )
    number, num_sampled, wrong = 0, 0, []
    try:
        async with app.router.lifespan_context(app), asgi_client(app) as client:
            session = TinkerSession(session_id="x", owner=hashlib.sha256(b"").hexdigest()[:32])
            app.state.tinker._sessions["x"] = session
            session.samplers["x:sample:0"] = app.state.tinker._switch.base
            for call, name, body, kind in list_tinker_bodies():
                began_s, number = time.process_time(), number + 1
                headers = {"Content-Type": kind}
                answer = await asyncio.wait_for(client.post(f"/api/v1/{call}", content=body, headers=headers), HANGS_S)
                problems = find_problems(answer, time.process_time() - began_s)
                if call == "asample" and answer.status_code == 200:
                    num_sampled += 1
                    made = await client.post(
                        "/api/v1/retrieve_future", json={"request_id": answer.json()["request_id"]}
                    )
                    problems += find_problems(made, 0.0)
                wrong += [f"{call}: {name}: {each}: {answer.text[:300]}" for each in problems]
    finally:
        store.close()
    assert not wrong, "\n".join(wrong)
    assert number > 1000
    assert num_sampled > 20, "some reach the engine"


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("Path(x).read_text()", 1), ("path.open('rb')", 1), ("open(x)", 1), ("json.loads(x)", 1), ("safe_open(x)", 1),
        ("path.open('ab')", 0), ("turns.open(x)", 0), ("read_text(x, max_bytes=9)", 0), ("path.write_text(x)", 0),
    ],
)  # fmt: skip
def test_a_read_outside_of_the_boundary_is_seen_by_make_check(line: str, number: int) -> None:
    path = Path(__file__).parents[2] / "tools" / "check_readers.py"
    spec = importlib.util.spec_from_file_location("check_readers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.count_reads(ast.parse(line)) == number
