"""Names of policies that a gateway's upstreams have: they are asked what a name means, and get it with each request."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from unbroken.engines.http import HttpEngine
from unbroken.errors import UnknownPolicyError
from unbroken.images.lru_cache import LruCache
from unbroken.server.http.errors import HttpError
from unbroken.server.policies import CHECKPOINT, Policy, split_version

_MAX_KNOWN = 2**12
_MAX_NAME = 1000
"""Characters of a name that an upstream is asked for."""


class UpstreamPolicies:
    """A `PolicySource`. What a name means, once it means something, stays: the upstream refuses what it has no more."""

    def __init__(self, engine: HttpEngine, model_name: str) -> None:
        """`model_name` is what the gateway calls the served model, which may have another name at its upstream."""
        self._engine, self._model_name = engine, model_name
        self._known: LruCache[str, Policy] = LruCache(_MAX_KNOWN)

    async def find(self, request: Request, name: str) -> Policy | None:
        """The policy of a name; `UnknownPolicyError` with the upstream's list for one that claims to be a policy."""
        if (known := self._known.get(name)) is not None or len(name) > _MAX_NAME:
            return known
        _, version = split_version(name)
        try:
            entry = await self._engine.find_model(name)
        except UnknownPolicyError:
            if version is not None or name.startswith(CHECKPOINT):
                raise
            return None
        if "policy" not in entry:  # the upstream takes any name, and this one is not a policy's
            return None
        number = int(version) if version is not None and version != "latest" else None
        is_served = entry.get("parent") is None
        found = Policy(
            name=self._model_name if is_served else entry["policy"], adapter=None if is_served else name, version=number
        )
        self._known.put(name, found)
        return found

    async def find_version(self, request: Request, policy: Policy) -> int:
        """The version that the upstream would answer with."""
        name = policy.adapter or self._engine.model_name
        entry = await self._engine.find_model(name)
        if "policy_version" not in entry:
            rule = "the upstream does not say its version before it samples"
            raise HttpError(400, f"{rule}: name one, such as {policy.name}@3, or leave follow true", param="follow")
        return int(entry["policy_version"])

    async def list_names(self, request: Request) -> Sequence[str]:
        """None: an upstream lists them when it refuses a name."""
        return ()
