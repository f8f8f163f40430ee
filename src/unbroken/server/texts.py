"""Checks the length of a request's texts before they are encoded, and encodes them in the text threads.

A context of 2,048 ids and a longest token of 128 characters hold at most 262,144 characters. To encode 4 MB, only to
find that they are too many, would take half a minute.
"""

from __future__ import annotations

import math
from asyncio import wrap_future
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from unbroken.errors import ContextOverflowError
from unbroken.messages import iterate_strings
from unbroken.server.context import ServerContext
from unbroken.server.http.errors import HttpError
from unbroken.server.service import add_place
from unbroken.types import EncodedImage, TokenIds, token_ids

_CHARS_AT_ONCE = 2**16
"""Texts are encoded together up to this length: between such pieces a client that left ends the work."""


async def encode_prompts(
    context: ServerContext, prompts: Sequence[str | list[int]], *, names: Callable[[int], str]
) -> list[TokenIds]:
    """Encode the prompts that are texts, in order; `names` gives the field of a prompt, for errors.

    Raises:
        HttpError: a text has more characters than the context can hold.
        ContextOverflowError: a text has more ids than the context; those behind it are not encoded.
        InvalidInputError: the tokenizer fails on a text.
    """
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_length(context, len(prompt), name=names(index))
    encoded: list[TokenIds] = []
    for piece in _cut(prompts):
        encoded += await wrap_future(context.text_threads.submit(_to_ids, context, piece))
        for index in range(len(encoded) - len(piece), len(encoded)):
            _check_ids(context, encoded[index], index, len(prompts))
    return encoded


def check_length(context: ServerContext, num_chars: int, *, name: str) -> None:
    """Raise `HttpError` if a text of the field `name` has more characters than the ids of the context can have."""
    context_length, longest = context.service.engine.context_length, context.codec.longest_token
    maximum = context_length * longest
    if num_chars > maximum:
        raise HttpError(
            400,
            f"{name} must have at most {maximum} characters ({context_length} ids of at most {longest} each), got "
            f"{num_chars}. This model's maximum context length is {context_length} tokens, but your request has at "
            f"least {-(-num_chars // longest)} input tokens",
            param=name,
            code="context_length_exceeded",
        )


def check_conversation(context: ServerContext, *parts: Any, name: str = "messages") -> None:
    """Raise `HttpError` if all text of messages, tools and template options together exceeds the context.

    Images must have been loaded: in base64 they would count as text. Call this in a text thread.
    """
    maximum = context.service.engine.context_length * context.codec.longest_token
    if _count_bytes(parts) > maximum:  # bytes are at least as many as characters, and counted much faster
        check_length(context, sum(map(len, iterate_strings(list(parts)))), name=name)


def _count_bytes(parts: Sequence[Any]) -> float:
    """The number of bytes of these values as JSON, without images; infinite if they are not JSON."""
    try:
        return len(orjson.dumps(parts, default=_leave_out, option=orjson.OPT_PASSTHROUGH_DATACLASS))
    except TypeError:
        return math.inf


def _leave_out(value: Any) -> None:
    if not isinstance(value, EncodedImage):
        raise TypeError


def _cut(prompts: Sequence[str | list[int]]) -> list[list[str | list[int]]]:
    """Cut prompts into pieces of up to `_CHARS_AT_ONCE`, or a single longer one."""
    pieces: list[list[str | list[int]]] = []
    size = 0
    for prompt in prompts:
        size += len(prompt)
        if not pieces or size > _CHARS_AT_ONCE:
            pieces.append([])
            size = len(prompt)
        pieces[-1].append(prompt)
    return pieces


def _to_ids(context: ServerContext, prompts: Sequence[str | list[int]]) -> list[TokenIds]:
    return [context.codec.encode(one) if isinstance(one, str) else token_ids(one, name="prompts") for one in prompts]


def _check_ids(context: ServerContext, ids: TokenIds, index: int, number: int) -> None:
    context_length = context.service.engine.context_length
    if len(ids) > context_length:
        error = ContextOverflowError(num_prompt_tokens=len(ids), context_length=context_length)
        raise add_place(error, "prompts", index, number)
