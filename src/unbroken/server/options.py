"""The options of `unbroken serve`, and those that every command with a server has (`AppOptions`).

Options that `serve` does not know go to the engine: vLLM reads them with its own parser.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from unbroken.docstrings import first_paragraph, read_field_docs
from unbroken.engines.registry import ENGINES
from unbroken.errors import InvalidInputError
from unbroken.model_source import check_model_folder
from unbroken.server.config import ServerConfig, ServerLimits, is_loopback
from unbroken.untrusted import MAX_FACTS_BYTES, MAX_KEYS_BYTES, read_text

if TYPE_CHECKING:  # `unbroken --help` builds these options, and needs no arrays
    from unbroken.engines.base import Engine
    from unbroken.rendering.base import Renderer

CheckEngine: TypeAlias = "Callable[[Engine, Renderer], Awaitable[str]]"
_ENGINE_NAMES = ("auto", *ENGINES)
_UNCHANGED = ("parser", "history", "host", "port", "drain_s", "keep_alive_s", "exit_with_parent")
"""Fields of `AppOptions` that are options as they are parsed."""
_EPILOG = """\
Other options go to the engine: any of vLLM's, e.g. --tensor-parallel-size 2, or for transformers
--dtype, --device, --max-batch and --context-length. docs/protocols.md has the server's paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """What every command with a server needs: how it renders, where it listens, and its configuration."""

    chat_template: str | None = None
    """A template file, or the name of one of the tokenizer's templates, instead of the model's own."""
    parser: str | None = None
    """The format in which completions are read, e.g. hermes; by default found from the template."""
    history: str = "exact"
    """Policy of sessions where the template rewrites earlier turns, exact or template. Without sessions the server
    renders each conversation whole, and it says nothing."""
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs an API key."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    drain_s: int = 30
    """Seconds that requests in flight have once the server is stopped; then they get a 503."""
    keep_alive_s: int = 125
    """Seconds after which an idle connection is closed: longer than clients keep one (httpx 5, aiohttp 15, Go 90), so
    that none sends a request while it closes."""
    exit_with_parent: bool = False
    """Stop when the process that started the server has ended."""
    config: ServerConfig = field(default_factory=lambda: ServerConfig(model_name="model"))

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise InvalidInputError(f"--port must lie in [0, 65536), got {self.port}")
        for name in ("drain_s", "keep_alive_s"):
            if getattr(self, name) < 0:
                raise InvalidInputError(f"{option_name(name)} must be >= 0, got {getattr(self, name)}")
        if self.config.api_key is None and not is_loopback(self.host):
            raise InvalidInputError(
                f"--host {self.host} lets other machines in, so it needs --api-key or --api-key-file: without a key, "
                "anyone who reaches the port can use the model"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(AppOptions):
    """Everything that `unbroken serve` needs to start."""

    model: str
    """Folder or hub name of the model."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; by default the model's."""
    engine: str = "auto"
    """The engine that samples; auto is vllm if it is installed, else transformers."""
    adapters: tuple[tuple[str, str], ...] = ()
    """A LoRA adapter, which requests name as `model`; can be repeated (vllm only)."""
    engine_options: tuple[str, ...] = ()
    """Options that the engine reads itself."""
    check: CheckEngine | None = None
    """Checks the engine before it is served, and returns what it found (`--check`); its errors end the start."""

    def __post_init__(self) -> None:
        AppOptions.__post_init__(self)
        if self.engine not in _ENGINE_NAMES:
            raise InvalidInputError(f"--engine must be one of {list(_ENGINE_NAMES)}, got {self.engine!r}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `unbroken serve`."""
    parser.usage = "unbroken serve MODEL [OPTION ...] [ENGINE OPTION ...]"
    parser.epilog = _EPILOG
    model = OptionGroup(parser, "model and engine", ServeOptions)
    model.add("model", default=None, required=True, metavar="MODEL")
    model.add("tokenizer", metavar="TOKENIZER")
    model.add("engine", choices=_ENGINE_NAMES)
    model.add("adapters", option="--adapter", action="append", default=[], metavar="NAME=FOLDER")
    weights = OptionGroup(parser, "weights", ServerConfig)
    weights.add("weights_dir", type=Path, metavar="FOLDER")
    weights.add("versions_from", metavar="FOLDER_OR_URL")
    add_app_arguments(parser)


def add_app_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `AppOptions`."""
    parser.formatter_class = _HelpFormatter
    text = OptionGroup(parser, "text and ids", AppOptions)
    text.add("chat_template", metavar="FILE_OR_NAME")
    text.add("parser", metavar="NAME")
    text.add("history", metavar="{exact,template}")
    network = OptionGroup(parser, "network", AppOptions)
    network.add("host", metavar="ADDRESS")
    network.add("port", type=int, metavar="PORT")
    network.add("drain_s", type=int, metavar="SECONDS")
    network.add("keep_alive_s", type=int, metavar="SECONDS")
    network.add("exit_with_parent", action="store_true")
    access = OptionGroup(parser, "access and images", ServerConfig)
    access.add("model_name", option="--served-model-name", default=None, metavar="NAME")
    access.add("any_model_name", action="store_true")
    access.add_key("api_key")
    access.add_key("admin_key")
    access.add("hosts", option="--allow-host", action="append", default=[], metavar="HOST")
    access.add("image_hosts", option="--allow-image-host", action="append", default=[], metavar="HOST[:PORT]")
    limits = OptionGroup(parser, "limits", ServerLimits, is_rare=True)
    for each in dataclasses.fields(ServerLimits):
        limits.add(each.name, type=type(each.default), metavar="NUMBER")


def name_model(words: list[str]) -> list[str]:
    """Write `serve MODEL` as `serve --model MODEL`. Only the first word counts: others are values of engine options."""
    is_named = any(word == "--model" or word.startswith("--model=") for word in words)
    if words[1:2] and not words[1].startswith("-") and not is_named:
        return [words[0], "--model", *words[1:]]
    return words


def read_options(arguments: argparse.Namespace, engine_options: list[str]) -> ServeOptions:
    """Convert the options of `unbroken serve`. Raises `InvalidInputError` for an invalid value."""
    check_model_folder(arguments.model, name="MODEL")
    adapters = tuple(_parse_adapter(text) for text in arguments.adapter)
    shared = read_app_options(arguments, model_name=arguments.model, adapters=tuple(name for name, _ in adapters))
    return ServeOptions(
        **shared,
        model=arguments.model,
        tokenizer=arguments.tokenizer,
        engine=arguments.engine,
        adapters=adapters,
        engine_options=tuple(engine_options),
    )


def read_app_options(
    arguments: argparse.Namespace, *, model_name: str, adapters: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Convert the options of `AppOptions` to its fields; `model_name` is the default for the served one.

    Raises `InvalidInputError` for an invalid value.
    """
    try:
        limits = ServerLimits(**{each.name: getattr(arguments, each.name) for each in dataclasses.fields(ServerLimits)})
    except InvalidInputError as error:
        raise name_option(error) from None
    config = ServerConfig(
        adapters=adapters,
        model_name=arguments.served_model_name or model_name,
        api_key=read_key(arguments.api_key, arguments.api_key_file, "--api-key"),
        admin_key=read_key(arguments.admin_key, arguments.admin_key_file, "--admin-key"),
        any_model_name=arguments.any_model_name,
        hosts=tuple(_check_host_name(text) for text in arguments.allow_host),
        image_hosts=tuple(_check_host(text) for text in arguments.allow_image_host),
        weights_dir=arguments.weights_dir,
        versions_from=arguments.versions_from,
        limits=limits,
    )
    return {
        **{name: getattr(arguments, name) for name in _UNCHANGED},
        "chat_template": _read_template(arguments.chat_template),
        "config": config,
    }


def name_option(error: InvalidInputError) -> InvalidInputError:
    """Name the option in an error about its field: `parser must ...` becomes `--parser must ...`."""
    argument, _, rule = str(error).partition(" ")
    if argument in {each.name for each in (*dataclasses.fields(AppOptions), *dataclasses.fields(ServerLimits))}:
        error.args = (f"{option_name(argument)} {rule}",)
    return error


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Puts each option's help below it, like `unbroken train RECIPE --help`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8, width=110)


class OptionGroup:
    """A group of options whose help and defaults are those of a config class's fields."""

    def __init__(
        self, parser: argparse.ArgumentParser, title: str, config_class: type[Any], *, is_rare: bool = False
    ) -> None:
        """`--help` shows rare options by their names, and `--help-all` in full."""
        self._is_hidden = is_rare and getattr(parser, "is_short", False)
        self._names: list[str] = []
        self._group = parser.add_argument_group(title, first_paragraph(config_class.__doc__) if is_rare else None)
        self._docs = read_field_docs(config_class)
        self._defaults = {each.name: each.default for each in dataclasses.fields(config_class)}

    def add(self, name: str, *, option: str | None = None, **settings: Any) -> None:
        """Add the option of a field."""
        default = settings.setdefault("default", self._defaults[name])
        note = "" if default is None or default is False or default == [] else f" Default: {default}."
        text = (self._docs[name] + note).replace("%", "%%")
        if self._is_hidden:
            self._names.append(option or option_name(name))
            shown = f"{', '.join(self._names)}: see --help-all"
            self._group.description, text = textwrap.fill(shown, 106, break_on_hyphens=False), argparse.SUPPRESS
        self._group.add_argument(option or option_name(name), help=text, **settings)

    def add_key(self, name: str) -> None:
        """Add the two options of a key: the key itself, and a file with it."""
        option = option_name(name)
        alternatives = self._group.add_mutually_exclusive_group()
        note = f" Other users of this machine can see it: prefer {option}-file."
        alternatives.add_argument(option, metavar="KEY", help=self._docs[name] + note)
        alternatives.add_argument(f"{option}-file", type=Path, metavar="FILE", help=f"File with the key of {option}.")


def option_name(field_name: str) -> str:
    """The option of a field."""
    return f"--{field_name.replace('_', '-')}"


def _parse_adapter(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise InvalidInputError(f"--adapter must be NAME=FOLDER, got {text!r}")
    return name, folder


def _check_host_name(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+|\[?[0-9a-f:.]*:[0-9a-f:.]*\]?", text, re.ASCII | re.IGNORECASE):
        raise InvalidInputError(f"--allow-host must be a HOST without scheme or port, got {text!r}")
    return text


def _check_host(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+(:\d+)?", text, re.ASCII):
        raise InvalidInputError(f"--allow-image-host must be HOST or HOST:PORT, got {text!r}")
    return text


def read_key(key: str | None, file: Path | None, option: str) -> str | None:
    """The key of two options, one of which may be given. Raises `InvalidInputError` for an empty or unreadable one."""
    if file is not None:
        try:
            key = read_text(file, max_bytes=MAX_KEYS_BYTES).strip()
        except (OSError, InvalidInputError) as error:
            raise InvalidInputError(f"{option}-file cannot be read: {error}") from None
    if key is not None and not key:
        raise InvalidInputError(f"{option} must not be empty")
    return key


def _read_template(file_or_name: str | None) -> str | None:
    """The text of a template file, or a template's name unchanged; raises `InvalidInputError` if it is no text."""
    if file_or_name is not None and Path(file_or_name).is_file():
        return read_text(file_or_name, max_bytes=MAX_FACTS_BYTES)
    return file_or_name
