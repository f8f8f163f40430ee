"""The images of rows as inputs of the model: made again from each image's file, and checked to be what the row holds.

One row, `token_ids` 5 90 90 6, with an image of two ids at offset 1, and one row 5 7 without any:

    token_ids_BT    [[5 90 90 6], [5 7 0 0]]
    token_types_BT  [[0  1  1 0], [0 0 0 0]]
    tensors         {"pixel_values": [8, 1176], "image_grid_thw": [1, 3]}    joined over the images, in order of rows

Sampler and trainer see the same picture because the row holds its file, and the same ids because a processor that
makes others of it than the sampler's did is refused. Shapes: B rows, T ids in the longest, L ids of one image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from unbroken.errors import InvalidInputError, InvariantError
from unbroken.images.decoding import encode_picture
from unbroken.images.lru_cache import LruCache
from unbroken.images.processing import ImageProcessor, ProcessedImage, join_inputs
from unbroken.types import EncodedImage, ImageSpan, TokenIds, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelInputs:
    """What the model is fed for all images of one forward pass."""

    token_types_BT: torch.Tensor
    """int64, 1 at the ids that are features of an image, 0 elsewhere; transformers' `mm_token_type_ids`."""
    tensors: Mapping[str, torch.Tensor]
    """By the model's names for them; the first dimension runs over the images, in order of rows."""


class RowImages:
    """Makes the inputs for the images of rows, each image once as long as there is room to remember it."""

    def __init__(self, processor: ImageProcessor, *, max_bytes: int) -> None:
        """`max_bytes` bounds what is remembered until `forget`; an image beyond it is processed again."""
        self._processor = processor
        self._known: LruCache[tuple[str, str], ProcessedImage] = LruCache(max_bytes, _num_bytes)

    def check(self, sample: TrainingSample, *, name: str) -> None:
        """Check that the row's images are those that its ids show.

        Raises:
            ImageError: an image is broken, or the processor refuses it or its settings.
            InvalidInputError: a given id is the placeholder of an image, and no image stands there.
            InvariantError: the processor makes other ids of an image than the row has for it (I3).
        """
        of_images = np.zeros(len(sample.token_ids), dtype=np.bool_)
        for k, span in enumerate(sample.images):
            of_images[span.offset : span.stop] = True
            processed = self._process(span, name=f"{name}.images[{k}]")
            _check_ids(sample.token_ids[span.offset : span.stop], processed.token_ids, span, name=f"{name}.images[{k}]")
        lost = (sample.token_ids == self._processor.placeholder_id) & ~of_images & ~sample.sampled_mask
        if lost.any():
            raise InvalidInputError(
                f"{name}.token_ids[{int(np.flatnonzero(lost)[0])}] is {self._processor.placeholder_id}, which stands "
                f"for an image, and none of the row's {len(sample.images)} images is there: were they left out?"
            )

    def inputs(
        self, images: Sequence[Sequence[ImageSpan]], shape: torch.Size, device: torch.device
    ) -> PixelInputs | None:
        """The inputs for the images of each row of a pass over ids of this shape [B, T]; None if there is no image."""
        processed = [
            (row, span, self._process(span, name="image")) for row, of_row in enumerate(images) for span in of_row
        ]
        if not processed:
            return None
        token_types_BT = torch.zeros(shape, dtype=torch.int64)
        for row, span, image in processed:
            token_types_BT[row, span.offset : span.stop] = torch.from_numpy(image.token_types.astype(np.int64))
        joined = join_inputs([image for _, _, image in processed])
        return PixelInputs(
            token_types_BT=token_types_BT.to(device),
            tensors={key: tensor.to(device) for key, tensor in joined.items()},
        )

    def example(self, device: torch.device) -> tuple[torch.Tensor, PixelInputs]:
        """[1, L] the ids of some picture, and the inputs for it: to try a model on."""
        image = _example_image()
        ids = self._processor.process(image).token_ids
        span = ImageSpan(offset=0, length=len(ids), image=image, placeholder_id=self._processor.placeholder_id)
        token_ids_BT = torch.from_numpy(ids.astype(np.int64))[None].to(device)
        inputs = self.inputs([[span]], token_ids_BT.shape, device)
        assert inputs is not None, "there is an image"
        return token_ids_BT, inputs

    def forget(self) -> None:
        """Free the memory of everything remembered."""
        self._known.clear()

    def _process(self, span: ImageSpan, *, name: str) -> ProcessedImage:
        key = span.sha256, span.settings
        known = self._known.get(key)
        if known is not None:
            return known
        processed = self._processor.process(span.image, span.settings, name=name)
        self._known.put(key, processed)
        return processed


def _check_ids(own: TokenIds, processed: TokenIds, span: ImageSpan, *, name: str) -> None:
    if np.array_equal(own, processed):
        return
    what = (
        f"{len(own)} ids in the row, at {span.offset}, and {len(processed)} by the trainer's processor"
        if len(own) != len(processed)
        else f"{len(own)} ids in the row, at {span.offset}, and as many others by the trainer's processor"
    )
    raise InvariantError(
        f"{name} (sha256 {span.sha256[:12]}..., settings {span.settings}) has {what}: the row must name the images in "
        "the order of their places and with the settings they were sampled with, and the trainer must have the "
        "sampler's processor (I3)"
    )


def _num_bytes(processed: ProcessedImage) -> int:
    return sum(tensor.nbytes for tensor in processed.inputs.values())


def _example_image() -> EncodedImage:
    from PIL import Image

    return encode_picture(Image.linear_gradient("L").resize((64, 64)).convert("RGB"))
