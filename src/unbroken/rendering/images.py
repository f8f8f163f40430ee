r"""Replaces the image placeholders that a template wrote by the ids of the images.

One message with two images, of 3 and 2 ids; the template wrote one placeholder for each:

    token_ids        11 90 12 90 13         11 90 90 90 12 90 90 13
    message_indices  -1 -1  0 -1 -1         -1  0  0  0  0  0  0 -1
                                            spans [1, 4) and [5, 7)

Text from outside cannot contain a placeholder (I5), so the k-th placeholder is the k-th image. It must be among the
text of its message, so that a template which leaves out, repeats or moves images between messages is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unbroken.errors import InvalidInputError, MessagesError
from unbroken.images.loader import find_image_parts
from unbroken.images.placeholders import fill_places
from unbroken.images.processor import ImageInputs
from unbroken.messages import Message, has_images
from unbroken.rendering.base import TEMPLATE
from unbroken.rendering.encoding.tokenizer import AddedTokens
from unbroken.types import EncodedImage, ImageSpan, TokenIds, token_ids
from unbroken.types.arrays import freeze


class PlaceholderError(Exception):
    """The template did not write one placeholder for each image, in its message. Never leaves this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageImage:
    """An image of the message with the index `message`."""

    place: str
    """Its name in errors, such as `messages[2].content[0]`."""
    message: int
    image: EncodedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacedImages:
    """Encoded text with its images expanded."""

    token_ids: TokenIds
    """[T]"""
    message_indices: TokenIds
    """[T] an image's ids have the index of its message."""
    images: tuple[ImageSpan, ...]


def load_images(
    messages: Sequence[Message], inputs: ImageInputs | None, *, no_images_because: str
) -> list[MessageImage]:
    """Load the images of checked messages, in order. Without `inputs`, `no_images_because` is the reason in the error.

    Raises:
        MessagesError: there are images, and the model takes none.
        ImageError: an image has an unknown form, is broken or is beyond the limits.
    """
    parts = find_image_parts(messages)
    if parts and inputs is None:
        raise MessagesError(f"{parts[0][0]} must not be an image: {no_images_because}")
    found = ((place, int(place[len("messages[") : place.index("]")]), part) for place, part in parts)
    return [
        MessageImage(place=place, message=message, image=inputs.loader.load_part(part, name=place))
        for place, message, part in found
        if inputs is not None
    ]


def place_images(
    ids: TokenIds, message_indices: TokenIds, images: Sequence[MessageImage], inputs: ImageInputs | None
) -> _PlacedImages:
    """Expand each placeholder in `ids` [T'] to the ids of its image.

    Raises:
        PlaceholderError: there is not one placeholder for each image, or one is in another message.
        ImageError: the processor refuses an image or the settings.
    """
    if inputs is None:
        return _PlacedImages(token_ids=freeze(ids), message_indices=message_indices, images=())
    processor, settings = inputs.processor, inputs.settings
    positions = np.flatnonzero(ids == processor.placeholder_id).tolist()
    if len(positions) != len(images):
        raise PlaceholderError(f"the chat template writes {len(positions)} image placeholders for {len(images)} images")
    if not images:
        return _PlacedImages(token_ids=token_ids(ids), message_indices=message_indices, images=())
    _check_places(positions, message_indices, images)
    expanded = [processor.expand(image.image, settings, name=image.place) for image in images]
    lengths = np.ones(len(ids), dtype=np.int64)
    lengths[positions] = [len(own) for own in expanded]
    owners = message_indices.copy()
    owners[positions] = [image.message for image in images]
    placed, spans = fill_places(
        ids,
        [(position, position + 1) for position in positions],
        [image.image for image in images],
        expanded,
        placeholder_id=processor.placeholder_id,
        settings=settings,
    )
    return _PlacedImages(token_ids=placed, message_indices=np.repeat(owners, lengths), images=spans)


def replace_images_by_files(messages: Sequence[Message], images: Sequence[MessageImage]) -> list[Message]:
    """Replace the images of messages by their files; messages without images are the same objects."""
    loaded = {image.place: image.image for image in images}
    return [
        {**message, "content": _parts_with_files(position, message["content"], loaded)}
        if has_images(message.get("content"))
        else message
        for position, message in enumerate(messages)
    ]


def find_placeholder(inputs: ImageInputs | None, control: AddedTokens) -> str | None:
    """Find the placeholder of images in rendered text. Raises `InvalidInputError` if it is not a control token."""
    if inputs is None:
        return None
    placeholder_id = inputs.processor.placeholder_id
    text = control.get_text(placeholder_id)
    if text is None:
        raise InvalidInputError(
            f"the image placeholder (id {placeholder_id}) must be a control token of the tokenizer: add it to the "
            "tokenizer's special tokens, because messages could spell it otherwise"
        )
    return text


def _parts_with_files(position: int, content: Any, loaded: Mapping[str, EncodedImage]) -> list[Any]:
    places = [f"messages[{position}].content[{k}]" for k in range(len(content))]
    return [
        {"type": "image", "image": loaded[place]} if place in loaded else part
        for place, part in zip(places, content, strict=True)
    ]


def _check_places(positions: Sequence[int], message_indices: TokenIds, images: Sequence[MessageImage]) -> None:
    """Check that text of a later message is not before a placeholder, and text of an earlier one not after it."""
    known = np.flatnonzero(message_indices != TEMPLATE)
    nearest = np.searchsorted(known, positions)
    for image, position, k in zip(images, positions, nearest.tolist(), strict=True):
        before = int(message_indices[known[k - 1]]) if k else 0
        after = int(message_indices[known[k]]) if k < len(known) else image.message
        if not before <= image.message <= after:
            raise PlaceholderError(
                f"the chat template writes the placeholder of {image.place} (id {position}) between text of "
                f"messages[{before}] and messages[{after}]"
            )
