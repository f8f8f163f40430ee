"""Tools in chat completions: when calls are read, and what becomes of text that is no call."""

import json
from typing import Any

import pytest

from support.servers import asgi_client, encode, joined_stream, make_app, scripted_engine, server_tokenizer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", oops\n</tool_call>'
REPLY = f"<think>\nhmm\n</think>\n\nLet me  see.\n\n{CALL}  \n{CALL}"


async def ask(reply: str, **fields: Any) -> tuple[dict[str, Any], list[int]]:
    """The choice of a whole answer, which its stream must equal, and the prompt."""
    engine = scripted_engine(reply + "<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        body = {"messages": USER, **fields}
        answer = await client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        streamed = await joined_stream(client, CHAT, body)
    calls = choice["message"].get("tool_calls", ())
    assert streamed["content"] == (choice["message"]["content"] or "")
    assert streamed["reasoning_content"] == choice["message"].get("reasoning_content", "")
    assert [call["function"] for call in streamed["tool_calls"]] == [call["function"] for call in calls]
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert streamed.get("malformed_tool_calls") == choice.get("malformed_tool_calls")
    return choice, engine.requests[0].prompt_ids.tolist()


def rendered(tools: Any) -> list[int]:
    ids: list[int] = server_tokenizer().apply_chat_template(USER, tools=tools, add_generation_prompt=True)["input_ids"]
    return ids


async def test_tool_choice_none_keeps_the_tools_in_the_prompt_and_reads_no_calls() -> None:
    choice, prompt = await ask(REPLY, tools=TOOLS, tool_choice="none")
    assert prompt == rendered(TOOLS) != rendered(None)
    assert choice["message"]["content"] == f"Let me  see.\n\n{CALL}  \n{CALL}"
    assert choice["message"]["reasoning_content"] == "hmm"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


async def test_tool_choice_auto_reads_calls() -> None:
    choice, prompt = await ask(REPLY, tools=TOOLS, tool_choice="auto")
    assert prompt == rendered(TOOLS)
    assert choice["message"]["content"] == "Let me  see."
    assert len(choice["message"]["tool_calls"]) == 2
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("tools", [None, []])
async def test_without_tools_no_calls_are_read(tools: Any) -> None:
    choice, prompt = await ask(BROKEN, tools=tools)
    assert prompt == rendered(None)
    assert choice["message"]["content"] == BROKEN
    assert "malformed_tool_calls" not in choice


@pytest.mark.parametrize(
    ("reply", "content"),
    [
        (BROKEN, BROKEN),
        (f"Let me see.\n\n{BROKEN}", f"Let me see.\n{BROKEN}"),
        (f"{BROKEN}\nand so", f"{BROKEN}\nand so"),
        (f"a\n{BROKEN}\n{BROKEN}\nb", f"a\n{BROKEN}\n{BROKEN}\nb"),
        (f"{CALL}\n{BROKEN}", BROKEN),
        ("a\n<tool_call>\n{", "a\n<tool_call>\n{"),
    ],
)
async def test_a_malformed_call_is_content_with_its_delimiters(reply: str, content: str) -> None:
    choice, _ = await ask(reply, tools=TOOLS)
    assert choice["message"]["content"] == content
    assert len(choice["malformed_tool_calls"]) == reply.count("<tool_call>") - reply.count(CALL)


async def test_a_stop_string_cuts_the_text_of_a_malformed_call() -> None:
    choice, _ = await ask(BROKEN, tools=TOOLS, stop="oops")
    assert choice["message"]["content"] == '<tool_call>\n{"name": "add", '


async def test_given_ids_are_continued_by_the_same_rules() -> None:
    engine = scripted_engine(CALL + "<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        body = {"messages": USER, "tokens": encode("hi")}
        plain = (await client.post(CHAT + "/tokens", json=body)).json()["choices"][0]
        called = (await client.post(CHAT + "/tokens", json={**body, "tools": TOOLS})).json()["choices"][0]
    assert plain["message"]["content"] == CALL
    assert called["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("path", [CHAT, CHAT + "/tokens", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_weight_versions_come_under_vllms_name_on_request(path: str, stream: bool) -> None:
    body = {"messages": USER, "prompt": "hi", "tokens": [5], "return_weight_versions": True}
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        if stream:
            choice = await joined_stream(client, path, body)
        else:
            (choice,) = (await client.post(path, json=body)).json()["choices"]
        (without,) = (await client.post(path, json={**body, "return_weight_versions": False})).json()["choices"]
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(encode("ok<|im_end|>"))}]
    assert "weight_versions" not in without


FUNCTION = {"type": "function", "function": {"name": "add"}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


async def find_constraint(**fields: Any) -> str:
    """The constraint that the engine gets."""
    engine = scripted_engine(CALL + "<|im_end|>", takes_structured_output=True)
    async with asgi_client(make_app(engine)) as client:
        answer = await client.post(CHAT, json={"messages": USER, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    form = engine.requests[0].params.structured_output
    return "" if form is None else form.structural_tag or ""


async def test_required_calls_are_structured_output_in_the_models_own_format() -> None:
    tag = await find_constraint(tools=[*TOOLS, NOW], tool_choice="required")
    assert all(text in tag for text in ('add\\", \\"arguments\\": ', 'now\\", \\"arguments\\": ', '"star"'))
    single = await find_constraint(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert "\\n{" in single
    assert len(single) < len(await find_constraint(tools=TOOLS, tool_choice="required"))


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}])
async def test_one_call_at_most_cannot_be_had_where_the_model_decides(fields: Any) -> None:
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        body = {"messages": USER, "parallel_tool_calls": False, **fields}
        refused = await client.post(CHAT, json={**body, "tools": TOOLS})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "parallel_tool_calls")
        assert (await client.post(CHAT, json=body)).status_code == 200
        assert (await client.post(CHAT, json={**body, "tools": TOOLS, "tool_choice": "none"})).status_code == 200


async def test_a_named_function_is_the_only_one() -> None:
    tag = await find_constraint(tools=[*TOOLS, NOW], tool_choice=FUNCTION)
    assert "add" in tag
    assert "now" not in tag
    assert await find_constraint(tools=TOOLS, tool_choice="auto") == ""


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": "required"}, "must match a function in tools"),
        ({"tool_choice": "required", "tools": []}, "must match a function in tools"),
        (
            {"tool_choice": {**FUNCTION, "function": {"name": "other"}}, "tools": TOOLS},
            "must match a function in tools",
        ),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tools.0 must have a function with a name"),
        ({"tool_choice": "required", "tools": [{"function": {"name": 3}}]}, "whose name is a text"),
        ({"tool_choice": "always", "tools": TOOLS}, "tool_choice must be 'auto', 'none', 'required'"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice must be"),
        ({"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": TOOLS, "structured_outputs": {"regex": "x"}}, "structured_outputs"),
    ],
)
async def test_a_choice_that_cannot_be_made_is_refused(fields: dict[str, Any], expected: str) -> None:
    engine = scripted_engine(CALL, takes_structured_output=True)
    async with asgi_client(make_app(engine)) as client:
        answer = await client.post(CHAT, json={"messages": USER, **fields})
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]
    assert engine.requests == []


