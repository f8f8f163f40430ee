"""How the demo's model is made: a Qwen3 of about 0.1 million parameters, a tokenizer for the lookup task, a warm-up.

The warm-up teaches the random model to copy, then to imitate a teacher that guesses too early. The teacher guesses with
probability `GUESS_PROBABILITY` after each lookup that has not led to the value. A model that imitates it perfectly
still fails about half of the tasks. Only reinforcement teaches it to always keep looking up.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from unbroken.demo.config import WarmUpConfig
from unbroken.demo.lookup import SYLLABLES, JsonStyle, LookupTask, answer_text, call_text, tool_schemas
from unbroken.progress import advance, begin

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN)
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
GUESS_PROBABILITY = 0.4
NO_TARGET = -100
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


def warm_up(
    model: Any, tokenizer: Any, config: WarmUpConfig, *, seed: int, on_stage: Callable[[str], None] = lambda _: None
) -> None:
    """Train `model` in place. `on_stage` gets the name of each stage as it begins."""
    rng, num_steps = random.Random(seed), config.num_demo_steps
    teacher = Teacher(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    on_stage("copy drill")
    begin("warm-up, copy drill", total=config.max_drill_steps, unit="steps at most")
    for step in range(config.max_drill_steps):
        _set_learning_rate(optimizer, config.learning_rate * min(1.0, (step + 1) / 30))
        batch = [teacher.drill(rng) for _ in range(config.drill_batch_size)]
        advance()
        if _imitate(model, optimizer, *_encode(tokenizer, batch)) < config.drill_loss:
            break
    on_stage("demonstrations")
    begin("warm-up, demonstrations", total=num_steps, unit="steps")
    for factor in _learning_rate_factors(num_steps, config.decay_share):
        _set_learning_rate(optimizer, config.learning_rate * factor)
        advance()
        batch = [teacher.demonstrate(LookupTask.draw(rng), rng) for _ in range(config.demo_batch_size)]
        _imitate(model, optimizer, *_encode(tokenizer, batch))


class _TaughtText(NamedTuple):
    """A piece of text, and whether the model learns to write it."""

    text: str
    is_target: bool


class Teacher:
    """Writes demonstrations as pieces of text, exactly as the chat template renders them, and drills."""

    def __init__(self, tokenizer: Any) -> None:
        marks = ("Zq0", "Zq1", "Zq2")
        messages = [{"role": r, "content": m} for r, m in zip(("user", "assistant", "tool"), marks, strict=True)]
        text = tokenizer.apply_chat_template(messages, tools=tool_schemas(), add_generation_prompt=True, tokenize=False)
        self._before_prompt, text = text.split(marks[0])
        self._after_prompt, text = text.split(marks[1])
        after_turn, self._after_reply = text.split(marks[2])
        self._before_reply = after_turn.removeprefix(END_OF_TURN)

    def demonstrate(self, task: LookupTask, rng: random.Random) -> list[_TaughtText]:
        """One episode of `task`, with a wrong answer where the teacher guesses."""
        pieces = [_TaughtText(self._before_prompt + task.prompt + self._after_prompt, False)]
        for key in task.keys:
            reply = task.look_up(key)
            pieces.append(_TaughtText(call_text(key, task.style) + END_OF_TURN, True))
            pieces.append(_TaughtText(self._before_reply + json.dumps(reply) + self._after_reply, False))
            guess = reply.get("next") if rng.random() < GUESS_PROBABILITY else None
            answer = reply.get("value", guess)
            if answer is not None:
                pieces.append(_TaughtText(answer_text(answer) + END_OF_TURN, True))
                break
        return pieces

    def drill(self, rng: random.Random, num_words: int = 8) -> list[_TaughtText]:
        """Quoted words that the model must write once more; without this drill, some seeds never learn to copy."""
        syllables = rng.sample(SYLLABLES, 2 * num_words)
        words = " ".join(f'"{a}{b}"' for a, b in zip(syllables[::2], syllables[1::2], strict=True))
        return [_TaughtText(words + "\n", False), _TaughtText(words + END_OF_TURN, True)]


def _learning_rate_factors(num_steps: int, decay_share: float) -> Iterator[float]:
    for step in range(num_steps):
        yield min(1.0, (step + 1) / 20, max(0.02, (num_steps - step) / (num_steps * decay_share)))


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _encode(tokenizer: Any, batch: Sequence[Sequence[_TaughtText]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next-token targets, [B, T] each and padded on the right; `NO_TARGET` where nothing is learned."""
    encoded = iter(tokenizer([p.text for pieces in batch for p in pieces], add_special_tokens=False)["input_ids"])
    inputs, targets = [], []
    for pieces in batch:
        ids = [torch.tensor(next(encoded)) for _ in pieces]
        inputs.append(torch.cat(ids))
        targets.append(
            torch.cat([i if p.is_target else torch.full_like(i, NO_TARGET) for i, p in zip(ids, pieces, strict=True)])
        )
    pad = torch.nn.utils.rnn.pad_sequence
    inputs_BT = pad(inputs, batch_first=True, padding_value=tokenizer.pad_token_id)
    targets_BT = pad(targets, batch_first=True, padding_value=NO_TARGET)
    return inputs_BT[:, :-1], targets_BT[:, 1:]


def _imitate(model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """One optimizer step on the mean cross-entropy of the targets; only their logits are computed."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    is_target = targets != NO_TARGET
    loss = F.cross_entropy(model.lm_head(hidden[is_target]), targets[is_target])
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()
