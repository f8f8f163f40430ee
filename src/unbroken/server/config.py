"""The server's configuration. `unbroken serve --help-all` shows the docstrings of these fields."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of one server. A request beyond one is refused before anything is sampled; the error names the limit."""

    max_body_bytes: int = 64 * 2**20
    """Largest body of a request in bytes; a larger one is answered with 413."""
    max_prompts: int = 4096
    """Maximum number of prompts in one request."""
    max_n: int = 512
    """Maximum number of completions of one prompt (`n`)."""
    max_queued: int = 16384
    """Maximum number of completions sampled or waiting, over all requests; beyond it the answer is 429."""
    max_images: int = 1024
    """Maximum number of images in one request."""
    max_image_bytes: int = 20 * 2**20
    """Largest image file in bytes."""
    max_image_pixels: int = 64 * 2**20
    """Maximum width times height of an image, by the file's header, and of what `mm_processor_kwargs` make of it."""
    image_memory_mib: int = 2048
    """MiB that images may take while they are decoded, over all requests, by the sizes in their headers (16 bytes a
    pixel). Others wait; an image that alone needs more is refused."""
    image_cache_mib: int = 1024
    """MiB of image files to keep, so that later requests can name an image by its hash."""
    max_top_logprobs: int = 128
    """Maximum number of most likely ids reported per position."""
    request_timeout_s: float = 3600.0
    """Seconds after which a request is aborted and answered with 504."""
    retry_after_s: int = 1
    """Seconds in the header Retry-After of a 429."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Names, keys and limits of a server."""

    model_name: str
    """The model's name in requests, by default that of the model (or tokenizer) that the command is given."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer, which sessions keep."""
    adapters: tuple[str, ...] = ()
    """Names of the engine's LoRA adapters, which requests can give as `model`."""
    api_key: str | None = None
    """Key that all paths but /health and /version require, as `Authorization: Bearer KEY`."""
    admin_key: str | None = None
    """Key that paths which change the engine (weights, caches, pausing) require instead of the API key."""
    any_model_name: bool = False
    """Outside of sessions too, take any name of a model for the served one's, unless it has @ or tinker://."""
    hosts: tuple[str, ...] = ()
    """Answer requests that name this host (without port) in Host or Origin; can be repeated. Without an API key, only
    localhost and loopback addresses are answered by default, so that no web page can use the server. With a key, any
    name is answered unless this is given."""
    image_hosts: tuple[str, ...] = ()
    """Fetch images behind http(s) URLs of exactly this host; can be repeated. By default no URL is fetched."""
    weights_dir: Path | None = None
    """Folder in which a trainer writes new weights; without it, none are loaded from files."""
    versions_from: str | Path | None = None
    """Folder or store whose newest version of the weights the server loads at its start, and each newer one within
    seconds, with no trainer that asks for it: the weights_dir of a run, on a disk that both see, or its versions_to, a
    URL such as s3://bucket/run. Of a store, files are made in the folder for temporary files ($TMPDIR)."""
    limits: ServerLimits = field(default_factory=ServerLimits)

    @property
    def checks_origin(self) -> bool:
        """Whether Host and Origin are checked: a web page that has no key can do nothing on a server with one."""
        return self.api_key is None or bool(self.hosts)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def format_url(host: str, port: int) -> str:
    """The URL of a server at this address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
