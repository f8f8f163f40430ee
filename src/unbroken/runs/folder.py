"""The folder of a run: it belongs to one recipe with one config, and a run that is started again goes on in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError

_CLAIM = "recipe.json"
_PART = "recipe.json.part"
_MAY_CHANGE = (
    "output",
    "engine.",
    "loop.num_steps",
    "loop.num_unvaried_scored",
    "loop.outages.",
    "checkpoints.",
    "evaluation.",
    "trackers.",
)
"""Fields, and parts of the config (with a dot), that do not decide what a step trains on."""


def claim(folder: Path, recipe: str, settings: Mapping[str, Any]) -> bool:
    """Write into `folder` what runs in it; whether a run was begun in it before.

    Raises:
        InvalidInputError: it holds the run of another recipe, of another config, or something else.
    """
    path = folder / _CLAIM
    if not path.exists():
        if folder.is_dir() and any(each.name != _PART for each in folder.iterdir()):
            raise InvalidInputError(f"output must be an empty folder or that of a run, and {folder} holds other files")
        _write(path, recipe, settings)
        return False
    try:
        before = json.loads(path.read_text("utf-8"))
        name, known = before["recipe"], before["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"{path} must tell what runs in its folder: {type(error).__name__}: {error}") from None
    if name != recipe:
        raise InvalidInputError(f"output must be a folder of its own: {folder} holds a run of {name}, not of {recipe}")
    for each in sorted(name for name in known.keys() | settings.keys() if not _may_change(name)):
        old, new = known.get(each), settings.get(each)
        if old != new:
            raise InvalidInputError(
                f"{each} must be {old!r} as in the run in {folder}, got {new!r}: a run goes on with the config it was "
                "begun with. Give that value, or another --output"
            )
    if known != settings:  # of several processes, only the first writes
        _write(path, recipe, settings)
    return True


def _write(path: Path, recipe: str, settings: Mapping[str, Any]) -> None:
    aside = path.with_name(_PART)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps({"recipe": recipe, "settings": settings}, indent=1) + "\n", "utf-8")
        aside.replace(path)
    except OSError as error:
        raise InvalidInputError(f"output must be a folder that can be written, got {path.parent}: {error}") from error


def _may_change(name: str) -> bool:
    return name in _MAY_CHANGE or name.startswith(tuple(each for each in _MAY_CHANGE if each.endswith(".")))
