"""Several policies in one rollout: the environment names who speaks next, and each has a conversation of its own.

    names = ["solver", "critic"]   EnvStart(policy="solver") ──► Continue(policy="critic") ──► Continue(policy="solver")

    solver      its first messages, its reply              ...    what the environment tells it then, its next reply
    critic                                    its messages, its reply

A conversation has its own messages and ids: a policy sees what the environment tells it and what it said itself, and
nothing else. `Trajectory` is the record of all turns in their order; its `parts` are what each policy said, as a
trajectory of its own with its own reward: that is what is trained.

    solver         the policy that is trained
    solver@0       as it was before the first step
    solver@past    one of its frozen copies, drawn once for each group: the turn says which one it was, as solver@40

Copies are of versions that the number of the current one tells, so that sampler and trainer need not agree on them:
with a copy every 20 versions and room for 3, those of version 70 are 20, 40 and 60. No id of a copy is trained.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from unbroken.errors import InvalidInputError, RewardError
from unbroken.ledger.numbers import to_finite_float32
from unbroken.ledger.tree import Conversations, TokenTree
from unbroken.messages import Message, ToolSchema
from unbroken.rollout.trajectory import Turn

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_PEFT_PREFIX = "lora_"
_PAST = "past"
TAKE_TURNS = "policies take turns in one process"
"""Why a run of policies has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesConfig:
    """Several policies, each a LoRA adapter on the one model, which an environment lets speak (docs/policies.md)."""

    elsewhere: ClassVar[Mapping[str, str]] = {"num_copies": "it is 5; a recipe in Python gives another number"}
    """Fields that are no settings of a run, and why."""

    names: tuple[str, ...]
    """What environments call them. The first one's reward is the rollout's: name the one first that evaluations and the
    best model shall be about."""
    copy_every: int = 0
    """Versions between two frozen copies, which speak as NAME@past; 0: none. Lower it where a policy wins against all
    copies it has, and raise it where it forgets how to win against older ones."""
    num_copies: int = 5
    """How many of the newest copies speak. Raise it where policies go round in circles: each beats the one before, and
    none the first."""

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) < len(self.names):
            raise InvalidInputError(f"policies.names must be different names, at least one, got {list(self.names)}")
        for name in self.names:
            # PEFT finds its parameters by parts of their names, and refuses an adapter called "a", "ra" or "lora".
            if not _NAME.fullmatch(name) or name in _PEFT_PREFIX:
                raise InvalidInputError(
                    "policies.names must have lower-case letters, digits, - and _, begin with a letter and be no part "
                    f"of {_PEFT_PREFIX!r}, got {name!r}"
                )
        if self.copy_every < 0 or self.num_copies < 1:
            raise InvalidInputError(
                f"policies.copy_every must be >= 0 and policies.num_copies >= 1, got {self.copy_every} and "
                f"{self.num_copies}"
            )

    def check_processes(self, num_processes: int) -> None:
        """Raise `InvalidInputError` for several processes."""
        if num_processes > 1:
            raise InvalidInputError(
                f"policies must be left out with several processes, got {num_processes}: {TAKE_TURNS}"
            )

    def count_adapters(self, versions: range | None) -> int:
        """How many adapters an engine has at once at most, in any of these versions; without them, in any at all."""
        last = self.copy_every * self.num_copies if versions is None else versions[-1]
        return len(self.list_adapters(max(last, 1)))

    def describe_adapters(self, num_adapters: int) -> str:
        """What so many adapters are."""
        fields = "policies.copy_every, policies.num_copies, loop.num_steps"
        num_copies = num_adapters // len(self.names) - 1
        return "those of policies.names" + (
            f", with up to {num_copies} frozen copies of each ({fields})" if num_copies else ""
        )

    def list_adapters(self, version: int) -> tuple[str, ...]:
        """The adapters that an engine has at this version, the policies before their copies. Before the first update
        there is none: every policy begins as the base, and so does its copy at 0.
        """
        if version == 0:
            return ()
        copies = [copy for copy in self.list_copies(version) if copy > 0]
        return (*self.names, *(f"{name}@{copy}" for name in self.names for copy in copies))

    def list_copies(self, version: int) -> tuple[int, ...]:
        """The versions whose copies speak while the policies have this one, ascending; there is always one."""
        every = range(0, version + 1, self.copy_every) if self.copy_every else (0,)
        return tuple(every[-self.num_copies :])

    def draw_copies(self, version: int, seed: int | None) -> dict[str, str]:
        """What NAME@past stands for in one group, by NAME."""
        copies, rng = self.list_copies(version), np.random.default_rng(seed)
        return {name: f"{name}@{rng.choice(copies)}" for name in self.names}

    def find_speaker(self, said: str, version: int, drawn: Mapping[str, str]) -> str:
        """The policy, or the frozen copy, that an environment names; raises `InvalidInputError` if there is none."""
        name, at, which = said.partition("@")
        copies = [str(copy) for copy in self.list_copies(version)]
        if name in self.names and not at:
            return name
        if name in self.names and which == _PAST and self.copy_every:
            return drawn[name]
        if name in self.names and which in {"0", *copies}:
            return said
        known = f"one of {', '.join(self.names)}, or one of these at 0 or a copy ({', '.join(copies)}) as NAME@0"
        past = "" if self.copy_every else "; for NAME@past set policies.copy_every"
        raise InvalidInputError(f"the policy of an environment's turn must be {known}{past}, got {said!r}")

    def read_rewards(self, given: object, spoke: Collection[str]) -> dict[str, float]:
        """The reward of each policy that has one, in the order of the names.

        Raises:
            RewardError: one that spoke has none, a name is no policy's, or a reward is not a finite number.
        """
        if not isinstance(given, Mapping) or not set(given) <= set(self.names):
            raise RewardError(f"the reward must be a mapping from some of {list(self.names)} to numbers, got {given!r}")
        if missing := [name for name in self.names if name in spoke and name not in given]:
            raise RewardError(f"the reward must have a number for each policy that spoke, and has none for {missing}")
        return {
            name: to_finite_float32(given[name], name=f"the reward of {name}", error=RewardError)
            for name in self.names
            if name in given
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """What one policy was told and said next in a rollout."""

    policy: str
    given: Sequence[Message]
    replaces: bool
    """Whether `given` is its whole history from now on."""
    turn: Turn

    @staticmethod
    def join(
        speeches: Sequence[Speech], trees: Mapping[str, TokenTree], tools: tuple[ToolSchema, ...]
    ) -> tuple[TokenTree, tuple[Turn, ...], Conversations]:
        """The record of a rollout: one tree of all ids, the turns in their order, and which messages belong to which.

        `trees` are those of the policies' own conversations.
        """
        tree = TokenTree()
        shifts = {name: tree.append(own) for name, own in trees.items()}
        turns = tuple(_shift(each.turn, shifts[each.policy]) for each in speeches)
        messages: list[Message] = []
        parents: list[int | None] = []
        last: dict[str, int] = {}
        """The newest message of each policy's conversation."""
        replies = []
        for speech in speeches:
            parent = None if speech.replaces else last.get(speech.policy)
            for message in (*speech.given, speech.turn.message):
                messages.append(message)
                parents.append(parent)
                parent = len(messages) - 1
            last[speech.policy] = len(messages) - 1
            replies.append(len(messages) - 1)
        conversations = Conversations(
            messages=messages,
            parents=parents,
            turn_of_node={turn.end.node: number for number, turn in enumerate(turns)},
            replies=replies,
            tools=[tools] * len(turns),
        )
        return tree, turns, conversations


def _shift(turn: Turn, shift: int) -> Turn:
    ends = {name: getattr(turn, name) for name in ("prompt_end", "end")}
    return replace(turn, **{name: replace(end, node=end.node + shift) for name, end in ends.items()})
