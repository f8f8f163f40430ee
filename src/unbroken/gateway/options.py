"""The options of `unbroken gateway`, and those of sessions, which `unbroken serve --sessions` has too."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.gateway.config import GatewayConfig, OnDisconnect
from unbroken.server.options import AppOptions, OptionGroup, add_app_arguments, option_name, read_app_options, read_key

_SESSION_FIELDS = ("ttl_s", "max_sessions", "max_in_flight", "on_disconnect", "no_control_key", "advertise")
_EPILOG = """\
A gateway needs no GPU: it renders, records and asks servers to continue ids (docs/gateway.md).

  unbroken gateway --upstream http://10.0.0.1:8000 --tokenizer path/to/model --store runs/sessions"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Where sessions are kept, and their limits."""

    sessions: str
    """Keep sessions of agents here: a folder (SQLite), or a postgresql:// URL."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions(AppOptions):
    """Everything that `unbroken gateway` needs to start."""

    tokenizer: str
    """Folder or hub name of the model's tokenizer, with its chat template."""
    upstream: tuple[str, ...] = ()
    """URL of a server that samples: `unbroken serve`, or `vllm serve --enable-scale-out` of 0.32 or later; can be
    repeated, for servers of one model: a session stays with one of them while that one answers."""
    upstream_file: Path | None = None
    """Instead of --upstream: a file with one URL a line, read again while the gateway serves, as a run's
    engine.urls_file."""
    upstream_key: str | None = None
    """Key of the upstreams."""
    upstream_wait_s: float = 600.0
    """Seconds to wait at the start for upstreams that do not answer yet."""
    store: str
    """Where sessions are kept: a folder (SQLite), or a postgresql:// URL."""
    workers: int = 1
    """Processes that share the port and a PostgreSQL store, each for as many turns a second as one CPU core does."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)

    def __post_init__(self) -> None:
        AppOptions.__post_init__(self)
        for url in self.upstream:
            if not url.startswith(("http://", "https://")):
                raise InvalidInputError(f"--upstream must be an http:// or https:// URL, got {url!r}")
        if bool(self.upstream) == (self.upstream_file is not None):
            raise InvalidInputError(
                f"either --upstream or --upstream-file must be given, got {self.upstream} and {self.upstream_file}"
            )
        if not self.upstream_wait_s >= 0:
            raise InvalidInputError(f"--upstream-wait-s must be >= 0, got {self.upstream_wait_s}")
        if self.workers < 1:
            raise InvalidInputError(f"--workers must be >= 1, got {self.workers}")
        if self.workers > 1 and self.gateway.advertise is not None:
            raise InvalidInputError("--advertise must not be given with --workers, whose processes find each other")


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `unbroken gateway`."""
    parser.usage = "unbroken gateway --upstream URL --tokenizer TOKENIZER --store LOCATION [OPTION ...]"
    parser.epilog = _EPILOG
    servers = OptionGroup(parser, "servers and sessions", GatewayOptions)
    servers.add("upstream", action="append", default=[], metavar="URL")
    servers.add("upstream_file", type=Path, metavar="FILE")
    servers.add_key("upstream_key")
    servers.add("upstream_wait_s", type=float, metavar="SECONDS")
    servers.add("tokenizer", default=None, required=True, metavar="TOKENIZER")
    servers.add("store", default=None, required=True, metavar="LOCATION")
    servers.add("workers", type=int, metavar="NUMBER")
    _add_session_fields(parser)
    add_app_arguments(parser)
    parser.set_defaults(weights_dir=None, versions_from=None)  # `unbroken serve` alone has weights to load


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of sessions to those of `unbroken serve`."""
    OptionGroup(parser, "sessions", SessionOptions).add("sessions", default=None, metavar="LOCATION")
    _add_session_fields(parser)


def read_gateway_options(arguments: argparse.Namespace) -> GatewayOptions:
    """Convert the options of `unbroken gateway`. Raises `InvalidInputError` for an invalid value."""
    return GatewayOptions(
        **read_app_options(arguments, model_name=arguments.tokenizer),
        tokenizer=arguments.tokenizer,
        upstream=tuple(arguments.upstream),
        upstream_file=arguments.upstream_file,
        upstream_key=read_key(arguments.upstream_key, arguments.upstream_key_file, "--upstream-key"),
        upstream_wait_s=arguments.upstream_wait_s,
        store=arguments.store,
        workers=arguments.workers,
        gateway=_read_config(arguments),
    )


def read_session_options(arguments: argparse.Namespace) -> SessionOptions | None:
    """Convert the options of sessions; None without sessions.

    Raises:
        InvalidInputError: a value is invalid, or an option of sessions is given without --sessions.
    """
    config = _read_config(arguments)
    if arguments.sessions is not None:
        return SessionOptions(sessions=arguments.sessions, gateway=config)
    defaults = GatewayConfig()
    for name in _SESSION_FIELDS:
        if getattr(config, name) != getattr(defaults, name):
            raise InvalidInputError(f"{option_name(name)} needs --sessions LOCATION, where sessions are kept")
    return None


def _add_session_fields(parser: argparse.ArgumentParser) -> None:
    group = OptionGroup(parser, "limits of sessions", GatewayConfig, is_rare=True)
    group.add("ttl_s", type=float, metavar="SECONDS")
    group.add("max_sessions", type=int, metavar="NUMBER")
    group.add("max_in_flight", type=int, metavar="NUMBER")
    group.add("on_disconnect", choices=[choice.value for choice in OnDisconnect])
    group.add("no_control_key", action="store_true")
    group.add("advertise", metavar="URL")


def _read_config(arguments: argparse.Namespace) -> GatewayConfig:
    values = {name: getattr(arguments, name) for name in _SESSION_FIELDS}
    values["on_disconnect"] = OnDisconnect(values["on_disconnect"])
    try:
        return GatewayConfig(**values, drain_s=arguments.drain_s)
    except InvalidInputError as error:
        name, _, rule = str(error).partition(" ")
        raise InvalidInputError(f"{option_name(name)} {rule}") from None
