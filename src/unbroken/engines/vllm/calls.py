"""Calls of vLLM and its workers that return even if vLLM dies meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from unbroken.engines.vllm.failures import translate_errors
from unbroken.errors import EngineError, SamplingError

_T = TypeVar("_T")


class Calls:
    """Calls of one engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def wait(self, call: Awaitable[_T]) -> _T:
        """Wait for a call of vLLM while vLLM lives; `EngineError` if it fails, or is dead and would never answer."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, self._llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
            with translate_errors():
                if not task.done():
                    raise EngineDeadError
                return task.result()
        except SamplingError as error:  # a refusal here is not about a request
            raise EngineError(str(error)) from error
        finally:
            task.cancel()

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` in every worker; returns each one's answer. Raises as `wait`."""
        answers: list[Any] = await self.wait(self._llm.collective_rpc(method, args=args))
        return answers
