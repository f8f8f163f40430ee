"""`unbroken.fit`: a run of `unbroken train` that is started in Python, with rows, functions and tools as they are.

    result = unbroken.fit("Qwen/Qwen2.5-0.5B-Instruct", rows, correct, tools=[lookup], steps=100)
    result.metrics[-1]["reward/mean"], result.model

The run is that of the built-in recipe. Where a TOML file names a function in a file, the config has `fit:correct`, a
name for what was given, so that `recipe.json` is complete but for the code.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import html
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.rollout.tools import Tool
from unbroken.runs.diagnosis.diary import diagnose_folder
from unbroken.runs.diagnosis.evidence import read_steps
from unbroken.runs.evaluation.evaluator import read_evaluations
from unbroken.runs.export.kept import FINAL
from unbroken.runs.folder import FIT
from unbroken.runs.python_files import GIVEN, given_objects
from unbroken.runs.recipe import load_recipe
from unbroken.runs.records.files import FOLDER, find_conversation, find_records, join_texts, read_records
from unbroken.runs.settings import read_table
from unbroken.runs.training import run_recipe
from unbroken.viewer.reports import render_page

_NUM_SHOWN = 6
_MAX_TEXT = 2000
_TAKES_OBJECTS = ("rewards", "tools", "environment", "agent", "loss", "advantages", "curriculum")
"""Settings that name functions and classes."""
_ROWS = f"{GIVEN}rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The run that `unbroken.fit` made. All is read from its folder; in a notebook it shows as a page."""

    folder: Path
    """The run's output folder, which `unbroken view`, `doctor`, `export` and `eval --model` take."""

    @property
    def metrics(self) -> list[Mapping[str, float | None]]:
        """The metrics of each step, by name (docs/metrics.md)."""
        return read_steps(self.folder)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations before, during and after the training: `step`, `set`, `reward/mean` and others."""
        return read_evaluations(self.folder)

    @property
    def rollouts(self) -> Iterator[dict[str, Any]]:
        """The rollouts that were kept of the steps, in order, as records of docs/rollouts.md.

        Raises:
            InvalidInputError: a file is damaged.
        """
        for _, path in sorted(find_records(self.folder / FOLDER).items()):
            records = read_records(path)
            next(records)  # the step's
            yield from records

    @property
    def model(self) -> Path:
        """The folder of the trained model, for transformers and vLLM."""
        return self.folder / FINAL

    def _repr_html_(self) -> str:
        """The page, in a frame: its script sees nothing of the notebook."""
        page = html.escape(_render(self))
        return (
            f'<iframe sandbox="allow-scripts" style="width:100%;height:560px;border:0" title="{self.folder.name}" '
            f'srcdoc="{page}"></iframe>'
        )


def fit(
    model: str | Path,
    rows: Any = None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    *,
    tools: Sequence[Tool] = (),
    steps: int,
    output: str | Path = "runs/fit",
    preflight: bool = True,
    **settings: Any,
) -> FitResult:
    """Train a model, or continue the run in `output`: the run that `unbroken train` makes, without files for it.

    `rows` are a list of dicts, a data set of `datasets`, or the path of a file; `reward` a function or several, as in
    a rewards.py, whose sum is the reward; `tools` functions with the decorator `@tool`. Without `preflight` no rollouts
    are sampled and shown before the first step. All other keywords are tables of a recipe's TOML, in which a function
    or class stands as it is; `rewards`, in place of `reward`, gives each function a weight:

        fit(model, rows, correct, steps=50, rollouts={"group_size": 8}, trainer={"optimizer": {"learning_rate": 1e-5}})
        fit(model, rows, rewards=[{"function": correct}, {"function": brief, "weight": 0.1}], steps=50)
        fit(model, environment=GuessEnv, environment_arguments={"largest": 20}, steps=50)

    It may be called where an event loop runs, as in a notebook. Samplers in other processes cannot have what was given.

    Raises:
        InvalidInputError: an argument is wrong, or `output` holds another run: with another reward, row or setting.
        UnbrokenError: the run failed.
    """
    objects: dict[str, Any] = {}
    table = _make_table(model, reward, settings, objects, tools=tools, steps=steps, output=output)
    if rows is not None:
        table["data"] = _choose_data(rows, table.get("data", {}), objects)
    before = given_objects.set(objects)
    try:
        recipe = load_recipe(None)
        values = read_table(table, recipe.section, source="", folder=None)
        recipe = replace(recipe, name=FIT, values=values)
        run_recipe(recipe, digests=_digest_code(objects), preflight=preflight, run=_run_anywhere)
    finally:
        given_objects.reset(before)
    return FitResult(folder=Path(output))


def _run_anywhere(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` in an event loop. Where one runs, as in a notebook, in another thread, with this one's context
    variables; an interrupt cancels it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(main)
        return
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def run() -> None:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        await main

    with ThreadPoolExecutor(1, thread_name_prefix="unbroken run") as pool:
        done = pool.submit(contextvars.copy_context().run, asyncio.run, run())
        try:
            done.result()
        except KeyboardInterrupt:
            loop, task = begun.result()
            if not done.done() and task is not None:
                loop.call_soon_threadsafe(task.cancel)
            raise  # once the pool is closed, which waits until the run has closed what it had open


def _make_table(
    model: Any,
    reward: Any,
    settings: Mapping[str, Any],
    objects: dict[str, Any],
    *,
    tools: Any,
    steps: Any,
    output: Any,
) -> dict[str, Any]:
    """The settings as a TOML file's table; what was given in Python is in `objects`, by the names in the table."""
    if not isinstance(model, (str, Path)):
        raise InvalidInputError(
            f"model must be a model's folder or its name on the hub, got an object of {type(model).__name__}"
        )
    if isinstance(tools, Tool):  # a list of one is meant, and "must be a list" would not say of what
        raise InvalidInputError(
            f"tools must be a list of functions with the decorator @tool, got the tool {tools.name}"
        )
    own = {
        "model": str(model),
        "output": str(output),
        "tools": tools,
        "loop": _add_steps(settings.get("loop", {}), steps),
    }
    if rewards := _list_rewards(reward):
        if "rewards" in settings:
            raise InvalidInputError(f"rewards must be left out with reward, got {settings['rewards']!r}")
        own["rewards"] = rewards
    return {name: _to_toml(value, name, objects) for name, value in {**settings, **own}.items()}


