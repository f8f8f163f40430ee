"""From hidden states to logprobs and entropies of picked ids, a chunk of logits at a time.

Shapes: N picked tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint


class Entropy(StrEnum):
    """Whether the entropy of the policy is computed at each picked token."""

    NONE = "none"
    MEASURED = "measured"
    """Without gradient, which the backward pass does not compute again."""
    RANKED = "ranked"
    """As MEASURED, and the rank of each id: for what people look at."""
    TRAINED = "trained"
    """With gradient."""


class TokenScores(NamedTuple):
    """The policy at the N picked tokens."""

    logprobs_N: torch.Tensor
    """float32, of the ids."""
    entropies_N: torch.Tensor | None
    """float32, in nats, over the whole vocabulary at the temperature of the logprobs; None unless asked for."""
    ranks_N: torch.Tensor | None = None
    """int64, 1 + the number of ids that are more likely; None unless asked for."""
    choices_2E: torch.Tensor | None = None
    """float32, of a mixture of experts: how often its layers chose each expert, and the sum of the probabilities that
    they gave it (`routing.count_choices`); None unless asked for.
    """

    def pick(self, places_N: torch.Tensor) -> TokenScores:
        """Those at these places, which may be there several times."""
        others = [None if values_N is None else values_N[places_N] for values_N in self[1:]]
        return TokenScores(self.logprobs_N[places_N], *others)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScaling:
    """The changes that an architecture makes to its logits after the output embeddings, by its config."""

    CONFIG_NAMES = ("final_logit_softcapping", "logit_scale", "logits_scaling")

    factor: float = 1.0
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap) (Gemma)."""

    @classmethod
    def from_config(cls, config: Any) -> LogitScaling:
        """Read a text config: Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`."""
        factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(factor=factor, softcap=getattr(config, "final_logit_softcapping", None))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale, then cap."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def pull_back(self, gradient: torch.Tensor, unscaled: torch.Tensor) -> torch.Tensor:
        """The gradient for `unscaled` logits, from that for `apply(unscaled)`."""
        if self.softcap is not None:
            gradient = gradient * (1 - torch.tanh(unscaled * (self.factor / self.softcap)).square())
        return gradient * self.factor if self.factor != 1.0 else gradient


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, unless it is more exact."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def chunked_scores(
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    temperature: float,
    chunk_size: int,
    entropy: Entropy = Entropy.NONE,
) -> TokenScores:
    """The logprob of each target under softmax(logits_of(hidden) / temperature) and that softmax's entropy, in float32.

    Values and gradients are those of one softmax over all N. For N = 0 the result is empty but still depends on the
    parameters, with gradients of zero.
    """
    pieces = zip(torch.split(hidden_ND, chunk_size), torch.split(targets_N, chunk_size), strict=True)
    scores = [
        checkpoint(_compute_chunk, h, t, logits_of, temperature, entropy, use_reentrant=False, preserve_rng_state=False)
        for h, t in pieces
    ]
    logprobs, entropies, ranks = zip(*scores, strict=True)
    return TokenScores(
        torch.cat(logprobs),
        None if entropy is Entropy.NONE else torch.cat(entropies),
        torch.cat(ranks) if entropy is Entropy.RANKED else None,
    )


@torch.no_grad()
def find_ranks(logprobs_NV: torch.Tensor, logprobs_N: torch.Tensor) -> torch.Tensor:
    """[N] the rank of ids with `logprobs_N`: 1 if none is more likely."""
    return 1 + (logprobs_NV > logprobs_N[:, None]).sum(-1)


def _compute_chunk(
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    temperature: float,
    entropy: Entropy,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Logprobs, entropies and ranks. Entropies come last: without gradient, checkpointing stops before them when it
    computes the chunk again.
    """
    logprobs_NV = torch.log_softmax(to_float32(logits_of(hidden_ND)) / temperature, dim=-1)
    logprobs_N = logprobs_NV.gather(-1, targets_N[:, None])[:, 0]
    match entropy:
        case Entropy.NONE:
            return logprobs_N, None, None
        case Entropy.MEASURED | Entropy.RANKED:
            with torch.no_grad():
                ranks_N = find_ranks(logprobs_NV, logprobs_N) if entropy is Entropy.RANKED else None
                probabilities_NV = logprobs_NV.exp()  # the only new tensor of this size
                return logprobs_N, torch.special.entr(probabilities_NV, out=probabilities_NV).sum(-1), ranks_N
        case Entropy.TRAINED:
            # An id that is impossible (logprob -inf) adds nothing, and has no gradient.
            finite_NV = logprobs_NV.clamp(min=torch.finfo(logprobs_NV.dtype).min)
            return logprobs_N, -(logprobs_NV.exp() * finite_NV).sum(-1), None
