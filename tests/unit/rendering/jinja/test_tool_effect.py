"""What of the tools a template may write after a turn is found, and where nothing is found, nothing is written (I1)."""

from datetime import datetime

import pytest

from support.corpus import corpus_templates
from support.templates import CHATML, TOOLS_IN_LAST_QUESTION
from unbroken.rendering.bridge.builder import BridgeBuilder
from unbroken.rendering.bridge.certificates.probe_window import ProbeWindow
from unbroken.rendering.bridge.certificates.tool_panel import build_tool_sets
from unbroken.rendering.bridge.histories.history_class import ANY_HISTORY
from unbroken.rendering.bridge.histories.panel import build_history
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.shapes import BridgeShape, NewMessageShape, ShapeExample
from unbroken.rendering.bridge.window import TextKind
from unbroken.rendering.jinja.environment import TemplateEnvironment
from unbroken.rendering.jinja.tool_effect import find_tool_effect
from unbroken.rendering.jinja.tool_expressions import ToolEffect
from unbroken.rendering.message_format import PROBE_TOOLS
from unbroken.rendering.template import TemplateRenderer

LOOP = "{%- for m in messages -%}{{- m.role + m.content + '<|im_end|>' -}}{%- endfor -%}"
WRITE = "{{- tools | tojson -}}"
NOTHING = {
    "never read": CHATML,
    "written first": f"{{%- if tools -%}}{WRITE}{{%- endif -%}}{LOOP}",
    "written with the first message": "{{- messages[0].content -}}" + WRITE + LOOP,
    "with all system messages": "{%- for m in messages -%}{%- if m.role == 'system' -%}{{- m.content -}}{%- endif -%}"
    "{%- endfor -%}" + WRITE + LOOP,
    "with a system message that is kept": "{%- set ns = namespace(s='') -%}"
    "{%- for m in messages if m['role'] in ['system'] -%}{%- set ns.s = ns.s + m.content -%}{%- endfor -%}"
    "{{- ns.s + (tools | tojson) -}}" + LOOP,
    "by a macro that writes calls, too": "{%- macro show(x) -%}{{- x | tojson -}}{%- endmacro -%}{{- show(tools) -}}"
    "{%- for m in messages -%}{{- m.content + show(m.tool_calls) -}}{%- endfor -%}",
    "variables of loops with the same name": "{%- for x in tools -%}{%- set y = x.name -%}{{- y -}}{%- endfor -%}"
    "{%- for x in messages -%}{%- set y = x.content -%}{{- y -}}{%- endfor -%}",
    "an error": LOOP + "{%- if tools and tools | length > 9 -%}{{- raise_exception('too many') -}}{%- endif -%}",
}
PRESENCE = {
    "a condition after the turns": LOOP + "{%- if tools -%}{{- 'call' -}}{%- endif -%}",
    "tools in another condition": LOOP
    + "{%- if tools is not none and tools | length > 0 -%}{{- 'call' -}}{%- endif -%}",
    "kept in a namespace": "{%- set ns = namespace(x=false) -%}{%- if tools -%}{%- set ns.x = true -%}{%- endif -%}"
    + LOOP
    + "{{- 'call' if ns.x -}}",
    "left early": "{%- for m in messages -%}{%- if not tools -%}{%- break -%}{%- endif -%}"
    "{{- m.content -}}{%- endfor -%}",
}
ANYTHING = {
    "in the last question": TOOLS_IN_LAST_QUESTION,
    "in each question, which is written before any turn": "{%- for m in messages -%}{%- if m.role == 'user' -%}"
    + WRITE
    + "{{- m.content -}}{%- else -%}{{- m.content -}}{%- endif -%}{%- endfor -%}",
    "a number": LOOP + "{%- if tools and tools | length > 3 -%}{{- 'many' -}}{%- endif -%}",
    "a name in a variable": "{%- set name = tools[0].function.name if tools else '' -%}" + LOOP + "{{- name -}}",
    "a variable that is set under a condition": "{%- if tools[0].name == 'x' -%}{%- set y = 1 -%}{%- endif -%}"
    + LOOP
    + "{{- y -}}",
    "kept by a macro": "{%- set ns = namespace(x='') -%}{%- macro keep(space) -%}{%- set space.x = tools[0].name -%}"
    "{%- endmacro -%}{{- keep(ns) -}}" + LOOP + "{{- ns.x -}}",
    "a macro without arguments": "{%- macro show() -%}" + WRITE + "{%- endmacro -%}" + LOOP + "{{- show() -}}",
    "a captured text": "{%- set text -%}" + WRITE + "{%- endset -%}" + LOOP + "{{- text -}}",
    "a loop over tools": LOOP + "{%- for t in tools -%}{{- '.' -}}{%- endfor -%}",
    "a loop that tools end": "{%- for m in messages -%}{%- for t in tools -%}{%- if t.x -%}{%- break -%}{%- endif -%}"
    "{{- '.' -}}{%- endfor -%}{{- m.content -}}{%- endfor -%}",
    "turns that a macro writes": "{%- macro all() -%}{%- for m in messages -%}{{- m.content -}}{%- endfor -%}"
    "{%- endmacro -%}{{- all() -}}" + WRITE,
    "turns in a variable": "{%- set turns -%}" + LOOP + "{%- endset -%}{{- turns + (tools | tojson) -}}",
    "a part of the messages": "{{- messages[1].content -}}" + WRITE + LOOP,
    "other messages": "{%- set messages = messages[1:] -%}{{- messages[0].content -}}" + WRITE + LOOP,
    "the next message": "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- loop.nextitem.content -}}"
    + WRITE
    + "{%- endif -%}{%- endfor -%}",
    "a block": "{%- block all -%}" + LOOP + "{%- endblock -%}" + WRITE,
    "a joiner": "{%- set sep = joiner(', ') -%}{%- if tools -%}{{- sep() -}}{%- endif -%}" + LOOP + "{{- sep() -}}",
    "what changes in a loop": "{%- for m in messages -%}{{- 'x' if loop.changed(tools) -}}{{- m.content -}}"
    "{%- endfor -%}",
    "a namespace in a variable": "{%- set ns = namespace(x=0) -%}{%- set other = ns -%}{%- set other.x = tools -%}"
    + LOOP
    + "{{- ns.x -}}",
}


