"""OpenAI's Responses: what its clients send, and what they need back."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from support.dialects import RESPONSES, join_response, read_events, without_ids
from support.image_servers import data_url, image_file, make_vision_app, vision_engine
from support.servers import MODEL, asgi_client, close_soon, encode, make_app, scripted_engine, server_tokenizer
from unbroken.engines.scripted import ScriptedEngine
from unbroken.server.wire.conversation import make_seal

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": False}]
NOW = {"type": "function", "name": "now", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", oops\n</tool_call>'
REPLY = f"<think>\nhm é😀\n</think>\n\nLet me  see.\n\n{CALL}\n{CALL}<|im_end|>"
USER = {"role": "user", "content": "hi"}
SEALED = ["reasoning.encrypted_content"]


async def ask(reply: str, engine: ScriptedEngine | None = None, **fields: Any) -> dict[str, Any]:
    """A whole response, which its stream must equal."""
    body = {"model": MODEL, "input": "hi", **fields}
    async with asgi_client(make_app(engine or scripted_engine(reply))) as client:
        answer = await client.post(RESPONSES, json=body)
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        assert without_ids(join_response(await read_events(client, RESPONSES, body))) == without_ids(response)
    Response.model_validate(response)
    return response


def sdk(app: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=asgi_client(app), max_retries=0
    )


async def test_a_reply_is_items_of_reasoning_text_and_calls_in_their_order() -> None:
    response = await ask(REPLY, tools=TOOLS, include=SEALED, metadata={"task": "7"}, store=False)
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm é😀"}]
    assert reasoning["encrypted_content"] == make_seal("hm é😀", packed=True)
    assert message["content"] == [{"type": "output_text", "text": "Let me  see.", "annotations": [], "logprobs": []}]
    assert [json.loads(one["arguments"]) for one in (first, second)] == [{"a": 1}, {"a": 1}]
    assert first["call_id"] != second["call_id"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert (response["metadata"], response["store"]) == ({"task": "7"}, False)
    usage = response["usage"]
    assert usage["output_tokens"] == len(encode(REPLY))
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert response["policy_versions"] == [[0, len(encode(REPLY)), 0]]


@pytest.mark.parametrize("is_within", ["reasoning", "message"])
async def test_a_reply_that_is_cut_is_incomplete(is_within: str) -> None:
    reply = f"<think>\n{'hm ' * 50}\n</think>\n\n{'so ' * 50}"
    length = 20 if is_within == "reasoning" else len(encode(reply)) - 20
    response = await ask(reply, max_output_tokens=length)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (response["output"][-1]["type"], response["output"][-1]["status"]) == (is_within, "incomplete")
    assert response["usage"]["output_tokens"] == length


async def test_a_malformed_call_is_text_and_is_listed() -> None:
    response = await ask(f"{BROKEN}<|im_end|>", tools=TOOLS)
    assert response["output"][0]["content"][0]["text"] == BROKEN
    assert response["malformed_tool_calls"][0]["status"] == "invalid_json"


async def test_max_output_tokens_beyond_the_context_are_what_fits() -> None:
    response = await ask("", scripted_engine(lambda prompt_ids: [9] * 4000, context_length=128), max_output_tokens=9999)
    assert response["status"] == "incomplete"
    assert response["usage"]["total_tokens"] == 128


async def test_the_sdk_reads_whole_and_streamed_answers_and_sends_them_back() -> None:
    app = make_app(scripted_engine(REPLY))
    asked: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "include": SEALED}
    whole = await sdk(app).responses.create(input="hi", **asked)
    async with sdk(app).responses.stream(input="hi", **asked) as events:
        kinds = {event.type async for event in events}
        streamed = await events.get_final_response()
    assert {"response.reasoning_text.delta", "response.output_text.delta", "response.completed"} <= kinds
    assert whole.output_text == streamed.output_text == "Let me  see."
    shown = [[item.type for item in one.output] for one in (whole, streamed)]
    assert shown == [["reasoning", "message", "function_call", "function_call"]] * 2
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in streamed.output
        if item.type == "function_call"
    ]
    again = await sdk(app).responses.create(input=[USER, *streamed.output, *results], **asked)
    assert again.status == "completed"
    assert "<think>\nhm é😀\n</think>" in server_tokenizer().decode(_last_prompt(app))


def _last_prompt(app: Any) -> list[int]:
    ids: list[int] = app.state.context.service.engine.requests[-1].prompt_ids.tolist()
    return ids


@pytest.mark.parametrize(
    "item",
    [
        {"summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"summary": [], "encrypted_content": make_seal("hm", packed=True)},
        {"summary": [{"type": "summary_text", "text": "hm"}], "content": None, "encrypted_content": "gAAAA"},
        {"content": [{"type": "reasoning_text", "text": "h"}, {"type": "reasoning_text", "text": "m"}], "id": "rs_1"},
    ],
)
async def test_reasoning_comes_back_in_each_of_its_forms(item: dict[str, Any]) -> None:
    engine = scripted_engine("ok<|im_end|>")
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": None}
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "3"}]}
    await ask("", engine, tools=TOOLS, input=[USER, {"type": "reasoning", **item}, call, output])
    assert "<think>\nhm\n</think>\n\n<tool_call>" in server_tokenizer().decode(engine.requests[0].prompt_ids)


@pytest.mark.parametrize(
    "reply",
    [
        {"role": "assistant", "content": "Hi!"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi!"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi!", "annotations": []}], "id": "msg_1"},
    ],
)
async def test_a_reply_comes_back_with_as_few_fields_as_clients_leave_it(reply: dict[str, Any]) -> None:
    engine = scripted_engine("ok<|im_end|>")
    await ask("", engine, input=[USER, reply, USER])
    turns = "<|im_start|>assistant\nHi!<|im_end|>\n<|im_start|>user\nhi<|im_end|>"
    assert turns in server_tokenizer().decode(engine.requests[0].prompt_ids)


@pytest.mark.parametrize("content", [[], "", [{"type": "output_text", "text": ""}]])
async def test_a_reply_without_text_comes_back_as_an_empty_one(content: Any) -> None:
    engine = scripted_engine("ok<|im_end|>")
    await ask("", engine, input=[USER, {"type": "message", "role": "assistant", "content": content}, USER])
    assert "<|im_start|>assistant\n<|im_end|>" in server_tokenizer().decode(engine.requests[0].prompt_ids)


async def test_what_has_no_effect_is_accepted() -> None:
    fields = {
        "input": [
            {**USER, "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "final_answer",
             "content": [{"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}]},
            {**USER, "type": "message"},
        ],
        "store": True,
        "previous_response_id": None,
        "truncation": "disabled",
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "parallel_tool_calls": False,
        "tools": TOOLS,
        "tool_choice": "auto",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "client_metadata": {"a": "b"},
        "include": ["web_search_call.action.sources"],
        "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    assert (await ask("ok<|im_end|>", **fields))["status"] == "completed"


async def test_no_effort_is_an_option_of_templates_that_know_it() -> None:
    engine = scripted_engine("ok<|im_end|>")
    await ask("", engine, reasoning={"effort": "none"})
    plain = server_tokenizer().apply_chat_template([USER], add_generation_prompt=True, enable_thinking=False)
    assert engine.requests[0].prompt_ids.tolist() == plain["input_ids"]


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"input": [USER, {"type": kind, **fields}]}


OUTPUT = {"call_id": "none", "output": "3"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"input": None}, "input must be"),
        ({"input": []}, "messages must hold at least one message"),
        ({"input": ["x"]}, "input.0 must be an object with a type, got 'x'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role must be 'user', 'assistant'"),
        ({"input": [{"role": "user"}]}, "input.0.content is required"),
        (item("web_search_call", id="w"), "input.1 of the type 'web_search_call' is not one of the items"),
        (item("item_reference", id="x"), "input.1.id must be of an answer that is kept, got 'x'"),
        (item("item_reference", id="msg_1_2_3"), "input.1.id must be of an answer that is kept"),
        (item("item_reference"), "input.1.id is required"),
        (item("custom_tool_call_output", call_id="c", output="x"), "input.1.call_id must be the id of an earlier"),
        (item("message", role="user", content=[{"type": "input_file"}]), "input.1.content.0 of the type 'input_file'"),
        (item("message", role="user", content=[{"type": "input_image", "file_id": "x"}]), "image_url is required"),
        (item("message", role="user", content=[{"type": "input_image", "image_url": "AAAA"}]), "content.0.image_url"),
        (item("message", role="assistant", content=[{"type": "input_image", "image_url": "x"}]), "must not be of the"),
        (item("function_call_output", **OUTPUT), "input.1.call_id must be the id of an earlier function_call"),
        (item("function_call", call_id="c", name="add", arguments="3"), "input.1.arguments must be a JSON object"),
        (item("function_call", call_id="c", name="add", arguments="{}", async_=True), "async_=True"),
        (item("reasoning", encrypted_content="gAAAA"), "its encrypted_content is another server's"),
        (item("reasoning", encrypted_content="unbroken1.00.AAAA"), "must come back as this server wrote it"),
        ({"tools": [{"type": 3}]}, "tools.0 must be an object with a type"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name is required"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "must match a function in tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools.0.tools.0 of the type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name is required"),
        ({"tool_choice": "required"}, "must match a function in tools"),
        ({"tool_choice": {"type": "function", "name": "no"}, "tools": TOOLS}, "must match a function in tools"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice must be 'auto', 'none'"),
        ({"previous_response_id": "resp_1"}, "previous_response_id must be of an answer that is kept, got 'resp_1'"),
        ({"conversation": "c"}, "conversation must be of an answer that is kept, got 'c'"),
        ({"conversation": {"name": "c"}}, "conversation must be an id, or an object with one, got {'name': 'c'}"),
        ({"background": True}, "background=True"),
        ({"prompt": {"id": "p"}}, "prompt={'id': 'p'}"),
        ({"truncation": "middle"}, "truncation must be 'disabled' or 'auto', got 'middle'"),
        ({"include": ["message.output_text.logprobs"]}, "include must not have 'message.output_text.logprobs'"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format must be of type text"),
        ({"max_output_tokens": 0}, "max_output_tokens must be greater than or equal to 1, got 0"),
        ({"temperature": -1}, "temperature must be"),
        ({"model": "gpt"}, "the model 'gpt' does not exist"),
    ],
)
async def test_what_cannot_be_represented_is_refused_by_name(fields: dict[str, Any], expected: str) -> None:
    engine = scripted_engine(REPLY, takes_structured_output=True)
    async with asgi_client(make_app(engine)) as client:
        answer = await client.post(RESPONSES, json={"model": MODEL, "input": "hi", **fields})
    assert answer.status_code == (404 if "model" in fields else 400)
    assert expected in answer.json()["error"]["message"]
    assert engine.requests == []


async def test_an_engine_that_ends_ends_the_stream_with_a_failed_response() -> None:
    engine = scripted_engine(lambda prompt_ids: [9] * 4000)

    async with asgi_client(make_app(engine)) as client:
        closing = asyncio.create_task(close_soon(engine))
        events = await read_events(client, RESPONSES, {"input": "hi"})
        await closing
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.failed"
    assert "aborted" in events[-1]["response"]["error"]["message"]


async def test_images_come_in_messages_and_in_outputs_of_functions() -> None:
    engine = vision_engine("ok<|im_end|>")
    image = {"type": "input_image", "image_url": data_url(image_file()), "detail": "auto"}
    text = {"type": "input_text", "text": "x"}
    history = [
        {"role": "user", "content": [text, image]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [image, text]},
    ]
    async with asgi_client(make_vision_app(engine)) as client:
        answer = await client.post(RESPONSES, json={"max_output_tokens": 9, "input": history})
        assert answer.status_code == 200, answer.text
        history[2] = {**history[2], "output": [text, {**image, "image_url": "AAAA"}]}
        refused = await client.post(RESPONSES, json={"max_output_tokens": 9, "input": history})
    assert [span.image.sha256 for span in engine.requests[0].images] == [image_file().sha256] * 2
    assert "input.2.output.1.image_url" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("choice", "names"), [("required", ["add", "now"]), ({"type": "function", "name": "now"}, ["now"])]
)
async def test_required_calls_are_structured_output(choice: Any, names: list[str]) -> None:
    engine = scripted_engine(f"{CALL}<|im_end|>", takes_structured_output=True)
    await ask("", engine, tools=[*TOOLS, NOW], tool_choice=choice)
    tag = engine.requests[0].params.structured_output.structural_tag or ""
    assert [name for name in ("add", "now") if f'{name}\\"' in tag] == names


async def test_a_function_in_a_namespace_has_both_names_in_the_prompt_and_in_its_calls() -> None:
    called = '<tool_call>\n{"name": "math__add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    engine = scripted_engine(called)
    tools = [{"type": "namespace", "name": "math", "description": "Sums.", "tools": TOOLS}, NOW]
    first = (await ask("", engine, tools=tools))["output"][0]
    assert (first["namespace"], first["name"]) == ("math", "add")
    output = {"type": "function_call_output", "call_id": first["call_id"], "output": "3"}
    await ask("", engine, tools=tools, input=[USER, first, output])
    prompts = [server_tokenizer().decode(request.prompt_ids) for request in engine.requests]
    assert [prompts[number].count('"name": "math__add"') for number in (0, 2)] == [1, 2]


async def test_a_format_is_structured_output() -> None:
    engine = scripted_engine("{}<|im_end|>", takes_structured_output=True)
    await ask("", engine, text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}})
    assert '"integer"' in (engine.requests[0].params.structured_output.json_schema or "")
