"""Actions on the engine for all clients, as vLLM's clients call them."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.servers import MODEL, asgi_client, make_app, scripted_engine
from support.waits import wait_until
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import EngineError, InvalidInputError
from unbroken.types import FinishReason

SAMPLE = {"prompts": [[1, 2, 3]], "params": {"max_tokens": 50}}


def long_engine(**options: Any) -> ScriptedEngine:
    return scripted_engine(lambda prompt_ids: [7] * 50, **options)


async def begin(client: httpx.AsyncClient, engine: ScriptedEngine, body: Any = SAMPLE, **options: Any) -> Any:
    """A request that samples, and would not end by itself."""
    await engine.pause()
    task = asyncio.create_task(client.post("/v1/sample", json=body, **options))
    number = len(engine.requests)
    while len(engine.requests) == number:  # noqa: ASYNC110  # until the engine has it
        await asyncio.sleep(0)
    return task


async def test_keep_freezes_requests_until_the_resume() -> None:
    engine = long_engine()
    async with asgi_client(make_app(engine)) as client:
        assert (await client.post("/pause?mode=keep")).json()["status"] == "paused"
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        waiting = asyncio.create_task(client.post("/v1/sample", json=SAMPLE))
        await wait_until(lambda: engine.requests)
        assert not waiting.done()
        assert (await client.get("/load")).json() == {"server_load": 1}
        assert (await client.post("/resume")).json()["status"] == "resumed"
        assert (await waiting).status_code == 200
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize("query", ["", "?mode=abort"])
async def test_abort_ends_requests_and_refuses_new_ones(query: str) -> None:
    engine = long_engine()
    async with asgi_client(make_app(engine)) as client:
        running = await begin(client, engine)
        await client.post("/pause" + query)
        (result,) = (await running).json()["results"]
        assert result["sequences"][0]["finish_reason"] == FinishReason.ABORT
        await engine.resume()  # `begin` paused it
        for path, body in (("/v1/sample", SAMPLE), ("/v1/score", {"sequences": [[1, 2]]})):
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "paused")
            assert refused.headers["Retry-After"]
        await client.post("/resume")
        assert (await client.post("/v1/sample", json=SAMPLE)).status_code == 200


async def test_wait_lets_requests_finish_and_refuses_new_ones() -> None:
    app = make_app(engine := long_engine())
    async with asgi_client(app) as client:
        running = await begin(client, engine)
        pausing = asyncio.create_task(client.post("/pause?mode=wait"))
        await wait_until(lambda: app.state.context.service.admission.is_paused)
        assert not pausing.done()
        assert (await client.post("/v1/sample", json=SAMPLE)).status_code == 503
        await engine.resume()
        assert (await pausing).status_code == 200
        (result,) = (await running).json()["results"]
        assert result["sequences"][0]["finish_reason"] == FinishReason.LENGTH


async def test_frozen_requests_go_on_when_a_wait_follows_a_keep() -> None:
    engine = long_engine()
    async with asgi_client(make_app(engine)) as client:
        await client.post("/pause?mode=keep")
        frozen = asyncio.create_task(client.post("/v1/sample", json=SAMPLE))
        await wait_until(lambda: engine.requests)
        await client.post("/pause?mode=wait")
        assert (await frozen).status_code == 200


async def test_a_pause_that_waits_ends_with_the_resume() -> None:
    app = make_app(engine := long_engine())
    async with asgi_client(app) as client:
        running = await begin(client, engine)
        pausing = asyncio.create_task(client.post("/pause?mode=wait"))
        await wait_until(lambda: app.state.context.service.admission.is_paused)
        await client.post("/resume")
        await engine.pause()
        later = asyncio.create_task(client.post("/v1/sample", json=SAMPLE))
        assert (await asyncio.wait_for(pausing, 60)).status_code == 200
        await engine.resume()
        assert (await running).status_code == (await later).status_code == 200


class EngineWithoutControl(ScriptedEngine):
    """Refuses to pause, as the engine of a gateway over a vLLM without its development routes."""

    async def pause(self) -> None:
        raise EngineError("refuses POST /pause")

    async def resume(self) -> None:
        raise EngineError("refuses POST /resume")

    async def reset_prefix_cache(self) -> None:
        raise EngineError("refuses POST /reset_prefix_cache")


@pytest.mark.parametrize("query", ["", "?mode=keep", "?mode=wait", "?mode=abort"])
async def test_a_pause_that_the_engine_refuses_pauses_nothing(query: str) -> None:
    engine = EngineWithoutControl(lambda prompt_ids: [7], vocab_size=5000)
    async with asgi_client(make_app(engine)) as client:
        assert (await client.post("/pause" + query)).status_code == 503
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.post("/v1/sample", json=SAMPLE)).status_code == 200


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_a_pause_of_the_queue_alone_ends_without_the_engine(mode: str) -> None:
    engine = EngineWithoutControl(lambda prompt_ids: [7], vocab_size=5000)
    async with asgi_client(make_app(engine)) as client:
        assert (await client.post(f"/pause?mode={mode}&clear_cache=false")).status_code == 200
        assert (await client.post("/v1/sample", json=SAMPLE)).status_code == 503
        assert (await client.post("/resume")).status_code == 200
        assert (await client.post("/v1/sample", json=SAMPLE)).status_code == 200


@pytest.mark.parametrize("path", ["/pause?mode=stop", "/sleep?mode=stop&level=2", "/sleep?level=3", "/sleep?level=1"])
async def test_a_mode_or_level_that_is_none_is_refused(path: str) -> None:
    engine = long_engine()
    async with asgi_client(make_app(engine)) as client:
        answer = await client.post(path)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in ("mode", "level")
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.post("/v1/sample", json=SAMPLE)).status_code == 200


@pytest.mark.parametrize(
    ("body", "num_aborted"),
    [({}, 2), (None, 2), ({"request_ids": []}, 2), ({"request_ids": ["one"]}, 1), ({"request_ids": ["none"]}, 0)],
)
async def test_requests_are_aborted_by_name_or_all_at_once(body: Any, num_aborted: int) -> None:
    engine = long_engine()
    async with asgi_client(make_app(engine)) as client:
        tasks = [await begin(client, engine, {**SAMPLE, "session_id": name}) for name in ("one", "two")]
        answer = await client.post("/abort_requests", json=body)
        assert answer.json() == {"status": "aborted", "aborted": num_aborted}
        await engine.resume()
        reasons = [(await task).json()["results"][0]["sequences"][0]["finish_reason"] for task in tasks]
    assert reasons.count("abort") == num_aborted


@pytest.mark.parametrize("headers", [{}, {"X-Session-ID": "one"}])
async def test_a_session_ends_in_every_dialect(headers: dict[str, str]) -> None:
    engine = long_engine()
    body = {"prompt": [1, 2, 3], "max_tokens": 50} | ({} if headers else {"session_id": "one"})
    async with asgi_client(make_app(engine)) as client:
        await engine.pause()
        task = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        await wait_until(lambda: engine.requests)
        answer = await client.post("/abort_requests", json={"request_ids": ["one"]})
        await engine.resume()
        assert (await task).status_code == 503
    assert answer.json()["aborted"] == 1


async def test_an_engine_sleeps_until_new_weights_come() -> None:
    engine = long_engine()
    async with asgi_client(make_app(engine)) as client:
        assert (await client.post("/wake_up")).json()["status"] == "awake"
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await client.post("/sleep?level=2")).json() == {"status": "sleeping", "level": 2}
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        answer = await client.post("/wake_up")
        assert answer.status_code == 409
        assert "ScriptedEngine sleeps without weights" in answer.json()["error"]["message"]
        assert (await client.post("/v1/sample", json=SAMPLE)).status_code == 503


async def test_a_paused_engine_does_not_sleep() -> None:
    async with asgi_client(make_app(long_engine())) as client:
        await client.post("/pause?mode=keep")
        assert (await client.post("/sleep?level=2&mode=wait")).status_code == 409


async def test_the_version_of_the_weights_is_read_and_not_given() -> None:
    async with asgi_client(make_app(long_engine())) as client:
        assert (await client.get("/weight_info")).json() == {"weight_version": "0"}
        same = await client.post("/update_weight_version", json={"new_version": "0"})
        assert same.json() == {"success": True, "new_version": "0"}
        other = await client.post("/update_weight_version", json={"new_version": "v8"})
        assert other.status_code == 400
        assert "ScriptedEngine counts its versions itself" in other.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_ping_is_a_health_check(method: str) -> None:
    engine = long_engine()
    async with asgi_client(make_app(engine, api_key="k")) as client:
        assert (await client.request(method, "/ping")).status_code == 200
        await engine.close()
        assert (await client.request(method, "/ping")).status_code == 503


class EngineWithAdapters(ScriptedEngine):
    """Loads any folder as an adapter."""

    adapters: tuple[str, ...] = ()

    async def load_adapter(self, name: str, folder: Path) -> None:
        if name in self.adapters:
            raise InvalidInputError(f"adapter names must be unique, got {name!r}")
        self.adapters = (*self.adapters, name)

    async def unload_adapter(self, name: str) -> None:
        self.adapters = tuple(one for one in self.adapters if one != name)


async def test_adapters_come_and_go_while_the_server_runs(tmp_path: Path) -> None:
    engine = EngineWithAdapters(lambda prompt_ids: [7])
    async with asgi_client(make_app(engine, weights_dir=tmp_path)) as client:
        body = {"lora_name": "style", "lora_path": str(tmp_path / "a")}
        loaded = await client.post("/v1/load_lora_adapter", json=body)
        assert loaded.text == "Success: LoRA adapter 'style' added successfully."
        assert (await client.get("/v1/models/style")).json()["parent"] == MODEL
        asked = {"model": "style", "prompt": [5], "max_tokens": 1}
        assert (await client.post("/v1/completions", json=asked)).status_code == 200
        assert engine.requests[-1].adapter == "style"
        for wrong in (body, {**body, "lora_name": MODEL}, {**body, "lora_name": "b", "lora_path": "/etc"}):
            assert (await client.post("/v1/load_lora_adapter", json=wrong)).status_code == 400
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "style"})).status_code == 200
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "style"})).status_code == 404
        assert (await client.post("/v1/completions", json=asked)).status_code == 404


async def test_an_engine_without_adapters_is_named() -> None:
    async with asgi_client(make_app(long_engine())) as client:
        answer = await client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "b"})
    assert answer.status_code == 400
    assert "ScriptedEngine loads no adapters" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", [MODEL, "org/style"])
async def test_one_model_is_read_by_name(name: str) -> None:
    async with asgi_client(make_app(long_engine(), adapters=("org/style",))) as client:
        assert (await client.get(f"/v1/models/{name}")).json()["id"] == name
        unknown = await client.get("/v1/models/org/other")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/sample", SAMPLE),
        ("/v1/completions", {"prompt": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/chat/completions/tokens", {"messages": [], "tokens": [5]}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 3}}),
    ],
)
async def test_a_session_reaches_the_engine_from_body_or_header(path: str, body: dict[str, Any]) -> None:
    engine = long_engine()
    async with asgi_client(make_app(engine)) as client:
        await client.post(path, json=body)
        await client.post(path, json=body, headers={"X-Session-ID": "s1"})
        await client.post(path, json={**body, "session_id": "s2"}, headers={"X-Session-ID": "s1"})
    assert [request.session_id for request in engine.requests] == [None, "s1", "s2"]
