"""The stateful half of OpenAI's Responses, and its tools that are no functions."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from support.dialects import GEMINI, MESSAGES, RESPONSES, join_response, read_events
from support.gateways import CHAT
from support.servers import asgi_client, encode, make_app, scripted_engine
from unbroken.server.wire import answers

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "name": "add", "parameters": SCHEMA}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FIRST = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}<|im_end|>"
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


def make_engine(*texts: str, **options: Any) -> Any:
    left = list(texts)
    return scripted_engine(lambda _: encode(left.pop(0) if len(left) > 1 else left[0]), **options)


async def ask(client: httpx.AsyncClient, given: Any, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    body = {"input": given, "tools": TOOLS, **fields}
    if stream:
        found: dict[str, Any] = join_response(await read_events(client, RESPONSES, body))
    else:
        answer = await client.post(RESPONSES, json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
    Response.model_validate(found)
    return found


def output_of(response: dict[str, Any], text: str = "3") -> dict[str, Any]:
    call = next(item for item in response["output"] if item["type"].endswith("_call"))
    return {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": text}


def refer(response: dict[str, Any]) -> list[dict[str, Any]]:
    """As AI SDK sends an answer back."""
    return [{"type": "item_reference", "id": item["id"]} for item in response["output"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["previous_response_id", "item_reference", "conversation"])
async def test_what_names_an_answer_is_the_same_prompt_as_the_whole_conversation(by: str, stream: bool) -> None:
    engine = make_engine(FIRST, FIRST, "It is 3.<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        made = (await client.post("/v1/conversations", json={})).json()
        named = {"conversation": made["id"]} if by == "conversation" else {}
        question = {"role": "user", "content": "1 + 2?"}
        for text in ("1 + 2?", "2 + 1?"):  # two answers after another
            given = [{"role": "user", "content": text}]
            response = await ask(client, given, stream=stream, instructions="Be brief.", **named)
            if by == "conversation":
                break
        assert response["store"] is True
        own, fields = output_of(response), {}
        if by == "previous_response_id":
            fields, sent = {"previous_response_id": response["id"]}, [own]
        elif by == "item_reference":
            sent = [{**question, "content": text}, *refer(response), own]
        else:
            fields, sent = {"conversation": {"id": made["id"]}}, [own]
        last = await ask(client, sent, stream=stream, instructions="Be brief.", **fields)
        await ask(client, [{**question, "content": text}, *response["output"], own], instructions="Be brief.")
    assert engine.requests[-2].prompt_ids.tolist() == engine.requests[-1].prompt_ids.tolist()
    assert last["previous_response_id"] == fields.get("previous_response_id")


async def test_instructions_of_an_earlier_answer_do_not_come_with_it() -> None:
    engine = make_engine("a<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        first = await ask(client, "x", instructions="Be brief.")
        await ask(client, "y", previous_response_id=first["id"])
        await ask(client, [{"role": "user", "content": "x"}, *first["output"], {"role": "user", "content": "y"}])
    assert engine.requests[-2].prompt_ids.tolist() == engine.requests[-1].prompt_ids.tolist()


async def test_what_was_not_kept_or_is_forgotten_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "MAX_BYTES", 4000)
    async with asgi_client(make_app(make_engine(FIRST))) as client:
        unstored = await ask(client, "x", store=False)
        stored = [await ask(client, "x") for _ in range(4)]
        assert unstored["store"] is False
        await ask(client, [output_of(stored[-1])], previous_response_id=stored[-1]["id"])
        for one in (unstored, stored[0]):
            for fields in ({"previous_response_id": one["id"], "input": [output_of(one)]}, {"input": refer(one)}):
                answer = await client.post(RESPONSES, json=fields)
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")
                assert "Send the whole conversation" in answer.json()["error"]["message"]
        both = {"input": "x", "previous_response_id": stored[-1]["id"], "conversation": "c"}
        assert "must be left out with a conversation" in (await client.post(RESPONSES, json=both)).text


async def test_a_conversation_that_is_too_long_loses_its_oldest_messages_if_that_is_asked_for() -> None:
    engine = make_engine("ok<|im_end|>", context_length=400)
    turns = [{"role": role, "content": f"{k} {'so ' * 40}"} for k in range(8) for role in ("assistant", "user")]
    given = [{"role": "user", "content": "first"}, *turns, {"role": "user", "content": "last"}]
    app = make_app(engine)
    async with asgi_client(app) as client:
        refused = await client.post(RESPONSES, json={"input": given})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        answered = await ask(client, given, truncation="auto", tools=None)
        too_long = await client.post(RESPONSES, json={"input": "so " * 500, "truncation": "auto"})
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
    prompt = engine.requests[-1].prompt_ids.tolist()
    text = app.state.context.codec.decode(prompt)
    assert answered["truncation"] == "auto"
    assert "first" in text
    assert text.count("last") == 1
    assert "0 so" not in text
    assert len(prompt) <= 400
    assert app.state.context.metrics.events["cuts/truncation_auto"] >= 8


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_is_called_with_a_text_and_comes_back(stream: bool) -> None:
    text = "*** Begin Patch\né\n*** End Patch"
    call = f"<tool_call>\n{json.dumps({'name': 'apply_patch', 'arguments': {'input': text}})}\n</tool_call><|im_end|>"
    engine = make_engine(call, "Done.<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        response = await ask(client, "x", tools=[PATCH], stream=stream)
        (made,) = response["output"]
        assert (made["type"], made["name"], made["input"]) == ("custom_tool_call", "apply_patch", text)
        history = [{"role": "user", "content": "x"}, made, output_of(response, "ok")]
        assert (await ask(client, history, tools=[PATCH]))["output"][0]["content"][0]["text"] == "Done."
    prompt = make_app(engine).state.context.codec.decode(engine.requests[0].prompt_ids.tolist())
    assert "start: /.+/" in prompt
    assert '"input"' in prompt


async def test_a_custom_tool_without_its_text_gets_all_that_the_model_wrote() -> None:
    call = '<tool_call>\n{"name": "apply_patch", "arguments": {"patch": 3}}\n</tool_call><|im_end|>'
    async with asgi_client(make_app(make_engine(call))) as client:
        (made,) = (await ask(client, "x", tools=[PATCH]))["output"]
    assert json.loads(made["input"]) == {"patch": 3}


async def test_tools_that_openai_runs_are_left_out_and_a_header_says_so() -> None:
    hosted = [
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation"},
        {"type": "web_search"},
    ]
    engine = make_engine("ok<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        for stream in (False, True):
            body = {"input": "x", "tools": [*TOOLS, *hosted], "stream": stream}
            answer = await client.post(RESPONSES, json=body)
            assert answer.headers["x-unbroken-ignored"] == "tools.web_search, tools.image_generation"
        await ask(client, "x")
    assert len({tuple(request.prompt_ids.tolist()) for request in engine.requests}) == 1


async def test_keys_inside_items_without_effect_are_named_unless_our_answers_have_them() -> None:
    content = [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"a": 1}}]
    items = [{"type": "message", "role": "user", "id": "m", "status": "completed", "phase": "p", "content": content}]
    async with asgi_client(make_app(make_engine("ok<|im_end|>"))) as client:
        answer = await client.post(RESPONSES, json={"input": items, "user": "u"})
        assert answer.headers["x-unbroken-ignored"] == "user, input.phase, input.content.prompt_cache_breakpoint"
        first = answer.json()
        again = await client.post(RESPONSES, json={"input": [*first["output"], {"role": "user", "content": "y"}]})
        assert again.status_code == 200
        assert "x-unbroken-ignored" not in again.headers
        block = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
        body = {"max_tokens": 9, "system": [block], "messages": [{"role": "user", "content": [block]}]}
        answer = await client.post(MESSAGES, json=body)
        assert answer.headers["x-unbroken-ignored"] == "system.cache_control, messages.content.cache_control"


KEY = {"unheard": "x"}
USER, REPLY = {"role": "user", "content": "x"}, {"role": "assistant", "content": "ok"}
FUNCTION = {"name": "look", "arguments": "{}"}


def chat_with(*calls: dict[str, Any]) -> dict[str, Any]:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "index": 0, **call} for call in calls]}
    return {"messages": [USER, called, {"role": "tool", "tool_call_id": "c", "content": "17"}]}


def reason_with(name: str, kind: str) -> dict[str, Any]:
    reasoning = {"type": "reasoning", "summary": [], name: [{"type": kind, "text": "hm", **KEY}]}
    return {"input": [USER, reasoning, REPLY, USER]}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHAT, {"messages": [{**USER, **KEY}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **KEY}]}]}, "messages.content"),
        (CHAT, chat_with({"type": "function", "function": FUNCTION, **KEY}), "messages.tool_calls"),
        (CHAT, chat_with({"type": "function", "function": {**FUNCTION, **KEY}}), "messages.tool_calls.function"),
        (MESSAGES, {"max_tokens": 9, "messages": [{**USER, **KEY}]}, "messages"),
        (RESPONSES, reason_with("summary", "summary_text"), "input.summary"),
        (RESPONSES, reason_with("content", "reasoning_text"), "input.content"),
        (GEMINI, {"contents": [{"parts": [{"text": "x"}], **KEY}]}, "contents"),
        (
            GEMINI,
            {"contents": [{"parts": [{"text": "x"}]}], "systemInstruction": {"parts": [{"text": "s"}], **KEY}},
            "systemInstruction",
        ),
    ],
)
async def test_keys_inside_messages_without_effect_are_named_in_all_dialects(path: str, body: Any, place: str) -> None:
    async with asgi_client(make_app(make_engine("ok<|im_end|>"))) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-unbroken-ignored") == f"{place}.unheard"
        quiet = json.loads(json.dumps(body).replace(json.dumps(KEY)[1:-1], '"unheard": null'))
        assert "x-unbroken-ignored" not in (await client.post(path, json=quiet)).headers
