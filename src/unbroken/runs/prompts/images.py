"""Images in the prompts of a data set: in the messages themselves, or in another column.

A prompt that is text, and two images in its column: the images come first, as in TRL.

    "Which is larger?"    ["a.png", "b.png"]    [{"type": "image", "image": a}, {"type": "image", "image": b},
                                                 {"type": "text", "text": "Which is larger?"}]

Messages may mark the places of the column's images by parts without an image, `{"type": "image"}`, in order.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from unbroken.errors import ImageError, MessagesError
from unbroken.images.loader import ImageLoader, find_image_parts
from unbroken.images.processor import ImageInputs
from unbroken.messages import Message, get_image_source
from unbroken.types import EncodedImage

ImageSource: TypeAlias = EncodedImage | Path
_MAX_PATH = 4096
_LOADER = ImageLoader()


class UndecodedRows:
    """The rows of a data set with the files of images as they are stored: decoding and encoding would change them."""

    def __init__(self, rows: Any, columns: Sequence[str], *, fills_keys: bool) -> None:
        """`rows` is a `datasets.Dataset`, of which these columns are read.

        With `fills_keys`, a null in an object is a key that only objects of other rows have.
        """
        import datasets

        self._filled = rows.features if fills_keys else {}
        self._rows = rows.select_columns(list(dict.fromkeys(columns))).with_format("arrow")
        self._features = datasets.Features({name: _without_decoding(self._rows.features[name]) for name in columns})

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._decode(self._rows[index].to_pylist()[0])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._rows.iter(batch_size=64):
            yield from map(self._decode, batch.to_pylist())

    def drop_filled_keys(self, column: str, value: Any) -> Any:
        """Remove the keys that messages, calls and tools of a cell have only because those of other rows have them.

        Other objects keep them: a function of the user may expect the null.
        """
        return _drop_filled_keys(value, self._filled[column]) if column in self._filled else value

    def _decode(self, row: dict[str, Any]) -> dict[str, Any]:
        decoded: dict[str, Any] = self._features.decode_example(row)
        return {column: self.drop_filled_keys(column, value) for column, value in decoded.items()}


def place_images(messages: Sequence[Message], images: Any, *, folder: Path | None, place: str) -> list[Message]:
    """Put the images of a row into its messages, each as an `EncodedImage` or the path of a file that exists.

    `images` is the cell of their column: an image, a list of images, or None. Paths are relative to `folder`.

    Raises:
        MessagesError: the places that messages have for images are not as many as the images.
        ImageError: an image has no supported form, or its file is not there.
    """
    listed = [] if images is None else list(images) if isinstance(images, (list, tuple)) else [images]
    placed = _fill(messages, listed, place=place)
    for name, part in find_image_parts(placed):
        source = _read(get_image_source(part), folder, name=f"{place}: {name}")
        part.clear()  # type: ignore[attr-defined]  # of our own copy
        part.update(type="image", image=source)  # type: ignore[attr-defined]
    return placed


def identify(source: ImageSource) -> str:
    """Identify an image by its content, or by the name and size of its file, which is not read for it."""
    return source.sha256 if isinstance(source, EncodedImage) else f"{source.name} {source.stat().st_size}"


def count_features(sources: Sequence[ImageSource], inputs: ImageInputs | None) -> int:
    """Count the ids of images by their headers alone; 0 for those that have no readable one, or depend on more."""
    number = 0
    for source in sources:
        size = _read_size(source)
        number += 0 if inputs is None or size is None else inputs.processor.count_features(*size, inputs.settings)
    return number


def _read_size(source: ImageSource) -> tuple[int, int] | None:
    """Width and height; None for a broken image, which has its error when it is loaded."""
    from PIL import Image

    try:
        with Image.open(source if isinstance(source, Path) else io.BytesIO(source.data)) as file:
            return file.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def _fill(messages: Sequence[Message], images: Sequence[Any], *, place: str) -> list[Message]:
    """Copy the messages, and give the images to the parts that have none, or else to the first user message."""
    copies: list[Any] = [{**message, "content": _copy_parts(message.get("content"))} for message in messages]
    parts: list[Any] = [part for _, part in find_image_parts(copies)]
    empty = [part for part in parts if get_image_source(part) is None]
    new = [{"type": "image", "image": image} for image in images]
    if empty and len(empty) != len(images):
        raise MessagesError(
            f"{place} must have as many images in the column that data.images names as its messages have places for "
            f"them, got {len(images)} and {len(empty)}"
        )
    if empty:
        for part, image in zip(empty, new, strict=True):
            part.update(image, type="image")
    elif new:
        first = next((message for message in copies if message.get("role") == "user"), None)
        if first is None:
            raise MessagesError(f"{place} must have a user message for its {len(images)} images, got none")
        first["content"] = [*new, *_as_parts(first["content"])]
    return copies


def _copy_parts(content: Any) -> Any:
    """Copy the parts of a content, without the keys that a part has only because others have them."""
    if not isinstance(content, list):
        return content
    return [
        {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part
        for part in content
    ]


def _as_parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _read(source: Any, folder: Path | None, *, name: str) -> ImageSource:
    if isinstance(source, str) and len(source) < _MAX_PATH:
        path = source if folder is None else folder / source
        if os.path.isfile(path):  # noqa: PTH113  Path.is_file may raise
            return Path(path)
    try:
        return _LOADER.load(source, name=name)
    except ImageError as error:
        where = "" if folder is None or not isinstance(source, str) else f" (paths are relative to {folder})"
        raise ImageError(f"{error}{where}") from None


_CALL_OR_TOOL = ({"function"}, {"name", "arguments"}, {"name", "parameters"})
"""Keys of which a call or a tool's schema has one set."""


def _drop_filled_keys(value: Any, feature: Any) -> Any:
    """Remove the nulls of messages, calls and tools, at any depth of a value.

    A Parquet file wrote the call `{"a": 2}` as `{"a": 2, "city": null}`, because another row's call had a city: the
    prompt showed the model a call that nobody had made.
    """
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        keys = feature.keys()
        if "role" in keys and ("content" in keys or "tool_calls" in keys):
            # A message without content, such as one of calls alone, has null for it in JSON too.
            empty = {"content": None} if value.get("content", "") is None else {}
            return {**_drop_nulls(value, feature), **empty}
        if any(each <= keys for each in _CALL_OR_TOOL):
            return _drop_nulls(value, feature)
    return _map_inner(_drop_filled_keys, value, feature)


def _drop_nulls(value: Any, feature: Any) -> Any:
    """Remove the nulls of objects that have a fixed list of keys; what `datasets` keeps as JSON stays as it is."""
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        value = {key: inner for key, inner in value.items() if inner is not None}
    return _map_inner(_drop_nulls, value, feature)


def _map_inner(change: Callable[[Any, Any], Any], value: Any, feature: Any) -> Any:
    """The value with what is directly in it changed, each with its own feature."""
    import datasets

    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        return {key: change(inner, feature[key]) for key, inner in value.items()}
    if isinstance(feature, (datasets.List, datasets.LargeList)) and isinstance(value, list):
        return [change(inner, feature.feature) for inner in value]
    return value


def _without_decoding(feature: Any) -> Any:
    """The feature with images as they are stored, `{"bytes": ..., "path": ...}`, at any depth."""
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, Mapping):
        return {key: _without_decoding(inner) for key, inner in feature.items()}
    if isinstance(feature, (datasets.List, datasets.LargeList)):
        return type(feature)(_without_decoding(feature.feature))
    return feature
