"""The warm-up: teach the random model to copy, then to imitate a teacher who is too hasty.

The teacher guesses after a lookup that did not lead to the value yet, with probability `GUESS_PROBABILITY`. A model
that imitates it perfectly still fails about half of the tasks, and can learn by reinforcement what it was never shown:
to keep looking things up.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from unbroken.demo.task import SYLLABLES, LookupTask, answer_text, call_text
from unbroken.demo.tokenizer import END_OF_TURN
from unbroken.messages import ToolSchema

GUESS_PROBABILITY = 0.4
NO_TARGET = -100


class Piece(NamedTuple):
    """A stretch of text, and whether the model is to learn to write it."""

    text: str
    learnt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpConfig:
    """How long and how fast: AdamW, with a linear decay over the last part of the demonstrations."""

    learning_rate: float = 3e-3
    """At 5e-3 some seeds lose the copying again and end the demonstrations without it."""
    max_drill_steps: int = 800
    drill_batch_size: int = 32
    drill_loss: float = 0.05
    """The drill ends when a batch's loss falls below this, in nats per token."""
    num_demo_steps: int = 1000
    demo_batch_size: int = 16
    decay_share: float = 0.4


class Teacher:
    """Writes demonstrations as pieces of text that the chat template's own rendering consists of."""

    def __init__(self, tokenizer: Any, tools: list[ToolSchema]) -> None:
        marks = ("Zq0", "Zq1", "Zq2")
        messages = [{"role": r, "content": m} for r, m in zip(("user", "assistant", "tool"), marks, strict=True)]
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        self._before_prompt, text = text.split(marks[0])
        self._after_prompt, text = text.split(marks[1])
        after_turn, self._after_reply = text.split(marks[2])
        self._before_reply = after_turn.removeprefix(END_OF_TURN)

    def demonstrate(self, task: LookupTask, rng: random.Random) -> list[Piece]:
        """One episode of `task`, with a wrong answer where the teacher guesses."""
        pieces = [Piece(self._before_prompt + task.prompt + self._after_prompt, False)]
        for key in task.keys:
            reply = task.look_up(key)
            pieces.append(Piece(call_text(key, task.style) + END_OF_TURN, True))
            pieces.append(Piece(self._before_reply + json.dumps(reply) + self._after_reply, False))
            guess = reply.get("next") if rng.random() < GUESS_PROBABILITY else None
            answer = reply.get("value", guess)
            if answer is not None:
                pieces.append(Piece(answer_text(answer) + END_OF_TURN, True))
                break
        return pieces


def drill(rng: random.Random, num_words: int = 8) -> list[Piece]:
    """A list of quoted words, to be written once more: without it, some seeds never learn to copy."""
    syllables = rng.sample(SYLLABLES, 2 * num_words)
    words = " ".join(f'"{a}{b}"' for a, b in zip(syllables[::2], syllables[1::2], strict=True))
    return [Piece(words + "\n", False), Piece(words + END_OF_TURN, True)]


def warm_up(
    model: Any,
    tokenizer: Any,
    teacher: Teacher,
    config: WarmUpConfig,
    *,
    seed: int,
    on_step: Callable[[str, float], None] = lambda _stage, _share_done: None,
) -> None:
    """Train `model` in place. `on_step` hears the stage's name and the share of it that is done."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(config.max_drill_steps):
        _set_learning_rate(optimizer, config.learning_rate * min(1.0, (step + 1) / 30))
        batch = [drill(rng) for _ in range(config.drill_batch_size)]
        if _imitate(model, optimizer, *_encode(tokenizer, batch)) < config.drill_loss:
            break
        on_step("copy drill", (step + 1) / config.max_drill_steps)
    for step, factor in enumerate(_warm_then_decay(config.num_demo_steps, config.decay_share)):
        _set_learning_rate(optimizer, config.learning_rate * factor)
        batch = [teacher.demonstrate(LookupTask.draw(rng), rng) for _ in range(config.demo_batch_size)]
        _imitate(model, optimizer, *_encode(tokenizer, batch))
        on_step("demonstrations", (step + 1) / config.num_demo_steps)


def _warm_then_decay(num_steps: int, decay_share: float) -> Iterator[float]:
    for step in range(num_steps):
        yield min(1.0, (step + 1) / 20, max(0.02, (num_steps - step) / (num_steps * decay_share)))


def _set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def _encode(tokenizer: Any, batch: Sequence[Sequence[Piece]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next-token targets, [B, T] each and padded on the right; `NO_TARGET` where nothing is to be learnt."""
    encoded = iter(tokenizer([p.text for pieces in batch for p in pieces], add_special_tokens=False)["input_ids"])
    inputs, targets = [], []
    for pieces in batch:
        ids = [torch.tensor(next(encoded)) for _ in pieces]
        inputs.append(torch.cat(ids))
        targets.append(
            torch.cat([i if p.learnt else torch.full_like(i, NO_TARGET) for i, p in zip(ids, pieces, strict=True)])
        )
    pad = torch.nn.utils.rnn.pad_sequence
    inputs_BT = pad(inputs, batch_first=True, padding_value=tokenizer.pad_token_id)
    targets_BT = pad(targets, batch_first=True, padding_value=NO_TARGET)
    return inputs_BT[:, :-1], targets_BT[:, 1:]


def _imitate(model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """One optimizer step on the mean cross-entropy of the targets; only their logits are computed."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    learnt = targets != NO_TARGET
    loss = F.cross_entropy(model.lm_head(hidden[learnt]), targets[learnt])
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()
