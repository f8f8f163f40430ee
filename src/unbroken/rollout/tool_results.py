"""Convert the result of a tool to the content of the message that answers its call.

    "42"                                       text, as it is
    {"value": 42}, ["a", "b"], None            JSON
    picture                                    [{"type": "image", "image": picture}]
    ["The chart:", picture]                    [{"type": "text", "text": "The chart:"}, {"type": "image", ...}]
    [{"type": "text", ..}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,.."}}]    the parts

A picture is a PIL image, an `EncodedImage`, or a part that contains one, a file's bytes or a data URL. Text that only
names a file or a URL stays text: text from outside must not cause files to be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from unbroken.messages import IMAGE_TYPES, ContentPart, get_image_source
from unbroken.types import EncodedImage


def to_content(result: Any) -> str | list[ContentPart]:
    """Convert a tool's result to message content.

    Raises:
        TypeError, ValueError: it is neither JSON nor images, or has characters that no tokenizer can encode.
    """
    if _is_picture(result):
        return [{"type": "image", "image": result}]
    if isinstance(result, (list, tuple)) and all(map(_is_part, result)) and any(map(_is_image, result)):
        return [_to_part(item) for item in result]
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def _is_part(item: Any) -> bool:
    is_text = isinstance(item, Mapping) and item.get("type") == "text" and isinstance(item.get("text"), str)
    return isinstance(item, str) or is_text or _is_image(item)


def _is_image(item: Any) -> bool:
    if _is_picture(item):
        return True
    if not isinstance(item, Mapping) or item.get("type") not in IMAGE_TYPES:
        return False
    source = get_image_source(item)
    is_file = isinstance(source, (bytes, bytearray)) or (isinstance(source, str) and source.startswith("data:image/"))
    return is_file or _is_picture(source)


def _is_picture(value: Any) -> bool:
    return isinstance(value, EncodedImage) or (hasattr(value, "save") and hasattr(value, "getbands"))


def _to_part(item: Any) -> ContentPart:
    if _is_picture(item):
        return {"type": "image", "image": item}
    text = item if isinstance(item, str) else item.get("text", "") if item["type"] == "text" else None
    if text is None:
        return {"type": "image", "image": get_image_source(item)}
    text.encode()
    return {"type": "text", "text": text}
