"""OpenAI's dialects, read by OpenAI's own SDK, and what they owe to exactness."""

import asyncio
import json
from typing import Any

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion

from support.servers import (
    MODEL,
    asgi_client,
    close_soon,
    encode,
    make_app,
    scripted_engine,
    server_tokenizer,
    wait_for_ids,
)
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.server.config import ServerLimits

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]
THOUGHT_AND_CALLS = (
    "<think>\nhmm é😀\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
)
MALFORMED = '<tool_call>\n{"name": "add", oops\n</tool_call><|im_end|>'


def sdk(app: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=asgi_client(app), max_retries=0
    )


async def test_the_sdk_reads_content_reasoning_and_calls() -> None:
    app = make_app(scripted_engine(THOUGHT_AND_CALLS))
    answer = await sdk(app).chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "hmm é😀"
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"a": 1}, {"a": 2}]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert answer.usage.completion_tokens == len(encode(THOUGHT_AND_CALLS))


async def test_a_call_that_stays_in_unclosed_reasoning_is_listed_and_no_content() -> None:
    written = '<tool_call>\n{"name": "add", oops\n</tool_call>'
    app = make_app(scripted_engine(f"<think>\nhm {written}<|im_end|>"))
    async with asgi_client(app) as client:
        answer = (await client.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS})).json()
    (choice,) = answer["choices"]
    assert [call["status"] for call in choice["malformed_tool_calls"]] == ["in_reasoning"]
    assert choice["message"]["reasoning_content"] == f"hm {written}"
    assert not choice["message"]["content"]


async def test_ids_and_logprobs_cover_every_sampled_id_stop_included() -> None:
    app = make_app(scripted_engine("Hello<|im_end|>"))
    async with asgi_client(app) as client:
        body = {"messages": USER, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    strict = ChatCompletion.model_validate(answer, strict=True)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == encode("Hello<|im_end|>")
    assert len(strict.choices[0].logprobs.content) == len(choice["token_ids"])
    assert all(len(entry.top_logprobs) == 1 for entry in strict.choices[0].logprobs.content)  # the others: impossible
    expected = server_tokenizer().apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    assert answer["prompt_token_ids"] == list(expected)
    assert choice["policy_versions"] == [[0, len(choice["token_ids"]), 0]]


async def test_tokens_can_be_named_by_their_ids() -> None:
    async with asgi_client(make_app(scripted_engine("Hi<|im_end|>"))) as client:
        body = {"messages": USER, "logprobs": True, "return_tokens_as_token_ids": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
    names = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert names == [f"token_id:{token_id}" for token_id in encode("Hi<|im_end|>")]


@pytest.mark.parametrize("reply", [THOUGHT_AND_CALLS, "plain é😀 text<|im_end|>", MALFORMED, "<think>\ncut"])
async def test_a_stream_joins_to_the_whole_answer(reply: str) -> None:
    app = make_app(scripted_engine(reply))
    asked: dict[str, Any] = {"model": MODEL, "messages": USER, "tools": TOOLS, "n": 2, "logprobs": True}
    extra = {"return_token_ids": True}
    whole = await sdk(app).chat.completions.create(**asked, extra_body=extra)
    streamed = [
        {"content": "", "reasoning_content": "", "calls": [], "ids": [], "logprobs": [], "end": None} for _ in range(2)
    ]
    prompts, usage = [], None
    stream = await sdk(app).chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body=extra
    )
    async for event in stream:
        usage = event.usage or usage
        prompts += [event.prompt_token_ids] if getattr(event, "prompt_token_ids", None) else []
        for choice in event.choices:
            joined = streamed[choice.index]
            joined["content"] += choice.delta.content or ""
            joined["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            joined["calls"] += [call.function.arguments for call in choice.delta.tool_calls or ()]
            joined["ids"] += choice.token_ids
            joined["logprobs"] += [entry.logprob for entry in choice.logprobs.content]
            joined["end"] = choice.finish_reason or joined["end"]
    assert prompts == [whole.prompt_token_ids]
    assert usage == whole.usage
    for joined, choice in zip(streamed, whole.choices, strict=True):
        assert joined["content"] == (choice.message.content or "")
        assert joined["reasoning_content"] == (getattr(choice.message, "reasoning_content", None) or "")
        assert joined["calls"] == [call.function.arguments for call in choice.message.tool_calls or ()]
        assert joined["ids"] == choice.token_ids
        np.testing.assert_allclose(joined["logprobs"], [entry.logprob for entry in choice.logprobs.content])
        assert joined["end"] == choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
async def test_a_malformed_call_and_a_truncation_are_counted(stream: bool) -> None:
    async with asgi_client(make_app(scripted_engine(MALFORMED))) as client:
        await client.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS, "stream": stream})
        await client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 2, "stream": stream})
        metrics = (await client.get("/metrics")).text
    assert 'unbroken_events_total{event="parse_failures/invalid_json"} 1.0' in metrics
    assert 'unbroken_events_total{event="truncations/length"} 1.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
