"""Images in every dialect: kept by hash, expanded, placed, and reported in answers."""

from __future__ import annotations

import asyncio
import threading
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
    saved,
    tokenizer,
    user_message,
    vision_engine,
)
from support.servers import asgi_client, listening
from support.vision import PAD, picture
from unbroken.images.decoder import encode_picture
from unbroken.server.config import ServerLimits
from unbroken.server.images import ImageStore
from unbroken.types import EncodedImage


async def post(path: str, body: dict[str, Any], app: Any = None) -> dict[str, Any]:
    """The answer to one request."""
    async with asgi_client(app or make_vision_app(vision_engine())) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def rendered(*parts: str) -> list[int]:
    """What the template makes of one user message, with placeholders."""
    messages = [user_message(*parts, kind="image")]
    ids: list[int] = tokenizer().apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    return ids


def filled(ids: list[int], *images: EncodedImage) -> list[int]:
    """Ids with each placeholder expanded."""
    left = list(images)
    return expanded(*(left.pop(0) if one == ID else one for one in ids))


def test_what_was_used_last_stays_within_the_bytes() -> None:
    one, two, three, large = (EncodedImage(bytes([k]) * size) for k, size in enumerate((40, 40, 40, 101)))
    store = ImageStore(100)
    store.put(one)
    store.put(two)
    assert store.get(one.sha256) is one
    store.put(three)
    assert store.get(two.sha256) is None
    assert store.get(one.sha256) is one
    store.put(large)
    assert store.get(large.sha256) is None
    assert store.num_bytes == 80


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
async def test_an_image_is_sent_once_and_then_called_by_its_hash(kind: str) -> None:
    image = EncodedImage(saved(picture(56, 28), kind))
    engine = vision_engine()
    async with asgi_client(make_vision_app(engine)) as client:
        sent = await client.post("/v1/images", content=image.data, headers={"Content-Type": f"image/{kind.lower()}"})
        assert sent.json() == {"sha256": image.sha256, "width": 56, "height": 28}
        body = {"prompts": [[1, ID, 2]], "images": [f"sha256:{image.sha256}"]}
        answer = (await client.post("/v1/sample", json=body)).json()
    assert answer["results"][0]["prompt_ids"] == [1, ID, ID, 2]
    assert answer["results"][0]["image_sha256s"] == [image.sha256]
    (span,) = engine.requests[0].images
    assert (span.offset, span.length, span.image.data) == (1, 2, image.data)


