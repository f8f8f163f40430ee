"""The worked example of docs/vision.md, number by number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.images import CountingProcessor
from unbroken.errors import EchoError
from unbroken.images.placeholders import check_expansion, collapse_spans, expand_placeholders
from unbroken.types import EncodedImage, token_ids

CAT, DOG, MAP = EncodedImage(b"cat"), EncodedImage(b"do"), EncodedImage(b"map!")
PAGE = (Path(__file__).parents[3] / "docs" / "vision.md").read_text("utf-8")


def ids_of(line: str) -> list[int]:
    (row,) = re.findall(rf"^{line}\s+([\d ]+)$", PAGE, re.MULTILINE)
    return [int(number) for number in row.split()]


def test_the_template_s_line_expands_to_the_canonical_one():
    expanded, spans = expand_placeholders(token_ids(ids_of("template")), [CAT, DOG, MAP], CountingProcessor(90))
    assert expanded.tolist() == ids_of("canonical")
    assert [(span.offset, span.stop) for span in spans] == [(2, 5), (7, 9), (17, 21)]
    places = re.findall(r"(?:cat|dog|map) \[(\d+), (\d+)\)", PAGE)
    assert [(int(start), int(stop)) for start, stop in places] == [(2, 5), (7, 9), (17, 21)]


def test_what_vllm_is_sent_is_the_prompt_of_turn_two_with_one_placeholder_each():
    prompt, spans = expand_placeholders(token_ids(ids_of("template")[:-2]), [CAT, DOG, MAP], CountingProcessor(90))
    (sent,) = re.findall(r"\*\*vLLM\*\* gets `([\d ]+)`", PAGE)
    assert collapse_spans(prompt, spans).tolist() == [int(number) for number in sent.split()]
    assert len(prompt) == 25


def test_another_max_pixels_for_the_map_is_the_error_that_the_page_shows():
    prompt, spans = expand_placeholders(token_ids(ids_of("template")[:-2]), [CAT, DOG, MAP], CountingProcessor(90))
    smaller = [CAT, DOG, EncodedImage(b"mp")]
    reported, _ = expand_placeholders(token_ids(ids_of("template")[:-2]), smaller, CountingProcessor(90))
    with pytest.raises(EchoError, match=r"images\[2\] .* has 4 ids in the prompt that was sent and 2 in the engine's"):
        check_expansion(prompt, reported, spans)
