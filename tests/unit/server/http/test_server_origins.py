"""Host and Origin: no web page uses a server without a key."""

import argparse

import pytest

from support.servers import asgi_client, make_app, scripted_engine
from unbroken.errors import InvalidInputError
from unbroken.server.options import add_arguments, read_options

SAMPLE = {"prompts": [[1, 2, 3]], "params": {"max_tokens": 4}}


async def pause(headers: dict[str, str], **config):
    app = make_app(scripted_engine("hi"), **config)
    async with asgi_client(app) as client:
        return await client.post("/pause", headers={"Host": "localhost:8000", **headers})


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "localhost.:80", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "[::1]"]
)
async def test_a_server_without_a_key_answers_this_machine(host: str) -> None:
    assert (await pause({"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1:8000",
     "0.0.0.0:8000", "localhost@evil.example", "localhost:80:80", "[::2]:8000", "", "evil.example/localhost"],
)  # fmt: skip
async def test_dns_rebinding_reaches_nothing(host: str) -> None:
    answer = await pause({"Host": host})
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "unknown_host"
    assert "--allow-host" in error["message"]
    assert repr(host) in error["message"]


@pytest.mark.parametrize("path", ["/health", "/version", "/docs", "/openapi.json", "/metrics", "/nowhere"])
async def test_no_path_answers_an_unknown_host(path: str) -> None:
    async with asgi_client(make_app(scripted_engine("hi")), Host="evil.example") as client:
        assert (await client.get(path)).status_code == 403


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://localhost:3000", "https://localhost:8000", "http://127.0.0.1:8000",
     "http://localhost:8000.evil.example", "file://", "localhost:8000", "chrome-extension://localhost:8000", ""],
)  # fmt: skip
async def test_a_page_of_another_origin_cannot_post(origin: str) -> None:
    answer = await pause({"Origin": origin})
    if origin == "https://localhost:8000":  # the same page behind a proxy that ends TLS
        assert answer.status_code == 200
        return
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "foreign_origin"


async def test_the_servers_own_pages_may_post() -> None:
    assert (await pause({"Origin": "http://localhost:8000"})).status_code == 200
    assert (await pause({"Host": "localhost", "Origin": "http://localhost"})).status_code == 200
    assert (await pause({"Host": "[::1]:80", "Origin": "http://[::1]"})).status_code == 200


async def test_names_that_the_operator_allows_are_answered_with_any_port() -> None:
    hosts = ("gpu-7", "Proxy.example")
    for headers in (
        {"Host": "gpu-7:8000"},
        {"Host": "proxy.example"},
        {"Host": "localhost", "Origin": "https://proxy.example:3000"},
    ):
        assert (await pause(headers, hosts=hosts)).status_code == 200
    assert (await pause({"Host": "gpu-8"}, hosts=hosts)).status_code == 403


async def test_with_a_key_any_name_is_answered_unless_names_are_given() -> None:
    key = {"Authorization": "Bearer right"}
    foreign = {"Host": "service.cluster:8000", "Origin": "https://ui.example", **key}
    assert (await pause(foreign, api_key="right")).status_code == 200
    assert (await pause(foreign, api_key="right", hosts=("ui.example",))).status_code == 403
    assert (await pause(foreign, api_key="right", hosts=("ui.example", "service.cluster"))).status_code == 200


async def test_a_trailing_slash_is_no_redirect_that_could_reflect_host() -> None:
    app = make_app(scripted_engine("hi"), api_key="right")
    async with asgi_client(app, Host="evil.example", Authorization="Bearer right") as client:
        for path in ("/v1/sample", "/v1/sample/", "/v1/sample//", "/generate/", "/generate"):
            body = SAMPLE if "sample" in path else {"prompts": ["hi"]}
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert "location" not in answer.headers


@pytest.mark.parametrize("text", ["http://gpu-7", "gpu-7:8000", "", "gpu-7/x", "*"])
def test_an_option_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--allow-host must be a HOST without scheme or port"):
        parse("--allow-host", text)


def test_the_option_is_repeatable() -> None:
    assert parse("--allow-host", "gpu-7", "--allow-host", "[fd00::1]").config.hosts == ("gpu-7", "[fd00::1]")


def parse(*words: str):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return read_options(*parser.parse_known_args(["--model", "tiny", *words]))
