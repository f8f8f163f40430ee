"""A file of some kilobytes may be a picture of a gigabyte: its header says so before it is decoded."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from support.waits import wait_until
from unbroken.errors import ImageError
from unbroken.images.decoder import DecodingBudget, ImageLimits
from unbroken.images.processor import HfImageProcessor
from unbroken.types import EncodedImage


def make_png(edge: int) -> EncodedImage:
    file = io.BytesIO()
    Image.new("1", (edge, edge)).save(file, "PNG")
    return EncodedImage(file.getvalue())


class Watched:
    """Counts how many pixels are held at a time."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self.num_held = self.most_held = 0

    def hold(self, image: EncodedImage, num_pixels: int, *, seconds: float = 0.005) -> None:
        with self._limits.reserve({"image": image}):
            with self._lock:
                self.num_held += num_pixels
                self.most_held = max(self.most_held, self.num_held)
            time.sleep(seconds)
            with self._lock:
                self.num_held -= num_pixels


def test_pictures_are_decoded_as_many_at_a_time_as_fit_and_all_get_their_turn() -> None:
    watched = Watched(ImageLimits(budget=DecodingBudget(16 * 10_000)))
    files = {edge: make_png(edge) for edge in (10, 50, 100)}
    with ThreadPoolExecutor(16) as threads:
        works = [threads.submit(watched.hold, files[edge], edge * edge) for edge in (10, 50, 100, 50) * 20]
        for work in works:
            work.result(timeout=60)
    assert 5000 < watched.most_held <= 10_000
    assert watched.num_held == 0


def test_small_ones_do_not_overtake_a_large_one_for_ever() -> None:
    limits = ImageLimits(budget=(budget := DecodingBudget(16 * 10_000)))
    large, small, order = make_png(100), make_png(10), []

    def hold(image: EncodedImage, name: str) -> None:
        with limits.reserve({"image": image}):
            order.append(name)

    with ThreadPoolExecutor(8) as threads:
        with limits.reserve({"image": small}):
            waiting = [threads.submit(hold, large, "large")]
            asyncio.run(wait_until(budget._next.locked))
            waiting += [threads.submit(hold, small, "small") for _ in range(4)]
            time.sleep(0.05)
            assert order == []
        for work in waiting:
            work.result(timeout=60)
    assert order == ["large", *["small"] * 4]


def test_a_file_of_8_kb_that_needs_a_gigabyte_is_refused_by_its_header() -> None:
    file = make_png(8190)
    assert len(file.data) < 9_000
    limits = ImageLimits(budget=DecodingBudget(10**9))
    started = time.process_time()
    expected = (
        r"image must need at most 1000000000 bytes to be decoded \(image_memory_mib\), got 1073217600 for 67076100"
    )
    with pytest.raises(ImageError, match=expected), limits.reserve({"image": file}):
        pass
    assert time.process_time() - started < 0.2


def test_the_pictures_of_one_request_count_together() -> None:
    limits = ImageLimits(budget=DecodingBudget(16 * 10_000 + 4 * 3 * 10_000))
    with limits.reserve({str(k): make_png(100) for k in range(4)}):
        pass
    with (
        pytest.raises(ImageError, match="got 320000 for 50000 pixels"),
        limits.reserve({str(k): make_png(100) for k in range(5)}),
    ):
        pass


def test_a_processor_holds_the_memory_until_it_is_done_also_when_it_fails() -> None:
    budget = DecodingBudget(16 * 10_000)
    held: list[int] = []

    class Processor:
        image_token = "<image>"
        tokenizer = type("Tokenizer", (), {"encode": lambda self, text, **options: [7]})()
        image_processor = object()

        def __call__(self, **inputs: object) -> None:
            held.append(budget._num_used)
            raise ValueError("no")

    with pytest.raises(ImageError, match="must be one that the model's processor takes"):
        HfImageProcessor(Processor(), limits=ImageLimits(budget=budget)).process(make_png(100))
    assert (held, budget._num_used) == ([160_000], 0)
