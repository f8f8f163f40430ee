"""What an engine is doing, for those who ask before they do something with it."""

from __future__ import annotations

from vllm.v1.engine.async_llm import AsyncLLM

from unbroken.engines.checks import check_awake
from unbroken.errors import EngineError


class State:
    """Of one engine. `Control` changes it, and `VllmEngine.close` the last time."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.policy_version = 0
        self.paused = False
        self.drowsy = False
        """Whether requests are refused because vLLM sleeps or is about to."""
        self.asleep = False
        self.failure: str | None = None
        """Why nothing is answered any more."""
        self.closed = False

    def check_awake(self) -> None:
        """Raise `EngineError` unless requests may come."""
        self.check_open()
        check_awake(self.drowsy)

    def check_open(self) -> None:
        """Raise `EngineError` if the engine is closed, has failed or is dead."""
        if self.closed:
            raise EngineError("the engine is closed")
        self.check_not_failed()
        if self._llm.errored:
            raise EngineError("vLLM's engine is dead; its log has the reason. Start another")

    def check_not_failed(self) -> None:
        """Raise `EngineError` if an update or a sleep has failed."""
        if self.failure is not None:
            raise EngineError(self.failure)
