"""`unbroken verify RUN`: train a finished run again from what it has recorded, and compare every number.

    recipe.json ── config ── trainer ─┐
    rollouts/step-N ── groups ────────┤  training.loop, without sampling
    checkpoints/step-N ── its start ──┘    on_rollouts, on_step, save, after_step compare with the run's files

Checkpoints cut a run into parts, each of which a process can verify by itself: it begins with the state of one, which
the part before has compared with its own. A part ends at its first difference.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from unbroken.errors import CheckpointError, InvalidInputError, UnbrokenError
from unbroken.reports import shorten
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.compare import compare_metrics, find_sampled
from unbroken.runs.config import EngineKind, Precision, RolloutConfig, RolloutLogConfig, RunConfig, is_address
from unbroken.runs.diagnosis.evidence import Numbers, read_ending, read_steps
from unbroken.runs.export.files import INFO, ModelInfo, read_info
from unbroken.runs.export.kept import BEST, CANDIDATE, FINAL, MODELS, KeptModels
from unbroken.runs.folder import RECIPE_FILE, digest_files, find_state, may_change, read_recipe
from unbroken.runs.models import find_revision, load_model_renderer
from unbroken.runs.numerics import open_pair
from unbroken.runs.processes import Rank
from unbroken.runs.recipe import load_recipe
from unbroken.runs.records.conversations import ConversationCheck
from unbroken.runs.records.files import FOLDER, find_records, read_records
from unbroken.runs.records.recorded import RecordedStep, read_step
from unbroken.runs.records.recorder import Recorder, choose_scored
from unbroken.runs.settings import build, describe, read_described, section_of
from unbroken.training.checkpoints import Checkpoints, LastStep, find_checkpoints
from unbroken.training.groups import GroupSource
from unbroken.training.loop import open_steps
from unbroken.training.metrics.writer import Metrics
from unbroken.training.model.pretrained import ADAPTER_CONFIG, read_adapter_config
from unbroken.training.observer import RunObserver, StepRollouts
from unbroken.training.state import read_state
from unbroken.training.trainer import Trainer
from unbroken.types import LogitControls, Numerics, SamplingParams
from unbroken.weights.files import describe_file

_MISSING = "missing"
_OF_HEAD = ("step", "rank", "policy_version", "weights", "num_groups", "num_rollouts", "rewards", "counters")
_OF_ROW = (
    "token_ids", "segments", "rollout_logprobs", "policy_versions", "temperature", "is_trained", "loss", "advantages",
    "images",
)  # fmt: skip
_OF_SCORED_ROW = ("trainer_logprobs", "entropies", "ranks", "clipped", "corrected")
"""Null in rows that the run did not score (`rollout_log.scored_groups`); here all are."""
_OF_SAMPLING = (
    "allowed_token_ids", "bad_words_ids", "min_tokens", "logit_bias", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
"""Of each turn. Not `stop_token_ids`: a turn has those of the tokenizer too, which no setting has."""
_MAX_SHOWN = 5
"""Differences of one step that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verification:
    """What was verified of a run."""

    num_steps: int
    """Steps that the run has made, or that it says it has."""
    num_verified: int = 0
    num_ids: int = 0
    """Sampled ids whose logprobs were computed again."""
    compared: tuple[str, ...] = ()
    """Checkpoints and models that were compared."""
    differences: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    """Steps and models that were not verified, and why."""
    absent: tuple[str, ...] = ()
    """Files of the recipe, by the names of their digests, that are gone: nothing is known of them."""

    @property
    def is_verified(self) -> bool:
        """Whether every step was, and nothing differs."""
        return self.num_verified == self.num_steps and not self.differences and not self.unverified

    def merge(self, other: _Verification) -> _Verification:
        """What two parts of one run have verified; a difference that both have found is one."""
        return _Verification(
            num_steps=self.num_steps,
            num_verified=self.num_verified + other.num_verified,
            num_ids=self.num_ids + other.num_ids,
            compared=self.compared + other.compared,
            differences=tuple(dict.fromkeys(self.differences + other.differences)),
            unverified=self.unverified + other.unverified,
            absent=self.absent + other.absent,
        )

    def describe(self, folder: Path) -> str:
        """The report: what differs, what was verified, and what was not."""
        what = f"{self.num_verified} of {self.num_steps} steps, {self.num_ids} sampled ids"
        lines = [
            f"{folder}: {'verified' if self.is_verified else 'NOT VERIFIED'} ({what})",
            *(f"  differs: {each}" for each in self.differences),
            *(f"  not verified: {each}" for each in self.unverified),
        ]
        if self.num_verified:
            also = f"; {', '.join(self.compared)}" if self.compared else ""
            lines.append(
                "  verified: logprobs of every sampled id, rows, advantages, loss, gradient norm and weights of these "
                f"steps{also}"
            )
        lines += [f"  not compared: {each} in {RECIPE_FILE}, because it is not there" for each in self.absent]
        lines.append(
            "  not claimed: that ids were drawn with their seeds, that environments gave these rewards and messages, "
            "parts of rewards, why a rollout failed, what agents' sessions say, evaluations, times"
        )
        if self.differences:
            lines.append(
                "  A first step that differs in every row has another model, another number of threads, another "
                "processor or another version of torch"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run's folder, as far as every part needs it."""

    folder: Path
    config: RunConfig
    source: str
    """The model that it began with."""
    metrics: Mapping[int, Numbers]
    files: Mapping[int, Path]
    """Of each step's rollouts."""

    @property
    def num_steps(self) -> int:
        """Steps that it has made, by all of its files."""
        made = max((step + 1 for step in (*self.metrics, *self.files)), default=0)
        return max(made, *self.checkpoints, 0)

    @property
    def checkpoints(self) -> Mapping[int, Path]:
        """Those that are there, by the number of steps."""
        return dict(sorted(find_checkpoints(self.folder / "checkpoints").items()))

    @property
    def models(self) -> list[Path]:
        """The folders of models that are there."""
        known = [self.folder / FINAL, self.folder / BEST, self.folder / CANDIDATE]
        found = sorted(path for path in [*known, *_list_folder(self.folder / MODELS)] if path.exists())
        if self.config.policies is None:
            return found
        names = self.config.policies.names
        return [path / name for path in found for name in sorted({*names, *(own.name for own in _list_folder(path))})]

    @property
    def num_claimed(self) -> int:
        """Steps that the run says it has made: one that has finished, all of its settings."""
        has_finished = read_ending(self.folder).status == "finished"
        return max(self.num_steps, self.config.loop.num_steps if has_finished else 0)


def verify_run(folder: Path, *, model: str | None = None, num_processes: int = 1) -> _Verification:
    """Verify a finished run, its parts in up to `num_processes` processes. `model` is where its first model has moved.

    Raises:
        InvalidInputError: the run cannot be verified, with the setting or file that is the reason.
    """
    run = _open(folder, model)
    reasons = dict(_find_unverifiable(run))
    parts, unverified = _cut(run, reasons)
    if num_processes == 1 or len(parts) <= 1:
        found = [asyncio.run(_replay(run, *part)) for part in _join(parts, 1)]
    else:
        verify = partial(_verify_part, folder, model)
        try:
            with ProcessPoolExecutor(num_processes, _get_context()) as pool:
                found = list(pool.map(verify, *zip(*_join(parts, num_processes), strict=True)))
        except BrokenProcessPool as error:
            raise UnbrokenError(
                f"one of {num_processes} processes was ended from outside, as by a lack of memory: each holds the "
                "model and its optimizer. Give a smaller --processes"
            ) from error
    if run.num_claimed > run.num_steps:
        steps = _name_steps(run.num_steps, run.num_claimed)
        unverified.append(f"{steps}: no file has them, and the run has finished with loop.num_steps {run.num_claimed}")
    changed, absent = _compare_files(folder)
    whole = _Verification(
        num_steps=run.num_claimed, unverified=tuple(unverified), differences=tuple(changed), absent=tuple(absent)
    )
    for each in found:
        whole = whole.merge(each)
    return replace(whole, unverified=(*whole.unverified, *_find_unverified_models(run, whole.compared)))


def _compare_files(folder: Path) -> tuple[list[str], list[str]]:
    """The files of a run's recipe that have other digests than it has recorded, and the names of those that are gone.

    What the user has given another file on purpose has null for its digest.
    """
    stored = read_recipe(folder)
    again = digest_files(stored.settings, code=stored.code)
    changed = [
        f"{RECIPE_FILE}: files: {name} is {digest!r}, and that of the file that is there {again[name]!r}"
        for name, digest in sorted(stored.files.items())
        if digest is not None and again.get(name, digest) != digest
    ]
    return changed, sorted(name for name, digest in stored.files.items() if digest is not None and name not in again)


def _find_unverified_models(run: _Run, compared: Sequence[str]) -> Iterator[str]:
    """The models that no part has found to be equal, each with the reason."""
    for folder in run.models:
        name = str(folder.relative_to(run.folder))
        if name in compared:
            continue
        if (info := read_info(folder)) is None:
            yield f"{name}: it has no {INFO} that says after which step it was written"
        elif info.step not in range(1, run.num_steps + 1):
            yield f"{name}: its {INFO} must have a step that the run has made, 1 to {run.num_steps}; got {info.step}"
        else:
            yield f"{name}: it was not shown to be the model after {info.step} steps"


def _open(folder: Path, model: str | None) -> _Run:
    """Read what is the same for all parts; raises as `verify_run`."""
    config = _read_config(folder)
    if find_state(folder) == "running":
        raise InvalidInputError(f"RUN must have ended, and a process writes into {folder}: wait for its end")
    _check_settings(config, curriculum=read_recipe(folder).curriculum or config.curriculum)
    files = _find_files(folder / FOLDER)
    metrics = {int(line["step"]): line for line in read_steps(folder)}
    return _Run(folder=folder, config=config, source=_find_source(files, config, model), metrics=metrics, files=files)


def _read_config(folder: Path) -> RunConfig:
    """The settings of a run. Those of its task are left out where they are not the recipe's own."""
    stored = read_recipe(folder)
    if stored.code and not Path(stored.code).is_file():
        raise InvalidInputError(f"the run's recipe must be there to read its settings, and {stored.code} is not")
    section = load_recipe(Path(stored.code)).section if stored.code else section_of(RunConfig)
    known = {*section.all_fields(), *(each.prefix.removesuffix(".") for each in section.all_sections())}
    own = {name: value for name, value in stored.settings.items() if name in known}
    config: RunConfig = build(section, {**read_described(own, section), "output": folder})
    again = {name: value for name, value in describe(config).items() if not may_change(name)}
    for name, value in again.items():
        if stored.settings.get(name) != value:
            raise InvalidInputError(
                f"{name} must be read back from {folder / RECIPE_FILE} as it is there, "
                f"{stored.settings.get(name)!r}, and is {value!r}: has the recipe's code changed?"
            )
    return config


def _find_files(folder: Path) -> dict[int, Path]:
    """The file of each step's rollouts."""
    files = find_records(folder)
    if not files:
        raise InvalidInputError(f"{folder} must have the rollouts of the run (rollout_log.groups), got none")
    if (last := max(rank for _, rank in files)) > 0:
        raise InvalidInputError(
            "num_processes must be 1 for a run to be verified: several add their gradients in another order, and "
            f"{folder} has files of {last + 1}"
        )
    return {step: path for (step, _), path in files.items()}


def _check_settings(config: RunConfig, *, curriculum: str | None) -> None:
    """Raise `InvalidInputError` for a run that cannot be verified, whatever is in its folder."""
    trainer, engine = config.trainer, config.engine.kind
    rules: Sequence[tuple[str, Any, bool, str]] = (
        (
            "trainer.numerics", trainer.numerics, trainer.numerics is Numerics.EXACT,
            "exact from the first step on (--trainer.numerics exact): with fast ones bits depend on the batch",
        ),
        (
            "engine.kind", engine, engine is EngineKind.EMBEDDED,
            "embedded: on a GPU the backward pass adds in any order, and two steps on the same rows have other bits",
        ),
        (
            "precision", config.precision, config.precision is Precision.FLOAT32,
            "float32: products in bfloat16 were not shown to have the same bits twice in a backward pass",
        ),
        (
            "loop.max_staleness", config.loop.max_staleness, config.loop.max_staleness == 0,
            "0: ids of older weights cannot be compared with the weights of their step",
        ),
        (
            "curriculum", curriculum, not curriculum,
            "none: the state by which it chose each problem is in no file",
        ),
        (
            "rollouts.sampling", config.rollouts.sampling, not config.rollouts.sampling.truncates,
            "without top_k, top_p and min_p: the ids that each was sampled from are in no file",
        ),
        (
            "trainer.routing_replay", trainer.routing_replay, not trainer.routing_replay,
            "false: the experts of each id are in no file",
        ),
        ("images", config.images, not config.images, "false: processed images are in no file"),
        (
            "teacher.models", None if config.teacher is None else config.teacher.models,
            config.teacher is None or not any(map(is_address, config.teacher.models)),
            "models that can be loaded: what a server answered is in no file",
        ),
        (
            "warm_start.data", config.warm_start and config.warm_start.data, config.warm_start is None,
            "left out: the supervised rows are in no file of the run",
        ),
    )  # fmt: skip
    for name, value, is_possible, rule in rules:
        if not is_possible:
            raise InvalidInputError(f"{name} must be {rule}; got {value}, so this run cannot be verified")


def _find_source(files: Mapping[int, Path], config: RunConfig, model: str | None) -> str:
    """The folder or hub name of the first model, by the first file of rollouts that can be read."""
    source = model
    for path in files.values() if source is None else ():
        try:
            source = str(next(read_records(path))["model"])
            break
        except (InvalidInputError, KeyError):
            continue
    if source is None:
        raise InvalidInputError("--model must be given: no file of rollouts says which model the run began with")
    if Path(source).is_dir():
        return source
    if Path(source).is_absolute():
        raise InvalidInputError(f"--model must be the model that the run began with, and {source} is not there")
    return str(find_revision(source, config.model_settings.revision))


def _find_unverifiable(run: _Run) -> Iterator[tuple[int, str]]:
    """The steps whose inputs or results are not all recorded, each with the reason."""
    for step in range(run.num_steps):
        if step not in run.files:
            yield step, f"{FOLDER}/ has no file of step {step} (rollout_log.groups, or it is gone)"
        elif step not in run.metrics:
            yield step, f"metrics/metrics.jsonl has no line of step {step}"
        elif (reason := _find_missing(run.files[step])) is not None:
            yield step, reason


def _find_missing(path: Path) -> str | None:
    """Why a step's file does not have all that the step was trained on; None if it has, or is damaged."""
    try:
        head = next(read_records(path))
        num_kept, num_groups, processes = head["num_kept"], head["num_groups"], head["num_processes"]
    except (InvalidInputError, KeyError):
        return None  # which is a difference, and named where it is read
    if processes != 1:
        return f"num_processes must be 1, got {processes}: several add their gradients in another order"
    if num_kept != num_groups:
        return f"{path.name} has {num_kept} of {num_groups} groups (rollout_log.groups, rollout_log.max_mb)"
    return None


def _cut(run: _Run, reasons: Mapping[int, str]) -> tuple[list[tuple[int, int]], list[str]]:
    """The parts [start, stop) between two checkpoints, without the steps from one that cannot be verified on; and why
    these cannot.
    """
    bounds = sorted({0, run.num_steps, *run.checkpoints})
    parts, unverified = [], []
    for start, stop in itertools.pairwise(bounds):
        end = next((step for step in range(start, stop) if step in reasons), stop)
        if end > start:
            parts.append((start, end))
        if end < stop:
            unverified.append(f"{_name_steps(end, stop)}: {reasons[end]}")
    return parts, unverified


def _name_steps(start: int, stop: int) -> str:
    return f"step {start}" if stop == start + 1 else f"steps {start} to {stop - 1}"


def _join(parts: Sequence[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    """Join neighbours as long as a part has no more than its share of all steps, so that there are about `number`."""
    share = math.ceil(sum(stop - start for start, stop in parts) / number)
    joined: list[tuple[int, int]] = []
    for start, stop in parts:
        if joined and joined[-1][1] == start and stop - joined[-1][0] <= share:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _get_context() -> BaseContext:
    """The context of processes for parts: forks of one that has imported all they need, which takes each 8 seconds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _verify_part(folder: Path, model: str | None, start: int, stop: int) -> _Verification:
    return asyncio.run(_replay(_open(folder, model), start, stop))


async def _replay(run: _Run, start: int, stop: int) -> _Verification:
    """Train the steps [start, stop) again, and compare; raises as `verify_run`."""
    config = run.config
    with tempfile.TemporaryDirectory(prefix="unbroken-verify-") as name:
        own = replace(config, output=Path(name))
        async with open_pair(own, run.source) as (opened, trainer):
            steps = _RecordedSteps(run, start, stop)
            conversations = ConversationCheck(
                renderer=load_model_renderer(run.source, config.renderer, config.rollouts.sampling),
                config=config.rollouts,
                context_length=opened.engine.context_length,
                is_of_policies=config.policies is not None,
            )
            comparison = _Comparison(
                run=run, trainer=trainer, steps=steps, conversations=conversations, scratch=Path(name), start=start
            )
            checkpoints = _ComparedCheckpoints(run, comparison, start)
            # A run may have gone on after steps that trained nothing, with another limit of them (`may_change`), and
            # its files say how far it came.
            loop = replace(config.chosen_loop, num_steps=stop, max_empty_steps=None)
            try:
                made = open_steps(
                    steps,
                    trainer=trainer,
                    publisher=None,
                    metrics=None,
                    config=loop,
                    observer=comparison,
                    checkpoints=checkpoints,
                )
                async with made as again:
                    await again.run()
            except _DifferenceError as error:
                comparison.differences += error.found
            except UnbrokenError as error:
                comparison.differences.append(f"step {comparison.step}: {error}")
    return _Verification(
        num_steps=run.num_steps,
        num_verified=comparison.num_verified,
        num_ids=comparison.num_ids,
        compared=tuple(comparison.compared),
        differences=tuple(comparison.differences),
    )


class _DifferenceError(UnbrokenError):
    """A run's files do not have what is computed again."""

    def __init__(self, found: Sequence[str]) -> None:
        super().__init__("; ".join(found))
        more = [f"and {len(found) - _MAX_SHOWN} more of this step"] if len(found) > _MAX_SHOWN else []
        self.found = [*found[:_MAX_SHOWN], *more]


class _RecordedSteps(GroupSource):
    """Gives the groups of recorded steps in the place of a sampler.

    The queue replaces groups of equal rewards as it did in the run. So those that were replaced, which are the last
    ones of a file, come first: with 2 groups a step, of 3 recorded, 5 and 6 were trained and 4 was replaced.

        file      5 6 4    numbers from 3 on    3: group 4, replaced    4: group 5    5: group 6
    """

    def __init__(self, run: _Run, start: int, stop: int) -> None:
        """The first number is that which is asked for first: what the checkpoint of `start` says comes next."""
        self.groups_per_step = run.config.rollouts.problems_per_step
        self.opened: dict[int, RecordedStep] = {}
        """Steps whose groups were given."""
        self._files = run.files
        self._policies = () if run.config.policies is None else run.config.policies.names
        self._steps = iter(range(start, stop))
        self._groups: dict[int, TrajectoryGroup] = {}
        self._number: int | None = None
        """Of the next group: the loop asks for one after the other."""

    async def sample(self, number: int) -> TrajectoryGroup:
        """Give the group with this number; raises `InvalidInputError` if a step's file is damaged."""
        if self._number is None:
            self._number = number
        while number not in self._groups:
            self._number = self._open_next(self._number)
        return self._groups.pop(number)

    def _open_next(self, number: int) -> int:
        """Number the groups of the next step from `number` on; returns the number of the one after them."""
        if (step := next(self._steps, None)) is None:
            raise _DifferenceError(["the last step took more groups than its file has (groups/num_replaced)"])
        recorded = read_step(self._files[step])
        groups = recorded.make_groups(policies=self._policies)
        self.opened[step] = recorded
        ordered = [*groups[self.groups_per_step :], *groups[: self.groups_per_step]]
        self._groups |= {number + place: group for place, group in enumerate(ordered)}
        return number + len(ordered)


@dataclass(slots=True, kw_only=True)
class _Comparison(RunObserver):
    """Compares what the loop makes of a part with what the run has recorded; raises `_DifferenceError`."""

    run: _Run
    trainer: Trainer
    steps: _RecordedSteps
    conversations: ConversationCheck
    scratch: Path
    start: int
    step: int = field(init=False)
    """The one that is made."""
    num_verified: int = 0
    num_ids: int = 0
    compared: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.step = self.start

    def warn(self, words: str) -> None:
        """Say nothing: the run has said it."""

    async def on_rollouts(self, rollouts: StepRollouts) -> None:
        """Compare the step's file with the one that a recorder makes of the same groups, with all rows scored."""
        recorded = self.steps.opened.pop(rollouts.step)
        recorder = Recorder(
            config=RolloutLogConfig(max_mb=None, scored_groups=None),
            trainer=self.trainer,
            source=self.run.source,
            folder=self.scratch / FOLDER,
            rank=Rank(),
            num_steps=self.run.num_steps,
        )
        await recorder.record(replace(rollouts, is_trained=True))  # so that rows are scored in any case
        await recorder.finish()
        again = read_step(self.scratch / FOLDER / recorded.path.name)
        again.path.unlink()
        if not rollouts.is_trained:
            again = replace(again, head={**again.head, "weights": None})
        # Settings are compared with turns that were found to be whole: a damaged file may lack what is read there.
        found = [*_compare_steps(recorded, again, self._list_scored(rollouts))] or [
            *_compare_settings(recorded, self.run.config.rollouts)
        ]
        found = found or await asyncio.to_thread(self._compare_conversations, recorded, rollouts)
        if found:
            raise _DifferenceError([f"step {rollouts.step}: {recorded.path.name}: {each}" for each in found])
        self.num_ids += sum(len(row["rollout_logprobs"]) for record in again.records for row in record["rows"])

    def _list_scored(self, rollouts: StepRollouts) -> Set[str]:
        """The trajectories whose rows the run has scored."""
        number = self.run.config.rollout_log.scored_groups
        chosen = choose_scored(rollouts.groups, number) if rollouts.is_trained else ()
        return {member.trajectory_id for group in chosen for member in group.trajectories}

    def _compare_conversations(self, recorded: RecordedStep, rollouts: StepRollouts) -> list[str]:
        """Where messages, statuses and limits are other than ids say that were found to be the run's."""
        by_name = {member.trajectory_id: member for group in rollouts.groups for member in group.trajectories}
        found = []
        for record in recorded.records:
            name = f"trajectory {record['trajectory']}"
            try:
                others = [*self.conversations.find_differences(record, by_name[record["trajectory"]])]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                others = [f" must have a whole record: {type(error).__name__}: {error}"]
            except UnbrokenError as error:  # the template refuses its messages
                others = [f": {error}"]
            found += [f"{name}{each}" for each in others]
        return found

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Compare the step's metrics with its line in `metrics.jsonl`."""
        if step < self.start:  # shown again, as a run that continues does
            return
        if found := compare_metrics(self.run.metrics[step], metrics):
            raise _DifferenceError([f"step {step}: metrics.jsonl: {each}" for each in found])
        self.num_verified += 1
        self.step = step + 1

    async def after_step(self, num_steps: int) -> None:
        """Compare the models that the run has written after this step."""
        if num_steps > self.start:  # the step before is ended again, and the part before has compared its models
            await asyncio.to_thread(self._compare_models, num_steps)

    def _compare_models(self, num_steps: int) -> None:
        for folder in self.run.models:
            if (info := read_info(folder)) is None or info.step != num_steps:
                continue
            again = self._write_again(folder, info, num_steps)
            names = [_list_files(each) for each in (again, folder)]
            if found := sorted(names[0] ^ names[1]):
                which = "lacks" if found[0] in names[0] else "has also"
                raise _DifferenceError([f"{folder} {which} {found[0]}, other than the model after {num_steps} steps"])
            if read_adapter_config(again) != read_adapter_config(folder):
                raise _DifferenceError([f"{folder / ADAPTER_CONFIG} is not that of the model after {num_steps} steps"])
            for name in sorted(names[0] - {ADAPTER_CONFIG}):
                self._compare_file(again / name, folder / name)
            self.compared.append(str(folder.relative_to(self.run.folder)))

    def _write_again(self, folder: Path, info: ModelInfo, num_steps: int) -> Path:
        """Write the model that is in `folder` from the trainer, in the same form."""
        if info.dtype not in (None, *Precision):
            known = ", ".join(Precision)
            raise _DifferenceError([f"{folder / INFO} must have a dtype of {known}, or null; got {info.dtype!r}"])
        dtype = None if info.dtype is None else Precision(info.dtype)
        config = replace(self.run.config.export, merged=info.merged, dtype=dtype)
        models = KeptModels(config=config, trainer=self.trainer, source=self.run.source, output=self.scratch)
        again = models.write_final(num_steps)
        return again if self.run.config.policies is None else again / folder.name

    def _compare_file(self, path: Path, other: Path) -> None:
        try:
            is_same = describe_file(path) == describe_file(other)
        except OSError as error:
            raise _DifferenceError([f"{other}: {error}"]) from error
        if not is_same:
            raise _DifferenceError([f"{other} has other bytes than the model after {self.step} steps"])


class _ComparedCheckpoints(Checkpoints):
    """The run's checkpoints: a part begins with one, and those that it comes by are compared. Nothing is written."""

    def __init__(self, run: _Run, comparison: _Comparison, start: int) -> None:
        super().__init__(run.folder / "checkpoints")
        self._comparison = comparison
        self._start = start
        self._found = run.checkpoints
        self._policies = run.config.policies

    def is_due(self, num_steps: int, *, last: int) -> bool:
        """Whether the run has one of this step."""
        return num_steps in self._found

    def resume(self, trainer: Trainer) -> LastStep | None:
        """Restore the trainer as it was before the part; None at the beginning of the run."""
        if self._start == 0:
            return None
        folder = self._found[self._start]
        try:
            extra = trainer.load(folder)
            return LastStep(num_steps=self._start, metrics=extra.get("metrics", {}), groups=extra.get("groups"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{folder} must have the numbers of a run: {type(error).__name__}: {error}"
            ) from error

    def save(self, trainer: Trainer, last: LastStep) -> None:
        """Compare the checkpoint with the trainer and with the loop's own numbers."""
        folder = self._found[last.num_steps]
        found = [each for each in (trainer.find_difference(folder),) if each is not None]
        source, first = self._read_source(), next(iter(self._found.values()))
        for own in self._list_own(folder):
            extra = read_state(own).state.processes[0].get("extra", {})
            if extra.get("num_steps") != last.num_steps:
                found.append(f"num_steps is {extra.get('num_steps')}, and here {last.num_steps}")
            if extra.get("groups") != last.groups:
                found.append(f"groups are {extra.get('groups')}, and here {last.groups}")
            if extra.get("source") != source:
                found.append(f"source is {extra.get('source')!r}, and in checkpoints/{first.name} {source!r}")
            found += compare_metrics(extra.get("metrics", {}), last.metrics)
        if found:
            step = last.num_steps - 1
            raise _DifferenceError([f"step {step}: checkpoints/{folder.name}: {each}" for each in found])
        self._comparison.compared.append(f"checkpoints/{folder.name}")

    def _list_own(self, folder: Path) -> list[Path]:
        """The folders of a checkpoint, one for each policy."""
        return [folder] if self._policies is None else [folder / name for name in self._policies.names]

    def _read_source(self) -> Any:
        """Where problems come from, as the first checkpoint says it: a run never changes it."""
        first = self._list_own(next(iter(self._found.values())))[0]
        return read_state(first, verifies_files=False).state.processes[0].get("extra", {}).get("source")


def _list_folder(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _list_files(folder: Path) -> set[str]:
    """The files in the folder of a model, those of inner folders too, and empty inner folders. Not its own facts, which
    have paths of a machine and an evaluation, nor its card, which has the version of unbroken, and people write in it.
    """
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not _holds_anything(path))
    return set(found) - {INFO, "README.md"}


def _holds_anything(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and any(path.iterdir())


def _compare_steps(recorded: RecordedStep, again: RecordedStep, scored: Set[str]) -> Iterator[str]:
    """What differs in a step's file and the one that was made again, of which the run has scored these trajectories."""
    for name in _OF_HEAD:
        if (value := recorded.head.get(name, _MISSING)) != again.head[name]:
            yield f"{name} is {value!r}, and computed again {again.head[name]!r}"
    if ("columns" in recorded.head) != ("columns" in again.head):
        yield "only one of its first line and the one made again has columns"
    if (column := recorded.find_changed_texts()) is not None:
        yield f"its first lines have other {column} than its records"
    if [record["trajectory"] for record in recorded.records] != [record["trajectory"] for record in again.records]:
        yield "groups were replaced that are not replaced again, or the other way round"
        return
    for record, own in zip(recorded.records, again.records, strict=True):
        name = record["trajectory"]
        yield from (f"trajectory {name}{found}" for found in _compare_records(record, own, name in scored))


def _compare_settings(recorded: RecordedStep, config: RolloutConfig) -> Iterator[str]:
    """Where a step's rows and turns were sampled otherwise than the recipe says.

    What is computed again is computed with the parameters of the rows and turns. So this alone finds a recipe that was
    changed after the run. A smaller group is no difference: a recipe's own code may leave rollouts out of it
    (`Problems.score`).
    """
    for group, members in itertools.groupby(recorded.records, key=lambda record: record["group"]):
        if (number := len(list(members))) > config.group_size:
            yield f"group {group} has {number} rollouts, more than rollouts.group_size, which is {config.group_size}"
    for record in recorded.records:
        yield from (f"trajectory {record['trajectory']}, {found}" for found in _compare_sampling(record, config))


def _compare_sampling(record: Mapping[str, Any], config: RolloutConfig) -> Iterator[str]:
    """Where the rows and turns of a rollout were sampled otherwise than the recipe says."""
    sampling = config.sampling
    temperature = sampling.temperature or 1.0  # greedy completions have the logprobs of temperature 1
    for number, row in enumerate(record["rows"]):
        if row["temperature"] != temperature:
            yield f"row {number}: temperature is {row['temperature']}, and by rollouts.sampling {temperature}"
    for number, turn in enumerate(record["turns"]):
        # A turn may have fewer ids: it ended by itself, or its session had a lower limit.
        if turn["num_sampled"] > sampling.max_tokens:
            yield (
                f"turn {number}: num_sampled is {turn['num_sampled']}, more than rollouts.sampling.max_tokens, which "
                f"is {sampling.max_tokens}"
            )
        yield from (f"turn {number}: {found}" for found in _compare_controls(record, turn, sampling))


def _compare_controls(record: Mapping[str, Any], turn: Mapping[str, Any], sampling: SamplingParams) -> Iterator[str]:
    """What changed the logits of a turn otherwise than the recipe says."""
    controls = LogitControls.from_json(turn.get("controls") or {}) or LogitControls()
    left_out: Sequence[str] = ()
    if controls.min_tokens == 0 and any("messages" in row for row in record["rows"]):
        # The agent of a session may ask for a turn that no id ends (`ignore_eos`): `min_tokens` forbids nothing then.
        left_out = ("min_tokens",)
    for name in _OF_SAMPLING:
        value, given = getattr(controls, name), getattr(sampling, name)
        if value != given and name not in left_out:
            yield f"{name} is {_quote(value)}, and by rollouts.sampling {_quote(given)}"


def _compare_records(record: Mapping[str, Any], again: Mapping[str, Any], is_scored: bool) -> Iterator[str]:
    yield from _compare_turns(record["turns"], again["turns"])
    if len(record["rows"]) != len(again["rows"]):
        yield f": it has {len(record['rows'])} rows, and computed again {len(again['rows'])}"
        return
    rows, own = (_number_nodes(each["rows"]) for each in (record, again))
    for number, pair in enumerate(zip(rows, own, strict=True)):
        yield from (f", row {number}: {found}" for found in _compare_rows(*pair, is_scored=is_scored))


def _compare_turns(turns: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for name in ("num_sampled", "policy_versions"):
        found, own = ([turn.get(name) for turn in each] for each in (turns, again))
        if found != own:
            yield f": {name} of its turns is {_quote(found)}, and computed again {_quote(own)}"


def _number_nodes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose segments have nodes numbered from 0: nodes that no row has, such as a last prompt, are not known."""
    nodes = sorted({segment["node"] for row in rows for segment in row["segments"]})
    numbers = {node: number for number, node in enumerate(nodes)}
    return [
        {**row, "segments": [{**segment, "node": numbers[segment["node"]]} for segment in row["segments"]]}
        for row in rows
    ]


def _compare_rows(row: Mapping[str, Any], again: Mapping[str, Any], *, is_scored: bool) -> Iterator[str]:
    """What differs in a row, and the first id whose logprob is not that of the weights."""
    sampled, computed = row["rollout_logprobs"], again["trainer_logprobs"]
    for place, own, other in zip(find_sampled(again), sampled, computed, strict=False):  # other lengths differ below
        if own != other:
            yield (
                f"position {place}, id {row['token_ids'][place]}: its logprob is {own!r}, and {other!r} by the weights "
                "before the step: it, the id or one before it is not what was sampled"
            )
            break
    left_out = () if is_scored else tuple(name for name in _OF_SCORED_ROW if row.get(name, _MISSING) is None)
    for name in _OF_ROW + _OF_SCORED_ROW:
        if name not in left_out and (value := row.get(name, _MISSING)) != again[name]:
            yield f"{name} is {_quote(value)}, and computed again {_quote(again[name])}"


def _quote(value: Any) -> str:
    return shorten(repr(value), 80, num_last=15)
