"""I1 within conversations: a prompt must begin with the prompt and a completion of the request before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unbroken.errors import InvariantError
from unbroken.types import FinishReason, SampledSequence, SampleRequest, TokenIds


class Histories:
    """The ids of each conversation so far, by the part of the request ids before the last slash."""

    def __init__(self, *, allow_forks: bool) -> None:
        self.forks: list[str] = []
        """The request ids whose prompts left their conversation's history."""
        self._allow_forks = allow_forks
        self._histories: dict[str, list[TokenIds]] = {}

    def check(self, request: SampleRequest) -> None:
        """Raise `InvariantError` for a prompt that leaves its conversation's history, or list it in `forks`."""
        conversation, slash, _ = request.request_id.rpartition("/")
        if not slash or conversation not in self._histories:
            return
        histories = self._histories[conversation]
        if any(np.array_equal(request.prompt_ids[: len(history)], history) for history in histories):
            return
        if not self._allow_forks:
            raise InvariantError(
                f"I1: the prompt of {request.request_id!r} ({len(request.prompt_ids)} ids) does not begin with the "
                f"prompt and completion before it ({len(histories[0])} ids): extend them, or build the engine with "
                "allow_forks=True if the fork is meant"
            )
        self.forks.append(request.request_id)

    def add(self, request: SampleRequest, sequences: Sequence[SampledSequence]) -> None:
        """Keep the prefixes that the conversation's next prompt may have; aborted completions are left out."""
        conversation, slash, _ = request.request_id.rpartition("/")
        finished = [s for s in sequences if s.finish_reason is not FinishReason.ABORT]
        if slash and finished:
            self._histories[conversation] = [
                np.concatenate([request.prompt_ids, sequence.completion_ids]) for sequence in finished
            ]
