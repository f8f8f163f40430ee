"""Tools that the template does not show, and options that it does not read, are named in the header of the answer."""

import json
from typing import Any

import pytest

from support import templates
from support.gateways import running_gateway, scripted
from support.servers import asgi_client, make_app, scripted_engine
from support.tokenizers import make_tokenizer
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig

HEADER = "X-Unbroken-Ignored"
USER = {"role": "user", "content": "hi"}
FUNCTION: dict[str, Any] = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": [USER],
        "max_tokens": 9,
        "tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}],
    },
}


def plain_app() -> Any:
    """A server whose template shows no tools."""
    tokenizer = make_tokenizer(templates.CHATML, eos_token="<|im_end|>")
    return create_app(
        scripted_engine("ok<|im_end|>"),
        lambda options: TemplateRenderer(tokenizer, template_kwargs=options),
        TextCodec(tokenizer),
        ServerConfig(model_name="tiny"),
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_what_the_template_leaves_out_is_named_in_every_dialect(path: str, stream: bool) -> None:
    body = {**BODIES[path], "stream": stream}
    options = {"chat_template_kwargs": {"open_thinking": True, "unread": 1}, "metadata": {"user_id": "x"}}
    for app, expected in (
        (plain_app(), ["tools", "chat_template_kwargs.open_thinking", "chat_template_kwargs.unread"]),
        (make_app(scripted_engine("ok<|im_end|>")), ["chat_template_kwargs.unread"]),
    ):
        async with asgi_client(app) as client:
            for _ in range(2):
                named = (await client.post(path, json={**body, **options})).headers[HEADER].split(", ")
                assert [name for name in named if name != "metadata"] == expected
            without = await client.post(path, json={key: value for key, value in body.items() if key != "tools"})
            assert (without.status_code, without.headers.get(HEADER)) == (200, None)


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/responses", {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, None),
        ("/v1/messages", {"output_config": {"effort": "low"}}, "output_config.effort"),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, None),
    ],
)
async def test_a_wish_how_much_to_reason_is_named_where_the_template_cannot_follow_it(
    path: str, fields: dict[str, Any], named: str | None
) -> None:
    body = {key: value for key, value in BODIES[path].items() if key != "tools"} | fields
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        assert (await client.post(path, json=body)).headers.get(HEADER) == named
    async with asgi_client(plain_app()) as client:
        assert (await client.post(path, json=body)).headers[HEADER] == (
            named or next(iter(fields)) + (".effort" if path == "/v1/responses" else "")
        )


async def test_tools_that_the_template_shows_are_not_named() -> None:
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        for path, body in BODIES.items():
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.headers.get(HEADER)) == (200, None)


async def test_the_effect_of_tools_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    app = plain_app()
    rendered = []
    render_text = TemplateRenderer.render_text

    def count(self: TemplateRenderer, *args: Any, **options: Any) -> str:
        rendered.append(args)
        return render_text(self, *args, **options)

    monkeypatch.setattr(TemplateRenderer, "render_text", count)
    async with asgi_client(app) as client:
        for _ in range(3):
            answer = await client.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"])
            assert answer.headers[HEADER] == "tools"
    assert len(rendered) == 4


async def test_tools_that_no_context_holds_are_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    app = plain_app()
    app.state.context.get_renderer()
    monkeypatch.setattr(TemplateRenderer, "render_text", lambda *_, **__: pytest.fail("it is rendered"))
    function = {**FUNCTION, "description": "x" * 10**6}
    async with asgi_client(app) as client:
        body = {"messages": [USER], "tools": [{"type": "function", "function": function}]}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_malformed_tools_are_refused_as_before() -> None:
    async with asgi_client(plain_app()) as client:
        for tools in ([5], [{"type": "function"}], [{"type": "function", "function": {"name": 3}}]):
            answer = await client.post("/v1/chat/completions", json={"messages": [USER], "tools": tools})
            assert answer.status_code == 400, (tools, answer.text)


async def test_a_session_says_which_of_its_options_the_template_does_not_read(tmp_path: Any) -> None:
    async with running_gateway(scripted("ok<|im_end|>"), tmp_path) as gateway:
        options = {"open_thinking": False, "unread": 1}
        answer = await gateway.client.post("/v1/sessions", json={"template_options": options})
        assert answer.headers[HEADER] == "template_options.unread", json.dumps(answer.json())
        read = await gateway.client.post("/v1/sessions", json={"template_options": {"open_thinking": False}})
        assert HEADER not in read.headers
