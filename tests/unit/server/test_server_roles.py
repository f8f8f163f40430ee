"""Instructions in roles that a template does not write: none is left out."""

from typing import Any

import pytest

from support.dialects import MESSAGES, RESPONSES
from support.servers import asgi_client, make_app, scripted_engine, server_tokenizer
from unbroken.counters import Counters
from unbroken.errors import MessagesError
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.context import adapt_roles

USER = {"role": "user", "content": "hi"}


def say(*roles: str) -> list[Any]:
    return [{"role": role, "content": f"{role}{k}"} for k, role in enumerate(roles)]


def strict(roles: tuple[str, ...]) -> bool:
    """As Qwen3.5: one system message, at the beginning."""
    return all(role in ("user", "assistant") or (role, k) == ("system", 0) for k, role in enumerate(roles))


def loose(roles: tuple[str, ...]) -> bool:
    """As Qwen3: system messages anywhere."""
    return "developer" not in roles


@pytest.mark.parametrize(
    ("writes", "roles", "expected"),
    [
        (lambda roles: True, "developer system user developer", "developer system user developer"),
        (loose, "developer developer user", "system system user"),
        (loose, "system developer user developer system", "system system user system system"),
        (strict, "system user assistant user", "system user assistant user"),
        (strict, "developer user", "system user"),
        (strict, "developer developer user user", "system user user"),
        (strict, "system developer system user", "system user"),
        (strict, "user system user developer", "user user user user"),
        (strict, "system user system", "system user user"),
        (strict, "system", "system"),
    ],
)
def test_instructions_get_a_role_and_a_place_that_the_template_writes(writes: Any, roles: str, expected: str) -> None:
    messages = say(*roles.split())
    events = Counters()
    adapted = adapt_roles(messages, writes=writes, events=events)
    assert [message["role"] for message in adapted] == expected.split()
    texts = [text for message in adapted for text in message["content"].split("\n\n")]
    assert texts == [message["content"] for message in messages]
    assert bool(events.as_dict()) == (roles != expected)


@pytest.mark.parametrize("message", [{}, {"role": "developer"}, {"role": "developer", "content": [{"type": "image"}]}])
def test_malformed_messages_pass_unchanged(message: Any) -> None:
    assert list(adapt_roles([message, USER], writes=strict, events=Counters())) == [message, USER]


async def test_no_dialect_loses_a_developer_message() -> None:
    engine = scripted_engine("ok<|im_end|>")
    app = make_app(engine)
    given = [{"role": "developer", "content": "Be brief."}, USER]
    async with asgi_client(app) as client:
        for path, body in (
            ("/v1/chat/completions", {"messages": given}),
            (RESPONSES, {"input": given}),
            (MESSAGES, {"max_tokens": 9, "messages": [{**given[0], "role": "system"}, USER]}),
        ):
            assert (await client.post(path, json=body)).status_code == 200
        tokens = (await client.post("/tokenize", json={"messages": given})).json()["tokens"]
        metrics = (await client.get("/metrics")).text
    expected = server_tokenizer().apply_chat_template(
        [{**given[0], "role": "system"}, USER], add_generation_prompt=True
    )["input_ids"]
    assert [request.prompt_ids.tolist() for request in engine.requests] == [expected] * 3
    assert tokens == expected
    assert 'unbroken_events_total{event="adapted_roles/developer_as_system"} 3.0' in metrics


def test_a_renderer_refuses_a_developer_message_that_its_template_leaves_out() -> None:
    renderer = TemplateRenderer(server_tokenizer())
    assert not renderer.writes_roles(("developer", "user"))
    assert renderer.writes_roles(("system", "user", "system"))
    with pytest.raises(MessagesError, match="leaves the message out"):
        renderer.render([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}])
