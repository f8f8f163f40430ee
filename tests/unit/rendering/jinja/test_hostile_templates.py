"""Templates that take too long, too much, or what is not theirs: an error soon, and the process goes on."""

import random
import time
from datetime import datetime
from pathlib import Path

import jinja2
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from support.conversations import TOOLS, random_conversation
from support.corpus import corpus_templates
from support.templates import CHATML, LOOKS_UP_NAMES_BY_ID, QWEN
from unbroken.errors import InvalidInputError, TemplateError
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.jinja.limits import TemplateLimits

USER = [{"role": "user", "content": "hi"}]
SMALL = TemplateLimits(timeout_s=5, num_steps=50_000, num_characters=200_000, num_characters_made=2_000_000)
LATEST_S = 5.0
"""A loaded machine takes longer than the milliseconds that these errors need."""


def _doubling(statement: str) -> str:
    return "{% set x = 'abcdefgh' %}" + statement * 60 + "{{ x | length }}"


ENDLESS = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that skip all": "{% for i in range(99999) %}{% for j in range(99999) if false %}.{% endfor %}{% endfor %}",
    "macros that call themselves twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "filters over ranges": "{% for i in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "calls that call twice": (
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 17 + "{% endcall %}" * 17
    ),
}
HUGE = {
    # What is not checked before it is made is a MemoryError here, and no error of a limit.
    "a product": "{{ 'x' * 10 ** 12 }}",
    "a product, the number first": "{{ 10 ** 12 * 'x' }}",
    "a list": "{{ ([1] * 10 ** 12) | length }}",
    "a number": "{{ 7 ** (10 ** 12) > 1 }}",
    "a number, squared again and again": "{% set x = 7 %}" + "{% set x = x * x %}" * 60 + "{{ x > 1 }}",
    "~": _doubling("{% set x = x ~ x %}"),
    "+": _doubling("{% set x = x + x %}"),
    "a block": _doubling("{% set x %}{{ x }}{{ x }}{% endset %}"),
    "%": _doubling("{% set x = '%s%s' % (x, x) %}"),
    "format": _doubling("{% set x = '{0}{0}'.format(x) %}"),
    "join": _doubling("{% set x = [x, x] | join %}"),
    "join of an attribute": _doubling("{% set x = [{'a': x}, {'a': x}] | join(attribute='a') %}"),
    "the method join": _doubling("{% set x = ''.join([x, x]) %}"),
    "replace": _doubling("{% set x = x | replace('a', x) %}"),
    "the method replace": _doubling("{% set x = x.replace('a', x) %}"),
    "sum": "{% set x = [1] %}" + "{% set x = [x, x] | sum(start=[]) %}" * 60 + "{{ x | length }}",
    "lists of lists": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "equal lists of lists": ("{% set x, y = [1], [1] %}" + "{% set x, y = [x, x], [y, y] %}" * 60 + "{{ x == y }}"),
    "objects of objects": "{% set x = 1 %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x }}",
    "tuples of tuples as a key": (
        "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}"
    ),
    "center": "{{ 'a' | center(10 ** 12) }}",
    "center, all constant": "{{ 'a' | center(1000000000000) }}",
    "ljust": "{{ 'a'.ljust(10 ** 12) }}",
    "zfill": "{{ 'a'.zfill(10 ** 12) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 12) }}",
    "indent by name": "{{ 'a\nb' | indent(width=10 ** 12) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 12) }}",
    "a width in %": "{{ '%1000000000000d' % 1 }}",
    "a width beside %": "{{ '%*d' % (10 ** 12, 1) }}",
    "a width in the filter format": "{{ '%1000000000000d' | format(1) }}",
    "a width in format": "{{ '{:1000000000000}'.format(1) }}",
    "a width beside format": "{{ '{:{}}'.format(1, 10 ** 12) }}",
    "a width in format_map": "{{ '{a:1000000000000}'.format_map({'a': 1}) }}",
    "a width in format by attr": "{{ ('{:1000000000000}' | attr('format'))(1) }}",
    "an indent of JSON": "{{ [1] | tojson(indent=10 ** 12) }}",
    "batch": "{{ [1] | batch(10 ** 12, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 12) | list }}",
    "round": "{{ 1 | round(-(10 ** 12)) }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 12, 'big') }}",
    "translate": "{{ ('a' * 10 ** 5).translate({97: 'b' * 10 ** 5}) }}",
    "text in a loop in a block": "{% set x %}{% for i in range(9999) %}" + "y" * 9999 + "{% endfor %}{% endset %}",
    "text in a loop": "{% for i in range(9999) %}" + "y" * 9999 + "{% endfor %}",
    "many slices": "{% set x = 'x' * 10 ** 5 %}" + "".join(f"{{% set x{i} = x[{i}:] %}}" for i in range(50)),
    "many lists": "{% set x = 'x' * 10 ** 5 %}" + "".join(f"{{% set x{i} = x | list %}}" for i in range(50)),
    "a search from the right": "{{ ('a' * 10 ** 5).rfind('b' + 'a' * 90000) }}",
    "a strip of many characters": "{{ ('a' * 10 ** 5).strip('b' * 90000 + 'a') }}",
    "tags that are stripped": "{{ ('<!-- -->' * 20000) | striptags }}",
    "a date": "{{ strftime_now('%Y' * 90000) }}",
}
ESCAPES = {
    "a class": "{{ ''.__class__.__mro__ }}",
    "a class by attr": "{{ '' | attr('__class__') }}",
    "a class by item": "{{ ''['__class__'] }}",
    "a class by map": "{{ [''] | map(attribute='__class__') | list }}",
    "a class by format": "{{ '{0.__class__}'.format('') }}",
    "mro": "{{ ''.__class__.mro() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a class": "{{ namespace.__init__.__globals__ }}",
    "the clock's insides": "{{ strftime_now._now }}",
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


def _assert_process_goes_on() -> None:
    assert ChatTemplate(CHATML, {}).render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize("name", [*ENDLESS, *HUGE])
def test_a_template_without_end_or_measure_is_an_error_when_it_is_loaded(name: str) -> None:
    start = time.perf_counter()
    with pytest.raises(TemplateError, match=r"goes over a limit.*It is not run again: mend it"):
        ChatTemplate({**ENDLESS, **HUGE}[name], {}, limits=SMALL)
    assert time.perf_counter() - start < LATEST_S
    _assert_process_goes_on()


@pytest.mark.parametrize("name", ["~", "+", "a product", "%", "a block", "center", "lists of lists"])
def test_the_default_limits_hold_a_template_as_well(name: str) -> None:
    start = time.perf_counter()
    with pytest.raises(TemplateError, match="goes over a limit"):
        ChatTemplate(HUGE[name], {})
    assert time.perf_counter() - start < LATEST_S


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
    _assert_process_goes_on()


@pytest.mark.parametrize("name", DOES_NOT_COMPILE)
def test_a_template_that_does_not_compile_is_an_error_soon(name: str) -> None:
    start = time.perf_counter()
    with pytest.raises(TemplateError, match=r"does not compile|must have at most 100000 characters"):
        ChatTemplate(DOES_NOT_COMPILE[name], {})
    assert time.perf_counter() - start < LATEST_S
    _assert_process_goes_on()


def test_a_template_over_a_limit_is_not_run_again() -> None:
    template = ChatTemplate(CHATML + "{% if messages | length > 1 %}" + ENDLESS["loops in loops"] + "{% endif %}", {})
    with pytest.raises(TemplateError, match="TemplateLimits"):
        template.render(USER * 2, add_generation_prompt=False)
    start = time.perf_counter()
    with pytest.raises(TemplateError, match="It is not run again"):
        template.render(USER, add_generation_prompt=False)
    assert time.perf_counter() - start < 0.1


def test_a_conversation_that_is_too_long_for_the_limits_does_not_condemn_its_template() -> None:
    template = ChatTemplate(CHATML, {}, limits=TemplateLimits(num_characters=300_000))
    with pytest.raises(TemplateError, match="Shorten them, or raise the limit"):
        template.render([{"role": "user", "content": "x" * 400_000}], add_generation_prompt=False)
    assert template.render(USER, add_generation_prompt=False)


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
        for seed in range(12):
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
    assert num_same > 900


def _in_parts(messages: list) -> list:
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def _rendered(template: jinja2.Template, messages: list) -> str | None:
    try:
        return template.render(
            messages=messages, tools=list(TOOLS), documents=None, add_generation_prompt=True, bos_token="<s>"
        )
    except Exception:
        return None


@pytest.mark.parametrize(
    "expression",
    [
        "'a' + 'b' + x + 'c' + 'd'",
        "1 + 2 + x | length",
        "[1] + [2] + [x]",
        "'a' ~ 1 ~ none ~ nothing ~ [x]",
        "('<' | e) + '<' + x",
        "'<' + ('<' | e) ~ '<'",
        "[1, 2.5, 'a'] | join('-')",
        "[{'a': 1}, {'a': x}] | join(', ', attribute='a')",
        "'-'.join([x, 'b'])",
        "'%s %5.1f%%' % (x, 2)",
        "'{0:>8} {b}'.format(x, b=2)",
        "x | indent(2, true)",
        "x[::-1] ~ x[1:] ~ [1, 2, 3][1:]",
        "[3, 1, 2] | sum ~ [[1], [2]] | sum(start=[])",
        "{'b': 1, 'a': [x]} | tojson(indent=2) ~ {'b': '<é>'} | tojson(ensure_ascii=true)",
        "2 ** 8 * 3 % 7 ~ 'ab' * 3 ~ [1] * 2",
        "x.replace('l', 'LL', 1) ~ x | replace('l', 'LL')",
        "(x | batch(2, '-') | list) ~ (x | slice(2) | map('join') | list)",
        "1.25 | round(1) ~ '12' | int ~ 'ff' | int(base=16)",
        "x.split('l') ~ x.center(9) ~ x | center(9) ~ x.rsplit('l', 1) ~ x.strip('h')",
    ],
)
def test_operations_under_a_budget_give_what_they_give_without_one(expression: str) -> None:
    source = "{% set x = 'hello' %}{% set y %}<{{ " + expression + " }}>{% endset %}{{ y }}{{ " + expression + " }}"
    expected = _compile_jinja_template(source).render()
    assert ChatTemplate(source, {}).render(USER, add_generation_prompt=False) == expected


def test_a_template_is_told_one_time_always() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M:%S') }}", {}, now=datetime(2026, 2, 3, 4, 5, 6))
    assert template.render(USER, add_generation_prompt=False) == "03 Feb 2026 04:05:06"
    clock = ChatTemplate("{{ strftime_now('%f') }}", {})
    texts = {clock.render(USER, add_generation_prompt=False) for _ in range(20)}
    assert len(texts) == 1


def test_limits_must_be_positive() -> None:
    with pytest.raises(InvalidInputError, match=r"TemplateLimits.num_steps must be positive, got 0"):
        TemplateLimits(num_steps=0)
