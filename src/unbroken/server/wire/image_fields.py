"""The field `images` of several dialects: one entry for each prompt, as sources or spans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field, ValidationError

from unbroken.errors import ImageError
from unbroken.server.http.bodies import Id, StrictBody
from unbroken.server.http.errors import HttpError, field_error, shorten
from unbroken.server.images.intake import ClientSpan, ImageIntake
from unbroken.types import ImageSpan


class SpanBody(StrictBody):
    """See `ImageSpan`: an image whose ids are in the prompt already."""

    offset: int = Field(ge=0, lt=2**31)
    length: int = Field(ge=1, lt=2**31)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    placeholder_id: Id
    settings: str = "{}"
    """A JSON object, as text."""
    data: str | None = None
    """The file in base64, for a server that may not have it."""


def list_images(given: Sequence[Any] | None, num_prompts: int) -> list[list[Any] | None]:
    """List the images of each prompt, from entries that are null, one image as text, or a list of images.

    Null stays None: a placeholder in that prompt lacks its image. With an empty list it is text.

    Raises `HttpError` unless there is one such entry per prompt.
    """
    if not given:
        return [None] * num_prompts
    if len(given) != num_prompts:
        raise HttpError(
            400,
            f"images must have one entry per prompt (null for no image): got {len(given)} for {num_prompts} prompts",
            param="images",
        )
    by_prompt: list[list[Any] | None] = []
    for index, entry in enumerate(given):
        if not (entry is None or isinstance(entry, (str, list))):
            raise HttpError(
                400,
                f"images[{index}] must be null, an image as text, or a list of images, got {shorten(entry)}",
                param=f"images.{index}",
            )
        by_prompt.append([entry] if isinstance(entry, str) else entry)
    return by_prompt


def list_images_and_spans(given: Sequence[Any] | None, num_prompts: int, intake: ImageIntake) -> list[list[Any] | None]:
    """As `list_images`, where lists may hold `SpanBody` objects."""
    by_prompt = list_images(given, num_prompts)
    return [
        None
        if own is None
        else [
            _read_span(item, f"images.{i}.{k}", intake) if isinstance(item, dict) else item
            for k, item in enumerate(own)
        ]
        for i, own in enumerate(by_prompt)
    ]


def format_spans(spans: Sequence[ImageSpan]) -> list[dict[str, Any]]:
    """The places of images, for answers."""
    return [{"offset": span.offset, "length": span.length, "sha256": span.sha256} for span in spans]


def _read_span(item: dict[str, Any], name: str, intake: ImageIntake) -> ClientSpan:
    try:
        body = SpanBody.model_validate(item)
    except ValidationError as error:
        raise field_error(error, within=name) from None
    try:
        settings = json.loads(body.settings)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise ImageError(f"{name}.settings must be a JSON object as text, got {shorten(body.settings)}")
    return ClientSpan(
        offset=body.offset,
        length=body.length,
        sha256=body.sha256,
        source=f"sha256:{body.sha256}" if body.data is None else body.data,
        placeholder_id=body.placeholder_id,
        settings=intake.encode_settings(settings),
    )
