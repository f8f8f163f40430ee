"""The policy as a LoRA adapter, or several policies as one each: the adapters of each version that requests use.

    version    3: two requests in flight    4: in use, five requests    5: arrives, and is in use from then on
    a request begins with the version in use and ends with it; version 3 is dropped when its two requests have ended

    adapters of version 5, of several policies    solver    critic    solver@4    critic@4 (frozen copies)

vLLM's prefix cache knows KV by the adapter's name (`kv_cache_utils._gen_lora_extra_hash_keys`), and each policy of each
version has its own: KV of another policy or of an older version is never found (I6). Requests that name none of several
policies have the model itself, whose KV is the same in all versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from unbroken.engines.base import AdapterRoom
from unbroken.engines.vllm.delivery import Delivery
from unbroken.engines.vllm.startup import MIN_POLICY_ADAPTERS, POLICY_ADAPTER
from unbroken.errors import EngineError, InvalidInputError, SamplingError
from unbroken.weights.adapters import AdaptedWeight

_FIRST_NUMBER = 2**20
"""Numbers of other adapters are lower."""
_POLL_S = 0.005
_HEADS = frozenset({"lm_head", "embed_tokens"})
"""vLLM adds adapters of the head to the logits of sampled ids only, not to those of scores."""


@dataclass(slots=True, kw_only=True)
class _Version:
    """The adapters of one version."""

    policy_version: int
    loras: Mapping[str, LoRARequest]
    """By the name of the policy, which is empty for one without a name."""
    num_requests: int = 0
    """Requests in flight that use them."""

    def find(self, name: str | None) -> LoRARequest | None:
        """The adapter of a policy; without a name the only one, or None of several: the model itself."""
        return self.loras.get(name or "")


class PolicyAdapters:
    """The versions of the policy's adapters in vLLM, or of several policies, the newest of which is in use."""

    def __init__(self, llm: AsyncLLM, rpc: Callable[..., Awaitable[list[Any]]]) -> None:
        self._llm = llm
        self._rpc = rpc
        self._kept: list[_Version] = []
        """By version; the last one is in use."""
        self._num_loaded = 0
        self._modules: Collection[str] | None = None
        self._dropping: set[asyncio.Task[None]] = set()

    @property
    def in_use(self) -> _Version | None:
        """The newest version; None while the policy is the model alone."""
        return self._kept[-1] if self._kept else None

    @property
    def names(self) -> list[str]:
        """Of several policies those of the version in use."""
        return [] if self.in_use is None else [name for name in self.in_use.loras if name]

    @contextmanager
    def use(self) -> Iterator[_Version | None]:
        """The version in use, which is kept until the block ends."""
        version = self.in_use
        if version is None:
            yield None
            return
        version.num_requests += 1
        try:
            yield version
        finally:
            version.num_requests -= 1
            self._drop_unused()

    def get_room(self, num_others: int) -> AdapterRoom:
        """The room for one version beside the one before it, and beside so many other adapters."""
        config = self._llm.vllm_config.lora_config
        if config is None:
            how = "vLLM was started without --enable-lora"
            return AdapterRoom(max_adapters=0, max_rank=0, how=how, how_rank=how)
        return AdapterRoom(
            max_adapters=max(self._max_kept(num_others), 0) // MIN_POLICY_ADAPTERS,
            max_rank=config.max_lora_rank,
            how=_describe_room(config, num_others, is_cpu=current_platform.is_cpu()),
            how_rank=f"vLLM's --max-lora-rank is {config.max_lora_rank}",
        )

    async def check(
        self, adapted: Mapping[str, Sequence[AdaptedWeight]], *, others: Collection[str], num_others: int
    ) -> None:
        """Check the adapters of a version, by the names of their policies, before any of them is loaded.

        `others` are the names of adapters that are no policy's, and `num_others` how many there were so far.

        Raises:
            SamplingError: vLLM was started without LoRA, or for fewer or lower adapters; a module takes no adapters; or
                a policy has the name of another adapter.
        """
        config = self._llm.vllm_config.lora_config
        if config is None:
            raise SamplingError("an adapter needs vLLM with --enable-lora, got one without: publish merged weights")
        if taken := sorted(set(adapted) & set(others)):
            raise SamplingError(f"a policy must not have the name of another adapter of the engine, got {taken}")
        weights = [one for each in adapted.values() for one in each]
        highest = max(weights, key=lambda one: one.rank)
        if highest.rank > config.max_lora_rank:
            raise SamplingError(
                f"the adapter's rank must be at most {config.max_lora_rank} (--max-lora-rank), got {highest.rank} for "
                f"{highest.given!r}"
            )
        self._check_capacity(list(adapted), num_others)
        if self._modules is None:
            self._modules = frozenset((await self._rpc("lora_modules"))[0]) - _HEADS
        for one in weights:
            module = one.name.removesuffix(".weight")
            if module.rpartition(".")[2] not in self._modules:
                raise SamplingError(
                    f"module {module!r} takes no adapter in this engine, only {sorted(self._modules)} do: publish "
                    "merged weights"
                )

    def _check_capacity(self, policies: Sequence[str], num_others: int) -> None:
        """Raise `SamplingError` if there is no room for the version in use and the next one."""
        if (room := self._max_kept(num_others)) < MIN_POLICY_ADAPTERS * len(policies):
            names = "the policy's adapter" if "" in policies else f"the adapters of {policies}"
            raise SamplingError(
                f"vLLM must have room for {MIN_POLICY_ADAPTERS} versions of {names}, got {max(room, 0)} beside "
                f"{num_others} other adapters: start it with a higher --max-loras"
            )

    def check_room_beside(self, num_others: int) -> None:
        """Raise `InvalidInputError` if so many other adapters would take the room of those that the policies need.

        On a CPU another one would get the last slot, which vLLM applies to requests without an adapter.
        """
        newest = 0 if self.in_use is None else len(self.in_use.loras)
        needed = max(MIN_POLICY_ADAPTERS * newest, sum(len(one.loras) for one in self._kept))
        if needed and (room := self._max_kept(num_others)) < needed:
            raise InvalidInputError(
                f"vLLM must have room for {needed} adapters of policies, got {max(room, 0)} beside {num_others} other "
                "adapters: start it with a higher --max-loras"
            )

    def check_room(self, num_new: int, *, num_others: int) -> None:
        """Raise `SamplingError` if a version would have to be dropped first, for an engine that makes no steps."""
        if not self._has_room(num_new, num_others):
            more = "one more adapter" if num_new == 1 else f"{num_new} more adapters"
            raise SamplingError(
                f"requests of policy versions {[one.policy_version for one in self._kept]} are in flight, and there is "
                f"no room for {more} while the engine is paused: resume it first, or start it with a higher --max-loras"
            )

    async def make_room(self, num_new: int, *, num_others: int) -> None:
        """Wait until as many versions are dropped that so many adapters have room."""
        while not self._has_room(num_new, num_others):  # a request ends in its own task
            if self._llm.errored:
                raise EngineError("vLLM's engine is dead; its log has the reason. Start another")
            await asyncio.sleep(_POLL_S)

    async def load(self, delivery: Delivery, policy_version: int) -> None:
        """Load adapters that all workers have received, and use them from now on; `WeightsError` if one cannot be."""
        numbers = {name: _FIRST_NUMBER + self._num_loaded + k for k, name in enumerate(delivery.adapted, start=1)}
        self._num_loaded += len(numbers)  # a number is never given twice, also of one that was not loaded
        await delivery.load_adapters(self._rpc, numbers)
        path = f"version {policy_version}, which came by an update"
        loras = {
            name: LoRARequest(f"{POLICY_ADAPTER}{policy_version}" + (name and f" of {name}"), number, path)
            for name, number in numbers.items()
        }
        self._kept.append(_Version(policy_version=policy_version, loras=loras))
        self._drop_unused()

    def _has_room(self, num_new: int, num_others: int) -> bool:
        return sum(len(one.loras) for one in self._kept) + num_new <= self._max_kept(num_others)

    def _max_kept(self, num_others: int) -> int:
        config = self._llm.vllm_config.lora_config
        if current_platform.is_cpu():  # the last slot stays empty (`startup.require_exactness`)
            return int(config.max_loras) - 1 - num_others
        return int(config.max_cpu_loras or config.max_loras) - num_others

    def _drop_unused(self) -> None:
        """Begin to drop all versions before the one in use that no request uses."""
        for version in [one for one in self._kept[:-1] if not one.num_requests]:
            version.num_requests = 1  # not twice
            task = asyncio.ensure_future(self._drop(version))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop(self, version: _Version) -> None:
        with suppress(EngineError):  # closed or failed
            await self._rpc("drop_adapters", [lora.lora_int_id for lora in version.loras.values()])
        self._kept.remove(version)


def _describe_room(config: Any, num_others: int, *, is_cpu: bool) -> str:
    """What the options for LoRA have room for, and what more would take (`PolicyAdapters._max_kept`)."""
    rule = "2 N + 1 on a CPU" if is_cpu else f"N, or a --max-cpu-loras of 2 N (it is {config.max_cpu_loras})"
    beside = f", and room for {num_others} other{'s' * (num_others > 1)}" if num_others else ""
    return f"vLLM's --max-loras is {config.max_loras}, and N adapters need {rule}{beside}"
