"""One conversation in four dialects: the same ids go in, and the same reply comes out, whole and streamed."""

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.dialects import (
    GEMINI,
    MESSAGES,
    RESPONSES,
    join_answers,
    join_message,
    join_response,
    read_answers,
    read_events,
    without_ids,
)
from support.effort import num_cases
from support.servers import asgi_client, encode, joined_stream, make_app, scripted_engine, server_tokenizer

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "ö": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}]
MESSAGES_TOOLS = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
GEMINI_TOOLS = [{"functionDeclarations": [{"name": "add", "description": "Add.", "parameters": {
    "type": "OBJECT", "properties": {"a": {"type": "INTEGER"}, "ö": {"type": "STRING"}},
}}]}]  # fmt: skip
RESPONSES_TOOLS = [{"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": True}]
ARGUMENTS = {"a": 1, "ö": "é\n"}
TEXT_OF_ARGUMENTS = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL = f'<tool_call>\n{{"name": "add", "arguments": {TEXT_OF_ARGUMENTS}}}\n</tool_call>'


def chat_call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": TEXT_OF_ARGUMENTS}}


IN_CHAT = {
    "tools": CHAT_TOOLS,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "Well.", "reasoning_content": "hm",
         "tool_calls": [chat_call("c1"), chat_call("c2")]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [chat_call("c3")]},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "And?"},
    ],
}  # fmt: skip
IN_MESSAGES = {
    "tools": MESSAGES_TOOLS,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "c1", "name": "add", "input": ARGUMENTS},
            {"type": "tool_use", "id": "c2", "name": "add", "input": ARGUMENTS},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "1"},
            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "2"}]},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "so", "signature": ""},
            {"type": "tool_use", "id": "c3", "name": "add", "input": ARGUMENTS},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c3"}, {"type": "text", "text": "And?"},
        ]},
    ],
}  # fmt: skip


def item_call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": TEXT_OF_ARGUMENTS}


def item_output(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def item_reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


IN_RESPONSES = {
    "tools": RESPONSES_TOOLS,
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}]},
        item_reasoning("hm"),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        item_call("c1"), item_call("c2"), item_output("c1", "1"),
        item_output("c2", [{"type": "input_text", "text": "2"}]),
        item_reasoning("so"), item_call("c3"), item_output("c3", ""),
        {"role": "user", "content": "And?"},
    ],
}  # fmt: skip


def part_call(**ids: str) -> dict[str, Any]:
    return {"functionCall": {"name": "add", "args": ARGUMENTS, **ids}}


def part_response(output: Any, **ids: str) -> dict[str, Any]:
    return {"functionResponse": {"name": "add", "response": {"output": output}, **ids}}


IN_GEMINI = {
    "tools": GEMINI_TOOLS,
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "one "}, {"text": "two"}]},
        {"role": "model", "parts": [
            {"text": "hm", "thought": True}, {"text": "Well."}, part_call(id="c1"), part_call(id="c2"),
        ]},
        {"role": "user", "parts": [part_response("1", id="c1"), part_response(2, id="c2")]},
        {"role": "model", "parts": [{"text": "so", "thought": True}]},
        {"role": "model", "parts": [part_call()]},
        {"parts": [part_response(""), {"text": "And?"}]},
    ],
}  # fmt: skip


