"""The fields of a task.toml (Harbor's schema 1.0 to 1.4): which are honoured, noted or refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from unbroken.integrations.harbor.findings import Findings

_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_DESCRIPTIVE = ("metadata", "task", "source")
"""Tables and fields that say what the task is, and change nothing in how it runs."""
_HONOURED = frozenset(
    {
        "schema_version", "version", "agent.timeout_sec", "verifier.timeout_sec", "verifier.env", "solution.env",
        "environment.build_timeout_sec", "environment.env", "environment.workdir", "environment.network_mode",
        "environment.allow_internet", "agent.network_mode", "verifier.network_mode",
    }
)  # fmt: skip
_NOTED = {
    **dict.fromkeys(
        ("environment.cpus", "environment.memory_mb", "environment.memory", "environment.storage_mb",
         "environment.storage"),
        "is not enforced",
    ),
    "artifacts": "are not collected: keep = \"all\" keeps all files of an attempt",
}  # fmt: skip
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "steps": (([],), "a task of several steps needs Harbor"),
    "multi_step_reward_strategy": ((), "a task of several steps needs Harbor"),
    "environment.docker_image": ((), "its files are in a container image"),
    "environment.os": (("linux",), "tasks run on this machine's kernel"),
    "environment.gpus": ((0,), "accelerators are not handed to a task"),
    "environment.gpu_types": (([],), "accelerators are not handed to a task"),
    "environment.tpu": ((), "accelerators are not handed to a task"),
    "environment.mcp_servers": (([],), "servers of tools are not started"),
    "environment.skills_dir": ((), "skills are not installed in the agent"),
    "environment.healthcheck": ((), "no service runs beside the agent"),
    "environment.allowed_hosts": (([],), "a network of chosen hosts cannot be made"),
    "agent.allowed_hosts": (([],), "a network of chosen hosts cannot be made"),
    "verifier.allowed_hosts": (([],), "a network of chosen hosts cannot be made"),
    "agent.user": (("root", 0), "all processes of a task have one user"),
    "verifier.user": (("root", 0), "all processes of a task have one user"),
    "verifier.environment_mode": (("shared",), "the verifier runs where the agent has run"),
    "verifier.environment": ((), "the verifier runs where the agent has run"),
    "verifier.collect": (([],), "no service runs beside the agent"),
}
"""Values that ask for nothing, and why any other one is refused."""
_TABLES = ("agent", "verifier", "environment", "solution")


class NetworkMode(StrEnum):
    """What a phase of a task may reach."""

    PUBLIC = "public"
    """The internet."""
    NO_NETWORK = "no-network"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFields:
    """What is honoured of a task.toml."""

    name: str | None = None
    agent_timeout_s: float | None = None
    """Seconds for the agent; None: no limit of its own."""
    verifier_timeout_s: float = 600.0
    build_timeout_s: float = 600.0
    """Seconds for each instruction of the Dockerfile that runs."""
    agent_network: NetworkMode = NetworkMode.PUBLIC
    verifier_network: NetworkMode = NetworkMode.PUBLIC
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of all phases."""
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    solution_variables: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    """Instead of the Dockerfile's."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_fields(table: Mapping[str, Any], findings: Findings, *, host: Mapping[str, str]) -> TaskFields:
    """Read a task.toml. `host` are the variables for values such as `${KEY}`.

    Raises:
        InvalidInputError: a field is unknown, has a wrong value, or asks for what cannot be had here.
    """
    reader = _Reader(table, findings, host)
    version = str(table.get("schema_version", table.get("version", "1.0")))
    if version.split(".")[0] != "1":
        raise findings.fail(f"task.toml must have schema version 1, got {version!r}")
    for name, value in _list_fields(table):
        _check_field(name, value, findings)
    baseline = reader.network("environment") or reader.legacy_network() or NetworkMode.PUBLIC
    package = table.get("task")
    return TaskFields(
        name=package.get("name") if isinstance(package, Mapping) else None,
        agent_timeout_s=reader.seconds("agent", "timeout_sec", None),
        verifier_timeout_s=reader.seconds("verifier", "timeout_sec", 600.0) or 600.0,
        build_timeout_s=reader.seconds("environment", "build_timeout_sec", 600.0) or 600.0,
        agent_network=reader.network("agent") or baseline,
        verifier_network=reader.network("verifier") or baseline,
        variables=reader.variables("environment"),
        verifier_variables=reader.variables("verifier"),
        solution_variables=reader.variables("solution"),
        workdir=reader.workdir(),
        metadata=table.get("metadata", {}),
    )


def _list_fields(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if name in _TABLES and isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", each) for inner, each in value.items())
        else:
            yield name, value


def _check_field(name: str, value: Any, findings: Findings) -> None:
    if name in _HONOURED or name in _DESCRIPTIVE:
        return
    if name in _NOTED:
        if value:
            findings.note(f"{name} {_NOTED[name]}")
    elif name in _REFUSED:
        harmless, reason = _REFUSED[name]
        if (value.lower() if isinstance(value, str) else value) not in harmless:
            findings.refuse(name, reason)
    else:
        findings.refuse(name, "a field of task.toml that is not known here")


@dataclass(frozen=True, slots=True)
class _Reader:
    table: Mapping[str, Any]
    findings: Findings
    host: Mapping[str, str]

    def seconds(self, table: str, name: str, default: float | None) -> float | None:
        value = self._get(table, name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value) and value > 0):
            raise self.findings.fail(f"{table}.{name} must be a finite number of seconds > 0, got {value!r}")
        return None if value is None else float(value)

    def network(self, table: str) -> NetworkMode | None:
        value = self._get(table, "network_mode", None)
        if value is None:
            return None
        if value == "allowlist":
            self.findings.refuse(f"{table}.network_mode", "a network of chosen hosts cannot be made")
            return NetworkMode.NO_NETWORK
        if value not in list(NetworkMode):
            raise self.findings.fail(
                f"{table}.network_mode must be one of public, no-network and allowlist, got {value!r}"
            )
        return NetworkMode(value)

    def legacy_network(self) -> NetworkMode | None:
        allowed = self._get("environment", "allow_internet", None)
        if not (allowed is None or isinstance(allowed, bool)):
            raise self.findings.fail(f"environment.allow_internet must be true or false, got {allowed!r}")
        return None if allowed is None else NetworkMode.PUBLIC if allowed else NetworkMode.NO_NETWORK

    def workdir(self) -> str | None:
        value = self._get("environment", "workdir", None)
        if not (value is None or (isinstance(value, str) and value.startswith("/"))):
            raise self.findings.fail(f"environment.workdir must be an absolute path, got {value!r}")
        return value

    def variables(self, table: str) -> dict[str, str]:
        found = self._get(table, "env", {})
        if not isinstance(found, Mapping) or not all(isinstance(value, str) for value in found.values()):
            raise self.findings.fail(f"{table}.env must be a table of texts, got {found!r}")
        return {name: self._resolve(f"{table}.env.{name}", value) for name, value in found.items()}

    def _resolve(self, name: str, value: str) -> str:
        template = _VARIABLE.fullmatch(value)
        if template is None:
            return value
        found = self.host.get(template[1], template[2])
        if found is None:
            raise self.findings.fail(f"{name} is {value!r}: set the environment variable {template[1]}")
        return found

    def _get(self, table: str, name: str, default: Any) -> Any:
        inner = self.table.get(table, {})
        if not isinstance(inner, Mapping):
            raise self.findings.fail(f"{table} must be a table, got {inner!r}")
        return inner.get(name, default)
