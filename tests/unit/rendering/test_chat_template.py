"""Chat templates: the sandbox, refusals, limits, and the same text as transformers."""

import random
import time
from datetime import datetime
from pathlib import Path
from types import FunctionType

import jinja2
import pytest
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup
from transformers.utils.chat_template_utils import _compile_jinja_template

from support.conversations import TOOLS, random_conversation
from support.corpus import corpus_templates
from support.templates import CHATML, LOOKS_UP_NAMES_BY_ID, QWEN
from unbroken.errors import InvalidInputError, TemplateError
from unbroken.rendering.chat_template import ChatTemplate, TemplateEnvironment, TemplateLimitError, TemplateLimits

USER = [{"role": "user", "content": "hi"}]
MAX_COMPILE_S = 5.0
"""A loaded machine takes longer than the milliseconds that these errors need."""

ESCAPES = {
    "a class": "{{ ''.__class__.__mro__ }}",
    "a class by attr": "{{ '' | attr('__class__') }}",
    "a class by item": "{{ ''['__class__'] }}",
    "a class by map": "{{ [''] | map(attribute='__class__') | list }}",
    "a class by format": "{{ '{0.__class__}'.format('') }}",
    "mro": "{{ ''.__class__.mro() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a class": "{{ namespace.__init__.__globals__ }}",
    "the clock's insides": "{{ strftime_now.__closure__ }}",
    "a module": "{{ cycler.__init__.__globals__.os.popen('touch FILE') }}",
    "a module by lipsum": "{{ lipsum.__globals__['os'].popen('touch FILE').read() }}",
    "the context": "{{ self._TemplateReference__context }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a change of a message": "{{ messages[0].clear() }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "another template": "{% extends 'x' %}",
}
FAILS = {
    "an undefined variable": "{{ nothing.at.all }}",
    "raise_exception": "{{ raise_exception('not this') }}",
    "macros that call themselves": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop that calls itself": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a block that calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "a long range": "{{ range(10 ** 9) | list }}",
    "half of a surrogate pair": "{{ '\\ud800' }}\ud800",
}
DOES_NOT_COMPILE = {
    "no condition": "{% if %}",
    "no end": "{% for m in messages %}",
    "no such filter": "{{ 1 | nothing }}",
    "brackets in brackets": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "lists in lists": "{{ " + "[" * 30_000 + "]" * 30_000 + " }}",
    "minus minus": "{{ " + "-" * 50_000 + "1 }}",
    "a long difference": "{{ " + "-".join("1" * 30_000) + " }}",
    "a long chain of filters": "{{ a" + "|trim" * 15_000 + " }}",
    "if in if": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "for in for": "{% for i in [1] %}" * 300 + "{% endfor %}" * 300,
    "a long number": "{{ " + "9" * 20_000 + " }}",
    "megabytes": "x" * 3_000_000,
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_that_reaches_out_of_the_sandbox_is_refused_and_nothing_runs(name: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    template = ChatTemplate(ESCAPES[name].replace("FILE", str(touched)), {})
    messages = [dict(message) for message in USER]
    with pytest.raises(TemplateError, match="refuses these messages"):
        template.render(messages, add_generation_prompt=False)
    assert not touched.exists()
    assert messages == USER


@pytest.mark.parametrize("name", FAILS)
def test_a_template_that_fails_refuses_the_messages(name: str) -> None:
    with pytest.raises(TemplateError, match="refuses these messages"):
        ChatTemplate(FAILS[name], {}).render(USER, add_generation_prompt=False)


@pytest.mark.parametrize("name", DOES_NOT_COMPILE)
def test_a_template_that_does_not_compile_is_an_error_soon(name: str) -> None:
    start = time.process_time()
    with pytest.raises(TemplateError, match=r"does not compile|must have at most 100000 characters"):
        ChatTemplate(DOES_NOT_COMPILE[name], {})
    assert time.process_time() - start < MAX_COMPILE_S


@pytest.mark.parametrize(
    ("source", "most"),
    [
        ("{% for i in range(9999) %}" + "y" * 9999 + "{% endfor %}", TemplateLimits().max_output_characters),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}", 160_000),
        ("{{ 'x' * 10 ** 6 }}", 160_000),
    ],
    ids=["text in a loop", "loops in loops", "a product"],
)
def test_a_template_that_always_writes_too_much_is_an_error_when_it_is_loaded(source: str, most: int) -> None:
    with pytest.raises(TemplateLimitError, match=rf"writes more than {most} characters \(TemplateLimits"):
        ChatTemplate(source, {}, limits=TemplateLimits(max_output_characters=most))


def test_a_template_that_needs_more_memory_than_there_is_is_an_error_when_it_is_loaded() -> None:
    with pytest.raises(TemplateLimitError, match="more memory than there is"):
        ChatTemplate("{{ 'x' * 10 ** 17 }}", {})


def test_a_conversation_that_is_too_long_for_the_limits_is_an_error_and_the_next_one_is_rendered() -> None:
    template = ChatTemplate(CHATML, {}, limits=TemplateLimits(max_output_characters=300_000))
    with pytest.raises(TemplateLimitError, match="Shorten them, raise the limit"):
        template.render([{"role": "user", "content": "x" * 400_000}], add_generation_prompt=False)
    assert template.render(USER, add_generation_prompt=False)


def test_the_text_of_an_error_is_of_limited_length() -> None:
    template = ChatTemplate("{{ raise_exception('x' * 10 ** 6) }}", {})
    with pytest.raises(TemplateError) as raised:
        template.render(USER, add_generation_prompt=False)
    assert len(str(raised.value)) < 3_000


@pytest.mark.parametrize("source", [QWEN, LOOKS_UP_NAMES_BY_ID], ids=["qwen", "looks up names"])
def test_the_default_limits_admit_a_long_conversation(source: str) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    cycle = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "word " * 240},
    ]
    text = ChatTemplate(source, {}).render(USER + cycle * 200, tools=TOOLS, add_generation_prompt=True)
    assert len(text) > 240_000


