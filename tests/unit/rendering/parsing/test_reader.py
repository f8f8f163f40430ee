"""The one reader: what is held back and what is returned while ids come, and which part each id is in."""

from typing import Any

import pytest

from support.parsing import STOP, FormatOnTokenizer
from unbroken.errors import InvariantError
from unbroken.rendering.base import Delta, ParsedResponse, PartKind, ResponsePart, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallAttempt, CallBody, CallFormat, Header, Region, reasoning_region
from unbroken.rendering.parsing.formats import HERMES
from unbroken.rendering.parsing.syntax.json_calls import make_json_call_reader, make_json_calls_reader

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def by_text() -> FormatOnTokenizer:
    return FormatOnTokenizer(HERMES)


@pytest.fixture(scope="module")
def by_id() -> FormatOnTokenizer:
    return FormatOnTokenizer(HERMES, control=sorted(HERMES.delimiters))


def feed_each(form: FormatOnTokenizer, *texts: str, **options: Any) -> list[Any]:
    """The deltas after each text, and at the end."""
    reader = form.parser.open_reader(**options)
    steps = [reader.feed(form.spelled(text)) for text in texts] + [reader.close()]
    return [[delta.text or delta.tool_call.name for delta in deltas] for deltas in steps]


def test_text_is_returned_as_it_comes(by_text: FormatOnTokenizer) -> None:
    assert feed_each(by_text, "Let", " me see", ".") == [["Let"], [" me see"], ["."], []]


def test_text_that_may_become_a_delimiter_is_held_back(by_text: FormatOnTokenizer) -> None:
    assert feed_each(by_text, "so <too", "ls>") == [["so"], [" <tools>"], []]
    assert feed_each(by_text, "so <tool", CALL[5:]) == [["so"], ["f"], []]
    assert feed_each(by_text, "so <tool") == [["so"], [" <tool"]]


def test_white_space_that_may_be_trimmed_is_held_back(by_text: FormatOnTokenizer) -> None:
    assert feed_each(by_text, "so \n", "on") == [["so"], [" \non"], []]
    assert feed_each(by_text, "so \n", CALL, "\n\n", "ok\n") == [["so"], ["f"], [], ["\nok"], ["\n"]]


def test_reasoning_is_returned_before_it_is_complete(by_text: FormatOnTokenizer) -> None:
    reader = by_text.parser.open_reader(reasoning_opened=True)
    deltas = reader.feed(by_text.ids("\nhm, so"))
    assert deltas == (Delta(kind=PartKind.REASONING, text="hm, so"),)
    assert reader.feed(by_text.ids(" it is\n</think>\n\nyes")) == (
        Delta(kind=PartKind.REASONING, text=" it is"),
        Delta(kind=PartKind.CONTENT, text="yes"),
    )
    assert reader.finish().reasoning == "hm, so it is"


def test_a_character_is_returned_when_its_last_id_came(by_text: FormatOnTokenizer) -> None:
    ids = by_text.ids("😀")
    assert len(ids) > 1
    reader = by_text.parser.open_reader()
    assert [reader.feed([token_id]) for token_id in ids[:-1]] == [()] * (len(ids) - 1)
    assert reader.feed(ids[-1:]) == (Delta(kind=PartKind.CONTENT, text="😀"),)


def test_bytes_that_are_no_character_are_returned_as_soon_as_nothing_can_complete_them(
    by_text: FormatOnTokenizer,
) -> None:
    first, *_ = by_text.ids("😀")
    reader = by_text.parser.open_reader()
    texts = ["".join(delta.text for delta in reader.feed([first])) for _ in range(8)]
    assert texts[-1], "a long run of broken bytes is not held back for ever"
    assert reader.finish().content == "\ufffd" * 8


def test_an_id_that_may_have_ended_the_turn_is_held_back(by_text: FormatOnTokenizer) -> None:
    reader = by_text.parser.open_reader()
    (stop,) = by_text.ids(STOP)
    assert reader.feed([*by_text.ids("so"), stop]) == (Delta(kind=PartKind.CONTENT, text="so"),)
    assert reader.feed(by_text.ids("on")) == (Delta(kind=PartKind.CONTENT, text=f"{STOP}on"),)


def test_a_closed_reader_takes_no_more_ids(by_text: FormatOnTokenizer) -> None:
    reader = by_text.parser.open_reader()
    assert reader.finish() == reader.finish()
    with pytest.raises(InvariantError, match="open another reader"):
        reader.feed([1])


