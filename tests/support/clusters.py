"""A Ray cluster of several nodes inside this machine, and `unbroken cluster run` on it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.forks import commands_as_forks
from support.watched_run import LONGEST_S, WatchedRun, read_lines

RECIPE = Path(__file__).parent / "letters_recipe.py"
ON_CPU = ("--cpu", "--engine.options=--engine transformers")
_STORE_BYTES = 80 * 2**20
_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


class Nodes:
    """Nodes of Ray on the loopback, which trust who has the token."""

    def __init__(self, *cpus: int) -> None:
        """Nodes with so many CPUs, beside the head, which has none."""
        self.environment = {**_RAY, "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        self._cpus = cpus
        os.environ.update(self.environment)
        self._start()

    def _start(self) -> None:
        from ray.cluster_utils import Cluster  # reads the variables when it is imported

        head = {"num_cpus": 0, "include_dashboard": False, **_node_options()}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [(num_cpus, self._add(num_cpus)) for num_cpus in self._cpus]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def kill(self, name: str) -> Callable[[], None]:
        """Kill a node by its name in the status of a run; returns what starts another of its size."""
        (found,) = [each for each in self._nodes if each[1].node_id.startswith(name.rpartition("/")[2])]
        self._nodes.remove(found)
        num_cpus, node = found
        self._cluster.remove_node(node, allow_graceful=False)
        return lambda: self._nodes.append((num_cpus, self._add(num_cpus)))

    def _add(self, num_cpus: int) -> Any:
        return self._cluster.add_node(num_cpus=num_cpus, **_node_options())

    def kill_head(self) -> None:
        """Kill what all nodes ask."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)

    def start_again(self) -> None:
        """Start a head and nodes as at first, with nothing of those before."""
        self._cluster.shutdown()
        self._start()

    def close(self) -> None:
        self._cluster.shutdown()
        for name in self.environment:
            os.environ.pop(name, None)


def _node_options() -> dict[str, Any]:
    return {"node_ip_address": "127.0.0.1", "object_store_memory": _STORE_BYTES}


class ClusterRun(WatchedRun):
    """`unbroken cluster run`."""

    def __init__(
        self,
        nodes: Nodes,
        output: Path,
        model: Path,
        options: Sequence[str],
        own: Sequence[str],
        recipe: Path = RECIPE,
        machine: Sequence[str] = ON_CPU,
    ) -> None:
        self._held = output.with_name(f"{output.name}.held")
        # A fork of a process that has imported torch cannot be relied on to use a GPU.
        forks = commands_as_forks() if machine == ON_CPU else {}
        variables = {**forks, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        words = ["cluster", "run", recipe, "--address", nodes.address, *machine]
        words += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        words += [*options, "--", f"--output={output}", f"--model={model}", "--rollout-log.groups=none", *own]
        environment = {**variables, **nodes.environment}
        super().__init__(output, *words, environment=environment, new_session=True)

    def hold(self, step: int) -> None:
        """Have the run wait before a step, until `go_on`."""
        self._held.write_text(str(step))

    def go_on(self) -> None:
        self._held.unlink()  # it is read as a whole: written once, before the run comes to the step

    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.output / "cluster" / "log.jsonl")

    def state(self) -> dict[str, Any]:
        path = self.output / "cluster" / "state.json"
        return json.loads(path.read_text()) if path.exists() else {"parts": []}

    def part(self, name: str) -> dict[str, Any]:
        return next((each for each in self.state()["parts"] if each["name"] == name), {"state": ""})

    def reasons(self, part: str) -> list[str]:
        """Why a part was started again or lost."""
        return [each["reason"] for each in self.events() if each["part"] == part and each["what"] == "restart"]

    def kill(self, name: str) -> None:
        """Kill a part that runs, and wait until that is in the log."""
        before = len(self.reasons(name))
        self.wait_until(lambda: self.part(name)["state"] in ("serves", "trains"))
        os.kill(self.part(name)["pid"], signal.SIGKILL)
        self.wait_until(lambda: len(self.reasons("trainers" if name.startswith("trainers") else name)) > before)

    def finish(self) -> None:
        """Wait for the end of a run that ends well."""
        self.wait_until_ended()
        assert self.process.poll() == 0, self.explain()

    def wait_until_ended(self) -> int:
        began_s = time.monotonic()
        while self.process.poll() is None:
            assert time.monotonic() - began_s < LONGEST_S, self.explain()
            time.sleep(0.05)
        self.check_nothing_is_left()
        return int(self.process.poll() or 0)

    def check_nothing_is_left(self) -> None:
        """Processes of the run end with it, or within seconds."""
        until_s = time.monotonic() + 60
        while left := self._find_processes():
            assert time.monotonic() < until_s, left
            time.sleep(0.2)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()

    def explain(self) -> str:
        logs = sorted((self.output / "cluster").glob("*.log"))
        return "\n".join([super().explain(), *(f"{path.name}: {path.read_text()[-1500:]}" for path in logs)])

    def _find_processes(self) -> list[str]:
        """Processes that write or wrote a log of the run, or have it in their command, and are none of Ray's own."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                log = str((process / "fd" / "1").readlink())
            except OSError:  # it has ended, or is another user's
                continue
            if f"{self.output}/" in f"{words}{log}" or f"{self.output} " in words:
                found.append(f"{process.name} {words} > {log}")
        return found
