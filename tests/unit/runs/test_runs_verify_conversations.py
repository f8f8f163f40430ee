"""What `unbroken verify` makes again of ids: messages, finish reasons, statuses, and whose ids a prompt has."""

from __future__ import annotations

import copy
import gzip
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support import endings_recipe, templates
from support.dialogues import Dialogue
from support.served import save_tiny_model
from support.tokenizers import make_tokenizer
from unbroken.cli import main
from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.rendering.base import HistoryPolicy
from unbroken.rendering.loader import load_renderer
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.config import RolloutConfig
from unbroken.runs.records.conversations import ConversationCheck
from unbroken.runs.records.record import write_groups
from unbroken.runs.records.recorded import RecordedStep, read_step
from unbroken.types import FinishReason, SamplingParams

CONFIG = RolloutConfig(sampling=SamplingParams(max_tokens=8), limits=Limits(max_turns=4, max_tokens=17))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose rollouts end in all ways."""
    folder = tmp_path_factory.mktemp("endings")
    model = save_tiny_model(folder / "model")
    words = ["train", str(endings_recipe.__file__), f"--output={folder / 'run'}", f"--model={model}"]
    words += ["--trainer.numerics=exact", "--preflight=false", "--evaluation.num-problems=0"]
    assert main(words) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def step(run):
    return read_step(run / "rollouts" / "step-00000000.rank-0.jsonl.gz")


@pytest.fixture(scope="module")
def check(run) -> ConversationCheck:
    renderer = load_renderer(run.parent / "model")
    return ConversationCheck(renderer=renderer, config=CONFIG, context_length=512, is_of_policies=False)


def find_differences(check: ConversationCheck, step, record: dict[str, Any]) -> list[str]:
    rollouts = {each.trajectory_id: each for group in step.make_groups() for each in group.trajectories}
    return [*check.find_differences(record, rollouts[record["trajectory"]])]


def test_rollouts_that_end_in_any_way_are_verified(run, step, capsys):
    statuses = Counter(record["status"] for record in step.records)
    assert set(statuses) == {"completed", "truncated", "max_turns", "max_tokens", "failed", "timeout"}, statuses
    turns = [turn for record in step.records for turn in record["turns"]]
    assert {turn["fork"] for turn in turns} >= {None, "rewritten_history"}
    assert {turn["cut_by"] for turn in turns} == {None, "turn", "tokens"}
    assert any(turn["refusal"] for turn in turns)
    status = main(["verify", str(run)])
    assert (status, (report := capsys.readouterr().out).count("differs: ")) == (0, 0), report


CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "raka"}}\n</tool_call>'
END = "<|im_end|>"
HM = "<think>\nHm.\n</think>\n\n"
DIALOGUES = [
    (templates.QWEN, [f"Now.  {CALL}{END}", f"It is pemi.{END}", f"Yes.{END}", "And now it is"], HistoryPolicy.EXACT),
    (templates.QWEN, [f"{CALL[:-30]}{END}", f"Well.{END}", f"Yes.{END}", f"Bye.{END}"], HistoryPolicy.EXACT),
    (templates.QWEN_THINKING, [f"{HM}{CALL}{END}", f"So.{END}", f"Yes.{END}", "<think>\nHm"], HistoryPolicy.EXACT),
    (templates.QWEN_THINKING, [f"{HM}Yes.{END}", f"So.{END}", f"No.{END}"], HistoryPolicy.TEMPLATE),
    (templates.FIRST_RESULT, [f"Yes.{END}", f"So.{END}", f"No.{END}"], HistoryPolicy.EXACT),
]


async def talk(
    folder: Path, source: str, replies: list[str], history: HistoryPolicy
) -> tuple[ConversationCheck, RecordedStep]:
    """The record of a rollout with a tool, and its check."""
    tokenizer = make_tokenizer(source)
    renderer = TemplateRenderer(tokenizer, history=history)
    config = RolloutConfig(sampling=SamplingParams(max_tokens=200), limits=Limits(max_turns=9))
    script = [
        ScriptedReply(
            completion_ids=tokenizer(reply, add_special_tokens=False)["input_ids"],
            finish_reason=FinishReason.STOP if reply.endswith(END) else FinishReason.LENGTH,
        )
        for reply in replies
    ]
    engine = ScriptedEngine(script, allow_forks=True)
    rollout = await run_rollout(
        Dialogue([{"role": "user", "content": "Which value?"}], {"raka": {"value": "pemi"}}, ["Sure?", "Really?"]),
        engine=engine,
        renderer=renderer,
        sampling=config.sampling,
        limits=config.limits,
    )
    assert rollout.error is None
    group = TrajectoryGroup(group_id="0", trajectories=(rollout,))
    step = read_step(write_groups(folder, {"step": 0, "rank": 0, "num_processes": 1}, [group]))
    return ConversationCheck(
        renderer=TemplateRenderer(tokenizer, history=history),
        config=config,
        context_length=engine.context_length,
        is_of_policies=False,
    ), step


@pytest.mark.parametrize(("source", "replies", "history"), DIALOGUES)
async def test_a_conversation_with_a_tool_is_made_again(tmp_path, source, replies, history):
    check, step = await talk(tmp_path, source, replies, history)
    (record,) = step.records
    assert len(record["turns"]) == len(replies)
    assert find_differences(check, step, record) == []
    first = next(k for k, message in enumerate(record["messages"]) if message["role"] in ("tool", "user") and k > 1)
    edited = copy.deepcopy(record)
    edited["messages"][first]["content"] += "!"
    (found,) = find_differences(check, step, edited)
    assert re.search(r"^, turn 1: position \d+ of its prompt has the id \d+, and by its messages \d+$", found)


def changes(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set a value of a record: `turns.0.cut_by`."""

    def change(record: dict[str, Any]) -> None:
        *names, last = [int(name) if name.isdecimal() else name for name in path.split(".")]
        inner: Any = record
        for name in names:
            inner = inner[name]
        inner[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("turns.0.message.content", "No.", ", turn 0: content of its message is 'No.', and by its ids '"),
        ("turns.1.message.reasoning_content", "No.", ", turn 1: reasoning_content of its message is 'No.', and by its"),
        ("turns.0.call_statuses", ["ok"], ", turn 0: call_statuses is ['ok'], and by its ids []"),
        ("turns.0.unread_calls", ["x"], ", turn 0: unread_calls is ['x'], and by its ids []"),
        ("turns.0.cut_by", "context", ", turn 0: cut_by is 'context', and by its ids "),
        ("turns.1.refusal", "unsafe_text", ", turn 1: refusal is 'unsafe_text', and by its messages None"),
        ("turns.0.fork", "edited_reply", ", turn 0: fork is 'edited_reply', and by its messages None"),
        (
            "turns.1.closing",
            {"how": "reasoning", "num_ids": 1},
            ", turn 1: closing is {'how': 'reasoning', 'num_ids': 1}",
        ),
        ("messages.0.content", "No.", ", turn 0: position "),
        ("messages.3.content", "No.", ": its messages do not have the replies of its turns"),
        ("rows.0.message_indices.0.2", 1, ", row 0: message_indices is [["),
        ("status", "max_turns", ": status is 'max_turns', and its counters have completed"),
        ("counters", {"status/completed": 1, "status/failed": 1}, "and its counters have completed, failed"),
        ("error", "ValueError", ": status is 'completed', and error 'ValueError'"),
    ],
)
def test_what_a_record_says_other_than_its_ids_is_named(check, step, path, value, said):
    record = copy.deepcopy(next(each for each in step.records if each["status"] == "completed"))
    changes(path, value)(record)
    assert said in "; ".join(find_differences(check, step, record))


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ("completed", "status is 'max_tokens', and it cannot have ended so"),
        ("truncated", "status is 'max_tokens', and it cannot have ended so"),
        ("max_tokens", "status is 'completed', and it cannot have ended so"),
    ],
)
def test_a_rollout_that_cannot_have_ended_as_its_record_says_is_named(check, step, ended, said):
    status = said.split("'")[1]
    chosen = [each for each in step.records if each["status"] == ended]
    left = 0 if ended == "max_tokens" else 1
    record = copy.deepcopy(
        next(each for each in chosen if sum(turn["num_sampled"] for turn in each["turns"]) <= 17 - left)
    )
    record |= {"status": status, "counters": {f"status/{status}": 1}}
    assert said in "; ".join(find_differences(check, step, record))


def test_a_finish_reason_that_is_not_that_of_the_last_id_is_named(check, step):
    rollout = next(each for group in step.make_groups() for each in group.trajectories if each.status == "completed")
    record = next(each for each in step.records if each["trajectory"] == rollout.trajectory_id)
    turn = rollout.turns[0]
    other = replace(turn, sequence=replace(turn.sequence, finish_reason=FinishReason.LENGTH))
    found = [*check.find_differences(record, replace(rollout, turns=(other, *rollout.turns[1:])))]
    assert ", turn 0: finish_reason is 'stop', and by its last id 'stop'" in found


def test_the_command_names_a_message_that_its_ids_do_not_say(run, tmp_path, capsys):
    other = Path(shutil.copytree(run, tmp_path / "run"))
    path = other / "rollouts" / "step-00000000.rank-0.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    record = next(line for line in lines[2:] if line["status"] == "completed")
    record["turns"][1]["message"]["content"] = "No."
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    assert main(["verify", str(other)]) == 1
    said = f"step 0: {path.name}: trajectory {record['trajectory']}, turn 1: content of its message is 'No.'"
    assert said in capsys.readouterr().out
