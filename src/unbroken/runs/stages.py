"""The stages of a run, from top to bottom: evaluate, train, write the model, evaluate again."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path

from rich.console import Console

from unbroken.rollout.trajectory import Trajectory
from unbroken.runs.collector import EvaluationSet
from unbroken.runs.config import EngineKind, RunConfig
from unbroken.runs.curriculum import MakeCurriculum, make_collector
from unbroken.runs.evaluation.beside import EvaluationsBeside, EvaluationServers
from unbroken.runs.evaluation.evaluator import cut_evaluations
from unbroken.runs.evaluation.schedule import Evaluations, make_evaluators
from unbroken.runs.export.files import create_repository
from unbroken.runs.export.kept import KeptModels
from unbroken.runs.opening import OpenRun
from unbroken.runs.processes import Rank
from unbroken.runs.profiler import FOLDER as PROFILES
from unbroken.runs.profiler import StepProfiler, parse_steps
from unbroken.runs.progress import RunProgress
from unbroken.runs.records.files import FOLDER
from unbroken.runs.records.recorder import Recorder, make_table
from unbroken.runs.settings import describe
from unbroken.timeline import Timeline, TraceFile
from unbroken.training.checkpoints import Checkpoints, find_checkpoints
from unbroken.training.loop import train
from unbroken.training.metrics.writer import Metrics, MetricsWriter
from unbroken.training.observer import RunObserver, StepRollouts
from unbroken.training.publication import Snapshots


async def run_stages(
    config: RunConfig, run: OpenRun, sets: Sequence[EvaluationSet], curriculum: MakeCurriculum | None
) -> tuple[Path, tuple[Trajectory, ...]]:
    """Evaluate, train, write the model and evaluate again; returns the model's folder and the last rollouts."""
    output, num_steps, trainer = config.output, config.loop.num_steps, run.trainer
    collect = make_collector(run.sampler, curriculum, seed=config.seed, rank=run.rank)
    models = KeptModels(config=config.export, trainer=trainer, source=run.source, output=output)
    _prepare_output(models, last_step=max(find_checkpoints(output / "checkpoints"), default=0))
    checkpoints = Checkpoints(
        output / "checkpoints",
        every=config.checkpoints.every,
        every_s=config.checkpoints.every_s,
        num_kept=config.checkpoints.num_kept,
        caller=collect,
    )
    async with AsyncExitStack() as stack:
        progress = RunProgress(Console(quiet=not trainer.is_main_process))
        metrics = None
        if trainer.is_main_process:
            writer = MetricsWriter(
                output / "metrics",
                trackers=config.trackers,
                settings=describe(config),
                viewer=f"unbroken view {shlex.quote(str(output.resolve()))}",
            )
            metrics = stack.enter_context(writer)
        profiler = StepProfiler(parse_steps(config.profile_steps), output / PROFILES, rank=run.rank.index)
        stack.callback(profiler.close)
        timeline = _open_timeline(config, run.rank)
        stack.callback(timeline.close)
        evaluations = Evaluations(
            evaluators=make_evaluators(
                sets, config.evaluation, run.evaluation_sampler, seed=config.seed, output=output, rank=run.rank
            ),
            config=config.evaluation,
            models=models,
            console=progress.console,
            metrics=metrics,
            timeline=timeline,
        )
        snapshots = Snapshots(trainer, is_sender=run.engine.publisher is not None or run.rank.index == 0)
        beside = await _make_beside(config, run, evaluations, snapshots)
        if beside is not None:
            stack.push_async_callback(beside.close)
        observer = _Observer(
            config=config,
            run=run,
            models=models,
            evaluations=evaluations,
            beside=beside,
            recorder=Recorder(
                config=config.rollout_log, trainer=trainer, source=run.source, folder=output / FOLDER, rank=run.rank
            ),
            progress=progress,
            metrics=metrics,
            profiler=profiler,
        )
        alone = evaluations if beside is None else beside
        await alone.evaluate(0, "before")
        await train(
            collect,
            trainer=trainer,
            publisher=run.engine.publisher,
            metrics=metrics,
            config=config.chosen_loop,
            observer=observer,
            checkpoints=checkpoints,
            engine=run.engine.engine if config.engine.kind is EngineKind.SERVER else None,
            timeline=timeline,
            snapshots=snapshots,
        )
        if beside is not None:
            await beside.finish()
        with timeline.span("final model"):
            final = await asyncio.to_thread(models.write_final, num_steps)
        rollouts = await alone.evaluate(num_steps, "after")
        evaluations.log()
        progress.console.print(f"model in {final}")
    return final, rollouts


