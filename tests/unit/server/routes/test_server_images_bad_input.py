"""What a caller can get wrong with images, in every dialect: at once a 4xx with place, rule and value; nothing else
happens, and the next request works.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import struct
import time
import zlib
from typing import Any

import httpx
import pytest

pytest.importorskip("torchvision", reason="the image processors of transformers need it")

from PIL import Image

from support.image_servers import (
    CAT,
    DOG,
    ID,
    data_url,
    expanded,
    image_file,
    in_base64,
    make_vision_app,
    processor,
    saved,
    user_message,
    vision_engine,
)
from support.servers import asgi_client
from support.vision import PAD, picture
from unbroken.images.processor import HfImageProcessor
from unbroken.server.app import make_image_limits
from unbroken.server.config import ServerLimits
from unbroken.types import EncodedImage

MOST_BYTES, MOST_PIXELS, CONTEXT = 100_000, 500_000, 64
NATIVE, TRL, TRL_CHAT, VLLM = "/v1/sample", "/generate/", "/chat/", "/inference/v1/generate"
CHAT, TOKENS, TOKENIZE, RENDER = (
    "/v1/chat/completions", "/v1/chat/completions/tokens", "/tokenize", "/v1/chat/completions/render",
)  # fmt: skip
TEXT, SCORE, TRL_SCORE, UPLOAD = "/v1/completions", "/v1/score", "/get_sequence_logprobs/", "/v1/images"
GOOD = {"prompts": [[ID]], "images": [in_base64(CAT)]}


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises more pixels than a machine has memory for; 100 bytes."""
    return short_png(width, height, rows=0)


