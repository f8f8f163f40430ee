"""Keys, limits, disconnections: what holds for every route."""

import asyncio
import pkgutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from support.servers import asgi_client, listening, make_app, metric, scripted_engine
from support.waits import wait_until
from unbroken.errors import InvariantError
from unbroken.server import routes
from unbroken.server.config import ServerLimits
from unbroken.server.http.access import Access

SAMPLE = {"prompts": [[1, 2, 3]], "params": {"max_tokens": 4}}
LONG = {"prompts": [[1, 2, 3]], "params": {"max_tokens": 4000}}


def slow_engine():
    return scripted_engine(lambda prompt_ids: [5] * 4000)


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}])
async def test_a_wrong_key_opens_nothing(given: dict[str, str]) -> None:
    async with asgi_client(make_app(scripted_engine("hi"), api_key="right")) as client:
        answer = await client.post("/v1/sample", json=SAMPLE, headers=given)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_the_right_key_opens_and_health_needs_none() -> None:
    async with asgi_client(make_app(scripted_engine("hi"), api_key="right")) as client:
        opened = await client.post("/v1/sample", json=SAMPLE, headers={"Authorization": "Bearer right"})
        assert opened.status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health/")).status_code == 200


@pytest.mark.parametrize(
    "path", ["/reset_prefix_cache", "/reset_prefix_cache/", "/close_communicator/", "/pause", "/resume"]
)
async def test_what_changes_the_engine_needs_the_admin_key(path: str) -> None:
    app = make_app(scripted_engine("hi"), api_key="user", admin_key="admin")
    async with asgi_client(app) as client:
        assert (await client.post(path, headers={"Authorization": "Bearer user"})).status_code == 401
        assert (await client.post(path, headers={"Authorization": "Bearer admin"})).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/weights",
        "/v1/weights/",
        "/shutdown_weight_transfer_engine",
        "/init_communicator/",
        "/update_named_param/",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    ],
)
async def test_weights_come_from_nobody_without_the_admin_key(path: str) -> None:
    app = make_app(scripted_engine("hi"), api_key="user", admin_key="admin")
    async with asgi_client(app) as client:
        for key, is_refused in (("user", True), ("admin", False)):
            answer = await client.post(path, json={}, headers={"Authorization": f"Bearer {key}"})
            assert (answer.status_code == 401) is is_refused


async def test_a_body_over_the_limit_is_refused_by_its_size() -> None:
    app = make_app(scripted_engine("hi"), limits=ServerLimits(max_body_bytes=1000))
    async with asgi_client(app) as client:
        answer = await client.post("/v1/sample", content=b"x" * 1001)
        assert answer.status_code == 413
        assert "1000 bytes" in answer.json()["error"]["message"]
        chunked = await client.post("/v1/sample", content=_parts())
        assert chunked.status_code == 413


async def _parts():
    for _ in range(30):
        yield b"x" * 100


async def test_a_full_queue_says_when_to_come_again() -> None:
    app = make_app(engine := slow_engine(), limits=ServerLimits(max_queued=2, retry_after_s=7))
    async with asgi_client(app) as client:
        first = asyncio.create_task(client.post("/v1/sample", json={**LONG, "n": 2}))
        await wait_until(lambda: engine.requests)
        refused = await client.post("/v1/sample", json=SAMPLE)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
        assert "max_queued" in refused.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 200
        assert (await first).status_code == 200
        assert (await client.post("/v1/sample", json=SAMPLE)).status_code == 200
        assert await metric(client, "unbroken_completions_in_flight") == 0


async def test_a_request_that_takes_too_long_is_aborted_with_504() -> None:
    engine = slow_engine()
    async with asgi_client(make_app(engine, limits=ServerLimits(request_timeout_s=0.05))) as client:
        await engine.pause()
        answer = await client.post("/v1/sample", json=LONG)
        assert answer.status_code == 504
        await engine.resume()
        assert await metric(client, "unbroken_completions_in_flight") == 0


@pytest.mark.parametrize("path", ["/v1/sample", "/v1/sample?stream"])
async def test_a_client_that_leaves_aborts_its_request_in_the_engine(path: str) -> None:
    engine = slow_engine()
    body = {**LONG, "stream": "stream" in path}
    async with listening(make_app(engine)) as url, httpx.AsyncClient(base_url=url) as client:
        if not body["stream"]:  # its answer has no first line, at which to stop
            await engine.pause()
        reading = asyncio.create_task(_read_and_pause(engine, url + path, body))
        await wait_until(lambda: engine.num_sampled if body["stream"] else engine.requests)
        reading.cancel()

        async def is_aborted() -> bool:
            return await metric(client, "unbroken_requests_aborted_by_client_total") == 1

        await wait_until(is_aborted)
        assert await metric(client, "unbroken_completions_in_flight") == 0
        await engine.resume()
        before = engine.num_sampled
        await asyncio.sleep(0.05)
        assert engine.num_sampled == before
        assert (await client.post("/v1/sample", json=SAMPLE)).status_code == 200


async def _read_and_pause(engine, url: str, body) -> None:
    async with httpx.AsyncClient() as client, client.stream("POST", url, json=body) as answer:
        async for _ in answer.aiter_lines():
            await engine.pause()


