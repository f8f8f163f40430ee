"""Keys that would change the prompt or the answer are refused wherever messages are rendered."""

from typing import Any

import pytest

from support.servers import asgi_client, make_app, scripted_engine

USER = [{"role": "user", "content": "hi"}]
CHAT, RENDER = "/v1/chat/completions", "/v1/chat/completions/render"
TEMPLATE = {"chat_template": "{{ messages[0].content }}"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, TEMPLATE),
        (RENDER, TEMPLATE),
        (RENDER, {"logit_bias": {"5": 1}}),
        (RENDER, {"continue_final_message": True}),
        ("/tokenize", TEMPLATE),
        ("/tokenize", {"continue_final_message": True}),
        ("/chat/", {**TEMPLATE, "messages": [USER]}),
        (CHAT, {"top_logprobs": 2}),
        (CHAT, {"top_logprobs": 2, "logprobs": False}),
        (CHAT + "/tokens", {"top_logprobs": 2, "tokens": [5]}),
    ],
)
async def test_a_key_that_is_not_followed_is_refused_by_name(path: str, body: dict[str, Any]) -> None:
    engine = scripted_engine("ok<|im_end|>")
    async with asgi_client(make_app(engine)) as client:
        answer = await client.post(path, json={"messages": USER, **body})
    assert answer.status_code == 400
    assert next(iter(body)) in answer.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize("path", [CHAT, RENDER, "/tokenize"])
async def test_nulls_have_no_effect_and_are_taken(path: str) -> None:
    body = {"messages": USER, "chat_template": None, "top_logprobs": 0, "logit_bias": {}, "unheard_of": 1}
    async with asgi_client(make_app(scripted_engine("ok<|im_end|>"))) as client:
        assert (await client.post(path, json=body)).status_code == 200
