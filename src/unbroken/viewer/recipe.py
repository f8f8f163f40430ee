"""What a run was started with, as far as the pages show it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RECIPE_FILE = "recipe.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFacts:
    """Of a run's `recipe.json`; None for what it does not say."""

    name: str | None
    model: str | None


def read_recipe(folder: Path) -> RecipeFacts:
    """Read the recipe of a run in its folder; one that is missing or damaged says nothing."""
    try:
        value = json.loads((folder / RECIPE_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        value = None
    recipe = value if isinstance(value, dict) else {}
    settings = recipe.get("settings")
    model = settings.get("model") if isinstance(settings, dict) else None
    return RecipeFacts(name=_to_text(recipe.get("recipe")), model=_to_text(model))


def _to_text(value: object) -> str | None:
    return value if isinstance(value, str) else None