async def test_a_dead_engine_fails_health_and_every_request() -> None:
    engine = scripted_engine("hi")
    async with asgi_client(make_app(engine)) as client:
        waiting = asyncio.create_task(client.post("/v1/sample", json=SAMPLE))
        await asyncio.sleep(0)
        await waiting
        await engine.close()
        health = await client.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_error")
        assert (await client.post("/v1/sample", json=SAMPLE)).status_code == 503


async def test_an_unknown_path_is_404_in_the_same_form() -> None:
    async with asgi_client(make_app(scripted_engine("hi"))) as client:
        answer = await client.get("/nowhere")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


async def test_metrics_count_what_was_sampled() -> None:
    async with asgi_client(make_app(scripted_engine(lambda prompt_ids: [7] * 5))) as client:
        await client.post("/v1/sample", json={"prompts": [[1, 2], [3]], "params": {"max_tokens": 5}, "n": 2})
        assert await metric(client, "unbroken_sampled_ids_total") == 20
        assert await metric(client, "unbroken_prompt_ids_total") == 3
        assert await metric(client, "unbroken_completions_total") == 4
        assert "# HELP unbroken_prompt_ids_total Prompt ids sent to the engine\n" in (await client.get("/metrics")).text


async def test_an_unexpected_error_is_counted_as_a_500() -> None:
    def break_down(prompt_ids: Any) -> Any:
        raise RuntimeError("broken")

    async with asgi_client(make_app(scripted_engine(break_down))) as client:
        assert (await client.post("/v1/sample", json=SAMPLE)).status_code == 500
        text = (await client.get("/metrics")).text
    assert 'unbroken_requests_total{route="/v1/sample",status="500"} 1.0' in text


@pytest.mark.parametrize("error", [InvariantError("ids disagree"), RuntimeError("broken")])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_has_the_traceback_of_every_500(
    error: Exception, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(prompt_ids: Any) -> Any:
        raise error

    async with asgi_client(make_app(scripted_engine(break_down))) as client:
        body = {"prompt": [1, 2], "stream": stream}
        assert (await client.post("/v1/completions", json=body)).status_code == 500
    assert "in break_down" in caplog.text
    assert str(error) in caplog.text


async def test_operations_have_the_names_of_their_handlers_which_are_private() -> None:
    async with asgi_client(make_app(scripted_engine("hi"))) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert paths["/health"]["get"]["operationId"] == "health_health_get"
    names = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(set(names)) == len(names) > 30
    assert not [name for name in names if name.startswith("_")]


async def test_metrics_are_described_as_text() -> None:
    async with asgi_client(make_app(scripted_engine("hi"))) as client:
        described = (await client.get("/openapi.json")).json()["paths"]["/metrics"]["get"]["responses"]["200"]
    assert list(described["content"]) == ["text/plain"]


def test_every_file_of_routes_is_listed_and_declares_its_access() -> None:
    files = {info.name for info in pkgutil.iter_modules(routes.__path__)}
    assert files == set(routes.DIALECTS)
    assert {router.access for router in routes.load_routers()} == set(Access)


def test_a_file_of_routes_that_declares_no_access_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "unbroken.server.routes.forgotten", SimpleNamespace(router=APIRouter()))
    monkeypatch.setattr(routes, "DIALECTS", ("native", "forgotten"))
    with pytest.raises(TypeError, match=r"forgotten.py must be Routes\(Access"):
        routes.load_routers()


@pytest.mark.parametrize("key", [{}, {"Idempotency-Key": "a"}])
async def test_who_waits_when_the_server_stops_gets_a_503_in_json(key: dict[str, str]) -> None:
    engine = slow_engine()
    await engine.pause()
    app, paths = make_app(engine), []

    async def listen(scope, receive, send) -> None:
        paths.append(scope.get("path"))
        await app(scope, receive, send)

    async with httpx.AsyncClient() as client:
        async with listening(listen) as url:
            waiting = [asyncio.create_task(client.post(f"{url}/v1/sample", json=LONG, headers=key)) for _ in range(3)]
            await wait_until(lambda: paths.count("/v1/sample") == 3 and engine.requests)
        for answer in await asyncio.gather(*waiting):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "server_stopped"
            assert answer.headers["retry-after"] == "1"


async def test_a_folder_that_is_no_path_is_a_400(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    async with asgi_client(make_app(scripted_engine("hi"), weights_dir=tmp_path)) as client:
        for folder in ("a\0b", f"{tmp_path}/a\0b", f"{tmp_path}/loop/a", "a" * 4096, "/"):
            answer = await client.post("/v1/weights", json={"folder": folder, "policy_version": 1})
            assert answer.status_code == 400, answer.text


async def test_a_manifest_with_numbers_that_are_none_is_a_400(tmp_path: Path) -> None:
    folder = tmp_path / "version-00000001"
    folder.mkdir()
    async with asgi_client(make_app(scripted_engine("hi"), weights_dir=tmp_path)) as client:
        for number in ("1e999", "-1e999", "NaN", "1" + "0" * 5000):
            (folder / "manifest.json").write_text(f'{{"format": 1, "policy_version": {number}, "files": []}}')
            answer = await client.post("/v1/weights", json={"folder": str(folder), "policy_version": 1})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "bad_weights"
