"""Where the branches of a token tree begin: which recorded ids a prompt continues."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from unbroken.ledger.nodes import Node, Position
from unbroken.types import ImageSpan, TokenIds
from unbroken.types.arrays import count_common_prefix

_Start: TypeAlias = tuple[int, ImageSpan | None]
"""An id, and the image that begins with it, as if it stood at offset 0."""


class BranchIndex:
    """Where branches of a tree begin, so that a prompt is compared only with the ids that it follows.

    A node's branches are the nodes attached to it. Most differ from it: after the first k ids of the node they continue
    with another id than the node itself, with another image, or behind its end. Only one place can be continued so,
    which is the first where the prompt differs from the node, and there the branch is looked up by what the prompt has
    next. The others begin as the node continues (the same prompt was sampled again): they are listed, as each of them
    may share more ids. The nodes belong to the tree, which only appends.
    """

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._differing: dict[tuple[Position | None, _Start], list[int]] = defaultdict(list)
        """The nodes attached at a position that begin so, oldest first."""
        self._repeating: dict[int, list[int]] = defaultdict(list)
        """The nodes attached to a node that begin as it continues."""

    def add(self, node: Node) -> None:
        """Add the tree's next node."""
        number = len(self._nodes)
        self._nodes.append(node)
        start = _get_start(node, 0)
        assert start is not None  # a node has at least one id
        parent = node.parent
        if parent is not None and _get_start(self._nodes[parent.node], parent.offset) == start:
            self._repeating[parent.node].append(number)
        else:
            self._differing[parent, start].append(number)

    def find_longest_prefix(self, prompt_ids: TokenIds, images: Sequence[ImageSpan]) -> tuple[Position | None, int]:
        """Find the longest recorded prefix of a prompt: the position after it, and its number of ids."""
        if not self._nodes:
            return None, 0
        prompt = _Prompt(prompt_ids, images)
        best: tuple[int, int, Position | None] = (0, 0, None)
        waiting = [(number, 0) for number in self._differing.get((None, prompt.get_start(0)), ())]
        while waiting:
            number, start = waiting.pop()
            node = self._nodes[number]
            num_shared = prompt.count_shared(node, start)
            if num_shared == 0:
                continue
            end = Position(node=number, offset=num_shared)
            best = max(best, (start + num_shared, number, end), key=lambda found: found[:2])
            behind = self._differing.get((end, prompt.get_start(start + num_shared)), ())
            waiting += [(branch, start + num_shared) for branch in behind]
            for branch in self._repeating.get(number, ()):
                parent = self._nodes[branch].parent
                if parent is not None and parent.offset <= num_shared:
                    waiting.append((branch, start + parent.offset))
        return best[2], best[0]


class _Prompt:
    """The ids and images that are looked for."""

    def __init__(self, prompt_ids: TokenIds, images: Sequence[ImageSpan]) -> None:
        self._ids = prompt_ids
        self._images = sorted(images, key=lambda image: image.offset)
        self._offsets = [image.offset for image in self._images]

    def get_start(self, offset: int) -> _Start:
        """What begins at `offset`; at the end of the prompt, -1, which is no id."""
        if offset == len(self._ids):
            return (-1, None)
        images = self._find_images(offset, offset + 1)
        return int(self._ids[offset]), replace(images[0], offset=0) if images else None

    def count_shared(self, node: Node, start: int) -> int:
        """Count the ids of a node that the prompt has from `start` on, up to the first image that differs."""
        num_shared = count_common_prefix(node.token_ids, self._ids[start:])
        theirs = [replace(image, offset=image.offset - start) for image in self._find_images(start, start + num_shared)]
        return _find_first_different_image(node.images, theirs, num_shared)

    def _find_images(self, start: int, stop: int) -> list[ImageSpan]:
        """The images that begin in [start, stop)."""
        return self._images[bisect_left(self._offsets, start) : bisect_left(self._offsets, stop)]


def _get_start(node: Node, offset: int) -> _Start | None:
    """What begins at `offset` in a node; None at its end."""
    if offset == len(node.token_ids):
        return None
    image = next((replace(image, offset=0) for image in node.images if image.offset == offset), None)
    return int(node.token_ids[offset]), image


def _find_first_different_image(left: Sequence[ImageSpan], right: Sequence[ImageSpan], num_shared: int) -> int:
    """Get the offset of the first image that is not complete in both within `num_shared` ids, else `num_shared`."""
    if not left and not right:
        return num_shared
    different = set(left).symmetric_difference(right)
    cut = {image for image in (*left, *right) if image.stop > num_shared}
    return min([num_shared, *(image.offset for image in different | cut)])
