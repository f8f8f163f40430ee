"""`unbroken eval`: models on the problems of a recipe, without training.

the recipe's train_model ── for each model: engine ── sampler ── evaluation, as in training ── numbers ── a table

Each number has an interval of 95 %. A problem's samples are not independent, so problems are what is drawn again:

    2 problems with 4 samples each      0 1 1 0 and 1 1 1 1      reward/mean (2 + 4) / (4 + 4)
    a draw of 2 problems                the second one twice     8 / 8; the interval holds 95 % of 10,000 draws

Where each problem's pass@k is 0 or 1 this is Wilson's interval, which has a width even if all are equal. Two models
have the same problems and seeds, so their difference is that of each problem.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from unbroken.errors import InvalidInputError, UnbrokenError, missing_extra
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, TrajectoryStatus
from unbroken.runs.collector import EvaluationSet
from unbroken.runs.config import EngineKind, RunConfig, read_key
from unbroken.runs.evaluation.evaluator import Evaluator, Sample, choose_ks, pass_at_k
from unbroken.runs.evaluation.schedule import make_evaluators
from unbroken.runs.folder import claim_folder, lock_folder
from unbroken.runs.processes import Rank, join_processes
from unbroken.runs.recipe import OpenRecipe, Recipe, load_recipe, run_without_training
from unbroken.runs.settings import build, describe, read_options

REPORT = "report.json"
INTERVALS = (
    "95 %: bootstrap over problems (10,000 draws); Wilson for pass@k where each problem's is 0 or 1; none for one "
    "problem, or where all problems have one value"
)
NUM_PROBLEMS = 100
"""Of an environment that has no end."""
_NUM_DRAWS, _CHUNK = 10_000, 1000
_DATA = (".jsonl", ".json", ".parquet", ".csv")
_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedModel:
    """A model to evaluate."""

    name: str
    """As it was given."""
    folder: Path | None = None
    """Of a model, of adapters alone, or of a checkpoint; None for a server, and for a name on the hub."""
    source: str
    """Folder or hub name whose tokenizer makes the ids."""

    @property
    def is_server(self) -> bool:
        """Whether it is served already."""
        return "://" in self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOrder:
    """What to evaluate, as the command says it."""

    task: str
    options: Sequence[str]
    """Of the recipe."""
    models: Sequence[str]
    """None: the recipe's own."""
    tokenizer: str | None = None
    num_problems: int | None = None
    num_samples: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("--problems", self.num_problems), ("--samples", self.num_samples)):
            if value is not None and value < 1:
                raise InvalidInputError(f"{name} must be >= 1, got {value}")
        if len(set(self.models)) < len(self.models):
            raise InvalidInputError(f"--model must be different models, got {list(self.models)}")


def evaluate_task(order: EvaluationOrder, console: Console) -> dict[str, Any]:
    """Evaluate the models on the task, and return the report; it is also in the output folder.

    Raises:
        InvalidInputError: the task, a model or an option is wrong.
        EngineError, RolloutError: an engine does not start or went away, or all rollouts failed.
        Terminated: SIGTERM came.
    """
    recipe, words = open_task(order.task)
    models = [find_model(name, order.tokenizer) for name in order.models]
    config = _configure(recipe, [*words, *order.options], models)
    if config.output.is_dir() and any(config.output.iterdir()):
        raise InvalidInputError(f"output must be a new or empty folder, and {config.output} holds files")
    report: dict[str, Any] = {"format": 1, "task": order.task, "intervals": INTERVALS, "models": [], "differences": []}

    async def evaluate(config: RunConfig, *, model: str | Path, sets: Sequence[EvaluationSet]) -> None:
        chosen = models or [find_model(str(model), order.tokenizer)]
        await _Evaluation(order, recipe, config, chosen, sets, console, report).run()

    with lock_folder(config.output):
        run_without_training(recipe, config, OpenRecipe(name=recipe.name, words=(), evaluate=evaluate))
    return report


def open_task(task: str) -> tuple[Recipe, list[str]]:
    """The recipe of a task, and options that make it this task's."""
    if Path(task).suffix in _DATA:
        return load_recipe(None), ["--data.file", task]
    if ":" in task:
        return load_recipe(None), ["--environment", task]
    if Path(task).suffix not in (".py", ".toml"):
        raise InvalidInputError(
            f"TASK must be a recipe (.py, .toml), a data set's file ({', '.join(_DATA)}), or an environment "
            f"(file.py:Class, module:Class, verifiers:NAME, harbor:FOLDER), got {task!r}"
        )
    return load_recipe(Path(task)), []


