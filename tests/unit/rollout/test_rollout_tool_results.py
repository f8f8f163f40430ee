"""What tools return as content: pictures become parts, everything else stays text."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from support.images import dot, dot_file
from unbroken.rollout.tools import ToolStatus, to_content, tool

IMAGE = {"type": "image", "image": dot(1)}
URL = f"data:image/png;base64,{base64.b64encode(dot_file(1).data).decode()}"


@pytest.mark.parametrize(
    ("result", "content"),
    [
        (dot(1), [IMAGE]),
        (dot_file(1), [{"type": "image", "image": dot_file(1)}]),
        ([dot(1)], [IMAGE]),
        (("chart:", dot(1), "done"), [{"type": "text", "text": "chart:"}, IMAGE, {"type": "text", "text": "done"}]),
        ([{"type": "text", "text": "a"}, IMAGE], [{"type": "text", "text": "a"}, IMAGE]),
        ([{"type": "image_pil", "image_pil": dot(1)}], [IMAGE]),
        ([{"type": "image_url", "image_url": {"url": URL}}], [{"type": "image", "image": URL}]),
        ([{"type": "image", "image": b"file"}], [{"type": "image", "image": b"file"}]),
    ],
)
def test_pictures_become_parts(result: Any, content: Any) -> None:
    assert to_content(result) == content


@pytest.mark.parametrize(
    "result",
    [
        ["a", "b"],
        [],
        [{"type": "text", "text": "a"}],
        [{"type": "image", "image": "/etc/hostname"}],
        [{"type": "image_url", "image_url": {"url": "http://example.org/cat.png"}}],
        [{"type": "image", "image": "sha256:00"}, "a"],
        [{"type": "image"}],
        {"type": "image", "image": URL},
    ],
)
def test_what_only_names_an_image_or_looks_like_parts_stays_json(result: Any) -> None:
    assert to_content(result) == json.dumps(result)


async def test_a_picture_among_what_is_no_part_is_an_error_of_the_tool() -> None:
    @tool
    def odd() -> list[Any]:
        """Return odd things."""
        return [dot(1), 7]

    outcome = await odd.call({})
    assert outcome.status is ToolStatus.ERROR
    assert "not JSON serializable" in str(outcome.content)


async def test_text_beside_a_picture_must_be_text() -> None:
    @tool
    def odd() -> list[Any]:
        """Return half of a character."""
        return ["\ud800", dot(1)]

    assert (await odd.call({})).status is ToolStatus.ERROR
