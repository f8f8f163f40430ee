import pytest

from unbroken.errors import MessagesError, ToolDefinitionError
from unbroken.messages import check_messages, check_tools, get_text

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
        ([{"role": "assistant", "content": "", "tool_calls": 5}], r"messages\[0\]\.tool_calls must be a list of calls"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\] must have a text"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"content\[0\] must have its image under 'image', got"),
        (
            [{"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            r"messages\[0\]\.content\[1\] must have its image under 'image_url', got \['image_url', 'type'\]",
        ),
        (
            [{"role": "user", "content": "ok"}, {"role": "user", "content": "a\ud83d"}],
            r"messages\[1\]\.content must be text that UTF-8 can encode, got '\\ud83d' at character 1",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": ["\udc00"]}}}]}],
            r"messages\[0\]\.tool_calls\[0\]\.function\.arguments\.x\[0\] must be text",
        ),
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


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("abc", "tools must be a list of tool schemas, got str"),
        (["abc"], r"tools\[0\] must be a mapping, got str"),
        ([{"function": {"name": "f", "description": "\ud83d"}}], r"tools\[0\]\.function\.description must be text"),
    ],
)
def test_tools_that_no_template_can_be_given_are_refused_with_their_place(tools, message):
    with pytest.raises(ToolDefinitionError, match=message):
        check_tools(tools)


def test_text_of_joins_text_parts_only():
    assert get_text(None) == ""
    assert get_text("a") == "a"
    assert (
        get_text([{"type": "text", "text": "a"}, {"type": "image", "image": b""}, {"type": "text", "text": "b"}])
        == "ab"
    )
