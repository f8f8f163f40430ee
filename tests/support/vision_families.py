"""Tiny random models of more image-text families, each with its own processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    GotOcr2ImageProcessor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from support.tokenizers import make_tokenizer
from support.vision_template import TEMPLATE

_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 4096, "initializer_range": 0.2,
    "bos_token_id": None, "tie_word_embeddings": True,
}  # fmt: skip
_VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "initializer_range": 0.2,
}  # fmt: skip
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]


def save_family(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Save a random float32 model of a family in `FAMILIES` with its processor; returns the folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, processor = _MAKERS[family]()
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _tokenizer(*control_tokens: str, **names: str) -> Any:
    tokenizer = make_tokenizer(TEMPLATE, control_tokens=control_tokens, eos_token="<|im_end|>")
    template = tokenizer.chat_template
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=names,
    )
    tokenizer.chat_template = template
    return tokenizer


def _text(tokenizer: Any, kind: str, **more: Any) -> dict[str, Any]:
    return {
        **_TEXT, "model_type": kind, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, **more,
    }  # fmt: skip


def _idefics3() -> tuple[Any, Any]:
    tokens = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES)
    tokenizer = _tokenizer(*tokens)
    config = Idefics3Config(
        text_config=_text(tokenizer, "llama"),
        vision_config={**_VISION, "image_size": 56, "patch_size": 14},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    images = Idefics3ImageProcessor(size={"longest_edge": 168}, max_image_size={"longest_edge": 56}, **_HALF)
    return Idefics3ForConditionalGeneration(config), Idefics3Processor(images, tokenizer, image_seq_len=4)


def _smolvlm() -> tuple[Any, Any]:
    tokens = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES)
    tokenizer = _tokenizer(
        *tokens,
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    config = SmolVLMConfig(
        text_config=_text(tokenizer, "llama"),
        vision_config={**_VISION, "image_size": 56, "patch_size": 14},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    images = SmolVLMImageProcessor(size={"longest_edge": 168}, max_image_size={"longest_edge": 56}, **_HALF)
    videos = SmolVLMVideoProcessor(size={"longest_edge": 168}, max_image_size={"longest_edge": 56}, **_HALF)
    return SmolVLMForConditionalGeneration(config), SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4)


def _llava_next() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>")
    pinpoints = [[56, 112], [112, 56], [112, 112], [168, 56]]
    config = LlavaNextConfig(
        text_config=_text(tokenizer, "llama"),
        vision_config={
            **_VISION,
            "model_type": "clip_vision_model",
            "image_size": 56,
            "patch_size": 14,
            "projection_dim": 64,
        },
        image_grid_pinpoints=pinpoints,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
        image_seq_length=16,
    )
    images = LlavaNextImageProcessor(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}, image_grid_pinpoints=pinpoints, **_HALF
    )
    processor = LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    return LlavaNextForConditionalGeneration(config), processor


def _pixtral() -> tuple[Any, Any]:
    tokenizer = _tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    image_id = tokenizer.convert_tokens_to_ids("[IMG]")
    config = LlavaConfig(
        text_config=_text(tokenizer, "mistral", sliding_window=None),
        vision_config={**_VISION, "model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 32},
        image_token_index=image_id,
        image_token_id=image_id,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_seq_length=1,
    )
    images = PixtralImageProcessor(size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}, **_HALF)
    return LlavaForConditionalGeneration(config), PixtralProcessor(images, tokenizer, patch_size=14)


def _qwen3_vl() -> tuple[Any, Any]:
    tokenizer = _tokenizer(
        "<|video_pad|>",
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_bos_token="<|vision_start|>",
        vision_eos_token="<|vision_end|>",
    )
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.get_added_vocab()}
    config = Qwen3VLConfig(
        text_config=_text(
            tokenizer,
            "qwen3_vl_text",
            rope_parameters={
                "rope_type": "default",
                "mrope_section": [6, 5, 5],
                "rope_theta": 10000.0,
                "mrope_interleaved": True,
            },
        ),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
            "in_channels": 3,
            "initializer_range": 0.2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    pixels = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}, "patch_size": 14, **_HALF}
    images = Qwen2VLImageProcessor(**pixels)
    return Qwen3VLForConditionalGeneration(config), Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(**pixels))


def _internvl() -> tuple[Any, Any]:
    tokenizer = _tokenizer(
        "<IMG_CONTEXT>",
        "<img>",
        "</img>",
        "<video>",
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    config = InternVLConfig(
        text_config=_text(tokenizer, "qwen2"),
        vision_config={**_VISION, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    size = {"height": 56, "width": 56}
    images = GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4, **_HALF)
    videos = InternVLVideoProcessor(size=size, **_HALF)
    return InternVLForConditionalGeneration(config), InternVLProcessor(images, tokenizer, videos, image_seq_length=4)


def _gemma3() -> tuple[Any, Any]:
    tokenizer = _tokenizer(
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.get_added_vocab()}
    config = Gemma3Config(
        text_config=_text(tokenizer, "gemma3_text", sliding_window=4096),
        vision_config={**_VISION, "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
        image_token_id=ids["<image_soft_token>"],
    )
    images = Gemma3ImageProcessor(size={"height": 56, "width": 56}, **_HALF)
    model = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():  # zeros otherwise, which would make all images equal
        model.model.multi_modal_projector.mm_input_projection_weight.normal_()
    return model, Gemma3Processor(images, tokenizer, image_seq_length=4)


_MAKERS = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "llava_next": _llava_next,
    "pixtral": _pixtral,
    "qwen3_vl": _qwen3_vl,
    "internvl": _internvl,
}
FAMILIES = tuple(_MAKERS)
