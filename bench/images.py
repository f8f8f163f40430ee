"""Measure bytes and milliseconds of a conversation whose images are sent once, or again with every turn.

    OMP_NUM_THREADS=1 python bench/images.py

A conversation of 10 turns, with an image in the messages before turns 1, 3, 5 and 7. All three ways use a server in
another process, whose engine answers with 64 fixed ids at no cost. The measured time is thus that of the messages: from
the new message at the client to the reply's ids there.

    ours         the client renders and bridges (`TemplateRenderer`); ids, spans and hashes go to /v1/sample
    messages     our client sends all messages so far to /v1/chat/completions, with images as hashes
    re-sending   the same with images as data URLs, as other clients do; each image is encoded in base64 once

Images are JPEG files of 1024 x 768, about 1,000 ids each, different for each way and each round. The processor is
Qwen2.5-VL's. Our server processes an image only once, even when it is sent again, because it recognises its hash. In
`ours` the client processes it as well, and so already has the ids to train on.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np

from unbroken.client import AsyncClient
from unbroken.client.connections import Connections
from unbroken.engines.scripted import ScriptedEngine
from unbroken.images.processor import HfImageProcessor, ImageInputs
from unbroken.rendering.base import Bridge
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import EncodedImage, ImageSpan, SamplingParams, TokenIds

NUM_TURNS = 10
TURNS_WITH_IMAGES = (0, 2, 4, 6)
_WORDS = "the quick brown fox looks at this picture and tells what it sees in it "
_CONTROL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Any:
    """Make a tokenizer of bytes and the control tokens of a ChatML template with images."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: k for k, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_CONTROL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def make_processor(tokenizer: Any) -> HfImageProcessor:
    """Make Qwen2.5-VL's processor, with its own sizes."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    images = Qwen2VLImageProcessor(size={"shortest_edge": 3136, "longest_edge": 12845056})
    return HfImageProcessor(
        Qwen2_5_VLProcessor(image_processor=images, tokenizer=tokenizer, video_processor=Qwen2VLVideoProcessor())
    )


def make_photo(rng: np.random.Generator) -> EncodedImage:
    """Make an image like a photograph: large smooth shapes and a little noise."""
    from PIL import Image

    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
        (1024, 768), Image.Resampling.BICUBIC
    )
    noisy = np.clip(np.asarray(coarse, dtype=np.int16) + rng.integers(-12, 13, (768, 1024, 3)), 0, 255)
    file = io.BytesIO()
    Image.fromarray(noisy.astype(np.uint8)).save(file, format="JPEG", quality=90)
    return EncodedImage(file.getvalue())


def serve() -> None:
    """Run the server and print its URL."""
    import uvicorn

    from unbroken.server.app import create_app
    from unbroken.server.config import ServerConfig

    tokenizer = make_tokenizer()
    processor = make_processor(tokenizer)
    reply = [
        *tokenizer.encode((_WORDS * 2)[:63], add_special_tokens=False),
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    ]
    engine = ScriptedEngine(lambda prompt_ids: reply, vocab_size=len(tokenizer), context_length=2**17)
    inputs = ImageInputs(processor=processor)
    app = create_app(
        engine,
        lambda options: TemplateRenderer(tokenizer, template_kwargs=options, images=inputs),
        TextCodec(tokenizer),
        ServerConfig(model_name="bench"),
        image_processor=processor,
    )

    async def run() -> None:
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
            await asyncio.sleep(0.01)
        print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
        await task

    asyncio.run(run())


@contextmanager
def start_server() -> Iterator[str]:
    """Start the server in another process; yields its URL."""
    process = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=30)


class CountingTransport(httpx.AsyncBaseTransport):
    """Counts the bytes of request and response bodies."""

    def __init__(self) -> None:
        self._inner = Connections()
        self.num_sent = 0
        self.num_received = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        self.num_sent += len(await request.aread())
        response = await self._inner.handle_async_request(request)
        self.num_received += int(response.headers.get("content-length", 0))
        return response

    async def aclose(self) -> None:
        """See httpx."""
        await self._inner.aclose()

    def take(self) -> tuple[int, int]:
        """Return the counts since the last call."""
        counts = self.num_sent, self.num_received
        self.num_sent = self.num_received = 0
        return counts


@dataclass(slots=True)
class Row:
    """One turn of one way, over all rounds."""

    sent: int = 0
    received: int = 0
    times_ms: list[float] = field(default_factory=list)


def make_message(turn: int, photos: list[EncodedImage]) -> dict[str, Any]:
    """Make the user message before a turn's reply."""
    text = f"Turn {turn}: {_WORDS * 3}"
    if turn not in TURNS_WITH_IMAGES:
        return {"role": "user", "content": text}
    image = {"type": "image", "image": photos[TURNS_WITH_IMAGES.index(turn)]}
    return {"role": "user", "content": [image, {"type": "text", "text": text}]}