def short_png(width: int, height: int, *, rows: int) -> bytes:
    """A PNG of black pixels that ends before its last row."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\x00" * (1 + 3 * width) * rows))
        + chunk(b"IEND", b"")
    )


def frames() -> bytes:
    first, second = (picture(28, 28, seed=k) for k in range(2))
    return saved(first, "GIF", save_all=True, append_images=[second])


SMALL = picture(28, 28)
BAD_SOURCES: dict[str, tuple[Any, str]] = {
    "no base64": ("%%% no base64", "must be base64, got '%%% no base64'"),
    "cut base64": (in_base64(CAT)[:-3], "must be base64"),
    "cut data url": (data_url(CAT)[:-3], "must be base64"),
    "data url of text": ("data:text/plain;base64,aGk=", "must be a data URL data:image/TYPE;base64,..."),
    "no image": (in_base64(b"hello"), "must be an image file (PNG, JPEG, WEBP, BMP, GIF), got 5 bytes"),
    "nothing": ("", "must be an image file"),
    "cut png": (in_base64(cut(CAT.data)), "must be a whole PNG file"),
    "cut jpeg": (in_base64(cut(saved(picture(), "JPEG"))), "must be a whole JPEG file"),
    "pixel bomb": (in_base64(bomb(60_000, 60_000)), f"at most {MOST_PIXELS} pixels, got 3600000000"),
    "little too large": (in_base64(bomb(1000, 501)), f"at most {MOST_PIXELS} pixels, got 1000 x 501"),
    "bytes": (in_base64(b"\x00" * (MOST_BYTES + 1)), f"at most {MOST_BYTES} bytes, got"),
    "missing rows": (in_base64(short_png(28, 28, rows=27)), "must be a whole PNG file"),
    "tiff": (in_base64(saved(SMALL, "TIFF")), "must be one of PNG, JPEG, WEBP, BMP, GIF, got TIFF"),
    "animated": (in_base64(frames()), "must be one picture, got an animated GIF"),
    "too thin": (in_base64(saved(picture(400, 1), "PNG")), "must be one that the model's processor takes"),
    "unknown": (f"sha256:{'0' * 64}", f"must refer to an image that was sent before, got sha256:{'0' * 64}"),
    "no hash": ("sha256:../../etc/passwd", "must refer to an image that was sent before, got sha256:../../etc/passwd"),
    "path": ("/etc/passwd", "must be base64"),
    "file url": ("file:///etc/passwd", "must not be a file, got '/etc/passwd'"),
    "url": ("http://169.254.169.254/latest", "must not be a URL to fetch, got 'http://169.254.169.254/latest'"),
}


def with_image(path: str, source: Any) -> tuple[dict[str, Any], str]:
    """A body whose second image, or second prompt's first, is `source`, and that image's place."""
    message = user_message("a", data_url(CAT), "b", "")
    message["content"][3] = {"type": "image_url", "image_url": {"url": source}}
    match path:
        case "/v1/sample" | "/generate/":
            return {
                "prompts": [[ID], [ID, 5, ID]],
                "images": [in_base64(CAT), [in_base64(DOG), source]],
            }, "images[1][1]"
        case "/v1/score":
            return {"sequences": [[5, 6], [5, ID]], "images": [None, [source]]}, "images[1][0]"
        case "/chat/":
            pil = {"role": "user", "content": [{"type": "image_pil", "image_pil": source}]}
            good = user_message("a", data_url(CAT))
            return {"messages": [[good], [good, pil]]}, "messages[1][1].content[0]"
        case "/inference/v1/generate":
            parts = [{"type": "image_url", "url": data_url(CAT)}, {"type": "image_url", "url": source}]
            return {"token_ids": [ID, 5, ID], "content_parts": parts, "sampling_params": {}}, "content_parts[1]"
        case "/v1/chat/completions/tokens":
            return {"messages": [message], "tokens": [ID, 5, ID]}, "messages[0].content[3]"
        case _:
            return {"messages": [message]}, "messages[0].content[3]"


PATHS = (NATIVE, TRL, SCORE, TRL_CHAT, VLLM, TOKENS, CHAT, RENDER, TOKENIZE)


async def check_refused(path: str, body: Any, *expected: str, app: Any = None, status: int = 400) -> dict[str, Any]:
    """Refused twice, with these words; a good request follows. The error object."""
    engine = vision_engine(context_length=CONTEXT)
    limits = ServerLimits(max_image_bytes=MOST_BYTES, max_image_pixels=MOST_PIXELS, max_images=8)
    async with asgi_client(app or make_vision_app(engine, limits=limits)) as client:
        for _ in range(2):
            start_s = time.monotonic()
            sent = {"content": body} if isinstance(body, bytes) else {"json": body}
            answer = await client.post(path, **sent)
            assert time.monotonic() - start_s < 5
            assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        for words in expected:
            assert words in error["message"]
        assert len(error["message"]) < 1000
        assert engine.requests == []
        assert "unbroken_completions_in_flight 0.0" in (await client.get("/metrics")).text
        good = await client.post(NATIVE, json=GOOD)
        assert good.status_code == 200, good.text
        assert good.json()["results"][0]["image_sha256s"] == [CAT.sha256]
        return error


@pytest.mark.parametrize("case", BAD_SOURCES)
@pytest.mark.parametrize("path", PATHS)
async def test_an_image_that_cannot_be_used_is_named_by_its_place(path: str, case: str) -> None:
    source, expected = BAD_SOURCES[case]
    body, place = with_image(path, source)
    if source == "" and path in (CHAT, RENDER, TOKENIZE, TOKENS, TRL_CHAT):
        expected = ""  # an empty URL is no image file either, in other words
    error = await check_refused(path, body, place, expected)
    assert error["code"] == ("unknown_image" if "was sent before" in expected else "invalid_image")


@pytest.mark.parametrize(
    "case",
    ["no image", "nothing", "cut png", "cut jpeg", "pixel bomb", "little too large", "bytes", "missing rows", "tiff",
     "animated"],
)  # fmt: skip
async def test_an_upload_that_requests_would_refuse_is_refused_at_once(case: str) -> None:
    source, expected = BAD_SOURCES[case]
    error = await check_refused(UPLOAD, base64.b64decode(source), "the body must", expected)
    assert error["code"] == "invalid_image"


SPAN = {"offset": 1, "length": 4, "sha256": CAT.sha256, "placeholder_id": ID, "data": in_base64(CAT)}
PLACES = {"image": [{"offset": 1, "length": 4}]}
FEATURES = {"mm_hashes": {"image": [CAT.sha256]}, "mm_placeholders": PLACES}
IN_SPAN = expanded(1, CAT)


def spans(*given: Any, ids: Any = IN_SPAN) -> dict[str, Any]:
    return {"prompts": [ids], "images": [list(given)]}


def settings(kwargs: Any, **body: Any) -> dict[str, Any]:
    return {**GOOD, "mm_processor_kwargs": kwargs, **body}


CASES: list[tuple[str, Any, tuple[str, ...]]] = [
    # how many
    (TRL, {"prompts": [[ID, 5]], "images": [[in_base64(CAT)] * 2]}, ("images[0]", "got 2 for 1", "images[0][1]")),
    (TRL, {"prompts": [[5]], "images": [in_base64(CAT)]}, ("images[0]", "got 1 for 0", "images[0][0] has no place")),
    (TRL, {"prompts": [[5], [ID, 5, ID]], "images": [None, in_base64(CAT)]}, ("images[1]", "for every placeholder")),
    (TRL, {"prompts": [[5], [ID]]}, ("images[1] must have an image for every placeholder", "got 0")),
    (TRL, {"prompts": [PAD]}, ("images[0] must have an image for every placeholder",)),
    (NATIVE, {"prompts": [[5, ID]]}, ("images[0] must have an image for every placeholder",)),
    (TEXT, {"prompt": [[5], [ID]]}, ("prompt[1] must have an image for every placeholder",)),
    (SCORE, {"sequences": [[5, ID]]}, ("images[0] must have an image for every placeholder",)),
    (TRL_SCORE, {"sequences": [[5, ID]], "prompt_lengths": [1]}, ("sequences[0] must have an image",)),
    (VLLM, {"token_ids": [5, ID], "sampling_params": {}}, ("content_parts must have an image",)),
    (TOKENS, {"tokens": [5], "messages": [user_message(data_url(CAT))]}, ("images of messages", "got 1 for 0")),
    (TOKENS, {"tokens": [ID, ID], "messages": [user_message(data_url(CAT))]}, ("images of messages",)),
    (TRL, {"prompts": [[5]] * 3, "images": [None, None]}, ("one entry per prompt", "got 2 for 3")),
    (TRL, {"prompts": [[5]], "images": [None, in_base64(CAT)]}, ("one entry per prompt", "got 2 for 1")),
    (NATIVE, {"prompts": [[5]], "images": [None, None]}, ("one entry per prompt",)),
    (NATIVE, {"prompts": [[ID] * 8], "images": [[in_base64(CAT)] * 9]}, ("at most 8 images, got 9",)),
    (TOKENIZE, {"messages": [user_message(*[data_url(CAT)] * 9)]}, ("at most 8 images, got 9",)),
    # how long
    (TRL, {"prompts": [[5, ID, ID, ID]], "images": [in_base64(CAT)]}, ("images[0][0]", "the 4 ids", "a run of 3")),
    (TRL, {"prompts": [[ID] * 5, [5]], "images": [in_base64(CAT), None]}, ("images[0][0]", "a run of 5")),
    (NATIVE, {"prompts": [[5, *[ID] * 60, 6]], "images": [in_base64(CAT)]}, ("images[0][0]", "a run of 60")),
    (
        NATIVE,
        {"prompts": [[5], [*[5, ID] * 15, 6]], "images": [None, [in_base64(CAT)] * 8 + [in_base64(DOG)] * 7]},
        ("at most 8 images",),
    ),
    # types
    (TRL, {"prompts": [[ID]], "images": "aGk="}, ("images must be a valid list",)),
    (TRL, {"prompts": [[ID]], "images": [3]}, ("images[0] must be null, an image as text, or a list", "3")),
    (TRL, {"prompts": [[ID]], "images": [[None]]}, ("images[0][0]", "NoneType")),
    (TRL, {"prompts": [[ID]], "images": [[3]]}, ("images[0][0]", "got int")),
    (TRL, {"prompts": [[ID]], "images": [[["aGk="]]]}, ("images[0][0]", "got list")),
    (CHAT, {"messages": [user_message(3)]}, ("messages[0].content[0]", "got int")),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ("content[0]", "image_url")),
    (VLLM, {"token_ids": [ID], "content_parts": [{"type": "video_url"}], "sampling_params": {}}, ("content_parts[0]",)),
    (VLLM, {"token_ids": [ID], "content_parts": [{"type": "image_url"}], "sampling_params": {}}, ("content_parts[0]",)),
    # settings
    (TRL, settings({"min_pixel": 3}), ("mm_processor_kwargs must be some of", "got ['min_pixel']")),
    (TRL, settings({"min_pixel": 3}, prompts=[[5]], images=None), ("mm_processor_kwargs must be some of",)),
    (NATIVE, settings({"nope": 1}), ("mm_processor_kwargs must be some of",)),
    (CHAT, {"messages": [user_message("a")], "mm_processor_kwargs": {"nope": 1}}, ("mm_processor_kwargs must be",)),
    (TOKENIZE, {"prompt": "a", "mm_processor_kwargs": {"nope": 1}}, ("mm_processor_kwargs must be some",)),
    (TRL, settings(3), ("mm_processor_kwargs must be a valid dictionary",)),
    (TRL, settings({"max_pixels": "many"}), ("mm_processor_kwargs.max_pixels must be a whole", "'many'")),
    (TRL, settings({"min_pixels": 10**9}), ("mm_processor_kwargs.min_pixels must be a whole", "got 10000")),
    (TRL, settings({"size": {"shortest_edge": 10**9}}), ("mm_processor_kwargs.size.shortest_edge",)),
    (TRL, settings({"size": {"height": 10**5, "width": 10**5}}), ("mm_processor_kwargs.size.height must be a whole",)),
    (TRL, settings({"size": {"depth": 2}}), ("mm_processor_kwargs.size must be an object with some of",)),
    (TRL, settings({"max_pixels": 0}), ("mm_processor_kwargs.max_pixels must be a whole number in [1,", "got 0")),
    (TRL, settings({"temporal_patch_size": 20000}), ("must be some of ['max_pixels', 'min_pixels', 'size']",)),
    (TEXT, {"prompt": "a", "mm_processor_kwargs": {"max_pixels": 9}}, ("mm_processor_kwargs=",)),
    (TEXT, {"prompt": "a", "images": [in_base64(CAT)]}, ("images=",)),
    (CHAT, {"messages": [user_message("a")], "images": [in_base64(CAT)]}, ("images=",)),
    # spans
    (NATIVE, spans({**SPAN, "offset": 0}), ("images[0][0] must cover the 4 ids", "got 4 at 0")),
    (NATIVE, spans({**SPAN, "length": 3}), ("images[0][0] must cover the 4 ids", "got 3 at 1")),
    (NATIVE, spans({**SPAN, "length": 0}), ("images.0.0.length must be greater than or equal to 1",)),
    (NATIVE, spans({**SPAN, "offset": -1}), ("images.0.0.offset must be greater than or equal to 0",)),
    (NATIVE, spans({**SPAN, "sha256": "x"}), ("images.0.0.sha256",)),
    (NATIVE, spans({**SPAN, "sha256": DOG.sha256}), ("images[0][0].data must be the file that sha256 names",)),
    (NATIVE, spans({**SPAN, "placeholder_id": 5}), ("images[0][0].placeholder_id must be this model's",)),
    (NATIVE, spans({**SPAN, "settings": "[]"}), ("images.0.0.settings must be a JSON object",)),
    (NATIVE, spans({**SPAN, "settings": '{"nope":1}'}), ("mm_processor_kwargs must be some of",)),
    (NATIVE, spans({**SPAN, "more": 1}), ("images.0.0.more is not a known field",)),
    (NATIVE, spans(SPAN, in_base64(CAT)), ("images[0] must be all spans or all images",)),
    (NATIVE, spans(SPAN, SPAN), ("images[1] must start after the previous image",)),
    (
        NATIVE,
        spans(SPAN, {**SPAN, "offset": 6, "settings": '{"max_pixels":100000}'}, ids=expanded(1, CAT, 5, CAT)),
        ("images[1] must have the same settings as the other images",),
    ),
    # features
    (VLLM, {"token_ids": IN_SPAN, "features": FEATURES, "sampling_params": {}}, ("features.mm_hashes.image[0]",)),
    (
        VLLM,
        {"token_ids": IN_SPAN, "features": {**FEATURES, "mm_hashes": {"image": []}}, "sampling_params": {}},
        ("one entry per image, got 0 and 1",),
    ),
    (
        VLLM,
        {"token_ids": IN_SPAN, "features": {**FEATURES, "kwargs_data": {"image": ["abc"]}}, "sampling_params": {}},
        ("features.kwargs_data must be null",),
    ),
    (
        VLLM,
        {"token_ids": [5], "features": {"mm_hashes": {"audio": []}, "mm_placeholders": {}}, "sampling_params": {}},
        ("features must be images only",),
    ),
    (
        VLLM,
        {"token_ids": IN_SPAN, "features": FEATURES, "content_parts": [{"type": "image_url"}], "sampling_params": {}},
        ("either features or content_parts",),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "expected"), CASES)
async def test_a_field_that_breaks_its_rule_is_named(
    path: str, body: dict[str, Any], expected: tuple[str, ...]
) -> None:
    await check_refused(path, body, *expected)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TRL, {"prompts": [[5] * 49 + [ID]], "images": [in_base64(image_file(112, 112))]}),
        (NATIVE, {"prompts": [[5] * 61 + [ID]], "images": [in_base64(CAT)]}),
        (VLLM, {"token_ids": [5] * 61 + [ID], "content_parts": [{"type": "image_url", "url": data_url(CAT)}],
                "sampling_params": {}}),
        (TOKENS, {"tokens": [5] * 61 + [ID], "messages": [user_message(data_url(CAT))]}),
        (CHAT, {"messages": [user_message("a " * 30, "b " * 30, data_url(CAT))]}),
    ],
)  # fmt: skip
async def test_a_prompt_may_be_too_long_once_it_is_expanded(path: str, body: dict[str, Any]) -> None:
    error = await check_refused(path, body, f"This model's maximum context length is {CONTEXT} tokens")
    assert error["code"] == "context_length_exceeded"


async def test_places_outside_of_the_images_ids_are_refused() -> None:
    engine = vision_engine()
    async with asgi_client(make_vision_app(engine)) as client:
        await client.post(UPLOAD, content=CAT.data)
        for place, message in (
            ({"offset": 1, "length": 5}, "mm_placeholders.image[0] must lie in the image's ids, [1, 5), got [1, 6)"),
            (
                {"offset": 0, "length": 4},
                "mm_hashes.image[0] must cover the 4 ids that the image processor makes of it",
            ),
        ):
            moved = {**FEATURES, "mm_placeholders": {"image": [place]}}
            body = {"token_ids": IN_SPAN, "features": moved, "sampling_params": {}}
            answer = await client.post(VLLM, json=body)
            assert answer.status_code == 400
            assert f"features.{message}" in answer.text
        assert (await client.post(VLLM, json={**body, "features": FEATURES})).status_code == 200


async def test_a_url_of_another_host_than_the_allowed_one_is_refused() -> None:
    engine = vision_engine(context_length=CONTEXT)
    app = make_vision_app(engine, image_hosts=("images.example",))
    body = {"prompts": [[ID]], "images": ["http://169.254.169.254/latest"]}
    await check_refused(NATIVE, body, "images[0][0]", "images.example", "'http://169.254.169.254/latest'", app=app)


async def test_requests_in_flight_are_unharmed_by_bad_ones_beside_them() -> None:
    engine = vision_engine()
    bad = [with_image(path, source)[0] for path in (NATIVE,) for source, _ in BAD_SOURCES.values()]
    async with asgi_client(make_vision_app(engine, limits=ServerLimits(max_image_pixels=MOST_PIXELS))) as client:

        async def good(seed: int) -> httpx.Response:
            image = image_file(56, 56, seed=100 + seed)
            return await client.post(NATIVE, json={"prompts": [[seed, ID]], "images": [in_base64(image)]})

        answers = await asyncio.gather(
            *(client.post(NATIVE, json=body) for body in bad), *(good(seed) for seed in range(1, 9))
        )
    assert {answer.status_code for answer in answers[: len(bad)]} <= {400}
    for seed, answer in enumerate(answers[len(bad) :], start=1):
        (result,) = answer.json()["results"]
        assert result["prompt_ids"] == [seed, ID, ID, ID, ID]
        assert result["image_sha256s"] == [image_file(56, 56, seed=100 + seed).sha256]


async def test_the_images_of_all_conversations_count() -> None:
    messages = [user_message(*[data_url(CAT)] * 3)]
    await check_refused(TRL_CHAT, {"messages": [messages] * 3}, "at most 8 images, got 9")


SIZES: list[dict[str, Any]] = [
    {"min_pixels": 450_000, "max_pixels": 450_000},
    {"size": {"shortest_edge": 450_000, "longest_edge": 450_000}},
    {"min_pixels": 450_000},
]


@pytest.mark.parametrize("settings", SIZES)
@pytest.mark.parametrize("path", [NATIVE, TRL, TRL_CHAT, CHAT, RENDER, TOKENIZE, VLLM, TOKENS])
async def test_an_image_of_more_ids_than_the_context_is_refused_before_it_is_decoded(
    path: str, settings: dict[str, Any]
) -> None:
    body, _ = with_image(path, in_base64(short_png(28, 28, rows=27)))  # decoding it would be another error
    error = await check_refused(path, {**body, "mm_processor_kwargs": settings}, f"context length is {CONTEXT} tokens")
    assert error["code"] == "context_length_exceeded"


async def test_after_the_first_bad_image_no_work_on_others_is_begun() -> None:
    """A coroutine that was made and never run would be a warning, which is an error here."""
    sources = [in_base64(b"no image")] + [in_base64(CAT)] * 7
    await check_refused(NATIVE, {"prompts": [[ID] * 9], "images": [sources]}, "images[0][0]")
    gc.collect()


async def test_images_that_together_exceed_the_context_are_refused_before_any_is_decoded() -> None:
    sources = [in_base64(short_png(112, 112, rows=1))] * 4  # of 16 ids each
    error = await check_refused(NATIVE, {"prompts": [[ID] * 4], "images": [sources]}, "your request has 64 input")
    assert error["code"] == "context_length_exceeded"
    await check_refused(NATIVE, {"prompts": [[ID] * 3], "images": [sources[:3]]}, "must be a whole PNG file")


@pytest.mark.parametrize("path", PATHS)
async def test_images_that_together_have_too_many_pixels_are_refused_by_their_headers(path: str) -> None:
    """Each is small enough. None is decoded: that would say that its rows are missing. The same image counts once."""
    limits = ServerLimits(image_memory_mib=1)  # of 262,144 pixels
    used = HfImageProcessor(processor()._processor, limits=make_image_limits(limits))
    app = make_vision_app(vision_engine(context_length=100_000), images=used, limits=limits)
    large = [short_png(280, 230, rows=0), short_png(280, 231, rows=0), short_png(280, 232, rows=0)]
    contents = [data_url(EncodedImage(each)) for each in (CAT.data, *large, short_png(280, 233, rows=0))]
    body, _ = with_image(path, contents[1])
    for old, new in (("messages", user_message("a", *contents)), ("images", [contents])):
        if old in body:
            body[old] = [[new]] if path == TRL_CHAT else [new]
    if path in (NATIVE, TRL):
        body |= {"prompts": [[ID] * 3, [ID] * 2], "images": [contents[:3], contents[3:]]}
    if path == SCORE:
        body = {"sequences": [[ID] * 5], "images": [contents]}
    if path == VLLM:
        body["content_parts"] = [{"type": "image_url", "url": each} for each in contents]
    words = "must leave the images of a request at 262144 pixels or fewer in all (image_memory_mib, 4 bytes a pixel)"
    async with asgi_client(app) as client:
        answer = await client.post(path, json=body)
        assert (answer.status_code, words in answer.text) == (400, True), answer.text
        again = {"prompts": [[ID] * 40], "images": [[in_base64(image_file(112, 112))] * 40]}
        assert (await client.post(NATIVE, json=again)).status_code == 200


@pytest.mark.parametrize("file", [saved(SMALL.convert("CMYK"), "JPEG"), saved(Image.new("I;16", (28, 28)), "PNG")])
async def test_pictures_for_print_and_of_16_bits_are_taken(file: bytes) -> None:
    async with asgi_client(make_vision_app(vision_engine(context_length=CONTEXT))) as client:
        assert (await client.post(NATIVE, json={"prompts": [[ID]], "images": [in_base64(file)]})).status_code == 200
        assert (await client.post(UPLOAD, content=file)).status_code == 200


async def test_an_image_that_needs_more_memory_than_all_may_have_is_refused_everywhere() -> None:
    limits = ServerLimits(image_memory_mib=1)
    own = HfImageProcessor(processor()._processor, limits=make_image_limits(limits))
    file = image_file(300, 300)
    message = "must need at most 1048576 bytes to be decoded (image_memory_mib), got 1440000 for 90000 pixels"
    async with asgi_client(make_vision_app(vision_engine(), images=own, limits=limits)) as client:
        for answer in (
            await client.post("/v1/images", content=file.data),
            await client.post("/v1/sample", json={"prompts": [[ID]], "images": [in_base64(file)]}),
        ):
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
            assert answer.json()["error"]["code"] == "invalid_image"
        assert (await client.post("/v1/images", content=image_file().data)).status_code == 200
