"""`POST /v1/images`: an image is sent once, and requests then name it as `sha256:...`."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from unbroken.server.context import get_context
from unbroken.server.http.access import Access, Routes
from unbroken.server.http.json import json_response

router = Routes(Access.CLIENT)
_FILE: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


@router.post(
    "/v1/images",
    summary="Send an image once",
    response_description="`sha256`, the image's name from now on, and its `width` and `height`",
    openapi_extra={
        "requestBody": {"required": True, "content": {"image/*": _FILE, "application/octet-stream": _FILE}},
    },
)
async def upload(request: Request) -> Response:
    """Keep the file in the body: PNG, JPEG, WebP, BMP or GIF, whatever its content type, within the image limits."""
    image, width, height = await get_context(request).images.upload(await request.body())
    return json_response({"sha256": image.sha256, "width": width, "height": height})
