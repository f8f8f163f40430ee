"""Samples conversations, passes them through the usual pipeline, and counts what it changed."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unbroken.audit.checks.side_by_side import show_side_by_side
from unbroken.audit.report import Origin as ShownOrigin
from unbroken.audit.subject import Subject
from unbroken.drift.config import DriftConfig
from unbroken.drift.pipeline import ComparedRollout, compare_rollout
from unbroken.drift.ratios import Ratios, score_rollouts
from unbroken.drift.report import About, Counts, DriftReport, Example
from unbroken.drift.tasks import MakeEnv
from unbroken.engines.base import Engine
from unbroken.errors import InvalidInputError, UnbrokenError
from unbroken.ledger.nodes import Origin
from unbroken.rendering.base import TEMPLATE
from unbroken.retokenising.causes import Cause
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.seeds import derive_seed
from unbroken.rollout.trajectory import Trajectory

_MAX_SAMPLING = 64
"""Conversations at a time."""


async def run_drift(
    subject: Subject, engine: Engine, make_env: MakeEnv, config: DriftConfig, *, prompts: str, engine_name: str
) -> DriftReport:
    """Make the report of a model.

    Raises:
        UnbrokenError: no conversation could be sampled; the error of the first one.
        EngineError: the engine failed while it scored.
    """
    started = time.perf_counter()
    trajectories = await sample_conversations(subject, engine, make_env, config)
    with_turns = [trajectory for trajectory in trajectories if trajectory.turns]
    if not with_turns:
        raise _explain(trajectories[0])
    outcomes = [await asyncio.to_thread(compare_rollout, subject, trajectory) for trajectory in with_turns]
    rollouts = [outcome for outcome in outcomes if outcome is not None]
    ratios = Ratios(exact=None, retokenised=None, num_unscored=0)
    if config.scores:
        ratios = await score_rollouts(rollouts, engine, temperature=config.temperature or 1.0)
    return DriftReport(
        about=About(
            model=subject.name,
            engine=engine_name,
            parser=subject.facts.parser_name,
            template_sha256=hashlib.sha256(subject.facts.source.encode()).hexdigest(),
            options=subject.options,
            prompts=prompts,
            num_conversations=config.num_conversations,
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            max_turns=config.max_turns,
            seed=config.seed,
        ),
        compared=Counts(
            num_rollouts=len(rollouts),
            num_turns=sum(len(one.turns) for one in rollouts),
            num_ids=sum(int(one.path.sampled_mask.sum()) for one in rollouts),
        ),
        changed=_count_changed(rollouts, None),
        causes={cause: _count_changed(rollouts, cause) for cause in Cause},
        num_failed=len(trajectories) - len(with_turns),
        num_refused=len(with_turns) - len(rollouts),
        num_turns_left_out=sum(one.num_turns_left_out for one in rollouts),
        exact=ratios.exact,
        retokenised=ratios.retokenised,
        num_unscored=ratios.num_unscored,
        seconds=time.perf_counter() - started,
        examples=_choose_examples(subject, rollouts),
    )


async def sample_conversations(
    subject: Subject, engine: Engine, make_env: MakeEnv, config: DriftConfig
) -> list[Trajectory]:
    """Sample all conversations; the same seed gives the same ones on the same engine."""
    limits = Limits(max_turns=config.max_turns, timeout_s=config.timeout_s)
    room = asyncio.Semaphore(_MAX_SAMPLING)

    async def sample(number: int) -> Trajectory:
        async with room:
            return await run_rollout(
                make_env(number),
                engine=engine,
                renderer=subject.renderer,
                sampling=replace(config.sampling, seed=derive_seed(config.seed, number)),
                limits=limits,
                trajectory_id=f"drift-{config.seed}-{number}",
            )

    return list(await asyncio.gather(*map(sample, range(config.num_conversations))))


def _explain(trajectory: Trajectory) -> UnbrokenError:
    if isinstance(trajectory.error, UnbrokenError):
        return trajectory.error
    return InvalidInputError(
        f"no conversation has a turn to compare: the first one ended as {trajectory.status.value}"
        + (f" ({trajectory.error!r})" if trajectory.error is not None else "")
    )


def _count_changed(rollouts: Sequence[ComparedRollout], cause: Cause | None) -> Counts:
    """Count what changed for one cause, or for any."""
    return Counts(
        num_rollouts=sum(one.differs if cause is None else cause in one.causes for one in rollouts),
        num_turns=sum(
            any(cause is None or cause in change.causes for change in one.find_changes(turn))
            for one in rollouts
            for turn in one.turns
        ),
        num_ids=sum(one.count_changed_ids(cause) for one in rollouts),
    )


def _choose_examples(subject: Subject, rollouts: Sequence[ComparedRollout]) -> tuple[Example, ...]:
    """For each cause the shortest rollout that has it alone, or at all."""
    examples = []
    for cause in Cause:
        found = [one for one in rollouts if cause in one.causes]
        if found:
            chosen = min(found, key=lambda one: (len(one.causes), len(one.path.token_ids)))
            sides = show_side_by_side(
                subject, chosen.path.token_ids.tolist(), _get_origins(chosen), chosen.retokenised_ids.tolist()
            )
            examples.append(Example(cause=cause, sides=sides))
    return tuple(examples)


def _get_origins(rollout: ComparedRollout) -> list[ShownOrigin]:
    path = rollout.path
    is_message = (path.message_indices != TEMPLATE) & np.array([origin is Origin.BRIDGE for origin in path.origins])
    return [
        ShownOrigin.MESSAGE if in_message else ShownOrigin(origin.value)
        for origin, in_message in zip(path.origins, is_message.tolist(), strict=True)
    ]
