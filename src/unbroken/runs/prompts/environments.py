"""Environments that a TOML file names: a class, whose arguments come from a table, the data set and the run.

environment = "guess.py:GuessEnv"              # class GuessEnv: def __init__(self, number, *, largest, seed): ...
environment_arguments = {largest = 20}

A class gets the arguments that it names: those of the table, the columns of the row, and `OWN_ARGUMENTS`. All of them
are checked before anything is sampled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.rollout.env import Env
from unbroken.rollout.tools import Tool
from unbroken.runs.prompts.dataset import Rows
from unbroken.runs.python_files import FunctionName, load_function
from unbroken.runs.settings.values import check_toml

OWN_ARGUMENTS = ("number", "split", "seed", "messages", "tools")
"""The problem's number, 0, 1, 2, ... without end; `train`, or the name of the evaluation's set; the run's seed; the
prompt of the row, as messages; the tools that it may use."""
_NEED_ROWS = ("messages",)
_FIELD, _TABLE = "environment", "environment_arguments"


class Environments:
    """Makes the environments of one class."""

    def __init__(self, reference: FunctionName, arguments: Mapping[str, Any], *, seed: int) -> None:
        """Load the class `module:Class` or `file.py:Class`, and check the table of its arguments.

        Raises:
            InvalidInputError: there is no such class, it lacks a method of `Env`, or the table has an argument that it
                does not take or one of another type.
        """
        if not reference.is_reference:
            raise InvalidInputError(f"{_FIELD} must be written module:Class or file.py:Class, got {str(reference)!r}")
        self._name = reference.rpartition(":")[2]
        self._make: Callable[..., Any] = load_function(reference, field=_FIELD)
        if isinstance(self._make, type):
            missing = [name for name in ("start", "step", "reward", "close") if not hasattr(self._make, name)]
            if missing:
                raise InvalidInputError(
                    f"{_FIELD} must name a class with the methods of Env, got {self._name}, which has no "
                    f"{', '.join(missing)}"
                )
        parameters = inspect.signature(self._make).parameters
        self._takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        self._parameters = {
            name: each
            for name, each in parameters.items()
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        }
        self._arguments = self._check(arguments)
        self._seed = seed

    def __call__(self, rows: Rows | None, tools: Sequence[Tool], *, split: str) -> Callable[[int], Env]:
        """A function from a problem's number to its environment; `rows` are the data set, `tools` all that there are.

        Raises:
            InvalidInputError: the class needs an argument that nobody gives, does not take the tools or the rows, or
                the table has the name of a column.
        """
        columns = () if rows is None else rows.columns
        self._check_sources(columns, has_rows=rows is not None, has_tools=bool(tools))
        needs_row = self._takes_any or any(name in self._parameters for name in columns)

        def make(number: int) -> Env:
            names = None if rows is None else rows.tools(number)
            own = {
                "number": number,
                "split": split,
                "seed": self._seed,
                "tools": select_tools(tools, names),
            }
            if rows is not None:
                own["messages"] = rows.messages(number)
            row = dict(rows.row(number)) if rows is not None and needs_row else {}
            given = {name: value for name, value in (row | own).items() if self._takes(name)}
            env: Env = self._make(**given, **self._arguments)
            return env

        return make

    def _takes(self, name: str) -> bool:
        return name in self._parameters or self._takes_any

    def _check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the table, each converted to the type that the class gives it."""
        known = [name for name in self._parameters if name not in OWN_ARGUMENTS]
        hints = _read_hints(self._make)
        checked = {}
        for name, value in arguments.items():
            if name in OWN_ARGUMENTS:
                raise InvalidInputError(f"{_TABLE}.{name} must be left out: the run gives it, got {value!r}")
            if not self._takes(name):
                raise InvalidInputError(
                    f"{_TABLE}.{name} must be an argument of {self._name}: it takes {', '.join(known) or 'none'}"
                )
            checked[name] = check_toml(hints[name], value, name=f"{_TABLE}.{name}") if name in hints else value
        return checked

    def _check_sources(self, columns: Sequence[str], *, has_rows: bool, has_tools: bool) -> None:
        if twice := sorted({*columns} & {*self._arguments}):
            raise InvalidInputError(
                f"{_TABLE}.{twice[0]} must be left out: the data set has a column of this name, got "
                f"{self._arguments[twice[0]]!r}"
            )
        own = [name for name in OWN_ARGUMENTS if has_rows or name not in _NEED_ROWS]
        for name, each in self._parameters.items():
            if each.default is each.empty and name not in {*own, *columns, *self._arguments}:
                where = f"the columns {', '.join(columns)}" if has_rows else "no data set"
                raise InvalidInputError(
                    f"{_TABLE}.{name} must be given: {self._name} needs it, and there is {where} (an environment also "
                    f"gets {', '.join(own)})"
                )
        if has_tools and not self._takes("tools"):
            raise InvalidInputError(f"tools must be left out with {self._name}, which takes no argument `tools`")
        if has_rows and not any(self._takes(name) for name in ("messages", *columns)):
            raise InvalidInputError(
                f"data must be left out with {self._name}, which takes neither messages nor a column: "
                f"{', '.join(columns)}"
            )


def select_tools(tools: Sequence[Tool], names: Sequence[str] | None) -> list[Tool]:
    """The tools of these names; all for None."""
    by_name = {tool.name: tool for tool in tools}
    return list(tools) if names is None else [by_name[name] for name in names]


def _read_hints(make: Callable[..., Any]) -> dict[str, Any]:
    """The types of the arguments, by name; none if they cannot be read."""
    try:
        parameters = inspect.signature(make, eval_str=True).parameters
    except (NameError, TypeError, AttributeError):
        return {}
    return {name: each.annotation for name, each in parameters.items() if each.annotation is not each.empty}
