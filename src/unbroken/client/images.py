"""Images of requests: each file is sent once, and then named by its hash."""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from unbroken.errors import InvalidInputError
from unbroken.images.decoder import ImageLimits
from unbroken.images.loader import ImageLoader, find_image_parts
from unbroken.messages import get_image_source
from unbroken.types import EncodedImage, ImageSpan

Files: TypeAlias = Mapping[str, EncodedImage]
"""Images by their SHA-256."""

_REFERENCES = ("sha256:", "http://", "https://")
"""Prefixes of texts that name an image for the server to look up or fetch."""
_MAX_KNOWN = 16384
_MAX_CONCURRENT = 8
# The server checks the limits.
_LOADER = ImageLoader(limits=ImageLimits(max_bytes=2**31, max_pixels=2**40))


class SentImages:
    """The last 16384 images sent to a server, which may have dropped some of them."""

    def __init__(self, upload: Callable[[EncodedImage], Awaitable[None]]) -> None:
        self._upload = upload
        self._known: OrderedDict[str, None] = OrderedDict()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def send(self, files: Files) -> None:
        """Send the images that were not sent before. Concurrent calls send an image once."""
        missing = [image for image in files.values() if image.sha256 not in self._known]
        try:
            async with asyncio.TaskGroup() as group:
                for image in missing:
                    group.create_task(self._send_once(image))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        for sha256 in files:
            self._remember(sha256)

    def forget(self, files: Files) -> None:
        """Forget images, so that they are sent again: the server has dropped some of them."""
        for sha256 in files:
            self._known.pop(sha256, None)

    async def _send_once(self, image: EncodedImage) -> None:
        lock = self._locks.setdefault(image.sha256, asyncio.Lock())
        async with lock, self._slots:
            if image.sha256 not in self._known:
                await self._upload(image)
                self._remember(image.sha256)

    def _remember(self, sha256: str) -> None:
        self._known[sha256] = None
        self._known.move_to_end(sha256)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestImages:
    """The images of each prompt of a request."""

    by_prompt: tuple[tuple[str | EncodedImage | ImageSpan, ...] | None, ...]
    """Texts are references or URLs. Without an image a placeholder is an error (None) or text (empty)."""
    files: Files = field(init=False)

    def __post_init__(self) -> None:
        held = [item.image if isinstance(item, ImageSpan) else item for own in self.by_prompt for item in own or ()]
        object.__setattr__(self, "files", {one.sha256: one for one in held if isinstance(one, EncodedImage)})

    def body(self, *, inline: bool) -> list[list[Any] | None]:
        """The field `images`, with the files (`inline`) or their hashes."""
        return [None if own is None else [_encode(item, inline=inline) for item in own] for own in self.by_prompt]

    def names(self, index: int) -> list[str | None]:
        """The SHA-256 of each image of a prompt; None for a URL."""
        return [_find_sha256(item) for item in self.by_prompt[index] or ()]


async def read_images(given: Sequence[Any] | None, num_prompts: int) -> RequestImages:
    """Read the argument `images`: for each prompt None, one image, or a sequence of images or spans.

    Raises:
        InvalidInputError: there is not one entry per prompt.
        ImageError: an image cannot be read; the message names its place.
    """
    if given is None:
        return RequestImages(by_prompt=(None,) * num_prompts)
    if len(given) != num_prompts:
        raise InvalidInputError(
            f"images must have one entry per prompt (None for no image): got {len(given)} for {num_prompts} prompts"
        )
    listed = [None if own is None else _to_tuple(own) for own in given]
    if all(isinstance(item, (EncodedImage, ImageSpan)) for own in listed for item in own or ()):
        return RequestImages(by_prompt=tuple(listed))
    names = [f"images[{index}]" for index in range(num_prompts)]
    return await asyncio.to_thread(lambda: RequestImages(by_prompt=tuple(map(_read_all, listed, names))))


def _to_tuple(own: Any) -> tuple[Any, ...]:
    """The images of one prompt, which may be one image."""
    return tuple(own) if isinstance(own, (list, tuple)) else (own,)


def _read_all(given: Sequence[Any] | None, name: str) -> tuple[str | EncodedImage | ImageSpan, ...] | None:
    """Read the images of one prompt; spans have theirs."""
    if given is None:
        return None
    numbered = enumerate(given)
    return tuple(item if isinstance(item, ImageSpan) else _read(item, f"{name}[{k}]") for k, item in numbered)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageImages:
    """Messages whose images have been read."""

    messages: Sequence[Mapping[str, Any]]
    parts: Mapping[int, str | EncodedImage]
    """The image of each message part, by `id(part)`; texts are references or URLs."""

    @property
    def files(self) -> Files:
        """The image files by hash."""
        return {one.sha256: one for one in self.parts.values() if isinstance(one, EncodedImage)}

    def body(self, *, inline: bool) -> list[dict[str, Any]]:
        """The messages, with the files (`inline`) or their hashes."""
        return [
            {**message, "content": [self._part(part, inline=inline) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else dict(message)
            for message in self.messages
        ]

    def _part(self, part: Any, *, inline: bool) -> Any:
        if id(part) not in self.parts:
            return part
        image = _encode(self.parts[id(part)], inline=inline)
        return {"type": part["type"], part["type"]: {"url": image} if part["type"] == "image_url" else image}


async def read_messages(messages: Sequence[Mapping[str, Any]]) -> _MessageImages:
    """Read the images in messages. Raises `ImageError`, with the place of an image that cannot be read."""
    parts = find_image_parts(messages)
    if not parts:
        return _MessageImages(messages=messages, parts={})

    def read() -> _MessageImages:
        read_parts = {id(part): _read(get_image_source(part), place) for place, part in parts}
        return _MessageImages(messages=messages, parts=read_parts)

    return await asyncio.to_thread(read)


def _read(source: Any, name: str) -> str | EncodedImage:
    if isinstance(source, str) and source.startswith(_REFERENCES):
        return source
    return _LOADER.load(source, name=name)


def _encode(item: str | EncodedImage | ImageSpan, *, inline: bool) -> Any:
    if isinstance(item, str):
        return item
    if isinstance(item, EncodedImage):
        return base64.b64encode(item.data).decode() if inline else f"sha256:{item.sha256}"
    span = {
        "offset": item.offset,
        "length": item.length,
        "sha256": item.sha256,
        "placeholder_id": item.placeholder_id,
        "settings": item.settings,
    }
    return {**span, "data": base64.b64encode(item.image.data).decode()} if inline else span


def _find_sha256(item: str | EncodedImage | ImageSpan) -> str | None:
    if isinstance(item, str):
        return item.removeprefix("sha256:") if item.startswith("sha256:") else None
    return item.sha256
