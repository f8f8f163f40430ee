"""Anthropic's Messages: what its clients send, and what they need back."""

import asyncio
from typing import Any

import pytest

from support.dialects import MESSAGES, join_message, read_events, without_ids
from support.image_servers import image_file, in_base64, make_vision_app, vision_engine
from support.servers import MODEL, asgi_client, close_soon, encode, make_app, scripted_engine, server_tokenizer
from unbroken.engines.scripted import ScriptedEngine
from unbroken.server.config import ServerLimits
from unbroken.server.wire.conversation import make_seal

COUNT = "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", oops\n</tool_call>'
REPLY = f"<think>\nhm é😀\n</think>\n\nLet me  see.\n\n{CALL}\n{CALL}<|im_end|>"


async def ask(reply: str, engine: ScriptedEngine | None = None, **fields: Any) -> dict[str, Any]:
    """A whole message, which its stream must equal."""
    body = {"model": MODEL, "max_tokens": 400, "messages": USER, **fields}
    async with asgi_client(make_app(engine or scripted_engine(reply))) as client:
        answer = await client.post(MESSAGES, json=body)
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = answer.json()
        assert without_ids(join_message(await read_events(client, MESSAGES, body))) == without_ids(message)
    return message


async def refused(body: dict[str, Any], *, path: str = MESSAGES, **config: Any) -> dict[str, Any]:
    """The error of a request, in Anthropic's form."""
    engine = scripted_engine(REPLY, takes_structured_output=True)
    async with asgi_client(make_app(engine, **config)) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code >= 400, answer.text
    assert engine.requests == []
    assert answer.json()["type"] == "error"
    error: dict[str, Any] = answer.json()["error"]
    return {"status": answer.status_code, **error}


def turn(*content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(content)}]


