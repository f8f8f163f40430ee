"""The demo's untrained model: a Qwen3 of about 0.1 million parameters, with a tokenizer for the lookup task."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from unbroken.demo.lookup import JsonStyle, LookupTask, answer_text, call_text, tool_schemas

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN)
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY_SIZE = 512
NUM_TEXTS = 2000
CONTEXT_LENGTH = 2048
"""Far more than an episode needs, so that its retokenised form fits as well."""


def build_tokenizer() -> Any:
    """Train a `PreTrainedTokenizerFast` (byte-level BPE, ChatML) on the task's own text, in about a second."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS) - len(TAG_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAG_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TURN, pad_token=PADDING)
    tokenizer.chat_template = files("unbroken.demo").joinpath("chat.jinja").read_text("utf-8")
    return tokenizer


def build_model(tokenizer: Any, *, seed: int, num_heads: int = 4) -> Any:
    """Build a `Qwen3ForCausalLM` with random float32 weights for the tokenizer's vocabulary.

    The initial weights are four times as wide as usual: at this size, copying is then learned in a hundred steps.
    `num_heads` is 4 or 2, for heads of width 16 or 32; vLLM needs 32.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=64 // num_heads,
        intermediate_size=128,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def _corpus() -> Iterator[str]:
    rng = random.Random(0)
    schema = "\n".join(json.dumps(tool["function"]) for tool in tool_schemas())
    for _ in range(NUM_TEXTS):
        task = LookupTask.draw(rng)
        calls = [call_text(key, style) for key in task.keys for style in JsonStyle]
        replies = [json.dumps(task.look_up(key)) for key in task.keys]
        text = "\n".join(["system", "Tools:", schema, "user", task.prompt, "assistant", *calls, *replies])
        for tag in TAG_TOKENS:
            text = text.replace(tag, "")
        yield text + "\n" + answer_text(task.value)
