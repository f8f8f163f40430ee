"""A session records every turn of its agent exactly, and continues recorded ids."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from support.gateways import CALL, CHAT, TOOLS, USER, ask, result, running_gateway, scripted
from support.servers import encode
from unbroken.gateway.attempts import PendingTurn

RETRY = {"x-stainless-retry-count": "1"}


async def test_a_session_of_several_turns_is_one_exact_row(tmp_path: Path) -> None:
    engine = scripted("Let me look.\n" + CALL, "It is 17.<|im_end|>")
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create(metadata={"task": 4})
        agent = gateway.agent(created)
        first = await ask(agent, [USER])
        second = await ask(agent, [USER, first, result(first)])
        assert second["content"] == "It is 17."
        rows = (await gateway.look(created, "/samples?advantage=0.5"))["samples"]
        session = await gateway.look(created)
    assert len(rows) == 1
    prompts = [request.prompt_ids.tolist() for request in engine.requests]
    sampled = [encode("Let me look.\n" + CALL), encode("It is 17.<|im_end|>")]
    assert prompts[1][: len(prompts[0]) + len(sampled[0])] == prompts[0] + sampled[0]
    assert rows[0]["token_ids"] == prompts[1] + sampled[1]
    trained = [i for i, used in zip(rows[0]["token_ids"], rows[0]["loss_mask"], strict=True) if used]
    assert trained == sampled[0] + sampled[1]
    assert session["counters"]["bridges/derived"] == 1
    assert session["forks"] == []
    assert (session["num_turns"], session["num_conversations"]) == (2, 1)


async def test_a_recorded_turn_keeps_no_copy_of_its_request(tmp_path: Path) -> None:
    async with running_gateway(scripted(CALL, CALL, "It is 17.<|im_end|>"), tmp_path) as gateway:
        agent = gateway.agent(await gateway.create())
        messages: list[Any] = [USER]
        for _ in range(2):
            reply = await ask(agent, messages)
            messages += [reply, result(reply)]
        body = {"messages": messages, "tools": TOOLS}
        first, again = await agent.post(CHAT, json=body), await agent.post(CHAT, json=body, headers=RETRY)
        gc.collect()
        assert not [one for one in gc.get_objects() if type(one) is PendingTurn]
    names = ("id", "choices", "usage")
    assert [first.json()[name] for name in names] == [again.json()[name] for name in names]


async def test_a_restarted_gateway_goes_on_where_it_was(tmp_path: Path) -> None:
    engine = scripted(CALL, "It is 17.<|im_end|>")
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create()
        first = await ask(gateway.agent(created), [USER])
        before = await gateway.look(created, "/tree")
    async with running_gateway(engine, tmp_path) as gateway:
        assert await gateway.look(created, "/tree") == before
        await ask(gateway.agent(created), [USER, first, result(first)])
        session = await gateway.look(created)
    assert session["counters"] == {"bridges/derived": 1, "history/kept": 1}
    prompts = [request.prompt_ids.tolist() for request in engine.requests]
    assert prompts[1][: len(prompts[0])] == prompts[0]


async def test_i8_a_dropped_reply_forks_with_a_reason_and_keeps_the_ids_of_the_turn_before(tmp_path: Path) -> None:
    engine = scripted(CALL, "It is 17.<|im_end|>", "It is 18.<|im_end|>")
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        first = await ask(agent, [USER])
        await ask(agent, [USER, first, result(first)])
        await ask(agent, [USER, first, result(first), {"role": "user", "content": "Look again."}])
        session = await gateway.look(created)
        turns = (await gateway.look(created, "/tree"))["turns"]
        rows = (await gateway.look(created, "/samples?advantage=1"))["samples"]
    assert session["forks"] == [{"turn": 2, "reason": "dropped_reply"}]
    assert [turn["fork"] for turn in turns] == [None, None, "dropped_reply"]
    assert session["counters"]["forks/dropped_reply"] == 1
    so_far = [*engine.requests[0].prompt_ids.tolist(), *encode(CALL)]
    assert engine.requests[2].prompt_ids[: len(so_far)].tolist() == so_far
    assert sum(sum(row["loss_mask"]) for row in rows) == session["num_sampled_tokens"]


async def test_an_edited_reply_forks_and_both_turns_are_trained_once(tmp_path: Path) -> None:
    engine = scripted(CALL, "It is 17.<|im_end|>")
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        first = await ask(agent, [USER])
        await ask(agent, [USER, {**first, "content": "I changed this."}, result(first)])
        session = await gateway.look(created)
        rows = (await gateway.look(created, "/samples?advantage=1"))["samples"]
    assert session["forks"] == [{"turn": 1, "reason": "edited_reply"}]
    assert sum(sum(row["loss_mask"]) for row in rows) == session["num_sampled_tokens"]
    assert len(rows) == 2


async def test_streams_are_recorded_before_their_last_chunk(tmp_path: Path) -> None:
    async with running_gateway(scripted(CALL), tmp_path) as gateway:
        created = await gateway.create()
        answer = await gateway.agent(created).post(CHAT, json={"messages": [USER], "stream": True})
        assert answer.text.rstrip().endswith("[DONE]")
        assert (await gateway.look(created))["num_turns"] == 1


async def test_the_sessions_sampling_is_forced(tmp_path: Path) -> None:
    engine = scripted("ok<|im_end|>")
    async with running_gateway(engine, tmp_path) as gateway:
        created = await gateway.create(sampling={"temperature": 0.7, "max_tokens": 50})
        await ask(gateway.agent(created), [USER], temperature=0.1, max_tokens=80)
        await ask(gateway.agent(created), [USER, {"role": "user", "content": "b"}], max_tokens=20)
    assert [request.params.temperature for request in engine.requests] == [0.7, 0.7]
    assert [request.params.max_tokens for request in engine.requests] == [50, 20]


async def test_several_choices_are_siblings(tmp_path: Path) -> None:
    async with running_gateway(scripted("a<|im_end|>", "b<|im_end|>"), tmp_path) as gateway:
        created = await gateway.create()
        await ask(gateway.agent(created), [USER], n=2)
        tree = await gateway.look(created, "/tree")
    assert [node["origin"] for node in tree["nodes"]] == ["prompt", "sampled", "sampled"]
    assert [turn["choice"] for turn in tree["turns"]] == [0, 1]


async def test_without_a_session_the_server_answers_as_ever(tmp_path: Path) -> None:
    async with running_gateway(scripted("ok<|im_end|>"), tmp_path) as gateway:
        assert (await ask(gateway.client, [USER]))["content"] == "ok"
        assert (await gateway.client.get("/v1/sessions")).json()["sessions"] == []


async def test_a_session_with_two_temperatures_gives_rows_of_each(tmp_path: Path) -> None:
    async with running_gateway(scripted(CALL, "It is 17.<|im_end|>"), tmp_path) as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        call = await ask(agent, [USER], temperature=1.0)
        await ask(agent, [USER, call, result(call)], temperature=0.5)
        rows = (await gateway.look(created, "/samples?advantage=1"))["samples"]
        session = await gateway.look(created)
    assert [row["temperature"] for row in rows] == [1.0, 0.5]
    assert sum(sum(row["loss_mask"]) for row in rows) == session["num_sampled_tokens"]
    assert rows[1]["token_ids"][: len(rows[0]["token_ids"])] == rows[0]["token_ids"]


async def test_a_required_call_that_is_sampled_again_is_one_turn_with_the_reply_that_has_it(tmp_path: Path) -> None:
    async with running_gateway(scripted("No.<|im_end|>", CALL), tmp_path) as gateway:
        created = await gateway.create()
        message = await ask(gateway.agent(created), [USER], tool_choice="required")
        (row,) = (await gateway.look(created, "/samples?advantage=1"))["samples"]
        session = await gateway.look(created)
    assert message["tool_calls"][0]["function"]["name"] == "look"
    assert [i for i, used in zip(row["token_ids"], row["loss_mask"], strict=True) if used] == encode(CALL)
    assert session["num_turns"] == 1