def test_every_id_is_in_the_part_that_it_begins_in(by_id: FormatOnTokenizer) -> None:
    text = f"<think>\nhm \n</think>\n\nso\n{CALL}\n{CALL}\n{STOP}"
    assert by_id.parts(text) == [
        ("markup", "<think>\n"),
        ("reasoning", "hm"),
        ("markup", " \n</think>\n\n"),
        ("content", "so"),
        ("markup", "\n"),
        ("tool_call", CALL),
        ("markup", "\n"),
        ("tool_call", CALL),
        ("markup", "\n"),
        ("stop", STOP),
    ]
    parsed = by_id.parse(text)
    calls = [part.span for part in parsed.parts if part.kind is PartKind.TOOL_CALL]
    assert calls == [call.span for call in parsed.tool_calls]


def test_a_word_with_the_space_before_it_is_in_the_part_of_the_word(by_id: FormatOnTokenizer) -> None:
    assert len(by_id.ids(" the")) == 1
    assert by_id.parts("<think> the</think> the") == [
        ("markup", "<think>"),
        ("reasoning", " the"),
        ("markup", "</think>"),
        ("content", " the"),
    ]


def test_all_ids_of_a_character_are_in_its_part(by_id: FormatOnTokenizer) -> None:
    assert len(by_id.ids("😀")) > 1
    assert by_id.parts(f"😀{CALL}😀{STOP}") == [
        ("content", "😀"),
        ("tool_call", CALL),
        ("content", "😀"),
        ("stop", STOP),
    ]


def test_the_ids_that_ended_the_turn_are_a_part(by_id: FormatOnTokenizer) -> None:
    assert by_id.parts(f"so{STOP}{STOP}") == [("content", f"so{STOP}"), ("stop", STOP)]
    assert by_id.parts(STOP) == [("stop", STOP)]
    assert by_id.parts("") == []


def test_parts_must_lie_one_behind_the_other() -> None:
    first = ResponsePart(kind=PartKind.CONTENT, span=(0, 2))
    for span in ((3, 4), (1, 3), (2, 2)):
        with pytest.raises(InvariantError, match=r"parts\[1\].*must begin at 2"):
            ParsedResponse(content="", parts=(first, ResponsePart(kind=PartKind.STOP, span=span)))
    ParsedResponse(content="", parts=(first, ResponsePart(kind=PartKind.STOP, span=(2, 3))))


LINES = Region(
    kind=PartKind.TOOL_CALL,
    opening="<calls>",
    closings=("</calls>",),
    ended_by=("<calls>",),
    read_calls=make_json_calls_reader(),
)
LIST = FormatOnTokenizer(CallFormat(name="lines", regions=(LINES,)), control=("<calls>", "</calls>"))
ONE, TWO = '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {"x": 1}}'


def test_calls_in_one_region_have_spans_of_their_own() -> None:
    ids = [*LIST.ids("<calls>"), *LIST.spelled(f"\n{ONE}\n{TWO}\n"), *LIST.ids("</calls>")]
    assert LIST.parts(ids) == [
        ("markup", "<calls>\n"),
        ("tool_call", ONE),
        ("markup", "\n"),
        ("tool_call", TWO),
        ("markup", "\n</calls>"),
    ]
    parsed = LIST.parse(f"<calls>[{ONE}, {TWO}]</calls>")
    assert [(call.name, call.raw) for call in parsed.tool_calls] == [("f", ONE), ("g", TWO)]


def test_what_is_no_json_takes_the_rest_of_the_region() -> None:
    parsed = LIST.parse(f"<calls>{ONE}\noops\n{TWO}</calls>")
    assert [call.status for call in parsed.tool_calls] == [ToolCallStatus.OK, ToolCallStatus.INVALID_JSON]
    assert parsed.tool_calls[1].raw == f"oops\n{TWO}"


def test_a_region_without_calls_is_markup_and_one_that_was_cut_is_one_attempt() -> None:
    assert LIST.parts("so <calls>[]</calls>") == [("content", "so"), ("markup", " <calls>[]</calls>")]
    (call,) = LIST.parse(f"<calls>{ONE}").tool_calls
    assert (call.status, call.raw) == (ToolCallStatus.UNCLOSED, ONE)


def read_first(body: CallBody, tools: Any) -> list[CallAttempt]:
    return [] if "answer" in body.text else list(make_json_call_reader()(body, tools))


FIRST = FormatOnTokenizer(
    CallFormat(
        name="first",
        regions=(
            reasoning_region(),
            Region(kind=PartKind.TOOL_CALL, starts_with="{", read_calls=read_first),
            Region(kind=PartKind.TOOL_CALL, starts_with="call:", read_calls=read_first),
        ),
    )
)