async def test_content_ends_before_a_stop_string_and_ids_do_not(stream: bool) -> None:
    reply = ScriptedReply(completion_ids=encode("<think>\nhm\n</think>\n\none STOP two"))
    asked: dict[str, Any] = {"model": MODEL, "messages": USER, "stop": [" STOP", "unheard of"]}
    answer = await sdk(make_app(scripted_engine(lambda prompt_ids: reply))).chat.completions.create(
        **asked, stream=stream, extra_body={"return_token_ids": True}
    )
    messages = [event.choices[0].delta async for event in answer] if stream else [answer.choices[0].message]
    assert "".join(message.content or "" for message in messages) == "one"
    assert "".join(getattr(message, "reasoning_content", None) or "" for message in messages) == "hm"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_ends_before_a_stop_string(stream: bool) -> None:
    reply = ScriptedReply(completion_ids=encode("one STOP two"))
    app = make_app(scripted_engine(lambda prompt_ids: reply))
    answer = await sdk(app).completions.create(model=MODEL, prompt=[1], stop="STOP", stream=stream)
    choices = [event.choices[0] async for event in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "one "


async def test_a_stream_of_several_prompts_runs_them_at_the_same_time() -> None:
    engine = scripted_engine(lambda prompt_ids: [int(prompt_ids[0])] * 30)
    stream = await sdk(make_app(engine)).completions.create(
        model=MODEL,
        prompt=[[8], [9]],
        n=2,
        max_tokens=20,
        stream=True,
        logprobs=1,
        extra_body={"return_token_ids": True},
    )
    events = [event async for event in stream]
    order = [event.choices[0].index for event in events]
    assert order.index(2) < 5
    for index, token_id in enumerate([8, 8, 9, 9]):
        own = [event.choices[0] for event in events if event.choices[0].index == index]
        assert [one for choice in own for one in choice.token_ids] == [token_id] * 20
        offsets = [offset for choice in own for offset in choice.logprobs.text_offset]
        assert offsets == sorted(offsets)
        assert offsets[-1] > 0
    prompts = [
        (event.choices[0].index // 2, event.choices[0].prompt_token_ids)
        for event in events
        if getattr(event.choices[0], "prompt_token_ids", None)
    ]
    assert sorted(prompts) == [(0, [8]), (1, [9])]


async def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    engine = scripted_engine(lambda prompt_ids: [9] * 4000)
    async with asgi_client(make_app(engine, limits=ServerLimits(request_timeout_s=1.0))) as client:
        pausing = asyncio.create_task(_pause_soon(engine))
        answer = await client.post("/v1/completions", json={"prompt": [1], "max_tokens": 4000, "stream": True})
        await pausing
        last = answer.text.strip().splitlines()[-1]
        assert "request_timeout_s" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert "unbroken_completions_in_flight 0.0" in (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[1], [2]]}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
    ],
)
async def test_an_engine_that_ends_ends_its_streams_with_an_error_event(path: str, body: dict[str, Any]) -> None:
    engine = scripted_engine(lambda prompt_ids: [9] * 4000)
    async with asgi_client(make_app(engine)) as client:
        closing = asyncio.create_task(close_soon(engine))
        fields = {"stream": True, **({} if "sampling_params" in body else {"max_tokens": 4000})}
        answer = await client.post(path, json={**body, **fields})
        await closing
        error = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("service_unavailable", "aborted")
        assert "unbroken_completions_in_flight 0.0" in (await client.get("/metrics")).text


async def _pause_soon(engine: ScriptedEngine) -> None:
    await wait_for_ids(engine, 3)
    await engine.pause()


async def test_a_malformed_call_is_told_and_is_no_call() -> None:
    async with asgi_client(make_app(scripted_engine(MALFORMED))) as client:
        answer = (await client.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS})).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    (failure,) = choice["malformed_tool_calls"]
    assert (failure["status"], failure["name"]) == ("invalid_json", "")
    assert failure["span"] == [0, len(encode(MALFORMED)) - 1]


async def test_a_failed_call_whose_name_was_read_is_listed_with_it() -> None:
    written = '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call><|im_end|>'
    async with asgi_client(make_app(scripted_engine(written))) as client:
        answer = (await client.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS})).json()
    (failure,) = answer["choices"][0]["malformed_tool_calls"]
    assert (failure["status"], failure["name"]) == ("invalid_arguments", "add")


