"""Text that may complete a control token is replaced, and nothing else is."""

import copy
from typing import Any

from unbroken.integrations.renderers.renderer import replace_suspicious_text


def has_angle(text: str) -> bool:
    return "<" in text


def test_suspicious_text_becomes_letters_and_keeps_its_white_space() -> None:
    messages: Any = [{"role": "user", "content": " a <|im\n"}, {"role": "user", "content": "a b"}]
    before = copy.deepcopy(messages)
    assert replace_suspicious_text(messages, has_angle) == [
        {"role": "user", "content": " x xxxx\n"},
        {"role": "user", "content": "a b"},
    ]
    assert messages == before


def test_arguments_that_are_json_stay_json() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": "<", "b": [1, "é"]}'}}
    assert replace_suspicious_text(call, has_angle) == {
        "function": {"name": "add", "arguments": '{"a": "x", "b": [1, "é"]}'}
    }


def test_keys_from_outside_are_replaced_whatever_they_are() -> None:
    call = {"role": "tool", "type": "text", "meta<": "<", "arguments": {"a<b": 1, "role": "<", "type": "a <"}}
    assert replace_suspicious_text([call], has_angle) == [
        {"role": "tool", "type": "text", "xxxxx": "x", "arguments": {"xxx": 1, "role": "x", "type": "x x"}}
    ]


def test_the_keys_roles_and_types_of_the_form_stay() -> None:
    message = {"role": "tool", "content": [{"type": "text", "text": "a"}]}
    expected = {"role": "tool", "content": [{"type": "text", "text": "x"}]}
    assert replace_suspicious_text(message, lambda text: True) == expected
