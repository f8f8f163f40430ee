"""The shadow audit by itself: a bridge against the end of a full rendering."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.conversations import FAMILIES
from support.fake_renderer import END, HEADERS, NEWLINE, OTHER_END, FakeRenderer, encode
from support.templates import CHATML, QWEN, SEEN_BY_NO_PANEL
from support.tokenizers import make_tokenizer
from unbroken.errors import TemplateError
from unbroken.rendering.base import TEMPLATE, Bridge, Closing, Refusal, RefusalReason, Renderer
from unbroken.rendering.bridge.shadow_audit import AuditOutcome, RevocableRenderer, UsedBridge, audit_bridge
from unbroken.rendering.template import TemplateRenderer

USER, ASSISTANT = HEADERS["user"], HEADERS["assistant"]
NEW: Any = [{"role": "user", "content": "more"}]
TURN: Any = {"role": "assistant", "content": "ok"}
NINE_WORDS: Any = [{"role": "user", "content": "Tell me what you see when you look outside."}]
FOUR_WORDS: Any = [{"role": "user", "content": "Tell me your name."}]
MESSAGES: Any = [*FOUR_WORDS, TURN, *NEW]


def used(bridge_ids: list[int], *, messages: Any = MESSAGES, **fields: Any) -> UsedBridge:
    indices = np.full(len(bridge_ids), TEMPLATE, dtype=np.int32)
    bridge = Bridge(bridge_ids=np.array(bridge_ids), message_indices=indices, **fields)
    return UsedBridge(bridge=bridge, messages=messages, num_new=1)


def after_turn(renderer: TemplateRenderer, tokenizer: Any, history: Any, turn: str) -> UsedBridge:
    """The bridge after a turn of this text, and the conversation it belongs to."""
    prompt_ids = renderer.render(history).token_ids
    ids = np.array(tokenizer.encode(turn, add_special_tokens=False), dtype=np.int32)
    message = renderer.parse_response(ids, prompt_ids=prompt_ids).to_message([])
    bridge = renderer.bridge_to_next_turn(prompt_ids, ids, NEW, assistant=message)
    assert isinstance(bridge, Bridge)
    return UsedBridge(bridge=bridge, messages=[*history, message, *NEW], num_new=1)


@pytest.mark.parametrize("family", ["chatml", "qwen", "qwen_thinking", "llama", "two_token_close", "stand_in", "parts"])
@pytest.mark.parametrize("end", ["stop", "", "<|endoftext|>"])
def test_the_bridge_of_an_honest_template_matches_however_the_turn_ended(family: str, end: str) -> None:
    tokenizer = FAMILIES[family].tokenizer()
    renderer = TemplateRenderer(tokenizer)
    stop = FAMILIES[family].stop_of
    assert isinstance(renderer, RevocableRenderer)
    if callable(stop):
        stop = "<|return|>"
    bridge = after_turn(renderer, tokenizer, FOUR_WORDS, "ok" + (stop if end == "stop" else end))
    assert bridge.bridge.closing is {"stop": Closing.NONE, "": Closing.TRUNCATED}.get(end, Closing.FOREIGN_STOP)
    assert audit_bridge(renderer, bridge).outcome is AuditOutcome.MATCH


def test_a_turn_cut_in_its_reasoning_is_compared_from_its_end_on() -> None:
    family = FAMILIES["qwen_thinking"]
    tokenizer = family.tokenizer()
    renderer = TemplateRenderer(tokenizer)
    case = after_turn(renderer, tokenizer, FOUR_WORDS, "<think>\nI wonder")
    assert case.bridge.closing is Closing.REASONING
    assert audit_bridge(renderer, case).outcome is AuditOutcome.MATCH
    assert audit_bridge(renderer, without_id(case, 0)).outcome is AuditOutcome.MATCH  # of the closing
    assert audit_bridge(renderer, without_id(case, -1)).outcome is AuditOutcome.MISMATCH


@pytest.mark.parametrize("where", SEEN_BY_NO_PANEL)
def test_a_dependence_that_the_panel_cannot_see_is_found_where_it_shows(where: str) -> None:
    tokenizer = make_tokenizer(SEEN_BY_NO_PANEL[where])
    renderer = TemplateRenderer(tokenizer)
    for history, outcome in ((FOUR_WORDS, AuditOutcome.MATCH), (NINE_WORDS, AuditOutcome.MISMATCH)):
        case = after_turn(renderer, tokenizer, history, "ok<|im_end|>")
        assert audit_bridge(renderer, case).outcome is outcome


def test_a_bridge_that_begins_after_the_turns_end_is_found_only_by_a_renderer_that_knows_the_ends() -> None:
    tokenizer = make_tokenizer(CHATML)
    renderer = TemplateRenderer(tokenizer)
    case = without_id(after_turn(renderer, tokenizer, FOUR_WORDS, "ok<|im_end|>"), 0)  # the newline that systems lose
    audit = audit_bridge(renderer, case)
    assert audit.outcome is AuditOutcome.MISMATCH
    assert "which does not end a turn" in audit.detail
    assert audit_bridge(Plain(renderer), case).outcome is AuditOutcome.MATCH


def without_id(case: UsedBridge, place: int) -> UsedBridge:
    bridge = case.bridge
    ids, indices = np.delete(bridge.bridge_ids, place), np.delete(bridge.message_indices, place)
    return replace(case, bridge=replace(bridge, bridge_ids=ids, message_indices=indices))


class Plain:
    """A renderer with the methods of the protocol only."""

    def __init__(self, renderer: Renderer) -> None:
        self.render = renderer.render
        self.get_stop_token_ids = renderer.get_stop_token_ids


TAIL = [USER, *encode("more"), END, NEWLINE, ASSISTANT]


@pytest.mark.parametrize(
    ("bridge", "outcome"),
    [
        (used([NEWLINE, *TAIL]), AuditOutcome.MATCH),
        (used([*TAIL]), AuditOutcome.MATCH),
        (used([9, *TAIL]), AuditOutcome.MISMATCH),
        (used([NEWLINE, *TAIL[:-1]]), AuditOutcome.MISMATCH),
        (used([END, NEWLINE, *TAIL], closing=Closing.TRUNCATED), AuditOutcome.MATCH),
        (used([9, 9, END, NEWLINE, *TAIL], closing=Closing.REASONING), AuditOutcome.MATCH),
        (used([9, 9, END, 9, *TAIL], closing=Closing.REASONING), AuditOutcome.MISMATCH),
        (used([NEWLINE], closing=Closing.TRUNCATED), AuditOutcome.NOT_COMPARABLE),
        (used([9] * 100), AuditOutcome.MISMATCH),
        (used([NEWLINE, *TAIL], messages=[*FOUR_WORDS, TURN, {"role": "nobody", "content": ""}]), None),
    ],
)
def test_the_last_ids_of_the_whole_rendering_decide(bridge: UsedBridge, outcome: AuditOutcome | None) -> None:
    if outcome is None:  # not a verdict on the messages, but a fault of the renderer: not an outcome
        with pytest.raises(KeyError):
            audit_bridge(FakeRenderer(), bridge)
    else:
        assert audit_bridge(FakeRenderer(), bridge).outcome is outcome


def test_the_first_id_that_differs_is_named_counted_from_the_end() -> None:
    audit = audit_bridge(FakeRenderer(), used([NEWLINE, USER, *encode("mare"), END, NEWLINE, ASSISTANT]))
    assert audit.detail == f"id 6 from the end of 9 is {ord('o')} in the whole rendering and {ord('a')} in the bridge"


def test_a_conversation_that_the_template_refuses_cannot_be_compared() -> None:
    class Refusing(FakeRenderer):
        def render(self, messages: Any, *, tools: Any = ()) -> Any:
            raise TemplateError("no such roles")

    audit = audit_bridge(Refusing(), used([OTHER_END]))
    assert audit.outcome is AuditOutcome.NOT_COMPARABLE
    assert audit.detail == "no such roles"


def test_what_is_revoked_is_refused_and_other_shapes_are_not() -> None:
    tokenizer = make_tokenizer(QWEN)
    renderer = TemplateRenderer(tokenizer)
    case = after_turn(renderer, tokenizer, FOUR_WORDS, "ok<|im_end|>")
    renderer.revoke_bridge(case.new_messages, assistant=case.assistant, detail="found wrong")
    stop = np.array(tokenizer.encode("<|im_end|>"), dtype=np.int32)
    answers = [
        renderer.bridge_to_next_turn(np.array([1]), stop, new, assistant=TURN, tools=tools)
        for new, tools in ((NEW, ()), ([*NEW, *NEW], ()), (NEW, [TOOL]))
    ]
    assert answers[0] == Refusal(reason=RefusalReason.FAILED_AUDIT, detail="found wrong")
    assert all(isinstance(answer, Bridge) for answer in answers[1:])


TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def test_a_renderer_without_a_bridge_has_nothing_to_revoke() -> None:
    renderer = TemplateRenderer(make_tokenizer("{{ messages[0].content }}"))
    renderer.revoke_bridge(NEW, assistant=TURN, detail="")
    assert renderer.get_turn_end_ids() == frozenset()


def test_the_ends_of_turns_hold_the_ones_that_no_model_samples() -> None:
    tokenizer = FAMILIES["stand_in"].tokenizer()
    renderer = TemplateRenderer(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end in renderer.get_turn_end_ids()
    assert end not in renderer.get_stop_token_ids()
    assert TemplateRenderer(make_tokenizer(CHATML)).get_turn_end_ids() == {
        make_tokenizer(CHATML).convert_tokens_to_ids("<|im_end|>")
    }
