"""Prompts from a file or the hub, loaded with the `datasets` library."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError, MessagesError
from unbroken.images.loader import find_image_parts
from unbroken.images.processor import ImageInputs
from unbroken.messages import Message, check_conversation, copy_containers
from unbroken.rendering.base import Renderer
from unbroken.rollout.seeds import EpochOrder
from unbroken.rollout.tools import Tool
from unbroken.runs.prompts.images import ImageSource, UndecodedRows, count_features, identify, place_images
from unbroken.runs.python_files import GIVEN, get_given

_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_COMPRESSED = ".gz"
_SAVED = "a folder of save_to_disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data set with the prompts."""

    file: Path | tuple[Path, ...] | None = None
    """A file with a row for each prompt: .jsonl, .json, .parquet or .csv, also compressed, such as .jsonl.gz; a list of
    such files in one format; or a folder that `save_to_disk` of `datasets` wrote."""
    hub: str | None = None
    """Instead of a file: the name of a data set on the hub, such as openai/gsm8k."""
    subset: str | None = None
    """The subset, if the data set on the hub has several."""
    split: str = "train"
    """The split, or a part of it such as train[:1000]."""
    prompt: str = "prompt"
    """The column with the prompts: text, or messages, which may be written as JSON."""
    images: str | None = None
    """The column with the images of each prompt: one or a list, each a picture, a file's bytes, a path (relative to
    the folder with the file, or that with all files), a data URL or base64. Prompts that are messages may have their
    images inside instead."""
    tools: str | None = None
    """The column with the names of the tools that each prompt may use, null for none; if left out, all tools."""
    system: str | None = None
    """A system message for prompts that are text."""
    shuffle: bool = True
    """Whether each epoch has its own random order; otherwise every epoch has the order of the rows."""

    def __post_init__(self) -> None:
        if (self.file is None) == (self.hub is None):
            raise InvalidInputError(f"exactly one of file and hub must be given, got file={self.file}, hub={self.hub}")
        names = ", ".join(map(str, self.files))
        loaders = {_find_loader(file) for file in self.files}
        if self.hub is None and (None in loaders or not loaders):
            raise InvalidInputError(
                f"file must be one of {', '.join(_LOADERS)}, each also with {_COMPRESSED}, or {_SAVED}, got "
                f"{names or 'an empty list'}"
            )
        if len(loaders) > 1 or (_SAVED in loaders and len(self.files) > 1):
            raise InvalidInputError(f"file must be a list of files in one format, or a single folder, got {names}")

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, or the one folder; empty for a data set on the hub."""
        return self.file if isinstance(self.file, tuple) else () if self.file is None else (self.file,)

    @property
    def name(self) -> str:
        """Its files or its name on the hub, as errors show them."""
        return str(self.hub or ", ".join(map(str, self.files)))

    @property
    def loader(self) -> str | None:
        """The loader of `datasets` for its files; None for a data set on the hub."""
        return _find_loader(self.files[0]) if self.files else None

    @property
    def fills_keys(self) -> bool:
        """Whether objects have keys, with null, only because the same object of another row has them.

        Files in Arrow's types have one list of keys for a whole column. JSON lines do not since `datasets` 4.8, whose
        type `Json` keeps each object as it is: a null in them is the author's. Of several files, the first one's types
        are those of all.
        """
        import datasets

        keeps_json = hasattr(datasets, "Json")
        return not (keeps_json and self.loader == "json" and len(self.files) == 1)


_NUM_CACHED = 16
"""Rows whose messages are kept: the siblings of a group ask for the same ones."""


class Rows:
    """The rows of a data set, all checked when they are loaded: of images the header, of their paths that there is a
    file.
    """

    def __init__(self, config: DataConfig, *, seed: int) -> None:
        """Load and check the rows.

        Raises:
            InvalidInputError: there is no such data set, it is empty, or it lacks a column.
            MessagesError: the prompt of a row is neither text nor messages, or has not as many places as images.
            ImageError: an image of a row is broken or not there.
        """
        self.name = config.name
        self._config = config
        self._rows = load_data(config, field="data.hub")
        self._stored = self._rows.with_format("arrow")
        self.columns = tuple(self._rows.column_names)
        folders = [file.resolve().parent for file in config.files]
        self._folder = Path(os.path.commonpath(folders)) if folders else None
        for field, column in (("prompt", config.prompt), ("images", config.images), ("tools", config.tools)):
            if column is not None and column not in self.columns:
                raise InvalidInputError(
                    f"{self.name} must have the column {column!r}, which {field} names: its columns are "
                    f"{', '.join(self.columns)}"
                )
        read = [each for each in (config.prompt, config.images) if each]
        self._undecoded = UndecodedRows(self._rows, read, fills_keys=config.fills_keys)
        prompts, columns = hashlib.sha256(), hashlib.sha256()
        self.has_images = False
        """Whether a prompt has images."""
        for number, (row, cells) in enumerate(zip(self._undecoded, self._iterate_other_columns(), strict=True)):
            messages = self._make_messages(number, row)
            prompts.update(_to_stable_json(row[config.prompt]))
            for source in _find_image_sources(messages):
                self.has_images = True
                prompts.update(identify(source).encode())
            columns.update(_to_stable_json(cells))
        names = f"the prompts {prompts.hexdigest()[:16]} and the other columns {columns.hexdigest()[:16]}"
        self.source = f"{len(self)} rows with {names}"
        self._order = EpochOrder(len(self), seed=seed, shuffle=config.shuffle)
        self._messages = functools.lru_cache(maxsize=_NUM_CACHED)(
            lambda index: self._make_messages(index, self._undecoded[index])
        )

    def _iterate_other_columns(self) -> Iterator[dict[str, Any]]:
        """The cells of each row that belong to no prompt, as they are stored."""
        others = [name for name in self.columns if name not in (self._config.prompt, self._config.images)]
        if not others:
            return iter([{}] * len(self))
        batches = self._stored.select_columns(others).iter(batch_size=64)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        return ({name: _without_folder(cell) for name, cell in row.items()} for row in rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def prompt_column(self) -> str:
        """The column with the prompts."""
        return self._config.prompt

    def index(self, number: int) -> int:
        """The index in the data set of row `number` of the run."""
        return self._order.index(number)

    def row(self, number: int) -> Mapping[str, Any]:
        """All columns of row `number` of the run, as `datasets` gives them: an `Image` is decoded."""
        cells: dict[str, Any] = self._rows[self.index(number)]
        found = {column: self._undecoded.drop_filled_keys(column, cell) for column, cell in cells.items()}
        return {**found, self.prompt_column: read_prompt(found[self.prompt_column])}

    def describe(self, number: int) -> dict[str, Any]:
        """Row `number` of the run as rollout files keep it."""
        index = self.index(number)
        cells = self._stored[index].to_pylist()[0]
        return describe_row(index, {name: self._undecoded.drop_filled_keys(name, cells[name]) for name in cells})

    def messages(self, number: int) -> list[Message]:
        """The prompt of row `number` of the run as messages; images are an `EncodedImage` or the path of a file."""
        return copy_containers(self._messages(self.index(number)))

    def check_tools(self, known: Collection[str]) -> None:
        """Raise `InvalidInputError` if a row's tools are not a list of known names, or null for none."""
        if self._config.tools is None:
            return
        for number, names in enumerate(self._rows[self._config.tools]):
            if names is None:
                continue
            if not isinstance(names, list) or not all(isinstance(name, str) and name in known for name in names):
                raise InvalidInputError(
                    f"{self.name}, row {number}, column {self._config.tools!r} must be a list of names of tools, got "
                    f"{names!r}: the tools are {', '.join(known) or 'not given'}"
                )

    def check_prompts(
        self, tools: Sequence[Tool], renderer: Renderer, context_length: int, images: ImageInputs | None = None
    ) -> None:
        """Raise `InvalidInputError` with the rows whose prompts leave no room in the context.

        An id spells at least a byte, so only prompts of that many bytes are tokenised, together with the ids of their
        images as far as headers tell them: decoding all images would take minutes.
        """
        too_long: dict[int, int] = {}
        num_around: int | None = None  # ids of the template, and more: those of the first prompt
        for index, row in enumerate(self._undecoded):
            messages = self._make_messages(index, row)
            names = self._find_tools(self._rows[index])
            schemas = [tool.schema for tool in tools if names is None or tool.name in names]
            text = json.dumps([messages, schemas], ensure_ascii=False, default=lambda _: "")  # without images
            sources = _find_image_sources(messages)
            estimate = len(text.encode(errors="replace")) + count_features(sources, images) + (num_around or 0)
            if estimate < context_length and (sources or num_around is not None):
                continue
            length = len(renderer.render(messages, tools=schemas).token_ids)
            if length >= context_length:
                too_long[index] = length
            elif num_around is None and not sources:
                num_around = length
        if too_long:
            shown = ", ".join(f"{index} ({length} tokens)" for index, length in itertools.islice(too_long.items(), 10))
            more = f" and {len(too_long) - 10} more" if len(too_long) > 10 else ""
            raise InvalidInputError(
                f"{self.name} must have prompts shorter than the context of {context_length} tokens, and these rows "
                f"are too long: {shown}{more}. Leave them out, or take a longer context"
            )

    def tools(self, number: int) -> list[str] | None:
        """The names of the tools of row `number` of the run; None: all tools."""
        return self._find_tools(self.row(number))

    def _find_tools(self, row: Mapping[str, Any]) -> list[str] | None:
        """The names in the column of tools, in which null means none; None without such a column: all tools."""
        return None if self._config.tools is None else row[self._config.tools] or []

    def _make_messages(self, index: int, row: Mapping[str, Any]) -> list[Message]:
        """Check the prompt of a row, and make its messages with their images."""
        prompt = read_prompt(row[self._config.prompt])
        place = f"{self.name}, row {index}, column {self._config.prompt!r}"
        messages: list[Any]
        if isinstance(prompt, str) and prompt.strip():
            system = [] if self._config.system is None else [{"role": "system", "content": self._config.system}]
            messages = [*system, {"role": "user", "content": prompt}]
        elif isinstance(prompt, str) or not isinstance(prompt, list):
            raise MessagesError(f"{place} must be text or messages, got {prompt!r}")
        else:
            messages = read_messages(prompt, place=place)
        images = None if self._config.images is None else row[self._config.images]
        placed = place_images(messages, images, folder=self._folder, place=place)
        try:
            check_conversation(placed)
        except MessagesError as error:
            raise MessagesError(f"{place} must be text or messages: {error}") from None
        return placed


