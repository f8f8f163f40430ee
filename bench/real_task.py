"""The tasks of bench/real.py, for all sides, and the recipe of ours: `unbroken train bench/real_task.py --task tool`.

`sums` is one turn: two or three numbers to add or subtract, one reply. `tool` has a turn for each operation: the chat
template of a small model shows no tools, so the calculator is a protocol of plain text, with an example in the prompt:

    user       What is 15 * 23 + 48?
    assistant  CALC: 15 * 23
    user       RESULT: 345
    assistant  CALC: 345 + 48
    user       RESULT: 393
    assistant  ANSWER: 393

The reward is 1 for the right number and 0 otherwise. A problem is made from the seed, its number and the name of the
task, so all sides have the same ones in the same order.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.messages import Message, get_text
from unbroken.rollout.env import Continue, Done, EnvStart, Outcome, Reply
from unbroken.runs.collector import Problems
from unbroken.runs.config import CheckpointConfig, Precision, RolloutConfig, RunConfig
from unbroken.runs.recipe import Task
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig

TURN_IDS = {"sums": 24, "tool": 32}
"""The most ids of a turn, by task."""
MAX_TURNS = {"sums": 1, "tool": 8}
CONTEXT = 1024
LEARNING_RATE = 1e-5
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_TURN = re.compile(r"(CALC|ANSWER):[ ]*([^\n]*)")
_OPERATION = re.compile(r"(-?\d+) *([-+*]) *(-?\d+)(?! *[-+*\d])")
_TOOL_PROMPT = (
    "You have a calculator for one operation at a time. Write CALC: and an operation, and you get its RESULT. "
    "When you know the number, write ANSWER: and the number."
)
_EXAMPLE = (
    "What is 12 * 71?", "CALC: 12 * 71", "RESULT: 852", "ANSWER: 852",
    "What is 15 * 23 + 48?", "CALC: 15 * 23", "RESULT: 345", "CALC: 345 + 48", "RESULT: 393", "ANSWER: 393",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question, as the first messages of an episode, and its answer."""

    messages: tuple[Message, ...]
    answer: int


def make_problem(task: str, seed: int, number: int) -> Problem:
    """Make the problem of this number."""
    rng = random.Random(f"{seed} {task} {number}")
    a, b, c, d = rng.randint(10, 99), rng.randint(10, 99), rng.randint(2, 9), rng.randint(10, 99)
    if task == "sums":
        question, answer = rng.choice(((f"{a} + {b}", a + b), (f"{a} - {c}", a - c), (f"{a} + {c} + {b}", a + b + c)))
        content = f"What is {question}? Reply with only the number."
        return Problem(messages=({"role": "user", "content": content},), answer=answer)
    question, answer = rng.choice(((f"{a} * {b}", a * b), (f"{a} * {b} + {d}", a * b + d)))
    example = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(_EXAMPLE)]
    first, last = {"role": "system", "content": _TOOL_PROMPT}, {"role": "user", "content": f"What is {question}?"}
    return Problem(messages=(first, *example, last), answer=answer)  # type: ignore[arg-type]


class Episode:
    """One rollout of a problem, in texts: `unbroken` and TRL play the same."""

    def __init__(self, task: str, problem: Problem) -> None:
        self.reward = 0.0
        self._task = task
        self._answer = problem.answer

    def reply(self, text: str) -> str | None:
        """The user's message after a reply of the policy; None if the episode has ended, with its reward."""
        if self._task == "sums":
            numbers = re.findall(r"-?\d+", text)
            self.reward = float(bool(numbers) and int(numbers[-1]) == self._answer)
            return None
        turn = _TURN.search(text)
        if turn is None:
            return "ERROR: write CALC: and an operation, or ANSWER: and the number."
        if turn[1] == "ANSWER":
            self.reward = float(turn[2].strip() == str(self._answer))
            return None
        operation = _OPERATION.match(turn[2])
        if operation is None:
            return "ERROR: the calculator takes one operation of two whole numbers."
        return f"RESULT: {_OPERATORS[operation[2]](int(operation[1]), int(operation[3]))}"


class EpisodeEnv:
    """An `Episode` as an `Env`."""

    def __init__(self, task: str, problem: Problem) -> None:
        self._messages = problem.messages
        self._episode = Episode(task, problem)

    async def start(self) -> EnvStart:
        """The question."""
        return EnvStart(messages=self._messages)

    async def step(self, reply: Reply) -> Outcome:
        """Answer a turn, also one that was cut."""
        answer = self._episode.reply(get_text(reply.message["content"]))
        return Done() if answer is None else Continue(messages=[{"role": "user", "content": answer}])

    async def reward(self, messages: Sequence[Message]) -> float:
        """1 for the right answer, else 0."""
        return self._episode.reward

    async def close(self) -> None:
        """There is nothing to release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """The settings of our sides: the defaults, but for what is the same on all sides."""

    output: Path = Path("runs/real")
    model: str
    task: str = "sums"
    precision: Precision = Precision.BFLOAT16
    rollouts: RolloutConfig = field(default_factory=lambda: RolloutConfig(problems_per_step=32))
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(optimizer=OptimizerConfig(learning_rate=LEARNING_RATE))
    )
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(num_steps=60, max_empty_steps=None))
    checkpoints: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=1000, every_s=None))


def options_of(task: str) -> list[str]:
    """The options of `unbroken train` that depend on the task."""
    turns, num_ids = (
        f"--rollouts.limits.max-turns={MAX_TURNS[task]}",
        f"--rollouts.sampling.max-tokens={TURN_IDS[task]}",
    )
    return [f"--task={task}", turns, num_ids]


async def make_task(config: Config) -> Task:
    """The problems of the task."""

    def problems(seed: int) -> Problems:
        return Problems(env=lambda number: EpisodeEnv(config.task, make_problem(config.task, seed, number)))

    return Task(model=config.model, train_on=problems(config.seed), evaluate_on=problems(1000 + config.seed))