async def test_an_image_that_came_in_a_request_is_known_as_well() -> None:
    async with asgi_client(make_vision_app(vision_engine())) as client:
        body = {"messages": [user_message("look", data_url(CAT))]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        for image, status in ((CAT, 200), (DOG, 400)):
            body = {"prompts": [[ID]], "images": [[f"sha256:{image.sha256}"]]}
            assert (await client.post("/generate/", json=body)).status_code == status


async def test_the_store_forgets_the_oldest_and_says_which_is_unknown() -> None:
    noise = [encode_picture(picture(420, 420, seed=k)) for k in range(2)]
    assert 2**19 < len(noise[0].data) < 2**20
    async with asgi_client(make_vision_app(vision_engine(), limits=ServerLimits(image_cache_mib=1))) as client:
        for image in noise:
            assert (await client.post("/v1/images", content=image.data)).status_code == 200
        body = {"prompts": [[1]] * 2, "images": [None, [f"sha256:{noise[0].sha256}"]]}
        answer = await client.post("/v1/sample", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["sha256"]) == ("unknown_image", noise[0].sha256)
    assert "images[1][0]" in error["message"]


@pytest.mark.parametrize("path", ["/generate/", "/v1/sample"])
@pytest.mark.parametrize("are_expanded", [False, True])
async def test_ids_come_collapsed_or_expanded_and_go_expanded(path: str, are_expanded: bool) -> None:
    full = [expanded(1, CAT, 2, DOG), [3], expanded(DOG)]
    prompts = full if are_expanded else [[1, ID, 2, ID], [3], [ID]]
    body = {"prompts": prompts, "images": [[in_base64(CAT), data_url(DOG)], None, in_base64(DOG)]}
    engine = vision_engine()
    answer = await post(path, body, make_vision_app(engine))
    if path == "/generate/":
        assert answer["prompt_ids"] == full
        assert answer["image_sha256s"] == [[CAT.sha256, DOG.sha256], [], [DOG.sha256]]
    else:
        assert [one["prompt_ids"] for one in answer["results"]] == full
    assert [[span.length for span in request.images] for request in engine.requests] == [[4, 3], [], [3]]


async def test_texts_have_images_where_they_spell_placeholders() -> None:
    answer = await post("/generate/", {"prompts": [f"see {PAD} here"], "images": [[in_base64(CAT)]]})
    ids = tokenizer()(f"see {PAD} here")["input_ids"]
    assert answer["prompt_ids"] == [filled(ids, CAT)]


async def test_settings_make_of_an_image_what_they_say() -> None:
    large = image_file(112, 112)
    for kwargs, number in ((None, 16), ({}, 16), ({"max_pixels": 28 * 28 * 4}, 4)):
        body = {"prompts": [[ID]], "images": [[in_base64(large)]], "mm_processor_kwargs": kwargs}
        assert (await post("/generate/", body))["prompt_ids"] == [[ID] * number]
        chat = {"messages": [user_message(data_url(large))], "mm_processor_kwargs": kwargs}
        assert (await post("/v1/chat/completions", {**chat, "return_token_ids": True}))["prompt_token_ids"].count(
            ID
        ) == number
        assert (await post("/tokenize", chat))["images"][0]["length"] == number
        assert (await post("/chat/", {**chat, "messages": [chat["messages"]]}))["prompt_ids"][0].count(ID) == number
        parts = {"token_ids": [ID], "content_parts": [{"type": "image_url", "url": data_url(large)}]}
        answer = await post("/inference/v1/generate", {**parts, "sampling_params": {}, "mm_processor_kwargs": kwargs})
        assert answer["prompt_token_ids"] == [ID] * number


async def test_chats_take_images_in_each_dialects_form() -> None:
    expected = filled(rendered("a", "sha256:x", "b", "sha256:y"), CAT, DOG)
    parts = ["a", data_url(CAT), "b", data_url(DOG)]
    chat = await post("/v1/chat/completions", {"messages": [user_message(*parts)], "return_token_ids": True})
    assert chat["prompt_token_ids"] == expected
    assert chat["image_sha256s"] == [CAT.sha256, DOG.sha256]
    assert chat["usage"]["prompt_tokens"] == len(expected)
    pil = user_message("a", in_base64(CAT), "b", in_base64(DOG), kind="image_pil")
    answer = await post("/chat/", {"messages": [[pil], [{"role": "user", "content": "c"}]]})
    assert answer["prompt_ids"] == [expected, rendered("c")]
    assert answer["image_sha256s"] == [[CAT.sha256, DOG.sha256], []]


async def test_tokenize_tells_where_each_image_stands() -> None:
    messages = [user_message(data_url(DOG), "a", data_url(CAT))]
    for generation in (True, False):
        answer = await post("/tokenize", {"messages": messages, "add_generation_prompt": generation})
        places = [(one["offset"], one["length"], one["sha256"]) for one in answer["images"]]
        assert [place[1:] for place in places] == [(3, DOG.sha256), (4, CAT.sha256)]
        for offset, length, _ in places:
            assert answer["tokens"][offset : offset + length] == [ID] * length
    assert "images" not in await post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})


async def test_given_tokens_take_the_images_of_the_messages_in_order() -> None:
    messages = [user_message(data_url(CAT)), {"role": "assistant", "content": "x"}, user_message(data_url(DOG))]
    full = expanded(5, CAT, 6, DOG, 7)
    for tokens in ([5, ID, 6, ID, 7], full):
        engine = vision_engine()
        body = {"tokens": tokens, "messages": messages, "return_token_ids": True}
        answer = await post("/v1/chat/completions/tokens", body, make_vision_app(engine))
        assert answer["prompt_token_ids"] == full
        assert engine.requests[0].image_sha256s == (CAT.sha256, DOG.sha256)