def load_data(config: DataConfig, *, field: str) -> Any:
    """Load the rows of a data set as a `datasets.Dataset`; `field` is the setting that names what `fit` was given.

    Raises:
        InvalidInputError: there is no such data set, or it is empty.
    """
    if config.name.startswith(GIVEN):
        return get_given(config.name, field=field)
    for file in config.files:
        if not file.exists():
            raise InvalidInputError(f"the data set {config.name} cannot be loaded: there is no such file as {file}")
        if file.stat().st_size == 0:
            raise InvalidInputError(f"{file} must have at least one row, but the file is empty")
    import datasets
    from datasets.exceptions import DatasetGenerationError

    try:
        if config.hub is not None:
            return datasets.load_dataset(config.hub, config.subset, split=config.split)
        if config.loader == _SAVED:
            return _load_saved(config.files[0], config.split)
        files = [str(file.resolve()) for file in config.files]
        return datasets.load_dataset(config.loader, data_files=files, split=config.split)
    except (DatasetGenerationError, OSError, ConnectionError) as error:
        cause = error.__cause__ or error
        raise InvalidInputError(
            f"the data set {config.name} cannot be loaded: {type(cause).__name__}: {cause}"
        ) from error
    except ValueError as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"the data set {config.name} cannot be loaded: {error}") from error


