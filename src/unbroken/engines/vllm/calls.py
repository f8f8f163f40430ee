"""Calls of vLLM and its workers that return even if vLLM dies before they are answered; vLLM's errors become ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from vllm.exceptions import GenerationError, VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from unbroken.errors import EngineError, SamplingError

_T = TypeVar("_T")


class WorkerCalls:
    """Calls of one engine, in all of its processes."""

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
        """Call a method of `WorkerExtension` in every worker; returns each one's answer. Raises as `wait`.

        `AsyncLLM.collective_rpc` calls all data-parallel copies, but returns the answers of the first alone: a worker
        of another that failed would not be noticed.
        """
        of_copies = self._llm.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        answers: list[list[Any]] = await self.wait(of_copies)
        return [answer for of_copy in answers for answer in of_copy]


@contextmanager
def translate_errors(llm: AsyncLLM | None = None) -> Iterator[None]:
    """Raise our errors for vLLM's. While `llm` lives, a ValueError is about the request."""
    try:
        yield
    except EngineDeadError as error:
        raise EngineError("vLLM's engine is dead; its log has the reason. Start another") from error
    except (VLLMClientError, ValueError) as error:
        raise SamplingError(f"vLLM refuses the request: {error}") from error
    except (EngineGenerateError, GenerationError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, ValueError) and llm is not None and not llm.errored:
            raise SamplingError(f"vLLM refuses the request: {cause}") from error
        raise EngineError(f"vLLM failed on the request: {type(cause).__name__}: {cause}") from error
