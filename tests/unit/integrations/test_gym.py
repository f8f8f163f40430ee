"""Environments of Gymnasium and TextArena, and of anything with their methods."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from types import SimpleNamespace

import pytest

from support.env_rollouts import play_env, texts
from support.fake_renderer import encode
from unbroken.errors import InvalidInputError
from unbroken.integrations.gym import GymEnv, TextArenaEnv
from unbroken.rollout.env import Env
from unbroken.rollout.limits import Limits
from unbroken.rollout.trajectory import TrajectoryStatus


class Corridor:
    """Cells 0 to 2, the goal is the last; with Gymnasium's methods."""

    def __init__(self) -> None:
        self.cell = 0
        self.seeds: list[int] = []
        self.actions: list[object] = []
        self.num_closed = 0

    def reset(self, *, seed):
        self.seeds.append(seed)
        return f"cell {self.cell}", {}

    def step(self, action):
        self.actions.append(action)
        self.cell = max(0, self.cell + (1 if action in (1, "right") else -1))
        is_over = self.cell == 2
        return f"cell {self.cell}", 1.0 if is_over else -0.25, is_over, False, {}

    def close(self):
        self.num_closed += 1


class OldCorridor(Corridor):
    """The same with the methods of Gym before 0.26."""

    def reset(self, *, seed):
        return super().reset(seed=seed)[0]

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class HigherOrLower:
    """TextArena's methods: a number, guessed by players in turn; draws from Python's global random numbers."""

    def reset(self, num_players, seed=None):
        random.seed(seed)
        self.num_players, self.player, self.rewards = num_players, 0, None
        self.number = random.randint(1, 99)
        self.unseen = {player: [(-1, f"You are player {player}.", "PROMPT")] for player in range(num_players)}

    def get_observation(self):
        unseen, self.unseen[self.player] = self.unseen[self.player], []
        return self.player, unseen

    def step(self, action):
        for unseen in self.unseen.values():
            unseen.append((self.player, action, "PLAYER_ACTION"))
        is_right = int(action) == self.number
        if is_right:
            self.rewards = {player: 1 if player == self.player else -1 for player in range(self.num_players)}
        word = "higher" if self.number > int(action) else "lower"
        for unseen in self.unseen.values():
            unseen.append((-1, f"It is {word}.", "GAME_MESSAGE"))
        self.player = (self.player + 1) % self.num_players
        return is_right, {}

    def close(self):
        return self.rewards, {}


class Repeating:
    """A wrapper whose observations repeat the whole history, as TextArena's default one does."""

    def __init__(self, env) -> None:
        self.game, self.history = env, {}

    def __getattr__(self, name):
        return getattr(self.game, name)

    def get_observation(self):
        player, unseen = self.game.get_observation()
        self.history[player] = self.history.get(player, "") + "".join(f"\n[{who}] {text}" for who, text, _ in unseen)
        return player, self.history[player]


async def number_of(**arguments) -> int:
    game = HigherOrLower()
    await TextArenaEnv(game, **arguments).start()
    return game.number


def test_both_are_environments():
    assert isinstance(GymEnv(Corridor()), Env)
    assert isinstance(TextArenaEnv(HigherOrLower()), Env)


@pytest.mark.parametrize("corridor", [Corridor, OldCorridor])
async def test_names_choose_actions_and_the_reward_is_the_sum_of_the_turns(corridor):
    env = corridor()
    trajectory = await play_env(
        GymEnv(env, actions=("left", "right"), prompt="Reach cell 2."), "Right or left? left", "RIGHT!", "I go right"
    )
    assert env.actions == [0, 1, 1]
    assert trajectory.turn_rewards == (-0.25, -0.25, 1.0)
    assert trajectory.reward == 0.5
    assert trajectory.status is TrajectoryStatus.COMPLETED
    assert texts(trajectory, "user") == [
        "Reach cell 2.\n\nAnswer with one of these actions: left, right.\n\ncell 0",
        "cell 0",
        "cell 1",
    ]
    assert env.num_closed == 1


async def test_a_reply_without_an_action_is_told_so_and_makes_no_step():
    env = Corridor()
    trajectory = await play_env(GymEnv(env, actions=("left", "right")), "upright", "right", "right")
    assert env.actions == [1, 1]
    assert texts(trajectory, "user")[1] == "That is not an action. Answer with one of these actions: left, right."
    assert trajectory.turn_rewards == (0.0, -0.25, 1.0)


async def test_without_names_the_reply_itself_is_the_action():
    env = Corridor()
    await play_env(GymEnv(env), " right\n", "right")
    assert env.actions == ["right", "right"]


async def test_a_cut_reply_is_no_action():
    env = Corridor()
    await play_env(GymEnv(env), encode("right" * 100))
    assert env.actions == []


async def test_turns_after_which_a_limit_ends_the_rollout_keep_their_rewards():
    trajectory = await play_env(GymEnv(Corridor()), "left", "left", limits=Limits(max_turns=2))
    assert (trajectory.reward, trajectory.status) == (-0.5, TrajectoryStatus.MAX_TURNS)
    assert trajectory.turn_rewards == (-0.25, -0.25)


