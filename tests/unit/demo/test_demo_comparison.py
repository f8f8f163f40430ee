import pytest

from unbroken.demo.comparison import Cause, UsualPipeline, changed_positions
from unbroken.demo.lookup import JsonStyle, LookupTask, call_text, lookup_env
from unbroken.engines.scripted import ScriptedEngine
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.types import SamplingParams

TASK = LookupTask(keys=("raka", "tuvo"), value="pemi", style=JsonStyle.CANONICAL)


@pytest.fixture
def retokenize(tokenizer):
    """Scripts completions (texts or ids) and returns the rollout with what the usual pipeline makes of it."""
    renderer = TemplateRenderer(tokenizer)

    async def run(*completions):
        script = [tokenizer.encode(c) if isinstance(c, str) else c for c in completions]
        trajectory = await run_rollout(
            lookup_env(TASK),
            engine=ScriptedEngine(script),
            renderer=renderer,
            sampling=SamplingParams(max_tokens=40),
            limits=Limits(max_turns=6),
        )
        assert trajectory.error is None
        return UsualPipeline(tokenizer, renderer).retokenize(trajectory)

    return run


def calls(style):
    return [call_text(key, style) + "<|im_end|>" for key in TASK.keys]


async def test_a_rollout_written_as_the_template_writes_does_not_change(retokenize):
    rollout = await retokenize(*calls(JsonStyle.CANONICAL), 'Answer: "pemi"<|im_end|>')
    assert not rollout.differs
    assert rollout.causes == frozenset()
    assert rollout.turns == rollout.retokenized_turns
    assert not any(changed_positions(rollout))


async def test_compact_json_is_rewritten_by_the_template(retokenize):
    rollout = await retokenize(*calls(JsonStyle.COMPACT), 'Answer: "pemi"<|im_end|>')
    assert rollout.differs
    assert rollout.causes == {Cause.JSON_STYLE}
    assert any(changed_positions(rollout))


async def test_an_unusual_spelling_is_lost_by_tokenising_again(retokenize, tokenizer):
    letters = [i for c in "pemi" for i in tokenizer.encode(c)]
    spelled = [*tokenizer.encode('Answer: "'), *letters, *tokenizer.encode('"<|im_end|>')]
    rollout = await retokenize(*calls(JsonStyle.CANONICAL), spelled)
    assert rollout.causes == {Cause.BPE_SPLIT}
    assert len(rollout.retokenized_ids) < len(rollout.token_ids)


async def test_a_cut_turn_gains_an_end_of_turn_nobody_sampled(retokenize, tokenizer):
    cut = tokenizer.encode('Answer: "' + '"a' * 40)[:40]
    rollout = await retokenize(*calls(JsonStyle.CANONICAL), cut)
    assert Cause.TRUNCATION in rollout.causes
    assert rollout.retokenized_ids[-1] == tokenizer.eos_token_id
    assert rollout.token_ids[-1] != tokenizer.eos_token_id