async def test_a_conversation_has_the_same_ids_in_every_dialect() -> None:
    engine = scripted_engine("ok<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        for path, body in (
            (CHAT, IN_CHAT),
            (MESSAGES, {**IN_MESSAGES, "max_tokens": 99}),
            (RESPONSES, IN_RESPONSES),
            (GEMINI, IN_GEMINI),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
    in_chat, *others = (request.prompt_ids.tolist() for request in engine.requests)
    assert others == [in_chat] * 3
    assert "Well." in server_tokenizer().decode(in_chat)


words = st.sampled_from(["so ", "é😀", "\n", "\n\n", "</", "<tool", "END", " E", "x", "  "])
texts = st.lists(words, max_size=4).map("".join)
BROKEN = '<tool_call>\n{"name": "add", oops\n</tool_call>'
UNCLOSED = '<tool_call>\n{"name": "add"'
calls = st.sampled_from([CALL, CALL, BROKEN, UNCLOSED])
replies = (
    st.tuples(
        st.one_of(st.just(""), texts.map("<think>\n{}\n</think>\n\n".format), st.just("<think>\nhm")),
        st.lists(st.one_of(texts, calls), max_size=5).map("".join),
        st.sampled_from(["<|im_end|>", "<|im_end|>", ""]),
    )
    .map("".join)
    .filter(bool)
)


def of_message(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning, content and calls of a message of Anthropic's."""
    blocks = message["content"]
    return {
        "reasoning": "".join(block.get("thinking", "") for block in blocks),
        "content": "".join(block.get("text", "") for block in blocks),
        "calls": [block["input"] for block in blocks if block["type"] == "tool_use"],
        "malformed": message.get("malformed_tool_calls"),
    }


def of_response(response: dict[str, Any]) -> dict[str, Any]:
    """Reasoning, content and calls of a response."""
    parts = [part for item in response["output"] for part in item.get("content", ())]
    return {
        "reasoning": "".join(part["text"] for part in parts if part["type"] == "reasoning_text"),
        "content": "".join(part["text"] for part in parts if part["type"] == "output_text"),
        "calls": [json.loads(item["arguments"]) for item in response["output"] if item["type"] == "function_call"],
        "malformed": response.get("malformed_tool_calls"),
    }


def of_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Reasoning, content and calls of an answer of Gemini's."""
    parts = answer["candidates"][0]["content"]["parts"]
    texts = [(part.get("thought", False), part.get("text", "")) for part in parts]
    return {
        "reasoning": "".join(text for is_thought, text in texts if is_thought),
        "content": "".join(text for is_thought, text in texts if not is_thought),
        "calls": [part["functionCall"]["args"] for part in parts if "functionCall" in part],
        "malformed": answer.get("malformed_tool_calls"),
    }


def of_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Reasoning, content and calls of a streamed choice."""
    return {
        "reasoning": choice["reasoning_content"],
        "content": choice["content"],
        "calls": [json.loads(call["function"]["arguments"]) for call in choice["tool_calls"]],
        "malformed": choice.get("malformed_tool_calls"),
    }


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


class Say:
    """A script whose reply is set for each case: making an application takes longer than asking it."""

    ids: tuple[int, ...] = ()

    def __call__(self, prompt_ids: Any) -> tuple[int, ...]:
        return self.ids


say = Say()
app = make_app(scripted_engine(say))


@settings(
    max_examples=num_cases(40), derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    reply=replies,
    cut=st.one_of(st.none(), st.integers(1, 40)),
    stop=st.sampled_from(["", "END", "</think>\n\n", "l>\n", "a"]),
)
async def test_joined_streams_are_whole_answers_and_every_dialect_reads_the_same(
    reply: str, cut: int | None, stop: str
) -> None:
    max_tokens = cut or len(encode(reply)) + 1
    user = {"role": "user", "content": "hi"}
    stops = {"stop_sequences": [stop]} if stop else {}
    in_messages = {"messages": [user], "tools": MESSAGES_TOOLS, "max_tokens": max_tokens, **stops}
    in_responses = {"input": "hi", "tools": RESPONSES_TOOLS, "max_output_tokens": max_tokens}
    config: dict[str, Any] = {"maxOutputTokens": max_tokens, "thinkingConfig": {"includeThoughts": True}}
    if stops:
        config["stopSequences"] = [stop]
    in_gemini = {
        "contents": [{"role": "user", "parts": [{"text": "hi"}]}], "tools": GEMINI_TOOLS, "generationConfig": config,
    }  # fmt: skip
    in_chat = {"messages": [user], "tools": CHAT_TOOLS, "max_completion_tokens": max_tokens}
    say.ids = tuple(encode(reply))
    async with asgi_client(app) as client:
        message = await post(client, MESSAGES, in_messages)
        assert without_ids(join_message(await read_events(client, MESSAGES, in_messages))) == without_ids(message)
        response = await post(client, RESPONSES, in_responses)
        streamed = await read_events(client, RESPONSES, in_responses)
        assert without_ids(join_response(streamed)) == without_ids(response)
        choice = await joined_stream(client, CHAT, {**in_chat, **({"stop": stop} if stop else {})})
        assert of_message(message) == of_choice(choice)
        answer = await post(client, GEMINI, in_gemini)
        assert without_ids(join_answers(await read_answers(client, in_gemini))) == without_ids(answer)
        assert of_answer(answer) == of_choice(choice)
        assert of_response(response) == of_choice(await joined_stream(client, CHAT, in_chat))
    assert [block["type"] for block in message["content"] if not block.get("text", "x")] == []
