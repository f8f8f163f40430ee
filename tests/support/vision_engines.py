"""Real vLLM on the tiny models of `support.vision`, prompts for it, and what transformers computes for the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.vision import Family, load_processor, picture, save_vision_model
from support.vision import load_vision_model as load_vision_model
from support.vllm_session import SMALL_VLLM
from unbroken.images.decoder import encode_picture
from unbroken.images.placeholders import expand_placeholders
from unbroken.images.processor import HfImageProcessor, ImageProcessor
from unbroken.types import EncodedImage, ImageSpan, SampleRequest, SamplingParams, TokenIds, token_ids

CONTEXT_LENGTH = 512
MAX_IMAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEngine:
    """An engine that takes images, with its model and processor."""

    engine: Any
    folder: Path
    processor: HfImageProcessor


async def start_vision_vllm(folder: Path, family: Family = "qwen2_5_vl") -> VisionEngine:
    """Start vLLM in float32 on a model saved to `folder`."""
    import support.vllm_processes  # noqa: F401  # the engine starts in less time
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    save_vision_model(folder, family)
    exact = [*SMALL_VLLM, "--max-model-len", str(CONTEXT_LENGTH)]
    limits = ["--max-num-seqs", "16", "--limit-mm-per-prompt", f'{{"image": {MAX_IMAGES}}}']
    engine = await VllmEngine.start(parse_engine_args(["--model", str(folder), *exact, *limits]))
    return VisionEngine(engine=engine, folder=folder, processor=own_processor(folder))


def own_processor(folder: Path) -> HfImageProcessor:
    return HfImageProcessor(load_processor(folder))


def image_file(width: int = 56, height: int = 56, *, seed: int = 0) -> EncodedImage:
    """The file of a `picture`."""
    return encode_picture(picture(width, height, seed=seed))


def ask_with_images(
    processor: ImageProcessor,
    *parts: int | EncodedImage,
    request_id: str = "a",
    n: int = 1,
    settings: str = "{}",
    **params: Any,
) -> SampleRequest:
    """A request whose prompt is ids and images in this order."""
    images = [part for part in parts if isinstance(part, EncodedImage)]
    ids = [processor.placeholder_id if isinstance(part, EncodedImage) else part for part in parts]
    prompt_ids, spans = expand_placeholders(token_ids(ids), images, processor, settings=settings)
    params = {"max_tokens": 6, "seed": 1} | params
    return SampleRequest(
        request_id=request_id, prompt_ids=prompt_ids, images=spans, n=n, params=SamplingParams(**params)
    )


def model_logprobs(
    model: Any, processor: ImageProcessor, ids: TokenIds, spans: Sequence[ImageSpan], *, temperature: float = 1.0
) -> np.ndarray:
    """[T - 1] of each id after the first, by one plain forward pass over expanded ids and pixels."""
    processed = [processor.process(span.image, span.settings) for span in spans]
    types = np.zeros(len(ids), dtype=np.int64)
    for span, own in zip(spans, processed, strict=True):
        types[span.offset : span.stop] = own.token_types
    names = processed[0].inputs if processed else ()
    pixels = {name: torch.cat([own.inputs[name] for own in processed]) for name in names}
    if hasattr(model.base_model, "get_rope_index"):
        pixels["mm_token_type_ids"] = torch.from_numpy(types)[None]
    ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
    # Placeholders outside of the images are text; the model finds those of images by value.
    stray_1T = torch.isin(ids_1T, torch.unique(ids_1T[0, types == 1])) & (torch.from_numpy(types)[None] == 0)
    embedded_1TD = model.get_input_embeddings()(ids_1T).detach()
    hook = model.get_input_embeddings().register_forward_hook(lambda *_: embedded_1TD)
    with torch.no_grad():
        logits_TV = (
            model(input_ids=ids_1T.masked_fill(stray_1T, 0), use_cache=False, **pixels).logits[0, :-1].float()
            / temperature
        )
    hook.remove()
    return torch.log_softmax(logits_TV, -1).gather(1, ids_1T[0, 1:, None])[:, 0].numpy()
