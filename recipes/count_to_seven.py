"""Two policies that play against each other: they count in turns, each adds 1, 2 or 3, and who comes to 7 wins.

    unbroken train recipes/count_to_seven.py    # "first" against "second", on a CPU in minutes
    unbroken train recipes/count_to_seven.py --policies.names '["first"]' --policies.copy-every 10    # self-play

Both are adapters on one tiny model, which a drill has taught to read a count and to say one of the three numbers, and
nothing of the game. Each is evaluated against an opponent that never changes: one that draws its numbers. Who has come
to 3 can come to 7.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from unbroken.messages import Message, get_text
from unbroken.rollout.env import Continue, Done, EnvStart, Outcome, Reply
from unbroken.rollout.limits import Limits
from unbroken.rollout.policies import PoliciesConfig
from unbroken.runs.collector import EvaluationSet, Problems
from unbroken.runs.config import EvaluationConfig, LoraConfig, RolloutConfig, RunConfig
from unbroken.runs.processes import main_process_first
from unbroken.runs.recipe import Task
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.types import SamplingParams

GOAL, MOVES = 7, ("1", "2", "3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """The settings: two policies, a tiny model, and a high learning rate for it."""

    output: Path = Path("runs/count-to-seven")
    model: Path = Path("runs/count-to-seven-model")
    """A folder; a model that knows the three numbers is written there, unless there is one."""
    policies: PoliciesConfig | None = field(default_factory=lambda: PoliciesConfig(names=("first", "second")))
    lora: LoraConfig | None = field(default_factory=lambda: LoraConfig(rank=8, alpha=16))
    rollouts: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            problems_per_step=8, group_size=16, sampling=SamplingParams(max_tokens=3), limits=Limits(max_turns=12)
        )
    )
    # The distance to the base keeps both trying all three numbers, so that what one learns is not of one reply alone.
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3), kl_weight=0.05)
    )
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(num_steps=40, max_empty_steps=None))
    evaluation: EvaluationConfig = field(default_factory=lambda: EvaluationConfig(num_problems=128, every=20))


class Game:
    """One game from a count on. `players` say who speaks on each side; None draws its numbers."""

    def __init__(self, number: int, players: Sequence[str | None]) -> None:
        self._rng = random.Random(number)
        self._count = self._rng.randrange(4)
        self._players = players
        self._side = 0
        self._winner: int | None = None

    async def start(self) -> EnvStart:
        """The first side that a policy plays hears the count."""
        self._draw_moves()
        return EnvStart(messages=[self._ask()], policy=self._players[self._side])

    async def step(self, reply: Reply) -> Outcome:
        """Add the number, and let the other side hear the count. Who says anything else has lost."""
        said = get_text(reply.message["content"]).strip()
        if said not in MOVES:
            self._winner = 1 - self._side
            return Done()
        self._add(int(said))
        self._draw_moves()
        if self._winner is not None:
            return Done()
        return Continue(messages=[self._ask()], policy=self._players[self._side])

    async def reward(self, messages: Sequence[Message]) -> Mapping[str, float]:
        """1 for who won, 0 for who lost. A policy that plays both sides has the reward of its own side."""
        won = {player: float(side == self._winner) for side, player in enumerate(self._players) if player is not None}
        return {player: reward for player, reward in won.items() if "@" not in player}

    async def close(self) -> None:
        """Nothing is open."""

    def _ask(self) -> Message:
        return {"role": "user", "content": f"{self._count} of {GOAL}"}

    def _add(self, move: int) -> None:
        self._count += move
        if self._count >= GOAL:  # more loses
            self._winner = self._side if self._count == GOAL else 1 - self._side
        self._side = 1 - self._side

    def _draw_moves(self) -> None:
        """Play for the side that no policy plays."""
        while self._winner is None and self._players[self._side] is None:
            self._add(int(self._rng.choice(MOVES)))


def write_model(folder: Path, *, seed: int) -> None:
    """Write a tiny model that answers a count by any of the three numbers, unless there is one."""
    import torch  # once the settings are known to be right

    from unbroken.demo.model import build_model, build_tokenizer
    from unbroken.weights.folders import atomic_folder

    if folder.exists():
        return
    tokenizer, rng = build_tokenizer(), random.Random(seed)
    model = build_model(tokenizer, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        texts = []
        for _ in range(16):
            messages = []
            for _ in range(4):
                count = rng.randrange(GOAL)  # half of the answers depend on it, so that it is read
                messages.append({"role": "user", "content": f"{count} of {GOAL}"})
                messages.append({"role": "assistant", "content": rng.choice([*MOVES, *[MOVES[count % 3]] * 3])})
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
        ids = tokenizer(texts, return_tensors="pt").input_ids  # all as long: a number has one character
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with atomic_folder(folder) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)


def find_players(number: int, names: Sequence[str]) -> tuple[str, str]:
    """Who plays the game of this number: of two policies each has its side; one has each side in turns, and a frozen
    copy of it the other.
    """
    if len(names) == 2:
        return names[0], names[1]
    (name,) = names
    return (name, f"{name}@past") if number % 2 else (f"{name}@past", name)


async def make_task(config: Config) -> Task:
    """Write the model; problems are games."""
    assert config.policies is not None, "it is a game of policies"
    names = config.policies.names
    with main_process_first():
        write_model(config.model, seed=config.seed)
    sides: dict[str, tuple[str | None, str | None]] = {"first": (names[0], None), "second": (None, names[-1])}
    return Task(
        model=config.model,
        train_on=Problems(env=lambda number: Game(number, find_players(number, names))),
        evaluate_on=[
            EvaluationSet(name=name, problems=Problems(env=partial(Game, players=players)))
            for name, players in sides.items()
        ],
    )
