"""Makes vLLM's inputs: ids alone, or ids with one placeholder for each image, and the pictures.

    ours     11 90 90 90 12    ImageSpan(offset=1, length=3, ...)
    vLLM's   11 90 12          a picture, its name, the processor's settings; vLLM expands it to 11 90 90 90 12

A placeholder id that the model sampled is text. vLLM would take it for an image's, so another id is there while vLLM
expands the prompt; the features' places, not the ids, decide what the model sees.

vLLM's expansion is compared with ours before anything is computed (I3).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import DecoderOnlyEngineInput, tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from unbroken.errors import EchoError, ImageError
from unbroken.images.decoder import ImageLimits, decode_image
from unbroken.images.lru_cache import LruCache
from unbroken.images.placeholders import check_expansion, collapse_spans
from unbroken.types import EncodedImage, ImageSpan, SampleRequest, SampleResult, TokenIds, token_ids

if TYPE_CHECKING:
    from PIL import Image

_MAX_DECODED_BYTES = 2**29
_OBJECT_BYTES = 4096
"""Approximate memory of a picture besides its pixels: tiny ones count too."""
_MAX_DECODING = 4
"""Requests whose pictures are decoded and processed at a time: those of one may take gigabytes."""


class PromptMaker:
    """Makes vLLM's inputs. Pictures are decoded in a thread, and processed in vLLM's own."""

    def __init__(self, llm: AsyncLLM, *, limits: ImageLimits | None = None) -> None:
        self._llm = llm
        self._limits = limits or ImageLimits()
        self._pictures = _PictureCache(limits=limits)
        self._decoding = asyncio.Semaphore(_MAX_DECODING)
        self.max_images = _max_images(llm)
        """Maximum images of one prompt, by `--limit-mm-per-prompt` and the model; 0 for a text model."""

    async def make_input(self, request: SampleRequest) -> DecoderOnlyEngineInput:
        """Make the input of `AsyncLLM.generate`. Raises `ImageError` and `EchoError` as `Engine.sample`."""
        if not request.images:
            return tokens_input(request.prompt_ids.tolist())
        hidden = _hide_sampled_placeholders(request.prompt_ids, request.images)
        async with self._decoding:
            prompt = await asyncio.to_thread(self._prompt, request.images, hidden)
            try:
                made = await self._render(prompt)
            except Exception as error:
                raise ImageError(
                    f"vLLM refuses the {len(request.images)} images of {request.request_id!r}: {error}"
                    + (f": {error.__cause__}" if error.__cause__ is not None else "")
                ) from error
            del prompt
        reported = token_ids(made["prompt_token_ids"])
        check_expansion(hidden, reported, request.images)
        if np.array_equal(hidden, reported):
            reported = request.prompt_ids
            made["prompt_token_ids"] = reported.tolist()
        SampleResult(prompt_ids=reported, sequences=(), image_sha256s=request.image_sha256s).check_prompt(request)
        _check_places(request.images, made)
        return made

    async def _render(self, prompt: TokensPrompt) -> DecoderOnlyEngineInput:
        """Render a prompt in vLLM's frontend.

        An image that another request lost may leave the cache between look-up and use (`AssertionError`): again then.
        """
        try:
            (made,) = await self._llm.renderer.render_cmpl_async([prompt])
        except AssertionError:
            (made,) = await self._llm.renderer.render_cmpl_async([prompt])
        return made

    def _prompt(self, spans: Sequence[ImageSpan], prompt_ids: TokenIds) -> TokensPrompt:
        with self._limits.reserve({f"images[{k}]": span.image for k, span in enumerate(spans)}):
            pictures = [self._pictures.decode(span.image, name=f"images[{k}]") for k, span in enumerate(spans)]
        return TokensPrompt(
            prompt_token_ids=collapse_spans(prompt_ids, spans).tolist(),
            multi_modal_data={"image": pictures},
            multi_modal_uuids={"image": [_name(span) for span in spans]},
            mm_processor_kwargs=json.loads(spans[0].settings),
        )


class _PictureCache:
    """Decodes images, and keeps recent pictures: each turn of a conversation has all of its images. Thread-safe."""

    def __init__(self, *, max_bytes: int = _MAX_DECODED_BYTES, limits: ImageLimits | None = None) -> None:
        self._limits = limits
        self._pictures: LruCache[str, Image.Image] = LruCache(max_bytes, _num_bytes)

    def decode(self, image: EncodedImage, *, name: str) -> Image.Image:
        """Return the image's picture, which must not be changed. Raises as `decode_image`."""
        known = self._pictures.get(image.sha256)
        if known is not None:
            return known
        picture = decode_image(image, self._limits, name=name)
        self._pictures.put(image.sha256, picture)
        return picture


def _hide_sampled_placeholders(prompt_ids: TokenIds, spans: Sequence[ImageSpan]) -> TokenIds:
    """Put another id in place of each placeholder outside of the images."""
    hidden = prompt_ids.copy()
    placeholder_id = spans[0].placeholder_id
    stray = prompt_ids == placeholder_id
    for span in spans:
        stray[span.offset : span.stop] = False
    in_images = {placeholder_id}.union(*(prompt_ids[span.offset : span.stop].tolist() for span in spans))
    hidden[stray] = next(number for number in range(len(in_images) + 1) if number not in in_images)
    return token_ids(hidden)


def _name(span: ImageSpan) -> str:
    """Name an image for vLLM's caches: its features depend on its file and its settings."""
    return f"{span.sha256} {span.settings}"


def _check_places(spans: Sequence[ImageSpan], made: Any) -> None:
    """Check that each image's features are inside its span: ids do not show where an image ends (I3)."""
    for k, (span, place) in enumerate(zip(spans, made["mm_placeholders"]["image"], strict=True)):
        if not span.offset <= place.offset <= place.offset + place.length <= span.stop:
            raise EchoError(
                f"images[{k}] (sha256 {span.sha256[:12]}..., settings {span.settings}) has {span.length} ids in the "
                f"prompt that was sent and {place.length} in the engine's, at {place.offset} and not {span.offset}: "
                "the spans are not those of these images"
            )


def _num_bytes(picture: Image.Image) -> int:
    return picture.width * picture.height * len(picture.getbands()) + _OBJECT_BYTES


def _max_images(llm: AsyncLLM) -> int:
    processor = llm.renderer.mm_processor
    return 0 if processor is None else int(processor.info.allowed_mm_limits.get("image", 0))
