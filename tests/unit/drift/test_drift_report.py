"""The numbers of a drift report, over conversations written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from support import templates
from support.audits import subject_of
from unbroken.drift.config import DriftConfig
from unbroken.drift.conversations import PromptRow
from unbroken.drift.run import run_drift
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import ContextOverflowError
from unbroken.retokenising.changes import Cause

USER = [{"role": "user", "content": "What is the value?"}]
RESULTS = {"raka": {"value": "pemi"}}
SPACED = '<tool_call>\n{"name": "lookup", "arguments": {"key": "raka"}}\n</tool_call>'
COMPACT = '<tool_call>\n{"name":"lookup","arguments":{"key":"raka"}}\n</tool_call>'
END = "<|im_end|>"
ANSWER = f"It is known.{END}"


async def report_of(
    replies: Sequence[str], *, num: int = 1, template: str = templates.QWEN, unread: Any = None, **options: Any
) -> Any:
    subject = subject_of(template, options=unread)
    row = PromptRow(messages=USER, results=RESULTS)

    def reply(prompt_ids: Any) -> list[int]:
        return subject.encode(replies[0] if "pemi" not in subject.decode(prompt_ids.tolist()) else replies[1])

    return await run_drift(
        subject,
        ScriptedEngine(reply, allow_forks=True, **options),
        lambda _: row.make_env(),
        DriftConfig(num_conversations=num),
        prompts="by hand",
        engine_name="embedded",
    )


async def test_without_drift_every_share_is_exactly_0() -> None:
    report = await report_of([SPACED + END, ANSWER], num=3)
    values = report.to_json()
    assert (values["compared"]["num_rollouts"], values["compared"]["num_turns"]) == (3, 6)
    for counts in (values["changed"], *values["causes"].values()):
        assert set(counts.values()) == {0}
    assert report.examples == ()


async def test_tools_and_options_without_effect_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    await report_of([ANSWER, ANSWER], num=3, template=templates.CHATML, unread={"mood": "calm"})
    about_options, about_tools = caplog.messages
    assert "does not read the options mood" in about_options
    assert "does not show tools" in about_tools
    caplog.clear()
    await report_of([SPACED + END, ANSWER], num=3)
    assert caplog.messages == []


async def test_shares_count_rollouts_turns_and_ids() -> None:
    report = await report_of([COMPACT + END, ANSWER], num=3)
    values = report.to_json()
    assert values["changed"]["share_of_rollouts"] == 1.0
    assert values["changed"]["share_of_turns"] == 0.5
    assert 0 < values["changed"]["num_ids"] < values["compared"]["num_ids"]
    assert values["causes"]["reserialised_call"] == values["changed"]
    assert values["causes"]["bpe_split"]["num_rollouts"] == 0
    assert values["retokenised"]["num_tokens"] <= values["exact"]["num_tokens"] == values["compared"]["num_ids"]
    assert [example.cause for example in report.examples] == [Cause.RESERIALISED_CALL]


async def test_without_any_turn_the_first_error_is_raised() -> None:
    with pytest.raises(ContextOverflowError):
        await report_of([SPACED + END, ANSWER], context_length=4)
