"""The judge of bridges: it passes right ones over all families, and notices each kind of wrong one."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from support import templates
from support.audits import COUNTS_ITS_TURN, subject_of
from support.conversations import FAMILIES
from unbroken.audit.config import AuditConfig
from unbroken.audit.report import FuzzFinding
from unbroken.audit.run import run_audit
from unbroken.audit.subject import Subject
from unbroken.rendering.base import Bridge, Closing
from unbroken.rendering.template import TemplateRenderer


class Damaged:
    """A template's renderer whose bridges are changed."""

    def __init__(self, renderer: TemplateRenderer, damage: Any) -> None:
        self._renderer = renderer
        self._damage = damage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def bridge_to_next_turn(self, *arguments: Any, **options: Any) -> Any:
        outcome = self._renderer.bridge_to_next_turn(*arguments, **options)
        return self._damage(outcome) if isinstance(outcome, Bridge) else outcome


def with_ids(bridge: Bridge, ids: list[int]) -> Bridge:
    return dataclasses.replace(bridge, bridge_ids=np.array(ids), message_indices=np.full(len(ids), -1, dtype=np.int32))


def judge(subject: Subject, *, num: int = 60, seed: int = 0) -> FuzzFinding:
    return run_audit(subject, AuditConfig(num_conversations=num, seed=seed)).fuzz


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_i1_bridges_of_each_family_are_exact(name: str) -> None:
    family = FAMILIES[name]
    subject = subject_of(family.template, control_tokens=tuple(family.control_tokens))
    found = judge(subject, seed=3)
    assert found.num_wrong == 0
    assert found.num_exact > 25, found


@pytest.mark.parametrize(
    "damage",
    [
        lambda bridge: with_ids(bridge, bridge.bridge_ids.tolist()[1:]),
        lambda bridge: with_ids(bridge, [*bridge.bridge_ids.tolist(), 7]),
        lambda bridge: with_ids(bridge, [*bridge.bridge_ids.tolist()[:-1], 7]),
        lambda bridge: dataclasses.replace(bridge, closing=Closing.TRUNCATED),
        lambda bridge: dataclasses.replace(bridge, num_taken_back=1),
    ],
    ids=["lost first", "one more", "other last", "closed", "taken back"],
)
def test_a_wrong_bridge_is_noticed(damage: Any) -> None:
    own = subject_of(templates.QWEN)
    subject = dataclasses.replace(own, renderer=Damaged(own.template_renderer, damage))
    found = judge(subject, num=20, seed=3)
    assert found.num_exact == 0
    assert found.num_wrong >= 18


def test_the_same_text_in_other_ids_is_wrong() -> None:
    def split(bridge: Bridge) -> Bridge:
        ids = bridge.bridge_ids.tolist()
        words = [
            word if word.isascii() and word.isalpha() else "" for word in (token.text for token in own.get_tokens(ids))
        ]
        k = max(range(len(ids)), key=lambda i: len(words[i]))
        changed = [*ids[:k], *own.encode(words[k][:1]), *own.encode(words[k][1:]), *ids[k + 1 :]]
        assert own.decode(changed) == own.decode(ids)
        assert changed != ids
        return with_ids(bridge, changed)

    own = subject_of(templates.QWEN)
    subject = dataclasses.replace(own, renderer=Damaged(own.template_renderer, split))
    found = judge(subject, num=20, seed=3)
    assert found.num_exact == 0
    assert found.num_wrong >= 18


def test_refusals_are_counted_by_reason_with_the_situation() -> None:
    found = judge(subject_of(COUNTS_ITS_TURN), num=40)
    assert found.num_exact == found.num_wrong == 0
    (share,) = found.refused
    assert share.reason == "history_dependent"
    assert share.num == found.num_refused == 40
    assert "text, then a user message" in share.situations
    assert "depends on what the turn says" in share.detail


def test_a_turn_that_the_template_leaves_out_is_not_judged() -> None:
    deaf = templates.CHATML.replace("message.content +", "('' if message.role == 'tool' else message.content) +")
    found = judge(subject_of(deaf), num=60)
    assert set(found.not_accepted) == {"text, then a tool message after text"}
    assert found.num_accepted == 60 - sum(found.not_accepted.values()) == found.num_exact


def test_white_space_that_a_last_turn_lacks_before_its_end_does_not_keep_a_bridge_from_being_judged() -> None:
    spaced = templates.CHATML.replace("'<|im_end|>\\n'", "('' if loop.last else '\\n') + '<|im_end|>\\n'")
    found = judge(subject_of(spaced), num=40)
    assert (found.num_exact, found.num_unjudged) == (40, 0)
    assert found.history["user"]["rewritten"] > 0


def test_p2_is_counted_over_the_bridges_by_what_follows() -> None:
    assert judge(subject_of(templates.QWEN)).history == {
        "system": {"kept": 2},
        "tool": {"kept": 41},
        "user": {"kept": 17},
    }
    own = subject_of(templates.QWEN_THINKING)
    found = judge(own)
    assert set(found.history["tool"]) == {"kept"}
    assert set(found.history["user"]) == {"kept", "drops_reasoning"}
    assert sum(num for counts in found.history.values() for num in counts.values()) == found.num_exact == 60
    silent = Damaged(own.template_renderer, lambda bridge: dataclasses.replace(bridge, history=None))
    again = judge(dataclasses.replace(own, renderer=silent))
    assert again.history == found.history, "it is the template's, whatever the renderer under audit says"


def test_a_header_that_the_template_only_expects_is_not_taken_for_the_sampled_one() -> None:
    guessing = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}"
        "{{ '<|system|>' if not loop.last and messages[loop.index0 + 1].role == 'system' else '<|user|>' }}"
        "{% else %}{% if loop.first or messages[loop.index0 - 1].role != 'assistant' %}<|{{ m.role }}|>{% endif %}"
        "{{ m.content }}{% endif %}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    )
    subject = subject_of(guessing, control_tokens=("<|user|>", "<|system|>", "<|assistant|>", "<|tool|>"))
    found = judge(subject, num=60)
    assert found.num_wrong == 0
    assert found.num_exact > 40