def _configure(recipe: Recipe, options: Sequence[str], models: Sequence[EvaluatedModel]) -> RunConfig:
    """The config of the recipe; what only training needs has a default."""
    fields = recipe.section.all_fields()
    name = re.sub(r"\W+", "-", recipe.name.rpartition(".")[0] or "task")
    output = Path("runs") / f"eval-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    values: dict[str, Any] = {"engine.wait_s": _WAIT_S, "loop.num_steps": 0, **recipe.values, "output": output}
    if models and "model" in fields:
        values |= read_options(["--model", models[0].source], recipe.section)
    config: RunConfig = build(recipe.section, values | read_options(options, recipe.section))
    for field, is_refused in {
        "rollouts.samplers": config.rollouts.samplers > 0, "rollouts.listen": config.rollouts.listen is not None
    }.items():  # fmt: skip
        if is_refused:
            raise InvalidInputError(f"{field} must be left out with `unbroken eval`, which samples in one process")
    return config


def find_model(name: str, tokenizer: str | None = None) -> EvaluatedModel:
    """Find out what a model is: a server, a folder of a model or adapters, a run or its checkpoint, or a hub name.

    Raises:
        InvalidInputError: it is none of them, or no tokenizer is found.
    """
    from transformers import AutoConfig

    from unbroken.runs.export.checkpoint import find_checkpoint
    from unbroken.runs.export.files import read_info
    from unbroken.training.state import read_state

    if "://" in name:
        return EvaluatedModel(name=name, source=tokenizer or _ask_for_tokenizer(name))
    folder, known = Path(name).expanduser(), partial(EvaluatedModel, name=name)
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise InvalidInputError(
                f"--model must be a folder, a name on the hub or a URL, got {name!r}: no such folder"
            )
        try:
            AutoConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"--model must be a folder, a name on the hub or a URL, got {name!r}: {error}"
            ) from None
        return known(source=tokenizer or name)
    if (folder / "final").is_dir():
        folder = folder / "final"
    if (folder / "config.json").is_file() and not (folder / "state.json").is_file():
        return known(folder=folder, source=tokenizer or str(folder.absolute()))
    if (folder / "adapter_config.json").is_file() and not (folder / "state.json").is_file():
        info = read_info(folder)
        base = json.loads((folder / "adapter_config.json").read_text("utf-8"))["base_model_name_or_path"]
        return known(folder=folder, source=tokenizer or (base if info is None else info.source))
    try:
        folder = find_checkpoint(folder)
    except InvalidInputError:
        raise InvalidInputError(
            f"--model must be the folder of a model (config.json), of a run, or of a checkpoint, got {name}: it holds "
            "none of them"
        ) from None
    origin = read_state(folder).state.model
    if (source := tokenizer or (origin.source if origin else "")) == "":
        raise InvalidInputError(f"--tokenizer must be given with {name}, whose checkpoint does not say its model")
    return known(folder=folder, source=source)


def _ask_for_tokenizer(url: str) -> str:
    """The model that a server says it has, if its tokenizer can be loaded here."""
    try:
        from unbroken.client import Client
    except ModuleNotFoundError as error:
        raise missing_extra(error, f"{url} needs the client extra", "client") from error
    from unbroken.rendering.loader import load_tokenizer

    with Client(url, max_retries=1) as client:
        (served, *_) = client.models()
    name = str(served.get("root") or served.get("id"))
    try:
        load_tokenizer(name)
    except (UnbrokenError, OSError, ValueError):
        raise InvalidInputError(
            f"--tokenizer must be the folder or hub name of the model at {url}, which calls it {name!r}: that is "
            "neither on this machine nor on the hub"
        ) from None
    return name


