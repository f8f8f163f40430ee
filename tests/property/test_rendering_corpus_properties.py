"""I1 over all chat templates that `trl` and `vllm` ship, those of the shared folder and generated ones.

A bridge is the template's own rendering, or refused. What is refused though it could be bridged is bounded.
"""

import functools
import math
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from support.corpus import CorpusTemplate, corpus_template, distinct_templates
from support.corpus_conversations import JudgedConversation
from support.corpus_oracle import CorpusOracle, Judgement
from support.corpus_runs import Damage, kinds_of, run_template, run_until_bridged
from support.effort import num_cases
from support.generated_runs import judge_seed
from support.template_generator import GeneratedTemplate
from support.templates import CHATML
from support.tokenizers import make_tokenizer
from unbroken.messages import Message
from unbroken.rendering.base import Bridge, BridgeOutcome, HistoryEffect, Refusal, RefusalReason
from unbroken.rendering.template import TemplateRenderer

NUM_CONVERSATIONS = num_cases(20, in_fuzz=1000)
"""Turns that can be bridged, of each template; `bench/bridges.py` tries as many as it is asked for."""
NUM_DAMAGED = num_cases(16, in_fuzz=40)
LEAST_EXACT: dict[str, float] = tomllib.loads((Path(__file__).parent / "coverage.toml").read_text("utf-8"))
"""By template, the share of the turns that can be bridged that are. `bench/bridges.py --write` writes it."""
LEAST_OF_NEW = 0.97
"""For a template that is not in the table, because its package is newer."""
HAS_NO_END = ("vllm/template_basic", "vllm/template_blip2", "vllm/template_deepseek_ocr", "vllm/template_kimi_audio")
"""Nothing stands between a turn and what follows it; the last wants `conversations`."""


@pytest.mark.parametrize("template", distinct_templates(), ids=lambda template: template.name)
def test_i1_bridges_of_a_template_are_exact_and_as_many_as_before(template: CorpusTemplate) -> None:
    is_bridged = template.name not in HAS_NO_END
    kinds = kinds_of(template) if is_bridged else frozenset()
    tally = run_until_bridged(template, NUM_CONVERSATIONS, kinds)
    assert tally.wrong == []
    assert (tally.judgements[Judgement.EXACT] > 0) is is_bridged
    if is_bridged:
        least = LEAST_EXACT.get(template.name, LEAST_OF_NEW)
        # Of few conversations the share may be a bit less.
        assert tally.exact_share >= least - 2 * math.sqrt(least * (1 - least) / tally.num_possible), tally
    assert kinds <= tally.bridged.keys()
    for effect, keeps in tally.history:
        assert keeps is (effect == HistoryEffect.KEPT), tally.history


def test_each_template_that_can_be_bridged_has_a_bound_and_together_they_reach_the_goal() -> None:
    names = {template.name for template in distinct_templates()} - set(HAS_NO_END)
    assert LEAST_EXACT.keys() >= {name for name in names if not name.startswith("shared/")}
    assert sum(LEAST_EXACT.values()) / len(LEAST_EXACT) >= 0.97
    assert {name for name, share in LEAST_EXACT.items() if share < 0.9} == set()


def test_the_oracle_calls_a_dropped_a_repeated_and_a_moved_message_wrong() -> None:
    """Though the bridge is the end of the template's own rendering, character for character and id for id."""
    new: list[Message] = [{"role": "user", "content": "new00000001"}, {"role": "system", "content": "new00000002"}]
    conversation = JudgedConversation(
        history=[{"role": "user", "content": "hi"}],
        assistant={"role": "assistant", "content": "said00000003"},
        new_messages=new,
        turn_marks=("said00000003",),
    )
    judged = {}
    for order in ("messages", "messages[:-1]", "messages + messages[-1:]", "messages[-1:] + messages[:-1]"):
        source = CHATML.replace("in messages", f"in {order}")
        tokenizer = make_tokenizer(source)
        oracle = CorpusOracle(CorpusTemplate("vllm/template_chatml", source), tokenizer)
        full = oracle.text(conversation.everything, generation_prompt=True) or ""
        ids = np.array(oracle.ids(full[full.index("said00000003<|im_end|>") + len("said00000003<|im_end|>") :]))
        exact = Bridge(bridge_ids=ids, message_indices=np.full(len(ids), -1, np.int32))
        refusal = Refusal(reason=RefusalReason.DROPS_MESSAGE)
        judged[order] = (oracle.judge(conversation, exact), oracle.judge(conversation, refusal))
    assert judged.pop("messages") == (Judgement.EXACT, Judgement.REFUSED)
    assert set(judged.values()) == {(Judgement.WRONG, Judgement.IMPOSSIBLE)}


@pytest.mark.parametrize("seed", range(num_cases(40)))
def test_i1_bridges_of_a_generated_template_are_exact_or_refused(seed: int) -> None:
    template, _, wrong = judge_generated(seed)
    assert wrong == [], template.condition


def test_nearly_all_turns_of_generated_templates_that_can_be_bridged_are() -> None:
    counts = sum((judge_generated(seed)[1] for seed in range(40)), Counter[Judgement]())
    assert counts[Judgement.IMPOSSIBLE] > 4
    assert counts[Judgement.EXACT] >= 0.97 * (counts[Judgement.EXACT] + counts[Judgement.REFUSED])


@functools.cache
def judge_generated(seed: int) -> tuple[GeneratedTemplate, Counter[Judgement], list[str]]:
    """What became of the bridges of one template, for both tests."""
    return judge_seed(seed, num_conversations=12)


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
