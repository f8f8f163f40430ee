"""The class of a template, and what it does not carry."""

import pytest

from support import templates
from support.audits import subject_of
from unbroken.audit.checks.bridges import find_bridges
from unbroken.audit.checks.template import find_kind, find_max_calls, find_traits
from unbroken.audit.config import AuditConfig
from unbroken.audit.report import KindFinding, TemplateKind, Trait

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
ONE_CALL = templates.QWEN.replace("{%- for call in message.tool_calls or [] -%}", (
    "{%- if message.tool_calls and message.tool_calls|length > 1 -%}{{- raise_exception('one call only') -}}"
    "{%- endif -%}{%- for call in message.tool_calls or [] -%}"
))  # fmt: skip


def kind_of(source: str) -> KindFinding:
    subject = subject_of(source)
    traits = find_traits(subject)
    fuzz = find_bridges(subject, AuditConfig(num_conversations=30), max_calls=find_max_calls(traits))
    return find_kind(subject, traits, fuzz)


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
    assert kind_of(source).kind is kind


def test_what_a_template_refuses_is_reported() -> None:
    traits = find_traits(subject_of(REFUSING))
    assert {Trait.REFUSES_RESULTS, Trait.REFUSES_LATE_SYSTEM, Trait.RENDERS_NO_CALLS, Trait.IGNORES_TOOLS} <= set(
        traits
    )
    assert Trait.REFUSES_SYSTEM not in traits
    assert find_max_calls(traits) == 0


def test_a_template_that_carries_everything_has_no_traits_but_reasoning() -> None:
    traits = find_traits(subject_of(templates.QWEN))
    assert traits == (Trait.RENDERS_NO_REASONING,)
    assert find_max_calls(traits) == 3


def test_a_template_of_one_call_refuses_parallel_ones() -> None:
    traits = find_traits(subject_of(ONE_CALL))
    assert Trait.REFUSES_PARALLEL_CALLS in traits
    assert find_max_calls(traits) == 1


def test_a_template_that_refuses_everything_is_quoted() -> None:
    found = kind_of("{{ raise_exception('not today') }}<|im_end|>")
    assert found.kind is TemplateKind.UNDERIVABLE
    assert "not today" in found.detail
