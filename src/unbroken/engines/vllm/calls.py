"""Calls of vLLM itself and of its workers, which return although it may end meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from unbroken.engines.vllm.failures import translated
from unbroken.errors import EngineError, SamplingError

_T = TypeVar("_T")


class Calls:
    """Calls of one engine."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def done(self, call: Awaitable[_T]) -> _T:
        """Wait for vLLM, but no longer than it lives: what is asked of a dead engine is never answered.

        Raises:
            EngineError: it is dead, or failed.
        """
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, self._llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
            with translated():
                if not task.done():
                    raise EngineDeadError
                return task.result()
        except SamplingError as error:  # what it refuses here was not a request's
            raise EngineError(str(error)) from error
        finally:
            task.cancel()

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` in every worker; what each returned. Raises as `done`."""
        answers: list[Any] = await self.done(self._llm.collective_rpc(method, args=args))
        return answers
