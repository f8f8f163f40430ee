"""Each finding, over templates for which the answer is known."""

import functools
import json
from dataclasses import replace
from typing import Any

import pytest

from support import templates
from support.audits import CHATML_WITH_TOOLS, subject_of
from unbroken.audit.config import AuditConfig
from unbroken.audit.output import make_report
from unbroken.audit.report import AuditReport, TemplateKind, Trait
from unbroken.audit.run import run_audit
from unbroken.audit.subject import Subject
from unbroken.rendering.template import TemplateRenderer
from unbroken.retokenising.changes import IdOrigin
from unbroken.viewer.reports import SideBySide

SORTED = templates.QWEN.replace(
    "call.function.arguments | tojson", "call.function.arguments | dictsort | list | string"
)
SEPARATED = templates.QWEN.replace("arguments | tojson", "arguments | tojson(separators=(',', ':'))")
REFUSING = """\
{%- for message in messages -%}
  {%- if message.role == 'tool' or (message.role == 'system' and not loop.first) -%}
    {{- raise_exception('only user and assistant') -}}
  {%- endif -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
WITHOUT_END = """\
{%- for message in messages -%}{{- message.role + ': ' + message.content + '\\n' -}}{%- endfor -%}
"""
NUMBERED = templates.CHATML.replace("'<|im_start|>'", "loop.index | string + '<|im_start|>'")
FORGETFUL = templates.CHATML.replace(
    "message.role +", "('earlier ' if message.role == 'user' and not loop.last else '') + message.role +"
)
MOVED_BY_SYSTEM = templates.CHATML.replace(
    "{%- for message in messages -%}",
    "{{- '' if messages | selectattr('role', 'equalto', 'system') | list else 'No instructions.' -}}"
    "{%- for message in messages -%}",
)
ONE_CALL = templates.QWEN.replace(
    "{%- for call in message.tool_calls or [] -%}",
    (
        "{%- if message.tool_calls and message.tool_calls|length > 1 -%}{{- raise_exception('one call only') -}}"
        "{%- endif -%}{%- for call in message.tool_calls or [] -%}"
    ),
)


@functools.cache
def audit(source: str, control_tokens: tuple[str, ...] = ()) -> AuditReport:
    return audit_subject(subject_of(source, control_tokens=control_tokens))


def audit_subject(subject: Subject) -> AuditReport:
    return run_audit(subject, AuditConfig(num_conversations=30))


def list_unchanged(shown: SideBySide) -> list[str]:
    return ["".join(token.text for token in each if not token.is_changed) for each in (shown.exact, shown.retokenised)]


def test_concatenation_loses_the_line_break_after_the_end_of_a_turn() -> None:
    text, calls = audit(CHATML_WITH_TOOLS).boundaries
    for boundary in (text, calls):
        assert boundary.outcome == "different"
        assert [token.text for token in boundary.lost] == ["\n"]
        assert boundary.added == ()


def test_concatenation_adds_a_default_system_message() -> None:
    boundary, _ = audit(templates.QWEN).boundaries
    assert "".join(token.text for token in boundary.added).startswith("<|im_start|>system\nYou are helpful.")


def test_concatenation_loses_nothing_where_the_end_is_one_token() -> None:
    bare = "{% for m in messages %}<|start|>{{ m.role }}<|text|>{{ m.content }}<|end|>{% endfor %}{% if "
    bare += "add_generation_prompt %}<|start|>assistant<|text|>{% endif %}"
    (boundary,) = audit(bare).boundaries
    assert boundary.outcome == "same"


def test_i7_a_cut_turn_gets_its_end_and_a_cut_reasoning_its_closing_first() -> None:
    found = audit(templates.QWEN_THINKING).turn_ends
    given = {closed.how: "".join(token.text for token in closed.given) for closed in found.closed}
    assert given["cut by length in its answer"] == "<|im_end|>"
    assert given["cut by length in its reasoning"] == "\n</think>\n\n<|im_end|>"
    assert given["ended by <|endoftext|>"] == "<|im_end|>"
    assert [token.text for token in found.ends] == ["<|im_end|>"]
    assert {token.text for token in found.stops} == {"<|im_end|>", "<|endoftext|>"}


def test_headers_that_end_turns_are_distinguished_from_ends() -> None:
    found = audit(templates.GLM, tuple(templates.GLM_CONTROL_TOKENS)).turn_ends
    assert found.are_headers
    assert {"<|user|>", "<|observation|>"} <= {token.text for token in found.ends}


@pytest.mark.parametrize(("source", "kept"), [(templates.QWEN, "spaced"), (SEPARATED, "compact")])
def test_arguments_are_rewritten_to_the_templates_own_style(source: str, kept: str) -> None:
    found = audit(source).arguments
    assert found.is_json
    by_name = {spelling.name: spelling for spelling in found.spellings}
    other = by_name[{"spaced": "compact", "compact": "spaced"}[kept]]
    assert by_name[kept].is_kept
    assert not other.is_kept
    assert json.loads(other.rendered) == json.loads(other.sampled)
    assert other.rendered == by_name[kept].sampled
    assert not by_name["exponent"].is_kept


def test_arguments_in_other_markup_are_no_json() -> None:
    assert not audit(SORTED).arguments.is_json
    assert not audit(templates.CHATML).arguments.is_json


def test_i5_a_tools_text_forges_control_tokens_naively_and_not_with_us() -> None:
    subject = subject_of(templates.QWEN)
    found = audit_subject(subject).forgery
    assert found.role == "tool"
    assert found.num_tried == len(subject.facts.control_tokens.ids)
    assert found.num_forged_naively == found.num_tried >= 5
    assert found.num_forged_by_us == found.num_refused_by_us == 0
    assert "<|im_end|>" in found.examples


def test_drift_counts_changed_sequences_and_ids() -> None:
    found = audit(templates.CHATML).drift
    assert (found.num_sequences, found.num_ids) == (200, 200 * 32)
    assert 180 < found.num_sequences_changed <= 200
    assert 0 < found.num_ids_changed < found.num_ids


def test_the_round_trip_of_a_parser_that_fits_is_whole() -> None:
    found = audit(templates.QWEN_THINKING).round_trip
    assert found.parser == "hermes"
    assert (found.num_same, found.num_not_comparable, found.differences) == (found.num_turns, 0, {})


def test_a_generation_prompt_that_is_always_written_is_no_part_of_a_turn() -> None:
    always = templates.QWEN.replace("{%- if add_generation_prompt -%}", "{%- if true -%}")
    found = audit(always).round_trip
    assert (found.num_same, found.num_not_comparable, found.differences) == (found.num_turns, 0, {})


def test_a_parser_that_does_not_fit_is_reported() -> None:
    renamed = templates.QWEN.replace('{"name": ', '{"title": ')
    assert subject_of(renamed).template_renderer.parser_name == "none"
    subject = subject_of(renamed)
    renderer = TemplateRenderer(subject.tokenizer, parser="hermes")
    found = audit_subject(replace(subject, renderer=renderer)).round_trip
    assert found.differences["calls"] == found.num_turns * 3 // 4
    assert found.num_same == found.num_turns // 4
    assert "missing_name" in found.example


def test_side_by_side_marks_respelled_json_a_split_word_and_nothing_else() -> None:
    shown = audit(CHATML_WITH_TOOLS).side_by_side
    assert shown.missing == ""
    assert len(shown.notes) == 3
    found = shown.sides
    assert found is not None
    assert "".join(token.text for token in found.exact).count('{"query":"library hours","limit":3}') == 1
    assert "".join(token.text for token in found.retokenised).count('{"query": "library hours", "limit": 3}') == 1
    assert 2 <= sum(token.is_changed for token in found.exact) <= 12
    exact, retokenised = list_unchanged(found)
    assert exact == retokenised
    assert {token.origin for token in found.exact} == set(IdOrigin)


def test_i7_side_by_side_the_end_of_a_cut_turn_is_given() -> None:
    sides = audit(CHATML_WITH_TOOLS).side_by_side.sides
    assert sides is not None
    ends = [token.origin for token in sides.exact if token.text == "<|im_end|>"]
    assert ends.count(IdOrigin.SAMPLED) == 2
    assert IdOrigin.BRIDGE in ends


def test_side_by_side_says_why_there_is_nothing_to_show() -> None:
    found = audit("{% for m in messages %}{{ m.content }}{% endfor %}").side_by_side
    assert found.sides is None
    assert found.missing


class OtherSpaces(TemplateRenderer):
    """A renderer whose text is not the template's."""

    def render_text(self, *args: Any, **kwargs: Any) -> str:
        return super().render_text(*args, **kwargs).replace("\n", " ")


