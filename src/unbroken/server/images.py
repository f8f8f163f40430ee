"""The images of requests, from bodies into prompts.

    body      "images": [["sha256:9f86...", "iVBORw0..."], null]     prompts [[11, 90, 12, 90], [13]]
    loaded    two files by hash, checked against the limits and kept for later requests
    placed    RequestPrompt([11, 90, 90, 12, 90, 90, 90], two spans), RequestPrompt([13])

Images are read, decoded and processed in separate threads, so that requests with text only never wait for them.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import httpx
import numpy as np

from unbroken.errors import ContextOverflowError, ImageError
from unbroken.images.decoder import ImageLimits, check_image, decode_image
from unbroken.images.loader import ImageLoader, find_image_parts
from unbroken.images.lru_cache import LruCache
from unbroken.images.placeholders import expand_placeholders
from unbroken.images.processor import ImageInputs
from unbroken.server.concurrency import run_all
from unbroken.server.http.errors import HttpError, shorten
from unbroken.types import EncodedImage, ImageSpan, TokenIds, encode_image_settings

_T = TypeVar("_T")
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPrompt:
    """The engine's input: expanded ids and the images in them."""

    token_ids: TokenIds
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSpan:
    """An image that the client has expanded and placed: its ids are in the prompt already."""

    offset: int
    length: int
    sha256: str
    source: Any
    placeholder_id: int | None
    settings: str


class ImageStore:
    """Image files by SHA-256, up to a total of bytes; the least recently used are dropped. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._images: LruCache[str, EncodedImage] = LruCache(max_bytes, lambda image: len(image.data))

    def put(self, image: EncodedImage) -> None:
        """Keep an image, unless it alone is larger than the limit."""
        self._images.put(image.sha256, image)

    def get(self, sha256: str) -> EncodedImage | None:
        """The image with this hash, if it is still kept."""
        return self._images.get(sha256)

    @property
    def num_bytes(self) -> int:
        """Total size of the files."""
        return self._images.size


class _PixelCount:
    """The pixels of one request's images, by their headers, before any is decoded: a few kB may be 64 million."""

    def __init__(self, limits: ImageLimits) -> None:
        self._max_pixels = math.inf if limits.budget is None else limits.budget.max_pixels
        self._known: set[str] = set()
        self._total = 0

    def add(self, image: EncodedImage, size: tuple[int, int], name: str) -> None:
        """Count an image, if it is none of those before; `ImageError` if they are too many pixels together."""
        self._total += 0 if image.sha256 in self._known else size[0] * size[1]
        self._known.add(image.sha256)
        if self._total > self._max_pixels:
            raise ImageError(
                f"{name} must leave the images of a request at {self._max_pixels} pixels or fewer in all "
                f"(image_memory_mib, 4 bytes a pixel), got {self._total} in {len(self._known)}: send several requests"
            )