async def test_a_reply_is_thinking_text_and_calls_in_their_order() -> None:
    message = await ask(REPLY, tools=TOOLS)
    thinking, text, first, second = message["content"]
    assert thinking == {"type": "thinking", "thinking": "hm é😀", "signature": make_seal("hm é😀")}
    assert text == {"type": "text", "text": "Let me  see."}
    assert [one["input"] for one in (first, second)] == [{"a": 1}, {"a": 1}]
    assert first["id"] != second["id"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"]["output_tokens"] == len(encode(REPLY))
    assert message["policy_versions"] == [[0, len(encode(REPLY)), 0]]
    assert message["id"].startswith("msg_")


@pytest.mark.parametrize(
    ("reply", "fields", "reason", "stop_sequence", "text"),
    [
        ("ok<|im_end|>", {}, "end_turn", None, "ok"),
        ("one two three<|im_end|>", {"max_tokens": 2}, "max_tokens", None, None),
        (f"{CALL}<|im_end|>", {"tools": TOOLS, "tool_choice": {"type": "none"}}, "end_turn", None, CALL),
        (f"{BROKEN}<|im_end|>", {"tools": TOOLS}, "end_turn", None, BROKEN),
        ("a END b<|im_end|>", {"stop_sequences": ["no", "END"]}, "stop_sequence", "END", "a "),
        ("<think>\n</think>\n\na b<|im_end|>", {"stop_sequences": ["k>\n\na"]}, "stop_sequence", "k>\n\na", None),
    ],
)
async def test_a_message_says_why_it_ended(
    reply: str, fields: dict[str, Any], reason: str, stop_sequence: str | None, text: str | None
) -> None:
    message = await ask(reply, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop_sequence)
    if text is not None:
        assert message["content"] == [{"type": "text", "text": text}]
    assert ("malformed_tool_calls" in message) == (BROKEN in reply)


async def test_max_tokens_beyond_the_context_are_what_fits() -> None:
    engine = scripted_engine(lambda prompt_ids: [9] * 4000, context_length=128)
    message = await ask("", engine, max_tokens=32000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["input_tokens"] + message["usage"]["output_tokens"] == 128


async def test_thinking_is_left_out_where_it_is_disabled_and_sealed_where_it_is_omitted() -> None:
    assert [one["type"] for one in (await ask(REPLY, thinking={"type": "disabled"}))["content"]] == ["text"]
    omitted = (await ask(REPLY, thinking={"type": "adaptive", "display": "omitted"}))["content"][0]
    assert omitted["thinking"] == ""
    prompts: list[list[int]] = []
    for block in (omitted, {"type": "thinking", "thinking": "hm é😀", "signature": ""}):
        engine = scripted_engine("ok<|im_end|>")
        history = [*USER, *turn(block, role="assistant"), *USER]
        await ask("", engine, messages=history, tools=TOOLS)
        prompts.append(engine.requests[0].prompt_ids.tolist())
    assert prompts[0] == prompts[1]


async def test_thinking_disabled_is_an_option_of_templates_that_know_it() -> None:
    engine = scripted_engine("ok<|im_end|>")
    await ask("", engine, thinking={"type": "disabled"})
    plain = server_tokenizer().apply_chat_template(
        USER, add_generation_prompt=True, enable_thinking=False, return_dict=True
    )["input_ids"]
    assert engine.requests[0].prompt_ids.tolist() == plain


async def test_sampling_parameters_reach_the_engine() -> None:
    engine = scripted_engine("ok<|im_end|>")
    await ask("", engine, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"], max_tokens=12)
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 12)
    assert params.stop_strings == ("x",)


async def test_what_has_no_effect_is_accepted() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    fields = {
        "system": [{"type": "text", "text": "Be brief.", **cached}],
        "messages": [
            *turn({"type": "text", "text": "hi", "citations": None, **cached}),
            *turn({"type": "thinking", "thinking": "of another server", "signature": "EqQB"}, {**call, **cached},
                  role="assistant"),
            *turn({"type": "tool_result", "tool_use_id": "t1", "content": "3", "is_error": True, **cached}),
        ],
        "tools": [{**TOOLS[0], "type": "custom", "strict": True, **cached}],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "mcp_servers": [],
        "container": None,
    }  # fmt: skip
    assert (await ask("ok<|im_end|>", **fields))["stop_reason"] == "end_turn"


TEXT = {"type": "text", "text": "x"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
RESULT = {"type": "tool_result", "tool_use_id": "none"}
SEALED = {"type": "thinking", "thinking": "another", "signature": make_seal("hm")}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": None}, "max_tokens must be a valid integer, got None"),
        ({"max_tokens": 0}, "max_tokens must be greater than or equal to 1, got 0"),
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role must be 'user', 'assistant' or 'system'"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is required"),
        ({"messages": turn("x")}, "messages.0.content.0 must be an object with a type, got 'x'"),
        ({"messages": turn({"type": "document"})}, "messages.0.content.0 of the type 'document' is not one of"),
        ({"messages": turn({"type": "redacted_thinking", "data": "x"})}, "the type 'redacted_thinking' is not one of"),
        ({"messages": turn({"type": "server_tool_use"}, role="assistant")}, "the type 'server_tool_use' is not one of"),
        ({"messages": turn({"type": "text"})}, "messages.0.content.0.text is required"),
        (
            {"messages": turn({**TEXT, "citations": [{}]})},
            "messages.0.content.0 must not have citations=[{}] (it is not a known field)",
        ),
        ({"messages": turn({"type": "image", "source": {"type": "file"}})}, "content.0.source of the type 'file'"),
        ({"messages": turn(IMAGE)}, "messages.0.content.0.source.data must not hold an image"),
        ({"messages": turn({**RESULT, "content": [{"type": "search_result"}]})}, "the type 'search_result' is not"),
        ({"messages": turn(RESULT)}, "messages.0.content.0.tool_use_id must be the id of an earlier tool_use block"),
        (
            {"messages": turn({"type": "tool_use", "id": "t", "name": "add", "input": {}})},
            "must not be of the type 'tool_use'",
        ),
        ({"messages": [*turn(IMAGE, role="assistant"), *USER]}, "content.0 must not be of the type 'image'"),
        ({"messages": [*turn(SEALED, role="assistant"), *USER]}, "messages.0.content.0.signature must fit"),
        ({"messages": turn(TEXT, role="assistant")}, "messages.0 must not be an assistant message"),
        ({"system": [IMAGE]}, "system.0 of the type 'image' is not one of the blocks of system"),
        ({"tools": [{"type": 7, "name": "search", "input_schema": {}}]}, "tools.0.type must be 'custom'"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "tool", "name": "bash"}},
            "must match a function in tools",
        ),
        (
            {"tools": [{**TOOLS[0], "defer_loading": True}]},
            "tools.0 must not have defer_loading=True (it is not a known field)",
        ),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name is required"),
        ({"tool_choice": {"type": "any"}}, "must match a function in tools"),
        ({"tool_choice": {"type": "tool", "name": "no"}, "tools": TOOLS}, "must match a function in tools"),
        ({"tool_choice": {"type": "always"}, "tools": TOOLS}, "tool_choice must be of type 'auto', 'any', 'none'"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "tools": TOOLS}, "must be left out"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers=[{'url': 'x'}]"),
        ({"container": "c"}, "container='c'"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "edits must keep everything"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be of type json_schema"),
        ({"thinking": {"type": "always"}}, "thinking.type must be 'enabled', 'adaptive'"),
        ({"temperature": -1}, "temperature must be"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs must not have ['messages']"),
    ],
)
async def test_what_cannot_be_represented_is_refused_by_name(fields: dict[str, Any], expected: str) -> None:
    error = await refused({"model": MODEL, "max_tokens": 10, "messages": USER, **fields})
    assert (error["status"], error["type"]) == (400, "invalid_request_error")
    assert expected in error["message"]