def test_our_rendering_is_compared_with_transformers() -> None:
    found = audit(templates.QWEN_THINKING).rendering
    assert found.num_same == found.num_compared == 30
    subject = subject_of(templates.QWEN_THINKING)
    report = audit_subject(replace(subject, template_renderer=OtherSpaces(subject.tokenizer)))
    assert (report.rendering.num_same, report.rendering.num_compared) == (0, 30)
    assert "transformers' " in report.rendering.example
    assert "rendered differently than by transformers" in report.sentence


def test_options_that_a_template_never_reads_are_found() -> None:
    source = templates.CHATML + "{% if enable_thinking %}x{% endif %}{{ strftime_now('%Y') }}"
    subject = subject_of(source, options={"enable_thinking": True, "enable_thinkin": True})
    assert subject.find_unread_options() == ("enable_thinkin",)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (templates.CHATML, TemplateKind.APPEND_ONLY),
        (templates.QWEN, TemplateKind.APPEND_ONLY),
        (templates.QWEN_THINKING, TemplateKind.STRIPS_REASONING_ON_USER),
        (WITHOUT_END, TemplateKind.UNDERIVABLE),
        (NUMBERED, TemplateKind.REWRITES_HISTORY),
        (FORGETFUL, TemplateKind.REWRITES_HISTORY),
        (MOVED_BY_SYSTEM, TemplateKind.APPEND_ONLY),
    ],
)
def test_the_class_says_what_happens_to_history(source: str, kind: TemplateKind) -> None:
    assert audit(source).kind.kind is kind


