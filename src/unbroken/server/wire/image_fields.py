"""Images in the bodies of several dialects: one entry for each prompt, as sources or as spans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field, ValidationError

from unbroken.errors import ImageError
from unbroken.server.http.bodies import Id, StrictBody
from unbroken.server.http.errors import HttpError, invalid_field, shorten
from unbroken.server.images.intake import GivenSpan, ImageIntake
from unbroken.types import ImageSpan


class SpanBody(StrictBody):
    """See `ImageSpan`: an image whose ids stand in the prompt already."""

    offset: int = Field(ge=0, lt=2**31)
    length: int = Field(ge=1, lt=2**31)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    placeholder_id: Id
    settings: str = "{}"
    """A JSON object, as text."""
    data: str | None = None
    """The file in base64, where the server need not have it."""


def images_by_prompt(given: Sequence[Any] | None, num_prompts: int) -> list[list[Any]]:
    """The field `images` of a request: for each prompt null, one image as text, or a list.

    Raises:
        HttpError: it has not one entry for each prompt, or one of another type.
    """
    if not given:
        return [[] for _ in range(num_prompts)]
    if len(given) != num_prompts:
        raise HttpError(
            400,
            f"images must have one entry per prompt (null where it has none): got {len(given)} for {num_prompts} "
            "prompts",
            param="images",
        )
    by_prompt: list[list[Any]] = []
    for index, entry in enumerate(given):
        if not (entry is None or isinstance(entry, (str, list))):
            raise HttpError(
                400,
                f"images[{index}] must be null, an image as text, or a list of images, got {shorten(entry)}",
                param=f"images.{index}",
            )
        by_prompt.append([entry] if isinstance(entry, str) else list(entry or ()))
    return by_prompt


def native_images(given: Sequence[Any] | None, num_prompts: int, intake: ImageIntake) -> list[list[Any]]:
    """The same, in which lists may hold `SpanBody` objects."""
    by_prompt = images_by_prompt(given, num_prompts)
    return [
        [_read_span(item, f"images.{i}.{k}", intake) if isinstance(item, dict) else item for k, item in enumerate(own)]
        for i, own in enumerate(by_prompt)
    ]


def span_objects(spans: Sequence[ImageSpan]) -> list[dict[str, Any]]:
    """Where images stand, for answers."""
    return [{"offset": span.offset, "length": span.length, "sha256": span.sha256} for span in spans]


def _read_span(item: dict[str, Any], name: str, intake: ImageIntake) -> GivenSpan:
    try:
        body = SpanBody.model_validate(item)
    except ValidationError as error:
        raise invalid_field(error, within=name) from None
    try:
        settings = json.loads(body.settings)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise ImageError(f"{name}.settings must be a JSON object as text, got {shorten(body.settings)}")
    return GivenSpan(
        offset=body.offset,
        length=body.length,
        sha256=body.sha256,
        source=f"sha256:{body.sha256}" if body.data is None else body.data,
        placeholder_id=body.placeholder_id,
        settings=intake.settings(settings),
    )