async def test_reasoning_has_both_of_its_names_whole_and_streamed() -> None:
    async with asgi_client(make_app(scripted_engine(f"{REPLY}<|im_end|>"))) as client:
        message = (await client.post(CHAT, json={"messages": USER})).json()["choices"][0]["message"]
        events = (await client.post(CHAT, json={"messages": USER, "stream": True})).text
    assert message["reasoning"] == message["reasoning_content"] == "hmm"
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in events.splitlines() if line.startswith("data: {")]
    joined = {name: "".join(delta.get(name, "") for delta in deltas) for name in ("reasoning", "reasoning_content")}
    assert joined == {"reasoning": "hmm", "reasoning_content": "hmm"}


@pytest.mark.parametrize("arguments", ["", " ", None])
async def test_empty_arguments_in_a_history_are_an_empty_object(arguments: str | None) -> None:
    prompts = []
    for own in (arguments, "{}"):
        call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": own}}
        result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
        history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        prompts.append((await ask("ok", messages=history, tools=[NOW]))[1])
    assert prompts[0] == prompts[1]


async def test_keys_inside_messages_without_effect_are_named() -> None:
    parts = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    message = {"role": "user", "content": parts, "priority": 3, "name": "me", "refusal": None, "é": 1}
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        for stream in (False, True):
            answer = await client.post(CHAT, json={"messages": [message], "user": "u", "stream": stream})
            named = answer.headers["x-unbroken-ignored"]
            assert named == "user, messages.priority, messages.\\u00e9, messages.content.cache_control"
        assert "x-unbroken-ignored" not in (await client.post(CHAT, json={"messages": USER})).headers


def scripted_in_turn(*texts: str) -> Any:
    """An engine without structured output, that answers with these texts, the last one again and again."""
    left = [f"{text}<|im_end|>" for text in texts]
    return scripted_engine(lambda _: encode(left.pop(0) if len(left) > 1 else left[0]))


OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "texts", "num_tried"),
    [
        ("required", (CALL,), 1),
        ("required", ("No.", BROKEN, f"{CALL}\n{CALL}"), 3),
        (FUNCTION, (OTHER, f"{CALL}\n{CALL}", CALL), 3),
    ],
)
async def test_an_engine_that_cannot_be_constrained_is_asked_again_for_a_required_call(
    choice: Any, texts: tuple[str, ...], num_tried: int, stream: bool
) -> None:
    engine = scripted_in_turn(*texts)
    app = make_app(engine)
    async with asgi_client(app) as client:
        body = {"messages": USER, "tools": [*TOOLS, NOW], "tool_choice": choice, "seed": 7}
        if stream:
            answered = await joined_stream(client, CHAT, body)
        else:
            answered = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
    assert {call["function"]["name"] for call in answered["tool_calls"]} == {"add"}
    assert len(engine.requests) == num_tried
    assert len({request.params.seed for request in engine.requests}) == num_tried
    assert app.state.context.metrics.events["required_calls/sampled_again"] == num_tried - 1
    assert app.state.context.metrics.events["required_calls/missing"] == 0


@pytest.mark.parametrize(("temperature", "num_tried"), [(1.0, 8), (0.0, 1)])
async def test_a_model_that_never_calls_is_given_up_and_its_answer_is_counted(
    temperature: float, num_tried: int
) -> None:
    engine = scripted_in_turn("No.")
    app = make_app(engine)
    async with asgi_client(app) as client:
        body = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "temperature": temperature}
        answer = await client.post(CHAT, json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "No."
    assert len(engine.requests) == num_tried
    assert app.state.context.metrics.events["required_calls/missing"] == 1
