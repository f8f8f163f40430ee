"""The options of `unbroken serve`. Those that are not ours go to the engine: vLLM reads them by its own parser."""

from __future__ import annotations

import argparse
import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.server.config import Limits, ServerConfig

ENGINES = ("auto", "vllm", "transformers")
_LIMITS = (
    "max_body_bytes", "max_prompts", "max_n", "max_queued", "max_images", "max_image_bytes", "max_image_pixels",
    "image_cache_mib", "max_top_logprobs", "request_timeout_s",
)  # fmt: skip
"""The limits that have an option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What one server is to be."""

    model: str
    tokenizer: str | None = None
    engine: str = "auto"
    adapters: tuple[tuple[str, str], ...] = ()
    """LoRA adapters as (name, folder); vllm only."""
    engine_options: tuple[str, ...] = ()
    """For vLLM's parser; the transformers engine knows --dtype, --device, --max-batch and --context-length."""
    renderer: str = "auto"
    chat_template: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: int = 30
    """How long requests in flight may go on once the server is told to stop."""
    exit_with_parent: bool = False
    """Stop once the process that started this one is gone: nobody else would stop it."""
    config: ServerConfig = field(default_factory=lambda: ServerConfig(model_name="model"))

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidInputError(f"--engine must be one of {list(ENGINES)}, got {self.engine!r}")
        if not 0 <= self.port < 2**16:
            raise InvalidInputError(f"--port must lie in [0, 65536), got {self.port}")
        if self.config.api_key is None and not _is_loopback(self.host):
            raise InvalidInputError(
                f"--host {self.host} lets other machines in, so --api-key or --api-key-file is needed: without a key, "
                "whoever reaches the port can use the model"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `unbroken serve`."""
    limits = Limits()
    parser.add_argument("--model", required=True, help="folder or hub name of the model")
    parser.add_argument("--tokenizer", help="folder or hub name of the tokenizer (default: the model's)")
    parser.add_argument("--served-model-name", help="what clients call the model (default: --model)")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="auto: vllm where it is installed")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a LoRA adapter, which clients ask for as model NAME; may be given again (vllm)",
    )
    parser.add_argument("--renderer", default="auto", help="auto, or pkg:NAME for one of the package renderers")
    parser.add_argument("--chat-template", help="a template file, or the name of one of the tokenizer's")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; another one needs an API key")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes a free one")
    for name, what in (("api", "asked for on every path but /health"), ("admin", "asked for to change the engine")):
        group = parser.add_mutually_exclusive_group()
        group.add_argument(f"--{name}-key", help=f"key {what}; visible to other users of this machine: prefer the file")
        group.add_argument(f"--{name}-key-file", type=Path, help="a file that holds the key")
    for limit in _LIMITS:
        default = getattr(limits, limit)
        parser.add_argument(f"--{limit.replace('_', '-')}", type=type(default), default=default, help=f"{default}")
    parser.add_argument(
        "--allow-image-host",
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        help="fetch images behind http(s) URLs of exactly this host; may be given again (default: none are fetched)",
    )
    parser.add_argument(
        "--weights-dir", type=Path, help="folder in which a trainer writes new weights (default: none are taken)"
    )
    parser.add_argument("--drain-s", type=int, default=30, help="seconds for requests in flight at the end (30)")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="stop once the process that started the server is gone"
    )


def read_options(arguments: argparse.Namespace, engine_options: list[str]) -> ServeOptions:
    """The options as they were given.

    Raises:
        InvalidInputError: one of them breaks a rule.
    """
    adapters = tuple(_adapter(given) for given in arguments.adapter)
    config = ServerConfig(
        adapters=tuple(name for name, _ in adapters),
        model_name=arguments.served_model_name or arguments.model,
        api_key=_key(arguments.api_key, arguments.api_key_file, "--api-key"),
        admin_key=_key(arguments.admin_key, arguments.admin_key_file, "--admin-key"),
        image_hosts=tuple(_host(given) for given in arguments.allow_image_host),
        weights_dir=arguments.weights_dir,
        limits=Limits(**{limit: getattr(arguments, limit) for limit in _LIMITS}),
    )
    return ServeOptions(
        model=arguments.model,
        tokenizer=arguments.tokenizer,
        engine=arguments.engine,
        adapters=adapters,
        engine_options=tuple(engine_options),
        renderer=arguments.renderer,
        chat_template=_template(arguments.chat_template),
        host=arguments.host,
        port=arguments.port,
        drain_s=arguments.drain_s,
        exit_with_parent=arguments.exit_with_parent,
        config=config,
    )


def _adapter(given: str) -> tuple[str, str]:
    name, equals, folder = given.partition("=")
    if not (name and equals and folder):
        raise InvalidInputError(f"--adapter must be NAME=FOLDER, got {given!r}")
    return name, folder


def _host(given: str) -> str:
    if not re.fullmatch(r"[\w.-]+(:\d+)?", given, re.ASCII):
        raise InvalidInputError(f"--allow-image-host must be HOST or HOST:PORT, got {given!r}")
    return given


def _key(given: str | None, file: Path | None, option: str) -> str | None:
    if file is not None:
        try:
            given = file.read_text().strip()
        except OSError as error:
            raise InvalidInputError(f"{option}-file cannot be read: {error}") from None
    if given is not None and not given:
        raise InvalidInputError(f"{option} must not be empty")
    return given


def _template(given: str | None) -> str | None:
    """The text of a template file, or a name as it is."""
    if given is not None and Path(given).is_file():
        return Path(given).read_text()
    return given


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
