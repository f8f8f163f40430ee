"""Run a model's own image processor on one image at a time, for the image's ids and the model's inputs."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from unbroken.errors import ImageError, InvalidInputError
from unbroken.images.decoder import ImageLimits, decode_image
from unbroken.images.loader import ImageLoader
from unbroken.images.lru_cache import LruCache
from unbroken.types import EncodedImage, TokenIds, token_ids

if TYPE_CHECKING:
    import torch


_Value = TypeVar("_Value")
_MAX_CACHED = 4096
"""Images whose ids are cached, some kilobytes each."""
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Keys of `size` that hold numbers of pixels, by their usual names."""
_SIZES = frozenset({"image_sizes", "pixel_attention_mask"})
"""Inputs that tell a model which part of `pixel_values` is the image, and which part was filled up."""
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
_NOT_OF_IMAGES = frozenset({"video_processor", "feature_extractor", "processor_class", "auto_map", "chat_template"})
"""What a processor's settings have beside those of images; its class is named by itself."""
_NOT_PIXELS = frozenset({"input_ids", "attention_mask", *_TOKEN_TYPES})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedImage:
    """The output of an image processor for one image."""

    token_ids: TokenIds
    """[L] the ids that replace the placeholder in the prompt."""
    token_types: TokenIds
    """[L] 1 at ids of image features, 0 at ids that only separate them (`mm_token_type_ids` of transformers)."""
    inputs: Mapping[str, torch.Tensor]
    """Such as `pixel_values` and `image_grid_thw`; the images of a batch are joined along the first dimension."""


