"""Servers that take images, over a scripted engine: Qwen2.5-VL's own processor, and pictures of 1 to 16 ids."""

from __future__ import annotations

import base64
import functools
import io
import tempfile
from pathlib import Path
from typing import Any

from support.vision import picture, save_vision_model, vision_tokenizer
from unbroken.engines.base import Engine
from unbroken.engines.scripted import ScriptedEngine
from unbroken.images.decoder import encode_picture
from unbroken.images.loader import ImageLoader
from unbroken.images.processor import HfImageProcessor, ImageInputs, ImageProcessor, load_image_processor
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig, ServerLimits
from unbroken.types import EncodedImage

MODEL = "tiny"


@functools.cache
def tokenizer() -> Any:
    return vision_tokenizer()


@functools.cache
def processor() -> HfImageProcessor:
    """Of the tiny Qwen2.5-VL."""
    with tempfile.TemporaryDirectory() as folder:
        found = load_image_processor(save_vision_model(Path(folder)))
    assert found is not None
    return found


def vision_engine(reply: str = "ok<|im_end|>", **options: Any) -> ScriptedEngine:
    """An engine that always says `reply`."""
    ids: list[int] = tokenizer()(reply, add_special_tokens=False)["input_ids"]
    return ScriptedEngine(lambda prompt_ids: ids, vocab_size=len(tokenizer()), **{"context_length": 512, **options})


def make_vision_app(
    engine: Engine, *, images: ImageProcessor | None = None, limits: ServerLimits | None = None, **config: Any
) -> Any:
    """The application over an engine, with `processor()` or another one."""
    used = images or processor()
    inputs = ImageInputs(processor=used, loader=ImageLoader(files=False))
    return create_app(
        engine,
        lambda options: TemplateRenderer(tokenizer(), template_kwargs=options, images=inputs),
        TextCodec(tokenizer()),
        ServerConfig(model_name=MODEL, limits=limits or ServerLimits(), **config),
        image_processor=used,
    )


@functools.cache
def image_file(width: int = 56, height: int = 56, *, seed: int = 0) -> EncodedImage:
    """The PNG of a `picture`: 4 ids if it is 56 pixels wide and high."""
    return encode_picture(picture(width, height, seed=seed))


def saved(image: Any, kind: str, **options: Any) -> bytes:
    """A PIL image as a file of this kind."""
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def in_base64(data: bytes | EncodedImage) -> str:
    return base64.b64encode(data.data if isinstance(data, EncodedImage) else data).decode()


def data_url(image: EncodedImage) -> str:
    return f"data:image/png;base64,{in_base64(image)}"


def expanded(*parts: int | EncodedImage) -> list[int]:
    """Ids with the expanded ids of images among them."""
    ids = [[part] if isinstance(part, int) else processor().expand(part).tolist() for part in parts]
    return [one for own in ids for one in own]


def user_message(*parts: Any, kind: str = "image_url") -> dict[str, Any]:
    """A message of texts and images; images are sources."""
    return {"role": "user", "content": [_part(part, kind) for part in parts]}


def _part(part: Any, kind: str) -> dict[str, Any]:
    if isinstance(part, str) and not part.startswith(("sha256:", "data:", "http")) and len(part) < 64:
        return {"type": "text", "text": part}
    return {"type": kind, kind: {"url": part} if kind == "image_url" else part}


CAT, DOG = image_file(), image_file(28, 84, seed=1)
"""4 and 3 ids."""
ID = processor().placeholder_id
