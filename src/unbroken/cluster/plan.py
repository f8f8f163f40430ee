"""The parts of a run on several machines: which commands they are, what they need, and what cannot be.

recipe.toml --trainers 2x8 --engines 12 --engine.tp 2 --gateways 4
    trainers-0, trainers-1     8 processes each of `unbroken train recipe.toml`, on a node of their own
    engine-0 .. engine-11      `unbroken serve MODEL`, 2 GPUs each
    gateway-0 .. gateway-3     `unbroken gateway`
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.cluster.processes import ENGINES, FOLDER, KEY, Kind, Part
from unbroken.errors import InvalidInputError
from unbroken.ledger.store import is_postgres_url

if TYPE_CHECKING:
    from unbroken.runs.config import RunConfig
    from unbroken.runs.recipe import Recipe

_GIVEN = ("engine.urls", "engine.urls_file", "engine.weights_dir", "engine.api_key_file")
"""What a cluster sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """Trainers: nodes, and processes on each."""

    num_nodes: int
    num_processes: int

    @classmethod
    def parse(cls, text: str) -> Gang:
        """Read `2x8`."""
        match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,2})", text, re.ASCII)
        if match is None:
            raise InvalidInputError(f"--trainers must be NODESxPROCESSES, such as 2x8, got {text!r}")
        return cls(num_nodes=int(match[1]), num_processes=int(match[2]))

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.num_processes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """How many parts a run has, and what they need."""

    trainers: Gang = field(default_factory=lambda: Gang(num_nodes=1, num_processes=1))
    """Nodes, and trainer processes on each: 2x8. Each process has a GPU."""
    engines: int = 1
    """How many `unbroken serve` there are."""
    engine_model: str | None = None
    """The model that engines load first: a folder that all nodes see, or a name on the hub. By default the recipe's
    `model`."""
    engine_tp: int = 1
    """GPUs of each engine, over which vLLM is tensor-parallel."""
    serve_options: str = ""
    """Options of `unbroken serve`, as one text: "--engine vllm --max-model-len 4096"."""
    samplers: int = 0
    """How many `unbroken sampler` there are, for the rollouts; 0: each trainer process has its own."""
    sampler_port: int = 8500
    """The port at which rank 0 listens for samplers; rank N at the N-th after it."""
    gateways: int = 0
    """How many `unbroken gateway` there are, for agents."""
    gateway_store: str | None = None
    """The postgresql:// URL in which gateways keep their sessions."""
    cpu: bool = False
    """Use no GPU: trainers and engines compute on CPUs."""
    cpus: int = 1
    """CPUs that Ray counts for each trainer process, engine, sampler and gateway."""
    env: tuple[str, ...] = ()
    """NAME=VALUE: an environment variable of all parts; can be repeated."""

    def __post_init__(self) -> None:
        for name, least in (("engines", 1), ("samplers", 0), ("gateways", 0), ("engine_tp", 1), ("cpus", 1)):
            if (value := getattr(self, name)) < least:
                raise InvalidInputError(f"{_option(name)} must be >= {least}, got {value}")
        num_ranks = self.trainers.num_nodes * self.trainers.num_processes
        if not 0 < self.sampler_port <= 65536 - num_ranks:
            raise InvalidInputError(
                f"--sampler.port must be >= 1 and leave a port for each of {num_ranks} trainer processes, got "
                f"{self.sampler_port}"
            )
        if 0 < self.samplers < num_ranks:
            raise InvalidInputError(
                f"--samplers must be at least the trainer processes of --trainers {self.trainers}, {num_ranks}, "
                f"because each has samplers of its own, got {self.samplers}"
            )
        if self.gateways and not is_postgres_url(self.gateway_store or ""):
            raise InvalidInputError(
                f"--gateway.store must be a postgresql:// URL with --gateways {self.gateways}, because gateways share "
                f"their sessions, got {self.gateway_store}"
            )
        if not self.gateways and self.gateway_store is not None:
            raise InvalidInputError("--gateway.store must be left out without --gateways")
        if self.cpu and self.engine_tp > 1:
            raise InvalidInputError(f"--engine.tp must be 1 with --cpu, got {self.engine_tp}")
        for each in self.env:
            if not re.match(r"[A-Za-z_]\w*=", each, re.ASCII):
                raise InvalidInputError(f"--env must be NAME=VALUE, got {each!r}")
        try:
            shlex.split(self.serve_options)
        except ValueError as error:
            raise InvalidInputError(f"--engine.options must be words of a shell: {error}") from None

    @property
    def environment(self) -> dict[str, str]:
        """The variables of all parts."""
        own = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""} if self.cpu else {}
        return own | dict(each.split("=", 1) for each in self.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run on several machines."""

    output: Path
    options: ClusterOptions
    parts: tuple[Part, ...]

    @property
    def folder(self) -> Path:
        """Of the cluster's own files."""
        return self.output / FOLDER

    def of_kind(self, kind: Kind) -> tuple[Part, ...]:
        """The parts of a kind."""
        return tuple(part for part in self.parts if part.kind is kind)

    def count_needs(self) -> tuple[int, int]:
        """CPUs and GPUs of all parts."""
        return sum(part.num_cpus for part in self.parts), sum(part.num_gpus for part in self.parts)

    def check_nodes(self, nodes: Sequence[Mapping[str, float]]) -> str:
        """Why the parts do not fit on nodes with these resources (`CPU`, `GPU`); an empty text if they do."""
        gang = self.of_kind(Kind.TRAINERS)
        for name, least in (("GPU", gang[0].num_gpus), ("CPU", gang[0].num_cpus)):
            large = sum(node.get(name, 0) >= least for node in nodes)
            if large < len(gang):
                return (
                    f"--trainers {self.options.trainers} needs {len(gang)} nodes with {least} {name}s each, and "
                    f"{large} of {len(nodes)} have them{_advise(name)}"
                )
        for name, num in zip(("CPU", "GPU"), self.count_needs(), strict=True):
            found = int(sum(node.get(name, 0) for node in nodes))
            if found < num:
                shares = ", ".join(
                    f"--{kind} {_count(self.of_kind(kind), name)}" for kind in Kind if self.of_kind(kind)
                )
                return f"the parts need {num} {name}s ({shares}), and the cluster has {found}{_advise(name)}"
        return ""


def _count(parts: Sequence[Part], name: str) -> int:
    return sum(part.num_gpus if name == "GPU" else part.num_cpus for part in parts)


def _advise(name: str) -> str:
    return ": start more nodes, or give --cpu" if name == "GPU" else ": start more nodes, or ask for fewer parts"


def make_plan(recipe: Path, options: ClusterOptions, own: Sequence[str]) -> Plan:
    """Plan a run of `recipe` with its `own` options.

    Raises:
        InvalidInputError: the recipe cannot run with parts on several machines, or an option is wrong.
    """
    from unbroken.runs.recipe import load_recipe

    loaded = load_recipe(recipe)
    config = loaded.configure(own)
    _check_engine(loaded, config, own)
    model = options.engine_model or getattr(config, "model", None)
    if model is None:
        raise InvalidInputError(
            f"--engine.model must be given: {loaded.name} has no model that is there before the run begins"
        )
    output = config.output.resolve()
    commands = _make_commands(recipe, options, own, str(model), output, has_gateway=config.sessions.url is not None)
    gang, gpus = options.trainers, 0 if options.cpu else 1
    parts = [
        Part(
            kind=Kind.TRAINERS,
            index=index,
            command=tuple(commands[Kind.TRAINERS]),
            num_cpus=gang.num_processes * options.cpus,
            num_gpus=gang.num_processes * gpus,
            num_processes=gang.num_processes,
        )
        for index in range(gang.num_nodes)
    ]
    for kind, number, num_gpus in (
        (Kind.ENGINE, options.engines, options.engine_tp * gpus),
        (Kind.SAMPLER, options.samplers, 0),
        (Kind.GATEWAY, options.gateways, 0),
    ):
        parts += [
            Part(kind=kind, index=index, command=tuple(commands[kind]), num_cpus=options.cpus, num_gpus=num_gpus)
            for index in range(number)
        ]
    return Plan(output=output, options=options, parts=tuple(parts))


def _make_commands(
    recipe: Path, options: ClusterOptions, own: Sequence[str], model: str, output: Path, *, has_gateway: bool
) -> dict[Kind, list[str]]:
    """The command of each kind of part; `has_gateway` says whether the recipe names one."""
    folder, weights, path = output / FOLDER, str(output / "weights"), str(recipe.resolve())
    engines, key = str(folder / ENGINES), str(folder / KEY)
    settings = [*own, "--engine.kind=server", f"--engine.urls-file={engines}", f"--engine.weights-dir={weights}"]
    settings += [f"--engine.api-key-file={key}"]
    if options.gateways and not has_gateway:
        settings += ["--sessions.url={gateway}", f"--sessions.api-key-file={key}"]
    listen = ["--rollouts.listen={listen}", f"--rollouts.key-file={key}"] if options.samplers else []
    tp = ["--tensor-parallel-size", str(options.engine_tp)] if options.engine_tp > 1 else []
    return {
        Kind.TRAINERS: ["train", path, *settings, *listen],
        Kind.ENGINE: [
            "serve", model, "--host", "{host}", "--port", "0", "--api-key-file", key, "--weights-dir", weights,
            "--versions-from", weights, *tp, *shlex.split(options.serve_options),
        ],
        Kind.SAMPLER: ["sampler", "--connect", "{trainer}", "--key-file", key, "--wait-s", "120", path, *settings],
        Kind.GATEWAY: [
            "gateway", "--upstream-file", engines, "--upstream-key-file", key, "--tokenizer", model, "--store",
            options.gateway_store or "", "--api-key-file", key, "--host", "{host}", "--port", "{port}", "--advertise",
            "http://{host}:{port}",
        ],
    }  # fmt: skip


def _check_engine(recipe: Recipe, config: RunConfig, own: Sequence[str]) -> None:
    """Refuse a recipe that has engines of its own; the default kind stands for none."""
    from unbroken.runs.config import EngineKind
    from unbroken.runs.settings import read_options

    given = {**recipe.values, **read_options(own, recipe.section)}
    kind = config.engine.kind
    is_default = "engine.kind" not in given and kind is EngineKind.EMBEDDED
    if not (is_default or kind is EngineKind.SERVER):
        raise InvalidInputError(
            f"engine.kind must be left out for a cluster, whose engines are those of --engines, got {kind}"
        )
    for name in _GIVEN:
        if getattr(config.engine, name.removeprefix("engine.")):
            raise InvalidInputError(f"{name} must be left out for a cluster, which sets it")


def _option(name: str) -> str:
    return "--" + re.sub("^(engine|gateway|sampler)_", r"\1.", name).replace("_", "-")


def format_commands(
    plan: Plan, *, hosts: Sequence[str] = (), port: int = 8300, python: str = "python"
) -> Iterator[str]:
    """The commands of a plan for each node, to be started by hand or by Slurm; lines of a shell.

    Parts are dealt out to `hosts` in their order: trainers have a node each. Without hosts they are named NODE0, NODE1.
    """
    gang = plan.of_kind(Kind.TRAINERS)
    others = [part for part in plan.parts if part.kind is not Kind.TRAINERS]
    names = list(hosts) or [f"NODE{index}" for index in range(len(gang) + (0 if plan.options.cpu else 1))]
    if len({*names}) < len(names) or not all(re.fullmatch(r"[\w.:-]+", each, re.ASCII) for each in names):
        raise InvalidInputError(f"--hosts must be names of nodes that differ, got {names}")
    if not 1 < port <= 65536 - len(others):
        raise InvalidInputError(f"--port must be > 1 and leave {len(others)} ports from it on, got {port}")
    if len(names) < len(gang):
        raise InvalidInputError(
            f"--hosts must name at least {len(gang)} nodes, one for each of --trainers, got {names}"
        )
    places = names[len(gang) :] or names
    on: dict[str, list[tuple[Part, int]]] = {name: [] for name in names}
    for number, part in enumerate(others):
        on[places[number % len(places)]].append((part, port + number))
    urls = {part.name: f"http://{host}:{number}" for host, found in on.items() for part, number in found}
    folder, options, size = plan.folder, plan.options, gang[0].num_processes
    shared = {"gateway": urls.get("gateway-0", ""), "listen": f"0.0.0.0:{options.sampler_port}"}
    yield "# on one node, before the others: the key of the servers, and their list, which a run reads again and again"
    key = f"{python} -c 'import secrets; print(secrets.token_hex(24))' > {shlex.quote(str(folder / KEY))}"
    yield f"mkdir -p -m 700 {shlex.join([str(plan.output), str(folder)])} && (umask 077; {key})"
    engines = shlex.join(urls[part.name] for part in plan.of_kind(Kind.ENGINE))
    yield f"printf '%s\\n' {engines} > {shlex.quote(str(folder / ENGINES))}"
    variables = [f"{name}={shlex.quote(value)}" for name, value in options.environment.items()]
    for host in names:
        yield f"\n# on {host}"
        first_gpu = gang[0].num_gpus if host in names[: len(gang)] else 0
        for part, number in on[host]:
            visible = [] if options.cpu else [f"CUDA_VISIBLE_DEVICES={_list_gpus(first_gpu, part.num_gpus)}"]
            first_gpu += part.num_gpus
            rank = part.index % (len(gang) * size)
            trainer = f"{names[rank // size]}:{options.sampler_port + rank}"
            command = part.make_command(python, host=host, port=number, trainer=trainer, **shared)
            if part.kind is Kind.ENGINE:
                command[command.index("--port") + 1] = str(number)
            log = shlex.quote(str(folder / f"{part.name}.log"))
            yield " ".join([*variables, *visible, shlex.join(command), f"> {log} 2>&1 &"])
        if host in names[: len(gang)]:
            torchrun = ["torch.distributed.run", "--nnodes", str(len(gang)), "--nproc-per-node", str(size)]
            torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{names[0]}:{port - 1}"]
            command = gang[0].make_command(python, **shared)
            yield " ".join([*variables, shlex.join([python, "-m", *torchrun, *command[1:]])])


def _list_gpus(first: int, number: int) -> str:
    return json.dumps(",".join(str(gpu) for gpu in range(first, first + number)))