def test_a_call_may_be_what_the_answer_begins_with() -> None:
    (call,) = FIRST.parse(f"<think>hm</think>\n {ONE}{STOP}").tool_calls
    assert (call.name, call.raw) == ("f", ONE)
    assert FIRST.parse(f"So: {ONE}{STOP}").content == f"So: {ONE}"


def test_what_began_like_a_call_but_is_not_one_is_content_to_the_last_space() -> None:
    parsed = FIRST.parse('  {"answer": 5} \n')
    assert (parsed.content, parsed.tool_calls) == ('  {"answer": 5} \n', ())


def test_a_longer_beginning_is_waited_for() -> None:
    assert feed_each(FIRST, "ca", "ll:", "{") == [[], [], [], [""]]
    assert feed_each(FIRST, "ca", "n") == [[], ["can"], []]
    assert feed_each(FIRST, "ca") == [[], ["ca"]]


def test_a_call_that_only_the_end_of_the_turn_closes_may_still_read_when_it_was_cut() -> None:
    assert [c.status for c in FIRST.parse(ONE).tool_calls] == [ToolCallStatus.OK]
    assert [c.status for c in FIRST.parse(ONE[:-2]).tool_calls] == [ToolCallStatus.UNCLOSED]
    assert [c.status for c in FIRST.parse(ONE[:-2] + STOP).tool_calls] == [ToolCallStatus.INVALID_JSON]


FINAL = Region(kind=PartKind.CONTENT, closings=("<|end|>",), keeps_white_space=True)
THOUGHT = Region(kind=PartKind.REASONING, closings=("<|end|>",))
TO = Region(kind=PartKind.TOOL_CALL, closings=("<|end|>", STOP), read_calls=make_json_call_reader())


def route(header: CallBody) -> Region | None:
    return {"final": FINAL, "analysis": THOUGHT, "to": TO}.get(header.text.rpartition("<|channel|>")[2])


CHANNELS = FormatOnTokenizer(
    CallFormat(
        name="channels",
        regions=(FINAL, THOUGHT, TO),
        header=Header(closings=("<|message|>",), inner_delimiters=("<|channel|>",), route=route),
    ),
    control=("<|message|>", "<|channel|>", "<|end|>"),
)


def test_a_header_says_what_follows_it() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|>x<|channel|>analysis<|message|>so<|end|>"
        f"<|channel|>final<|message|> a \n<|end|><|channel|>to<|message|>{ONE}{STOP}"
    )
    parsed = CHANNELS.parse(text)
    assert (parsed.reasoning, parsed.content) == ("hm\nso", " a \n")
    assert [(call.name, call.status) for call in parsed.tool_calls] == [("f", ToolCallStatus.OK)]
    assert [kind for kind, _ in CHANNELS.parts(text)] == [
        *("markup", "reasoning", "markup", "reasoning", "markup", "content", "markup", "tool_call", "stop")
    ]


def test_a_stop_id_that_closes_a_region_closes_it() -> None:
    assert CHANNELS.parse(f"<|channel|>to<|message|>{ONE}").tool_calls[0].status is ToolCallStatus.UNCLOSED
    assert not CHANNELS.parse("<|channel|>analysis<|message|>hm").reasoning_complete
    assert CHANNELS.parse("<|channel|>analysis<|message|>hm<|end|>").reasoning_complete


def test_a_stop_id_that_is_no_closing_closes_nothing(by_id: FormatOnTokenizer) -> None:
    (call,) = by_id.parse(CALL.removesuffix("</tool_call>") + STOP).tool_calls
    assert call.status is ToolCallStatus.UNCLOSED
    assert not by_id.parse(f"<think>hm{STOP}").reasoning_complete


def test_a_header_that_is_not_closed_ends_where_something_else_opens() -> None:
    form = CallFormat(
        name="lines",
        regions=(LINES, THOUGHT),
        header=Header(opening="<|channel|>", closings=("\n",), route=lambda header: THOUGHT),
    )
    opened = FormatOnTokenizer(form, control=("<|channel|>", "<|end|>", "<calls>", "</calls>"))
    parsed = opened.parse(f"so<|channel|>thought<|channel|>thought\nhm<|end|><|channel|>x<calls>{ONE}</calls>ok")
    assert (parsed.reasoning, parsed.content) == ("hm", "so\nok")
    assert [call.name for call in parsed.tool_calls] == ["f"]


def test_text_that_became_no_header_is_content_unless_it_looks_like_one() -> None:
    assert CHANNELS.parse("just text").content == "just text"
    assert CHANNELS.parse("<|channel|>anal").content == ""
    assert CHANNELS.parse("odd<|message|>text<|end|>").content == "odd<|message|>text<|end|>"
