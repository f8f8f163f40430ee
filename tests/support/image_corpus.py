"""The chat templates that TRL ships for image models, with a processor that counts."""

from __future__ import annotations

import functools
from typing import Any

from support.corpus import corpus_template
from support.images import CountingProcessor, few_ids, said
from support.tokenizers import make_tokenizer
from support.vision_template import PAD
from unbroken.images.processor import ImageInputs
from unbroken.rendering.template import TemplateRenderer

IN_ALL_ROLES = frozenset({"user", "assistant", "tool"})
CORPUS = {
    "trl/gemma3": ("<start_of_image>", {"user", "assistant"}),
    "trl/gemma4_v5": ("<|image|>", IN_ALL_ROLES),
    "trl/idefics3": ("<image>", IN_ALL_ROLES),
    "trl/lfm2_2_5_vl": ("<image>", IN_ALL_ROLES),
    "trl/llava_next": ("<image>", {"user"}),
    "trl/muse_glimmer": ("<|patch|>", IN_ALL_ROLES),
    "trl/qwen2_5_vl": (PAD, IN_ALL_ROLES),
    "trl/qwen3_5_think": (PAD, IN_ALL_ROLES),
    "trl/qwen3_8": (PAD, IN_ALL_ROLES),
    "trl/qwen3_vl": (PAD, {"user", "tool"}),
    "trl/smolvlm": ("<image>", IN_ALL_ROLES),
}
"""Placeholder, and the roles whose images the template writes."""
TOOLS: Any = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "what"}}},
        },
    },
)


def call(call_id: str = "callabc12") -> Any:
    function = {"name": "look", "arguments": {"at": "it"}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def result(*parts: Any, call_id: str = "callabc12") -> Any:
    return said("tool", *parts, tool_call_id=call_id, name="look")


@functools.cache
def corpus_renderer(name: str) -> tuple[TemplateRenderer, Any]:
    template, placeholder = corpus_template(name), CORPUS[name][0]
    tokenizer = template.tokenizer()
    if placeholder not in tokenizer.get_added_vocab():
        tokenizer = make_tokenizer(template.source, control_tokens=(placeholder,))
    processor = CountingProcessor(tokenizer.convert_tokens_to_ids(placeholder), num_ids=few_ids)
    return TemplateRenderer(tokenizer, images=ImageInputs(processor=processor)), tokenizer
