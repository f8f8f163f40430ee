"""The `rollout_func` for TRL's GRPOTrainer: prompts to rows of exact ids, sampled with the newest weights."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from accelerate.utils import gather_object
from transformers import ProcessorMixin

from unbroken.engines.base import Engine, RequiresVersion
from unbroken.errors import InvalidInputError, InvariantError, RolloutError
from unbroken.integrations.trl.rows import TrlRow, check_rewards_skip, drop_reason
from unbroken.rendering.base import Renderer
from unbroken.rendering.effects import ToolsWarning
from unbroken.rollout.env import Env
from unbroken.rollout.failures import format_error
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_group
from unbroken.rollout.seeds import derive_seed
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.threads import LoopThread
from unbroken.training.model.adapters import check_adapters
from unbroken.training.model.weights import gather_weights
from unbroken.types import SamplingParams, check_reproducible
from unbroken.weights.base import InProcessPublisher, WeightPublisher
from unbroken.weights.sources import WeightStream

if TYPE_CHECKING:
    from trl import GRPOTrainer


Prompt: TypeAlias = str | list[dict[str, Any]]
"""A prompt of TRL's data set: text, or messages."""
OpenEngine: TypeAlias = Callable[[], AbstractAsyncContextManager[tuple[Engine, WeightPublisher | None]]]
"""Opens an engine and the publisher that gives it TRL's weights, and closes them at the end of the block. The publisher
is None in a process whose engine gets its weights from another process."""
T = TypeVar("T")
_logger = logging.getLogger(__name__)


def rollout_func(
    make_env: Callable[[Prompt], Env],
    *,
    engine: Engine | OpenEngine,
    renderer: Renderer,
    sampling: SamplingParams,
    limits: Limits,
) -> TrlRollouts:
    """Make a `rollout_func` for TRL's GRPOTrainer, which samples one episode for each prompt.

    TRL repeats a prompt `num_generations` times; each occurrence gets its own environment and context. TRL trains on
    the recorded ids, mask and logprobs. Before the first rollouts after an optimizer step, the engine gets TRL's
    weights as the next policy version. Reward functions get the `trajectory`, and must be `env_reward` or have
    `on_trained_rows`.

        with rollout_func(make_env, engine=engine, renderer=renderer, sampling=sampling, limits=limits) as rollouts:
            GRPOTrainer(model, env_reward, args=args, train_dataset=dataset, rollout_func=rollouts).train()

    Args:
        make_env: makes a new environment for a prompt; `RowsByPrompt` finds the prompt's row.
        engine: an engine in this process with its own copy of the model, which the caller closes; or an
            `@asynccontextmanager` that yields an engine and its publisher, opened in the event loop of the rollouts
            (docs/trl.md has one for a server).
        renderer: of the trained model.
        sampling: for each turn, with the trainer's temperature and nothing else that changes the distribution. Each
            rollout derives its own seed from `seed`, if given.
        limits: for each episode.
    """
    return TrlRollouts(make_env, engine=engine, renderer=renderer, sampling=sampling, limits=limits)


