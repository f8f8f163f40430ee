"""Pictures in memory as files: what cannot be written down is an error that names the image."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from unbroken.errors import ImageError
from unbroken.images.loading import ImageLoader


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
