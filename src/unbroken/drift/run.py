"""Samples conversations from a model, passes them through the usual pipeline, and counts what it changed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import torch

from unbroken.audit.subject import Subject
from unbroken.demo.config import WarmUpConfig
from unbroken.demo.model import write_warm_model
from unbroken.drift.config import DriftConfig, EngineChoice
from unbroken.drift.conversations import MakeEnv
from unbroken.drift.report import DriftExample, DriftReport, DriftSetup
from unbroken.engines.base import Engine
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError, UnbrokenError, missing_extra
from unbroken.rendering.effects import ToolsWarning
from unbroken.retokenising.changes import Cause
from unbroken.retokenising.comparison import Retokenised, compare_trajectory, count_changed, count_compared
from unbroken.retokenising.ratios import Ratios, score_rollouts
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.seeds import derive_seed
from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.config import read_key
from unbroken.runs.models import load_model
from unbroken.viewer.reports import show_side_by_side

_log = logging.getLogger(__name__)
_MAX_SAMPLING = 64
"""Conversations at a time."""
_WARM_UP = WarmUpConfig(num_demo_steps=700)
"""Less than the demo's, to be short. With 450 steps the model hardly writes words as its tokenizer would."""


async def run_drift(
    subject: Subject, engine: Engine, make_env: MakeEnv, config: DriftConfig, *, prompts: str, engine_name: str
) -> DriftReport:
    """Make the report of a model.

    Raises:
        UnbrokenError: no conversation could be sampled; the error of the first one.
        EngineError: the engine failed while it scored.
    """
    started = time.perf_counter()
    _warn_of_options(subject)
    trajectories = await sample_conversations(subject, engine, make_env, config)
    with_turns = [trajectory for trajectory in trajectories if trajectory.turns]
    if not with_turns:
        raise _explain(trajectories[0])
    outcomes = [await asyncio.to_thread(compare_trajectory, subject, trajectory) for trajectory in with_turns]
    rollouts = [outcome for outcome in outcomes if outcome is not None]
    ratios = Ratios()
    if config.scores:
        ratios = await score_rollouts(rollouts, engine, temperature=config.temperature or 1.0)
    return DriftReport(
        about=DriftSetup(
            model=subject.name,
            engine=engine_name,
            parser=subject.template_renderer.parser_name,
            template_sha256=hashlib.sha256(subject.facts.source.encode()).hexdigest(),
            options=subject.options,
            prompts=prompts,
            num_conversations=config.num_conversations,
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            max_turns=config.max_turns,
            seed=config.seed,
        ),
        compared=count_compared(rollouts),
        changed=count_changed(rollouts),
        causes={cause: count_changed(rollouts, cause) for cause in Cause},
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
    check_tools = ToolsWarning(subject.renderer)

    async def sample(number: int) -> Trajectory:
        async with room:
            return await run_rollout(
                make_env(number),
                engine=engine,
                renderer=subject.renderer,
                sampling=replace(config.sampling, seed=derive_seed(config.seed, number)),
                limits=limits,
                trajectory_id=f"drift-{config.seed}-{number}",
                check_tools=check_tools,
            )

    return list(await asyncio.gather(*map(sample, range(config.num_conversations))))


def _warn_of_options(subject: Subject) -> None:
    if unread := subject.find_unread_options():
        _log.warning("the chat template does not read the options %s: they have no effect", ", ".join(unread))


def _explain(trajectory: Trajectory) -> UnbrokenError:
    if isinstance(trajectory.error, UnbrokenError):
        return trajectory.error
    return InvalidInputError(
        f"no conversation has a turn to compare: the first one ended as {trajectory.status.value}"
        + (f" ({trajectory.error!r})" if trajectory.error is not None else "")
    )


def _choose_examples(subject: Subject, rollouts: Sequence[Retokenised]) -> tuple[DriftExample, ...]:
    """For each cause the shortest rollout that has it alone, or at all."""
    examples = []
    for cause in Cause:
        found = [one for one in rollouts if cause in one.causes]
        if found:
            chosen = min(found, key=lambda one: (len(one.causes), len(one.token_ids)))
            examples.append(DriftExample(cause=cause, sides=show_side_by_side(chosen, subject.get_text)))
    return tuple(examples)


def ensure_demo_model(folder: Path) -> Path:
    """Return the folder of the demo's untrained, warmed-up model, which is made there the first time."""
    if not (folder / "config.json").exists():
        try:
            write_warm_model(folder, _WARM_UP, seed=0)
        except OSError as error:
            raise InvalidInputError(f"{folder} cannot be written: {error.strerror or error}") from None
    return folder


@asynccontextmanager
async def open_engine(choice: EngineChoice, model: str, *, vocab_size: int) -> AsyncIterator[Engine]:
    """Open the engine, and close it when the block ends.

    Raises:
        InvalidInputError: there is no such model, the embedded engine cannot run it, or the client extra is missing.
        EngineError: a server does not answer, or is of another kind.
    """
    engine = await (_connect(choice, vocab_size) if choice.urls else asyncio.to_thread(_load, model))
    try:
        yield engine
    finally:
        await engine.close()


def _load(model: str) -> Engine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TransformersEngine(load_model(model).to(device))


async def _connect(choice: EngineChoice, vocab_size: int) -> Engine:
    try:
        from unbroken.engines.http import HttpEngine
    except ModuleNotFoundError as error:
        raise missing_extra(error, "--engine URL needs the client extra", "client") from error
    key = read_key(choice.api_key_file, field="--api-key-file")
    return await HttpEngine.connect(choice.urls, api_key=key, vocab_size=vocab_size)