class ImageIntake:
    """Loads and places the images of requests. Without `inputs` all are refused, because of `no_images_because`."""

    def __init__(
        self,
        inputs: ImageInputs | None,
        store: ImageStore,
        *,
        max_images: int,
        context_length: int,
        no_images_because: str = "its model takes text only",
    ) -> None:
        self._inputs = inputs
        self._no_images_because = no_images_because
        self._store = store
        self._max_images = max_images
        self._context_length = context_length
        self._threads: ThreadPoolExecutor | None = None

    @property
    def _limits(self) -> ImageLimits:
        return ImageLimits() if self._inputs is None else self._inputs.loader.limits

    @property
    def takes_images(self) -> bool:
        """Whether the server has an image processor."""
        return self._inputs is not None

    @property
    def processor_settings(self) -> dict[str, Any] | None:
        """What decides about the ids and the pixels of an image (`ImageProcessor.description`)."""
        return None if self._inputs is None else json.loads(self._inputs.processor.description)

    @property
    def placeholder_id(self) -> int | None:
        """The id that stands for an image, if the server takes images."""
        return None if self._inputs is None else self._inputs.processor.placeholder_id

    def encode_settings(self, given: Mapping[str, Any] | None, *, name: str = "mm_processor_kwargs") -> str:
        """Encode a request's `mm_processor_kwargs` as in `ImageSpan`; None means the server's own settings.

        `name` is the field's name in errors.

        Raises `ImageError` for a name that is not allowed or a size that is too large.
        """
        if self._inputs is None:
            if given:
                raise ImageError(f"{name} must be left out, got {shorten(given)}: this server takes no images")
            return "{}"
        if given is None:
            return self._inputs.settings
        known, limits = self._inputs.processor.setting_names, self._inputs.loader.limits
        _check_settings(given, known=known, max_pixels=limits.max_pixels, name=name)
        return encode_image_settings(given)

    async def upload(self, data: bytes) -> tuple[EncodedImage, int, int]:
        """Keep an image; returns it with its width and height. Raises `ImageError` if it is damaged or too large."""
        limits = self._require_inputs("the body").loader.limits
        image = EncodedImage(data)

        def measure() -> tuple[int, int]:
            with limits.reserve({"the body": image}):
                return decode_image(image, limits, name="the body").size

        size = await self._run_in_thread(measure)
        self._store.put(image)
        return image, *size

    async def load_messages(
        self, messages: Sequence[Mapping[str, Any]], settings: str, *, places: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Replace references, base64 and URLs in messages by the images' files, and expand these in advance.

        `places` are the fields of the images in the request, in order, where these are others than in `messages`.

        Raises `ImageError`, with the place of an image that cannot be used.
        """
        found = find_image_parts(messages)
        self._check_count(len(found))
        if places is not None:
            found = [(place, part) for place, (_, part) in zip(places, found, strict=True)]
        return await self._load_messages(messages, found, settings, _PixelCount(self._limits))

    async def load_conversations(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], settings: str
    ) -> list[list[dict[str, Any]]]:
        """Load the messages of several conversations, as `load_messages` does."""
        found = [
            [
                (f"messages[{index}]" + place.removeprefix("messages"), part)
                for place, part in find_image_parts(messages)
            ]
            for index, messages in enumerate(conversations)
        ]
        self._check_count(sum(map(len, found)))
        count = _PixelCount(self._limits)
        return await run_all(
            self._load_messages(messages, parts, settings, count)
            for messages, parts in zip(conversations, found, strict=True)
        )

    async def _load_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        parts: Sequence[tuple[str, Mapping[str, Any]]],
        settings: str,
        count: _PixelCount,
    ) -> list[dict[str, Any]]:
        """`parts` are the images of the messages, with their places."""
        if not parts:
            return [dict(message) for message in messages]
        inputs = self._require_inputs(parts[0][0])

        images = await self._run_each(partial(inputs.loader.load_part, part, name=place) for place, part in parts)
        await self._expand(images, [settings] * len(images), [place for place, _ in parts], count)
        loaded = {
            id(part): {"type": part["type"], part["type"]: image}
            for (_, part), image in zip(parts, images, strict=True)
        }
        return [
            {**message, "content": [loaded.get(id(part), part) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else dict(message)
            for message in messages
        ]

    async def place(
        self,
        prompts: Sequence[TokenIds],
        images: Sequence[Sequence[Any] | None],
        settings: str | Sequence[str],
        *,
        names: Callable[[int], str] = "images[{}]".format,
    ) -> list[RequestPrompt]:
        """Expand the images of prompts, in which each image is one placeholder or expanded already.

        `images` has for each prompt, in order, sources in any form that the loader takes, or `ClientSpan`s, which have
        their own settings. With None a placeholder is an image that is missing. With an empty list it is text, as it is
        with spans: the model may have sampled it. `settings` are those of all prompts, or of each. `names` gives the
        field that holds the images of a prompt, by the prompt's index.

        Raises:
            ImageError: an image cannot be used, or images and placeholders do not match; the message names the place.
        """
        self._check_count(sum(len(own or ()) for own in images))
        of_prompts = [settings] * len(prompts) if isinstance(settings, str) else settings
        count = _PixelCount(self._limits)
        calls = [
            partial(self._place, ids, own, chosen, names(index), count)
            for index, (ids, own, chosen) in enumerate(zip(prompts, images, of_prompts, strict=True))
        ]
        return await run_all(call() for call in calls) if any(images) else [await call() for call in calls]

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def _place(
        self, ids: TokenIds, sources: Sequence[Any] | None, settings: str, name: str, count: _PixelCount
    ) -> RequestPrompt:
        if not sources and not self._lacks_images(ids, sources):
            return RequestPrompt(token_ids=ids)
        inputs, sources = self._require_inputs(name), sources or ()
        places = [f"{name}[{k}]" for k in range(len(sources))]
        if spans := [source for source in sources if isinstance(source, ClientSpan)]:
            if len(spans) != len(sources):
                raise ImageError(f"{name} must be all spans or all images, got {len(spans)} spans of {len(sources)}")
            return await self._place_spans(inputs.loader, ids, spans, places, count)
        images = await self._load(inputs.loader, sources, places)
        if images:
            await self._expand(images, [settings] * len(images), places, count)
        placed, found = await self._run_in_thread(
            lambda: expand_placeholders(ids, images, inputs.processor, settings=settings, name=name)
        )
        return RequestPrompt(token_ids=placed, images=found)

    async def _place_spans(
        self, loader: ImageLoader, ids: TokenIds, spans: Sequence[ClientSpan], places: Sequence[str], count: _PixelCount
    ) -> RequestPrompt:
        """A prompt whose images the client has expanded: the ids of each are made again, and compared."""
        images = await self._load(loader, [span.source for span in spans], places)
        await self._expand(images, [span.settings for span in spans], places, count)
        checked = map(partial(self._check_span, ids), spans, images, places)
        return RequestPrompt(token_ids=ids, images=tuple(checked))

    def _lacks_images(self, ids: TokenIds, sources: Sequence[Any] | None) -> bool:
        """Whether a prompt without images has a placeholder of one: an error, unless [] says that it is text."""
        return self._inputs is not None and sources is None and bool(np.any(ids == self.placeholder_id))

    async def _load(self, loader: ImageLoader, sources: Sequence[Any], names: Sequence[str]) -> Sequence[EncodedImage]:
        return await self._run_each(
            partial(loader.load, source, name=name) for source, name in zip(sources, names, strict=True)
        )

    async def _expand(
        self, images: Sequence[EncodedImage], settings: Sequence[str], names: Sequence[str], count: _PixelCount
    ) -> None:
        """Expand the images of one prompt, which caches their ids, and keep their files.

        Their sizes are in the headers: none is decoded if all together are more than the context, or more pixels, with
        those that `count` has of the request, than one may have.
        """
        processor = self._require_inputs(names[0]).processor
        sizes = await self._run_each(
            partial(check_image, image, self._limits, name=name) for image, name in zip(images, names, strict=True)
        )
        for image, size, name in zip(images, sizes, names, strict=True):
            count.add(image, size, name)
        num_ids = sum(processor.count_features(*size, own) for size, own in zip(sizes, settings, strict=True))
        if num_ids >= self._context_length:
            raise ContextOverflowError(num_prompt_tokens=num_ids, context_length=self._context_length)
        await self._run_each(
            partial(processor.expand, image, own, name=name)
            for image, own, name in zip(images, settings, names, strict=True)
        )
        for image in images:
            self._store.put(image)

    def _check_span(self, ids: TokenIds, given: ClientSpan, image: EncodedImage, name: str) -> ImageSpan:
        """Build the client's span, if our processor makes the same ids of the image."""
        processor = self._require_inputs(name).processor
        if given.placeholder_id != processor.placeholder_id:
            raise ImageError(
                f"{name}.placeholder_id must be this model's, {processor.placeholder_id}, got {given.placeholder_id}"
            )
        if given.sha256 != image.sha256:
            raise ImageError(f"{name}.data must be the file that sha256 names, {given.sha256}, got {image.sha256}")
        own = processor.expand(image, given.settings, name=name)
        if given.length != len(own) or not np.array_equal(ids[given.offset : given.offset + given.length], own):
            raise ImageError(
                f"{name} must cover the {len(own)} ids that the image processor makes of it with {given.settings}, got "
                f"{given.length} at {given.offset}, or other ids"
            )
        return ImageSpan(
            offset=given.offset,
            length=given.length,
            image=image,
            placeholder_id=given.placeholder_id,
            settings=given.settings,
        )

    def _check_count(self, count: int) -> None:
        if count > self._max_images:
            raise HttpError(400, f"a request may have at most {self._max_images} images, got {count}", param="images")

    def _require_inputs(self, name: str) -> ImageInputs:
        if self._inputs is None:
            raise ImageError(
                f"{name} must not hold an image: this server takes no images, because {self._no_images_because}"
            )
        return self._inputs

    async def _run_each(self, works: Iterable[Callable[[], _T]]) -> list[_T]:
        return await run_all(self._run_in_thread(work) for work in works)

    async def _run_in_thread(self, work: Callable[[], _T]) -> _T:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="unbroken-images")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


