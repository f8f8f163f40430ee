"""Pictures in memory and files of all sorts: what cannot be used is an error that names the image."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from unbroken.errors import ImageError
from unbroken.images.decoding import ImageLimits, check_image, decode_image
from unbroken.images.loading import ImageLoader, find_image_parts
from unbroken.types import EncodedImage


@pytest.mark.parametrize("mode", ["CMYK", "F", "I", "YCbCr", "HSV", "LAB"])
def test_a_picture_of_a_mode_that_no_png_has_is_an_error_that_names_image_and_mode(mode: str) -> None:
    with pytest.raises(ImageError, match=rf"messages\[0\] must be a picture .* of mode {mode}"):
        ImageLoader().load(Image.new(mode, (2, 2)), name="messages[0]")


def test_a_picture_whose_file_breaks_when_it_is_read_is_an_error_that_names_the_image() -> None:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, format="PNG")
    cut = Image.open(io.BytesIO(file.getvalue()[:1000]))
    with pytest.raises(ImageError, match=r"messages\[3\] must be a picture that can be written as PNG"):
        ImageLoader().load(cut, name="messages[3]")


@pytest.mark.parametrize("path", [Path("/dev/zero"), Path("no\ud800such")])
def test_a_path_of_no_regular_file_is_an_error_that_names_the_image(path: Path) -> None:
    with pytest.raises(ImageError, match=r"^messages\[1\] must be a "):
        ImageLoader().load(path, name="messages[1]")


def test_base64_that_is_too_long_for_a_file_name_is_read() -> None:
    file = saved(Image.effect_noise((20, 20), 50), "BMP")
    text = base64.b64encode(file).decode()
    assert max(map(len, text.split("/"))) > 255
    assert ImageLoader().load(text).data == file


def test_parts_that_are_none_are_passed_over_where_images_are_looked_for() -> None:
    image = {"type": "image", "image": b"..."}
    messages: Any = [{"role": "user"}, {"role": "user", "content": ["hi", None, {"type": []}, image]}]
    assert find_image_parts(messages) == [("messages[1].content[3]", image)]


def test_the_text_in_a_file_does_not_stay_with_its_picture() -> None:
    info = PngInfo()
    info.add_text("Comment", "a" * 100_000, zip=True)
    info.add_text("Software", "b")
    assert decode_image(EncodedImage(saved(Image.new("RGB", (2, 2)), "PNG", pnginfo=info))).info == {}


def test_an_animation_that_is_cut_anywhere_is_one_picture_or_an_image_error() -> None:
    frames = [Image.effect_noise((8, 8), 50 + k) for k in range(2)]
    whole = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    outcomes = [outcome_of(whole[:stop]) for stop in range(20, len(whole) + 1)]
    assert set(outcomes) == {"one picture", "image error"}
    assert outcomes[-1] == "image error"


def outcome_of(data: bytes) -> str:
    try:
        check_image(EncodedImage(data), ImageLimits())
    except ImageError:
        return "image error"
    return "one picture"


def test_an_image_above_the_size_that_pillow_warns_of_is_an_error_where_warnings_are_errors() -> None:
    with pytest.raises(ImageError, match="at most 67108864 pixels"):
        check_image(EncodedImage(saved(Image.new("1", (10_000, 9_000)), "PNG")), ImageLimits())


def saved(picture: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, format=form, **options)
    return file.getvalue()
