"""Bounded thinking: reasoning that is open after N sampled ids of a turn is closed by given ids, and sampling goes on.

Worked example with N = 3, a prompt 1 2 where 2 opens reasoning, and 8 9 that close it:

    first request     prompt 1 2              max_tokens 3        samples 3 4 5, and the reasoning is open
    second request    prompt 1 2 3 4 5 8 9    what is left        samples 6 7
    the turn          completion_ids 3 4 5 8 9 6 7                8 9 have no logprob and no version (`SampledSequence`)

Two requests with one prefix are what any engine can do. Sampled ids are never taken back, also where the cut divides
the end of reasoning: a model that spelled `</thi` gets the whole end after it, and those letters stay reasoning. A turn
whose reasoning has ended, or never began, is not bounded: its second request continues it as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from unbroken.errors import InvalidInputError, InvariantError
from unbroken.rendering.base import ClosesReasoning, Renderer
from unbroken.rollout.seeds import derive_seed
from unbroken.types import FinishReason, SampledSequence, SampleRequest, SamplingParams, TokenIds, token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBound:
    """Closes the reasoning of turns after `num_ids` sampled ids."""

    num_ids: int
    end_ids: TokenIds
    """The ids that close it."""
    renderer: Renderer

    @staticmethod
    def of(num_ids: int, renderer: Renderer, params: SamplingParams, *, name: str) -> ThinkingBound:
        """The bound of turns of this renderer that are sampled so; `name` is the setting, for errors.

        Raises:
            InvalidInputError: the end of reasoning is not known, or two requests could not sample what one does.
        """
        # An engine looks for stop strings, counts ids and follows a format from the start of a completion on.
        by_text = ("stop_strings", "structured_output", "bad_words_ids")
        by_count = ("presence_penalty", "frequency_penalty", "min_tokens", "num_top_logprobs")
        for which in (*by_text, *by_count):
            if value := getattr(params, which):
                raise InvalidInputError(
                    f"{name} = {num_ids} cannot be combined with sampling.{which}, got {value!r}: a turn is sampled in "
                    "two parts, and the second knows nothing of it in the first"
                )
        if not isinstance(renderer, ClosesReasoning):
            raise InvalidInputError(f"{name} must be left out: {type(renderer).__name__} cannot close reasoning")
        try:
            return ThinkingBound(num_ids=num_ids, end_ids=renderer.get_reasoning_end(), renderer=renderer)
        except InvalidInputError as error:
            raise InvalidInputError(f"{name} must be left out, got {num_ids}: {error}") from None

    def limit(self, request: SampleRequest) -> SampleRequest:
        """The first request of a turn."""
        params = request.params
        return replace(request, params=replace(params, max_tokens=min(self.num_ids, params.max_tokens)))

    def plan_rest(
        self, request: SampleRequest, first: SampledSequence, *, context_length: int, index: int = 0
    ) -> tuple[TokenIds, SampleRequest] | None:
        """What follows the `first` part of completion `index`, which was sampled by `limit(request)`; None if nothing.

        It is ids to give, none of them if the turn is not in its reasoning, and the request for what comes after them.

        Nothing follows if the completion has ended, or if the context has no room for the end of its reasoning and one
        id more. Blocks: it reads the completion.
        """
        num_sampled, params = len(first.completion_ids), request.params
        is_cut = first.finish_reason is FinishReason.LENGTH and num_sampled >= self.num_ids
        if not is_cut or num_sampled >= params.max_tokens:
            return None
        given_ids = self._choose_given(request.prompt_ids, first.completion_ids)
        prompt_ids = np.concatenate([request.prompt_ids, first.completion_ids, given_ids])
        num_left = min(params.max_tokens - num_sampled, context_length - len(prompt_ids))
        if num_left < 1:
            return None
        later = replace(
            request,
            request_id=f"{request.request_id}+{index}",
            prompt_ids=prompt_ids,
            n=1,
            # The same seed would draw the same numbers again.
            params=replace(params, max_tokens=num_left, seed=derive_seed(params.seed, 1, index)),
        )
        return given_ids, later

    def _choose_given(self, prompt_ids: TokenIds, completion_ids: TokenIds) -> TokenIds:
        """The ids to give after the first part of a turn: none if it is not in its reasoning."""
        if self.renderer.parse_response(completion_ids, prompt_ids=prompt_ids).reasoning_complete:
            return token_ids([])
        closed = np.concatenate([completion_ids, self.end_ids])
        if not self.renderer.parse_response(closed, prompt_ids=prompt_ids).reasoning_complete:
            raise InvariantError(f"the ids {self.end_ids.tolist()} do not close the reasoning of a turn")
        return self.end_ids
