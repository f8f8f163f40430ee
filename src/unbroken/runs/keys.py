"""API keys in files."""

from __future__ import annotations

from pathlib import Path

from unbroken.errors import InvalidInputError


def read_key(path: Path | None, *, field: str) -> str | None:
    """Read a key; None without a file. Raises `InvalidInputError`, which names the field, if the file has no key."""
    if path is None:
        return None
    try:
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{field} must be a text file with the key, got {path}: {error}") from None
    if not key:
        raise InvalidInputError(f"{field} must be a text file with the key, and {path} is empty")
    return key
