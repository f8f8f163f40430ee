"""The options of `unbroken serve --tinker`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.server.options import OptionGroup, option_name
from unbroken.untrusted import MAX_KEYS_BYTES, read_file


class ProvenancePolicy(StrEnum):
    """What happens to a span that is not true (`TinkerOptions.tinker_provenance`)."""

    REQUIRE = "require"
    REFUSE = "refuse"
    COUNT = "count"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerOptions:
    """The Tinker API: a client's own loop samples from the model and trains adapters of it (docs/tinker.md)."""

    tinker_store: str = "runs/tinker"
    """Where this server, and no other, keeps checkpoints and sampled sequences: a folder, or a postgresql:// URL for
    their rows, with the files of checkpoints in --tinker-files."""
    tinker_files: Path | None = None
    """Folder for the files of checkpoints if --tinker-store is a database, which has its own folder in it (default
    runs/tinker)."""
    tinker_keep_days: float = 30.0
    """Days that a sampled sequence is kept, as is a training run that ended without a checkpoint: a span that names an
    older one may be refused."""
    tinker_provenance: ProvenancePolicy = ProvenancePolicy.REFUSE
    """What happens to provenance spans that are not true: refuse is an error that names the position, require refuses
    data without spans too, count trains the data and counts them in the answer's metrics, off compares nothing."""
    tinker_sessions: str | None = None
    """Store of a gateway over this server, a folder or a postgresql:// URL: spans may then name the turns of its
    sessions, as unbroken.integrations.tinker makes them. Every key may name them all."""
    tinker_keys: Path | None = None
    """File with one key of a client a line (the SDK asks for the prefix tml-): each sees its own models, and no others
    are let in. Without it, every key is let in that the server lets in, and still sees its own models only."""
    tinker_full: bool = False
    """Train all weights (rank 0), of one model at a time, instead of adapters: an engine that has sampled from other
    whole weights takes no adapters any more."""
    tinker_device: str | None = None
    """Train in a separate process on this GPU, as CUDA_VISIBLE_DEVICES names it; without it, where the server is."""
    tinker_idle_s: float = 300.0
    """Seconds after which a client that gives no sign of life has its models freed; the SDK gives one every 10 s."""
    tinker_max_models: int = 8
    """Maximum number of models that one key trains at a time."""

    def __post_init__(self) -> None:
        if self.tinker_files is not None:
            from unbroken.ledger.store import is_postgres_url  # it loads numpy, and each command this module

            if not is_postgres_url(self.tinker_store):
                raise InvalidInputError(
                    "--tinker-files must not be given without a --tinker-store that is a postgresql:// URL"
                )
        for name in ("tinker_keep_days", "tinker_idle_s", "tinker_max_models"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"{option_name(name)} must be > 0, got {getattr(self, name)}")

    def read_keys(self) -> frozenset[bytes] | None:
        """The keys of the file; None without one."""
        if self.tinker_keys is None:
            return None
        try:
            lines = read_file(self.tinker_keys, max_bytes=MAX_KEYS_BYTES).splitlines()
        except (OSError, InvalidInputError) as error:
            raise InvalidInputError(f"--tinker-keys cannot be read: {error}") from None
        keys = frozenset(line.strip() for line in lines if line.strip())
        if not keys:
            raise InvalidInputError(f"--tinker-keys {self.tinker_keys} must have at least one key, got none")
        return keys


def add_tinker_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `TinkerOptions`."""
    group = OptionGroup(parser, "Tinker API", TinkerOptions, is_rare=True)
    parser.add_argument("--tinker", action="store_true", help="Serve the Tinker API too, and train.")
    group.add("tinker_store", metavar="STORE")
    group.add("tinker_files", type=Path, metavar="FOLDER")
    group.add("tinker_keep_days", type=float, metavar="DAYS")
    group.add("tinker_provenance", type=ProvenancePolicy, metavar="{require,refuse,count,off}")
    group.add("tinker_sessions", metavar="STORE")
    group.add("tinker_keys", type=Path, metavar="FILE")
    group.add("tinker_full", action="store_true")
    group.add("tinker_device", metavar="GPU")
    group.add("tinker_idle_s", type=float, metavar="SECONDS")
    group.add("tinker_max_models", type=int, metavar="NUMBER")


def read_tinker_options(arguments: argparse.Namespace) -> TinkerOptions | None:
    """Convert the options; None without `--tinker`. Raises `InvalidInputError` for an invalid value."""
    if not arguments.tinker:
        for name in TinkerOptions.__slots__:
            if getattr(arguments, name) != getattr(TinkerOptions(), name):
                raise InvalidInputError(f"{option_name(name)} needs --tinker")
        return None
    weights = "it changes the weights itself"
    for name, why in {"versions_from": weights, "weights_dir": weights, "sessions": "start a server for each"}.items():
        if getattr(arguments, name) is not None:
            raise InvalidInputError(f"--tinker must not be given together with {option_name(name)}: {why}")
    return TinkerOptions(**{name: getattr(arguments, name) for name in TinkerOptions.__slots__})
