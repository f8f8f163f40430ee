"""Where rollouts are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from unbroken.engines.transformers import TransformersEngineConfig
from unbroken.errors import InvalidInputError
from unbroken.types import InFlight


class EngineKind(StrEnum):
    """Where rollouts are sampled."""

    EMBEDDED = "embedded"
    """The transformers engine, in the trainer's process, on a copy of the model."""
    COLOCATED = "colocated"
    """vLLM, started by each trainer process; it sleeps during each step, which gets its GPU memory."""
    STARTED = "started"
    """`unbroken serve` on the model, in its own process, started and ended with the run."""
    SERVER = "server"
    """Servers that run already, at `urls`."""


class WeightTransport(StrEnum):
    """How servers get new weights."""

    FILES = "files"
    """Through files in a folder that trainer and servers share."""
    BROADCAST = "broadcast"
    """From the trainer to all workers at once, over NCCL or gloo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Where rollouts are sampled, and how new weights get there."""

    kind: EngineKind = EngineKind.EMBEDDED
    embedded: TransformersEngineConfig = field(default_factory=TransformersEngineConfig)
    vllm_options: tuple[str, ...] = ()
    """For colocated: options of vLLM, e.g. ["--gpu-memory-utilization", "0.5", "--max-model-len", "2048"]."""
    processes_per_engine: int = 1
    """For colocated: trainer processes that share one vLLM, which is tensor-parallel over their GPUs. With 1, each has
    its own."""
    serve_options: tuple[str, ...] = ()
    """For started: options of `unbroken serve`, e.g. ["--engine", "vllm", "--max-model-len", "2048"]."""
    urls: tuple[str, ...] = ()
    """For server: the servers' addresses."""
    api_key_file: Path | None = None
    """A file with the servers' API key, if they need one."""
    wait_s: float = 600.0
    """How long to wait at the start for servers that do not answer yet, or for the started one to serve;
    later, `loop.outages` applies."""
    publish_timeout_s: float = 600.0
    """For servers: how long one may take to load new weights; after that it counts as failed."""
    transport: WeightTransport = WeightTransport.FILES
    weights_dir: Path | None = None
    """For server with files: the folder that the servers were started with as --weights-dir."""
    host: str = "127.0.0.1"
    """For broadcast: an address of this machine that the servers' machines can reach."""
    in_flight: InFlight = InFlight.PAUSE
    """How requests in flight get new weights, with loop.max_staleness."""
    reuse_kv: bool = False
    """Whether requests in flight keep the keys and values of older weights; otherwise they are computed again. With
    true, an id depends on weights older than its version says."""

    def __post_init__(self) -> None:
        is_server = self.kind is EngineKind.SERVER
        if is_server != bool(self.urls):
            raise InvalidInputError(f"urls must be given exactly with kind server, got {self.urls} with {self.kind}")
        if (is_server and self.transport is WeightTransport.FILES) != (self.weights_dir is not None):
            raise InvalidInputError(
                f"weights_dir must be given exactly with kind server and transport files, got {self.weights_dir} with "
                f"{self.kind} and {self.transport}: it is the folder of `unbroken serve --weights-dir`"
            )
        if not self.wait_s >= 0:
            raise InvalidInputError(f"wait_s must be >= 0, got {self.wait_s}")
        if not self.publish_timeout_s > 0:
            raise InvalidInputError(f"publish_timeout_s must be > 0, got {self.publish_timeout_s}")
        if self.vllm_options and self.kind is not EngineKind.COLOCATED:
            raise InvalidInputError(f"vllm_options must be left out with kind {self.kind}, got {self.vllm_options}")
        if self.processes_per_engine < 1:
            raise InvalidInputError(f"processes_per_engine must be >= 1, got {self.processes_per_engine}")
        if self.processes_per_engine > 1 and self.kind is not EngineKind.COLOCATED:
            raise InvalidInputError(
                f"processes_per_engine must be 1 with kind {self.kind}, got {self.processes_per_engine}"
            )
        if self.serve_options and self.kind is not EngineKind.STARTED:
            raise InvalidInputError(f"serve_options must be left out with kind {self.kind}, got {self.serve_options}")