async def test_errors_before_the_route_are_in_the_same_form() -> None:
    assert (await refused({}, api_key="k"))["type"] == "authentication_error"
    assert (await refused({}, path=COUNT, limits=ServerLimits(max_body_bytes=1)))["type"] == "request_too_large"
    other = {"max_tokens": 10, "messages": USER, "model": "claude"}
    assert (await refused(other))["type"] == "not_found_error"
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        broken = await client.post(MESSAGES, content=b"{", headers={"content-type": "application/json"})
        assert (broken.json()["type"], broken.json()["error"]["type"]) == ("error", "invalid_request_error")
        assert (await client.get(MESSAGES)).json()["type"] == "error"
        assert "type" not in (await client.get("/v1/chat/completions")).json()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "right"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "right", "Authorization": "Bearer wrong"}, 200),
        ({"Authorization": "Bearer right"}, 200),
    ],
)
async def test_the_api_key_may_come_as_anthropics_clients_send_it(headers: dict[str, str], status: int) -> None:
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"), api_key="right")) as client:
        body = {"max_tokens": 10, "messages": USER}
        assert (await client.post(MESSAGES, json=body, headers=headers)).status_code == status


async def test_an_engine_that_ends_ends_the_stream_with_an_error_event() -> None:
    engine = scripted_engine(lambda prompt_ids: [9] * 4000)

    async with asgi_client(make_app(engine)) as client:
        closing = asyncio.create_task(close_soon(engine))
        events = await read_events(client, MESSAGES, {"max_tokens": 3000, "messages": USER})
        await closing
    assert events[0]["type"] == "message_start"
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "overloaded_error")


async def test_ids_are_counted_without_sampling() -> None:
    engine = scripted_engine("ok<|im_end|>")
    body = {"messages": USER, "tools": TOOLS, "system": "Be brief."}
    async with asgi_client(make_app(engine)) as client:
        counted = (await client.post(COUNT, json=body)).json()
        answered = (await client.post(MESSAGES, json={**body, "max_tokens": 9})).json()
    assert counted == {"input_tokens": answered["usage"]["input_tokens"]}
    assert len(engine.requests) == 1


async def test_images_come_in_user_messages_and_in_results_of_tools() -> None:
    engine = vision_engine("ok<|im_end|>")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": in_base64(image_file())}}
    stored = {"type": "image", "source": {"type": "url", "url": f"sha256:{image_file().sha256}"}}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    history = [
        *turn(TEXT, image),
        *turn(call, role="assistant"),
        *turn({"type": "tool_result", "tool_use_id": "t1", "content": [stored, TEXT]}),
    ]
    async with asgi_client(make_vision_app(engine)) as client:
        await client.post("/v1/images", content=image_file().data)
        answer = await client.post(MESSAGES, json={"max_tokens": 9, "messages": history})
        assert answer.status_code == 200, answer.text
        broken = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        refused = await client.post(MESSAGES, json={"max_tokens": 9, "messages": turn(TEXT, broken)})
    assert [span.image.sha256 for span in engine.requests[0].images] == [image_file().sha256] * 2
    assert "messages.0.content.1.source.data" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("choice", "names"), [({"type": "any"}, ["add", "now"]), ({"type": "tool", "name": "now"}, ["now"])]
)
async def test_required_calls_are_structured_output(choice: dict[str, Any], names: list[str]) -> None:
    engine = scripted_engine(f"{CALL}<|im_end|>", takes_structured_output=True)
    await ask("", engine, tools=[*TOOLS, {"name": "now", "input_schema": {"type": "object"}}], tool_choice=choice)
    tag = engine.requests[0].params.structured_output.structural_tag or ""
    assert [name for name in ("add", "now") if f'{name}\\"' in tag] == names


async def test_a_format_is_structured_output() -> None:
    engine = scripted_engine("{}<|im_end|>", takes_structured_output=True)
    await ask("", engine, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert '"integer"' in (engine.requests[0].params.structured_output.json_schema or "")


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_tools_without_a_schema_of_the_client_are_left_out_and_named(path: str) -> None:
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "bash_20250124", "name": "bash"},
    ]
    engine = scripted_engine("ok<|im_end|>")
    body = {"model": MODEL, "messages": USER, "tools": [hosted[0], *TOOLS, *hosted[1:]]}
    body |= {"max_tokens": 40} if path == MESSAGES else {}
    async with asgi_client(make_app(engine)) as client:
        answer = await client.post(path, json=body)
        plain = await client.post(path, json={**body, "tools": TOOLS})
    assert answer.status_code == plain.status_code == 200, answer.text
    names = [name.strip() for name in answer.headers["x-unbroken-ignored"].split(",")]
    assert names == list(dict.fromkeys(f"tools.{tool['type']}" for tool in hosted))
    assert "x-unbroken-ignored" not in plain.headers
    if path == COUNT:
        assert answer.json() == plain.json()
    else:
        first, second = engine.requests
        assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
