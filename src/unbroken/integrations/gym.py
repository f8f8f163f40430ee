"""Environments with the interface of Gymnasium or of TextArena, played in text.

    environment = "unbroken.integrations.gym:GymEnv"
    environment_arguments = { env = "FrozenLake-v1", actions = ["left", "down", "right", "up"] }

Any object with these methods will do; the packages are imported only for an environment that is named by its id. The
reward of each step is that of its turn, so that an episode's reward is their sum.
"""

from __future__ import annotations

import importlib
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.messages import Message, get_text
from unbroken.rollout.env import Continue, Done, EnvStart, Outcome, Reply
from unbroken.rollout.seeds import derive_problem_seed
from unbroken.threads import DaemonThreads
from unbroken.types import FinishReason

_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0?m", flags=re.DOTALL)


class GymEnv:
    """An environment with `reset(seed=...)` and `step(action)`, as Gymnasium has them.

    It is reset with a seed of the problem, so the siblings of a group begin alike. All its methods are called in one
    thread. A reply that was cut by length ends the episode and is no action. Subclasses may replace `describe` and
    `read_action`.
    """

    def __init__(
        self,
        env: Any,
        number: int = 0,
        split: str = "train",
        seed: int = 0,
        *,
        actions: tuple[str, ...] = (),
        prompt: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare an episode.

        `env` is an id for `gymnasium.make`, which also gets `options`, or an object, which is closed at the end.
        `actions` are the names of the actions 0, 1, 2, ...; `prompt` is shown before the first observation.
        """
        self._source = env
        self._seed = derive_problem_seed(seed, split, number)
        self._actions = tuple(actions)
        self._prompt = prompt
        self._options = dict(options or {})
        self._threads = DaemonThreads(1)
        self._env: Any = None

    def describe(self, observation: Any) -> str:
        """The text of an observation: itself, what an environment with `render_mode="ansi"` prints, or its `str`.

        What is printed in colour, such as the player's place, is put in brackets.
        """
        if isinstance(observation, str):
            return observation
        # An object with `reset` and `step` alone is an environment too, also without these two attributes.
        if getattr(self._env, "render_mode", None) != "ansi":
            return str(observation)
        return _COLOURED.sub(r"[\1]", self._env.render()).strip("\n")

    def read_action(self, text: str) -> Any:
        """The action that a reply chooses; None if it chooses none.

        With names of actions, it is the number of the name that comes last. With a discrete space, it is the last whole
        number, if the space has it. With any other space, it is the text.
        """
        if self._actions:
            names = "|".join(map(re.escape, sorted(self._actions, key=len, reverse=True)))
            found = re.findall(rf"(?<!\w)({names})(?!\w)", text, flags=re.IGNORECASE)
            folded = [name.casefold() for name in self._actions]
            return folded.index(found[-1].casefold()) if found else None
        space: Any = getattr(self._env, "action_space", None)
        if not hasattr(space, "n"):
            return text.strip()
        numbers = re.findall(r"(?<!\w)-?\d+(?!\w)", text)
        return int(numbers[-1]) if numbers and space.contains(int(numbers[-1])) else None

    async def start(self) -> EnvStart:
        """Make and reset the environment, and show the first observation."""
        text = await self._threads.run(self._reset)
        parts = [self._prompt, self._list_actions(), text]
        return EnvStart(messages=[_say("\n\n".join(filter(None, parts)))])

    async def step(self, reply: Reply) -> Outcome:
        """Take the action of the reply; a reply without one is answered by what is allowed, and no step is made."""
        if reply.finish_reason is FinishReason.LENGTH:
            return Done()
        action = self.read_action(get_text(reply.message["content"]))
        if action is None:
            return Continue(messages=[_say(f"That is not an action. {self._list_actions()}".strip())])
        return await self._threads.run(lambda: self._take(action))

    async def reward(self, messages: Sequence[Message]) -> float:
        """0: the turns have the rewards."""
        return 0.0

    async def close(self) -> None:
        """Close the environment, also one that was still being made when the rollout was cancelled."""
        await self._threads.run(self._close)

    def _close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()

    def _reset(self) -> str:
        if isinstance(self._source, str):
            self._env = _import("gymnasium", self._source).make(self._source, **self._options)
        else:
            self._env = self._source
        result = self._env.reset(seed=self._seed)
        has_info = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        return self.describe(result[0] if has_info else result)

    def _take(self, action: Any) -> Outcome:
        observation, reward, is_over = _read_step(self._env.step(action))
        if is_over:
            return Done(reward=float(reward))
        return Continue(messages=[_say(self.describe(observation))], reward=float(reward))

    def _list_actions(self) -> str:
        return f"Answer with one of these actions: {', '.join(self._actions)}." if self._actions else ""


class TextArenaEnv:
    """A game of TextArena for one player, or against `opponent`.

    The model sees what it has not seen: the messages of the game and of the others, not its own moves again. It gets
    the game's reward with its last move, and none if a limit ends the rollout before the game.
    """

    def __init__(
        self,
        env: Any,
        number: int = 0,
        split: str = "train",
        seed: int = 0,
        *,
        num_players: int = 1,
        player: int = 0,
        opponent: Callable[[str], str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare a game.

        `env` is an id for `textarena.make`, which also gets `options`, or an object. An object's observations are shown
        as its wrappers write them; of a game named by its id, without wrappers of observations, which repeat the
        history. `opponent` gets what is new to the player whose turn it is, and returns that player's move.

        Raises:
            InvalidInputError: there are other players and no `opponent`, or no player of this number.
        """
        if not 0 <= player < num_players:
            raise InvalidInputError(f"player must be one of 0 to {num_players - 1}, got {player}")
        if num_players > 1 and opponent is None:
            raise InvalidInputError(f"opponent must be given for a game of {num_players} players")
        self._source = env
        self._seed = derive_problem_seed(seed, split, number)
        self._num_players = num_players
        self._player = player
        self._opponent = opponent
        self._options = dict(options or {})
        self._threads = DaemonThreads(1)
        self._random = _OwnRandom(self._seed)
        self._shown: dict[int, str] = {}
        self._env: Any = None
        self._observed: Any = None

    async def start(self) -> EnvStart:
        """Begin the game, and show what the player sees first."""
        outcome = await self._threads.run(self._begin)
        if isinstance(outcome, Done):
            raise InvalidInputError(f"{self._source!r} ended before the turn of player {self._player}")
        return EnvStart(messages=outcome.messages)

    async def step(self, reply: Reply) -> Outcome:
        """Make the move; the others move until it is the player's turn again."""
        if reply.finish_reason is FinishReason.LENGTH:
            return Done()
        text = get_text(reply.message["content"])
        return await self._threads.run(lambda: self._advance(is_over=self._move(text)))

    async def reward(self, messages: Sequence[Message]) -> float:
        """0: the last turn has the reward."""
        return 0.0

    async def close(self) -> None:
        """Release the game; it holds no resources."""
        self._env = self._observed = None

    def _begin(self) -> Continue | Done:
        is_named = isinstance(self._source, str)
        with self._random.in_use():
            if is_named:
                self._env = _import("textarena", self._source).make(self._source, **self._options)
            else:
                self._env = self._source
            self._env.reset(num_players=self._num_players, seed=self._seed)
        self._observed = self._env
        while is_named and hasattr(self._observed, "env"):
            self._observed = self._observed.env
        return self._advance(is_over=False)

    def _move(self, text: str) -> bool:
        with self._random.in_use():
            return bool(self._env.step(action=text)[0])

    def _advance(self, *, is_over: bool) -> Continue | Done:
        while not is_over:
            player, text = self._observe()
            if player == self._player or self._opponent is None:
                return Continue(messages=[_say(text)])
            is_over = self._move(self._opponent(text))
        rewards = self._env.close()[0] or {}
        return Done(reward=float(rewards.get(self._player, 0.0)))

    def _observe(self) -> tuple[int, str]:
        """The player whose turn it is, and what is new to that player."""
        player, observation = self._observed.get_observation()
        if isinstance(observation, str):
            text = observation.removeprefix(self._shown.get(player, ""))
            self._shown[player] = observation
            return player, text.strip()
        lines = [
            text if sender < 0 else f"[Player {sender}] {text}" for sender, text, *_ in observation if sender != player
        ]
        return player, "\n".join(lines)


class _OwnRandom:
    """A state of Python's global random numbers for one game: TextArena draws from them, and seeds them.

    Games that run at the same time then do not change each other's numbers, nor those of the rest of the process.
    """

    _mutex = threading.Lock()

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with self._mutex:
            outside = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(outside)


def _say(text: str) -> Message:
    return {"role": "user", "content": text}


def _read_step(result: Any) -> tuple[Any, Any, bool]:
    """The observation, the reward, and whether the episode is over, of what Gymnasium's or Gym's `step` returned."""
    if isinstance(result, tuple) and len(result) == 5:
        observation, reward, terminated, truncated, _ = result
        return observation, reward, bool(terminated or truncated)
    if isinstance(result, tuple) and len(result) == 4:
        observation, reward, done, _ = result
        return observation, reward, bool(done)
    raise InvalidInputError(
        f"step must return (observation, reward, terminated, truncated, info) or (observation, reward, done, info), "
        f"got {result!r}"
    )


def _import(package: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InvalidInputError(
            f"env={name!r} needs the package {package}, which cannot be imported ({error}): pip install {package}"
        ) from error
