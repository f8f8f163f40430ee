"""Expand image placeholders to the canonical form of `types.images`, collapse them again, and compare both sides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unbroken.errors import EchoError, ImageError
from unbroken.images.processor import ImageProcessor
from unbroken.types import EncodedImage, ImageSpan, TokenIds, token_ids
from unbroken.types.arrays import count_common_prefix


def expand_placeholders(
    ids: TokenIds,
    images: Sequence[EncodedImage],
    processor: ImageProcessor,
    *,
    settings: str = "{}",
    name: str = "images",
) -> tuple[TokenIds, tuple[ImageSpan, ...]]:
    """Replace the placeholder of each image in `ids` by the image's ids, and return these ids with their spans.

    [1, 90, 2] with one image of three ids gives [1, 90, 90, 90, 2] and the span [1, 4). Images that are already
    expanded are left as they are. If there are as many placeholder ids as images, each stands for one image; otherwise
    a run of them is read as expanded images whose lengths add up to it. `settings` are those of `ImageSpan`, for all
    images; `name` is the field with the images, for errors.

    Raises:
        ImageError: there are more or fewer placeholders than images, or an expanded image has the wrong length.
    """
    expanded = [processor.expand(image, settings, name=f"{name}[{k}]") for k, image in enumerate(images)]
    places = _find_places(ids, expanded, processor.placeholder_id, name)
    return fill_places(ids, places, images, expanded, placeholder_id=processor.placeholder_id, settings=settings)


def fill_places(
    ids: TokenIds,
    places: Sequence[tuple[int, int]],
    images: Sequence[EncodedImage],
    expanded: Sequence[TokenIds],
    *,
    placeholder_id: int,
    settings: str,
) -> tuple[TokenIds, tuple[ImageSpan, ...]]:
    """Replace each place [start, stop) of `ids`, in order, by its image's `expanded` ids; return the ids and spans."""
    pieces: list[TokenIds] = []
    spans: list[ImageSpan] = []
    position = length = 0
    for (start, stop), image, own in zip(places, images, expanded, strict=True):
        pieces += [ids[position:start], own]
        offset = length + start - position
        spans.append(
            ImageSpan(offset=offset, length=len(own), image=image, placeholder_id=placeholder_id, settings=settings)
        )
        length, position = offset + len(own), stop
    return token_ids(np.concatenate([*pieces, ids[position:]])), tuple(spans)


def collapse_spans(ids: TokenIds, spans: Sequence[ImageSpan]) -> TokenIds:
    """Replace each span by one placeholder, [T']: the form that vLLM expects and expands itself."""
    pieces: list[TokenIds] = []
    position = 0
    for span in spans:
        pieces += [ids[position : span.offset], np.array([span.placeholder_id], dtype=np.int32)]
        position = span.stop
    return token_ids(np.concatenate([*pieces, ids[position:]]))


def check_expansion(sent: TokenIds, reported: TokenIds, spans: Sequence[ImageSpan]) -> None:
    """Raise `EchoError` if the prompt that an engine reports differs from the one sent, first at an image (I3)."""
    where = count_common_prefix(sent, reported)
    if where == len(sent) == len(reported):
        return
    for k, span in reversed(list(enumerate(spans))):
        if span.offset <= where <= span.stop:
            own = sent[span.offset : span.stop]
            uniform = bool((own == own[0]).all())
            found = _count_run(reported, span.offset, own[0]) if uniform else span.length + len(reported) - len(sent)
            raise EchoError(
                f"images[{k}] (sha256 {span.sha256[:12]}..., settings {span.settings}) has {span.length} ids in "
                f"the prompt that was sent and {found} in the engine's, at {span.offset}: the processors disagree"
            )


def _find_places(ids: TokenIds, expanded: Sequence[TokenIds], placeholder_id: int, name: str) -> list[tuple[int, int]]:
    """Find [start, stop) of each image in `ids`."""
    one_each = np.count_nonzero(ids == placeholder_id) == len(expanded)
    places: list[tuple[int, int]] = []
    stop = 0
    for position in np.flatnonzero(np.isin(ids, [placeholder_id, *(own[0] for own in expanded)])).tolist():
        if position < stop:
            continue
        own = expanded[len(places)] if len(places) < len(expanded) else None
        if own is not None and not (own == placeholder_id).all() and _starts_with(ids, position, own):
            stop = position + len(own)
            places.append((position, stop))
        elif ids[position] == placeholder_id:
            length = _count_run(ids, position, placeholder_id)
            lengths = [1 if one_each else len(own) for own in expanded[len(places) :]]
            stop = position
            for size in _read_run(length, lengths, len(places), name):
                places.append((stop, stop + size))
                stop += size
    if len(places) < len(expanded):
        raise ImageError(
            f"{name} must have as many images as the prompt has placeholders, got {len(expanded)} for {len(places)}: "
            f"{name}[{len(places)}] has no place"
        )
    return places


def _read_run(length: int, lengths: Sequence[int], first: int, name: str) -> list[int]:
    """Split a run of `length` placeholders among the next images, whose expanded lengths are `lengths`."""
    total = 0
    for k, own in enumerate(lengths):
        total += own
        if total == length:
            return list(lengths[: k + 1])
    if length <= len(lengths):
        return [1] * length
    if lengths:
        raise ImageError(
            f"{name}[{first}] must have one placeholder or the {lengths[0]} ids that the processor makes of it, got a "
            f"run of {length}"
        )
    raise ImageError(
        f"{name} must have an image for every placeholder of the prompt, got {first} and a run of {length} more: "
        "text that looks like a placeholder must be encoded as ordinary characters, and beside a placeholder that the "
        "model sampled the images must come as spans"
    )


def _count_run(ids: TokenIds, start: int, token_id: int) -> int:
    others = np.flatnonzero(ids[start:] != token_id)
    return int(others[0]) if others.size else len(ids) - start


def _starts_with(ids: TokenIds, position: int, own: TokenIds) -> bool:
    return bool(np.array_equal(ids[position : position + len(own)], own))
