"""What the usual pipeline makes of rollouts of the lookup task, with the demo's template and tokenizer."""

import pytest

from unbroken.demo.lookup import JsonStyle, LookupTask, call_text, lookup_env
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rendering.template import TemplateRenderer
from unbroken.retokenising.changes import Cause
from unbroken.retokenising.comparison import TemplateTexts, compare_trajectory
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.types import SamplingParams

TASK = LookupTask(keys=("raka", "tuvo"), value="pemi", style=JsonStyle.CANONICAL)


@pytest.mark.parametrize(
    ("style", "causes"), [(JsonStyle.CANONICAL, set()), (JsonStyle.COMPACT, {Cause.RESERIALISED_CALL})]
)
async def test_the_template_rewrites_compact_json_and_nothing_else(tokenizer, style, causes):
    renderer = TemplateRenderer(tokenizer)
    replies = [*(call_text(key, style) for key in TASK.keys), 'Answer: "pemi"']
    trajectory = await run_rollout(
        lookup_env(TASK),
        engine=ScriptedEngine([tokenizer.encode(f"{reply}<|im_end|>") for reply in replies]),
        renderer=renderer,
        sampling=SamplingParams(max_tokens=40),
        limits=Limits(max_turns=6),
    )
    assert trajectory.reward == 1.0
    found = compare_trajectory(TemplateTexts(tokenizer=tokenizer, template_renderer=renderer), trajectory)
    assert found is not None
    assert found.causes == causes
    assert len(found.turns) == 3
