"""A budget of reasoning, in each dialect that has one: its end is given, and the reply goes on."""

import asyncio

import pytest

from support.servers import asgi_client, encode, joined_stream, make_app, scripted_engine

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GEMINI = "/v1beta/models/tiny:generateContent"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
USER = [{"role": "user", "content": "hi"}]
THOUGHT = "<think>\nlet me see"
N, CLOSE = len(encode(THOUGHT)), encode("\n</think>\n\n")
ASKS = [
    (CHAT, {"messages": USER, "thinking_token_budget": N}),
    (CHAT, {"messages": USER, "reasoning": {"max_tokens": N}}),
    (RESPONSES, {"input": "hi", "reasoning": {"max_tokens": N}}),
    (MESSAGES, {"messages": USER, "max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": N}}),
    (
        GEMINI,
        {
            "contents": [{"parts": [{"text": "hi"}]}],
            "generationConfig": {"thinkingConfig": {"thinkingBudget": N, "includeThoughts": True}},
        },
    ),
]


def make_engine():
    """An engine that thinks without end, and answers as soon as its reasoning was closed."""

    def reply(prompt_ids):
        is_closed = prompt_ids[-len(CLOSE) :].tolist() == CLOSE
        return encode("42<|im_end|>") if is_closed else encode(f"{THOUGHT} and so on and so on")

    return scripted_engine(reply)


def read_texts(path, answer):
    """The reasoning and the answer."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        return message["reasoning_content"], message["content"]
    if path == RESPONSES:
        thought, message = answer["output"]
        return thought["content"][0]["text"], message["content"][0]["text"]
    if path == MESSAGES:
        return answer["content"][0]["thinking"], answer["content"][1]["text"]
    return tuple(part["text"] for part in answer["candidates"][0]["content"]["parts"])


def read_versions(path, answer):
    return answer["choices"][0]["policy_versions"] if path == CHAT else answer["policy_versions"]


@pytest.mark.parametrize(("path", "body"), ASKS)
async def test_the_reasoning_is_closed_and_the_reply_goes_on(path, body):
    async with asgi_client(make_app(make_engine())) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-unbroken-ignored" not in answer.headers
    thought, text = read_texts(path, answer.json())
    assert (thought.strip(), text) == ("let me see", "42")
    start = N + len(CLOSE)
    assert read_versions(path, answer.json()) == [[0, N, 0], [start, start + len(encode("42<|im_end|>")), 0]]


async def test_a_streamed_chat_is_the_whole_one():
    body = {"messages": USER, "thinking_token_budget": N, "return_token_ids": True}
    async with asgi_client(make_app(make_engine())) as client:
        whole = (await client.post(CHAT, json=body)).json()["choices"][0]
        stream = await joined_stream(client, CHAT, body)
    assert stream["content"] == whole["message"]["content"] == "42"
    assert stream["reasoning_content"].strip() == whole["message"]["reasoning_content"].strip() == "let me see"
    assert stream["policy_versions"] == whole["policy_versions"]
    assert whole["token_ids"] == [*encode(THOUGHT), *CLOSE, *encode("42<|im_end|>")]


async def test_each_of_n_replies_is_bounded():
    async with asgi_client(make_app(make_engine())) as client:
        answer = await client.post(CHAT, json={"messages": USER, "thinking_token_budget": N, "n": 3, "seed": 7})
    assert [choice["message"]["content"] for choice in answer.json()["choices"]] == ["42"] * 3


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"stop": ["x"]}, "thinking_token_budget = 5 cannot be combined with sampling.stop_strings"),
        ({"logprobs": True}, "thinking_token_budget must be left out with logprobs, got 5"),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            "thinking_token_budget must be left out where calls are required",
        ),
        ({"thinking_token_budget": 0}, "thinking_token_budget must be greater than or equal to 1, got 0"),
    ],
)
async def test_a_budget_that_cannot_be_kept_is_refused_by_name(more, why):
    async with asgi_client(make_app(make_engine())) as client:
        for path in (CHAT, f"{CHAT}/render"):
            answer = await client.post(path, json={"messages": USER, "thinking_token_budget": 5, **more})
            assert answer.status_code == 400
            assert why in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "more", "field"),
    [
        (*ASKS[1], {"stop": ["x"]}, "reasoning.max_tokens"),
        (*ASKS[1], {"logprobs": True}, "reasoning.max_tokens"),
        (*ASKS[3], {"stop_sequences": ["x"]}, "thinking.budget_tokens"),
    ],
)
async def test_a_budget_that_agents_always_send_is_ignored_by_name_where_it_cannot_be_kept(path, body, more, field):
    async with asgi_client(make_app(make_engine())) as client:
        answer = await client.post(path, json={**body, **more})
    assert answer.status_code == 200
    assert answer.headers["x-unbroken-ignored"] == field


async def test_of_two_budgets_the_one_that_must_be_kept_counts_and_the_other_is_named():
    body = {"messages": USER, "thinking_token_budget": N, "reasoning": {"max_tokens": 3}}
    async with asgi_client(make_app(make_engine())) as client:
        answer = await client.post(CHAT, json=body)
    assert answer.json()["choices"][0]["policy_versions"][0] == [0, N, 0]
    assert answer.headers["x-unbroken-ignored"] == "reasoning.max_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_ends_once_and_its_first_part_is_no_truncation(stream):
    async with asgi_client(make_app(make_engine())) as client:
        for more in ({}, {"max_tokens": N}):
            await client.post(CHAT, json={"messages": USER, "thinking_token_budget": N, "stream": stream, **more})
        text = (await client.get("/metrics")).text
    assert 'unbroken_events_total{event="truncations/length"} 1.0' in text
    ends = [line for line in text.splitlines() if "finish_reason=" in line and "_total" in line]
    assert sorted(line.partition("finish_reason=")[2] for line in ends) == ['"length"} 1.0', '"stop"} 1.0']


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_parts_of_n_replies_are_sampled_together(stream):
    """Three replies; the first of them to go on waits for the others."""
    engine, both = make_engine(), asyncio.Event()
    sample, begun = engine.sample, []

    async def wait_for_all(request):
        if request.prompt_ids[-len(CLOSE) :].tolist() == CLOSE:
            begun.append(request.params.seed)
            if len(begun) == 3:
                both.set()
            await asyncio.wait_for(both.wait(), 5)
        return await sample(request)

    class Waiting:
        """The engine, without streams of its own."""

        def __getattr__(self, name):
            if name == "stream":
                raise AttributeError(name)
            return wait_for_all if name == "sample" else getattr(engine, name)

    body = {"messages": USER, "thinking_token_budget": N, "n": 3, "seed": 7, "stream": stream}
    async with asgi_client(make_app(Waiting())) as client:
        answer = await client.post(CHAT, json=body)
    assert answer.status_code == 200
    assert len(set(begun)) == 3


async def test_closed_replies_are_counted():
    async with asgi_client(make_app(make_engine())) as client:
        await client.post(CHAT, json=ASKS[0][1])
        assert 'unbroken_events_total{event="closings/thinking"} 1.0' in (await client.get("/metrics")).text
