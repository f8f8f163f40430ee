"""Sessions whose agents bound their reasoning: ids that were given inside a reply are recorded as that."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from support.gateways import CHAT, restarted, running_gateway
from support.servers import encode, scripted_engine
from unbroken.ledger.store import open_store

N, CLOSE, ANSWER = len(encode("<think>\nlet me see")), encode("\n</think>\n\n"), encode("42<|im_end|>")
THOUGHT = encode("<think>\nlet me see")


def make_engine() -> Any:
    def reply(prompt_ids: Any) -> list[int]:
        is_closed = prompt_ids[-len(CLOSE) :].tolist() == CLOSE
        return ANSWER if is_closed else encode("<think>\nlet me see and so on and so on")

    return scripted_engine(reply)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_knows_what_was_given_inside_its_turns_also_after_a_restart(tmp_path, stream):
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "thinking_token_budget": N, "stream": stream}
    async with running_gateway(make_engine(), tmp_path / "store") as gateway:
        created = await gateway.create()
        agent = gateway.agent(created)
        for _ in range(2):
            answer = await agent.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            reply = {"role": "assistant", "content": "42", "reasoning_content": "let me see"}
            messages += [reply, {"role": "user", "content": "sure?"}]
        assert (await gateway.look(created))["counters"]["closings/thinking"] == 2
        tree = await gateway.look(created, "/tree")
        assert [node["origin"] for node in tree["nodes"]] == ["prompt", "sampled", "bridge", "sampled"]
        for node in tree["nodes"][1::2]:
            assert node["token_ids"] == [*THOUGHT, *CLOSE, *ANSWER]
            mask = [True] * N + [False] * len(CLOSE) + [True] * len(ANSWER)
            assert [logprob is not None for logprob in node["rollout_logprobs"]] == mask
            assert [version >= 0 for version in node["policy_versions"]] == mask
        (row,) = (await gateway.look(created, "/samples?advantage=1"))["samples"]
        trained = [i for i, used in zip(row["token_ids"], row["loss_mask"], strict=True) if used]
        assert trained == [*THOUGHT, *ANSWER] * 2
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        async with restarted(gateway, open_store(str(tmp_path / "copy"))):
            assert (await gateway.look(created, "/tree"))["nodes"] == tree["nodes"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_between_the_parts_leaves_no_turn_and_only_sampled_ids_count(tmp_path, stream):
    failures = iter([True])

    def reply(prompt_ids: Any) -> list[int]:
        if prompt_ids[-len(CLOSE) :].tolist() != CLOSE:
            return encode("<think>\nlet me see and so on and so on")
        if next(failures, False):
            raise RuntimeError("no engine")
        return ANSWER

    body = {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": N, "stream": stream}
    async with running_gateway(scripted_engine(reply), tmp_path / "store") as gateway:
        created = await gateway.create(limits={"tokens": 100})
        agent = gateway.agent(created)
        failed = await agent.post(CHAT, json=body)
        assert "the server failed on this request" in failed.text
        found = await gateway.look(created)
        assert (found["num_turns"], found["counters"]["aborted/sampled_ids"]) == (0, N)
        again = await agent.post(CHAT, json=body)
        assert again.status_code == 200
        nodes = (await gateway.look(created, "/tree"))["nodes"]
        assert [node["token_ids"] for node in nodes[1:]] == [[*THOUGHT, *CLOSE, *ANSWER]]
