"""What retokenising would have made of a rollout: from its record the same as from the rollout itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support import templates
from support.audits import subject_of
from support.dialogues import Dialogue
from support.recorded import make_row, make_trajectory
from support.scripted_env import ScriptedEnv
from unbroken.audit.subject import Subject
from unbroken.engines.scripted import ScriptedEngine
from unbroken.retokenising.comparison import compare_trajectory
from unbroken.rollout.env import Env, Rewrite
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.records.record import RecordedRow, make_record
from unbroken.types import SamplingParams
from unbroken.viewer.sources.retokenised import TemplateSource, load_template_texts, retokenise_trajectory
from unbroken.viewer.sources.rollouts import describe_trajectory

COMPACT = '<tool_call>\n{"name":"lookup","arguments":{"key":"raka"}}\n</tool_call><|im_end|>'
BROKEN = "<tool_call>\n{broken\n</tool_call><|im_end|>"
ANSWER = "It is known.<|im_end|>"


async def play(subject: Subject, env: Env, *replies: str) -> Trajectory:
    return await run_rollout(
        env,
        engine=ScriptedEngine([subject.encode(reply) for reply in replies], allow_forks=True),
        renderer=subject.renderer,
        sampling=SamplingParams(max_tokens=200),
        limits=Limits(max_turns=6),
    )


def make_lookup() -> Env:
    return Dialogue([{"role": "user", "content": "Look."}], {"raka": {"value": "pemi"}})


def show(member: Trajectory) -> dict[str, Any]:
    """A rollout as the viewer reads it."""
    recorded = [RecordedRow(path=path, row=row, trained=None, trainer_logprobs=None) for path, row in member.tree.rows]
    record = json.loads(json.dumps(make_record("0-0-3", member, recorded)))
    return {"record": record, "model": "a-model", **describe_trajectory(record, None)}


@pytest.mark.parametrize("replies", [(COMPACT, ANSWER), (BROKEN, ANSWER), (ANSWER,)], ids=["compact", "broken", "same"])
async def test_a_record_is_compared_as_its_rollout(replies):
    subject = subject_of(templates.QWEN)
    member = await play(subject, make_lookup(), *replies)
    expected = compare_trajectory(subject, member)
    assert expected is not None
    (found,) = retokenise_trajectory(show(member), subject)["rows"]
    assert found["token_ids"] == expected.retokenised_ids.tolist()
    assert found["num_changed"] == expected.count_changed_ids()
    assert [(change["before"], change["causes"]) for change in found["changes"]] == [
        (change.gap.before, sorted(change.causes)) for change in expected.changes
    ]
    assert bool(found["changes"]) == (replies[0] == COMPACT)
    assert found["texts"].keys() == set(found["token_ids"])


async def test_of_a_rewritten_history_the_last_branch_is_compared_with_its_own_messages():
    subject = subject_of(templates.QWEN)
    rewritten = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Told."},
        {"role": "user", "content": ""},
    ]
    shown = show(await play(subject, ScriptedEnv([Rewrite(messages=rewritten)]), ANSWER, ANSWER))
    first, last = retokenise_trajectory(shown, subject)["rows"]
    assert first["problem"].startswith("Of branches before the last one")
    assert last["changes"] == []
    shown["record"]["messages"] = rewritten[:1]
    assert "are not the same" in retokenise_trajectory(shown, subject)["rows"][1]["problem"]


async def test_branches_with_messages_and_tools_of_their_own_are_all_compared():
    """As sessions of a store have them."""
    subject = subject_of(templates.QWEN)
    shown = show(await play(subject, make_lookup(), COMPACT, ANSWER))
    record = shown["record"]
    record["messages"] += [{"role": "user", "content": "other"}]
    record["rows"][0]["messages"] = [0, 1, 2, 3]
    (found,) = retokenise_trajectory(shown, subject)["rows"]
    assert found["num_changed"] > 0
    record["rows"][0]["tools"], record["tools"] = record["tools"], []
    assert retokenise_trajectory(shown, subject)["rows"] == [found]
    record["rows"][0]["messages"] = [0, 1, 2, 3, 1]
    (found,) = retokenise_trajectory(shown, subject)["rows"]
    assert "not the same" in found["problem"]


def explain(record: dict[str, Any], subject: Subject | None) -> str:
    """Why the only row of a record, or the record, is not compared."""
    found = retokenise_trajectory({"record": record, "model": "a-model", **describe_trajectory(record, None)}, subject)
    return str(found.get("problem") or found["rows"][0]["problem"])


async def test_what_cannot_be_compared_says_why():
    subject = subject_of(templates.QWEN)
    whole = make_trajectory("g0/0", [make_row([1, 2, 3], num_prompt=2)])
    assert "of a-model are not on this machine" in explain(whole, None)
    assert explain(make_trajectory("g0/0", [], turns=[]), subject) == "There are no ids."
    assert "is not known" in explain({**whole, "turns": []}, subject)
    row = make_row([1, 2, 3], num_prompt=2) | {"images": [{"start": 0, "stop": 1, "sha256": "0" * 64}]}
    assert "with images" in explain(make_trajectory("g0/0", [row]), subject)
    assert "has 40000" in explain(make_trajectory("g0/0", [make_row(range(40_000), num_prompt=2)]), subject)


@pytest.mark.parametrize(
    "change",
    [{"rows": [make_row([1, 2, 2**40], num_prompt=2)]}, {"messages": [3, {"role": "assistant"}]}, {"turns": [{}]}],
    ids=["an id that does not exist", "a message that is a number", "a turn without a message"],
)
def test_a_damaged_record_is_not_compared_and_ends_nothing(change):
    subject = subject_of(templates.QWEN)
    record = {**make_trajectory("g0/0", [make_row([1, 2, 3], num_prompt=2)]), **change}
    (found,) = retokenise_trajectory({"record": record, "turn_of_node": {1: 0}}, subject)["rows"]
    assert found["problem"].startswith("It cannot be compared: ")


async def test_a_template_that_refuses_the_conversation_is_named():
    subject = subject_of(templates.QWEN)
    shown = show(await play(subject, make_lookup(), ANSWER))
    refusing = subject_of(templates.QWEN.replace("{%- for message", "{{ raise_exception('no') }}{%- for message", 1))
    (found,) = retokenise_trajectory(shown, refusing)["rows"]
    assert found["problem"].startswith("The chat template refuses")


def test_a_folder_without_a_template_gives_nothing(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert load_template_texts(TemplateSource(folder=tmp_path, renderer="{}")) is None