class ImageProcessor(Protocol):
    """Makes ids and model inputs from images. Safe to use from several threads."""

    @property
    def placeholder_id(self) -> int:
        """The id that the chat template writes for one image."""
        ...

    @property
    def setting_names(self) -> frozenset[str]:
        """The keys that `mm_processor_kwargs` may have."""
        ...

    @property
    def description(self) -> str:
        """Its class and all its settings, as JSON: two of one description make the same ids and inputs of an image."""
        ...

    def expand(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> TokenIds:
        """Get the ids of an image, [L]; `settings` as in `ImageSpan`, `name` for errors.

        Raises:
            ImageError: the image is broken, or the processor refuses it or the settings.
        """
        ...

    def count_features(self, width: int, height: int, settings: str = "{}") -> int:
        """Count the ids of an image's features by its size alone, without decoding it; 0 if they depend on more."""
        ...

    def process(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> ProcessedImage:
        """Get the ids and the model's inputs; errors as in `expand`."""
        ...


class HfImageProcessor:
    """Implements `ImageProcessor` with a transformers processor of an image-text model.

    Each image is processed alone, with one placeholder as the text, so ids that a model family puts around its images
    come from the processor itself.
    """

    def __init__(self, processor: Any, *, limits: ImageLimits | None = None) -> None:
        """Use a processor of `AutoProcessor`; `InvalidInputError` if it takes no images or has no placeholder id."""
        if not _takes_images(processor):
            raise InvalidInputError(f"processor must be one of an image-text model, got {type(processor).__name__}")
        self._processor = processor
        self._limits = limits or ImageLimits()
        # Gemma 3's template writes the token that begins an image, which the processor expands to more than features.
        self._placeholder = _read(processor, "boi_token", str) or str(processor.image_token)
        ids = processor.tokenizer.encode(self._placeholder, add_special_tokens=False)
        if len(ids) != 1:
            raise InvalidInputError(f"the image placeholder {self._placeholder!r} must be one id, got {ids}")
        self._placeholder_id: int = ids[0]
        self._feature_id = _read(processor, "image_token_id", int) or -1
        self._settings = _get_setting_names(processor.image_processor)
        self._expanded: LruCache[tuple[str, str], TokenIds] = LruCache(_MAX_CACHED)

    @property
    def placeholder_id(self) -> int:
        return self._placeholder_id

    @property
    def setting_names(self) -> frozenset[str]:
        return self._settings

    @functools.cached_property  # servers say it in each list of their models
    def description(self) -> str:
        """See `ImageProcessor`. Two versions of transformers may differ in settings that are None in both."""
        every = self._processor.to_dict()
        images = {name: value for name, value in every.pop("image_processor", {}).items() if value is not None}
        kept = {name: value for name, value in every.items() if name not in _NOT_OF_IMAGES and value is not None}
        kept |= {f"image_processor.{name}": value for name, value in images.items() if name not in _NOT_OF_IMAGES}
        classes = {
            "processor_class": type(self._processor).__name__,
            # `to_dict` has one name for the classes that resize by torchvision and by Pillow, to other pixels.
            "image_processor_class": type(self._processor.image_processor).__name__,
        }
        return json.dumps(kept | classes, sort_keys=True, default=str)

    def expand(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> TokenIds:
        """See `ImageProcessor`. Cached by image and settings."""
        cached = self._expanded.get((image.sha256, settings))
        return self.process(image, settings, name=name).token_ids if cached is None else cached

    def count_features(self, width: int, height: int, settings: str = "{}") -> int:
        """See `ImageProcessor`. 0 for families that cannot tell, and for settings that their count ignores."""
        chosen = json.loads(settings)
        count: Any = _read(self._processor, "_get_num_multimodal_tokens", object)
        if count is None or not (self._settings >= _EDGES.keys() or not chosen):
            return 0
        areas = _find_areas(chosen, self._processor.image_processor) if chosen else {}
        try:
            # EXIF data may exchange width and height: the smaller number is certain.
            counts = count(image_sizes=[(height, width), (width, height)], **areas)["num_image_tokens"]
        except Exception:  # `process` has the error for a size that the processor refuses
            return 0
        return min(map(int, counts))

    def process(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> ProcessedImage:
        chosen = json.loads(settings)
        unknown = sorted(set(chosen) - self._settings)
        if unknown:
            raise ImageError(f"mm_processor_kwargs must be some of {sorted(self._settings)}, got {unknown}")
        with self._limits.reserve({name: image}):
            picture = decode_image(image, self._limits, name=name)
            try:
                outputs = self._processor(
                    text=[self._placeholder],
                    images=[[picture]],
                    add_special_tokens=False,
                    return_mm_token_type_ids=True,
                    return_tensors="pt",
                    **_merge_pixel_limits(chosen, self._processor.image_processor),
                )
            except Exception as error:
                raise ImageError(
                    f"{name} must be one that the model's processor takes with {settings}, got {picture.width} x "
                    f"{picture.height} pixels: {type(error).__name__}: {error}"
                ) from error
            del picture
        processed = ProcessedImage(
            token_ids=token_ids(outputs["input_ids"][0].numpy()),
            token_types=self._find_features(outputs),
            inputs={key: value for key, value in outputs.items() if key not in _NOT_PIXELS},
        )
        self._expanded.put((image.sha256, settings), processed.token_ids)
        return processed

    def _find_features(self, outputs: Mapping[str, Any]) -> TokenIds:
        """[L] 1 at features. transformers' own types are 1 at the ids between them too, in families such as Pixtral."""
        types = next(outputs[key] for key in _TOKEN_TYPES if key in outputs)[0]
        features = (types == 1) & (outputs["input_ids"][0] == self._feature_id)
        # Gemma 3's image token is the one that begins an image, and no feature.
        return token_ids((features if features.any() else types).numpy().astype("int32"))


def join_inputs(images: Sequence[ProcessedImage]) -> dict[str, torch.Tensor]:
    """Join the inputs of several images along the first dimension, for one forward pass.

    Where other dimensions differ, tensors are filled up with zeros at their ends, as transformers' processors fill up
    several images of one call, if another input (`_SIZES`) tells the model which part is the image.

    Raises:
        ImageError: other dimensions differ, and nothing would tell the model what was filled up.
    """
    import torch

    joined = {}
    for name in images[0].inputs:
        tensors = [image.inputs[name] for image in images]
        shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
        has_same_rank = len(set(map(len, shapes))) == 1
        if len(shapes) == 1:
            pass
        elif has_same_rank and not _SIZES.isdisjoint(images[0].inputs):
            largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
            tensors = [_fill_up(tensor, largest) for tensor in tensors]
        else:
            raise ImageError(
                f"the {name} of images in one forward pass must agree in all dimensions but the first, got "
                f"{sorted(shapes)}: this model's processor makes inputs that cannot be joined"
            )
        joined[name] = torch.cat(tensors)
    return joined


def _fill_up(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    filled = tensor.new_zeros((tensor.shape[0], *sizes))
    filled[tuple(slice(size) for size in tensor.shape)] = tensor
    return filled


def name_token_types(token_types_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """The types of ids under each name that a model may take them by: transformers 5.19 has another one for Gemma 3."""
    return dict.fromkeys(_TOKEN_TYPES, token_types_BT)


def find_model_file(model: str | Path, name: str) -> Path | None:
    """Find a file of a model's folder or hub name, without transformers; None if it has none, or the hub is away.

    Raises:
        OSError: there is no such model.
    """
    if Path(model).is_dir():
        file = Path(model, name)
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(str(model), name))
    except EntryNotFoundError:
        return None
    except Exception:  # transformers finds the file in the cache, or has the words for what is wrong
        from transformers.utils import cached_file

        found: Any = cached_file(
            model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        return None if found is None else Path(found)


def load_image_processor(model: str | Path, *, limits: ImageLimits | None = None) -> HfImageProcessor | None:
    """Load the image processor of a model (None for a text model); raises `InvalidInputError` if it is broken."""
    if not any(find_model_file(model, name) for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(model)
    except Exception as error:
        raise InvalidInputError(
            f"the image processor of {str(model)!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return HfImageProcessor(processor, limits=limits) if _takes_images(processor) else None


def _read(owner: Any, name: str, kind: type[_Value]) -> _Value | None:
    """An attribute of a processor; None if it has none, or one of another type.

    The families' processors share no interface: a text model's is a tokenizer, Gemma 3 alone has a `boi_token`, Idefics
    3 cannot count, and image processors limit areas or edges.
    """
    value = getattr(owner, name, None)
    return value if isinstance(value, kind) else None


def _takes_images(processor: Any) -> bool:
    return _read(processor, "image_processor", object) is not None


def _get_setting_names(image_processor: Any) -> frozenset[str]:
    valid = _read(image_processor, "valid_kwargs", type)  # a TypedDict, whose annotations have those of its bases
    names = frozenset() if valid is None else frozenset(valid.__annotations__)
    return names - {"return_tensors", "device", "disable_grouping"}


def _get_size(image_processor: Any) -> dict[str, Any]:
    """The default size: pixels by names such as `shortest_edge`; empty if the processor has none."""
    size: Any = _read(image_processor, "size", object)
    return dict(size or {})


def _find_areas(settings: Mapping[str, Any], image_processor: Any) -> dict[str, Any]:
    """The smallest and largest area of a picture under settings, as `min_pixels` and `max_pixels`."""
    own = _merge_pixel_limits(settings, image_processor).get("size") or {}
    size = {**_get_size(image_processor), **own}
    return {name: size[edge] for name, edge in _EDGES.items() if edge in size}


def _merge_pixel_limits(settings: Mapping[str, Any], image_processor: Any) -> Mapping[str, Any]:
    """Move `min_pixels` and `max_pixels` into `size`, as Qwen's and similar processors expect.

    transformers does this too, still in 5.23, but with a warning that the two names will go.
    """
    given = {_EDGES[name]: value for name, value in settings.items() if name in _EDGES and value is not None}
    default, own = _get_size(image_processor), settings.get("size") or {}
    if not given or not default.keys() >= set(_EDGES.values()) or not isinstance(own, Mapping):
        return settings
    return {**{k: v for k, v in settings.items() if k not in _EDGES}, "size": default | dict(own) | given}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInputs:
    """How images are loaded and processed, for a model that takes images."""

    processor: ImageProcessor
    loader: ImageLoader = field(default_factory=ImageLoader)
    settings: str = "{}"
    """Processor settings where a request has none, as in `ImageSpan`."""