async def _make_beside(
    config: RunConfig, run: OpenRun, evaluations: Evaluations, snapshots: Snapshots
) -> EvaluationsBeside | None:
    """What evaluates beside training; None if evaluations are made between two steps."""
    own = run.evaluation_engine
    if own is None and config.loop.max_staleness == 0:
        return None
    servers = None
    if own is not None:
        servers = await EvaluationServers.open(
            own.engine, own.publisher, trainer=run.trainer, snapshots=snapshots, timeline=evaluations.timeline
        )
    return EvaluationsBeside(
        evaluations, run.trainer, last=config.loop.num_steps, servers=servers, outages=config.loop.outages
    )


def _open_timeline(config: RunConfig, rank: Rank) -> Timeline:
    """The timeline of this process, which continues that of an earlier start of the run."""
    if not config.timeline.write:
        return Timeline()
    path = config.output / "timeline" / f"rank-{rank.index}.json"
    file = TraceFile(path, max_bytes=config.timeline.max_bytes)
    return Timeline(file, name=f"rank {rank.index}", rank=rank.index)


def _prepare_output(models: KeptModels, *, last_step: int) -> None:
    """Remove unfinished models, and evaluations of steps that were lost after `last_step`; create the repository of the
    final model. In the first process.
    """
    with models.trainer.fail_together():
        if models.trainer.is_main_process:
            models.remove_unfinished()
            cut_evaluations(models.output, last_step)
            config = models.config
            if config.push_to_hub is not None:
                create_repository(config.push_to_hub, private=config.private)


class _Observer(RunObserver):
    """What the run adds to each step of the loop."""

    def __init__(
        self,
        *,
        config: RunConfig,
        run: OpenRun,
        models: KeptModels,
        evaluations: Evaluations,
        beside: EvaluationsBeside | None,
        recorder: Recorder,
        progress: RunProgress,
        metrics: MetricsWriter | None,
        profiler: StepProfiler,
    ) -> None:
        """`beside` is there with `loop.max_staleness` or `evaluation.engine`, instead of evaluations between steps."""
        self.before_update = run.engine.before_update
        self._config = config
        self._run = run
        self._models = models
        self._evaluations = evaluations
        self._beside = beside
        self._recorder = recorder
        self._progress = progress
        self._metrics = metrics
        self._profiler = profiler

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """Profile the step if the config says so."""
        return self._profiler.step(step)

    async def on_rollouts(self, rollouts: StepRollouts) -> None:
        """Record the step's rollouts, and show and log a table of some."""
        await self._recorder.record(rollouts)
        with self._run.trainer.fail_together():
            if (number := self._config.log_completions) > 0 and self._metrics is not None:
                unique = self._config.log_unique_prompts
                columns, rows = make_table(rollouts, self._run.trainer, number, unique_prompts=unique)
                self._progress.show_completions(rollouts.step, columns, rows)
                self._metrics.log_table(rollouts.step, "completions", columns, rows)

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Show the step's metrics, and log the evaluations so far."""
        self._progress.show_step(step, metrics, num_steps=self._config.loop.num_steps)
        self._evaluations.log()

    async def after_step(self, num_steps: int) -> None:
        """Write the model and evaluate it, where that is due."""
        await asyncio.to_thread(self._models.write_step, num_steps)
        if self._beside is not None:
            await self._beside.after_step(num_steps)
        elif self.needs_engine(num_steps):
            await self._evaluations.evaluate(num_steps, f"after step {num_steps}")

    def needs_engine(self, num_steps: int) -> bool:
        """Whether an evaluation on the training's engine begins after this number of steps."""
        if self._beside is not None:
            return self._beside.needs_engine(num_steps)
        return self._evaluations.is_due(num_steps, last=self._config.loop.num_steps)

    def get_newest_version(self) -> int:
        """The weights that the servers of evaluations have."""
        own = self._run.evaluation_engine
        return 0 if own is None else own.engine.policy_version
