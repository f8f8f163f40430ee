"""The demo's tokenizer: a byte-level BPE trained on the task's own text, with ChatML control tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from unbroken.demo.task import JsonStyle, LookupTask, answer_text, call_text
from unbroken.messages import ToolSchema

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN)
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY_SIZE = 512
NUM_TEXTS = 2000


def build_tokenizer(tools: list[ToolSchema]) -> Any:
    """Train the tokenizer (about a second) and give it the demo's chat template.

    Returns:
        A `PreTrainedTokenizerFast`.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS) - len(TAG_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(tools), trainer)
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAG_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TURN, pad_token=PADDING)
    tokenizer.chat_template = files("unbroken.demo").joinpath("chat.jinja").read_text("utf-8")
    return tokenizer


def _corpus(tools: list[ToolSchema]) -> Iterator[str]:
    rng = random.Random(0)
    schema = "\n".join(json.dumps(tool["function"]) for tool in tools)
    for _ in range(NUM_TEXTS):
        task = LookupTask.draw(rng)
        calls = [call_text(key, style) for key in task.keys for style in JsonStyle]
        replies = [json.dumps(task.look_up(key)) for key in task.keys]
        text = "\n".join(["system", "Tools:", schema, "user", task.prompt, "assistant", *calls, *replies])
        for tag in TAG_TOKENS:
            text = text.replace(tag, "")
        yield text + "\n" + answer_text(task.value)
