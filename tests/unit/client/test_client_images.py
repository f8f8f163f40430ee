"""The client sends an image once to each server, and again where the server has forgotten it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torchvision", reason="the image processors of transformers need it")

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
    user_message,
    vision_engine,
)
from support.servers import listening, make_app, scripted_engine
from support.vision import picture
from unbroken.client import AsyncClient, Client
from unbroken.engines.http import HttpEngine
from unbroken.errors import EchoError, ImageError, InvalidInputError, SamplingError, ServerError, UnknownImageError
from unbroken.images.placeholders import expand_placeholders
from unbroken.server.config import ServerLimits
from unbroken.types import EncodedImage, ImageSpan, SampleChunk, SampleRequest, SampleResult, SamplingParams, token_ids


class Counted:
    """An application that counts the requests to each path, and their bytes."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.paths: list[str] = []
        self.num_bytes: dict[str, int] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.paths.append(scope["path"])
            size = int(dict(scope["headers"]).get(b"content-length", b"0"))
            self.num_bytes[scope["path"]] = self.num_bytes.get(scope["path"], 0) + size
        await self._app(scope, receive, send)

    def num_uploads(self) -> int:
        return self.paths.count("/v1/images")


@asynccontextmanager
async def serving(engine: Any = None, **options: Any) -> AsyncIterator[tuple[str, Counted]]:
    app = Counted(make_vision_app(engine or vision_engine(), **options))
    async with listening(app) as url:
        yield url, app


async def test_images_come_in_all_forms_and_are_one_upload(tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(CAT.data)
    forms = [CAT, CAT.data, file, str(file), in_base64(CAT), data_url(CAT), f"sha256:{CAT.sha256}"]
    async with serving() as (url, app), AsyncClient(url) as client:
        results = await client.generate([[1, ID]] * len(forms), images=[[form] for form in forms])
        assert [result.prompt_ids.tolist() for result in results] == [expanded(1, CAT)] * len(forms)
        assert {result.image_sha256s for result in results} == {(CAT.sha256,)}
        assert app.num_uploads() == 1
        (result,) = await client.generate([[ID]], images=[picture()])
        assert len(result.prompt_ids) == 4


async def test_prompts_with_several_images_one_and_none() -> None:
    engine = vision_engine()
    async with serving(engine) as (url, app), AsyncClient(url) as client:
        for _ in range(3):
            results = await client.generate([[ID, 5, ID], [6], [ID]], images=[[CAT, DOG], None, DOG])
            assert [r.prompt_ids.tolist() for r in results] == [expanded(CAT, 5, DOG), [6], expanded(DOG)]
        assert app.num_uploads() == 2
        large = image_file(112, 112)
        (small,) = await client.generate([[ID]], images=[[large]], mm_processor_kwargs={"size": SMALL})
        assert len(small.prompt_ids) == 4


async def test_a_placeholder_that_the_model_sampled_passes_through_client_and_engine() -> None:
    ids = [*expanded(1, CAT), 2, ID, 3]
    image = ImageSpan(offset=1, length=4, image=CAT, placeholder_id=ID)
    async with serving() as (url, _), AsyncClient(url) as client:
        (result,) = await client.generate([[1, ID, 2]], images=[[]])
        assert result.prompt_ids.tolist() == [1, ID, 2]
        engine = await HttpEngine.connect([url])
        for request in (
            SampleRequest(request_id="a", prompt_ids=token_ids(ids), images=(image,)),
            SampleRequest(request_id="b", prompt_ids=token_ids([1, ID, 2])),
        ):
            sampled = await engine.sample(request)
            sampled.check_answers(request)
            async for _ in engine.stream(request):
                pass
            assert len((await engine.score(request.prompt_ids, images=request.images)).logprobs) >= 2
        await engine.close()


SMALL = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 4}


async def test_chats_and_tokens_name_images_by_hash() -> None:
    messages = [user_message("look", CAT, DOG, kind="image"), user_message(data_url(CAT))]
    async with serving() as (url, app), AsyncClient(url) as client:
        ids = (await client.tokenize(messages)).tolist()
        assert ids.count(ID) == 11
        assert (await client.chat(messages))["prompt_token_ids"] == ids
        assert (await client.chat_tokens(ids, messages))["prompt_token_ids"] == ids
        smaller = await client.tokenize(
            [user_message(image_file(112, 112), kind="image")], mm_processor_kwargs={"size": SMALL}
        )
        assert smaller.tolist().count(ID) == 4
        assert app.num_uploads() == 3
        assert max(app.num_bytes[path] for path in ("/tokenize", "/v1/chat/completions")) < 2000
    assert messages[0]["content"][1]["image"] is CAT