class TrlRollouts:
    """The result of `rollout_func`: a context manager that closes its event loop and the engine that it opened."""

    def __init__(
        self,
        make_env: Callable[[Prompt], Env],
        *,
        engine: Engine | OpenEngine,
        renderer: Renderer,
        sampling: SamplingParams,
        limits: Limits,
    ) -> None:
        check_reproducible(sampling, whose="TRL's")
        self._make_env = make_env
        self._renderer = renderer
        self._sampling = sampling
        self._limits = limits
        self._warn_of_tools = ToolsWarning(renderer)
        self._open: OpenEngine = (lambda: _wrap_engine(engine)) if isinstance(engine, Engine) else engine
        self._exit_stack = AsyncExitStack()
        self._engine: Engine | None = None
        self._publisher: WeightPublisher | None = None
        self._versions = _WeightVersions()
        self._loop = LoopThread()
        self._num_calls = 0

    def __enter__(self) -> TrlRollouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine if it was opened here, and end the event loop. Idempotent."""
        if self._engine is not None:
            self._engine = None
            self._loop.run(self._exit_stack.aclose())
        self._loop.close()

    def __call__(self, prompts: Sequence[Prompt], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Sample one episode for each prompt; TRL calls this in every process.

        Raises:
            InvalidInputError: the trainer or its reward functions do not fit these rollouts (docs/trl.md).
            RolloutError: no rollout of any process can be trained on, or another process failed.
            InvariantError: an engine sampled with other weights than the last published ones.
        """
        engine = _run_in_all(lambda: self._prepare(trainer))
        if self._versions.is_stale(trainer):
            self._publish(engine, trainer)
        trajectories = _run_in_all(lambda: self._sample(prompts, engine, trainer))
        _check_some_trained(trajectories)
        processor = trainer.processing_class
        tokenizer = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
        filler_id = tokenizer.pad_token_id
        rows = _run_in_all(lambda: [TrlRow.of(trajectory, filler_id=filler_id) for trajectory in trajectories])
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "logprobs": [row.logprobs for row in rows],
            "env_mask": [row.env_mask for row in rows],
            "trajectory": trajectories,
        }

    def _prepare(self, trainer: GRPOTrainer) -> Engine:
        """Check the trainer, and return the engine; the first call opens it."""
        _check_trainer(trainer, self._sampling)
        if self._engine is None:
            self._engine, self._publisher = self._loop.run(self._exit_stack.enter_async_context(self._open()))
        return self._engine

    def _publish(self, engine: Engine, trainer: GRPOTrainer) -> None:
        if not any(gather_object([self._publisher is not None])):
            raise InvalidInputError("at least one process must have a publisher, but it is None in all of them")
        version = self._versions.next_version(engine.policy_version)

        def publish() -> None:
            weights = _trained_weights(trainer)
            if self._publisher is not None:
                self._loop.run(self._publisher.publish(weights, policy_version=version))

        _run_in_all(publish)
        if isinstance(engine, RequiresVersion):
            engine.require_version(version)  # one of several servers may have missed it
        self._versions.note_published(trainer, version)
        self._num_calls = 0

    def _sample(self, prompts: Sequence[Prompt], engine: Engine, trainer: GRPOTrainer) -> list[Trajectory]:
        self._num_calls += 1
        place = (trainer.accelerator.process_index, trainer.state.global_step, self._num_calls)
        trajectories = self._loop.run(self._run_episodes(prompts, engine, place))
        _check_versions(trajectories, self._versions.policy_version)
        return trajectories

    async def _run_episodes(
        self, prompts: Sequence[Prompt], engine: Engine, place: tuple[int, int, int]
    ) -> list[Trajectory]:
        name = uuid.uuid4().hex
        async with asyncio.TaskGroup() as tasks:
            groups = [
                tasks.create_task(self._run_episode(prompt, engine, f"{name}-{k}", (*place, k)))
                for k, prompt in enumerate(prompts)
            ]
        return [trajectory for group in groups for trajectory in group.result().trajectories]

    async def _run_episode(self, prompt: Prompt, engine: Engine, name: str, place: tuple[int, ...]) -> TrajectoryGroup:
        return await run_group(
            lambda: self._make_env(prompt),
            1,
            engine=engine,
            renderer=self._renderer,
            sampling=replace(self._sampling, seed=derive_seed(self._sampling.seed, *place)),
            limits=self._limits,
            group_id=name,
            check_tools=self._warn_of_tools,
        )