_AREAS = frozenset({"min_pixels", "max_pixels"})
_AREAS_OR_EDGES = frozenset({"shortest_edge", "longest_edge"})
_SIZE_KEYS = _AREAS_OR_EDGES | {"height", "width", "max_height", "max_width"}


def _check_settings(given: Mapping[str, Any], *, known: frozenset[str], max_pixels: int, name: str) -> None:
    """Check `mm_processor_kwargs`: of the processor's `known` arguments, `min_pixels`, `max_pixels` and `size`.

    The others (patch sizes, crops, normalisation) belong to the model: some would turn a small image into gigabytes, or
    into pixels that the model was never trained on. `name` is the field's name in errors.

    Raises `ImageError` for any other name, and for a size that is not a whole number or asks for too many pixels.
    """
    allowed = known & (_AREAS | {"size"})
    if unknown := sorted(set(given) - allowed):
        raise ImageError(f"{name} must be some of {sorted(allowed)}, got {shorten(unknown)}")
    for area in _AREAS & set(given):
        _check_number(f"{name}.{area}", given[area], max_pixels)
    size = given.get("size")
    if size is None:
        return
    if not isinstance(size, Mapping) or not set(size) <= _SIZE_KEYS:
        raise ImageError(f"{name}.size must be an object with some of {sorted(_SIZE_KEYS)}, got {shorten(size)}")
    # Processors with min_pixels and max_pixels expect areas in `size`, under the names of edges.
    areas = _AREAS_OR_EDGES if known >= _AREAS else frozenset[str]()
    for key, value in size.items():
        _check_number(f"{name}.size.{key}", value, max_pixels if key in areas else math.isqrt(max_pixels))