async def test_an_image_that_the_server_forgot_is_sent_again_unseen() -> None:
    large = [image_file(420, 420, seed=k) for k in range(2)]
    async with serving(limits=ServerLimits(image_cache_mib=1)) as (url, app), AsyncClient(url) as client:
        for k in (0, 1, 0, 1):
            (result,) = await client.generate([[ID]], images=[large[k]])
            assert result.image_sha256s == (large[k].sha256,)
        assert app.num_uploads() == 4
        # Both at once do not fit: the call itself brings them.
        (result,) = await client.generate([[ID, ID]], images=[large])
        assert result.image_sha256s == (large[0].sha256, large[1].sha256)
        answer = await client.chat([user_message(*large, kind="image")])
        assert answer["image_sha256s"] == [large[0].sha256, large[1].sha256]


async def test_a_reference_of_the_callers_own_that_is_unknown_is_his_to_mend() -> None:
    async with serving() as (url, app), AsyncClient(url) as client:
        with pytest.raises(UnknownImageError, match=r"images\[0\]\[0\]") as caught:
            await client.generate([[ID]], images=[f"sha256:{DOG.sha256}"])
        assert caught.value.sha256 == DOG.sha256
        assert app.paths.count("/v1/sample") == 1


async def test_calls_at_the_same_time_send_an_image_once_and_a_cancelled_one_harms_no_other() -> None:
    async with serving() as (url, app), AsyncClient(url) as client:
        first = asyncio.create_task(client.generate([[ID]], images=[CAT]))
        others = [asyncio.create_task(client.generate([[ID]], images=[CAT])) for _ in range(8)]
        await asyncio.sleep(0)
        first.cancel()
        for (result,) in await asyncio.gather(*others):
            assert result.image_sha256s == (CAT.sha256,)
        assert app.num_uploads() <= 2


@pytest.mark.parametrize(
    ("prompts", "images", "kind", "expected"),
    [
        ([[ID]], [CAT, None], InvalidInputError, "one entry per prompt .* got 2 for 1"),
        ([[ID]], [[CAT, DOG]], ImageError, "got 2 for 1"),
        ([[5]], [[CAT]], ImageError, "got 1 for 0"),
        ([[ID]], None, ImageError, "for every placeholder"),
        ([[5], [ID]], [None, b"no image"], ImageError, r"images\[1\]\[0\] must be an image file"),
        ([[ID]], [3], ImageError, r"images\[0\]\[0\] must be a PIL image"),
        ([[ID]], ["http://example.com/a.png"], ImageError, "must not be a URL to fetch"),
    ],
)
async def test_what_does_not_fit_is_said(prompts: Any, images: Any, kind: type[Exception], expected: str) -> None:
    async with serving() as (url, _), AsyncClient(url) as client:
        with pytest.raises(kind, match=expected):
            await client.generate(prompts, images=images)
        with pytest.raises(ImageError, match="mm_processor_kwargs must be some of"):
            await client.generate([[ID]], images=[CAT], mm_processor_kwargs={"nope": 1})
        assert len((await client.generate([[ID]], images=[CAT]))[0].prompt_ids) == 4


def test_the_client_without_a_loop_takes_images_too() -> None:
    async def serve(started: asyncio.Future[str], ended: asyncio.Event) -> None:
        async with serving() as (url, _):
            started.set_result(url)
            await ended.wait()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        started, ended = loop.create_future(), asyncio.Event()
        task = asyncio.create_task(serve(started, ended))
        url = await started
        await asyncio.to_thread(use, url)
        ended.set()
        await task

    def use(url: str) -> None:
        with Client(url) as client:
            (result,) = client.generate([[ID]], images=[[picture()]])
            assert len(result.prompt_ids) == 4
            assert len(client.tokenize([user_message(picture(), kind="image")])) > 4

    asyncio.run(run())


def ask(request_id: str, *parts: Any, settings: str = "{}", n: int = 1) -> SampleRequest:
    images = [part for part in parts if isinstance(part, EncodedImage)]
    ids = token_ids([ID if isinstance(part, EncodedImage) else part for part in parts])
    prompt_ids, spans = expand_placeholders(ids, images, processor(), settings=settings)
    params = SamplingParams(max_tokens=4)
    return SampleRequest(request_id=request_id, prompt_ids=prompt_ids, images=spans, params=params, n=n)