async def test_the_token_dialect_takes_content_parts_and_tells_their_places() -> None:
    parts = [{"type": "image_url", "url": data_url(CAT)}, {"type": "image_url", "image_url": {"url": data_url(DOG)}}]
    body = {"token_ids": [1, ID, ID, 2], "content_parts": parts, "sampling_params": {}, "return_token_ids": True}
    answer = await post("/inference/v1/generate", body)
    assert answer["prompt_token_ids"] == expanded(1, CAT, DOG, 2)
    assert answer["mm_placeholders"] == {"image": [{"offset": 1, "length": 4}, {"offset": 5, "length": 3}]}


@pytest.mark.parametrize("kwargs", [None, {"max_pixels": 28 * 28 * 2}])
async def test_rendered_features_are_hashes_that_generate_understands(kwargs: Any) -> None:
    """The way of TRL since 1.16: images are rendered alone, and their features go with other ids."""
    async with asgi_client(make_vision_app(vision_engine())) as client:
        messages = [user_message(data_url(CAT), data_url(DOG))]
        answer = await client.post(
            "/v1/chat/completions/render", json={"messages": messages, "mm_processor_kwargs": kwargs}
        )
        features = answer.json()["features"]
        assert features["mm_hashes"] == {"image": [CAT.sha256, DOG.sha256]}
        sizes = [place["length"] for place in features["mm_placeholders"]["image"]]
        assert sizes == ([4, 3] if kwargs is None else [1, 2])
        ids = [9, *[ID] * sizes[0], 9, *[ID] * sizes[1]]
        places = [{"offset": 1, "length": sizes[0]}, {"offset": 2 + sizes[0], "length": sizes[1]}]
        body = {"token_ids": ids, "features": {**features, "mm_placeholders": {"image": places}}, "sampling_params": {}}
        answer = await client.post("/inference/v1/generate", json=body)
        assert answer.json()["prompt_token_ids"] == ids
        assert answer.json()["mm_placeholders"] == {"image": places}
        text = await client.post("/v1/chat/completions/render", json={"messages": [{"role": "user", "content": "a"}]})
        assert text.json()["features"] is None


def span(image: EncodedImage, offset: int, length: int, **more: Any) -> dict[str, Any]:
    return {"offset": offset, "length": length, "sha256": image.sha256, "placeholder_id": ID, **more}


async def test_spans_say_where_images_stand_also_with_their_files() -> None:
    engine = vision_engine()
    body = {"prompts": [expanded(1, CAT, DOG)], "images": [[span(CAT, 1, 4, data=in_base64(CAT)), span(DOG, 5, 3)]]}
    async with asgi_client(make_vision_app(engine)) as client:
        await client.post("/v1/images", content=DOG.data)
        answer = await client.post("/v1/sample", json=body)
        scores = await client.post("/v1/score", json={"sequences": body["prompts"], "images": body["images"]})
    assert answer.json()["results"][0]["image_sha256s"] == [CAT.sha256, DOG.sha256]
    assert [(one.offset, one.stop) for one in engine.requests[0].images] == [(1, 5), (5, 8)]
    assert len(scores.json()["results"][0]["logprobs"]) == 7


async def test_a_placeholder_that_the_model_sampled_is_text_beside_spans_and_where_there_are_no_images() -> None:
    engine = vision_engine()
    ids = [*expanded(1, CAT), 2, ID, 3, ID, ID]
    async with asgi_client(make_vision_app(engine)) as client:
        beside = {"prompts": [ids], "images": [[span(CAT, 1, 4, data=in_base64(CAT))]]}
        assert (await client.post("/v1/sample", json=beside)).json()["results"][0]["prompt_ids"] == ids
        score = {"sequences": [ids], "images": beside["images"]}
        assert len((await client.post("/v1/score", json=score)).json()["results"][0]["logprobs"]) == len(ids) - 1
        for path in ("/v1/sample", "/generate/"):
            alone = await client.post(path, json={"prompts": [[1, ID, 2]], "images": [[]]})
            assert alone.status_code == 200, alone.text
            missing = await client.post(path, json={"prompts": [[1, ID, 2]], "images": [None]})
            assert missing.status_code == 400
    assert [request.images for request in engine.requests[1:]] == [(), ()]


