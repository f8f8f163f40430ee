"""What a session could do nothing with is refused when it is given, with field, rule and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.gateways import running_gateway, scripted

REPLY = "It is 17.<|im_end|>"


def nest(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("settings", "param", "expected"),
    [
        ({"sampling": {"temperature": -1}}, "sampling", "sampling.temperature must be"),
        ({"sampling": {"top_p": 2}}, "sampling", "sampling.top_p must be"),
        ({"template_options": {"messages": []}}, "template_options", "template_options must not have ['messages']"),
        (
            {"template_options": {"a": "x" * 2**18}},
            "template_options",
            "template_options must have at most 262144 char",
        ),
        ({"metadata": {"a": "x" * 20_000_000}}, "metadata", "metadata must have at most 65536 characters as JSON, got"),
        ({"metadata": nest(500)}, None, "the body must be nested in at most 128 levels"),
    ],
)
async def test_a_session_with_which_nothing_could_be_done_is_not_created(
    tmp_path: Path, settings: dict[str, Any], param: str | None, expected: str
) -> None:
    async with running_gateway(scripted(REPLY), tmp_path) as gateway:
        answer = await gateway.client.post("/v1/sessions", json=settings)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert expected in answer.json()["error"]["message"]
        assert (await gateway.client.get("/v1/sessions")).json()["sessions"] == []


async def test_settings_at_their_limits_are_taken(tmp_path: Path) -> None:
    settings = {"metadata": {"a": "x" * 64_000, "b": nest(120)}, "sampling": {"top_k": -1, "seed": -1}}
    async with running_gateway(scripted(REPLY), tmp_path) as gateway:
        created = await gateway.create(**settings, template_options={"enable_thinking": False})
        assert (await gateway.look(created))["settings"]["metadata"] == settings["metadata"]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ({"reward": 1e39}, "reward must be less than or equal to 340282"),
        ({"reward": -1e39}, "reward must be greater than or equal to -340282"),
        ({"metrics": {"a" * 2**16: 1.0}}, "metrics must have at most 65536 characters"),
    ],
)
async def test_a_reward_that_float32_does_not_have_leaves_the_session_open(
    tmp_path: Path, outcome: dict[str, Any], expected: str
) -> None:
    async with running_gateway(scripted(REPLY), tmp_path) as gateway:
        created = await gateway.create()
        path = f"/v1/sessions/{created['session_id']}"
        answer = await gateway.client.post(f"{path}/finish", json=outcome)
        assert answer.status_code == 400
        assert expected in answer.json()["error"]["message"]
        assert (await gateway.client.get(f"{path}/samples?advantage=1e39")).status_code == 400
        assert (await gateway.client.post(f"{path}/finish", json={"reward": 3e38})).status_code == 200