def test_what_a_template_refuses_is_reported() -> None:
    report = audit(REFUSING)
    refused = {Trait.REFUSES_RESULTS, Trait.REFUSES_LATE_SYSTEM, Trait.RENDERS_NO_CALLS, Trait.IGNORES_TOOLS}
    assert refused <= set(report.kind.traits)
    assert Trait.REFUSES_SYSTEM not in report.kind.traits
    assert [boundary.situation for boundary in report.boundaries] == ["text, then a user message"]
    assert report.forgery.role == "user", "nothing with calls is tried"


def test_a_template_that_carries_everything_has_no_traits_but_reasoning() -> None:
    assert audit(templates.QWEN).kind.traits == (Trait.RENDERS_NO_REASONING,)


def test_a_template_of_one_call_refuses_parallel_ones() -> None:
    report = audit(ONE_CALL)
    assert Trait.REFUSES_PARALLEL_CALLS in report.kind.traits
    assert report.fuzz.not_accepted == {}, "no turn with several calls is tried"


def test_a_template_that_refuses_everything_is_quoted() -> None:
    found = audit("{{ raise_exception('not today') }}<|im_end|>").kind
    assert found.kind is TemplateKind.UNDERIVABLE
    assert "not today" in found.detail


def test_calls_that_no_format_reads_back_are_a_warning_of_the_audit() -> None:
    report = audit(templates.QWEN.replace("tool_call>", "do>"))
    assert "no format reads back" in report.round_trip.unread_calls
    assert f"warning: {report.round_trip.unread_calls}" in " ".join(make_report(report).to_text().split())
    assert audit(templates.QWEN).round_trip.unread_calls == ""
