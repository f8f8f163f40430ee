"""Images for tests without a model: small pictures, and processors that count ids without reading pixels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from PIL import Image

from support.tokenizers import make_tokenizer
from support.vision_template import PAD, TEMPLATE
from unbroken.images.decoder import encode_picture
from unbroken.images.processor import ImageInputs, ProcessedImage
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import EncodedImage, ImageSpan, TokenIds, token_ids

PLACEHOLDER = 7


def image_span(*, offset: int, length: int, image: str = "cat") -> ImageSpan:
    """A span of the image with that name; its file is not a real image."""
    return ImageSpan(offset=offset, length=length, image=EncodedImage(image.encode()), placeholder_id=PLACEHOLDER)


class CountingProcessor:
    """Gives an image as many placeholders as its file has bytes, or as `count` returns, with optional separators."""

    setting_names = frozenset({"times"})
    description = "{}"

    def __init__(
        self,
        placeholder_id: int,
        *,
        apart: tuple[int, int] | None = None,
        num_ids: Callable[[EncodedImage, str], int] = lambda image, settings: len(image.data),
    ) -> None:
        self.placeholder_id = placeholder_id
        self.num_expanded = 0
        self._apart = apart
        self._num_ids = num_ids

    def expand(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> TokenIds:
        self.num_expanded += 1
        pads = [self.placeholder_id] * self._num_ids(image, settings)
        return token_ids([self._apart[0], *pads, self._apart[1]] if self._apart else pads)

    def count_features(self, width: int, height: int, settings: str = "{}") -> int:
        return 0

    def process(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> ProcessedImage:
        raise NotImplementedError


def few_ids(image: EncodedImage, settings: str) -> int:
    """1 to 6, by the image's name and the settings."""
    return 1 + (int(image.sha256[:4], 16) + len(settings)) % 6


@functools.cache
def dot(seed: int = 0) -> Image.Image:
    """A picture of one pixel; another one for each seed."""
    return Image.new("RGB", (1, 1), (seed % 256, seed // 256 % 256, 0))


@functools.cache
def dot_file(seed: int = 0) -> EncodedImage:
    """The same as a file."""
    return encode_picture(dot(seed))


def text_part(text: str) -> Any:
    return {"type": "text", "text": text}


def image_part(seed: int = 0) -> Any:
    return {"type": "image", "image": dot_file(seed)}


def said(role: str, *parts: Any, **more: Any) -> Any:
    """A message of these parts; a number is a picture."""
    content = [text_part(part) if isinstance(part, str) else image_part(part) for part in parts]
    return {"role": role, "content": content, **more}


def image_renderer(template: str = TEMPLATE, **options: Any) -> tuple[TemplateRenderer, Any]:
    """A renderer of a template that takes images, each of `few_ids` ids, and its tokenizer."""
    tokenizer = make_tokenizer(template, control_tokens=(PAD,), eos_token="<|im_end|>")
    processor = CountingProcessor(tokenizer.convert_tokens_to_ids(PAD), num_ids=few_ids)
    return TemplateRenderer(tokenizer, images=ImageInputs(processor=processor), **options), tokenizer
