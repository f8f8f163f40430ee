"""Turns that can have no calls: the text of a call is content."""

import pytest

from support.parsing import STOP, FormatOnTokenizer, written_calls
from unbroken.rendering.base import ParsedResponse, PartKind
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.formats import FORMATS

_WITH_HEADERS = {
    "harmony": '{"a": 1}',
    "muse": '<atem:invoke name="add">',
    "inkling": '"args":{"a":1}',
    "functionary": '{"a": 1}',
    "gigachat3": '{"name": "add", "arguments": {"a": 1}}',
}
"""Their calls are messages: the message's text is content, its header is not."""


def parse_plain(on_tokenizer: FormatOnTokenizer, text: str) -> ParsedResponse:
    reader = on_tokenizer.parser.open_reader(reads_calls=False)
    deltas = [delta for token_id in on_tokenizer.ids(text) for delta in reader.feed([token_id])]
    deltas += reader.close()
    parsed = reader.finish()
    assert "".join(delta.text for delta in deltas if delta.kind is PartKind.CONTENT) == parsed.content
    return parsed


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
def test_calls_are_content(call_format: CallFormat) -> None:
    written = written_calls(call_format)
    delimiters = {text for text in call_format.delimiters if text.startswith("<") and text.strip() == text}
    parsed = parse_plain(FormatOnTokenizer(call_format, control=delimiters - {STOP}), written + STOP)
    assert parsed.tool_calls == ()
    if call_format.name in _WITH_HEADERS:
        assert _WITH_HEADERS[call_format.name] in parsed.content
    else:
        assert parsed.content == written


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
def test_a_call_that_was_cut_keeps_its_opening(call_format: CallFormat) -> None:
    written = written_calls(call_format)[:-1]
    for call in FormatOnTokenizer(call_format).parse(written).failures:
        assert call.raw in call.full_text
        assert call.full_text in written
