"""Random trees with images in what was given: a row that ends anywhere holds its images whole, and all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.effort import num_cases
from support.images import image_span
from support.sequences import sampled
from unbroken.errors import InvariantError
from unbroken.ledger.nodes import Origin, Path, Position
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.types import EncodedImage, ImageSpan

FIRST_IMAGE_ID = 100
"""The ids of the k-th image of a tree are all 100 + k; those of text are less."""
EXAMPLES = settings(max_examples=num_cases(50, in_fuzz=1000), derandomize=True)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Given nodes of text and images and sampled ones of text, each attached wherever the tree allows it."""
    tree = TokenTree()
    num_images = 0
    for _ in range(draw(st.integers(2, 10))):
        parent = draw(st.sampled_from([None, *places(tree)])) if draw(st.integers(0, 9)) else None
        if parent is not None and draw(st.booleans()):
            tree.add_sampled(sampled(*draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))), parent=parent)
            continue
        ids, spans = [0], []
        for _ in range(draw(st.integers(0, 3))):
            length = draw(st.integers(1, 4))
            spans.append(image_span(offset=len(ids), length=length, image=str(num_images)))
            ids += [FIRST_IMAGE_ID + num_images] * length + [1] * draw(st.integers(0, 2))
            num_images += 1
        tree.add_given(ids, Origin.PROMPT, parent=parent, images=spans)
    return tree


def places(tree: TokenTree) -> list[Position]:
    """Every position that is not inside an image."""
    return [
        Position(node=number, offset=offset)
        for number, node in enumerate(tree.nodes)
        for offset in range(1, len(node.token_ids) + 1)
        if not any(image.offset < offset < image.stop for image in node.images)
    ]


@EXAMPLES
@given(trees())
def test_i4_every_row_holds_whole_images_and_all_that_its_ids_show(tree: TokenTree):
    names = {EncodedImage(str(k).encode()).sha256: FIRST_IMAGE_ID + k for k in range(30)}
    for row in export_samples(tree, 0.5):
        shown = np.zeros(len(row.token_ids), dtype=bool)
        for span in row.images:
            own = row.token_ids[span.offset : span.stop]
            assert own.tolist() == [names[span.sha256]] * span.length
            shown[span.offset : span.stop] = True
        np.testing.assert_array_equal(shown, row.token_ids >= FIRST_IMAGE_ID)


@st.composite
def lookalikes(draw: st.DrawFn) -> TokenTree:
    """Given nodes whose images all have the same ids, so that only the images tell branches apart."""
    tree = TokenTree()
    for _ in range(draw(st.integers(1, 8))):
        ids, spans = draw(lookalike_ids())
        parent = draw(st.sampled_from([None, *places(tree)])) if draw(st.integers(0, 5)) else None
        tree.add_given(ids, Origin.PROMPT, parent=parent, images=spans)
    return tree


@st.composite
def lookalike_ids(draw: st.DrawFn) -> tuple[list[int], list[ImageSpan]]:
    """Ids 7, some of them as one of two images, and others."""
    ids: list[int] = []
    spans = []
    for kind in draw(st.lists(st.sampled_from(["text", "text", "cat", "dog"]), min_size=1, max_size=4)):
        length = draw(st.integers(1, 2))
        if kind != "text":
            spans.append(image_span(offset=len(ids), length=length, image=kind))
        ids += [7 if kind != "text" else draw(st.sampled_from([7, 1]))] * length
    return ids, spans


@EXAMPLES
@given(lookalikes(), lookalike_ids(), st.data())
def test_the_longest_prefix_is_the_longest_whose_images_are_the_same(tree: TokenTree, tail, data: st.DataObject):
    """By definition: of the ids of each path, those that are equal, up to the first image that is not whole in both."""
    leaf = data.draw(st.sampled_from([None, *tree.leaves()]))
    ids, images = ([], ()) if leaf is None else (tree.path(leaf).token_ids.tolist(), tree.images(leaf))
    ids, spans = [*ids, *tail[0]], [*images, *(replace(i, offset=i.offset + len(ids)) for i in tail[1])]
    position, num_shared = tree.find_longest_prefix(ids, images=spans)
    assert num_shared == max(count_shared(tree.path(end), ids, spans) for end in tree.leaves())
    assert (position is None) == (num_shared == 0)
    if position is not None:
        assert tree.path(position).token_ids.tolist() == ids[:num_shared]
        assert set(tree.images(position)) == {span for span in spans if span.offset < num_shared}


def count_shared(path: Path, ids: list[int], images: list[ImageSpan]) -> int:
    count = 0
    while count < min(len(path.token_ids), len(ids)) and path.token_ids[count] == ids[count]:
        count += 1
    for span in sorted({*path.images, *images}, key=lambda span: span.offset):
        if span.offset < count and (span.stop > count or span not in path.images or span not in images):
            return span.offset
    return count


def test_a_position_inside_an_image_is_no_place_to_end_a_row():
    tree = TokenTree()
    tree.add_given([0, 100, 100], Origin.PROMPT, parent=None, images=[image_span(offset=1, length=2)])
    with pytest.raises(InvariantError, match="an image must not be divided"):
        tree.path(Position(node=0, offset=2))
