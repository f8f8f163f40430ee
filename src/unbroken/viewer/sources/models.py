"""The model of a run: what its recipe says, and where its ids have their text from. Nothing is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.rendering.encoding.text_codec import TokenTexts
from unbroken.runs.diagnosis.evidence import read_object
from unbroken.runs.folder import RECIPE_FILE
from unbroken.untrusted import MAX_TOKENIZER_BYTES
from unbroken.viewer.sources.retokenised import TemplateSource

_RENDERER = "renderer."
_FILE = "tokenizer.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WRITTEN = ("final", "best", "model")
"""Folders of a run with the models that it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecipeFacts:
    """Of a run's `recipe.json`; None for what it does not say."""

    name: str | None
    model: str | None
    renderer: Mapping[str, Any] = field(default_factory=dict)
    """Its settings `[renderer]`, by their names."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All, by their dotted names."""


def read_recipe(folder: Path) -> _RecipeFacts:
    """Read the recipe of a run in its folder; one that is missing or damaged says nothing."""
    recipe = read_object(folder, RECIPE_FILE) or {}
    settings = recipe.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    name, model = (each if isinstance(each, str) else None for each in (recipe.get("recipe"), settings.get("model")))
    renderer = {key.removeprefix(_RENDERER): each for key, each in settings.items() if key.startswith(_RENDERER)}
    return _RecipeFacts(name=name, model=model, settings=settings, renderer=renderer)


class Tokenizers:
    """Finds the texts of models' ids: in a model's folder, in those that a run wrote, in the hub's cache."""

    def __init__(self, chosen: Path | None, *, run: Path | None) -> None:
        """Take `chosen`, a `tokenizer.json` or a folder with one, for all models; else look also in the folder `run`.

        Raises:
            InvalidInputError: `chosen` is no tokenizer.
        """
        self._chosen_file = chosen / _FILE if chosen is not None and chosen.is_dir() else chosen
        self._chosen = None if self._chosen_file is None else TokenTexts.load(self._chosen_file)
        self._run = run
        self._found: dict[tuple[str, ...], TokenTexts | None] = {}
        self._lock = Lock()

    def find(self, models: Sequence[str]) -> TokenTexts | None:
        """The texts of the ids of a model of several names; None if its tokenizer is not on this machine."""
        if self._chosen is not None:
            return self._chosen
        key = tuple(models)
        with self._lock:
            if key not in self._found:
                file = self._find_file(key)
                try:
                    self._found[key] = None if file is None else TokenTexts.load(file)
                except InvalidInputError:
                    self._found[key] = None
            return self._found[key]

    def find_template(
        self, models: Sequence[str], *, template_options: Mapping[str, Any] | None = None
    ) -> TemplateSource | None:
        """The folder of such a model's tokenizer and chat template; None if it is not on this machine.

        The template gets the variables of the run's config, and `template_options` before them.
        """
        file = self._chosen_file or self._find_file(models)
        if file is None:
            return None
        renderer = {} if self._run is None else dict(read_recipe(self._run).renderer)
        variables = renderer.get("template_kwargs")
        renderer["template_kwargs"] = {**(variables if isinstance(variables, dict) else {}), **(template_options or {})}
        return TemplateSource(folder=file.parent, renderer=json.dumps(renderer, sort_keys=True, default=str))

    def _find_file(self, models: Sequence[str]) -> Path | None:
        return next((file for file in self._list_files(models) if _is_usable(file)), None)

    def _list_files(self, models: Sequence[str]) -> Iterator[Path]:
        """Files named `tokenizer.json`.

        What a run names may be a folder that came with it, so no file in it may be a link.
        """
        named = [Path(model) for model in models]
        if self._run is not None:
            named += [self._run / part for part in _WRITTEN]
        yield from (folder / _FILE for folder in named if not _has_links(folder, self._run))
        for model in filter(_HUB_NAME.fullmatch, models):
            from huggingface_hub import try_to_load_from_cache

            with suppress(ValueError):  # it is no name of the hub, such as `my--model`
                cached = try_to_load_from_cache(model, _FILE)
                if isinstance(cached, str):
                    yield Path(cached)


def _is_usable(file: Path) -> bool:
    try:
        return file.is_file() and file.stat().st_size <= MAX_TOKENIZER_BYTES
    except (OSError, ValueError):  # a name that no file can have
        return False


def _has_links(folder: Path, run: Path | None) -> bool:
    """Whether a folder has links, or came with the run and is one: they could lead to any file of this machine.

    A folder elsewhere may be a link: who named it could as well have named the folder that it leads to.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        if folder.absolute().is_relative_to(HF_HUB_CACHE):  # all its files are links into itself
            return False
        came_with_it = run is not None and folder.absolute().is_relative_to(run.absolute())
        if folder.is_symlink() and came_with_it:
            return True
        return any(path.is_symlink() for path in folder.resolve().rglob("*"))
    except (OSError, ValueError):
        return True
