"""What both sides of bench/grpo.py have in common: model, settings, problems, lengths, and the GPU's memory."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import get_json_schema

from unbroken.demo.model import build_tokenizer
from unbroken.rollout.env import Continue, Done, EnvStart, Outcome, Reply

SHAPES = {
    "tiny": {
        "vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128,
    },
    "0.6b": {
        "vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    },
    "1.7b": {
        "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144,
    },
    "4b": {
        "vocab_size": 151_936, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728,
    },
    "8b": {
        "vocab_size": 151_936, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12_288,
    },
    "14b": {
        "vocab_size": 151_936, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 17_408,
    },
}  # fmt: skip
UNTIED = ("8b", "14b")
"""The shapes whose output embeddings are their own."""
CONTEXT_LENGTH = 5120
"""For four turns of at most 1,024 ids each, and three results of the tool of at most 184."""
ENGINE_SIZES = ("--max-model-len", str(CONTEXT_LENGTH), "--max-num-seqs", "512")
"""The same for all engines of ours: what vLLM compiles depends on them, and the next one finds it in the cache."""
DRAWN = ("ragged", "long")
"""The values of --turns for which `draw_length` draws the lengths."""
TOOL_ANSWER = "The tool has found number 42. "


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A task. Every turn but the last is followed by a call of the tool, whatever the model said."""

    num_turns: int
    tool_s: float = 0.0


SETTINGS = {
    "single": Setting(num_turns=1),
    "tools": Setting(num_turns=4),
    "slow_tools": Setting(num_turns=4, tool_s=0.02),
}


def turn_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """How the turns of either side end, as options of their sampling.

    `even`: after exactly `tokens` ids. `ragged`, `long`: after as many as `draw_length` says. `stops`: at one of many
    stop ids, which the random model samples with a probability of 1 / tokens each time, so that lengths are geometric;
    vLLM looks for each id in a list of all of them, which takes it longer than the few stop ids of a real model.
    """
    if arguments.turns == "even":
        return {"max_tokens": arguments.tokens}
    if arguments.turns != "stops":
        return {"max_tokens": 4 * arguments.tokens}
    stride = arguments.tokens | 1  # odd: as many words with an a as with a b
    stops = range(len(build_tokenizer()) + stride, SHAPES[arguments.shape]["vocab_size"], stride)
    return {"max_tokens": 4 * arguments.tokens, "stop_token_ids": tuple(stops)}


def draw_length(arguments: argparse.Namespace, *, problem: int, sibling: int, turn: int) -> int:
    """The ids of a turn, the same on both sides for the same place in a step: at most four times the mean, and else
    geometric (`ragged`), or log-normal with sigma 1 (`long`).
    """
    mean: int = arguments.tokens
    rng = np.random.default_rng((arguments.seed, problem % arguments.problems, sibling, turn))
    if arguments.turns == "ragged":
        length = int(rng.geometric(1 / mean))
    else:
        length = round(mean * float(np.exp(rng.standard_normal() - 0.5)))
    return max(1, min(length, 4 * mean))


def draw_answer(problem: int, turn: int, *, ragged: bool = True) -> str:
    """What the tool answers: two sentences, or a geometric number of them with that mean, of at most eight."""
    number = min(8, int(np.random.default_rng((problem, turn)).geometric(0.5))) if ragged else 2
    return TOOL_ANSWER * number


def find_number(name: str) -> str:
    """Find a number.

    Args:
        name: the name of the number.

    Returns:
        A sentence about it.
    """
    return TOOL_ANSWER * 2


def prompt_of(number: int) -> list[dict[str, str]]:
    """The messages of a problem."""
    return [{"role": "user", "content": f"Say something about number {number}."}]


def save_model(folder: Path, arguments: argparse.Namespace) -> None:
    """Write a random model and its tokenizer, the demo's with one word for each further id; an existing one is kept."""
    if (folder / "config.json").exists():
        return
    started = time.perf_counter()
    shape = SHAPES[arguments.shape]
    tokenizer = build_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab, first = backend["model"]["vocab"], len(tokenizer)
    vocab.update({f"{'ab'[number % 2]}{number:06}": number for number in range(first, shape["vocab_size"])})
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=arguments.shape not in UNTIED,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.to(getattr(torch, arguments.dtype)).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # which this process would keep while others measure
    print(f"model written in {time.perf_counter() - started:.0f} s", flush=True)


def make_lora(rank: int) -> Any:
    """Adapters of all linear layers, the same on both sides."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


class PeakMemory:
    """The most memory in use on the whole GPU, looked at every 20 ms; 0 on a CPU."""

    def __init__(self, device: str) -> None:
        self._peak = 0.0
        self._is_over = threading.Event()
        if device == "cuda":
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
            atexit.register(self._end)

    def restart(self) -> float:
        """Return the peak so far in GiB, and begin again."""
        peak, self._peak = self._peak, 0.0
        return peak

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            self._peak = max(self._peak, (total - free) / 2**30)

    def _end(self) -> None:
        """End the thread before the interpreter does, which aborts the process if the thread is in CUDA's library."""
        self._is_over.set()
        self._thread.join()


def print_result(side: str, setting: str, **values: Any) -> None:
    """Print a side's numbers of one setting so far as a line of JSON, which `compare` of bench/grpo.py reads."""
    print("RESULT " + json.dumps({"side": side, "setting": setting, **values}), flush=True)


class Words:
    """The turns of a problem; the reward is the share of words that begin with an a."""

    def __init__(
        self,
        number: int,
        *,
        num_turns: int,
        draw_tool_s: Callable[[], float],
        draw_answer: Callable[[int], str] = lambda turn: find_number("a"),
    ) -> None:
        """`draw_tool_s` says how many seconds the next call of the tool takes, `draw_answer` what it answers."""
        self._number = number
        self._num_turns_left = num_turns
        self._num_calls = 0
        self._draw_tool_s = draw_tool_s
        self._draw_answer = draw_answer

    async def start(self) -> EnvStart:
        """See `Env`."""
        tools = (get_json_schema(find_number),) if self._num_turns_left > 1 else ()
        return EnvStart(messages=[{**message} for message in prompt_of(self._number)], tools=tools)  # type: ignore[typeddict-item]

    async def step(self, reply: Reply) -> Outcome:
        """See `Env`."""
        self._num_turns_left -= 1
        if self._num_turns_left == 0:
            return Done()
        await asyncio.sleep(self._draw_tool_s())
        answer = self._draw_answer(self._num_calls)
        self._num_calls += 1
        return Continue(messages=[{"role": "tool", "name": "find_number", "content": answer}])

    async def reward(self, messages: Sequence[Any]) -> float:
        """See `Env`."""
        text = "".join(message["content"] for message in messages if message["role"] == "assistant")
        good, bad = text.count("a"), text.count("b")
        return good / max(1, good + bad)

    async def close(self) -> None:
        """See `Env`."""