def _list_rewards(reward: Any) -> list[dict[str, Any]]:
    """The tables of the reward functions."""
    functions = reward if isinstance(reward, (list, tuple)) else [reward]
    for k, each in enumerate(functions):
        if not (callable(each) or isinstance(each, str)):
            raise InvalidInputError(f"reward must be a function or a list of functions, got {each!r} as number {k}")
    return [{"function": each} for each in functions]


def _add_steps(loop: Any, steps: Any) -> Any:
    if not isinstance(loop, Mapping):
        return loop  # which the settings refuse
    if "num_steps" in loop:
        raise InvalidInputError(f"loop.num_steps must be left out: steps is the same, got {loop['num_steps']!r}")
    return {**loop, "num_steps": steps}


def _to_toml(value: Any, name: str, objects: dict[str, Any]) -> Any:
    """A value as a TOML file has it. Functions, classes and tools are kept in `objects`, and their names returned."""
    if isinstance(value, Mapping):
        return {str(key): _to_toml(item, f"{name}.{key}", objects) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_toml(item, f"{name}[{k}]", objects) for k, item in enumerate(value)]
    if value is None or isinstance(value, (str, int, float, Path)):
        return value
    if not callable(value) or name.split(".")[0].split("[")[0] not in _TAKES_OBJECTS:
        raise InvalidInputError(f"{name} must be a value as in a recipe's TOML file, got {value!r}")
    return _keep(value, name, objects)


def _keep(value: Any, name: str, objects: dict[str, Any]) -> str:
    own = value.name if isinstance(value, Tool) else (value.__name__ if hasattr(value, "__name__") else "")
    if not own.isidentifier():  # a lambda, a partial, an object with __call__: metrics show the name
        raise InvalidInputError(f"{name} must be a function or class with a name, got {value!r}: define it with def")
    reference = f"{GIVEN}{own}"
    if objects.setdefault(reference, value) is not value:
        raise InvalidInputError(f"{name} must have a name that nothing else has which is given, got a second {own!r}")
    return reference


def _choose_data(rows: Any, data: Any, objects: dict[str, Any]) -> Any:
    """The table `data`, with the rows: a file's path, or the name for what is kept in `objects`."""
    if not isinstance(data, Mapping):
        return data  # which the settings refuse
    for name in ("file", "hub"):
        if name in data:
            raise InvalidInputError(f"data.{name} must be left out with rows, got {data[name]!r}")
    if isinstance(rows, (str, Path)):
        return {**data, "file": str(rows)}
    if _ROWS in objects:
        raise InvalidInputError("a function must have another name than rows, which the data set has here")
    objects[_ROWS] = _make_dataset(rows)
    return {**data, "hub": _ROWS}


def _make_dataset(rows: Any) -> Any:
    import datasets

    if isinstance(rows, datasets.Dataset):
        return rows.with_format(None)  # a format such as torch is no part of the rows
    _check_rows(rows)
    names = dict.fromkeys(str(name) for row in rows for name in row)  # from_list would drop those of later rows
    try:
        return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in names})
    except (ValueError, TypeError, OverflowError) as error:  # those of pyarrow are among them
        raise InvalidInputError(f"rows must have values of one type in each column: {error}") from error


def _check_rows(rows: Any) -> None:
    if not isinstance(rows, (list, tuple)) or not rows:
        raise InvalidInputError(
            "rows must be a list of dicts with at least one, a datasets.Dataset, or the path of a file, got "
            f"{rows if isinstance(rows, (list, tuple)) else type(rows).__name__}"
        )
    for k, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidInputError(f"rows must be dicts of columns, got {row!r} as row {k}")


def _digest_code(objects: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of each object's source, where it can be read. Rows are compared with those of a checkpoint."""
    found = {}
    for reference, value in objects.items():
        try:
            source = inspect.getsource(value.function if isinstance(value, Tool) else value)
        except (OSError, TypeError):  # it was typed into an interpreter, or is not Python
            continue
        found[f"the SHA-256 of {reference}"] = hashlib.sha256(source.encode()).hexdigest()
    return found


def _render(result: FitResult) -> str:
    """The page: what was reached, what is wrong, the rewards' curve, and a few rollouts of the last step."""
    steps = result.metrics
    curves = [{"name": "in training", "points": [[step["step"], step.get("reward/mean")] for step in steps]}]
    for line in result.evaluations:
        point = [line["step"], line.get("reward/mean")]
        curves.append({"name": f"{line.get('set', 'evaluation')} at step {line['step']}", "points": [point]})
    files = sorted(find_records(result.folder / FOLDER).items())
    shown = []
    for _, path in files[-1:]:
        _, *records = read_records(path)
        shown = [(each, [_show(message) for message in find_conversation(each)]) for each in records[:_NUM_SHOWN]]
    _, findings = diagnose_folder(result.folder)
    return render_page(
        "unbroken.viewer",
        "run.html.jinja",
        result=result,
        steps=steps,
        curves=curves,
        findings=findings,
        rollouts=shown,
    )


def _show(message: Mapping[str, Any]) -> tuple[str, str]:
    return str(message.get("role")), join_texts([message])[:_MAX_TEXT]
