"""Images of data sets: in a column or in the messages, in any form, as the files that they came in."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from support.images import dot_file
from unbroken.errors import ImageError, MessagesError
from unbroken.images.loader import ImageLoader
from unbroken.runs.prompts.dataset import DataConfig, Rows
from unbroken.types import EncodedImage

CAT, DOG = dot_file(1), dot_file(2)
URL = "data:image/png;base64," + base64.b64encode(CAT.data).decode()
USER_WITH_TWO = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The library's cache, which is else in the user's home; and two files of images."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "cat.png").write_bytes(CAT.data)
    (tmp_path / "images" / "dog.png").write_bytes(DOG.data)


def jsonl(folder: Path, *rows: Any) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def load(file: Path, **options: Any) -> Rows:
    return Rows(DataConfig(**{"file": file, "images": "image", "shuffle": False, **options}), seed=0)


def shown(rows: Rows, number: int = 0) -> list[Any]:
    """The content of the last message, with the hashes of its images."""
    content = rows.messages(number)[-1]["content"]
    return [_show(part) for part in content] if isinstance(content, list) else [content]


def _show(part: Any) -> str:
    return part["text"] if part["type"] == "text" else ImageLoader().load(part["image"]).sha256


@pytest.mark.parametrize(
    ("cell", "images"),
    [
        ("images/cat.png", [CAT]),
        (["images/cat.png", "images/dog.png"], [CAT, DOG]),
        ([], []),
        (URL, [CAT]),
        (URL.partition(",")[2], [CAT]),
        ([URL, "images/dog.png"], [CAT, DOG]),
        ({"bytes": None, "path": "images/dog.png"}, [DOG]),
    ],
)
def test_the_images_of_a_column_come_before_the_text_of_its_prompt(tmp_path, cell, images):
    rows = load(jsonl(tmp_path, {"prompt": "Which?", "image": cell}), system="Be brief.")
    assert rows.has_images == bool(images)
    assert shown(rows) == [*(image.sha256 for image in images), "Which?"]
    assert rows.messages(0)[0] == {"role": "system", "content": "Be brief."}


def test_a_row_may_have_no_image(tmp_path):
    rows = load(jsonl(tmp_path, {"prompt": "1?", "image": None}, {"prompt": "2?", "image": "images/cat.png"}))
    assert shown(rows, 0) == ["1?"]
    assert shown(rows, 1) == [CAT.sha256, "2?"]


def test_messages_may_mark_the_places_of_the_columns_images(tmp_path):
    rows = load(jsonl(tmp_path, {"prompt": USER_WITH_TWO, "image": ["images/cat.png", "images/dog.png"]}))
    assert shown(rows) == [CAT.sha256, "or", DOG.sha256]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = load(jsonl(tmp_path, {"prompt": messages, "image": ["images/cat.png"]}))
    assert [message["content"] for message in rows.messages(0)][1:] == ["b", "c"]
    assert [_show(part) for part in rows.messages(0)[0]["content"]] == [CAT.sha256, "a"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "images/cat.png"},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image", "image": {"bytes": None, "path": "images/cat.png"}},
    ],
)
def test_messages_may_have_their_images_inside(tmp_path, part):
    content = [{"type": "text", "text": "Look:"}, part]
    rows = load(jsonl(tmp_path, {"prompt": [{"role": "user", "content": content}]}), images=None)
    assert rows.has_images
    assert shown(rows) == ["Look:", CAT.sha256]


def test_parquet_keeps_the_files_of_an_image_feature(tmp_path):
    """Decoding a JPEG and encoding it again would make another picture of it, under another hash."""
    picture = Image.effect_noise((16, 16), 50).convert("RGB")
    picture.save(tmp_path / "noise.jpg", quality=70)
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "image": datasets.List(datasets.Image()),
            "answer": datasets.Value("int64"),
        }
    )
    table = {"prompt": ["1?", "2?"], "image": [[str(tmp_path / "noise.jpg")], []], "answer": [1, 2]}
    datasets.Dataset.from_dict(table, features=features).to_parquet(tmp_path / "prompts.parquet")
    rows = load(tmp_path / "prompts.parquet")
    assert shown(rows) == [EncodedImage((tmp_path / "noise.jpg").read_bytes()).sha256, "1?"]
    assert shown(rows, 1) == ["2?"]
    assert rows.row(0)["answer"] == 1
    assert rows.row(0)["image"][0].size == (16, 16)


def test_parquet_may_have_pictures_inside_of_messages(tmp_path):
    picture = Image.new("RGB", (4, 4), "red")
    content = [{"type": "image", "image": picture, "text": None}, {"type": "text", "image": None, "text": "Look"}]
    datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": content}]}]).to_parquet(tmp_path / "a.parquet")
    rows = load(tmp_path / "a.parquet", images=None)
    parts = rows.messages(0)[0]["content"]
    assert [sorted(part) for part in parts] == [["image", "type"], ["text", "type"]]
    assert ImageLoader().load(parts[0]["image"])


def test_bytes_of_a_file_are_an_image(tmp_path):
    datasets.Dataset.from_list([{"prompt": "x", "image": CAT.data}]).to_parquet(tmp_path / "a.parquet")
    assert shown(load(tmp_path / "a.parquet")) == [CAT.sha256, "x"]


def test_the_source_changes_with_an_image(tmp_path):
    by_file = {}
    for name, image in (("a", CAT), ("b", DOG), ("c", CAT)):
        (tmp_path / name).mkdir()
        datasets.Dataset.from_list([{"prompt": "x", "image": image.data}]).to_parquet(tmp_path / name / "p.parquet")
        by_file[name] = load(tmp_path / name / "p.parquet").source
    assert by_file["a"] == by_file["c"] != by_file["b"]


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"prompt": "x", "image": "images/cow.png"}, ImageError, r"row 0, column 'prompt': messages\[0\].content\[0\] "
         r"must be base64 or an existing file, got 'images/cow.png'.*\(paths are relative to "),
        ({"prompt": "x", "image": "data:image/png;base64,aGVsbG8="}, ImageError, r"content\[0\] must be an image file"),
        ({"prompt": USER_WITH_TWO, "image": "images/cat.png"}, MessagesError, r"row 0, .* must have as many images in "
         r"the column that data.images names as its messages have places for them, got 1 and 2"),
        ({"prompt": USER_WITH_TWO, "image": []}, MessagesError, r"got 0 and 2"),
        ({"prompt": [{"role": "system", "content": "x"}], "image": URL}, MessagesError, r"must have a user message for "
         r"its 1 images, got none"),
        ({"prompt": "x", "image": "https://example.com/a.png"}, ImageError, r"must not be a URL to fetch"),
    ],
)  # fmt: skip
def test_images_that_cannot_be_used_are_refused_at_the_start(tmp_path, row, error, message):
    with pytest.raises(error, match=message):
        load(jsonl(tmp_path, row))


def test_places_without_a_column_are_refused(tmp_path):
    with pytest.raises(
        MessagesError, match=r"must have as many images in the column that data.images names .* got 0 and 2"
    ):
        load(jsonl(tmp_path, {"prompt": USER_WITH_TWO}), images=None)
