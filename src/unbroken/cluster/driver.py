"""The driver: has Ray place the parts, keeps them running, and ends everything with the run.

driver ──► registry ──► files
   ├── engine-0 .. gateway-3: run, wait 1, 2, 4, ... 60 s, run again      } a `Runner` each, an actor that Ray starts
   └── trainers-0, trainers-1: all run, or all stop and run again ──► end } again on another node if its own dies
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from unbroken.cluster.plan import Others, Part, Plan
from unbroken.cluster.processes import Command, Kind, NodePlace, PartState, Runner, name_node
from unbroken.cluster.registry import KEY, Registry
from unbroken.errors import InvalidInputError, TrainingError
from unbroken.rollout.failures import format_error
from unbroken.runs.folder import make_folder, open_private
from unbroken.runs.signals import cancelled_by_sigterm

_POLL_S, _EVERY_S = 0.5, 1.0
_CALM_S, _MAX_WAIT_S = 60.0, 60.0
"""How long a part waits at most before it starts again, and after how long without an end the wait is short again."""
_STOP_S = 90.0
_MAX_FAILURES = 3
"""How many times in a row the trainers may end without having trained a step; then the run ends."""
_LOCAL = "local"


def run_on_cluster(plan: Plan, *, address: str | None, wait_s: float, is_untrusted: bool) -> None:
    """Run a plan on the Ray cluster at `address`, until the trainers have ended.

    Raises:
        InvalidInputError: there is no such cluster, or the parts do not fit on it within `wait_s`.
        TrainingError: trainers ended again and again before they trained a step.
        Terminated: SIGTERM came; all parts have ended.
    """
    with _own_folder(plan):
        _connect(address, is_untrusted=is_untrusted)
        try:
            asyncio.run(_Run(plan).run(wait_s))
        finally:
            ray.shutdown()


def _connect(address: str | None, *, is_untrusted: bool) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == _LOCAL:
        # Ray would write a token that everybody on this machine may read. Whoever has it runs code as this user.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        try:
            ray.init(address=_LOCAL, include_dashboard=False, _node_ip_address="127.0.0.1", **options)
        except Exception as error:  # a node that does not come up in time is a plain Exception
            raise InvalidInputError(
                "--address local needs Ray, which does not start on this machine: "
                f"{format_error(error, first_line=True)} (its logs are in /tmp/ray/session_latest/logs, unless "
                "RAY_TMPDIR names another folder)"
            ) from None
        return
    if not is_untrusted:
        check_token_file(os.environ)
    try:
        ray.init(address=address or "auto", **options)
    except Exception as error:  # also of what Ray starts and does not find
        raise InvalidInputError(
            f"--address must be that of a Ray cluster, got {address or 'auto'}: start one (docs/cluster.md), or give "
            f"--address local for this machine alone ({format_error(error, first_line=True)})"
        ) from None
    if not (is_untrusted or is_token_auth_enabled()):
        ray.shutdown()
        raise InvalidInputError(
            "the Ray cluster has no token, so whoever reaches its ports can run code: start it with RAY_AUTH_MODE="
            "token (docs/cluster.md), or give --no-ray-token"
        )


def check_token_file(variables: Mapping[str, str]) -> None:
    """Raise `InvalidInputError` if others on this machine may read the token that `ray get-auth-token` wrote."""
    file = Path.home() / ".ray" / "auth_token"
    if variables.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} or not file.exists():
        return
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        raise InvalidInputError(
            f"{file} must be readable by its owner alone, as whoever has Ray's token runs code on the cluster, got "
            f"mode {mode:o}: chmod 600 {file}, and make a new token if others use this machine"
        )


@contextmanager
def _own_folder(plan: Plan) -> Iterator[None]:
    """Make the folder of the cluster's files, with a key; keep other clusters out of it."""
    make_folder(plan.output)
    plan.folder.mkdir(mode=0o700, exist_ok=True)
    with (plan.folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInputError(
                f"output must be a folder that no other cluster runs in, got {plan.output}"
            ) from None
        if not (plan.folder / KEY).exists():
            with open_private(plan.folder / KEY, "wb") as file:
                file.write(f"{secrets.token_hex(24)}\n".encode())
        yield


class _Run:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._registry = Registry(plan.output, {part.name: part.kind for part in plan.parts})
        self._log = plan.folder / "trainer-0.log"
        self._shown = self._log.stat().st_size if self._log.exists() else 0
        """Bytes of it that were printed, or are of an earlier command."""
        self._actors: dict[str, Any] = {}
        self._group: Any = None
        self._numbers = itertools.count(1)
        self._others = Others()
        self._trains = asyncio.Event()

    async def run(self, wait_s: float) -> None:
        """Run until the trainers have ended; SIGTERM ends all parts, and is raised as `Terminated`."""
        with cancelled_by_sigterm():
            await self._wait_for_nodes(wait_s)
            await self._run_parts()

    async def _run_parts(self) -> None:
        self._registry.note("run", "begin")
        self._place_parts()
        services = [[part] for part in self._plan.parts if part.kind is not Kind.TRAINERS]
        works = [self._watch(), *(self._keep(parts) for parts in (self._plan.of_kind(Kind.TRAINERS), *services))]
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # only training ends
            for task in done:
                task.result()
        finally:
            await asyncio.shield(self._stop(tasks))

    async def _wait_for_nodes(self, wait_s: float) -> None:
        until_s, said = time.monotonic() + wait_s, ""
        while problem := self._plan.check_nodes([node["Resources"] for node in _find_nodes()]):
            if time.monotonic() > until_s:
                raise InvalidInputError(problem)
            if said != (said := problem):
                print(f"waiting up to {wait_s:g} s (--wait-s) for nodes: {problem}", flush=True)
            await asyncio.sleep(_POLL_S)

    def _place_parts(self) -> None:
        gang = self._plan.of_kind(Kind.TRAINERS)
        self._group = placement_group([part.resources for part in gang], strategy="STRICT_SPREAD")
        for part in self._plan.parts:
            strategy: Any = "SPREAD"
            if part.kind is Kind.TRAINERS:
                strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=part.index)
            actor = ray.remote(Runner).options(
                num_cpus=part.resources["CPU"],
                num_gpus=part.resources.get("GPU", 0),
                max_restarts=-1,
                max_concurrency=4,
                scheduling_strategy=strategy,
            )
            self._actors[part.name] = actor.remote(part.name, part.kind, Path.cwd())

    async def _watch(self) -> None:
        """Write the files, and print what the first trainer prints."""
        while True:
            with suppress(ray.exceptions.RayError):  # the head starts again
                nodes = await asyncio.to_thread(_find_nodes)
                self._registry.watch({name_node(node["NodeManagerAddress"], node["NodeID"]) for node in nodes})
            self._shown = _print_lines(self._log, self._shown)
            await asyncio.sleep(_EVERY_S)

    async def _keep(self, parts: Sequence[Part]) -> None:
        """Run parts together, again and again: trainers until all of them end well."""
        are_trainers = parts[0].kind is Kind.TRAINERS
        name, num_failures = "trainers" if are_trainers else parts[0].name, 0
        while True:
            steps, began_s = self._read_steps(), time.monotonic()
            reasons = await self._run_once(parts)
            if not reasons:
                self._registry.note(name, "end", "the trainers have ended")
                return
            # What follows the checkpoint is cut off, and written anew by steps that were trained.
            has_trained = not steps.startswith(self._read_steps())
            is_calm = has_trained if are_trainers else time.monotonic() - began_s > _CALM_S
            num_failures = 1 if is_calm else num_failures + 1
            if are_trainers and num_failures >= _MAX_FAILURES:
                raise TrainingError(
                    f"the trainers ended {num_failures} times before they trained a step: {'; '.join(reasons)} "
                    f"(logs in {self._plan.folder})"
                )
            wait_s = min(2.0 ** (num_failures - 1), _MAX_WAIT_S)
            how = "all start again from the newest checkpoint" if are_trainers else "it starts again"
            node = "" if are_trainers else self._registry.find_part(name).node
            self._registry.note(name, "restart", f"{'; '.join(reasons)}; {how} in {wait_s:g} s", node=node)
            await asyncio.sleep(wait_s)

    async def _run_once(self, parts: Sequence[Part]) -> Sequence[str]:
        """Run parts until all end well, or one does not, which ends the others; returns why."""
        kind, number = parts[0].kind, next(self._numbers)
        places = [await self._find_place(part) for part in parts]
        if kind is Kind.TRAINERS:
            await self._introduce_trainers([place.host for place in places])
        if kind is Kind.SAMPLER:
            await self._trains.wait()
        runs = [
            asyncio.ensure_future(self._run_part(part, place, number, self._make_commands(part, place, places[0])))
            for part, place in zip(parts, places, strict=True)
        ]
        try:
            await self._wait_for_all(dict(zip(runs, parts, strict=True)), number)
        finally:
            if kind is Kind.TRAINERS:
                self._trains.clear()
            for run in runs:
                run.cancel()
        if kind is not Kind.TRAINERS:  # one part, whose node the registry names
            return runs[0].result()
        return [
            f"{reason} (node {place.node})" for run, place in zip(runs, places, strict=True) for reason in run.result()
        ]

    async def _introduce_trainers(self, hosts: Sequence[str]) -> None:
        """Say to samplers where the trainers are, and to trainers where the first gateway is."""
        gateway = await self._find_gateway()
        # All ranks have the same settings, so those of several nodes listen at each of their addresses.
        listen = hosts[0] if len({*hosts}) == 1 else "0.0.0.0"
        self._others = Others(gateway=gateway, trainers=hosts, listen=listen)
        self._trains.set()
        self._registry.note("trainers", "trains", f"{len(hosts)} nodes")

    async def _wait_for_all(self, runs: Mapping[asyncio.Future[Sequence[str]], Part], number: int) -> None:
        """Wait for the runs of parts; one that does not end well ends the others, which would wait for it forever."""
        pending = set(runs)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(run.result() for run in done):
                await self._stop_runs([part for run, part in runs.items() if run in pending], number)

    async def _run_part(self, part: Part, place: NodePlace, number: int, commands: Sequence[Command]) -> Sequence[str]:
        """Run a part's processes until they end, and say how they are; returns why they did not end well."""
        actor, url = self._actors[part.name], place.url if part.kind in (Kind.ENGINE, Kind.GATEWAY) else ""
        state = PartState(name=part.name, kind=part.kind, node=place.node)
        self._registry.update(replace(state, state="starts"))
        self._registry.note(part.name, "start", node=place.node)
        call = asyncio.ensure_future(_answer(actor.run.remote(number, commands, url), part.name))
        try:
            while not (await asyncio.wait([call], timeout=_EVERY_S))[0]:
                with suppress(ray.exceptions.RayError):
                    self._registry.update(await actor.look.remote())
            return call.result()
        finally:
            self._registry.update(state)

    async def _find_place(self, part: Part) -> NodePlace:
        """Where a part is; waits while Ray starts its actor again, on another node or once there is one."""
        while True:
            try:
                place: NodePlace = await self._actors[part.name].find_place.remote()
                return place
            except ray.exceptions.RayActorError:
                await asyncio.sleep(_POLL_S)

    async def _find_gateway(self) -> str:
        """The URL of the first gateway, once it serves; empty without gateways."""
        while self._plan.options.gateways:
            if url := self._registry.find_part("gateway-0").url:
                return url
            await asyncio.sleep(_POLL_S)
        return ""

    def _make_commands(self, part: Part, place: NodePlace, first: NodePlace) -> list[Command]:
        """The processes of a part; ranks of trainers meet in the store of the `first` node."""
        words = self._plan.make_words(part, self._others, host=place.host, port=place.port)
        environment, folder = self._plan.options.environment, self._plan.folder
        if part.kind is not Kind.TRAINERS:
            return [Command(words=words, log=folder / f"{part.name}.log", variables=environment)]
        num_nodes, size = self._plan.options.gang
        commands = []
        for local in range(size):
            rank = part.index * size + local
            numbers = {
                "RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": num_nodes * size, "LOCAL_WORLD_SIZE": size,
                "GROUP_RANK": part.index, "MASTER_ADDR": first.host, "MASTER_PORT": first.port,
            }  # fmt: skip
            variables = environment | {name: str(value) for name, value in numbers.items()}
            log = folder / f"trainer-{rank}.log"
            commands.append(Command(words=words, log=log, variables=variables, name=f"rank {rank}"))
        return commands

    async def _stop_runs(self, parts: Sequence[Part], number: int) -> None:
        """End the runs of parts up to a number; those that are lost have none."""
        calls = [asyncio.ensure_future(_answer(self._actors[part.name].stop.remote(number), "")) for part in parts]
        if calls:
            await asyncio.wait(calls, timeout=_STOP_S)

    async def _stop(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """End all parts, trainers first."""
        running = [part for part in self._plan.parts if self._registry.find_part(part.name).state != "waits"]
        for task in tasks:
            task.cancel()
        for are_trainers in (True, False):
            parts = [part for part in running if (part.kind is Kind.TRAINERS) is are_trainers]
            await self._stop_runs(parts, sys.maxsize)
        for actor in self._actors.values():
            ray.kill(actor)
        remove_placement_group(self._group)
        _print_lines(self._log, self._shown)
        self._registry.close()

    def _read_steps(self) -> bytes:
        path = self._plan.output / "metrics" / "metrics.jsonl"
        return path.read_bytes() if path.exists() else b""


def _print_lines(path: Path, begin: int) -> int:
    """Print the whole lines of a file from a byte on; returns where they end."""
    if not path.exists():
        return begin
    with path.open("rb") as file:
        file.seek(begin)
        new = file.read()
    end = new.rfind(b"\n") + 1
    print(new[:end].decode("utf-8", "replace"), end="", flush=True)
    return begin + end


def _find_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that live."""
    return [node for node in ray.nodes() if node["Alive"]]


async def _answer(call: Any, name: str) -> Sequence[str]:
    """The answer of an actor; if it is lost, that is why its processes have ended."""
    try:
        return await call or ()
    except ray.exceptions.RayActorError as error:
        return [f"{name} was lost with its node or its actor ({type(error).__name__})"]
    except ray.exceptions.RayTaskError as error:
        return [f"{name} could not run its processes: {error.cause}"]