def _load_saved(folder: Path, split: str) -> Any:
    """The split, or the part of it, of a folder of `save_to_disk`; a data set without splits is `train`, as a file is.

    `load_dataset`, which knows parts of splits, refuses such a folder.
    """
    import datasets

    saved = datasets.load_from_disk(str(folder)).with_format(None)  # a format such as torch is saved too
    splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    chosen = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    found = datasets.concatenate_datasets(
        [splits[each.splitname].select(range(each.from_, each.to)) for each in chosen]
    )
    if not len(found):
        raise ValueError(f'Instruction "{split}" corresponds to no data!')
    return found


def _without_folder(cell: Any) -> Any:
    """A cell without the folder of its file, if it is an image or another file: it may be in the user's cache."""
    is_file = isinstance(cell, dict) and cell.keys() == {"bytes", "path"} and cell["path"]
    return {**cell, "path": Path(cell["path"]).name} if is_file else cell


def _to_stable_json(value: Any) -> bytes:
    """Bytes that are the same for an equal value in every process and on every machine."""

    def convert(inner: Any) -> str:
        return hashlib.sha256(inner).hexdigest() if isinstance(inner, bytes) else f"{type(inner).__name__} {inner}"

    return json.dumps(value, sort_keys=True, default=convert).encode()


def read_prompt(cell: Any) -> Any:
    """The prompt of a cell, which has messages as they are or, where a column holds text alone, as JSON.

    A CSV file's `[{"role": "user", "content": "1?"}]` became one user message with all of these characters.
    """
    if not isinstance(cell, str) or not cell.lstrip().startswith("["):
        return cell
    try:
        found = json.loads(cell)
    except ValueError:
        return cell
    is_messages = found and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in found)
    return found if is_messages else cell


def _find_loader(file: Path) -> str | None:
    """The loader of `datasets` for a file, which may be compressed: `prompts.jsonl.gz`; `_SAVED` for a folder."""
    if file.is_dir():
        return _SAVED
    return _LOADERS.get(Path(file.stem).suffix if file.suffix == _COMPRESSED else file.suffix)


def describe_row(index: int, cells: Mapping[str, Any]) -> dict[str, Any]:
    """A row as rollout files keep it: `index`, and as `columns` those of its cells that JSON can hold."""
    columns = {}
    for name, cell in cells.items():
        with suppress(TypeError, ValueError):  # bytes of an image, a date, an object
            columns[name] = json.loads(json.dumps(cell))
    return {"index": index, "columns": columns}


def read_messages(cell: Sequence[Any], *, place: str) -> list[Message]:
    """The messages of a cell, without the keys that they have only because others have them; `place` is for errors."""
    return [_drop_missing_keys(message, number, place) for number, message in enumerate(cell)]


def _drop_missing_keys(message: Any, number: int, place: str) -> Message:
    """Remove the keys that a message got only because other messages in its column have them."""
    if not isinstance(message, Mapping):
        raise MessagesError(
            f"{place} must be text or a list of messages, which are objects with a role and content: "
            f"messages[{number}] is {message!r}"
        )
    found: Message = {key: value for key, value in message.items() if value is not None or key == "content"}  # type: ignore[assignment]
    return found


def _find_image_sources(messages: Sequence[Message]) -> list[ImageSource]:
    """The images of messages that `place_images` made, in order."""
    return [part["image"] for _, part in find_image_parts(messages)]
