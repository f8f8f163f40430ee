"""From hidden states to logprobs and entropies of picked ids, a chunk of logits at a time.

Shapes: N picked tokens, D hidden size, V vocabulary, K kept ids of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from unbroken.decoder_config import DecoderConfig
from unbroken.logit_edits import LogitEdits
from unbroken.types import KeptIds

_IMPOSSIBLE = -1e4
"""A logprob whose probability is 0, in float64 too; what a loss multiplies it with is finite, and then 0."""


class Entropy(StrEnum):
    """Whether the entropy of the policy is computed at each picked token."""

    NONE = "none"
    MEASURED = "measured"
    """Without gradient, which the backward pass does not compute again."""
    RANKED = "ranked"
    """As MEASURED, and the rank of each id: for what people look at."""
    TRAINED = "trained"
    """With gradient."""


class Targets(NamedTuple):
    """Ids to score at the N picked tokens in place of the rows' own; logprobs have their shape."""

    ids_N: torch.Tensor
    """int64 [N], or [N, K] for K ids at each."""
    trained_N: torch.Tensor
    """bool [N], where the loss depends on the logprobs: the others have no gradient, which is most of their cost."""
    is_beside: bool = False
    """Whether they are [N, K] and scored beside the rows' own ids instead, all of them with gradient."""


