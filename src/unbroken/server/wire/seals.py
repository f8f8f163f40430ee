"""Seals of reasoning: how we recognise reasoning of ours that a client sends back.

    make_seal("hm")                 "unbroken1.9b1f..."             a digest, where the client gets the text itself
    make_seal("hm", packed=True)    "unbroken1.9b1f....aG0="        with the text, where the client gets nothing else

Anthropic's clients get a seal as `signature`, OpenAI's as `encrypted_content`. It shows that the text is unchanged, and
hides nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib

_PREFIX = "unbroken1"
_KEY = b"unbroken: reasoning"
_MAX_CHARS = 2**24
"""Longest packed text: a seal comes from outside, and a small one could expand to gigabytes."""


def make_seal(text: str, *, packed: bool = False) -> str:
    """Make the seal of a reasoning text; with `packed` it contains the text."""
    parts = [_PREFIX, _digest(text)]
    if packed:
        parts.append(base64.b64encode(zlib.compress(text.encode())).decode())
    return ".".join(parts)


def is_seal(seal: str) -> bool:
    """Whether a seal is ours; those of other servers cannot be checked."""
    return seal.startswith(f"{_PREFIX}.")


def fits_seal(seal: str, text: str) -> bool:
    """Whether this is the text that was sealed."""
    return seal.split(".")[1:2] == [_digest(text)]


def unpack_seal(seal: str) -> str | None:
    """The text in a packed seal of ours; None for other seals, and if text and digest do not match."""
    parts = seal.split(".")
    if len(parts) != 3 or parts[0] != _PREFIX:
        return None
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(base64.b64decode(parts[2], validate=True), _MAX_CHARS).decode()
    except (binascii.Error, ValueError, zlib.error):
        return None
    return text if inflate.eof and fits_seal(seal, text) else None


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), key=_KEY, digest_size=16).hexdigest()
