"""The parts of a run on several machines: which commands they are, what they need, and what cannot be.

recipe.toml --trainers 2x8 --engines 12 --engine.tp 2 --gateways 4
    trainers-0, trainers-1     8 processes each of `unbroken train recipe.toml`, a node each
    engine-0 .. engine-11      `unbroken serve MODEL`, 2 GPUs each
    gateway-0 .. gateway-3     `unbroken gateway`
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.cluster.processes import Kind
from unbroken.cluster.registry import ENGINES, FOLDER, KEY
from unbroken.errors import InvalidInputError
from unbroken.server.config import format_url

if TYPE_CHECKING:
    from unbroken.runs.config import RunConfig
    from unbroken.runs.recipe import Recipe

_GIVEN = ("engine.urls", "engine.urls_file", "engine.weights_dir", "engine.api_key_file")
"""What a cluster sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """How many parts a run has, and what they need."""

    trainers: str = "1x1"
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
        for option, value, least in (
            ("--engines", self.engines, 1), ("--samplers", self.samplers, 0), ("--gateways", self.gateways, 0),
            ("--engine.tp", self.engine_tp, 1), ("--cpus", self.cpus, 1),
        ):  # fmt: skip
            if value < least:
                raise InvalidInputError(f"{option} must be >= {least}, got {value}")
        self._check_samplers(math.prod(self.gang))
        self._check_gateways()
        if self.cpu and self.engine_tp > 1:
            raise InvalidInputError(f"--engine.tp must be 1 with --cpu, got {self.engine_tp}")
        for each in self.env:
            if not re.match(r"[A-Za-z_]\w*=", each, re.ASCII):
                raise InvalidInputError(f"--env must be NAME=VALUE, got {each!r}")
        try:
            shlex.split(self.serve_options)
        except ValueError as error:
            raise InvalidInputError(f"--engine.options must be words of a shell: {error}") from None

    def _check_samplers(self, num_ranks: int) -> None:
        if not 0 < self.sampler_port <= 65536 - num_ranks:
            raise InvalidInputError(
                f"--sampler.port must be >= 1 and leave a port for each of {num_ranks} trainer processes, got "
                f"{self.sampler_port}"
            )
        if 0 < self.samplers < num_ranks:
            raise InvalidInputError(
                f"--samplers must be at least the trainer processes of --trainers {self.trainers}, {num_ranks}, "
                f"because each has its own samplers, got {self.samplers}"
            )

    def _check_gateways(self) -> None:
        from unbroken.ledger.store import is_postgres_url  # it loads numpy, and each command this module

        if self.gateways and not is_postgres_url(self.gateway_store or ""):
            raise InvalidInputError(
                f"--gateway.store must be a postgresql:// URL with --gateways {self.gateways}, because gateways share "
                f"their sessions, got {self.gateway_store}"
            )
        if not self.gateways and self.gateway_store is not None:
            raise InvalidInputError("--gateway.store must be left out without --gateways")

    @property
    def gang(self) -> tuple[int, int]:
        """Nodes of trainers, and processes on each."""
        match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,2})", self.trainers, re.ASCII)
        if match is None:
            raise InvalidInputError(f"--trainers must be NODESxPROCESSES, such as 2x8, got {self.trainers!r}")
        return int(match[1]), int(match[2])

    @property
    def environment(self) -> dict[str, str]:
        """The variables of all parts."""
        own = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""} if self.cpu else {}
        return own | dict(each.split("=", 1) for each in self.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A command on a node; of trainers several of the same."""

    kind: Kind
    index: int
    resources: Mapping[str, int]
    """As Ray counts them: CPU and GPU."""

    @property
    def name(self) -> str:
        """Such as engine-3."""
        return f"{self.kind}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """What a part must know of others."""

    gateway: str = ""
    """The URL of the first gateway; empty without."""
    trainers: Sequence[str] = ()
    """The addresses of the trainers' nodes."""
    listen: str = ""
    """The address at which all of these listen for samplers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run on several machines."""

    recipe: Path
    own: Sequence[str]
    """Options of the recipe."""
    model: str
    """What engines load first."""
    output: Path
    has_sessions: bool
    """Whether the recipe names a gateway itself."""
    options: ClusterOptions

    def resolve(self) -> Plan:
        """The same plan with absolute paths: Ray may start parts in another folder."""
        return replace(self, recipe=self.recipe.resolve(), output=self.output.resolve())

    @property
    def folder(self) -> Path:
        """Of the cluster's own files."""
        return self.output / FOLDER

    @property
    def parts(self) -> list[Part]:
        """All parts, those of a kind together."""
        options, (num_nodes, size) = self.options, self.options.gang
        gpus = 0 if options.cpu else 1
        found = []
        for kind, number, num_cpus, num_gpus in (
            (Kind.TRAINERS, num_nodes, size * options.cpus, size * gpus),
            (Kind.ENGINE, options.engines, options.cpus, options.engine_tp * gpus),
            (Kind.SAMPLER, options.samplers, options.cpus, 0),
            (Kind.GATEWAY, options.gateways, options.cpus, 0),
        ):
            resources = {name: num for name, num in (("CPU", num_cpus), ("GPU", num_gpus)) if num}
            found += [Part(kind=kind, index=index, resources=resources) for index in range(number)]
        return found

    def of_kind(self, kind: Kind) -> list[Part]:
        """The parts of a kind."""
        return [part for part in self.parts if part.kind is kind]

    def check_nodes(self, nodes: Sequence[Mapping[str, float]]) -> str:
        """Why the parts do not fit on nodes with these resources (`CPU`, `GPU`); an empty text if they do."""
        gang = self.of_kind(Kind.TRAINERS)
        for name, advice in (("GPU", "give --cpu"), ("CPU", "ask for fewer parts")):
            least = gang[0].resources.get(name, 0)
            large = sum(node.get(name, 0) >= least for node in nodes)
            if large < len(gang):
                return (
                    f"--trainers {self.options.trainers} needs {len(gang)} nodes with {least} {name}s each, and "
                    f"{large} of {len(nodes)} have them: start more nodes, or {advice}"
                )
            shares = {kind: sum(part.resources.get(name, 0) for part in self.of_kind(kind)) for kind in Kind}
            found = int(sum(node.get(name, 0) for node in nodes))
            if found < (num := sum(shares.values())):
                texts = ", ".join(f"--{kind} {share}" for kind, share in shares.items() if share)
                needs = f"the parts need {num} {name}s ({texts}), and the cluster has {found}"
                return f"{needs}: start more nodes, or {advice}"
        return ""

    def make_words(self, part: Part, others: Others, *, host: str = "", port: int = 0) -> list[str]:
        """The command of a part, which is a server at this address, or needs none."""
        options, key, engines = self.options, f"{self.folder / KEY}", f"{self.folder / ENGINES}"
        recipe, weights, first_port = f"{self.recipe}", f"{self.output / 'weights'}", options.sampler_port
        settings = [
            *self.own, "--engine.kind=server", f"--engine.urls-file={engines}", f"--engine.weights-dir={weights}",
            f"--engine.api-key-file={key}",
        ]  # fmt: skip
        if options.gateways and not self.has_sessions:
            settings += [f"--sessions.url={others.gateway}", f"--sessions.api-key-file={key}"]
        if part.kind is Kind.TRAINERS:
            listen = [f"--rollouts.listen={others.listen}:{first_port}", f"--rollouts.key-file={key}"]
            return ["train", recipe, *settings, *(listen if options.samplers else [])]
        if part.kind is Kind.SAMPLER:
            num_nodes, size = options.gang
            rank = part.index % (num_nodes * size)
            trainer = f"{others.trainers[rank // size]}:{first_port + rank}"
            return ["sampler", "--connect", trainer, "--key-file", key, "--wait-s", "120", recipe, *settings]
        if part.kind is Kind.ENGINE:
            tp = ["--tensor-parallel-size", f"{options.engine_tp}"] if options.engine_tp > 1 else []
            return [
                "serve", self.model, "--host", host, "--port", f"{port}", "--api-key-file", key, "--weights-dir",
                weights, "--versions-from", weights, *tp, *shlex.split(options.serve_options),
            ]  # fmt: skip
        return [
            "gateway", "--upstream-file", engines, "--upstream-key-file", key, "--tokenizer", self.model, "--store",
            options.gateway_store or "", "--api-key-file", key, "--host", host, "--port", f"{port}", "--advertise",
            format_url(host, port),
        ]  # fmt: skip


def make_plan(recipe: Path, options: ClusterOptions, own: Sequence[str]) -> Plan:
    """Plan a run of `recipe` with its `own` options. Its paths stay as they were given, relative or not.

    Raises:
        InvalidInputError: the recipe cannot run with parts on several machines, or an option is wrong.
    """
    from unbroken.runs.command import take_preflight
    from unbroken.runs.recipe import load_recipe

    loaded, (_, settings) = load_recipe(recipe), take_preflight(own)
    config = loaded.configure(settings)
    _check_engine(loaded, config, settings)
    model = options.engine_model or getattr(config, "model", None)
    if model is None:
        raise InvalidInputError(
            f"--engine.model must be given: {loaded.name} has no model that is there before the run begins"
        )
    return Plan(
        recipe=recipe,
        own=tuple(own),
        model=str(model),
        output=config.output,
        has_sessions=config.sessions.url is not None,
        options=options,
    )


def _check_engine(recipe: Recipe, config: RunConfig, own: Sequence[str]) -> None:
    """Refuse a recipe that has its own engines; the default kind stands for none."""
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


def format_commands(
    plan: Plan, *, hosts: Sequence[str] = (), port: int = 8300, python: str = "python"
) -> Iterator[str]:
    """The commands of a plan for each node, to be started by hand or by Slurm; lines of a shell.

    Paths are as they were given: relative ones mean a folder that each node has, wherever the plan was printed.
    Parts are dealt out to `hosts` in their order: trainers have a node each. Without hosts they are named NODE0, NODE1.
    """
    options, gang = plan.options, plan.of_kind(Kind.TRAINERS)
    others = [part for part in plan.parts if part.kind is not Kind.TRAINERS]
    names = list(hosts) or _name_nodes(options, num_trainers=len(gang))
    _check_hosts(names, port, num_trainers=len(gang), num_others=len(others))
    free = names[len(gang) :] or names
    placed = [(part, free[number % len(free)], port + number) for number, part in enumerate(others)]
    urls = {part.name: format_url(host, number) for part, host, number in placed}
    whole = Others(gateway=urls.get("gateway-0", ""), trainers=names, listen="0.0.0.0")
    yield from _format_first_commands(plan, [urls[part.name] for part in plan.of_kind(Kind.ENGINE)], python=python)
    variables = [f"{name}={shlex.quote(value)}" for name, value in options.environment.items()]
    for index, host in enumerate(names):
        yield f"\n# on {host}"
        next_gpu = gang[0].resources.get("GPU", 0) if index < len(gang) else 0  # trainers have the first ones
        for part, node, number in placed:
            if node != host:
                continue
            gpus = range(next_gpu, next_gpu + part.resources.get("GPU", 0))
            next_gpu = gpus.stop
            words = [python, "-m", "unbroken", *plan.make_words(part, whole, host=host, port=number)]
            log = shlex.quote(str(plan.folder / f"{part.name}.log"))
            yield " ".join([*variables, *_show_gpus(options, gpus), shlex.join(words), f"> {log} 2>&1 &"])
        if index < len(gang):
            torchrun = _launch(options, python=python, endpoint=f"{names[0]}:{port - 1}")
            words = [*torchrun, "-m", "unbroken", *plan.make_words(gang[index], whole)]
            yield " ".join([*variables, shlex.join(words)])


def _show_gpus(options: ClusterOptions, gpus: Iterable[int]) -> list[str]:
    """What lets a part see these GPUs alone; a part without any sees none."""
    return [] if options.cpu else [f'CUDA_VISIBLE_DEVICES="{",".join(map(str, gpus))}"']


def _format_first_commands(plan: Plan, engine_urls: Sequence[str], *, python: str) -> Iterator[str]:
    """What writes the files that all parts read."""
    yield "# all lines: in the folder that relative paths are relative to, which all nodes share, with the same Python"
    yield "# on one node, before the others: the key of the servers, and their list, which a run reads again and again"
    key = f"{python} -c 'import secrets; print(secrets.token_hex(24))' > {shlex.quote(str(plan.folder / KEY))}"
    yield f"mkdir -p -m 700 {shlex.join([str(plan.output), str(plan.folder)])} && (umask 077; {key})"
    yield f"printf '%s\\n' {shlex.join(engine_urls)} > {shlex.quote(str(plan.folder / ENGINES))}"


def _name_nodes(options: ClusterOptions, *, num_trainers: int) -> list[str]:
    """One for each of the trainers, and one more for the engines where they need GPUs."""
    return [f"NODE{index}" for index in range(num_trainers + (0 if options.cpu else 1))]


def _check_hosts(names: Sequence[str], port: int, *, num_trainers: int, num_others: int) -> None:
    if len({*names}) < len(names) or not all(re.fullmatch(r"[\w.:-]+", each, re.ASCII) for each in names):
        raise InvalidInputError(f"--hosts must be names of nodes that differ, got {names}")
    # The port before it is where the trainers meet.
    if not 1 < port <= 65536 - num_others:
        raise InvalidInputError(f"--port must be > 1 and leave {num_others} ports from it on, got {port}")
    if len(names) < num_trainers:
        raise InvalidInputError(
            f"--hosts must name at least {num_trainers} nodes, one for each of --trainers, got {names}"
        )


def _launch(options: ClusterOptions, *, python: str, endpoint: str) -> list[str]:
    """The words of torchrun, the same on each node of the trainers."""
    num_nodes, size = options.gang
    words = ["--nnodes", str(num_nodes), "--nproc-per-node", str(size), "--rdzv-backend", "c10d"]
    return [python, "-m", "torch.distributed.run", *words, "--rdzv-endpoint", endpoint]
