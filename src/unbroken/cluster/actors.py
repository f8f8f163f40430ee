"""The actors: Ray places them on nodes, and starts them again where their node is gone.

Each has a thread that reports to the registry every second. None holds anything that is lost with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from unbroken.cluster.processes import Kind, NodePlace, Part, Ranks, Service
from unbroken.cluster.registry import ClusterEvent, PartState, Registry, Report, make_event

REGISTRY = "registry"
"""Its name in the namespace of the run."""
_EVERY_S = 1.0
_ANSWER_S = 10.0


class RegistryActor:
    """The registry of a run, which looks at the nodes each second."""

    def __init__(self, output: Path, expected: Mapping[str, Kind]) -> None:
        self._registry = Registry(output, expected)
        self._lock = threading.Lock()
        self._watch()
        threading.Thread(target=self._look, daemon=True).start()

    def report(self, report: Report) -> None:
        """Take a part's report."""
        with self._lock:
            self._registry.report(report)

    def note(self, event: ClusterEvent) -> None:
        """Write an event into the log."""
        with self._lock:
            self._registry.note(event)

    def close(self) -> None:
        """End the files."""
        with self._lock:
            self._registry.close()

    def _look(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            try:
                self._watch()
            except OSError as error:  # the disk is full, or the share is away for a while
                print(f"the registry cannot write: {error}", flush=True)

    def _watch(self) -> None:
        nodes = {name_node(node["NodeManagerAddress"], node["NodeID"]) for node in ray.nodes() if node["Alive"]}
        with self._lock:
            self._registry.watch(nodes)


class _Reporter:
    """Tells the registry about a part, in a thread; events are sent until they have arrived."""

    def __init__(self, part: Part) -> None:
        self._registry = ray.get_actor(REGISTRY)
        self._events: list[ClusterEvent] = []
        self.node = name_node(find_address(), ray.get_runtime_context().get_node_id())
        self.state = PartState(name=part.name, kind=part.kind, node=self.node, state="starts")

    def note(self, what: str, reason: str) -> None:
        """Tell of an event."""
        self._events.append(make_event(self.state.name, self.node, what, reason))

    def start(self, read: Any) -> None:
        """Report in a thread; `read` returns what differs from the state at the start."""

        def work() -> None:
            while True:
                events = tuple(self._events)
                report = Report(state=replace(self.state, **read()), events=events)
                try:
                    ray.get(self._registry.report.remote(report), timeout=_ANSWER_S)
                    del self._events[: len(events)]
                except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                    pass  # it is being started again
                time.sleep(_EVERY_S)

        threading.Thread(target=work, daemon=True).start()


class ServiceActor:
    """An engine, a sampler or a gateway."""

    def __init__(self, part: Part, place: NodePlace) -> None:
        self._reporter = _Reporter(part)
        self._service = Service(part, replace(place, host=find_address()), self._reporter.note)
        self._reporter.note("start", "")
        self._thread = threading.Thread(target=self._service.run, daemon=True)
        self._thread.start()
        self._reporter.start(self._read)

    def find_url(self) -> str:
        """Where it serves; empty if it does not."""
        return self._service.url

    def stop(self) -> None:
        """End the process."""
        self._service.stop()
        self._thread.join()

    def _read(self) -> dict[str, Any]:
        service = self._service
        return {"state": service.state, "url": service.url, "version": service.version, "pid": service.pid}


class TrainersActor:
    """The trainers of one node. The driver starts them, because all nodes start together."""

    def __init__(self, part: Part, place: NodePlace) -> None:
        self._reporter = _Reporter(part)
        self._ranks = Ranks(part, replace(place, host=find_address()))
        self._has_ended = threading.Event()
        self._has_ended.set()
        self._reporter.note("start", "")
        self._reporter.start(self._read)

    def reserve_store(self) -> tuple[str, int]:
        """See `Ranks`."""
        return self._ranks.reserve_store()

    def run(self, store: tuple[str, int], num_nodes: int, places: Mapping[str, str]) -> list[str]:
        """Train; returns why processes did not end well."""
        self._has_ended.clear()
        try:
            reasons = self._ranks.run(store, num_nodes=num_nodes, places=places)
            return [f"{reason} (node {self._reporter.node})" for reason in reasons]
        finally:
            self._has_ended.set()

    def stop(self) -> None:
        """End the processes; returns when they have ended."""
        self._ranks.stop()
        self._has_ended.wait()

    def _read(self) -> dict[str, Any]:
        return {"state": "waits" if self._has_ended.is_set() else "trains", "pid": self._ranks.pid}


def find_address() -> str:
    """The address of this node that Ray was given."""
    own = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own)


def name_node(address: str, node_id: str) -> str:
    """A name for people: nodes of one machine have the same address."""
    return f"{address}/{node_id[:6]}"
