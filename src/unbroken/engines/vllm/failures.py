"""Translates vLLM's errors: a refusal becomes a `SamplingError`, a failure an `EngineError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.exceptions import GenerationError, VLLMClientError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from unbroken.errors import EngineError, SamplingError


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