async def test_servers_as_an_engine_take_spans_and_files_once_each() -> None:
    engines = [vision_engine(), vision_engine()]
    async with serving(engines[0]) as (one, first), serving(engines[1]) as (two, second):
        engine = await HttpEngine.connect([one, two])
        assert engine.takes_images
        for turn in range(2):
            for conversation in range(24):  # a digest of its name and of a port chooses the server: not all go to one
                request = ask(f"{conversation}/{turn}", 1, CAT, 2, DOG, 3)
                (await engine.sample(request)).check_answers(request)
        assert (first.num_uploads(), second.num_uploads()) == (2, 2)
        request = ask("i/0", 1, image_file(112, 112), settings='{"size":{"longest_edge":3136,"shortest_edge":784}}')
        (await engine.sample(request)).check_answers(request)
        chunks = [chunk async for chunk in engine.stream(request)]
        assert len(SampleChunk.join(chunks, params=SamplingParams()).completion_ids) > 0
        scored = await engine.score(request.prompt_ids, images=request.images)
        assert len(scored.logprobs) == len(request.prompt_ids) - 1
        seen = [own for one_engine in engines for own in one_engine.requests if own.images[0].settings != "{}"]
        assert [(span.offset, span.stop) for own in seen for span in own.images] == [(1, 5)] * 2
        await engine.close()


async def test_a_stream_of_an_image_that_the_server_forgot_is_opened_again() -> None:
    large = [image_file(420, 420, seed=k) for k in range(2)]
    async with serving(limits=ServerLimits(image_cache_mib=1)) as (url, app):
        engine = await HttpEngine.connect([url])
        for turn, image in enumerate((*large, *large)):
            assert [chunk async for chunk in engine.stream(ask(f"{turn}", image))]
        assert app.num_uploads() == 4
        await engine.close()


async def test_an_engine_of_text_servers_takes_no_images() -> None:
    async with listening(make_app(scripted_engine("ok"))) as url:
        engine = await HttpEngine.connect([url])
        assert not engine.takes_images
        with pytest.raises(SamplingError, match="takes no images, got 1"):
            await engine.sample(ask("a", CAT))
        await engine.close()


class Forger:
    """An engine that reports other images than it was sent."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def sample(self, request: SampleRequest) -> SampleResult:
        result: SampleResult = await self._inner.sample(request)
        return SampleResult(prompt_ids=result.prompt_ids, sequences=result.sequences, image_sha256s=(DOG.sha256,))


async def test_a_server_whose_engine_saw_another_image_fails_the_request() -> None:
    async with serving(Forger(vision_engine())) as (url, _), AsyncClient(url, max_retries=0) as client:
        with pytest.raises(ServerError, match="reports the images"):
            await client.generate([[ID]], images=[CAT])


async def test_a_client_compares_the_images_that_the_server_reports() -> None:
    def lie(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/images":
            return httpx.Response(200, json={"sha256": CAT.sha256})
        sequence = {
            "completion_ids": [1],
            "rollout_logprobs": [0.0],
            "policy_versions": [[0, 1, 0]],
            "temperature": 1.0,
        }
        sequence |= {"finish_reason": "stop", "top_logprobs": None}
        result = {"prompt_ids": [ID], "image_sha256s": [DOG.sha256], "sequences": [sequence]}
        return httpx.Response(200, json={"results": [result]})

    async with AsyncClient("http://server", transport=httpx.MockTransport(lie)) as client:
        with pytest.raises(EchoError, match=r"prompts\[0\] was sent with the images"):
            await client.generate([[ID]], images=[CAT])


async def test_an_image_that_only_the_server_refuses_is_named_by_its_place() -> None:
    async with serving(limits=ServerLimits(max_image_pixels=5000)) as (url, _), AsyncClient(url) as client:
        with pytest.raises(ImageError, match=r"images\[1\]\[0\] must have at most 5000 pixels, got 112 x 112"):
            await client.generate([[ID], [ID]], images=[CAT, image_file(112, 112)])
        with pytest.raises(ImageError, match=r"messages\[0\]\.content\[1\] must have at most 5000 pixels"):
            await client.chat([user_message("a", image_file(112, 112), kind="image")])
