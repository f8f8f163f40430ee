import pytest

from unbroken.errors import MessagesError
from unbroken.messages import check_messages, text_of

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", "must be a list of messages, got str"),
        ({"role": "user"}, "must be a list of messages, got dict"),
        (["hello"], r"messages\[0\] must be a mapping"),
        (
            [{"role": "user", "content": "a"}, {"content": "b"}],
            r"messages\[1\]\.role must be a non-empty string, got None",
        ),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be text, parts or None, got int"),
        ([{"role": "user", "content": ["a"]}], r"messages\[0\]\.content\[0\] must be a part with a type"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], r"tool_calls\[0\] must have a function"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": ""}}]}], "function with a name"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages, message):
    with pytest.raises(MessagesError, match=message):
        check_messages(messages)


def test_what_templates_take_passes():
    check_messages(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": b""}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "", "tool_call_id": "c"},
        ]
    )


def test_text_of_joins_text_parts_only():
    assert text_of(None) == ""
    assert text_of("a") == "a"
    assert (
        text_of([{"type": "text", "text": "a"}, {"type": "image", "image": b""}, {"type": "text", "text": "b"}]) == "ab"
    )