class _Evaluation:
    """The evaluation of all models of a command."""

    def __init__(
        self,
        order: EvaluationOrder,
        recipe: Recipe,
        config: RunConfig,
        models: Sequence[EvaluatedModel],
        sets: Sequence[EvaluationSet],
        console: Console,
        report: dict[str, Any],
    ) -> None:
        if join_processes().num_processes > 1:
            raise InvalidInputError("`unbroken eval` must be started as one process, without a launcher")
        self._order, self._recipe, self._models, self._console, self._report = order, recipe, models, console, report
        self._config = replace(
            config,
            evaluation=replace(config.evaluation, engine=None),
            trainer=replace(config.trainer, routing_replay=False),
        )
        self._sets = [self._size(each) for each in sets]

    def _size(self, each: EvaluationSet) -> EvaluationSet:
        """The set with its numbers of problems and samples."""
        there = each.problems.num_problems
        chosen = self._order.num_problems or each.num_problems or self._config.evaluation.num_problems
        if there is not None and chosen > there:
            raise InvalidInputError(f"--problems must be at most {there}, which {each.name} has, got {chosen}")
        return replace(
            each, num_problems=chosen or there or NUM_PROBLEMS, num_samples=self._order.num_samples or each.num_samples
        )

    async def run(self) -> None:
        """Evaluate each model, and write the report after each."""
        output = self._config.output
        labels = _make_labels([model.name for model in self._models])
        baseline: dict[str, dict[str, Measure]] = {}
        for model, label in zip(self._models, labels, strict=True):
            folder = output if len(labels) == 1 else output / label
            claim_folder(folder, self._recipe.name, describe(replace(self._config, output=folder)))
            found = await self._evaluate(model, label, folder)
            if baseline:
                self._report["differences"] += [
                    {"set": name, "model": label, "baseline": labels[0], "measures": _compare(baseline[name], measures)}
                    for name, measures in found.items()
                ]
            baseline = baseline or found
            (output / REPORT).write_text(json.dumps(self._report, indent=1, allow_nan=False) + "\n", "utf-8")

    async def _evaluate(self, model: EvaluatedModel, label: str, folder: Path) -> dict[str, dict[str, Measure]]:
        found: dict[str, dict[str, Measure]] = {}
        entry: dict[str, Any] = {"model": label, "name": model.name, "tokenizer": model.source, "sets": {}}
        entry["folder"] = str(folder)
        async with self._open(model, folder) as evaluators:
            for evaluator in evaluators:
                sizes = f"{evaluator.num_problems} problems, {evaluator.num_samples} samples of each"
                self._console.print(f"{label}: {evaluator.name}, {sizes}", highlight=False)
                begun_s = time.perf_counter()
                groups = await evaluator.sample()
                numbers = evaluator.record(0, groups).numbers
                seconds = time.perf_counter() - begun_s
                found[evaluator.name] = measure(groups, pass_reward=evaluator.pass_reward)
                statuses = Counter(each.status.value for group in groups for each in group.trajectories)
                entry["sets"][evaluator.name] = {
                    **{name: numbers[name] for name in ("num_problems", "num_samples", "num_rollouts")},
                    "seconds": round(seconds, 3),
                    "statuses": dict(statuses),
                    "measures": {name: each.to_json() for name, each in found[evaluator.name].items()},
                }
        self._report["models"].append(entry)
        return found

    @asynccontextmanager
    async def _open(self, model: EvaluatedModel, folder: Path) -> AsyncIterator[list[Evaluator]]:
        """Open the engine of a model, and make its evaluators."""
        from unbroken.runs.samplers import SamplerOpener

        config = replace(self._config, output=folder)
        problems = [each.problems for each in self._sets]
        opener = SamplerOpener(
            config=config, source=model.source, train_on=problems[0], evaluate_on=problems[1:], part="0"
        )
        images = opener.load_images()
        renderer = opener.load_renderer(images)
        if not model.is_server:
            opener.check_lengths(renderer, images)
        async with AsyncExitStack() as stack:
            engine = await self._open_engine(stack, model, config, images)
            opened = await opener.open(stack, engine=engine, evaluation_engine=None, renderer=renderer, images=images)
            yield make_evaluators(
                self._sets, config.evaluation, opened.evaluation, seed=config.seed, output=folder, rank=Rank(),
                source=model.source,
            )  # fmt: skip

    async def _open_engine(self, stack: AsyncExitStack, model: EvaluatedModel, config: RunConfig, images: Any) -> Any:
        from unbroken.rendering.encoding.text_codec import TextCodec
        from unbroken.rendering.loader import load_tokenizer
        from unbroken.runs.engines import connect_servers, open_engine
        from unbroken.runs.models import load_model

        if model.is_server:
            read_key(config.engine.api_key_file, field="engine.api_key_file")
            codec = TextCodec(load_tokenizer(model.source))
            return await connect_servers(stack, config.engine, [model.name], vocab_size=codec.vocab_size)
        if config.engine.kind is EngineKind.SERVER:
            raise InvalidInputError(
                f"engine.kind must be embedded, started or colocated to evaluate {model.name}, got server: or "
                "serve it, and give its URL as --model"
            )
        source = _write_model(stack, model, config)
        loaded = None
        if config.engine.kind is EngineKind.EMBEDDED:
            loaded = load_model(source, config.chosen_model_settings, takes_images=images is not None)
        processor = None if images is None else images.processor
        opening = open_engine(
            config.engine, model=loaded, source=source, output=config.output, device=join_processes().device,
            rank=Rank(), image_processor=processor, numerics=config.trainer.numerics, is_trained=False,
        )  # fmt: skip
        return (await stack.enter_async_context(opening)).engine


