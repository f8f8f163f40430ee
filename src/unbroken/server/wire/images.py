"""Images in bodies: the field `images` of several dialects, and vLLM's `features` and `content_parts`.

    images      {"prompts": [[11, 90, 12]], "images": [["data:image/png;base64,..."]]}
    render      {"token_ids": [11, 90, 90, 12], "features": {"mm_hashes": {"image": ["9f86..."]},
                 "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}, "kwargs_data": null}}
    generate    {"token_ids": [11, 90, 90, 12, 13], "features": the same}

vLLM sends the processor's tensors in `kwargs_data`. Here the hash is enough, since the server has the file, and tensors
are refused: nothing proves that they belong to that image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from unbroken.errors import ImageError
from unbroken.server.http.bodies import BodyModel, Id, StrictBody
from unbroken.server.http.errors import HttpError, field_error, shorten
from unbroken.server.images import ClientSpan, ImageIntake, RequestPrompt
from unbroken.types import ImageSpan, TokenIds


class SpanBody(StrictBody):
    """An image whose ids are in the prompt already."""

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


class _PlaceBody(StrictBody):
    """The place of an image's ids."""

    offset: int = Field(ge=0)
    length: int = Field(ge=1)


class FeaturesBody(BodyModel):
    """vLLM's `MultiModalFeatures`, for images only."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_PlaceBody]]
    kwargs_data: dict[str, list[str | None]] | None = None
    """Null, or nulls, as in `mm_metadata`: the server has the images."""
    mm_metadata: dict[str, list[str | None]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    """Our addition: the settings that the images were rendered with."""


def format_features(spans: Sequence[ImageSpan]) -> dict[str, Any] | None:
    """The `features` of a rendered prompt, or None if it has no images."""
    if not spans:
        return None
    features = {"mm_hashes": {"image": [span.sha256 for span in spans]}, **format_placeholders(spans)}
    features["kwargs_data"] = None
    if spans[0].settings != "{}":
        features["mm_processor_kwargs"] = json.loads(spans[0].settings)
    return features


def format_placeholders(spans: Sequence[ImageSpan]) -> dict[str, Any]:
    """The entry `mm_placeholders` of an answer, or no entry if it has no images."""
    places = [{"offset": span.offset, "length": span.length} for span in spans]
    return {"mm_placeholders": {"image": places}} if places else {}


async def place_features(
    intake: ImageIntake, ids: TokenIds, features: FeaturesBody, settings: Mapping[str, Any] | None
) -> RequestPrompt:
    """Expand the images that `features` names in a prompt; a placeholder outside of their places is text.

    Raises:
        ImageError: an image is unknown, or is not at the place that `features` gives.
        HttpError: `features` has entries other than images, or contradicts itself.
    """
    hashes, places = _list_images(features)
    kwargs = features.mm_processor_kwargs if settings is None else settings
    chosen = intake.encode_settings(kwargs)
    spans = [
        ClientSpan(
            offset=place.offset,
            length=place.length,
            sha256=sha256,
            source=f"sha256:{sha256}",
            placeholder_id=intake.placeholder_id,
            settings=chosen,
        )
        for place, sha256 in zip(places, hashes, strict=True)
    ]
    sources = spans if _has_other_placeholders(ids, places, intake.placeholder_id) else [one.source for one in spans]
    (prompt,) = await intake.place([ids], [sources], chosen, names=lambda _: "features.mm_hashes.image")
    for k, (place, span) in enumerate(zip(places, prompt.images, strict=True)):
        # Where begin and end ids enclose an image, clients may give the place of the features only.
        inside = span.offset <= place.offset and place.offset + place.length <= span.stop
        if len(prompt.token_ids) == len(ids) and not inside:
            raise ImageError(
                f"features.mm_placeholders.image[{k}] must lie in the image's ids, [{span.offset}, {span.stop}), got "
                f"[{place.offset}, {place.offset + place.length})"
            )
    return prompt


def _list_images(features: FeaturesBody) -> tuple[list[str], list[_PlaceBody]]:
    """The hash and the place of each image; `HttpError` for invalid or contradictory entries."""
    hashes, places = features.mm_hashes.get("image", []), features.mm_placeholders.get("image", [])
    others = sorted({*features.mm_hashes, *features.mm_placeholders} - {"image"})
    if others:
        raise HttpError(400, f"features must be images only, got {shorten(others)}", param="features")
    if len(hashes) != len(places):
        raise HttpError(
            400,
            f"features.mm_hashes and features.mm_placeholders must have one entry per image, got {len(hashes)} and "
            f"{len(places)}",
            param="features",
        )
    for name in ("kwargs_data", "mm_metadata"):
        if any(item is not None for items in (getattr(features, name) or {}).values() for item in items):
            raise HttpError(
                400,
                f"features.{name} must be null: this server makes the tensors itself, from the image with that hash",
                param=f"features.{name}",
            )
    return [name.removeprefix("sha256:") for name in hashes], places


def _has_other_placeholders(ids: TokenIds, places: Sequence[_PlaceBody], placeholder_id: int | None) -> bool:
    outside = ids == placeholder_id
    for place in places:
        outside[place.offset : place.offset + place.length] = False
    return bool(np.any(outside))
