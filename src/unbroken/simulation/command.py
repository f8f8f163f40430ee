"""The command `unbroken simulate [FILE.toml] [--from RUN] [--FIELD VALUE ...]`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError, missing_extra
from unbroken.runs.command import print_text

_EXAMPLE = """\
unbroken simulate --workload.lengths.median 400 --engine.id-s 0.01 --trainer.step-s 3
unbroken simulate --from runs/mine --max-staleness 0,1,2,4,8 --timelines /tmp/schedules
unbroken simulate times.toml

Fields, which a TOML file may hold too ([engine], id_s = 0.01); --from RUN fits them to a run of `unbroken train`:
"""


def add_simulate_parser(commands: Any) -> None:
    """Add the command's parser to `commands`."""
    simulate = commands.add_parser(
        "simulate",
        help="try schedules of sampling and training on a virtual clock",
        description="Try schedules of sampling and training on a virtual clock.",
        allow_abbrev=False,
        add_help=False,
    )
    simulate.add_argument("options", nargs=argparse.REMAINDER)
    simulate.set_defaults(run=run_simulate)


def mark_options(words: Sequence[str]) -> list[str]:
    """The words of a command line, where those after `simulate` are all for it."""
    return ["simulate", "--", *words[1:]] if words[:1] == ["simulate"] else list(words)


def run_simulate(arguments: argparse.Namespace) -> int:
    """Simulate, and print a table; returns the exit status."""
    try:
        import pydantic  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_extra(error, "simulating needs the train or serve extra", "train") from error
    words = [word for word in arguments.options if word != "--"]
    if {"-h", "--help"} & set(words):
        print_text(_EXAMPLE + _format_fields())
        return 0
    print_text(simulate_words(words))
    return 0


def simulate_words(words: Sequence[str]) -> str:
    """Simulate what the words of the command line say, and return what is printed.

    Raises:
        InvalidInputError: a word, a file or a run is wrong.
    """
    from unbroken.runs.settings.build import build, load_toml, read_options, read_table
    from unbroken.runs.settings.fields import section_of
    from unbroken.simulation.config import SimulationConfig
    from unbroken.simulation.measured import measure_run
    from unbroken.simulation.report import LEGEND, format_table
    from unbroken.simulation.schedule import simulate

    rest, run = _take_option(list(words), "--from")
    file = Path(rest.pop(0)) if rest and not rest[0].startswith("--") else None
    measured = None if run is None else measure_run(Path(run))
    base = SimulationConfig() if measured is None else dataclasses.replace(measured.config, max_staleness=(0, 1, 2, 4))
    section = section_of(SimulationConfig, base=base)
    values: dict[str, Any] = {}
    if file is not None:
        values = read_table(load_toml(file), section, source=f"{file}: ", folder=file.parent)
    values |= read_options(rest, section)
    config: SimulationConfig = build(section, values)
    gives_lengths = any(name.startswith("workload.lengths.") or name == "workload.num_turns" for name in values)
    plan = None if measured is None or gives_lengths else measured.plan
    lines = []
    if measured is not None:
        lines += _compare(measured, config, plan)
    outcomes = [simulate(config, bound, plan=plan) for bound in config.max_staleness]
    return "\n".join([*lines, format_table(outcomes), "", LEGEND])


def _compare(measured: Any, config: Any, plan: Any) -> list[str]:
    """What was fitted, and how well a simulation of the run itself agrees."""
    from unbroken.simulation.schedule import simulate

    (bound,) = measured.config.max_staleness
    own = simulate(dataclasses.replace(measured.config, num_steps=config.num_steps), bound, plan=plan or measured.plan)
    off = own.step_s / measured.step_s - 1
    engine, trainer = measured.config.engine, measured.config.trainer
    return [
        f"engine: {engine.first_s:.3g} s a turn, {engine.id_s:.3g} s an id; trainer: {trainer.step_s:.3g} s a step, "
        f"{trainer.id_s:.3g} s an id, {trainer.publish_s:.3g} s to publish, {trainer.save_s:.3g} s a checkpoint",
        f"the run, max_staleness {bound}: {measured.step_s:.3f} s a step; simulated: {own.step_s:.3f} ({off:+.1%})",
        "",
    ]


def _take_option(words: list[str], name: str) -> tuple[list[str], str | None]:
    """The words without an option, and its value."""
    for index, word in enumerate(words):
        if word.startswith(f"{name}="):
            return words[:index] + words[index + 1 :], word.partition("=")[2]
        if word == name:
            if index + 1 == len(words):
                raise InvalidInputError(f"{name} must be followed by a value")
            return words[:index] + words[index + 2 :], words[index + 1]
    return words, None


def _format_fields() -> str:
    from unbroken.runs.settings.fields import section_of
    from unbroken.runs.settings.values import format_type, format_value
    from unbroken.simulation.config import SimulationConfig

    lines = []
    for field in section_of(SimulationConfig, base=SimulationConfig()).all_fields().values():
        lines.append(
            f"  --{field.name.replace('_', '-')} {format_type(field.hint)}  (default: {format_value(field.default)})"
        )
        lines.append(f"      {field.doc}")
    return "\n".join(lines)
