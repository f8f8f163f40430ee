"""Images in the embedded engine: the features that replace embeddings at a prompt's images.

In the cache of slots a prompt with images is ids like any other, except that at an image the model is fed the features
that its vision part computes from the pixels, not embeddings. Prompts are compared, to reuse keys and values, by their
*keys*: the ids, but at features a number for that image and its settings. Ids between features, such as 91, are ids.

    prompt_ids   11 90 90 91 90 12 90 90     keys   11 -1 -1 91 -1 12 -2 -2

Shapes: T ids of a prompt, F features of an image, H hidden size.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unbroken.errors import EchoError, ImageError, InvalidInputError
from unbroken.images.processor import ImageProcessor, ProcessedImage, join_inputs, name_token_types
from unbroken.types import ImageSpan, TokenIds, freeze

_MAX_KEYS = 2**16
"""Number of images that keep their key; an image that lost its key is computed anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImages:
    """The processed images of one prompt, shared by all rows of a request."""

    keys: TokenIds
    """[T]"""
    images: tuple[ProcessedImage, ...]
    places: tuple[NDArray[np.int64], ...]
    """[F] for each image: the positions of its features in the prompt, rising."""
    rope: NDArray[np.int64] | None
    """[3, T] the ids' positions in a model with multimodal rope; None if they are 0, 1, 2, ..."""

    def rope_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [3, N] the model's positions at [N] positions of prompt and completion."""
        assert self.rope is not None
        last = self.rope.shape[1] - 1
        behind = self.rope.max() - last + positions
        return np.where(positions <= last, self.rope[:, np.minimum(positions, last)], behind)

    def features_at(self, positions: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield, for each image with features at some of [N] positions, its number, which of N, and which features."""
        for number, places in enumerate(self.places):
            nearest = np.minimum(np.searchsorted(places, positions), len(places) - 1)
            columns = np.flatnonzero(places[nearest] == positions)
            if columns.size:
                yield number, columns, nearest[columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainInputs:
    """The inputs for the images of a sequence, in a pass without a cache."""

    token_types_1T: torch.Tensor
    """1 at the ids of image features, else 0."""
    tensors: Mapping[str, torch.Tensor]
    """By the model's parameter names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFeatures:
    """The features of a prompt's images under the weights in use."""

    images: PromptImages
    computed: dict[int, torch.Tensor] = field(default_factory=dict)
    """[F, H] by the image's number; computed when first needed, dropped with the weights."""


class ImageModel:
    """The vision part of a transformers model (its `get_image_features`), and the processor that feeds it."""

    def __init__(self, model: Any, processor: ImageProcessor) -> None:
        self.processor = processor
        self._backbone = model.base_model
        if not hasattr(self._backbone, "get_image_features"):
            raise InvalidInputError(f"{type(model).__name__} takes no images: it has no get_image_features")
        self._get_features = self._backbone.get_image_features
        self._device: torch.device = model.device
        self._keys: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._num_keys = 0
        self._lock = threading.Lock()

    def prepare(self, prompt_ids: TokenIds, spans: Sequence[ImageSpan]) -> PromptImages:
        """Process the images of a prompt, in any thread. `ImageError` and `EchoError` as `Engine.sample`."""
        images = [self.processor.process(s.image, s.settings, name=f"images[{k}]") for k, s in enumerate(spans)]
        for k, (span, image) in enumerate(zip(spans, images, strict=True)):
            _check_image_ids(prompt_ids, span, image.token_ids, name=f"images[{k}]")
        places = tuple(
            span.offset + np.flatnonzero(image.token_types) for span, image in zip(spans, images, strict=True)
        )
        keys = prompt_ids.copy()
        for span, of_image in zip(spans, places, strict=True):
            keys[of_image] = self._key(span)
        return PromptImages(
            keys=freeze(keys), images=tuple(images), places=places, rope=self._rope(prompt_ids, spans, images)
        )

    def score_inputs(self, prompt_ids: TokenIds, spans: Sequence[ImageSpan]) -> PlainInputs:
        """Process images and return their `plain_inputs`; may run in any thread, and raises as `prepare`."""
        return self.plain_inputs(prompt_ids, spans, self.prepare(prompt_ids, spans).images)

    def write_features(self, embeds_TH: torch.Tensor, positions: NDArray[np.int64], features: ImageFeatures) -> None:
        """Replace embeddings with the features of images at [T] positions of the sequence."""
        for number, columns, of_image in features.images.features_at(positions):
            if number not in features.computed:
                features.computed[number] = self._features(features.images.images[number])
            embeds_TH[columns] = features.computed[number][of_image].to(embeds_TH.dtype)

    def _features(self, image: ProcessedImage) -> torch.Tensor:
        inputs = _select_inputs(self._get_features, self._on_device(image.inputs))
        return torch.cat(list(self._get_features(**inputs, return_dict=True).pooler_output))

    def plain_inputs(
        self, prompt_ids: TokenIds, spans: Sequence[ImageSpan], images: Sequence[ProcessedImage]
    ) -> PlainInputs:
        """Return the model's inputs for images besides `input_ids` [1, T], in a pass without a cache."""
        types = torch.from_numpy(_token_types(prompt_ids, spans, images))[None].to(self._device)
        tensors = self._on_device(join_inputs(images))
        return PlainInputs(
            token_types_1T=types, tensors=tensors | _select_inputs(self._backbone.forward, name_token_types(types))
        )

    def _rope(
        self, prompt_ids: TokenIds, spans: Sequence[ImageSpan], images: Sequence[ProcessedImage]
    ) -> NDArray[np.int64] | None:
        # Only models with multimodal rope have the method.
        get_rope_index = getattr(self._backbone, "get_rope_index", None)
        if get_rope_index is None:
            return None
        inputs = join_inputs(images)
        inputs |= name_token_types(torch.from_numpy(_token_types(prompt_ids, spans, images))[None])
        ids = torch.from_numpy(prompt_ids.astype(np.int64))[None]
        try:
            positions, _ = get_rope_index(ids, **_select_inputs(get_rope_index, inputs))
        except (RuntimeError, StopIteration) as error:
            raise ImageError(
                f"images must have text ids between them in this model, got images at "
                f"{[(span.offset, span.stop) for span in spans]}: {error}"
            ) from error
        rope: NDArray[np.int64] = positions[:, 0].numpy()
        return rope

    def _key(self, span: ImageSpan) -> int:
        name = (span.sha256, span.settings)
        with self._lock:
            if name not in self._keys:
                self._num_keys += 1
                self._keys[name] = -self._num_keys
                if len(self._keys) > _MAX_KEYS:
                    self._keys.popitem(last=False)
            self._keys.move_to_end(name)
            return self._keys[name]

    def _on_device(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._device) for name, tensor in inputs.items()}


def _token_types(
    prompt_ids: TokenIds, spans: Sequence[ImageSpan], images: Sequence[ProcessedImage]
) -> NDArray[np.int64]:
    types = np.zeros(len(prompt_ids), dtype=np.int64)
    for span, image in zip(spans, images, strict=True):
        types[span.offset : span.stop] = image.token_types
    return types


def _select_inputs(function: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep the inputs that the function has as parameters."""
    names = inspect.signature(function).parameters
    return {name: tensor for name, tensor in inputs.items() if name in names}


def _check_image_ids(ids: TokenIds, span: ImageSpan, own: TokenIds, *, name: str) -> None:
    """Raise `EchoError` if the ids at a span differ from `own`, the ids that a processor makes of its image (I3).

    Comparing whole prompts is not enough: it misses two adjacent images whose lengths are swapped.
    """
    if not np.array_equal(ids[span.offset : span.stop], own):
        others = "others, " if span.length == len(own) else ""
        raise EchoError(
            f"{name} (sha256 {span.sha256[:12]}..., settings {span.settings}) has {span.length} ids in the prompt that "
            f"was sent and {others}{len(own)} in the engine's, at {span.offset}: the processors disagree"
        )