def test_a_template_that_collects_its_text_is_within_the_default_limits() -> None:
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text + m.role + ': ' ~ m.content ~ '\n' %}{% endfor %}{{ ns.text }}"
    )
    messages = [{"role": "user", "content": "word " * 120}] * 400
    assert len(ChatTemplate(source, {}).render(messages, add_generation_prompt=True)) > 240_000


def test_every_template_of_the_corpus_is_rendered_as_transformers_does() -> None:
    num_same = 0
    for template in corpus_templates():
        ours, theirs = ChatTemplate(template.source, {"bos_token": "<s>"}), _compile_jinja_template(template.source)
        for seed in range(6):  # with and without calls, each as text and in parts
            conversation = random_conversation(random.Random(seed), has_calls=seed % 3 > 0)
            for messages in (conversation.history, [*conversation.history, conversation.assistant]):
                given = _in_parts(messages) if seed % 2 else messages
                expected = _rendered(theirs, given)
                if expected is None:
                    with pytest.raises(TemplateError):
                        ours.render(given, tools=TOOLS, add_generation_prompt=True)
                else:
                    assert ours.render(given, tools=TOOLS, add_generation_prompt=True) == expected, template.name
                    num_same += 1
    assert num_same > 450


def _in_parts(messages: list) -> list:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def _rendered(template: jinja2.Template, messages: list) -> str | None:
    try:
        return template.render(
            messages=messages, tools=list(TOOLS), documents=None, add_generation_prompt=True, bos_token="<s>"
        )
    except Exception:
        return None


def test_the_time_that_a_template_reads_does_not_change() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M:%S') }}", {}, now=datetime(2026, 2, 3, 4, 5, 6))
    assert template.render(USER, add_generation_prompt=False) == "03 Feb 2026 04:05:06"
    clock = ChatTemplate("{{ strftime_now('%f') }}", {})
    texts = {clock.render(USER, add_generation_prompt=False) for _ in range(20)}
    assert len(texts) == 1


def test_the_variables_that_a_template_reads_are_found() -> None:
    source = "{% set a = 1 %}{% for m in messages %}{{ a ~ m.content ~ enable_thinking }}{% endfor %}"
    assert ChatTemplate(source, {}).find_variables() == {"messages", "enable_thinking"}


def test_limits_must_be_positive() -> None:
    with pytest.raises(InvalidInputError, match=r"TemplateLimits.max_output_characters must be positive, got 0"):
        TemplateLimits(max_output_characters=0)