class TokenScores(NamedTuple):
    """The policy at the N picked tokens."""

    logprobs_N: torch.Tensor
    """float32, of the ids; [N, K] with that many `Targets`."""
    entropies_N: torch.Tensor | None
    """float32, in nats, of the distribution of the logprobs; None unless asked for."""
    ranks_N: torch.Tensor | None = None
    """int64, 1 + the number of ids that are more likely; None unless asked for."""
    choices_2E: torch.Tensor | None = None
    """float32, of a mixture of experts: how often its layers chose each expert, and the sum of the probabilities that
    they gave it (`routing.count_choices`); None unless asked for.
    """
    full_entropies_N: torch.Tensor | None = None
    """float32, without gradient: `entropies_N` of the model's own distribution over the whole vocabulary, where that of
    `KeptTokens` is another; None where they would be the same.
    """
    beside_N: torch.Tensor | None = None
    """float32 [N, K], the logprobs of `Targets` beside the rows' own ids, or of the most likely ids; None without."""
    top_ids_N: torch.Tensor | None = None
    """int64 [N, K], the most likely ids; None unless asked for."""

    def pick(self, places_N: torch.Tensor) -> TokenScores:
        """Those at these places, which may be there several times."""
        others = [None if values_N is None else values_N[places_N] for values_N in self[1:]]
        return TokenScores(self.logprobs_N[places_N], *others)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScaling:
    """The changes that an architecture makes to its logits after the output embeddings, by its config."""

    CONFIG_NAMES = ("final_logit_softcapping", "logit_scale", "logits_scaling")

    factor: float = 1.0
    divisor: float = 1.0
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap) (Gemma)."""

    @classmethod
    def from_config(cls, config: DecoderConfig) -> LogitScaling:
        """Read a config: Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`."""
        return cls(
            factor=config.get("logit_scale") or 1.0,
            divisor=config.get("logits_scaling") or 1.0,
            softcap=config.get("final_logit_softcapping"),
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale, then cap."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def pull_back(self, gradient: torch.Tensor, unscaled: torch.Tensor) -> torch.Tensor:
        """The gradient for `unscaled` logits, from that for `apply(unscaled)`."""
        factor = self.factor / self.divisor
        if self.softcap is not None:
            gradient = gradient * (1 - torch.tanh(unscaled * (factor / self.softcap)).square())
        return gradient * factor if factor != 1.0 else gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """What the sampler did to logits at N picked tokens: it changed them (`LogitEdits`), and kept some ids.

    Logits are changed before the temperature divides them, and those of ids that were not kept become -inf before the
    softmax. So logprobs, entropies, ranks and gradients are those of the distribution that was sampled from, whatever
    else makes them.
    """

    offsets: NDArray[np.int64]
    """[N + 1] in `ids_K`; stays on the CPU, where chunks are cut."""
    tokens_K: torch.Tensor
    """int64, the token that each of the ids is kept at."""
    ids_K: torch.Tensor
    """int64."""
    is_cut_N: torch.Tensor
    """bool, false where the whole vocabulary was kept."""
    edits: LogitEdits | None = None

    @classmethod
    def of(cls, kept: KeptIds, device: torch.device, *, edits: LogitEdits | None = None) -> KeptTokens:
        """Those of N positions."""
        sizes = kept.sizes
        return cls(
            edits=edits,
            offsets=kept.offsets,
            tokens_K=torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(device),
            ids_K=torch.from_numpy(kept.token_ids.astype(np.int64)).to(device),
            is_cut_N=torch.from_numpy(sizes > 0).to(device),
        )

    def split(self, size: int) -> list[KeptTokens]:
        """Those of `size` tokens at a time; one part without tokens if there are none."""
        num_tokens = len(self.offsets) - 1
        parts = []
        for start in range(0, max(num_tokens, 1), size):
            stop = min(start + size, num_tokens)
            first, last = int(self.offsets[start]), int(self.offsets[stop])
            parts.append(
                KeptTokens(
                    offsets=self.offsets[start : stop + 1] - first,
                    tokens_K=self.tokens_K[first:last] - start,
                    ids_K=self.ids_K[first:last],
                    is_cut_N=self.is_cut_N[start:stop],
                    edits=None if self.edits is None else self.edits.pick(np.arange(start, stop)),
                )
            )
        return parts

    def pick(self, chosen_N: torch.Tensor) -> KeptTokens:
        """Those of the tokens where a mask is true."""
        chosen = chosen_N.cpu().numpy()
        sizes = np.diff(self.offsets)[chosen]
        chosen_K = chosen_N[self.tokens_K]
        numbers_N = chosen_N.cumsum(0) - 1
        return KeptTokens(
            offsets=np.concatenate([[0], np.cumsum(sizes)]),
            tokens_K=numbers_N[self.tokens_K[chosen_K]],
            ids_K=self.ids_K[chosen_K],
            is_cut_N=self.is_cut_N[chosen_N],
            edits=None if self.edits is None else self.edits.pick(chosen),
        )

    def edit(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Change logits, before the temperature."""
        return logits_NV if self.edits is None else self.edits.apply(logits_NV)

    def pull_back(self, gradient_NV: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor:
        """The gradient for `logits_NV`, from that for `edit(logits_NV)`."""
        return gradient_NV if self.edits is None else self.edits.pull_back(gradient_NV, logits_NV)

    def cut_(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Set the logits of all ids that were not kept to -inf, in place."""
        if not len(self.ids_K):
            return logits_NV
        cut_NV = self.is_cut_N[:, None].repeat(1, logits_NV.shape[1])
        cut_NV[self.tokens_K, self.ids_K] = False
        return logits_NV.masked_fill_(cut_NV, float("-inf"))


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
    kept: KeptTokens | None = None,
) -> TokenScores:
    """The logprob of each target under softmax(logits_of(hidden) / temperature) and that softmax's entropy, in float32;
    over the ids that were `kept`, if any were cut.

    Values and gradients are those of one softmax over all N. For N = 0 the result is empty but still depends on the
    parameters, with gradients of zero. Targets [N, K] have logprobs [N, K]; entropies and ranks are of targets [N].
    """
    pieces = zip(
        torch.split(hidden_ND, chunk_size),
        torch.split(targets_N, chunk_size),
        _split_kept(kept, len(targets_N), chunk_size),
        strict=True,
    )
    how = logits_of, temperature, entropy
    scores = [
        checkpoint(_compute_chunk, h, t, k, *how, use_reentrant=False, preserve_rng_state=False) for h, t, k in pieces
    ]
    logprobs, entropies, ranks, full = zip(*scores, strict=True)
    return TokenScores(
        torch.cat(logprobs),
        None if entropy is Entropy.NONE else torch.cat(entropies),
        torch.cat(ranks) if entropy is Entropy.RANKED else None,
        full_entropies_N=None if entropy is Entropy.NONE or kept is None else torch.cat(full),
    )


def _split_kept(kept: KeptTokens | None, num_tokens: int, size: int) -> Sequence[KeptTokens | None]:
    """A part for each chunk."""
    return [None] * max(-(-num_tokens // size), 1) if kept is None else kept.split(size)


def _pick(logprobs_NV: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The logprobs of targets [N] or [N, K], in their shape."""
    return logprobs_NV.gather(-1, targets if targets.dim() == 2 else targets[:, None]).reshape(targets.shape)


@torch.no_grad()
def _find_ranks(logprobs_NV: torch.Tensor, logprobs_N: torch.Tensor) -> torch.Tensor:
    """[N] the rank of ids with `logprobs_N`: 1 if none is more likely."""
    return 1 + (logprobs_NV > logprobs_N[:, None]).sum(-1)


def _compute_chunk(
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    kept: KeptTokens | None,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    temperature: float,
    entropy: Entropy,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Logprobs, entropies, ranks and full entropies. Entropies come last: without gradient, checkpointing stops before
    them when it computes the chunk again.
    """
    logits_NV = to_float32(logits_of(hidden_ND))
    full_N = None if kept is None or entropy is Entropy.NONE else _full_entropy(logits_NV / temperature)
    logits_NV = (logits_NV if kept is None else kept.edit(logits_NV)) / temperature
    logprobs_NV = torch.log_softmax(logits_NV if kept is None else kept.cut_(logits_NV), dim=-1)
    logprobs_N = _pick(logprobs_NV, targets_N)
    match entropy:
        case Entropy.NONE:
            return logprobs_N, None, None, full_N
        case Entropy.MEASURED | Entropy.RANKED:
            with torch.no_grad():
                ranks_N = _find_ranks(logprobs_NV, logprobs_N) if entropy is Entropy.RANKED else None
                probabilities_NV = logprobs_NV.exp()  # the only new tensor of this size
                entropies_N = torch.special.entr(probabilities_NV, out=probabilities_NV).sum(-1)
                return logprobs_N, entropies_N, ranks_N, full_N
        case Entropy.TRAINED:
            # An id that is impossible (logprob -inf) adds nothing, and has no gradient.
            finite_NV = logprobs_NV.clamp(min=_IMPOSSIBLE)
            return logprobs_N, -(logprobs_NV.exp() * finite_NV).sum(-1), None, full_N


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedHead:
    """How logits are made from a plain output matrix on tensor cores, without the matrix itself.

        logits_NV = hidden_ND @ weight_VD.T        factors in bfloat16, sums and logits in float32

    A sampler that computes in bfloat16 has this very matrix. What would change logprobs is to round the logits, by up
    to 0.06 for a logit of 20; these are float32. Products of float32 have no tensor cores: with them the head took five
    times as long on an H200, and k3 to a sampler was the same (docs/lab-notes). The backward pass is written out, so
    that nothing of the size of the logits is kept.
    """

    scaling: LogitScaling
    temperature: float
    chunk_size: int
    entropy: Entropy
    dtype: torch.dtype
    """Of the factors of each product."""
    kept: KeptTokens | None = None


def is_plain_matrix(head: Any) -> bool:
    """Whether logits are hidden states times this module's weight and nothing else: not with a bias, nor adapted."""
    kind = next(each for each in type(head).__mro__ if not issubclass(each, FSDPModule))  # FSDP2 derives a class
    return kind is nn.Linear and head.bias is None


def rounded_scores(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, head: RoundedHead
) -> TokenScores:
    """The logprob of each target and the entropy of its distribution, in float32, as `scores.chunked_scores`."""
    logprobs_N, entropies_N, ranks_N, full_N = _RoundedScores.apply(hidden_ND, weight_VD, targets_N, head)  # type: ignore[no-untyped-call]
    if head.entropy is Entropy.NONE:
        return TokenScores(logprobs_N, None)
    return TokenScores(
        logprobs_N,
        entropies_N if head.entropy is Entropy.TRAINED else entropies_N.detach(),
        ranks_N if head.entropy is Entropy.RANKED else None,
        full_entropies_N=None if head.kept is None else full_N,
    )


class _RoundedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, head: RoundedHead
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        rounded_VD = weight_VD.to(head.dtype)
        logprobs, entropies, ranks, full = [], [], [], []
        for hidden, targets, kept in _chunks(head, hidden_ND, targets_N):
            own_NV = _scale_logits(hidden, rounded_VD, head)[1]
            if kept is not None and head.entropy is not Entropy.NONE:
                full.append(_full_entropy(own_NV / head.temperature))
            logprobs_NV = _shape_logits(own_NV, kept, head).log_softmax(-1)
            logprobs.append(_pick(logprobs_NV, targets))
            if head.entropy is Entropy.RANKED:
                ranks.append(_find_ranks(logprobs_NV, logprobs[-1]))
            if head.entropy is not Entropy.NONE:
                entropies.append(_entropy(logprobs_NV))
        ctx.head = head
        entropies_N = torch.cat(entropies) if entropies else hidden_ND.new_zeros(0)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ranks_N = torch.cat(ranks) if ranks else targets_N.new_zeros(0)
        full_N = torch.cat(full) if full else hidden_ND.new_zeros(0)
        ctx.mark_non_differentiable(ranks_N, full_N)
        return torch.cat(logprobs), entropies_N, ranks_N, full_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N = ctx.saved_tensors
        head: RoundedHead = ctx.head
        rounded_VD = weight_VD.to(head.dtype)
        of_hidden, of_weight = [], None
        is_trained = head.entropy is Entropy.TRAINED
        of_logprobs_N, of_entropies_N = gradients[0], gradients[1] if is_trained else gradients[0]
        for hidden, targets, of_logprobs, of_entropies, kept in _chunks(
            head, hidden_ND, targets_N, of_logprobs_N, of_entropies_N
        ):
            raw_NV, own_NV = _scale_logits(hidden, rounded_VD, head)
            logits_NV = _shape_logits(own_NV, kept, head)
            gradient_NV = _gradient_of_logits(logits_NV, targets, of_logprobs, of_entropies if is_trained else None)
            gradient_NV = gradient_NV.div_(head.temperature)
            gradient_NV = gradient_NV if kept is None else kept.pull_back(gradient_NV, own_NV)
            gradient_NV = head.scaling.pull_back(gradient_NV, raw_NV).to(head.dtype)
            if ctx.needs_input_grad[0]:
                of_hidden.append(_multiply(gradient_NV, rounded_VD))
            if ctx.needs_input_grad[1]:
                part_VD = _multiply(gradient_NV.T, hidden.to(head.dtype))
                of_weight = part_VD if of_weight is None else of_weight.add_(part_VD)
        return (
            torch.cat(of_hidden).to(hidden_ND.dtype) if of_hidden else None,
            None if of_weight is None else of_weight.to(weight_VD.dtype),
            None,
            None,
        )


def _chunks(head: RoundedHead, *tensors: torch.Tensor) -> Any:
    """The same tokens of each tensor at a time, and their kept ids; one empty chunk if there are none."""
    kept = _split_kept(head.kept, len(tensors[0]), head.chunk_size)
    return zip(*(torch.split(tensor, head.chunk_size) for tensor in tensors), kept, strict=True)


def _scale_logits(
    hidden: torch.Tensor, rounded_VD: torch.Tensor, head: RoundedHead
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, which a cap needs again in the backward pass, and the model's logits. Without a cap they may be one
    tensor.
    """
    raw_NV = _multiply(hidden.to(head.dtype), rounded_VD.T)
    return raw_NV, head.scaling.apply(raw_NV)


def _shape_logits(own_NV: torch.Tensor, kept: KeptTokens | None, head: RoundedHead) -> torch.Tensor:
    """The logits of the distribution, in place of the model's own if those need not change but by cuts."""
    logits_NV = own_NV if kept is None else kept.edit(own_NV)
    logits_NV = logits_NV if head.temperature == 1.0 else logits_NV / head.temperature
    return logits_NV if kept is None else kept.cut_(logits_NV)


@torch.no_grad()
def _full_entropy(logits_NV: torch.Tensor) -> torch.Tensor:
    """[N] the entropy over the whole vocabulary."""
    return _entropy(logits_NV.log_softmax(-1))


def _entropy(logprobs_NV: torch.Tensor) -> torch.Tensor:
    probabilities_NV = logprobs_NV.exp_()  # in place: nothing else needs the logprobs any more
    terms_NV: torch.Tensor = torch.special.entr(probabilities_NV, out=probabilities_NV)
    return terms_NV.sum(-1)


def _gradient_of_logits(
    logits_NV: torch.Tensor, targets: torch.Tensor, of_logprobs: torch.Tensor, of_entropies: torch.Tensor | None
) -> torch.Tensor:
    """With p the softmax of the logits, h its entropy and t the target, for logit j.

    d logprob = [j = t] - p_j        d h = -p_j (log p_j + h)

    Gradients of the logprobs of K targets [N, K] add up.
    """
    if targets.dim() == 2:
        of_all = of_logprobs.sum(-1, keepdim=True)
        return logits_NV.softmax(-1).mul_(-of_all).scatter_add_(-1, targets, of_logprobs)
    if of_entropies is None:
        gradient_NV = logits_NV.softmax(-1).mul_(-of_logprobs[:, None])
    else:
        logprobs_NV = logits_NV.log_softmax(-1).clamp_(min=_IMPOSSIBLE)
        p_NV = logprobs_NV.exp()
        entropies = -(p_NV * logprobs_NV).sum(-1, keepdim=True)
        gradient_NV = logprobs_NV.add_(entropies).mul_(of_entropies[:, None]).add_(of_logprobs[:, None])
        gradient_NV = gradient_NV.mul_(p_NV).neg_()
    return gradient_NV.scatter_add_(-1, targets[:, None], of_logprobs[:, None])


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of two rounded matrices, in float32 at least."""
    exact = torch.promote_types(left.dtype, torch.float32)
    product: torch.Tensor
    if left.device.type == "cuda" and left.dtype != exact:
        product = torch.mm(left, right, out_dtype=exact)
    else:
        product = torch.mm(left.to(exact), right.to(exact))
    return product
