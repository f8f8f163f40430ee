"""Rollouts of environments against scripted replies, and whether their rows are exact."""

from __future__ import annotations

from typing import Any

from support.fake_renderer import END, VOCAB_SIZE, FakeRenderer, call_ids, encode
from unbroken.engines.scripted import ScriptedEngine
from unbroken.ledger.tree import export_samples
from unbroken.messages import get_text
from unbroken.rollout.env import Env
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus
from unbroken.types import SamplingParams


def call(name: str, /, **arguments: Any) -> list[int]:
    """The ids of a reply that calls a tool."""
    return [*call_ids(name, arguments), END]


async def play_env(env: Env, *replies: str | list[int], limits: Limits | None = None) -> Trajectory:
    """Play these replies (texts, or ids), and check that the ids of the row that train are those of the replies."""
    scripted = [[*encode(reply), END] if isinstance(reply, str) else reply for reply in replies]
    left = iter(scripted)
    trajectory = await run_rollout(
        env,
        engine=ScriptedEngine(lambda prompt_ids: next(left), vocab_size=VOCAB_SIZE, context_length=65536),
        renderer=FakeRenderer(),
        sampling=SamplingParams(max_tokens=400),
        limits=limits or Limits(),
    )
    assert trajectory.error is None, trajectory.error
    assert trajectory.close_error is None, trajectory.close_error
    check_row(trajectory, scripted)
    return trajectory


async def fail_env(env: Env) -> Trajectory:
    """Play an environment whose rollout fails."""
    trajectory = await run_rollout(
        env,
        engine=ScriptedEngine([[*encode("1"), END]]),
        renderer=FakeRenderer(),
        sampling=SamplingParams(max_tokens=9),
        limits=Limits(),
    )
    assert trajectory.status is TrajectoryStatus.FAILED
    return trajectory


def check_row(trajectory: Trajectory, replies: list[list[int]]) -> None:
    """The trajectory is one row, which trains the ids that were sampled, those of the replies, and no others."""
    (row,) = export_samples(trajectory.tree, 1.0)
    sampled = [turn.sequence.completion_ids.tolist() for turn in trajectory.turns]
    assert all(ids == reply[: len(ids)] for ids, reply in zip(sampled, replies, strict=False))
    assert row.token_ids[row.loss_mask].tolist() == [each for ids in sampled for each in ids]
    assert row.loss_mask.tolist() == row.sampled_mask.tolist()


def texts(trajectory: Trajectory, role: str) -> list[str]:
    """The texts of the messages of a role."""
    return [get_text(message["content"]) for message in trajectory.messages if message["role"] == role]
