"""I1 over all chat templates that `trl` and `vllm` ship: a bridge is the template's own rendering, or refused."""

import math

import numpy as np
import pytest

from support.corpus import CorpusTemplate, corpus_template, corpus_templates
from support.corpus_conversations import JudgedConversation
from support.corpus_oracle import CorpusOracle, Judgement
from support.corpus_runs import Damage, kinds_of, run_template, run_until_bridged
from support.effort import EFFORT, FUZZ_EFFORT, num_cases
from unbroken.rendering.base import Bridge, BridgeOutcome
from unbroken.rendering.template import TemplateRenderer

NUM_CONVERSATIONS = num_cases(12, in_fuzz=1000)
"""With each template, at least; `bench/bridges.py --shipped` tries as many as it is asked for."""
NUM_DAMAGED = num_cases(16, in_fuzz=40)
NOT_DERIVABLE = ("vllm/template_basic", "vllm/template_blip2", "vllm/template_deepseek_ocr")
"""Nothing stands between a turn and what follows it."""
TAKES_NO_MESSAGES = "vllm/template_kimi_audio"
"""Wants `conversations`."""
_GEMMA4 = ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma", "diffusion_gemma_training")
LEAST_EXACT = {
    # A new system message is put at the beginning of the conversation.
    "trl/cohere2": 0.65,
    "trl/cohere2_training": 0.5,
    **dict.fromkeys(("trl/deepseek_r1_distill", "trl/deepseek_r1_distill_training"), 0.6),
    **dict.fromkeys(("trl/deepseekv3", "trl/deepseekv3_training"), 0.72),
    # Text beside calls is put behind their results.
    **dict.fromkeys((f"trl/{file}" for file in _GEMMA4), 0.68),
    **dict.fromkeys(NOT_DERIVABLE, 0.0),
    TAKES_NO_MESSAGES: 0.0,
}
"""Share of the conversations that the template accepts, where it is not nearly all; of few, it may be a bit less.

The rest differs by a few texts that control tokens would form in, which are refused.
"""


@pytest.mark.parametrize("template", corpus_templates(), ids=lambda template: template.name)
def test_i1_bridges_of_a_shipped_template_are_exact_or_refused(template: CorpusTemplate) -> None:
    is_bridged = template.name not in (*NOT_DERIVABLE, TAKES_NO_MESSAGES)
    kinds = kinds_of(template) if is_bridged else frozenset()
    tally = run_until_bridged(template, NUM_CONVERSATIONS, kinds)
    assert tally.judgements.total() >= NUM_CONVERSATIONS
    assert tally.wrong == []
    least = LEAST_EXACT.get(template.name, 0.99)
    deviation = math.sqrt(least * (1 - least) / max(tally.num_accepted, 1)) if EFFORT < FUZZ_EFFORT else 0.0
    assert tally.exact_share >= least - 2 * deviation, tally
    assert kinds <= tally.bridged.keys()
    assert (tally.judgements[Judgement.EXACT] > 0) is is_bridged


def test_nine_of_ten_conversations_that_shipped_templates_accept_are_bridged() -> None:
    """By the shares that the test above holds each template to."""
    names = [template.name for template in corpus_templates() if template.name != TAKES_NO_MESSAGES]
    assert sum(LEAST_EXACT.get(name, 0.99) for name in names) / len(names) >= 0.9


def shortened(bridge: Bridge, start: int, stop: int) -> Bridge:
    """The bridge without the ids in this range."""
    ids = np.delete(bridge.bridge_ids, slice(start, stop))
    return Bridge(bridge_ids=ids, message_indices=np.full(len(ids), -1, np.int32))


def loses_an_id(
    _: TemplateRenderer, __: CorpusOracle, ___: JudgedConversation, outcome: BridgeOutcome
) -> BridgeOutcome:
    middle = len(outcome.bridge_ids) // 2 if isinstance(outcome, Bridge) else 0
    return shortened(outcome, middle, middle + 1) if isinstance(outcome, Bridge) else outcome


def loses_a_newline(
    _: TemplateRenderer, oracle: CorpusOracle, __: JudgedConversation, outcome: BridgeOutcome
) -> BridgeOutcome:
    if isinstance(outcome, Bridge) and oracle.tokenizer.decode(outcome.bridge_ids[:1].tolist()) == "\n":
        return shortened(outcome, 0, 1)
    return outcome


def takes_another_role(
    renderer: TemplateRenderer, oracle: CorpusOracle, conversation: JudgedConversation, outcome: BridgeOutcome
) -> BridgeOutcome:
    other = [{**message, "role": "user"} for message in conversation.new_messages]
    stop_id = [oracle.stop_id_of(conversation)]
    return renderer.bridge_to_next_turn(
        [], stop_id, other, assistant=conversation.assistant, tools=oracle.tools, earlier=conversation.history
    )


def repeats_the_stop(
    _: TemplateRenderer, oracle: CorpusOracle, conversation: JudgedConversation, outcome: BridgeOutcome
) -> BridgeOutcome:
    if not isinstance(outcome, Bridge):
        return outcome
    ids = np.concatenate([[oracle.stop_id_of(conversation)], outcome.bridge_ids])
    return Bridge(bridge_ids=ids, message_indices=np.full(len(ids), -1, np.int32))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[(name, damage) for name in ("trl/qwen3", "trl/llama3_1") for damage in (loses_an_id, repeats_the_stop)],
        *[(name, takes_another_role) for name in ("trl/qwen3", "trl/llama3_1", "trl/muse_glimmer", "trl/lfm2_v2")],
        *[(name, loses_a_newline) for name in ("trl/qwen3", "trl/lfm2_v2", "vllm/template_minicpmv45")],
        ("trl/glm4moe", loses_an_id),
        ("trl/gptoss", repeats_the_stop),
    ],
)
def test_a_damaged_bridge_is_noticed(name: str, damage: Damage) -> None:
    tally = run_template(corpus_template(name), NUM_DAMAGED, damage)
    assert len(tally.wrong) > NUM_DAMAGED // 8
    # An empty turn of a template that rewrites history is judged by nothing; all else is noticed unless refused.
    assert tally.judgements[Judgement.EXACT] == 0 or damage is not loses_an_id


def test_the_end_to_end_check_notices_what_the_first_check_is_made_blind_to() -> None:
    template = corpus_template("trl/qwen2_5")
    tokenizer = template.tokenizer()
    oracle = CorpusOracle(template, tokenizer)
    renderer = TemplateRenderer(tokenizer)
    conversation = JudgedConversation(
        history=[{"role": "user", "content": "hi"}],
        assistant={"role": "assistant", "content": "so"},
        new_messages=[{"role": "user", "content": "more"}],
        turn_marks=("so",),
    )
    outcome = renderer.bridge_to_next_turn(
        [],
        [oracle.stop_id_of(conversation)],
        conversation.new_messages,
        assistant=conversation.assistant,
        earlier=conversation.history,
    )
    assert isinstance(outcome, Bridge)
    assert oracle.extends(conversation, outcome) is True
    assert oracle.extends(conversation, shortened(outcome, 0, 1)) is False
