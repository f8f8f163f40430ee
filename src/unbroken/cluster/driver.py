"""The driver: has Ray place the parts, keeps the gang of trainers together, and ends everything with the run.

driver ──► registry (1 actor) ◄── reports, each second ── engine-0 .. gateway-3 (an actor each: `unbroken serve` ...)
   │                                                   ── trainers-0, trainers-1 (an actor each, on nodes of their own)
   └── start ── a rank or node is lost: stop all, wait for the nodes, start again ──► until all ranks end well
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from unbroken.cluster.actors import REGISTRY, RegistryActor, ServiceActor, TrainersActor
from unbroken.cluster.plan import Plan
from unbroken.cluster.processes import KEY, PLACES, Kind, NodePlace, Part
from unbroken.cluster.registry import LOG, format_event, make_event, parse_event, write_event
from unbroken.errors import InvalidInputError, TrainingError
from unbroken.runs.folder import open_private
from unbroken.runs.signals import run_until_terminated

_POLL_S = 0.5
_STOP_S = 90.0
_MAX_FAILURES = 3
"""Gangs that end in a row without a step that was trained, after which the run ends."""
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
            run_until_terminated(_Run(plan).run(wait_s))
        finally:
            ray.shutdown()


def _connect(address: str | None, *, is_untrusted: bool) -> None:
    # A namespace of its own, so that each run has a registry.
    options: dict[str, Any] = {
        "namespace": f"unbroken-{secrets.token_hex(4)}",
        "log_to_driver": False,
        "logging_level": "warning",
    }
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == _LOCAL:
        ray.init(address=_LOCAL, include_dashboard=False, _node_ip_address="127.0.0.1", **options)
        return
    try:
        ray.init(address=address or "auto", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InvalidInputError(
            f"--address must be that of a Ray cluster, got {address or 'auto'}: start one (docs/cluster.md), or give "
            f"--address local for this machine alone ({error})"
        ) from None
    if not (is_untrusted or is_token_auth_enabled()):
        ray.shutdown()
        raise InvalidInputError(
            "the Ray cluster has no token, so whoever reaches its ports can run code: start it with RAY_AUTH_MODE="
            "token (docs/cluster.md), or give --no-ray-token"
        )


@contextmanager
def _own_folder(plan: Plan) -> Iterator[None]:
    """Make the folder of the cluster's files, with a key; keep other clusters out of it."""
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    plan.output.mkdir(mode=0o700, exist_ok=True)
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
        self._place = NodePlace(
            host="", folder=plan.folder, work_dir=Path.cwd(), environment=plan.options.environment
        )  # fmt: skip
        self._own_log, self._events = (_Tail(plan.folder / name) for name in ("trainer-0.log", LOG))
        self._services: dict[str, Any] = {}
        self._trainers: list[Any] = []
        self._registry: Any = None
        self._group: Any = None

    async def run(self, wait_s: float) -> None:
        """Run until the trainers have ended."""
        await self._wait_for_nodes(wait_s)
        (self._plan.folder / PLACES).unlink(missing_ok=True)  # of a run that was killed
        expected = {part.name: part.kind for part in self._plan.parts}
        write_event(self._plan.folder / LOG, make_event("run", "", "begin"))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        registry = _make_actor(RegistryActor, num_cpus=0, max_task_retries=-1, name=REGISTRY, scheduling_strategy=here)
        self._registry = registry.remote(self._plan.output, expected)
        shown = asyncio.create_task(self._show())
        try:
            self._place_trainers()
            for part in self._plan.parts:
                if part.kind is not Kind.TRAINERS:
                    self._services[part.name] = self._start(ServiceActor, part, scheduling_strategy="SPREAD")
            await self._train()
        finally:
            await asyncio.shield(self._stop())
            shown.cancel()
            self._print_new()

    async def _wait_for_nodes(self, wait_s: float) -> None:
        until_s, said = time.monotonic() + wait_s, ""
        while problem := self._plan.check_nodes([node["Resources"] for node in ray.nodes() if node["Alive"]]):
            if time.monotonic() > until_s:
                raise InvalidInputError(problem)
            if said != (said := problem):
                print(f"waiting up to {wait_s:g} s (--wait-s) for nodes: {problem}", flush=True)
            await asyncio.sleep(_POLL_S)

    def _place_trainers(self) -> None:
        parts = self._plan.of_kind(Kind.TRAINERS)
        bundles = [{name: num for name, num in (("CPU", p.num_cpus), ("GPU", p.num_gpus)) if num} for p in parts]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        for part in parts:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=part.index)
            self._trainers.append(self._start(TrainersActor, part, scheduling_strategy=strategy))

    def _start(self, kind: Any, part: Part, **options: Any) -> Any:
        actor = _make_actor(kind, num_cpus=part.num_cpus, num_gpus=part.num_gpus, max_concurrency=4, **options)
        return actor.remote(part, self._place)

    async def _train(self) -> None:
        """Start the gang again until all of its ranks end well."""
        num_failures, wait_s = 0, 1.0
        while True:
            before = self._read_steps()
            reasons = await self._run_gang()
            if not reasons:
                self._note("end", "the trainers have ended")
                return
            # What follows the checkpoint is cut off, and written anew by steps that were trained.
            num_failures = num_failures + 1 if before.startswith(self._read_steps()) else 1
            if num_failures >= _MAX_FAILURES:
                raise TrainingError(
                    f"the trainers ended {num_failures} times before they trained a step: {'; '.join(reasons)} "
                    f"(logs in {self._plan.folder})"
                )
            wait_s = 1.0 if num_failures == 1 else 2 * wait_s
            self._note("restart", f"{'; '.join(reasons)}; all start again in {wait_s:g} s from the newest checkpoint")
            await asyncio.sleep(wait_s)

    async def _run_gang(self) -> Sequence[str]:
        """Run the trainers of all nodes once; returns why they did not end well."""
        stores = [await _ask_until_there(each, "reserve_store") for each in self._trainers]
        places = self._find_places([host for host, _ in stores], await self._find_gateway())
        calls = [each.run.remote(stores[0], len(self._trainers), places) for each in self._trainers]
        tasks = [asyncio.ensure_future(_answer(call, f"trainers-{k}")) for k, call in enumerate(calls)]
        self._note("trains", f"{len(tasks)} nodes")
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(task.result() for task in done):
                    await asyncio.gather(*(_answer(each.stop.remote(), "") for each in self._trainers))
        finally:
            (self._plan.folder / PLACES).unlink(missing_ok=True)
            for task in pending:
                task.cancel()
        return [reason for task in tasks for reason in task.result()]

    def _find_places(self, hosts: Sequence[str], gateway: str) -> dict[str, str]:
        """What all trainers know of each other; samplers read from a file whom they serve."""
        port, size = self._plan.options.sampler_port, self._plan.options.trainers.num_processes
        ranks = [f"{hosts[rank // size]}:{port + rank}" for rank in range(len(hosts) * size)]
        (self._plan.folder / PLACES).write_text(json.dumps({"gateway": gateway, "trainers": ranks}))
        # All ranks have the same settings, so those of several nodes listen at each of their addresses.
        return {"gateway": gateway, "listen": f"{hosts[0] if len({*hosts}) == 1 else '0.0.0.0'}:{port}"}

    async def _find_gateway(self) -> str:
        """The URL of the first gateway, once it serves."""
        if "gateway-0" not in self._services:
            return ""
        while True:
            if url := await _ask_until_there(self._services["gateway-0"], "find_url"):
                return str(url)
            await asyncio.sleep(_POLL_S)

    async def _stop(self) -> None:
        """End all parts, trainers first."""
        for actors in (self._trainers, list(self._services.values())):
            stops = [asyncio.ensure_future(_answer(each.stop.remote(), "")) for each in actors]
            if stops:
                await asyncio.wait(stops, timeout=_STOP_S)
        with suppress(TimeoutError, ray.exceptions.RayError):
            await asyncio.wait_for(self._registry.close.remote(), 10)
        for each in (*self._trainers, *self._services.values(), self._registry):
            ray.kill(each)
        if self._group is not None:
            remove_placement_group(self._group)

    def _note(self, what: str, reason: str) -> None:
        self._registry.note.remote(make_event("trainers", "", what, reason))

    def _read_steps(self) -> bytes:
        path = self._plan.output / "metrics" / "metrics.jsonl"
        return path.read_bytes() if path.exists() else b""

    async def _show(self) -> None:
        """Print what the first trainer prints, and the events."""
        while True:
            self._print_new()
            await asyncio.sleep(_POLL_S)

    def _print_new(self) -> None:
        for line in self._own_log.read():
            print(line, flush=True)
        for line in self._events.read():
            if (event := parse_event(line)) is not None:
                print(format_event(event), flush=True)


class _Tail:
    """The lines that are added to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def read(self) -> Iterator[str]:
        """The whole lines since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                yield line.decode("utf-8", "replace").rstrip("\n")


def _make_actor(kind: Any, **options: Any) -> Any:
    return ray.remote(kind).options(max_restarts=-1, **options)


async def _ask_until_there(actor: Any, method: str) -> Any:
    """Ask an actor that Ray may be starting again, on another node or once there is one."""
    while True:
        try:
            return await getattr(actor, method).remote()
        except ray.exceptions.RayActorError:
            await asyncio.sleep(_POLL_S)


async def _answer(call: Any, name: str) -> Sequence[str]:
    """The answer of an actor; if it is lost, that is why its processes have ended."""
    try:
        return await call or ()
    except ray.exceptions.RayActorError as error:
        return [f"{name} was lost with its node or its actor ({type(error).__name__})"]
    except ray.exceptions.RayTaskError as error:
        return [f"{name} could not run its processes: {error.cause}"]
