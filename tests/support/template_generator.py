"""Random chat templates that do something unusual on a random condition, and conversations that meet it."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.messages import Message

EXTRA = "{{- '<|im_start|>system\\nextra<|im_end|>\\n' -}}"
LITERALS = ("/fast", "deep", "<note>", "yes", "Q", "go on", "stop_here", "[x]")
OPTION = "opt_word"
ROLES = ("user", "assistant", "tool", "system", "developer")
KEYS = ("prefix", "cache", "weight", "name")
LENGTHS = (3, 12, 40, 300, 6000)
COUNTS = (3, 5, 9, 12, 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTemplate:
    source: str
    condition: str
    """What the unusual part of it depends on."""


def random_template(rng: random.Random) -> GeneratedTemplate:
    """ChatML with calls, and something else on a random condition.

    That is `EXTRA` after turns, in headers or before the prompt; or messages are left out, written twice, or moved.
    """
    places = ("after_turn", "before_message", "before_prompt", "before_prompt", "flag", "flag")
    place = rng.choice((*places, "times", "order"))
    if place in ("after_turn", "before_message"):
        condition = random_condition(rng, ("message", "previous", "messages"))
        code = f"{{%- if {condition} -%}}{EXTRA}{{%- endif -%}}"
    elif place == "before_prompt":
        condition = random_condition(rng, ("messages",))
        code = f"{{%- if {condition} -%}}{EXTRA}{{%- endif -%}}"
    elif place == "times":
        condition = random_condition(rng, ("message", "previous", "messages"))
        code = f"{rng.choice((0, 0, 2))} if {condition} else 1"
    elif place == "order":
        condition, role = random_condition(rng, ("messages",)), rng.choice(("user", "tool", "system", "developer"))
        select, reject = (f"(messages | {way}attr('role', 'equalto', {role!r}) | list)" for way in ("select", "reject"))
        order = rng.choice((f"{select} + {reject}", f"{reject} + {select}", "(messages | sort(attribute='role'))"))
        code = f"({order}) if {condition} else messages"
    else:
        condition = random_condition(rng, ("message", "previous"))
        update = rng.choice(("true", "true", "not ns.on", "false if loop.first else true"))
        part = rng.choice(("", "", "[1:]", "[::-1]"))
        code = (
            f"{{%- set ns = namespace(on=false) -%}}{{%- for message in messages{part} -%}}"
            f"{{%- if {condition} -%}}{{%- set ns.on = {update} -%}}{{%- endif -%}}{{%- endfor -%}}"
            f"{{%- if ns.on -%}}{EXTRA}{{%- endif -%}}"
        )
        place = "before_prompt"
    parts = {"after_turn": "", "before_message": "", "before_prompt": "", "times": "1", "order": "messages"}
    return GeneratedTemplate(source=_SOURCE.format(**parts | {place: code}), condition=condition)


def random_condition(rng: random.Random, scopes: Sequence[str]) -> str:
    """One to three atoms."""
    atoms = [random_atom(rng, rng.choice(scopes)) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    words = [f"not ({atom})" if rng.random() < 0.15 else f"({atom})" for atom in atoms]
    condition = words[0]
    for word in words[1:]:
        condition = f"{condition} {rng.choice(('and', 'and', 'or'))} {word}"
    return condition


def random_atom(rng: random.Random, scope: str) -> str:
    """One condition on a message, on the one before it, or on all of them."""
    if scope == "messages":
        return _random_atom_of_all(rng)
    if scope == "previous":
        kind = rng.randrange(5)
        other = rng.choice(("loop.previtem", "messages[loop.index0 - 1]", "messages[loop.index0 - 2]", "messages[0]"))
        if kind == 0:
            return f"loop.index {rng.choice(('>', '=='))} {rng.choice(COUNTS)}"
        if kind == 1:
            return rng.choice(("loop.first", "loop.last", "loop.index is odd", "loop.index0 % 5 == 3"))
        if kind == 2:
            return (
                f"{other} is defined and {other} and {other}.role == {rng.choice((*map(repr, ROLES), 'message.role'))}"
            )
        if kind == 3:
            return f"{other} is defined and {other} and {other}.content == message.content"
        return f"{other} is defined and {other} and {_random_atom_of_one(rng, other)}"
    return f"message.role == {rng.choice(ROLES)!r} and {_random_atom_of_one(rng, 'message')}"


def _random_atom_of_all(rng: random.Random) -> str:
    role, literal = rng.choice(ROLES), rng.choice(LITERALS)
    one = rng.choice(("messages[0]", "messages[-1]", "messages[-2]", "messages[1]", "(messages | last)"))
    return rng.choice(
        (
            f"messages | length {rng.choice(('>', '==', '%'))} {rng.choice(COUNTS)}{rng.choice(('', ' + 1'))}",
            f"messages | selectattr('role', 'equalto', {role!r}) | list | length > {rng.choice((0, 1, *COUNTS))}",
            f"messages | selectattr('content', 'equalto', {literal!r}) | list",
            f"{literal!r} in (messages | map(attribute='content') | list)",
            f"messages | selectattr('tool_calls', 'defined') | list | length > {rng.choice((0, 2, 5))}",
            "messages[0].content == messages[-1].content",
            f"{one} is defined and {_random_atom_of_one(rng, one)}",
            f"{one} is defined and {one}.role == {role!r}",
            f"tools and tools | length > {rng.choice((0, 1, 3))}",
            f"tools and tools[0].function.name == {rng.choice(('add', 'search', 'yes'))!r}",
        )
    )


def _random_atom_of_one(rng: random.Random, one: str) -> str:
    literal, length, key = rng.choice(LITERALS), rng.choice(LENGTHS), rng.choice(KEYS)
    text = f"{one}.content{rng.choice(('', '', ' | trim', ' | lower', '.strip()', ' | upper'))}"
    text = f"({text})" if "|" in text else text
    return rng.choice(
        (
            f"{literal!r} in {text}",
            f"{text} == {literal!r}",
            f"{text}.startswith({literal!r})",
            f"{text}.endswith({literal!r})",
            f"{text}[:{len(literal)}] == {literal!r}",
            f"{text}[{rng.choice((0, -1, 2))}:] == {literal[0]!r}",
            f"{text} | length {rng.choice(('>', '<', '=='))} {length}",
            f"not {text}",
            f"{text}.isdigit()",
            f"{text} | wordcount > {rng.choice((4, 9))}",
            f"{text} | replace('a', '') | length > {length}",
            f"{text}.split('-') | length > 2",
            f"{literal!r} in {text}.split('-')[-1]",
            f"{OPTION} in {text}",
            f"{one}.{key} is defined",
            f"{one}.get({key!r})",
            f"{key!r} in {one}",
            f"{one}.{key} == {literal!r}",
            f"{one}.tool_calls and {one}.tool_calls | length > {rng.choice((0, 1, 2, 3))}",
            f"{one}.tool_calls and {one}.tool_calls[0].function.name == {rng.choice(('add', 'yes'))!r}",
            f"{one}.tool_calls and {one}.tool_calls[0].function.arguments.deep is defined",
            f"{one}.tool_calls and {one}.tool_calls[-1].function.arguments | length > {rng.choice((0, 1, 3))}",
            f"{one}.reasoning_content is defined and {literal!r} in {one}.reasoning_content",
            f"({one}.content ~ '!') == '{literal}!'",
        )
    )


def conversations_of(rng: random.Random, num: int) -> Iterator[tuple[list[Message], Message, list[Message], str]]:
    """Histories, turns with a mark at the end of what they say, and new messages, in unusual orders too."""
    for _ in range(num):
        ids = iter(range(10_000))
        is_odd = rng.random() < 0.3
        history: list[Message] = []
        if rng.random() < 0.4:
            history.append(_say(rng, "system"))
        if not is_odd or rng.random() < 0.6 or not history:
            history.append(_say(rng, "user"))
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 4, 6, 14))):
            history += _exchange(rng, ids, is_odd)
        mark = f"said{rng.randrange(10**8):08d}"
        *exchange, last = [*_exchange(rng, ids, False, mark), _say(rng, "user")]
        turn, *new = exchange
        yield history, turn, [*new, *([last] if not new or rng.random() < 0.1 else [])], mark


def _exchange(rng: random.Random, ids: Iterator[int], is_odd: bool, mark: str = "") -> list[Message]:
    turn = _say(rng, "assistant")
    if mark:
        turn = {"role": "assistant", "content": turn["content"]}
    if rng.random() < 0.2:
        turn["reasoning_content"] = random_words(rng)
    if rng.random() < 0.5:
        turn["content"] = f"{turn['content']}{mark}"
        extra = [_say(rng, "assistant")] if is_odd and rng.random() < 0.4 else []
        return [turn, *extra, _say(rng, rng.choice(ROLES[:1] * 4 + ROLES[2:]) if is_odd else "user")]
    turn["content"] = rng.choice(("", turn["content"]))
    calls: list[Any] = []
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        arguments: dict[str, Any] = {rng.choice(("a", "deep", "z")): random_words(rng) for _ in range(rng.randrange(4))}
        function = {"name": rng.choice(("add", "search", "yes")), "arguments": arguments}
        calls.append({"id": f"call{next(ids):05d}", "type": "function", "function": function})
    if mark:
        calls[-1]["function"]["arguments"]["zz"] = mark
    turn["tool_calls"] = calls
    answered = calls[: rng.randrange(len(calls) + 1)] if is_odd else calls
    results: list[Message] = []
    for call in answered:
        result = _say(rng, "tool")
        results.append({**result, "tool_call_id": call["id"], "name": call["function"]["name"]})
    return [turn, *results, *([_say(rng, "user")] if rng.random() < 0.2 else [])]


def _say(rng: random.Random, role: str) -> Message:
    message: Any = {"role": role, "content": random_words(rng)}
    if rng.random() < 0.15:
        message[rng.choice(KEYS[:3] if role == "tool" else KEYS)] = rng.choice(("x", *LITERALS))
    return message


def random_words(rng: random.Random) -> str:
    """A text that a condition may be true for."""
    literal = rng.choice((*LITERALS, "option"))
    kind = rng.randrange(12)
    if kind < 4:
        return rng.choice(("hello", "so it is", "a-b-c d", "the same"))
    return (
        lambda: literal,
        lambda: f"{literal} hello",
        lambda: f"hello {literal}",
        lambda: f"a-{literal}-b",
        lambda: rng.choice(("", "", "\n")),
        lambda: rng.choice(("7", "42")),
        lambda: "word " * rng.choice((5, 10, 80, 1500)),
        lambda: "x" * max(rng.choice(LENGTHS) + rng.choice((-1, 0, 1)), 0),
    )[kind - 4]()


def random_tools(rng: random.Random) -> tuple[Any, ...]:
    """None, or up to five."""
    names = ("add", "search", "yes", "get", "put")
    return tuple(
        {"type": "function", "function": {"name": name, "description": "x", "parameters": {"type": "object"}}}
        for name in names[: rng.choice((0, 1, 2, 5))]
    )


_SOURCE = """\
{{%- for message in ({order}) -%}}
  {before_message}
  {{%- for time in range({times}) -%}}
    {{%- if message.role == 'assistant' -%}}
      {{{{- '<|im_start|>assistant\\n' -}}}}
      {{%- if message.reasoning_content is defined -%}}
        {{{{- '<think>' + message.reasoning_content + '</think>' -}}}}
      {{%- endif -%}}
      {{{{- message.content -}}}}
      {{%- for call in message.tool_calls or [] -%}}
        {{{{- '<tool_call>\\n{{"name": "' + call.function.name + '", "arguments": ' -}}}}
        {{{{- call.function.arguments | tojson -}}}}{{{{- '}}\\n</tool_call>' -}}}}
      {{%- endfor -%}}
      {{{{- '<|im_end|>\\n' -}}}}
    {{%- else -%}}
      {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}}}
    {{%- endif -%}}
  {{%- endfor -%}}
  {{%- if message.role == 'assistant' -%}}{after_turn}{{%- endif -%}}
{{%- endfor -%}}
{before_prompt}
{{%- if add_generation_prompt -%}}{{{{- '<|im_start|>assistant\\n' -}}}}{{%- endif -%}}
"""
