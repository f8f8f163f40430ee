"""Environments of verifiers 0.4 over a stand-in: an episode in a session, and the rewards of its trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.servers import encode
from support.verifiers_attempts import load, sample
from unbroken.errors import InvalidInputError
from unbroken.ledger.tree import export_samples
from unbroken.rollout.trajectory import TrajectoryStatus

ANSWER = "It is 17.<|im_end|>"


@pytest.fixture(autouse=True)
def _installed(install: Callable[[str], None]) -> None:
    install("0_4")


async def test_an_episode_is_a_trajectory_with_the_rewards_of_its_trace(tmp_path: Path) -> None:
    group, engine = await sample(tmp_path, ANSWER, name="cells", size=2)
    for trajectory in group.trajectories:
        (row,) = export_samples(trajectory.tree, 1.0)
        assert row.token_ids[row.loss_mask].tolist() == encode(ANSWER)
        assert trajectory.reward == 2.0
        assert trajectory.reward_parts == {"length": 9.0, "right": 1.0}
    assert len({request.session_id for request in engine.requests}) == 2


async def test_an_episode_that_failed_fails_its_attempt_with_its_words(tmp_path: Path) -> None:
    group, _ = await sample(tmp_path, ANSWER, name="cells", ok=False)
    (trajectory,) = group.trajectories
    assert trajectory.status is TrajectoryStatus.FAILED
    assert "the episode failed: SandboxError: no sandbox" in str(trajectory.error)


async def test_the_agent_that_is_trained_is_the_one_without_a_client(tmp_path: Path) -> None:
    agents = {"judge": "elsewhere", "solver": None}
    group, _ = await sample(tmp_path, ANSWER, name="cells", agents=agents)
    assert group.rewards == (2.0,)


async def test_two_rollouts_of_one_agent_are_not_one_trajectory(tmp_path: Path) -> None:
    group, _ = await sample(tmp_path, ANSWER, name="cells", runs=2)
    assert "must have one rollout of the agent 'agent', got 2" in str(group.trajectories[0].error)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("sells", {}, "environment must be one that verifiers 0.4.0 can load, got 'sells': ModuleNotFoundError"),
        ("cells", {"agents": {"a": None, "b": None}}, "exactly one agent without its own client, which is"),
        ("cells", {"taskset": {"infinite": True}}, "environment 'cells' cannot be trained on: its taskset is infinite"),
        ("cells", {"taskset": {"cells": 0}}, "environment 'cells' has no tasks"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_at_the_start(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        load(f"verifiers:{name}", **arguments).make(evaluation=False)
    assert words in str(raised.value)