async def test_given_tokens_are_the_prompt_and_the_messages_are_not_rendered() -> None:
    engine = scripted_engine("ok<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        body = {"messages": [{"role": "no such role", "content": None}], "tokens": [5, 6, 7], "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions/tokens", json=body)).json()
    assert answer["prompt_token_ids"] == [5, 6, 7]
    assert engine.requests[0].prompt_ids.tolist() == [5, 6, 7]
    assert answer["choices"][0]["token_ids"] == encode("ok<|im_end|>")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/tokens"])
async def test_a_prompt_over_the_context_is_told_in_the_words_clients_look_for(path: str) -> None:
    app = make_app(scripted_engine("ok", context_length=20))
    async with asgi_client(app) as client:
        long = [{"role": "user", "content": "word " * 40}]
        answer = await client.post(path, json={"messages": long, "tokens": [5] * 20})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "This model's maximum context length is 20 tokens" in message
    assert "your request has" in message
    assert "input tokens" in message


async def test_nulls_and_unknown_keys_are_tolerated() -> None:
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        body = {
            "messages": [{"role": "user", "content": "hi", "tool_calls": None, "reasoning_content": None}],
            "tools": None, "n": None, "temperature": None, "stop": None, "cache_salt": "x", "unheard_of": {"a": 1},
            "max_completion_tokens": None, "top_p": None, "seed": None, "stream": None,
        }  # fmt: skip
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        ({"messages": []}, 400, "at least one message"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [{"content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "image"),
        ({"messages": USER, "model": "other"}, 404, "other"),
        ({"messages": USER, "n": 0}, 400, "n must"),
        ({"messages": USER, "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": USER, "temperature": -1}, 400, "temperature"),
        ({"messages": USER, "top_logprobs": -1}, 400, "top_logprobs"),
        ({"messages": USER, "tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": USER, "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"messages": USER, "response_format": {"type": "poem"}}, 400, "response_format"),
        ({"messages": USER, "stop_token_ids": [10**6]}, 400, "stop_token_ids"),
        ({}, 400, "messages"),
    ],
)
async def test_bad_requests_name_the_field(body: dict[str, Any], status: int, expected: str) -> None:
    engine = scripted_engine("ok<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == status
        assert expected in answer.json()["error"]["message"]
        assert engine.requests == []
        assert (await client.post("/v1/chat/completions", json={"messages": USER})).status_code == 200


async def test_a_template_option_reaches_the_template() -> None:
    engine = scripted_engine("ok<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        body = {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}}
        await client.post("/v1/chat/completions", json=body)
        await client.post("/v1/chat/completions", json={"messages": USER})
    without, plain = (request.prompt_ids.tolist() for request in engine.requests)
    assert without == plain + encode("<think>\n\n</think>\n\n")


async def test_text_completions_take_texts_and_ids() -> None:
    engine = scripted_engine("ok<|im_end|>")
    app = make_app(engine)
    for prompt, num_prompts in (("hello", 1), (["hello", "you"], 2), ([5, 6], 1), ([[5, 6], [7]], 2)):
        answer = await sdk(app).completions.create(model=MODEL, prompt=prompt, max_tokens=5, logprobs=1, n=2)
        assert [choice.text for choice in answer.choices] == ["ok"] * 2 * num_prompts
    assert [request.prompt_ids.tolist() for request in engine.requests[-2:]] == [[5, 6], [7]]


async def test_a_text_stream_joins_to_the_whole_answer() -> None:
    app = make_app(scripted_engine("é😀 ok<|im_end|>"))
    stream = await sdk(app).completions.create(model=MODEL, prompt=[5, 6], max_tokens=50, stream=True)
    assert "".join([event.choices[0].text async for event in stream if event.choices]) == "é😀 ok"


async def test_tokenize_renders_what_the_token_client_asks_for() -> None:
    dummy: dict[str, Any] = {
        "role": "assistant",
        "reasoning_content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    new = [{"role": "tool", "content": "42", "tool_call_id": "a"}]
    async with asgi_client(make_app(scripted_engine("ok"))) as client:
        both = (await client.post("/tokenize", json={"messages": [dummy, *new], "tools": None})).json()
        first = await client.post("/tokenize", json={"messages": [dummy], "add_generation_prompt": False})
    assert set(both) == {"count", "max_model_len", "tokens", "token_strs"}
    before = first.json()["tokens"]
    assert both["tokens"][: len(before)] == before
    added = server_tokenizer().decode(both["tokens"][len(before) :])
    assert added.startswith("<|im_start|>user\n<tool_response>\n42")
    assert added.endswith("<|im_start|>assistant\n")


async def test_models_tell_the_context_length() -> None:
    models = await sdk(make_app(scripted_engine("ok", context_length=77))).models.list()
    assert [(model.id, model.max_model_len) for model in models.data] == [(MODEL, 77)]


async def test_a_model_may_be_an_adapters_name() -> None:
    engine = scripted_engine("ok<|im_end|>")
    app = make_app(engine, adapters=("pirate",))
    async with asgi_client(app) as client:
        for path, body in (
            ("/v1/chat/completions", {"messages": USER}),
            ("/v1/chat/completions/tokens", {"messages": USER, "tokens": [5]}),
            ("/v1/completions", {"prompt": [5]}),
            ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
        ):
            for model in ("pirate", MODEL):
                assert (await client.post(path, json={**body, "model": model})).status_code == 200
        unknown = await client.post("/v1/completions", json={"prompt": [5], "model": "parrot"})
        assert unknown.status_code == 404
        assert "['tiny', 'tiny@0', 'pirate']" in unknown.json()["error"]["message"]
        named = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
    assert [request.adapter for request in engine.requests] == ["pirate", None] * 4
    assert named == [MODEL, "pirate"]
