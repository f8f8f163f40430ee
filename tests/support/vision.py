"""Tiny random image-text models of two families, and a template that takes images in every role."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from support.models import copy_model
from support.tokenizers import make_tokenizer
from support.vision_template import PAD as PAD
from support.vision_template import TEMPLATE as TEMPLATE

Family = Literal["qwen2_5_vl", "llava"]
FAMILIES: tuple[Family, ...] = ("qwen2_5_vl", "llava")

_PIXELS = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16}
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "patch_size": 14,
    "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_resize": True,
    "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3, **_PIXELS,
    "size": {"shortest_edge": _PIXELS["min_pixels"], "longest_edge": _PIXELS["max_pixels"]},
}  # fmt: skip
_LLAVA_IMAGES = {
    "image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor", "do_resize": True,
    "size": {"shortest_edge": 56}, "do_center_crop": True, "crop_size": {"height": 56, "width": 56}, "resample": 3,
    "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


def vision_tokenizer() -> Any:
    """A small BPE with the control tokens of `TEMPLATE`; `<|im_end|>` ends a turn."""
    tokenizer = make_tokenizer(TEMPLATE, control_tokens=("<|video_pad|>",), eos_token="<|im_end|>")
    tokenizer.pad_token = "<|endoftext|>"
    return tokenizer


def save_vision_model(folder: Path, family: Family = "qwen2_5_vl", *, seed: int = 0) -> Path:
    """Save a random float32 model of two layers with tokenizer and processor, as on the hub; returns the folder.

    A Qwen2.5-VL image takes 1 to 16 ids, by its size; a LLaVA image 16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in _make_files(family, seed).items():
        (folder / name).write_bytes(data)
    return folder


@functools.cache
def _make_files(family: Family, seed: int) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        _save_files(Path(folder), family, seed)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def _save_files(folder: Path, family: Family, seed: int) -> None:
    tokenizer = vision_tokenizer()
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _qwen(tokenizer) if family == "qwen2_5_vl" else _llava(tokenizer)
    model.save_pretrained(folder)
    if family == "llava":
        _name_as_the_hub(folder / "model.safetensors")
    if family == "qwen2_5_vl":
        videos = {k: v for k, v in _QWEN_IMAGES.items() if k != "image_processor_type"}
        _write(folder / "preprocessor_config.json", _QWEN_IMAGES)
        _write(folder / "video_preprocessor_config.json", {**videos, "video_processor_type": "Qwen2VLVideoProcessor"})
    else:
        _write(folder / "preprocessor_config.json", _LLAVA_IMAGES)
        _write(
            folder / "processor_config.json",
            {
                "processor_class": "LlavaProcessor",
                "patch_size": 14,
                "image_token": PAD,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
            },
        )
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")


def load_processor(folder: Path) -> Any:
    """The processor of a saved model, which others may have too."""
    return _load_processor(folder, _stamp(folder))


def load_vision_model(folder: Path) -> Any:
    """A copy of a saved model, as a trainer has it: in float32 and evaluation mode."""
    return copy_model(_load_model(folder, _stamp(folder)))


@functools.lru_cache(4)
def _load_processor(folder: Path, _: Any) -> Any:
    return AutoProcessor.from_pretrained(folder)


@functools.lru_cache(4)
def _load_model(folder: Path, _: Any) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def _stamp(folder: Path) -> frozenset[tuple[str, int]]:
    """What is another one once a file of the folder has changed."""
    return frozenset((file.name, file.stat().st_mtime_ns) for file in folder.iterdir())


@functools.cache
def picture(width: int = 56, height: int = 56, *, seed: int = 0) -> Image.Image:
    """A picture of coloured noise; another one for each seed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(values.numpy())


def _qwen(tokenizer: Any) -> Any:
    ids = _ids(tokenizer)
    config = Qwen2_5_VLConfig(
        text_config={
            "model_type": "qwen2_5_vl_text",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "in_channels": 3,
            "initializer_range": 0.2,
        },
        image_token_id=ids[PAD],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _llava(tokenizer: Any) -> Any:
    ids = _ids(tokenizer)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        projection_dim=64,
        initializer_range=0.2,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    config = LlavaConfig(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_index=ids[PAD],
        image_token_id=ids[PAD],
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        image_seq_length=16,
    )
    return LlavaForConditionalGeneration(config).eval()


def _ids(tokenizer: Any) -> dict[str, int]:
    return {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.get_added_vocab()}


def _name_as_the_hub(file: Path) -> None:
    """Give CLIP's weights the longer names of the hub's checkpoints, the only ones that vLLM 0.32 reads."""
    weights = load_file(file)
    named = {name.replace("vision_tower.", "vision_tower.vision_model."): weight for name, weight in weights.items()}
    save_file(named, file, metadata={"format": "pt"})


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value), "utf-8")
