"""The images of rows as inputs of the model, processed again from each image's file and checked against the row's ids.

One row, `token_ids` 5 90 90 6, with an image of two ids at offset 1, and one row 5 7 without any:

    token_ids_BT    [[5 90 90 6], [5 7 0 0]]
    token_types_BT  [[0  1  1 0], [0 0 0 0]]
    tensors         {"pixel_values": [8, 1176], "image_grid_thw": [1, 3]}    concatenated over images, in order of rows

Sampler and trainer see the same picture because the row has its file, and the same ids because others are an error.
Shapes: B rows, T ids in the longest, L ids of one image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from unbroken.errors import InvalidInputError, InvariantError
from unbroken.images.decoder import encode_picture
from unbroken.images.lru_cache import LruCache
from unbroken.images.processor import ImageProcessor, ProcessedImage, join_inputs
from unbroken.types import EncodedImage, ImageSpan, TokenIds, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelInputs:
    """Inputs of the model for all images of one forward pass."""

    token_types_BT: torch.Tensor
    """int64, 1 for ids that are replaced by image features, else 0; transformers' `mm_token_type_ids`."""
    tensors: Mapping[str, torch.Tensor]
    """By the model's parameter names; the first dimension runs over the images, in order of rows."""


class RowImages:
    """Processes the images of rows, each image once as long as the cache has room."""

    def __init__(self, processor: ImageProcessor, *, max_bytes: int) -> None:
        """`max_bytes` limits the cache; images that do not fit are processed again."""
        self._processor = processor
        self._cache: LruCache[tuple[str, str], ProcessedImage] = LruCache(
            max_bytes, lambda processed: sum(tensor.nbytes for tensor in processed.inputs.values())
        )

    def check(self, sample: TrainingSample, *, name: str) -> None:
        """Check that the row's images match its ids.

        Raises:
            ImageError: an image is broken, or the processor refuses it or its settings.
            InvalidInputError: a given id is an image placeholder, but the row has no image there.
            InvariantError: the processor makes other ids of an image than the row has (I3).
        """
        of_images = np.zeros(len(sample.token_ids), dtype=np.bool_)
        for k, span in enumerate(sample.images):
            of_images[span.offset : span.stop] = True
            processed = self._process(span, name=f"{name}.images[{k}]")
            _check_ids(sample.token_ids[span.offset : span.stop], processed.token_ids, span, name=f"{name}.images[{k}]")
        lost = (sample.token_ids == self._processor.placeholder_id) & ~of_images & ~sample.sampled_mask
        if lost.any():
            raise InvalidInputError(
                f"{name}.token_ids[{int(np.flatnonzero(lost)[0])}] is the image placeholder "
                f"{self._processor.placeholder_id}, but none of the row's {len(sample.images)} images is there: "
                "were they omitted?"
            )

    def inputs(
        self, images: Sequence[Sequence[ImageSpan]], shape: torch.Size, device: torch.device
    ) -> PixelInputs | None:
        """The inputs for the images of each row of a pass over ids of shape [B, T]; None without images."""
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
            token_types_BT=token_types_BT.to(device), tensors={key: tensor.to(device) for key, tensor in joined.items()}
        )

    def example(self, device: torch.device) -> tuple[torch.Tensor, PixelInputs]:
        """[1, L] ids and the inputs of an example picture, to check a model with."""
        image = _example_image()
        ids = self._processor.process(image).token_ids
        span = ImageSpan(offset=0, length=len(ids), image=image, placeholder_id=self._processor.placeholder_id)
        token_ids_1L = torch.from_numpy(ids.astype(np.int64))[None].to(device)
        inputs = self.inputs([[span]], token_ids_1L.shape, device)
        assert inputs is not None, "there is an image"
        return token_ids_1L, inputs

    def forget(self) -> None:
        """Empty the cache."""
        self._cache.clear()

    def _process(self, span: ImageSpan, *, name: str) -> ProcessedImage:
        key = span.sha256, span.settings
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        processed = self._processor.process(span.image, span.settings, name=name)
        self._cache.put(key, processed)
        return processed


def _check_ids(own: TokenIds, processed: TokenIds, span: ImageSpan, *, name: str) -> None:
    if np.array_equal(own, processed):
        return
    count = f"{len(processed)}" if len(own) != len(processed) else "as many others"
    raise InvariantError(
        f"{name} (sha256 {span.sha256[:12]}..., settings {span.settings}) has {len(own)} ids in the row, at "
        f"{span.offset}, and {count} by the trainer's processor: the row must have the images in the order of their "
        "offsets and with the settings they were sampled with, and the trainer must have the sampler's processor (I3)"
    )


def _example_image() -> EncodedImage:
    from PIL import Image

    return encode_picture(Image.linear_gradient("L").resize((64, 64)).convert("RGB"))
