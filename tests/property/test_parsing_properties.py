"""Random sampled ids in every format: control ids anywhere, broken UTF-8, half delimiters, calls cut in the middle."""

import functools
import json
import random
from typing import Any

import pytest

from support.effort import num_cases
from support.parsing import FormatOnTokenizer, written_calls
from unbroken.rendering.base import Delta, ParsedResponse, PartKind, ToolCallStatus
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.formats import FORMATS

NUM_CASES = num_cases(40, in_fuzz=700)
STOPS = ("<|im_end|>", "<|endoftext|>", "<|call|>")
SNIPPETS = (
    *('{"name": "f", "arguments": {"a": [1, "é"]}}', '"name"', "{", "}", "[", "]", '":', "NaN", "1e999", '"\\ud800"'),
    *("f", "f(a=1)", "[f(a='x'), g()]", "functions.f:0", "call:f{a:1}", "name", "=", ">", '">', "a", "1", ".5", "true"),
    *(" ", "\n", "  \n\n", "\t", "Let me see.", "Größe 😀", "今天", "\x1c", "'", '"', "\\", ",", ";", "```json", "```"),
    *("final", "analysis", "commentary", " to=functions.f", " to=", "json", "assistant", "thought\n", "function"),
)


@functools.cache
def parser_and_ids(
    call_format: CallFormat, controlled: bool, metaspace: bool
) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """A parser, and runs of ids to make completions of; `controlled`: delimiters are control tokens."""
    control = [d for d in call_format.delimiters if d.strip() and not d.isalnum()] if controlled else []
    form = FormatOnTokenizer(call_format, control=control, stops=STOPS, metaspace=metaspace, num_stop_ids=1 + metaspace)
    delimiters = sorted(call_format.delimiters)
    texts = [*SNIPPETS, *delimiters * 4, *STOPS, *regions_of(call_format) * 4]
    texts += [written_calls(call_format)] * (len(texts) // 10)
    texts += [half for d in delimiters for half in (d[: len(d) // 2], d[len(d) // 2 :])]
    runs = [tuple(form.ids(text)) for text in texts] + [tuple(form.spelled(d)) for d in delimiters]
    runs += [(token_id,) for token_id in range(0, form.vocab_size, form.vocab_size // 150)]
    return form.parser, tuple(run for run in runs if run)


def regions_of(call_format: CallFormat) -> list[str]:
    """Regions of the format around snippets: hardly one of them is a call."""
    rng = random.Random(call_format.name)
    texts = []
    for region in call_format.regions * 5:
        header = f"{call_format.header.opening}x{call_format.header.closings[0]}" if call_format.header else ""
        body = [rng.choice([*SNIPPETS, *region.inner_delimiters * 8]) for _ in range(rng.randrange(8))]
        texts.append((region.opening or region.starts_with or header) + "".join(body) + "".join(region.closings[:1]))
    return texts


def random_ids(rng: random.Random, runs: tuple[tuple[int, ...], ...]) -> list[int]:
    ids = [token_id for _ in range(rng.randrange(14)) for token_id in rng.choice(runs)]
    ids = ids[: rng.randrange(len(ids) + 1)] if rng.random() < 0.2 else ids
    return [token_id for token_id in ids if rng.random() > 0.05] if rng.random() < 0.2 else ids


def split(rng: random.Random, ids: list[int]) -> list[list[int]]:
    borders = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.randrange(8)))
    return [ids[a:b] for a, b in zip([0, *borders], [*borders, len(ids)], strict=True)]


def joined(deltas: list[Delta], kind: PartKind) -> str:
    return "".join(delta.text for delta in deltas if delta.kind is kind)


def check_calls(parsed: ParsedResponse) -> None:
    """Only statuses tell what failed, not names; what did not could be written as JSON again."""
    for call in parsed.tool_calls:
        is_call = call.status is ToolCallStatus.OK
        assert call.name or not is_call
        assert is_call or not call.arguments
        json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()


def check_parts(parsed: ParsedResponse, ids: list[int]) -> None:
    covered = [i for part in parsed.parts for i in range(*part.span)]
    assert covered == list(range(len(ids)))
    spans = {part.span for part in parsed.parts if part.kind is PartKind.TOOL_CALL}
    assert spans == {call.span for call in parsed.tool_calls if call.span[0] < call.span[1]}
    assert all(part.kind is not PartKind.STOP for part in parsed.parts[:-1])
    for kind, text in ((PartKind.REASONING, parsed.reasoning), (PartKind.CONTENT, parsed.content)):
        if not any(part.kind is kind for part in parsed.parts):
            assert len(text) < 2  # an id may begin in one part and end in the next


@pytest.mark.parametrize("metaspace", [False, True], ids=["bytes", "metaspace"])
@pytest.mark.parametrize("controlled", [True, False], ids=["by id", "by text"])
@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
def test_any_completion_is_read_and_each_of_its_ids_is_in_one_part(
    call_format: CallFormat, controlled: bool, metaspace: bool
) -> None:
    parser, runs = parser_and_ids(call_format, controlled, metaspace)
    rng = random.Random(f"{call_format.name} {controlled} {metaspace}")
    for _ in range(NUM_CASES):
        ids = random_ids(rng, runs)
        options: dict[str, Any] = {"reasoning_opened": rng.random() < 0.3}
        parsed = parser.parse(ids, **options)
        check_parts(parsed, ids)
        check_calls(parsed)
        reader = parser.open_reader(**options)
        deltas = [delta for piece in split(rng, ids) for delta in reader.feed(piece)]
        deltas += reader.close()
        assert reader.finish() == parsed
        assert joined(deltas, PartKind.CONTENT) == parsed.content
        assert joined(deltas, PartKind.REASONING) == parsed.reasoning
        assert tuple(delta.tool_call for delta in deltas if delta.tool_call) == parsed.tool_calls


@pytest.mark.parametrize("controlled", [True, False], ids=["by id", "by text"])
@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
def test_every_split_of_a_stream_gives_the_same(call_format: CallFormat, controlled: bool) -> None:
    control = [d for d in call_format.delimiters if d[-1] in ">]" and "=" not in d] if controlled else []
    on_tokenizer = FormatOnTokenizer(call_format, control=control)
    thought = call_format.reasoning
    opened = f"{thought.opening}hm\n{thought.closings[0]}" if thought is not None and thought.opening else ""
    ids = on_tokenizer.ids(f"{opened}{written_calls(call_format)}{STOPS[0]}")
    whole = on_tokenizer.parser.parse(ids)
    for k in range(len(ids) + 1):
        reader = on_tokenizer.parser.open_reader()
        for piece in (ids[:k], ids[k:]):
            reader.feed(piece)
        assert reader.finish() == whole


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda call_format: call_format.name)
def test_calls_as_the_models_write_them_are_read_alone_behind_text_and_cut_anywhere(call_format: CallFormat) -> None:
    on_tokenizer = FormatOnTokenizer(
        call_format, control=[d for d in call_format.delimiters if d[-1] in ">]" and "=" not in d]
    )
    written = written_calls(call_format)
    calls: list[tuple[str, Any]] = [("add", {"a": 1}), ("now", {})] if written else []
    parsed = on_tokenizer.parse(written + STOPS[0])
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls
    assert (parsed.content, parsed.reasoning) == ("", "")
    ids = on_tokenizer.ids(written)
    for num_ids in range(len(ids) + 1):
        cut = on_tokenizer.parser.parse(ids[:num_ids])
        check_parts(cut, ids[:num_ids])
        check_calls(cut)
        whole = [(call.name, call.arguments) for call in cut.tool_calls if call.status is ToolCallStatus.OK]
        assert whole == calls[: len(cut.tool_calls) - len(cut.failures)]
        assert len(cut.failures) < 2


@pytest.mark.parametrize("ending", ["", "{closing}", " {closing}ok"], ids=["not closed", "closed", "answered"])
@pytest.mark.parametrize(
    "call_format",
    [form for form in FORMATS if form.reasoning is not None and form.reasoning.opening and written_calls(form)],
    ids=lambda call_format: call_format.name,
)
def test_calls_by_id_inside_reasoning_are_read_and_end_it(call_format: CallFormat, ending: str) -> None:
    thought = call_format.reasoning
    assert thought is not None
    form = FormatOnTokenizer(call_format, control=[d for d in call_format.delimiters if d.strip()])
    text = f"{thought.opening}hm{written_calls(call_format)}{ending.format(closing=thought.closings[0])}{STOPS[0]}"
    parsed = form.parse(text)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("add", {"a": 1}), ("now", {})]
    assert (parsed.reasoning, parsed.content) == ("hm", "ok" if "ok" in ending else "")
    assert parsed.reasoning_complete
    check_parts(parsed, form.ids(text))