async def test_problems_differ_and_repeat_by_number_split_and_seed():
    places = [(0, "train", 0), (1, "train", 0), (0, "evaluation", 0), (0, "train", 1)]
    seeds = []
    for number, split, seed in [*places, *places]:
        env = Corridor()
        await GymEnv(env, number, split, seed).start()
        seeds += env.seeds
    assert seeds[:4] == seeds[4:]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)


async def test_an_environment_that_was_still_being_made_at_a_cancellation_is_closed(monkeypatch):
    begun, may_go_on, corridor = threading.Event(), threading.Event(), Corridor()

    def make(_):
        begun.set()
        may_go_on.wait(60)
        return corridor

    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=make))
    env = GymEnv("Slow-v0")
    starting = asyncio.create_task(env.start())
    await asyncio.to_thread(begun.wait, 60)
    starting.cancel()
    closing = asyncio.create_task(env.close())
    may_go_on.set()
    await closing
    assert corridor.num_closed == 1


async def test_a_step_of_another_form_is_an_error():
    class Odd(Corridor):
        def step(self, action):
            return "cell", 1.0

    env = GymEnv(Odd())
    await env.start()
    with pytest.raises(InvalidInputError, match=r"step must return .*got \('cell', 1.0\)"):
        env._take("right")


async def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    with pytest.raises(InvalidInputError, match=r"env='X-v0' needs the package gymnasium"):
        await GymEnv("X-v0").start()


async def test_a_game_shows_what_is_new_and_rewards_the_last_move():
    game = HigherOrLower()
    env = TextArenaEnv(game)
    number = await number_of()
    trajectory = await play_env(env, "1", str(number))
    assert game.number == number
    assert texts(trajectory, "user") == ["You are player 0.", "It is higher."]
    assert trajectory.turn_rewards == (0.0, 1.0)


async def test_observations_that_repeat_the_history_are_shown_once():
    trajectory = await play_env(TextArenaEnv(Repeating(HigherOrLower())), "1", "2", "3", limits=Limits(max_turns=3))
    assert texts(trajectory, "user")[:2] == ["[-1] You are player 0.", "[0] 1\n[-1] It is higher."]


async def test_an_opponent_moves_when_it_is_its_turn():
    seen = []

    def opponent(text):
        seen.append(text)
        return "98"

    trajectory = await play_env(
        TextArenaEnv(HigherOrLower(), num_players=2, player=1, opponent=opponent), "2", "3", limits=Limits(max_turns=2)
    )
    assert texts(trajectory, "user")[0] == "You are player 1.\n[Player 0] 98\nIt is lower."
    assert seen[1] == "It is lower.\n[Player 1] 2\nIt is higher."


def test_a_game_of_several_needs_an_opponent():
    with pytest.raises(InvalidInputError, match="opponent must be given for a game of 2 players"):
        TextArenaEnv(HigherOrLower(), num_players=2)
    with pytest.raises(InvalidInputError, match="player must be one of 0 to 0, got 1"):
        TextArenaEnv(HigherOrLower(), player=1)


async def test_games_draw_numbers_of_their_own():
    random.seed(7)
    state = random.getstate()
    assert await number_of(number=3) == await number_of(number=3)
    assert len({await number_of(number=number) for number in range(9)}) > 4
    assert random.getstate() == state


@pytest.mark.parametrize("slippery", [False, True])
async def test_frozen_lake_of_gymnasium(slippery):
    pytest.importorskip("gymnasium", reason="needs gymnasium", exc_type=ModuleNotFoundError)
    env = GymEnv(
        "FrozenLake-v1",
        actions=("left", "down", "right", "up"),
        options={"render_mode": "ansi", "is_slippery": slippery},
    )
    trajectory = await play_env(
        env, "down", "down", "right", "right", "down", "right", limits=Limits(max_turns=3 if slippery else 6)
    )
    assert texts(trajectory, "user")[0].endswith(": left, down, right, up.\n\n[S]FFF\nFHFH\nFFFH\nHFFG")
    if not slippery:
        assert (trajectory.reward, trajectory.status) == (1.0, TrajectoryStatus.COMPLETED)
        assert texts(trajectory, "user")[1] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"


async def test_a_number_of_a_discrete_space_is_an_action():
    pytest.importorskip("gymnasium", reason="needs gymnasium", exc_type=ModuleNotFoundError)
    trajectory = await play_env(GymEnv("CliffWalking-v1"), "4", "I take 0.", limits=Limits(max_turns=2))
    assert texts(trajectory, "user") == ["36", "That is not an action.", "24"]
    assert trajectory.turn_rewards == (0.0, -1.0)


async def test_a_game_of_textarena():
    pytest.importorskip("textarena", reason="needs textarena", exc_type=ModuleNotFoundError)
    guesses = [f"[{k}]" for k in range(1, 10)]
    games = [await play_env(TextArenaEnv("GuessTheNumber-v0"), *guesses, limits=Limits(max_turns=9)) for _ in range(2)]
    first, again = (texts(each, "user") for each in games)
    assert first == again
    assert "between 1 and" in first[0]
    assert "[1]" not in first[1]
