"""A model's own image processor, one image at a time: how many ids an image takes, and what the model is fed for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unbroken.errors import ImageError, InvalidInputError
from unbroken.images.decoding import ImageLimits, decode_image
from unbroken.images.lru_cache import LruCache
from unbroken.types import EncodedImage, TokenIds, token_ids

if TYPE_CHECKING:
    import torch

_MOST_KNOWN = 4096
"""How many images' ids are remembered: some kilobytes each."""
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Names in `size` for numbers of pixels, by the names that most people know them by."""
_NOT_PIXELS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedImage:
    """What a processor makes of one image."""

    token_ids: TokenIds
    """[L] what stands in the prompt in place of the placeholder."""
    token_types: TokenIds
    """[L] 1 at the ids that are features, 0 at those that only set them apart (`mm_token_type_ids` of transformers)."""
    inputs: Mapping[str, torch.Tensor]
    """The model's inputs for it, by name, such as `pixel_values` and `image_grid_thw`; images are joined along the
    first dimension."""


class ImageProcessor(Protocol):
    """What makes ids and model inputs of images. Safe to use from several threads."""

    @property
    def placeholder_id(self) -> int:
        """The id that the chat template writes for one image."""
        ...

    @property
    def setting_names(self) -> frozenset[str]:
        """The settings that `mm_processor_kwargs` may hold."""
        ...

    def expand(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> TokenIds:
        """[L] the ids that stand for an image; `settings` as in `ImageSpan`.

        Raises:
            ImageError: the image is broken, or the processor refuses it or the settings; `name` says which image.
        """
        ...

    def process(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> ProcessedImage:
        """The ids and the model's inputs.

        Raises:
            ImageError: as `expand`.
        """
        ...


class HfImageProcessor:
    """Implements `ImageProcessor` with a transformers processor of an image-text model.

    Each image is processed alone, as the text of one placeholder with one image: what families do to their prompts
    around images is then the processor's own doing.
    """

    def __init__(self, processor: Any, *, limits: ImageLimits | None = None) -> None:
        """Use a processor, such as `AutoProcessor.from_pretrained` gives it.

        Raises:
            InvalidInputError: it takes no images, or its placeholder is no single id.
        """
        if getattr(processor, "image_processor", None) is None:
            raise InvalidInputError(f"processor must be one of an image-text model, got {type(processor).__name__}")
        self._processor = processor
        self._limits = limits or ImageLimits()
        # Gemma 3 writes the beginning of the image, which becomes more than the ids of features.
        self._placeholder: str = getattr(processor, "boi_token", None) or processor.image_token
        ids = processor.tokenizer.encode(self._placeholder, add_special_tokens=False)
        if len(ids) != 1:
            raise InvalidInputError(f"the image placeholder {self._placeholder!r} must be one id, got {ids}")
        self._placeholder_id: int = ids[0]
        self._settings = _setting_names(processor.image_processor)
        self._expanded: LruCache[tuple[str, str], TokenIds] = LruCache(_MOST_KNOWN)

    @property
    def placeholder_id(self) -> int:
        """See `ImageProcessor`."""
        return self._placeholder_id

    @property
    def setting_names(self) -> frozenset[str]:
        """See `ImageProcessor`."""
        return self._settings

    def expand(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> TokenIds:
        """See `ImageProcessor`. Remembered by image and settings."""
        known = self._expanded.get((image.sha256, settings))
        return self.process(image, settings, name=name).token_ids if known is None else known

    def process(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> ProcessedImage:
        """See `ImageProcessor`."""
        chosen = json.loads(settings)
        unknown = sorted(set(chosen) - self._settings)
        if unknown:
            raise ImageError(f"mm_processor_kwargs must be some of {sorted(self._settings)}, got {unknown}")
        picture = decode_image(image, self._limits, name=name)
        try:
            outputs = self._processor(
                text=[self._placeholder],
                images=[[picture]],
                add_special_tokens=False,
                return_mm_token_type_ids=True,
                return_tensors="pt",
                **_with_size(chosen, self._processor.image_processor),
            )
        except Exception as error:
            raise ImageError(
                f"{name} must be one that the model's processor takes with {settings}, got {picture.width} x "
                f"{picture.height} pixels: {type(error).__name__}: {error}"
            ) from error
        processed = ProcessedImage(
            token_ids=token_ids(outputs["input_ids"][0].numpy()),
            token_types=token_ids(outputs["mm_token_type_ids"][0].numpy()),
            inputs={key: value for key, value in outputs.items() if key not in _NOT_PIXELS},
        )
        self._expanded.put((image.sha256, settings), processed.token_ids)
        return processed


def join_inputs(images: Sequence[ProcessedImage]) -> dict[str, torch.Tensor]:
    """The model's inputs for several images of one forward pass, in this order.

    Raises:
        ImageError: they differ in more than the first dimension.
    """
    import torch

    joined = {}
    for name in images[0].inputs:
        tensors = [image.inputs[name] for image in images]
        shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
        if len(shapes) != 1:
            raise ImageError(
                f"the {name} of images in one forward pass must agree in all dimensions but the first, got "
                f"{sorted(shapes)}: this model's processor makes inputs that cannot be joined"
            )
        joined[name] = torch.cat(tensors)
    return joined


def load_image_processor(model: str | Path, *, limits: ImageLimits | None = None) -> HfImageProcessor | None:
    """The image processor of a model's folder or hub name; None for a text model.

    Raises:
        InvalidInputError: there is one, but it cannot be loaded.
    """
    from transformers import AutoProcessor
    from transformers.utils import cached_file

    found = (
        cached_file(
            model, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        for file in ("preprocessor_config.json", "processor_config.json")
    )
    if not any(found):
        return None
    try:
        processor = AutoProcessor.from_pretrained(model)
    except Exception as error:
        raise InvalidInputError(
            f"the image processor of {str(model)!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return None if getattr(processor, "image_processor", None) is None else HfImageProcessor(processor, limits=limits)


def _setting_names(image_processor: Any) -> frozenset[str]:
    """The keyword arguments that an image processor declares."""
    valid = getattr(image_processor, "valid_kwargs", None)
    names = set(getattr(valid, "__annotations__", {})) if valid is not None else set()
    for base in getattr(valid, "__mro__", ()):
        names |= set(getattr(base, "__annotations__", {}))
    return frozenset(names - {"return_tensors", "device", "disable_grouping"})


def _with_size(settings: Mapping[str, Any], image_processor: Any) -> Mapping[str, Any]:
    """Settings with `min_pixels` and `max_pixels` as parts of `size`, which they are for Qwen's and alike.

    transformers does this itself, warns of it, and ends it with v5.23. A warning would be an error where warnings are.
    """
    given = {_EDGES[name]: value for name, value in settings.items() if name in _EDGES and value is not None}
    usual, own = dict(getattr(image_processor, "size", None) or {}), settings.get("size") or {}
    if not given or not usual.keys() >= set(_EDGES.values()) or not isinstance(own, Mapping):
        return settings
    return {**{k: v for k, v in settings.items() if k not in _EDGES}, "size": usual | dict(own) | given}