async def test_a_placeholder_that_the_model_sampled_is_text_in_vllms_dialect_and_in_chat_over_ids() -> None:
    engine = vision_engine()
    cat = {"mm_hashes": {"image": [CAT.sha256]}, "mm_placeholders": {"image": [{"offset": 1, "length": 4}]}}
    none: dict[str, Any] = {"mm_hashes": {}, "mm_placeholders": {}}
    beside, alone = [*expanded(1, CAT), 2, ID, 3], [1, ID, 2]
    requests: list[tuple[str, dict[str, Any], int]] = [
        ("/inference/v1/generate", {"token_ids": beside, "features": cat, "sampling_params": {}}, 1),
        ("/inference/v1/generate", {"token_ids": alone, "features": none, "sampling_params": {}}, 0),
        ("/inference/v1/generate", {"token_ids": alone, "content_parts": [], "sampling_params": {}}, 0),
        ("/v1/chat/completions/tokens", {"tokens": alone, "messages": [user_message("hi")]}, 0),
    ]
    async with asgi_client(make_vision_app(engine)) as client:
        await client.post("/v1/images", content=CAT.data)
        for path, body, num_images in requests:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            sent = engine.requests[-1]
            assert sent.prompt_ids.tolist() == body.get("token_ids", body.get("tokens"))
            assert len(sent.images) == num_images
        missing = await client.post("/inference/v1/generate", json={"token_ids": alone, "sampling_params": {}})
        assert missing.status_code == 400


async def test_each_prompt_of_trls_may_have_its_own_settings() -> None:
    large = in_base64(image_file(112, 112))
    body = {"prompts": [[ID], [ID], [5], [ID]], "images": [large, large, None, [large]]}
    settings = [{"max_pixels": 28 * 28 * 4}, None, None, {}]
    answer = await post("/generate/", {**body, "mm_processor_kwargs": settings})
    assert [len(ids) for ids in answer["prompt_ids"]] == [4, 16, 1, 16]
    async with asgi_client(make_vision_app(vision_engine())) as client:
        for wrong, message in (
            ([{}], "mm_processor_kwargs must have one entry per prompt: got 1 for 4 prompts"),
            ([None, {"do_resize": False}, None, None], "mm_processor_kwargs[1] must be some of"),
            ([None, None, None, {"max_pixels": -1}], "mm_processor_kwargs[3].max_pixels must be a whole number"),
            ([None, 5, None, None], "mm_processor_kwargs.1 must be"),
            ("x", "mm_processor_kwargs must be"),
        ):
            refused = await client.post("/generate/", json={**body, "mm_processor_kwargs": wrong})
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"], refused.text
        other = {"prompts": [[5]] * 2, "mm_processor_kwargs": [None, None]}
        assert (await client.post("/generate/", json=other)).status_code == 200


async def test_a_stream_begins_with_the_images() -> None:
    body = {"prompts": [[ID]], "images": [in_base64(CAT)], "stream": True}
    async with asgi_client(make_vision_app(vision_engine())) as client:
        first = (await client.post("/v1/sample", json=body)).text.splitlines()[0]
    assert f'"image_sha256s":["{CAT.sha256}"]' in first


class SlowProcessor:
    """Takes an image on request."""

    placeholder_id = ID
    setting_names: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def expand(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> Any:
        assert self.goes_on.wait(30)
        return processor().expand(image, settings, name=name)

    def count_features(self, width: int, height: int, settings: str = "{}") -> int:
        return 0

    def process(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> Any:
        raise NotImplementedError


async def test_health_and_texts_do_not_wait_for_pictures() -> None:
    slow = SlowProcessor()
    images = [image_file(seed=k) for k in range(20, 32)]
    body = {"prompts": [[ID]] * len(images), "images": [in_base64(image) for image in images]}
    async with (
        listening(make_vision_app(vision_engine(), images=slow)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        waiting = asyncio.create_task(client.post("/v1/sample", json=body))
        await asyncio.sleep(0.2)
        assert (await client.get("/health")).status_code == 200
        chat = await client.post("/v1/chat/completions", json={"messages": [user_message("hi")]})
        assert chat.status_code == 200
        assert not waiting.done()
        slow.goes_on.set()
        assert (await waiting).status_code == 200


async def test_models_say_whether_images_are_taken() -> None:
    async with asgi_client(make_vision_app(vision_engine())) as client:
        assert (await client.get("/v1/models")).json()["data"][0]["takes_images"] is True
