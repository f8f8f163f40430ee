"""Where the ids of a run have their text from. Nothing is downloaded."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.rendering.encoding.token_texts import TokenTexts
from unbroken.retokenising.texts import TemplateTexts
from unbroken.viewer.sources.recipe import read_recipe
from unbroken.viewer.sources.retokenised import load_template_texts

_FILE = "tokenizer.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_MAX_TEMPLATES = 8
"""Templates with other options that are kept in memory."""
_WRITTEN = ("final", "best", "model")
"""Folders of a run with the models that it wrote."""


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
        self._templates: OrderedDict[tuple[Path, str], TemplateTexts | None] = OrderedDict()
        """By file and settings of the renderer."""
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
    ) -> TemplateTexts | None:
        """The tokenizer and chat template of such a model, from the folder of its tokenizer; None without both.

        The template gets the variables of the run's config, and `template_options` before them.
        """
        file = self._chosen_file or self._find_file(models)
        if file is None:
            return None
        renderer = {} if self._run is None else dict(read_recipe(self._run).renderer)
        renderer["template_kwargs"] = {**(renderer.get("template_kwargs") or {}), **(template_options or {})}
        key = (file, json.dumps(renderer, sort_keys=True, default=str))
        with self._lock:
            if key not in self._templates:
                self._templates[key] = load_template_texts(file.parent, renderer)
                while len(self._templates) > _MAX_TEMPLATES:
                    self._templates.popitem(last=False)
            return self._templates[key]

    def _find_file(self, models: Sequence[str]) -> Path | None:
        return next((file for file in self._list_files(models) if file.is_file()), None)

    def _list_files(self, models: Sequence[str]) -> Iterator[Path]:
        for model in models:
            yield Path(model) / _FILE
        if self._run is not None:
            for part in _WRITTEN:
                yield self._run / part / _FILE
        for model in filter(_HUB_NAME.fullmatch, models):
            from huggingface_hub import try_to_load_from_cache

            with suppress(ValueError):  # it is no name of the hub, such as `my--model`
                cached = try_to_load_from_cache(model, _FILE)
                if isinstance(cached, str):
                    yield Path(cached)