def _check_number(name: str, value: Any, maximum: int) -> None:
    if type(value) is not int or not 1 <= value <= maximum:
        raise ImageError(f"{name} must be a whole number in [1, {maximum}], got {shorten(value)}")


_MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFetcher:
    """Fetches the image behind an http(s) URL, from the hosts that the operator allows; call it in a thread.

    Fetching any URL would let clients reach services in the server's own network. So the URL's host must be allowed,
    together with its port unless that is the scheme's default; redirects are checked, too.
    """

    hosts: tuple[str, ...]
    """`HOST` or `HOST:PORT`, exactly as in the URL, ignoring case."""
    max_bytes: int
    timeout_s: float = 10.0
    """For one image, redirects included."""
    transport: httpx.AsyncBaseTransport | None = None
    """Replaces real connections in tests."""

    def __call__(self, url: str) -> bytes:
        """Fetch the file. Raises `ImageError` if the host is not allowed, or sends no file within the limits."""
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(self._fetch(url))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()  # `asyncio.run` would wait for the thread that looks up the host's name, past the deadline

    async def _fetch(self, url: str) -> bytes:
        # httpx's own time-out begins again with every byte of a header.
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                httpx.AsyncClient(timeout=self.timeout_s, trust_env=False, transport=self.transport) as client,
            ):
                for _ in range(_MAX_REDIRECTS + 1):
                    self._check(url)
                    async with client.stream("GET", url) as response:
                        if not response.has_redirect_location:
                            return await self._read(response, url)
                        url = urljoin(url, response.headers["location"])
        except TimeoutError:
            raise ImageError(f"the image at {shorten(url)} takes longer than {self.timeout_s} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ImageError(
                f"the image at {shorten(url)} cannot be fetched: {type(error).__name__}: {error}"
            ) from None
        raise ImageError(f"the image at {shorten(url)} takes more than {_MAX_REDIRECTS} redirects")

    def _check(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ImageError(f"image URL {shorten(url)} is not a valid URL: {error}") from None
        host = (parts.hostname or "").lower()
        name = host if port in (None, _PORTS.get(parts.scheme)) else f"{host}:{port}"
        if parts.scheme not in _PORTS or "@" in parts.netloc or name not in {one.lower() for one in self.hosts}:
            raise ImageError(
                f"image URLs must be http(s) with a host that this server allows ({', '.join(self.hosts)}), got "
                f"{shorten(url)}: send the image itself"
            )

    async def _read(self, response: httpx.Response, url: str) -> bytes:
        if response.status_code != 200:
            raise ImageError(f"the image at {shorten(url)} cannot be fetched: HTTP {response.status_code}")
        pieces: list[bytes] = []
        size = 0
        async for piece in response.aiter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > self.max_bytes:
                raise ImageError(f"the image at {shorten(url)} has more than {self.max_bytes} bytes")
        return b"".join(pieces)
