"""Images through `unbroken serve` on real vLLM and a tiny Qwen2.5-VL, with the real clients: TRL's, OpenAI's, ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from support.forks import run_python
from support.image_servers import data_url, image_file, user_message
from support.served import Served, served
from support.vision import save_vision_model, vision_tokenizer
from support.vision_engines import load_vision_model, model_logprobs, own_processor
from unbroken.client import AsyncClient
from unbroken.engines.http import HttpEngine
from unbroken.errors import ImageError
from unbroken.images.placeholders import expand_placeholders
from unbroken.images.processor import HfImageProcessor
from unbroken.types import EncodedImage, SampleRequest, SamplingParams, token_ids

pytest.importorskip("torchvision", reason="the image processors of transformers need it")

TRL_CLIENT = Path(sys.prefix) / "trl-client"
"""Where `make setup` puts a TRL between 1.0 and 1.10."""
CAT, DOG, EEL = image_file(56, 56), image_file(28, 84, seed=1), image_file(112, 84, seed=2)
"""4, 3 and 12 ids."""
LOGPROB_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder, "--limit-mm-per-prompt", '{"image": 8}') as running:
        yield running


@pytest.fixture(scope="module")
def processor(folder: Path) -> HfImageProcessor:
    return own_processor(folder)


def filled(processor: HfImageProcessor, *parts: int | EncodedImage) -> list[int]:
    """Ids with the expanded ids of images among them."""
    owns = [[part] if isinstance(part, int) else processor.expand(part).tolist() for part in parts]
    return [one for own in owns for one in own]


def run_trl(server: Served, folder: Path, trl_folder: str, processor: HfImageProcessor) -> dict[str, Any]:
    pad, files = processor.placeholder_id, []
    for number, image in enumerate((CAT, DOG, EEL)):
        files.append(str(folder / f"{number}.png"))
        Path(files[-1]).write_bytes(image.data)
    cat, dog, eel = files
    two, one = filled(processor, 5, CAT, 6, DOG, 7), filled(processor, 8, EEL)
    cases = {
        "pad": pad,
        "generate": [
            {"prompts": [two, one], "images": [[cat, dog], [eel]], "max_tokens": 5, "n": 2},
            {"prompts": [filled(processor, CAT, 5), [5, 6]], "images": [[cat], None], "max_tokens": 5},
        ],
        "chat": ["what is", eel],
        "refused": [{"prompts": [two], "images": [[dog, cat]]}, {"prompts": [[5, *[pad] * 3]], "images": [[cat]]}],
    }
    script = Path(__file__).parent / "clients" / "trl_images_client.py"
    done = run_python(script, server.url, trl_folder, json.dumps(cases), timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_generated(answer: dict[str, Any], prompts: list[list[int]], n: int) -> None:
    """What TRL's own tests assert: the prompts, and ids with a logprob each."""
    assert answer["prompt_ids"] == prompts
    assert len(answer["completion_ids"]) == n * len(prompts)
    for ids, logprobs, named in zip(
        answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"], strict=True
    ):
        assert 1 <= len(ids) <= 5
        assert [len(row) for row in logprobs] == [1] * len(ids)
        assert [row[0] for row in named] == ids


@pytest.mark.parametrize("generation", ["1.10", "newest"])
def test_trls_client_sends_ids_with_two_images_one_and_none(
    server: Served, folder: Path, processor: HfImageProcessor, generation: str
) -> None:
    if generation == "newest":
        pytest.importorskip("trl")
    found = run_trl(server, folder, str(TRL_CLIENT) if generation == "1.10" else "", processor)
    assert (found["version"] < "1.16") == (generation == "1.10")
    first, second = found["generated"]
    check_generated(first, [filled(processor, 5, CAT, 6, DOG, 7), filled(processor, 8, EEL)], 2)
    check_generated(second, [filled(processor, CAT, 5), [5, 6]], 1)
    template = vision_tokenizer().apply_chat_template
    ids = template([user_message("what is", "sha256:", kind="image")], add_generation_prompt=True)["input_ids"]
    parts = [EEL if one == processor.placeholder_id else one for one in ids]
    assert found["chat"]["prompt_ids"] == [filled(processor, *parts)]
    assert len(found["chat"]["completion_ids"][0]) == len(found["chat"]["logprobs"][0])
    for message in found["refused"]:
        assert "400" in message
        assert "image" in message


def test_the_openai_sdk_asks_with_data_urls(server: Served, processor: HfImageProcessor) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [user_message("compare", data_url(CAT), data_url(EEL))]
    more = {"return_token_ids": True}
    answer = sdk.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=4, logprobs=True, extra_body=more
    )
    assert answer.prompt_token_ids.count(processor.placeholder_id) == 4 + 12
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert len(answer.choices[0].logprobs.content) == len(answer.choices[0].token_ids)
    assert answer.image_sha256s == [CAT.sha256, EEL.sha256]
    smaller = sdk.chat.completions.create(
        model="tiny",
        messages=messages,
        max_completion_tokens=1,
        extra_body={**more, "mm_processor_kwargs": {"size": {"shortest_edge": 784, "longest_edge": 784}}},
    )
    assert smaller.prompt_token_ids.count(processor.placeholder_id) == 2
    broken: Any = [user_message(data_url(EncodedImage(CAT.data[:200])))]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\] must be a whole PNG file"):
        sdk.chat.completions.create(model="tiny", messages=broken, max_completion_tokens=1)
    stream = sdk.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=4, stream=True)
    assert list(stream)[-1].choices[0].finish_reason in ("length", "stop")


async def test_our_client_and_engine_sample_what_transformers_computes(
    server: Served, folder: Path, processor: HfImageProcessor
) -> None:
    engine = await HttpEngine.connect([server.url])
    assert engine.takes_images
    pad = processor.placeholder_id
    prompt_ids, spans = expand_placeholders(token_ids([5, pad, 6, pad, 7]), [CAT, EEL], processor)
    params = SamplingParams(max_tokens=8, seed=3)
    request = SampleRequest(request_id="a/0", prompt_ids=prompt_ids, images=spans, params=params)
    result = await engine.sample(request)
    result.check_answers(request)
    ids = np.concatenate([prompt_ids, result.sequences[0].completion_ids])
    expected = model_logprobs(load_vision_model(folder), processor, ids, spans)[len(prompt_ids) - 1 :]
    np.testing.assert_allclose(result.sequences[0].rollout_logprobs, expected, atol=LOGPROB_TOLERANCE)
    scored = await engine.score(ids, images=spans)
    np.testing.assert_allclose(scored.logprobs[len(prompt_ids) - 1 :], expected, atol=LOGPROB_TOLERANCE)
    async with AsyncClient(server.url) as client:
        (same,) = await client.generate([[5, pad, 6, pad, 7]], params, images=[[CAT, EEL]])
        (other,) = await client.generate([[5, pad, 6, pad, 7]], params, images=[[EEL, CAT]])
        assert same.prompt_ids.tolist() == prompt_ids.tolist()
        assert same.sequences[0].completion_ids.tolist() == result.sequences[0].completion_ids.tolist()
        assert other.prompt_ids.tolist() != prompt_ids.tolist()
        with pytest.raises(ImageError, match="for every placeholder"):
            await client.generate([[5, pad]], params)
        message = [user_message("what is", CAT, kind="image")]
        tokens = await client.tokenize(message)
        chat = await client.chat(message, temperature=0, max_tokens=6)
        again = await client.chat_tokens(tokens, message, temperature=0, max_tokens=6)
        assert chat["prompt_token_ids"] == again["prompt_token_ids"] == tokens.tolist()
        assert chat["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    await engine.close()
