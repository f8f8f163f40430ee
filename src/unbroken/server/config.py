"""What a server is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one server takes on; beyond it a request is refused with the limit's name, and nothing else happens."""

    max_body_bytes: int = 64 * 2**20
    """Most bytes of a request's body: 413 beyond."""
    max_prompts: int = 4096
    """Most prompts in one request."""
    max_n: int = 512
    """Most completions of one prompt."""
    max_queued: int = 16384
    """Most completions that are sampled or wait at once, over all requests: 429 beyond, with Retry-After."""
    max_images: int = 1024
    """Most images in one request."""
    max_image_bytes: int = 20 * 2**20
    """Most bytes of an image's file."""
    max_image_pixels: int = 64 * 2**20
    """Most pixels of an image, width times height, as its file's header has them; and what a request may ask the
    processor to make of one."""
    image_cache_mib: int = 1024
    """How much of images' files is kept to be referred to by hash."""
    max_top_logprobs: int = 128
    """Most of the most likely ids that are reported at each position."""
    request_timeout_s: float = 3600.0
    """Longest time a request is worked on: 504 beyond, and it is aborted."""
    retry_after_s: int = 1
    """What Retry-After says."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"limits.{name} must be > 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What a server is called, whom it lets in, and its limits."""

    model_name: str
    """What `model` is in requests that name the model itself."""
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters that the engine has: what `model` may be as well."""
    api_key: str | None = None
    """Asked for by every route but health; None asks for none."""
    admin_key: str | None = None
    """Asked for by routes that change the engine (weights, caches, pausing); None lets `api_key` open them too."""
    image_hosts: tuple[str, ...] = ()
    """Hosts, as `HOST` or `HOST:PORT`, whose http(s) URLs of images are fetched; none by default."""
    weights_dir: Path | None = None
    """The folder in which new weights may be named; None takes none."""
    limits: Limits = field(default_factory=Limits)
