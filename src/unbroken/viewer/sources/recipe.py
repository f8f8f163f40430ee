"""What a run was started with, as far as the pages show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.untrusted import open_inside, read_json

RECIPE_FILE = "recipe.json"
_MAX_BYTES = 10 << 20
_RENDERER = "renderer."


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFacts:
    """Of a run's `recipe.json`; None for what it does not say."""

    name: str | None
    model: str | None
    renderer: Mapping[str, Any] = field(default_factory=dict)
    """Its settings `[renderer]`, by their names."""


def read_recipe(folder: Path) -> RecipeFacts:
    """Read the recipe of a run in its folder; one that is missing or damaged says nothing."""
    try:
        with open_inside(folder, RECIPE_FILE) as file:
            value = read_json(file.read(_MAX_BYTES), max_bytes=_MAX_BYTES)
    except (OSError, InvalidInputError):
        value = None
    recipe = value if isinstance(value, dict) else {}
    settings = recipe.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    return RecipeFacts(
        name=_to_text(recipe.get("recipe")),
        model=_to_text(settings.get("model")),
        renderer={
            name.removeprefix(_RENDERER): value for name, value in settings.items() if name.startswith(_RENDERER)
        },
    )


def _to_text(value: object) -> str | None:
    return value if isinstance(value, str) else None
