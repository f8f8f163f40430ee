"""Placeholders to spans and back, on small integers."""

from __future__ import annotations

import numpy as np
import pytest

from support.images import CountingProcessor
from unbroken.errors import EchoError, ImageError
from unbroken.images.placeholders import check_expansion, collapse_spans, expand_placeholders
from unbroken.types import EncodedImage, token_ids

PAD, START, END = 90, 80, 81


TWO, THREE = EncodedImage(b"ab"), EncodedImage(b"xyz")


@pytest.mark.parametrize(
    ("ids", "images", "expected", "offsets"),
    [
        ([1, PAD, 2], [THREE], [1, PAD, PAD, PAD, 2], [1]),
        ([1, PAD, PAD, PAD, 2], [THREE], [1, PAD, PAD, PAD, 2], [1]),
        ([PAD, PAD], [TWO, THREE], [PAD] * 5, [0, 2]),
        ([PAD] * 5, [TWO, THREE], [PAD] * 5, [0, 2]),
        ([1, PAD, PAD, 2, PAD], [TWO, THREE], [1, PAD, PAD, 2, PAD, PAD, PAD], [1, 4]),
        ([1, 2], [], [1, 2], []),
    ],
)
def test_collapsed_and_expanded_placeholders_get_their_images(
    ids: list[int], images: list[EncodedImage], expected: list[int], offsets: list[int]
) -> None:
    expanded, spans = expand_placeholders(token_ids(ids), images, CountingProcessor(PAD))
    assert expanded.tolist() == expected
    assert [span.offset for span in spans] == offsets
    assert [span.image for span in spans] == images
    assert [span.length for span in spans] == [len(image.data) for image in images]


@pytest.mark.parametrize("ids", [[1, PAD, 2], [1, START, PAD, PAD, END, 2]])
def test_an_image_between_separators_is_found_in_both_forms(ids: list[int]) -> None:
    expanded, (span,) = expand_placeholders(token_ids(ids), [TWO], CountingProcessor(PAD, apart=(START, END)))
    assert expanded.tolist() == [1, START, PAD, PAD, END, 2]
    assert (span.offset, span.length) == (1, 4)
    assert collapse_spans(expanded, [span]).tolist() == [1, PAD, 2]


@pytest.mark.parametrize(
    ("ids", "images", "said"),
    [
        ([1, 2], [TWO], r"images\[0\] has no place"),
        ([PAD, 1], [TWO, THREE], r"got 2 for 1: images\[1\] has no place"),
        ([1, PAD, 2], [], "an image for every placeholder"),
        ([PAD, 1, PAD], [TWO], "an image for every placeholder"),
        ([PAD] * 4, [THREE], r"images\[0\] must have one placeholder or the 3 ids .* a run of 4"),
        ([PAD, 1, PAD, PAD], [TWO, THREE], r"images\[1\] must have one placeholder or the 3 ids .* a run of 2"),
    ],
)
def test_places_that_do_not_fit_the_images_are_errors(ids: list[int], images: list[EncodedImage], said: str) -> None:
    with pytest.raises(ImageError, match=said):
        expand_placeholders(token_ids(ids), images, CountingProcessor(PAD))


def test_collapsing_tells_images_side_by_side_apart() -> None:
    expanded, spans = expand_placeholders(token_ids([7, PAD, PAD, 8]), [THREE, TWO], CountingProcessor(PAD))
    assert collapse_spans(expanded, spans).tolist() == [7, PAD, PAD, 8]


@pytest.mark.parametrize(("theirs", "length"), [([1, PAD, PAD, 2], 2), ([1, PAD, PAD, PAD, PAD, 2], 4)])
def test_another_expansion_in_the_engine_names_the_image_and_both_lengths(theirs: list[int], length: int) -> None:
    sent, spans = expand_placeholders(token_ids([1, PAD, 2]), [THREE], CountingProcessor(PAD))
    with pytest.raises(EchoError, match=rf"images\[0\].* 3 ids in the prompt that was sent and {length} in"):
        check_expansion(sent, token_ids(theirs), spans)


def test_images_in_another_order_are_named() -> None:
    processor = CountingProcessor(PAD)
    sent, spans = expand_placeholders(token_ids([PAD, 5, PAD]), [THREE, TWO], processor)
    swapped, _ = expand_placeholders(token_ids([PAD, 5, PAD]), [TWO, THREE], processor)
    with pytest.raises(EchoError, match=r"images\[0\].* 3 ids .* 2 in the engine's"):
        check_expansion(sent, swapped, spans)


def test_the_same_prompt_and_one_that_differs_in_text_are_no_errors_of_images() -> None:
    sent, spans = expand_placeholders(token_ids([1, 3, PAD, 2, 4]), [THREE], CountingProcessor(PAD))
    check_expansion(sent, sent, spans)
    check_expansion(sent, np.where(sent == 1, 6, sent), spans)