async def play_ours(
    client: AsyncClient,
    transport: CountingTransport,
    renderer: TemplateRenderer,
    photos: list[EncodedImage],
    rows: list[Row],
) -> None:
    """Send ids, spans and hashes."""
    params = SamplingParams(max_tokens=64, stop_token_ids=renderer.get_stop_token_ids())
    ids: TokenIds = np.zeros(0, dtype=np.int32)
    spans: tuple[ImageSpan, ...] = ()
    completion: TokenIds = ids
    earlier: list[Any] = []
    for turn in range(NUM_TURNS):
        message: Any = make_message(turn, photos)
        start = time.perf_counter()
        if not turn:
            rendered = renderer.render([message])
            ids, spans = rendered.token_ids, rendered.images
        else:
            reply = renderer.parse_response(completion, prompt_ids=ids).to_message([])
            bridge = renderer.bridge_to_next_turn(ids, completion, [message], assistant=reply, earlier=earlier)
            assert isinstance(bridge, Bridge), bridge
            base = len(ids) + len(completion)
            spans += tuple(replace(span, offset=span.offset + base) for span in bridge.images)
            ids = np.concatenate([ids, completion, bridge.bridge_ids])
            earlier.append(reply)
        (result,) = await client.generate([ids], params, images=[spans])
        rows[turn].times_ms.append((time.perf_counter() - start) * 1000)
        completion = result.sequences[0].completion_ids
        earlier.append(message)
        rows[turn].sent, rows[turn].received = transport.take()


async def play_messages(
    client: AsyncClient, transport: CountingTransport, photos: list[EncodedImage], rows: list[Row]
) -> None:
    """Send all messages in every turn, with images as hashes."""
    messages: list[Any] = []
    for turn in range(NUM_TURNS):
        messages.append(make_message(turn, photos))
        start = time.perf_counter()
        answer = await client.chat(messages, max_tokens=64)
        rows[turn].times_ms.append((time.perf_counter() - start) * 1000)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        rows[turn].sent, rows[turn].received = transport.take()


async def play_resending(
    http: httpx.AsyncClient, transport: CountingTransport, photos: list[EncodedImage], rows: list[Row]
) -> None:
    """Send all messages and all images in every turn."""
    messages: list[Any] = []
    for turn in range(NUM_TURNS):
        message = make_message(turn, photos)
        start = time.perf_counter()
        if turn in TURNS_WITH_IMAGES:
            image = message["content"][0]["image"]
            url = f"data:image/jpeg;base64,{base64.b64encode(image.data).decode()}"
            message["content"][0] = {"type": "image_url", "image_url": {"url": url}}
        messages.append(message)
        body = {"messages": messages, "max_tokens": 64, "logprobs": True, "return_token_ids": True}
        answer = await http.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        rows[turn].times_ms.append((time.perf_counter() - start) * 1000)
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        rows[turn].sent, rows[turn].received = transport.take()


async def measure(url: str, num_rounds: int) -> dict[str, list[Row]]:
    """Measure rounds of all three ways; the first round is a warm-up."""
    tokenizer = make_tokenizer()
    renderer = TemplateRenderer(tokenizer, images=ImageInputs(processor=make_processor(tokenizer)))
    rng = np.random.default_rng(0)
    rows = {name: [Row() for _ in range(NUM_TURNS)] for name in ("ours", "messages", "re-sending")}
    own, other, plain = CountingTransport(), CountingTransport(), CountingTransport()
    async with (
        AsyncClient(url, transport=own) as client,
        AsyncClient(url, transport=other) as chatting,
        httpx.AsyncClient(base_url=url, timeout=600, transport=plain) as http,
    ):
        for round_number in range(num_rounds + 1):
            photos = [make_photo(rng) for _ in range(3 * len(TURNS_WITH_IMAGES))]
            await play_ours(client, own, renderer, photos[::3], rows["ours"])
            await play_messages(chatting, other, photos[1::3], rows["messages"])
            await play_resending(http, plain, photos[2::3], rows["re-sending"])
            if not round_number:
                for row in (row for side in rows.values() for row in side):
                    row.times_ms.clear()
    return rows


def print_table(sides: dict[str, list[Row]]) -> None:
    """Print the figures of each turn, and their sums."""
    print(" " * 5 + "".join(f"{name:>27}" for name in sides))
    print("turn " + f"{'sent':>11}{'received':>10}{'ms':>6}" * len(sides))
    for turn, rows in enumerate(zip(*sides.values(), strict=True)):
        cells = "".join(f"{row.sent:>11,}{row.received:>10,}{statistics.median(row.times_ms):>6.0f}" for row in rows)
        print(f"{turn + 1:<5}{cells}{'  + image' if turn in TURNS_WITH_IMAGES else ''}")
    totals = "".join(
        f"{sum(row.sent for row in rows):>11,}{sum(row.received for row in rows):>10,}"
        f"{sum(statistics.median(row.times_ms) for row in rows):>6.0f}"
        for rows in sides.values()
    )
    print(f"{'all':5}{totals}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    with start_server() as url:
        sides = asyncio.run(measure(url, arguments.rounds))
    print_table(sides)


if __name__ == "__main__":
    main()