@pytest.mark.parametrize("value", ["text", Namespace(a=1), {}, []], ids=["text", "namespace", "dict", "list"])
def test_the_attributes_that_a_template_may_use_are_those_of_jinjas_sandbox(value: object) -> None:
    ours, jinjas = TemplateEnvironment(now=datetime(2026, 1, 1)), ImmutableSandboxedEnvironment()
    for attribute in (*dir(value), "a", "_a", "__a", "mro", "gi_frame"):
        assert ours.is_safe_attribute(value, attribute, None) == jinjas.is_safe_attribute(value, attribute, None)


class SubDict(dict[str, object]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        *("text", Markup("text"), {"a": 1, "items": 2, "_a": 3, "format": 4}, SubDict(a=1, items=2), {}),
        *([1], (1,), {1}, 1, None, range(3), Namespace(a=1, b="x".format, c=[].append, _d=4)),
        *((k for k in range(3)), len, "x".format, Undefined(name="x"), LoopContext([1, 2], Undefined)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("how", ["getattr", "getitem"])
def test_a_template_gets_what_jinjas_sandbox_gives_it_for_any_attribute_or_item(value: object, how: str) -> None:
    def look_up(environment: SandboxedEnvironment, attribute: object) -> object:
        try:
            found = getattr(environment, how)(value, attribute)
            if isinstance(found, Undefined):
                return str(found._undefined_exception), found._undefined_name, found._undefined_hint is None
            if type(found) is FunctionType:  # the sandbox's own `format`
                return "wrapped", found.__name__
        except (SecurityError, UndefinedError):
            return "refused"
        return type(found) if callable(found) or attribute == "cycle" else found

    ours, jinjas = TemplateEnvironment(now=datetime(2026, 1, 1)), RefusingSandbox()
    names = {*object.__dir__(value), *dir(str), *dir(dict), *dir(list), "a", "b", "c", "_a", "_d", "__a", "mro", "x"}
    items: list[object] = [] if how == "getattr" else [0, 5, -1, slice(1), None, [], True]
    for attribute in (*sorted(names), *items):
        assert look_up(ours, attribute) == look_up(jinjas, attribute), attribute


class RefusingSandbox(ImmutableSandboxedEnvironment):
    """Jinja's own, which refuses at once what an undefined value would refuse when it is used."""

    def unsafe_undefined(self, obj: object, attribute: str) -> Undefined:
        raise SecurityError(attribute)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}{{ f(1, 3, 4, k=5) }}",
        "{% macro f() %}{{ caller(1) }}{% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}",
        "{% for k in [1, 2] %}{% macro f() %}{{ k }}{% endmacro %}{{ f() }}{{ 'a-b'.split('-', 1) }}{% endfor %}",
        "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}{{ ns.c is defined }}",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{% autoescape true %}{{ f('<') }}{% endautoescape %}",
        "{% macro f(a, b=2, c=3) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }}{{ f(c=1, a=5) }}{{ f() is string }}",
        "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, a=2) }}",
        "{% for k in range(3, 0, -1) %}{{ k }}{{ range(k) | list }}{% endfor %}{{ range(1, 2, 3, 4) }}",
        "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}",
        "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(b=2) }}",
        "{{ {'a': 1}.get('b', 'none') }}{{ {'a': 1}.items() | list }}{{ 'x'.join(['a', 'b']) }}",
        "{% for k in [1, 2] %}{{ loop.index }}{{ loop.cycle('a', 'b') }}{{ loop.previtem }}{% endfor %}",
        "{{ '{} {x}'.format(1, x=2) }}{{ '%s' % 3 }}",
    ],
)
def test_a_call_in_a_template_gives_what_it_gives_in_jinjas_sandbox(source: str) -> None:
    def render(environment: SandboxedEnvironment) -> str:
        try:
            return environment.from_string(source).render()
        except TypeError as error:
            return str(error)

    assert render(TemplateEnvironment(now=datetime(2026, 1, 1))) == render(ImmutableSandboxedEnvironment())


def test_templates_of_one_source_have_a_time_and_variables_of_their_own():
    source = "{{ strftime_now('%Y') }} {{ name }}"
    templates = [
        ChatTemplate(source, {"name": name}, now=datetime(year, 1, 1)) for name, year in (("a", 1), ("b", 2000))
    ]
    assert [each.render([], add_generation_prompt=False).lstrip("0") for each in templates] == ["1 a", "2000 b"]
