"""The policy as a LoRA adapter: one adapter for each version that requests use.

    version    3: two requests in flight    4: in use, five requests    5: arrives, and is in use from then on
    a request begins with the adapter in use and ends with it; version 3 is dropped when its two requests have ended

vLLM's prefix cache knows KV by the adapter's name (`kv_cache_utils._gen_lora_extra_hash_keys`), and each version has
its own: KV of an older version is never found (I6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from unbroken.engines.vllm.delivery import Delivery
from unbroken.engines.vllm.startup import MIN_POLICY_ADAPTERS, POLICY_ADAPTER
from unbroken.errors import EngineError, SamplingError
from unbroken.weights.adapters import AdaptedWeight

_FIRST_NUMBER = 2**20
"""Numbers of other adapters are lower."""
_POLL_S = 0.005
_HEADS = frozenset({"lm_head", "embed_tokens"})
"""vLLM adds adapters of the head to the logits of sampled ids only, not to those of scores."""


@dataclass(slots=True, kw_only=True)
class _PolicyAdapter:
    """The adapter of one version."""

    policy_version: int
    lora: LoRARequest
    num_requests: int = 0
    """Requests in flight that use it."""


class PolicyAdapters:
    """The policy's adapters in vLLM, the newest of which is in use."""

    def __init__(self, llm: AsyncLLM, rpc: Callable[..., Awaitable[list[Any]]]) -> None:
        self._llm = llm
        self._rpc = rpc
        self._kept: list[_PolicyAdapter] = []
        """By version; the last one is in use."""
        self._num_loaded = 0
        self._modules: Collection[str] | None = None
        self._dropping: set[asyncio.Task[None]] = set()

    @property
    def in_use(self) -> _PolicyAdapter | None:
        """The adapter of the policy; None while it is the model alone."""
        return self._kept[-1] if self._kept else None

    @contextmanager
    def use(self) -> Iterator[_PolicyAdapter | None]:
        """The adapter in use, which is kept until the block ends."""
        adapter = self.in_use
        if adapter is None:
            yield None
            return
        adapter.num_requests += 1
        try:
            yield adapter
        finally:
            adapter.num_requests -= 1
            self._drop_unused()

    async def check(self, adapted: Sequence[AdaptedWeight], *, num_others: int) -> None:
        """Check an adapter before anything is received.

        Raises:
            SamplingError: vLLM was started without LoRA, or for fewer or lower adapters; a module takes no adapters.
        """
        config = self._llm.vllm_config.lora_config
        if config is None:
            raise SamplingError("an adapter needs vLLM with --enable-lora, got one without: publish merged weights")
        highest = max(adapted, key=lambda one: one.rank)
        if highest.rank > config.max_lora_rank:
            raise SamplingError(
                f"the adapter's rank must be at most {config.max_lora_rank} (--max-lora-rank), got {highest.rank} for "
                f"{highest.given!r}"
            )
        if (room := self._max_kept(num_others)) < MIN_POLICY_ADAPTERS:
            raise SamplingError(
                f"vLLM must have room for {MIN_POLICY_ADAPTERS} versions of the policy's adapter, got {max(room, 0)} "
                f"beside {num_others} other adapters: start it with a higher --max-loras"
            )
        if self._modules is None:
            self._modules = frozenset((await self._rpc("lora_modules"))[0]) - _HEADS
        for one in adapted:
            module = one.name.removesuffix(".weight")
            if module.rpartition(".")[2] not in self._modules:
                raise SamplingError(
                    f"module {module!r} takes no adapter in this engine, only {sorted(self._modules)} do: publish "
                    "merged weights"
                )

    def check_room(self, *, num_others: int) -> None:
        """Raise `SamplingError` if a version would have to be dropped first, for an engine that makes no steps."""
        if not self._has_room(num_others):
            raise SamplingError(
                f"requests of policy versions {[one.policy_version for one in self._kept]} are in flight, and there is "
                "no room for one more adapter while the engine is paused: resume it first, or start it with a higher "
                "--max-loras"
            )

    async def make_room(self, *, num_others: int) -> None:
        """Wait until a version can be dropped, if as many are kept as there is room for."""
        while not self._has_room(num_others):  # a request ends in its own task
            if self._llm.errored:
                raise EngineError("vLLM's engine is dead; its log has the reason. Start another")
            await asyncio.sleep(_POLL_S)

    async def load(self, delivery: Delivery, policy_version: int) -> None:
        """Load an adapter that all workers have received, and use it from now on; `WeightsError` if it cannot be."""
        self._num_loaded += 1
        number = _FIRST_NUMBER + self._num_loaded
        await delivery.load_adapter(self._rpc, number)
        lora = LoRARequest(
            f"{POLICY_ADAPTER}{policy_version}", number, f"version {policy_version}, which came by an update"
        )
        self._kept.append(_PolicyAdapter(policy_version=policy_version, lora=lora))
        self._drop_unused()

    def _has_room(self, num_others: int) -> bool:
        return len(self._kept) < self._max_kept(num_others)

    def _max_kept(self, num_others: int) -> int:
        config = self._llm.vllm_config.lora_config
        if current_platform.is_cpu():  # the last slot stays empty (`startup.require_exactness`)
            return int(config.max_loras) - 1 - num_others
        return int(config.max_cpu_loras or config.max_loras) - num_others

    def _drop_unused(self) -> None:
        """Begin to drop all versions before the one in use that no request uses."""
        for adapter in [one for one in self._kept[:-1] if not one.num_requests]:
            adapter.num_requests = 1  # not twice
            task = asyncio.ensure_future(self._drop(adapter))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop(self, adapter: _PolicyAdapter) -> None:
        with suppress(EngineError):  # closed or failed
            await self._rpc("drop_adapter", adapter.lora.lora_int_id)
        self._kept.remove(adapter)
