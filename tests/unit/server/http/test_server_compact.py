"""Bodies in the compact form: only where arrays have a meaning, and under the rules of JSON."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from support.servers import asgi_client, make_app, scripted_engine
from unbroken import compact

IDS = np.array([5, 6, 7], dtype=np.int32)
PARAMS = {"max_tokens": 3}


def frame(head: bytes, body: bytes = IDS.tobytes()) -> bytes:
    start = 12 + len(head)
    return compact.encode({})[:8] + struct.pack("<I", len(head)) + head + b"\0" * (-start % 8) + body


async def post(body: bytes, path: str = "/v1/sample") -> tuple[int, str]:
    async with asgi_client(make_app(scripted_engine(lambda _: [7, 8]))) as client:
        answer = await client.post(path, content=body, headers={"Content-Type": compact.MEDIA_TYPE})
        return answer.status_code, answer.text


async def test_prompts_may_be_arrays() -> None:
    assert (await post(compact.encode({"prompts": [IDS, IDS], "params": PARAMS})))[0] == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": IDS},
        {"mm_processor_kwargs": {"a": IDS}},
        {"images": [IDS]},
        {"params": {**PARAMS, "stop_token_ids": IDS}},
        {"prompts": IDS},
        {"prompts": [[IDS]]},
        {"prompts": [IDS.astype(np.float32)]},
        {"prompts": [IDS.reshape(1, 3)]},
    ],
)
async def test_an_array_elsewhere_or_of_another_kind_is_refused(fields: dict[str, Any]) -> None:
    status, text = await post(compact.encode({"prompts": [IDS], "params": PARAMS, **fields}))
    assert (status, "array" in text) == (400, True)


@pytest.mark.parametrize(
    "more",
    [b'"params": {"max_tokens": 3, "temperature": NaN}', b'"session_id": "\\ud800"', b'"n": 1' + b"0" * 5000],
    ids=["NaN", "surrogate", "large number"],
)
async def test_the_head_has_the_rules_of_json(more: bytes) -> None:
    assert (await post(frame(b'{"prompts": [{"$array": ["<i4", [3], 0]}], ' + more + b"}")))[0] == 400


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/score", {"sequences": [[5, 6]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ],
)
async def test_other_paths_take_json_only(path: str, fields: dict[str, Any]) -> None:
    assert (await post(compact.encode(fields), path))[0] == 400
