"""What the name of a model means: one rule for the dialects of all doors.

    tiny, tiny@latest                   the served model, with its newest weights
    tiny@7                              exactly its version 7
    pirate, pirate@7                    an adapter of the engine
    tinker://RUN/sampler_weights/NAME   a checkpoint, by the server's `PolicySource`
    tinker://RUN@7, tinker://RUN@latest its run's checkpoint of this version, its newest one
    gpt-5                               in a session a habit of its agent's, which means the session's policy

All but the last claim to be a policy: they are answered by these weights, or by an error that lists what there is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from starlette.requests import Request

from unbroken.engines.base import Engine
from unbroken.errors import UnknownPolicyError
from unbroken.images.lru_cache import LruCache
from unbroken.server.config import ServerConfig
from unbroken.server.http.errors import HttpError, shorten
from unbroken.server.http.guard import ANY_MODEL

CHECKPOINT = "tinker://"
"""How the names of checkpoints begin."""
_VERSIONED = re.compile(r"(.+)@(latest|[0-9]{1,9})", re.DOTALL)
_MAX_HABITS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The weights that a name means."""

    name: str
    """Of the served model, an adapter, a checkpoint or a run, without a version."""
    adapter: str | None = None
    """What the engine is asked for; None for the served model."""
    version: int | None = None
    """The only version that may answer; None for the one in use."""


class PolicySource(Protocol):
    """Policies that the server's own engine does not know: checkpoints, or those of an upstream."""

    async def find(self, request: Request, name: str) -> Policy | None:
        """The policy of a name, which may have a version; None if there is none, or an error that lists them."""
        ...

    async def find_version(self, request: Request, policy: Policy) -> int:
        """The version that would answer now."""
        ...

    async def list_names(self, request: Request) -> Sequence[str]:
        """Some names of such policies, the newest first."""
        ...


@runtime_checkable
class _NamesAdapters(Protocol):
    """An engine that has adapters by name: those that it loads, or those of several policies, which updates bring."""

    @property
    def adapters(self) -> Collection[str]: ...


class Policies:
    """Resolves the names of models for one server."""

    def __init__(self, engine: Engine, config: ServerConfig, source: PolicySource | None = None) -> None:
        self._engine, self._config, self._source = engine, config, source
        # Python looks through all methods of the protocol to see whether an object has them.
        self._adapter_engine = engine if isinstance(engine, _NamesAdapters) else None
        self._habits: LruCache[tuple[str, str], bool] = LruCache(_MAX_HABITS)
        """Names by the session whose habits they are."""

    @property
    def served(self) -> Policy:
        """The served model."""
        return Policy(name=self._config.model_name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the engine's LoRA adapters."""
        return self._config.adapters if self._adapter_engine is None else tuple(self._adapter_engine.adapters)

    async def find(self, request: Request, name: str | None) -> Policy | None:
        """The policy that a name claims to be; None without a name, and for a habit where the asker may have some.

        What a habit of a session is stays one: an adapter that is loaded later under this name answers other sessions.

        Raises:
            HttpError: the name claims to be a policy that there is not, or habits are not taken here.
        """
        if name is None:
            return None
        session = request.scope.get(ANY_MODEL, "")
        if session and self._habits.get((session, name)):
            return None
        if (policy := await self._look_up(request, name)) is not None:
            return policy
        is_taken = session or self._config.any_model_name
        if not is_taken or name.startswith(CHECKPOINT) or _VERSIONED.fullmatch(name):
            raise await self._unknown(request, name)
        if session:
            self._habits.put((session, name), value=True)
        return None

    async def get(self, request: Request, name: str | None) -> Policy:
        """The policy of a name, without one the served model; `HttpError` for a name of none."""
        if name is None:
            return self.served
        if (policy := await self._look_up(request, name)) is None:
            raise await self._unknown(request, name)
        return policy

    async def pin(self, request: Request, policy: Policy) -> str:
        """The name of a policy at the version that would answer now."""
        version = await self.find_version(request, policy)
        is_exact = policy.name.startswith(CHECKPOINT) and "/" in policy.name.removeprefix(CHECKPOINT)
        return policy.name if is_exact else f"{policy.name}@{version}"

    async def find_version(self, request: Request, policy: Policy) -> int:
        """The version that would answer now."""
        if policy.version is not None:
            return policy.version
        if self._source is not None:
            return await self._source.find_version(request, policy)
        return self._engine.policy_version

    async def _look_up(self, request: Request, name: str) -> Policy | None:
        if (own := self._look_up_own(name)) is not None:
            return own
        base, version = split_version(name)
        if version is not None and (own := self._look_up_own(base)) is not None:
            policy = replace(own, version=None if version == "latest" else int(version))
            if policy.version is not None and self._source is None and policy.version != self._engine.policy_version:
                raise await self._unknown(request, name)
            return policy
        return None if self._source is None else await self._source.find(request, name)

    def _look_up_own(self, name: str) -> Policy | None:
        if name == self._config.model_name:
            return self.served
        return Policy(name=name, adapter=name) if name in self.adapters else None

    async def _unknown(self, request: Request, name: str) -> HttpError:
        names = [self._config.model_name, *self.adapters]
        if self._source is None:
            names.insert(1, f"{names[0]}@{self._engine.policy_version}")
        else:
            names += await self._source.list_names(request)
        return HttpError(404, str(UnknownPolicyError.of(shorten(name), names)), param="model", code="model_not_found")


def split_version(name: str) -> tuple[str, str | None]:
    """A name without its version, and the version: a number, "latest", or None."""
    versioned = _VERSIONED.fullmatch(name)
    return (name, None) if versioned is None else (versioned[1], versioned[2])