def _write_model(stack: AsyncExitStack, model: EvaluatedModel, config: RunConfig) -> str:
    """The folder or hub name of a whole model; of adapters and checkpoints it is written until the stack is closed."""
    from unbroken.runs.export.checkpoint import export_checkpoint
    from unbroken.runs.export.files import copy_text_and_images
    from unbroken.runs.export.kept import make_form
    from unbroken.runs.models import load_model
    from unbroken.training.state import read_state

    if model.folder is None:
        return model.name
    if (model.folder / "config.json").is_file() and not (model.folder / "state.json").is_file():
        return str(model.folder)
    written = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".model-", dir=config.output)))
    if (model.folder / "state.json").is_file():
        origin = read_state(model.folder).state.model
        form = make_form(merged=origin is not None and origin.adapter is not None, dtype=None)
        export_checkpoint(model.folder, written, form=form)
        return str(written)
    try:
        import peft
    except ModuleNotFoundError as error:
        raise missing_extra(error, f"{model.name} has LoRA adapters, which need the lora extra", "lora") from error
    whole = peft.PeftModel.from_pretrained(load_model(model.source), str(model.folder)).merge_and_unload()
    whole.save_pretrained(written)
    copy_text_and_images(model.source, written)
    return str(written)


def _make_labels(names: Sequence[str]) -> list[str]:
    """Names of folders: the last two parts of each name, with its number where two are the same."""
    short = ["-".join(re.findall(r"[\w.-]+", name.partition("://")[2] or name)[-2:]).strip(".-") for name in names]
    return [
        label if short.count(label) == 1 and label else f"{label or 'model'}-{number}"
        for number, label in enumerate(short, start=1)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A number of an evaluation, with its interval: the sum over problems divided by their count."""

    sums: NDArray[np.float64]
    """[P] of each problem's samples."""
    counts: NDArray[np.float64]
    """[P] how many samples of each problem count."""
    is_proportion: bool = False
    """Whether Wilson's interval is right where each problem is 0 or 1."""

    @property
    def value(self) -> float | None:
        """The number; None if nothing counts."""
        return float(self.sums.sum() / self.counts.sum()) if self.counts.any() else None

    def find_interval(self) -> tuple[float, float] | None:
        """The interval of 95 %; None if there is none (`INTERVALS`)."""
        there = self.counts > 0
        means = self.sums[there] / self.counts[there]
        if self.is_proportion and len(means) > 0 and np.isin(means, (0.0, 1.0)).all():
            return _wilson(float(means.sum()), len(means))
        if len(means) < 2 or (means == means[0]).all():
            return None
        draws = _draw(self.sums[there], self.counts[there])
        low, high = np.quantile(draws, (0.025, 0.975))
        return float(low), float(high)

    def to_json(self) -> dict[str, Any]:
        """The number and its interval."""
        low, high = self.find_interval() or (None, None)
        return {"value": self.value, "low": low, "high": high, "num_problems": int((self.counts > 0).sum())}


def _draw(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """[`_NUM_DRAWS`] the number of as many problems, drawn with replacement; always the same draws."""
    rng = np.random.default_rng(0)
    chosen = (rng.integers(len(sums), size=(_CHUNK, len(sums))) for _ in range(_NUM_DRAWS // _CHUNK))
    return np.concatenate([sums[each].sum(axis=1) / counts[each].sum(axis=1) for each in chosen])


def _wilson(num_passed: float, num: int, z: float = 1.959964) -> tuple[float, float]:
    share = num_passed / num
    middle = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num)) / (1 + z * z / num)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def measure(groups: Sequence[TrajectoryGroup], *, pass_reward: float) -> dict[str, Measure]:
    """The numbers of an evaluation, by the names of `evaluation.jsonl`; a rollout without a reward counts as 0.

    `reward_parts/NAME` is over the rollouts that have this part. `seconds` is from a rollout's start to its reward,
    while others are sampled.
    """
    scored = [[each for each in group.trajectories if Sample.of(each).is_scored] for group in groups]
    whole = [group.trajectories for group in groups]
    found = {"reward/mean": _sum([[each.reward or 0.0 for each in of_group] for of_group in scored])}
    names = dict.fromkeys(name for of_group in scored for each in of_group for name in each.reward_parts)
    for name in names:
        parts = [[each.reward_parts.get(name) for each in of_group] for of_group in scored]
        found[f"reward_parts/{name}"] = _sum([[part for part in of_group if part is not None] for of_group in parts])
    for k in choose_ks(max(map(len, scored), default=0)):
        chances = [
            [pass_at_k(len(of_group), sum((each.reward or 0.0) >= pass_reward for each in of_group), k)]
            if len(of_group) >= k
            else []
            for of_group in scored
        ]
        found[f"pass@{k}"] = _sum(chances, is_proportion=True)
    found["completion_tokens/mean"] = _sum([[each.num_sampled for each in of_group] for of_group in whole])
    found["turns/mean"] = _sum([[len(each.turns) for each in of_group] for of_group in whole])
    found["seconds/mean"] = _sum([[each.wall_time_s for each in of_group] for of_group in whole])
    found["cut/share"] = _sum([[float(Sample.of(each).was_cut) for each in of_group] for of_group in whole])
    found["failed/share"] = _sum([[float(_has_failed(each)) for each in of_group] for of_group in whole])
    return found


def _has_failed(trajectory: Trajectory) -> bool:
    return trajectory.status in (TrajectoryStatus.FAILED, TrajectoryStatus.ABORTED)


def _sum(values: Sequence[Sequence[float]], *, is_proportion: bool = False) -> Measure:
    return Measure(
        sums=np.array([sum(each) for each in values], np.float64),
        counts=np.array([len(each) for each in values], np.float64),
        is_proportion=is_proportion,
    )


def _compare(baseline: Mapping[str, Measure], other: Mapping[str, Measure]) -> dict[str, Any]:
    """Differences from the baseline, over the problems that both have: the mean of each problem's difference."""
    found = {}
    for name in [name for name in baseline if name in other]:
        first, second = baseline[name], other[name]
        both = (first.counts > 0) & (second.counts > 0)
        change = second.sums[both] / second.counts[both] - first.sums[both] / first.counts[both]
        found[name] = Measure(sums=change, counts=np.ones(len(change))).to_json()
    return found


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print a table for each set of problems: a column for each model, and one for each difference from the first."""
    letters = {each["model"]: chr(ord("A") + k) if k < 26 else str(k) for k, each in enumerate(report["models"])}
    for name, first in report["models"][0]["sets"].items():
        columns = [(f"{letters[each['model']]} {each['model']}", each["sets"][name]) for each in report["models"]]
        changes = [each for each in report["differences"] if each["set"] == name]
        columns += [(f"{letters[each['model']]} − {letters[each['baseline']]}", each) for each in changes]
        sizes = f"{first['num_problems']} problems, {first['num_samples']} samples of each"
        table = Table(title=f"{name}: {sizes}", title_justify="left")
        for title in ("", *(title for title, _ in columns)):
            table.add_column(title, overflow="fold", no_wrap=not title)
        for row in dict.fromkeys(row for _, each in columns for row in each["measures"]):
            table.add_row(row, *(_format(each["measures"].get(row), row) for _, each in columns))
        table.add_row("seconds in all", *(f"{each['seconds']:.1f}" if "seconds" in each else "" for _, each in columns))
        console.print(table)
    console.print(f"Intervals of {report['intervals']}.", highlight=False)


def _format(measure: Mapping[str, Any] | None, name: str) -> str:
    if measure is None or measure["value"] is None:
        return ""
    digits = 1 if name.startswith("completion_tokens") else 3
    value = f"{measure['value']:.{digits}f}"
    return value if measure["low"] is None else f"{value} [{measure['low']:.{digits}f}, {measure['high']:.{digits}f}]"