def find(source: str) -> ToolEffect:
    return find_tool_effect(TemplateEnvironment(now=datetime(2026, 1, 1)).parse(source))


@pytest.mark.parametrize("case", NOTHING)
def test_tools_that_are_written_before_the_turns_change_nothing_after_them(case: str) -> None:
    assert find(NOTHING[case]) is ToolEffect.NOTHING


@pytest.mark.parametrize("case", PRESENCE)
def test_a_condition_on_tools_after_a_turn_is_an_effect_of_their_presence(case: str) -> None:
    assert find(PRESENCE[case]) is ToolEffect.PRESENCE


@pytest.mark.parametrize("case", ANYTHING)
def test_whatever_else_reaches_the_text_after_a_turn_is_an_effect_of_anything(case: str) -> None:
    assert find(ANYTHING[case]) is ToolEffect.ANYTHING


def test_i1_tools_without_an_effect_change_no_window_of_any_template_of_the_corpus() -> None:
    shapes = [
        BridgeShape(num_calls=0, text=TextKind.WORDS, new_messages=(new_message("user"),)),
        BridgeShape(num_calls=1, text=TextKind.EMPTY, new_messages=(new_message("tool"),)),
    ]
    effects = []
    for template in corpus_templates():
        builder = TemplateRenderer(template.tokenizer())._bridges
        if not isinstance(builder, BridgeBuilder):
            continue
        certifier = builder._certificates._certifier
        effects.append(certifier._tool_effect)
        if certifier._tool_effect is ToolEffect.ANYTHING or "tools" not in template.source:
            continue
        sets = (*build_tool_sets(certifier._literals, certifier._integers), PROBE_TOOLS)
        sets = ((), *sets) if certifier._tool_effect is ToolEffect.NOTHING else sets
        for shape in shapes:
            texts = set()
            for tools in sets:
                try:
                    window = ProbeWindow(
                        certifier._windows, ShapeExample.build(shape), tools=tools, history_class=ANY_HISTORY
                    )
                    window.check_conversation(build_history("suctaau"), window.turn, description="a history")
                except BridgeRefusedError:
                    continue
                texts.add(window.bridge_text)
            assert len(texts) <= 1, (template.name, shape)
    assert effects.count(ToolEffect.ANYTHING) < len(effects) / 10


def new_message(role: str) -> NewMessageShape:
    keys = frozenset({"name", "tool_call_id"}) if role == "tool" else frozenset[str]()
    return NewMessageShape(role=role, answered_call=0 if keys else -1, keys=keys)
