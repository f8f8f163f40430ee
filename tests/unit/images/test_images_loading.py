"""Pictures in memory and files of all sorts: what cannot be used is an error that names the image."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from unbroken.errors import ImageError
from unbroken.images.decoder import ImageLimits, _count_png_bytes, check_image, decode_image
from unbroken.images.loader import ImageLoader, find_image_parts
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


COLOURS = [("1", 1), ("L", 8), ("P", 1), ("LA", 16), ("RGB", 24), ("RGBA", 32), ("I;16", 16)]


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (13, 7), (64, 33)])
@pytest.mark.parametrize(("mode", "bits"), COLOURS)
def test_a_png_is_whole_with_all_of_its_rows_and_refused_without_the_last(
    mode: str, bits: int, size: tuple[int, int]
) -> None:
    file = saved(Image.new(mode, size), "PNG")
    assert decode_image(EncodedImage(file)).size == size
    data = png_data(file)
    assert len(data) == _count_png_bytes(*size, bits, interlaced=False)
    short = with_png_data(file, data[: -(1 + (size[0] * bits + 7) // 8)])
    with pytest.raises(ImageError, match=r"picture\[1\] must be a whole PNG file, .* bytes of pixels"):
        decode_image(EncodedImage(short), name="picture[1]")


def test_the_passes_of_an_interlaced_png_are_counted() -> None:
    rows = [(1, 1), (1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8)]  # of an 8 x 8 picture, by the specification
    assert _count_png_bytes(8, 8, 8, interlaced=True) == sum(height * (1 + width) for height, width in rows)
    assert _count_png_bytes(1, 1, 8, interlaced=True) == 2


JPEGS: list[dict[str, Any]] = [
    {}, {"progressive": True}, {"restart_marker_blocks": 4}, {"restart_marker_rows": 1},
    {"quality": 95, "subsampling": 0, "optimize": True},
]  # fmt: skip


def noise(mode: str, size: tuple[int, int]) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (size[1] // 4 + 1, size[0] // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(values).resize(size).convert(mode)


@pytest.mark.parametrize("options", JPEGS, ids=str)
@pytest.mark.parametrize("size", [(400, 300), (64, 64), (1100, 1100)])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_is_whole_with_all_of_its_data_and_refused_without_the_last(
    mode: str, size: tuple[int, int], options: dict[str, Any]
) -> None:
    file = saved(noise(mode, size), "JPEG", **options)
    assert decode_image(EncodedImage(file)).size == size
    assert decode_image(EncodedImage(file + b"something else")).size == size
    scan = file.index(b"\xff\xda") + 20
    for share in (0.1, 0.5, 0.9):
        cut = file[: scan + int(share * (len(file) - scan))].rstrip(b"\xff")
        with pytest.raises(ImageError, match="must be a whole JPEG file"):
            decode_image(EncodedImage(cut + b"\xff\xd9"))


@pytest.mark.parametrize("options", JPEGS, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (17, 9), (2000, 1200)])
def test_a_jpeg_of_one_colour_is_whole(size: tuple[int, int], options: dict[str, Any]) -> None:
    assert decode_image(EncodedImage(saved(Image.new("RGB", size, (128, 128, 128)), "JPEG", **options))).size == size


@pytest.mark.parametrize("ending", [b"\x81", b""], ids=["end code", "no end code"])
@pytest.mark.parametrize("rest", [b"", b"\x05hello"], ids=["nothing after it", "other data after it"])
def test_a_gif_without_its_last_rows_is_refused(ending: bytes, rest: bytes) -> None:
    assert decode_image(EncodedImage(gif_of_pixels(400, ending))).size == (20, 20)
    with pytest.raises(ImageError, match="must be a whole GIF file"):
        decode_image(EncodedImage(gif_of_pixels(380, ending + rest)))


def gif_of_pixels(number: int, ending: bytes) -> bytes:
    """A GIF of 20 x 20 pixels that has data for `number` of them, one byte for each."""
    header = b"GIF89a" + struct.pack("<HHBBB", 20, 20, 0xF6, 0, 0) + bytes(range(128)) * 3
    frame = b"," + struct.pack("<HHHHBB", 0, 0, 20, 20, 0, 7)
    clear = b"\x80"  # the code table is dropped before codes need more bits
    data = b"".join(clear + b"\x05" * min(100, number - start) for start in range(0, number, 100)) + ending
    blocks = [data[start : start + 255] for start in range(0, len(data), 255)]
    return header + frame + b"".join(bytes([len(block)]) + block for block in blocks) + b"\0;"


def test_grey_values_of_16_bits_keep_their_upper_8() -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    decoded = decode_image(EncodedImage(saved(Image.fromarray(values), "PNG")))
    assert np.asarray(decoded)[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    see_through = saved(Image.fromarray(values), "PNG", transparency=256)
    assert np.asarray(decode_image(EncodedImage(see_through)))[0, :, 2].tolist() == [0, 0, 255, 128, 255]


ALPHA_OF_PALETTE = {"one colour": 3, "each colour": bytes(range(0, 256, 16))}


@pytest.mark.parametrize("mode", ["RGBA", "LA", *ALPHA_OF_PALETTE])
def test_a_picture_on_white_is_that_of_all_rows_at_once(mode: str) -> None:
    values = np.random.default_rng(0).integers(0, 256, (600, 20, 4), dtype=np.uint8)
    picture = Image.fromarray(values)
    if mode in ALPHA_OF_PALETTE:
        file = saved(picture.convert("RGB").quantize(16), "PNG", transparency=ALPHA_OF_PALETTE[mode])
    else:
        file = saved(picture.convert(mode), "PNG")
    whole = Image.open(io.BytesIO(file)).convert("RGBA")
    expected = Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("RGB")
    assert np.array_equal(np.asarray(decode_image(EncodedImage(file))), np.asarray(expected))


def test_a_jpeg_for_print_has_its_colours() -> None:
    file = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")
    red, green, blue = np.asarray(decode_image(EncodedImage(file)))[4, 4].tolist()
    assert red > 230
    assert max(green, blue) < 25


def test_an_upright_rgb_picture_is_decoded_without_a_copy() -> None:
    file = EncodedImage(saved(Image.new("RGB", (2000, 2000)), "PNG"))
    turned = Image.Exif()
    turned[0x0112] = 6
    assert decode_image(file).size == (2000, 2000)
    assert decode_image(EncodedImage(saved(Image.new("RGB", (20, 10)), "JPEG", exif=turned))).size == (10, 20)


def test_the_limit_that_a_picture_exceeds_is_the_one_that_is_named() -> None:
    file = EncodedImage(saved(Image.new("1", (20_000, 9_000)), "PNG"))
    with pytest.raises(ImageError, match="at most 67108864 pixels, got 180000000"):
        check_image(file, ImageLimits())
    with pytest.raises(ImageError, match=r"at most \d+ pixels \(PIL.Image.MAX_IMAGE_PIXELS\), got 180000000"):
        check_image(file, ImageLimits(max_pixels=2**40))


def test_a_key_that_is_none_beside_the_image_is_no_image() -> None:
    image = EncodedImage(saved(Image.new("RGB", (2, 2)), "PNG"))
    for part in (
        {"type": "image_url", "image_url": None, "image": image},
        {"type": "image_url", "image_url": {"url": None}, "image": image},
        {"type": "image", "image": image, "image_url": None},
    ):
        assert ImageLoader().load_part(part, name="image") is image


@pytest.mark.parametrize("host", ["", "localhost"])
def test_a_file_url_is_percent_decoded(tmp_path: Path, host: str) -> None:
    file = tmp_path / "a picture of 100% café.png"
    file.write_bytes(saved(Image.new("RGB", (2, 2)), "PNG"))
    for url in (file.as_uri().replace("file://", f"file://{host}"), f"file://{host}{file}"):
        assert ImageLoader().load(url).data == file.read_bytes()


@pytest.mark.parametrize("source", ["file:///tmp/a%00b", Path("/tmp/a\0b")])
def test_a_path_with_a_nul_is_an_image_error(source: Any) -> None:
    with pytest.raises(ImageError, match="must be a file that can be read"):
        ImageLoader().load(source)


def png_data(file: bytes) -> bytes:
    """The content of a PNG's rows."""
    return zlib.decompress(b"".join(body for kind, body in chunks_of(file) if kind == b"IDAT"))


def with_png_data(file: bytes, data: bytes) -> bytes:
    """The same file with other rows."""
    written = [(kind, body) for kind, body in chunks_of(file) if kind not in (b"IDAT", b"IEND")]
    written += [(b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    return file[:8] + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in written
    )


def chunks_of(file: bytes) -> list[tuple[bytes, bytes]]:
    found, position = [], 8
    while position < len(file):
        length, kind = struct.unpack_from(">I4s", file, position)
        found.append((kind, file[position + 8 : position + 8 + length]))
        position += 12 + length
    return found
