"""Measures the longest pause of the event loop while rollouts get megabytes of text from a tool.

    OMP_NUM_THREADS=1 python bench/loop_lag.py [--rollouts 64] [--characters 2000000] [--max-result-chars N] [--raises]

Every rollout makes one call, whose result (with `--raises`, the text of an exception) has that many characters, and
then answers. A pause is how much later than asked a task of the same loop woke up: for that long no time-out could
fire. The engine is scripted, with the vocabulary of Mistral's Tekken (131,072 ids) and Qwen3's template, so nearly all
time is spent in rendering and bridging. With `--tool-sets`, each rollout has tools of its own.
`--max-result-chars 0` cuts nothing. Requires the extra `dev`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rendering import make_tokenizer
from unbroken.engines.scripted import ScriptedEngine
from unbroken.messages import Message
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import Tool, tool
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import SamplingParams

QUESTION: list[Message] = [{"role": "user", "content": "What does the log say?"}]
CALL = '<tool_call>\n{{"name": "read_{number}", "arguments": {{}}}}\n</tool_call><|im_end|>'
ANSWER = "It says nothing.<|im_end|>"
TICK_S = 0.001


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the longest pause of the event loop.")
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--characters", type=int, default=2_000_000, help="length of each result")
    parser.add_argument(
        "--max-result-chars", type=int, help="Limits.max_result_chars; 0: no limit; default: its default"
    )
    parser.add_argument("--raises", action="store_true", help="the tool raises an exception with the text")
    parser.add_argument("--tool-sets", action="store_true", help="each rollout has a tool with a name of its own")
    args = parser.parse_args()
    tokenizer = make_tokenizer("qwen3")
    text = make_words(args.characters)
    limits: dict[str, Any] = {"timeout_s": 3600.0}
    if args.max_result_chars is not None:
        limits["max_result_chars"] = args.max_result_chars or None
    tools = [make_tool(number if args.tool_sets else 0, text, raises=args.raises) for number in range(args.rollouts)]
    rollouts = [make_rollout(tokenizer, own) for own in tools]
    renderer = TemplateRenderer(tokenizer)
    start = time.perf_counter()
    trajectories, pauses_s = asyncio.run(measure(renderer, rollouts, Limits(**limits)))
    wall_s = time.perf_counter() - start
    pauses_s.sort()
    statuses = Counter(trajectory.status.value for trajectory in trajectories)
    errors = {repr(trajectory.error)[:200] for trajectory in trajectories if trajectory.error is not None}
    print(f"{args.rollouts} rollouts with results of {args.characters:,} characters: {dict(statuses)} {errors or ''}")
    print(
        f"longest pause {pauses_s[-1] * 1e3:.1f} ms, 99th percentile {pauses_s[len(pauses_s) * 99 // 100] * 1e3:.1f} ms"
    )
    print(f"{wall_s:.1f} s in all, {wall_s / args.rollouts * 1e3:.0f} ms a rollout")


async def measure(
    renderer: TemplateRenderer, rollouts: Sequence[tuple[ToolEnv, ScriptedEngine]], limits: Limits
) -> tuple[list[Trajectory], list[float]]:
    """Run all rollouts at once; returns them and the pauses in seconds, at least one."""
    pauses_s: list[float] = []
    watch = asyncio.create_task(record_pauses(pauses_s))
    sampling = SamplingParams(max_tokens=100)
    trajectories = await asyncio.gather(
        *(
            run_rollout(env, engine=engine, renderer=renderer, sampling=sampling, limits=limits)
            for env, engine in rollouts
        )
    )
    await asyncio.sleep(2 * TICK_S)
    watch.cancel()
    return trajectories, pauses_s


async def record_pauses(pauses_s: list[float]) -> None:
    """Append how much later than asked each of the short sleeps of this task ended."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(TICK_S)
        pauses_s.append(time.perf_counter() - start - TICK_S)


def make_rollout(tokenizer: Any, own: Tool) -> tuple[ToolEnv, ScriptedEngine]:
    """Make an episode, and a scripted model that calls the tool once and then answers."""
    call = CALL.format(number=own.name.removeprefix("read_"))
    replies = [tokenizer.encode(reply, add_special_tokens=False) for reply in (call, ANSWER)]
    engine = ScriptedEngine(replies, context_length=10_000_000, vocab_size=len(tokenizer))
    return ToolEnv(QUESTION, [own], lambda _: 1.0), engine


def make_tool(number: int, text: str, *, raises: bool) -> Tool:
    """Make a tool that returns the text, or raises it."""

    async def read() -> str:
        """Read the log."""
        if raises:
            raise RuntimeError(text)
        return text

    read.__name__ = f"read_{number}"
    return tool(read)


def make_words(num_characters: int) -> str:
    """Make random words, which are about 2 characters a token."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    return " ".join(rng.choices(words, k=num_characters // 4))[:num_characters]


if __name__ == "__main__":
    main()
