"""Rows with real images for the tiny image-text models, built by hand from text, pictures and sampled ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from support.vision import PAD, Family, load_processor, load_vision_model, save_vision_model
from unbroken.images.decoder import encode_picture
from unbroken.images.placeholders import expand_placeholders
from unbroken.images.processor import HfImageProcessor
from unbroken.types import NO_VERSION, ImageSpan, TrainingSample, token_ids

Part = str | Image.Image | tuple[int, ...]
"""Given text; a picture between the template's marks; sampled ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """A tiny image-text model on disk, with its processor."""

    family: Family
    folder: Path
    processor: Any
    """Of transformers."""
    images: HfImageProcessor

    @classmethod
    def make(cls, folder: Path, family: Family) -> Vision:
        """Save the model of a family into `folder`."""
        return cls.load(save_vision_model(folder, family), family)

    @classmethod
    def load(cls, folder: Path, family: Family) -> Vision:
        """Load a saved model."""
        processor = load_processor(folder)
        return cls(family=family, folder=folder, processor=processor, images=HfImageProcessor(processor))

    def model(self) -> Any:
        """A fresh copy, in float32 and evaluation mode."""
        return load_vision_model(self.folder)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, control tokens read as such."""
        ids: list[int] = self.processor.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def row(
        self, *parts: Part, advantage: float = 1.0, logprob: float = -4.0, version: int = 0, settings: str = "{}"
    ) -> TrainingSample:
        """One row of these parts in order, which trains all of its sampled ids."""
        ids: list[int] = []
        sampled: list[int] = []
        spans: list[ImageSpan] = []
        for part in parts:
            if isinstance(part, tuple):
                sampled += range(len(ids), len(ids) + len(part))
                ids += part
            elif isinstance(part, str):
                ids += self.encode(part)
            else:
                marked = token_ids(self.encode(f"<|vision_start|>{PAD}<|vision_end|>"))
                given, found = expand_placeholders(marked, [encode_picture(part)], self.images, settings=settings)
                spans += [moved(span, by=len(ids)) for span in found]
                ids += given.tolist()
        mask = np.isin(np.arange(len(ids)), sampled)
        return TrainingSample(
            token_ids=token_ids(ids),
            sampled_mask=mask,
            loss_mask=mask,
            rollout_logprobs=np.where(mask, np.float32(logprob), np.float32(np.nan)),
            policy_versions=np.where(mask, version, NO_VERSION).astype(np.int32),
            advantages=np.where(mask, np.float32(advantage), np.float32(0)),
            images=tuple(spans),
        )


def moved(span: ImageSpan, *, by: int) -> ImageSpan:
    """The span, `by` ids further on."""
    return ImageSpan(
        offset=span.offset + by,
        length=span.length,
        image=span.image,
        placeholder_id=span.placeholder_id,
        settings=span.settings,
    )


def random_image_rows(
    vision: Vision, rng: np.random.Generator, num_rows: int, pictures: Sequence[Image.Image], *, most_images: int = 3
) -> list[TrainingSample]:
    """Rows of 0 to `most_images` pictures with text and sampled ids between them, each with a different advantage."""
    return [random_image_row(vision, rng, pictures, int(rng.integers(0, most_images + 1))) for _ in range(num_rows)]


def random_image_row(
    vision: Vision, rng: np.random.Generator, pictures: Sequence[Image.Image], num_images: int
) -> TrainingSample:
    """Text, then `num_images` times a picture, text or sampled ids, in any order, and sampled ids at the end.

    Any text id may be sampled, and now and then the one that stands for images.
    """
    last = vision.images.placeholder_id
    parts: list[Part] = ["look: "]
    for _ in range(num_images):
        if rng.random() < 0.5:
            parts.append(tuple(rng.integers(0, 500, int(rng.integers(1, 4))).tolist()))
        parts.append(pictures[int(rng.integers(len(pictures)))])
    completion = rng.integers(0, 500, int(rng.integers(1, 8)))
    if rng.random() < 0.3:
        completion[int(rng.integers(len(completion)))] = last
    parts.append(tuple(completion.tolist()))
    return vision.row(*parts, advantage=float(rng.normal()), logprob=float(-4 + rng.normal()))
