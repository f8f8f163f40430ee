"""What a template reads of a conversation: each kind of read, and the ones that cannot reach a bridge."""

import pytest

from support.templates import CHATML, chatml_with
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.jinja.reads import Read, ReadKind, TemplateReads


def reads_of(condition: str) -> TemplateReads:
    """The reads of ChatML that writes something more before the generation prompt on this condition."""
    source = chatml_with(before_prompt=f"{{%- if {condition} -%}}{{{{- 'extra' -}}}}{{%- endif -%}}")
    return ChatTemplate(source, variables={"word": "given"}).reads()


@pytest.mark.parametrize(
    ("condition", "kind", "value"),
    [
        ("'/fast' in messages[0].content", ReadKind.TEXT, "/fast"),
        ("word in messages[0].content", ReadKind.TEXT, "given"),
        ("'/' ~ 'fast' in messages[0].content", ReadKind.TEXT, "/fast"),
        ("messages[0].content | length > 300", ReadKind.LENGTH, 300),
        ("messages | length > 9", ReadKind.COUNT, 9),
        ("messages[-1].role == 'developer'", ReadKind.ROLE, "developer"),
        ("messages[0].cache is defined", ReadKind.KEY, "cache"),
        ("messages[0].content.isdigit()", ReadKind.PREDICATE, "isdigit"),
        ("messages[0].content == messages[-1].content", ReadKind.EQUAL, None),
    ],
)
def test_a_condition_before_the_prompt_is_a_read(condition: str, kind: ReadKind, value: object) -> None:
    assert Read(kind, value) in reads_of(condition).of_history


@pytest.mark.parametrize(
    "condition",
    [
        "messages[0].content | wordcount > 9",
        "messages[0].content | replace('a', '') | length > 9",
        "messages[0].content < messages[-1].content",
        "messages[0].content.find('x') > 3",
    ],
)
def test_what_no_panel_can_vary_is_opaque(condition: str) -> None:
    assert reads_of(condition).has(ReadKind.OPAQUE)


def test_a_namespace_carries_a_read_out_of_a_loop() -> None:
    source = chatml_with(
        before_prompt="{%- set ns = namespace(on=false) -%}{%- for m in messages -%}{%- if '/fast' in m.content -%}"
        "{%- set ns.on = true -%}{%- endif -%}{%- endfor -%}{%- if ns.on -%}{{- 'fast' -}}{%- endif -%}"
    )
    assert Read(ReadKind.TEXT, "/fast") in ChatTemplate(source, variables={}).reads().of_history


def test_a_plain_template_reads_no_text() -> None:
    reads = ChatTemplate(CHATML, variables={}).reads()
    assert not [read for read in reads.of_history if read.kind in (ReadKind.TEXT, ReadKind.OPAQUE, ReadKind.LENGTH)]


LOOP = "{%- for m in messages -%}{{- m.role + m.content + '<|im_end|>' -}}{%- endfor -%}"
READ = "{%- if '/fast' in messages[0].content -%}{{- 'fast' -}}{%- endif -%}"


@pytest.mark.parametrize(
    "source",
    [
        "{%- macro turns() -%}" + LOOP + READ + "{%- endmacro -%}{{- turns() -}}",
        "{%- macro turns() -%}" + LOOP + "{%- endmacro -%}{{- turns() -}}" + READ,
        "{%- set turns -%}" + LOOP + READ + "{%- endset -%}{{- turns -}}",
        "{%- set turns -%}" + LOOP + "{%- endset -%}{{- turns -}}" + READ,
        "{%- filter trim -%}" + LOOP + "{%- endfilter -%}" + READ,
        "{%- set ns = namespace(turns='') -%}{%- for m in messages -%}{%- set ns.turns = ns.turns + m.content -%}"
        "{%- endfor -%}{{- ns.turns -}}" + READ,
        "{%- set turns = [] -%}{%- for m in messages -%}{%- set _ = turns.append(m.role + m.content) -%}{%- endfor -%}"
        "{{- turns | join('') -}}" + READ,
        "{%- set ns = namespace(turns=[]) -%}{%- for m in messages -%}{%- set _ = ns.turns.append(m.content) -%}"
        "{%- endfor -%}{{- ns.turns | join('') -}}" + READ,
        "{{- messages | map(attribute='content') | join('') -}}" + READ,
    ],
)
def test_turns_may_be_written_by_a_macro_or_from_a_variable(source: str) -> None:
    assert Read(ReadKind.TEXT, "/fast") in ChatTemplate(source, variables={}).reads().of_history


def test_what_is_written_before_the_turns_is_no_read() -> None:
    before = "{%- macro show(text) -%}{{- text -}}{%- endmacro -%}{{- show(messages[0].content) -}}"
    assert ChatTemplate(before + READ + LOOP, variables={}).reads().of_history == frozenset()