def _run_in_all(action: Callable[[], T]) -> T:
    """Run `action` in every process and return this process's result.

    An error in one is raised in all, because the others would wait for the failed process forever.

    Raises:
        RolloutError: `action` failed in another process.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    everyone = gather_object([None if error is None else format_error(error)])
    if error is not None:
        raise error
    for process, message in enumerate(everyone):
        if message is not None:
            raise RolloutError(f"process {process} failed: {message}")
    return result  # type: ignore[return-value]  # without an error there is a result


@asynccontextmanager
async def _wrap_engine(engine: Engine) -> AsyncIterator[tuple[Engine, WeightPublisher]]:
    yield engine, InProcessPublisher(engine)


def _check_trainer(trainer: GRPOTrainer, sampling: SamplingParams) -> None:
    if sampling.temperature != trainer.temperature:
        raise InvalidInputError(
            f"sampling.temperature must be that of GRPOConfig, {trainer.temperature}, got {sampling.temperature}: TRL "
            "computes logprobs with its own"
        )
    if trainer.tools or trainer.environment_factories is not None:
        raise InvalidInputError(
            "tools and environment_factory of GRPOTrainer must be left out: give the tools to the environment that "
            "make_env makes"
        )
    check_rewards_skip(trainer.reward_funcs)


def _check_versions(trajectories: Sequence[Trajectory], policy_version: int) -> None:
    """TRL assumes that its current weights have sampled the rollouts."""
    for trajectory in trajectories:
        for turn, one in enumerate(trajectory.turns):
            for span in one.sequence.version_spans:
                if span.policy_version != policy_version:
                    raise InvariantError(
                        f"ids of turn {turn} of trajectory {trajectory.trajectory_id} were sampled by policy_version "
                        f"{span.policy_version}, but TRL trains version {policy_version}: a server may have missed an "
                        "update, or another program gives weights to this engine"
                    )


def _check_some_trained(trajectories: Sequence[Trajectory]) -> None:
    """Warn about rows that are not trained on; raise if no process has any other."""
    reasons = [reason for trajectory in trajectories if (reason := drop_reason(trajectory)) is not None]
    error = next((trajectory.error for trajectory in trajectories if trajectory.error is not None), None)
    first = f", the first error: {format_error(error)}" if error is not None else ""
    summary = f"{dict(Counter(map(str, reasons)))}{first}"
    if not any(gather_object([len(reasons) < len(trajectories)])):
        raise RolloutError(f"no rollout of this generation can be trained on: {summary}") from error
    if reasons:
        _logger.warning("%d of %d rollouts are not trained on: %s", len(reasons), len(trajectories), summary)


class _Rows(Protocol):
    """A data set with numbered rows, such as a `datasets.Dataset`."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...
    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


class RowsByPrompt:
    """The rows of a data set by their `prompt`: `RowsByPrompt(dataset)[prompt]["answer"]`."""

    def __init__(self, dataset: _Rows) -> None:
        """Read all rows once.

        Raises:
            InvalidInputError: two different rows have the same prompt, so that a prompt does not identify its row.
        """
        self._dataset = dataset
        self._numbers: dict[str, int] = {}
        for number, row in enumerate(dataset):
            first = self._numbers.setdefault(_key(row["prompt"]), number)
            if first != number and dataset[first] != row:
                raise InvalidInputError(
                    f"rows {first} and {number} differ but have the same prompt, and TRL passes only the prompt to a "
                    f"rollout: make the prompts different. The prompt is {row['prompt']!r}"
                )

    def __getitem__(self, prompt: str | Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Find the row of a prompt.

        Raises:
            InvalidInputError: no row has this prompt.
        """
        number = self._numbers.get(_key(prompt))
        if number is None:
            raise InvalidInputError(
                f"no row of {len(self._numbers)} has the prompt {prompt!r}: give the data set that TRL has"
            )
        return self._dataset[number]


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True)


class _WeightVersions:
    """Tracks the version that the engines have, and whether the trainer has made a step since."""

    def __init__(self) -> None:
        self.policy_version = 0
        self._published: tuple[Any, int] | None = None

    def is_stale(self, trainer: GRPOTrainer) -> bool:
        """Whether the engines lack the trainer's newest weights; true before the first publication.

        Step numbers belong to one run: `Trainer.train` begins each run with a new state.
        """
        if self._published is None:
            return True
        state, step = self._published
        return state is not trainer.state or step != trainer.state.global_step

    def next_version(self, current: int) -> int:
        """One more than the highest version that any process or its engine has; the same in every process."""
        versions: list[int] = gather_object([max(current, self.policy_version)])
        return max(versions) + 1

    def note_published(self, trainer: GRPOTrainer, policy_version: int) -> None:
        """Note that the engines have the trainer's current weights, as this version."""
        self._published = (trainer.state, trainer.state.global_step)
        self.policy_version = policy_version


def _trained_weights(trainer: GRPOTrainer) -> WeightStream:
    """The weights that TRL trains, under the names of an engine's model; LoRA adapters are merged.

    Raises:
        InvalidInputError: parameters are sharded, or adapters cannot be merged exactly.
    """
    sharded = {"FSDP": trainer.is_fsdp_enabled, "DeepSpeed": trainer.is_deepspeed_enabled}
    found = [name for name, there in sharded.items() if there]
    if found:
        raise InvalidInputError(
            f"the trainer's model must be whole in every process, but {found[0]} shards it: use DDP, or unbroken's own "
            "trainer"
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    check_adapters(model)
    return gather_weights(model)
