"""Logprobs of given ids under a Hugging Face causal LM, without the logits of a whole batch in memory.

Shapes: B rows, T ids (right-padded), N picked tokens, D hidden size, V vocabulary. A batch of 32 x 4096 ids over a
vocabulary of 150k has 79 GB of float32 logits; here only the picked tokens are projected, `chunk_size` at a time, and
the backward pass computes each chunk again instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from unbroken.errors import InvalidInputError
from unbroken.training.config import Packing
from unbroken.training.model.adapters import causal_lm
from unbroken.training.model.backbone import accepted_inputs, hidden_states, parameters_beside_text
from unbroken.training.model.images import PixelInputs, RowImages
from unbroken.training.model.lanes import Layout, Pass, plan_passes
from unbroken.training.model.packing import find_packing_obstacle

NUM_PROBE_IDS = 8
PROBE_TOLERANCE = 1e-3
"""Maximum difference between our logits and the model's, relative to the largest. Operations and dtype are the same; a
missing soft cap, scale or dropout makes a much larger difference."""


class Entropy(StrEnum):
    """Whether the entropy of the policy is computed at each picked token."""

    NONE = "none"
    MEASURED = "measured"
    """Without gradient, which the backward pass does not compute again."""
    TRAINED = "trained"
    """With gradient."""


class TokenScores(NamedTuple):
    """The policy at the N picked tokens."""

    logprobs_N: torch.Tensor
    """float32, of the ids."""
    entropies_N: torch.Tensor | None
    """float32, in nats, over the whole vocabulary at the temperature of the logprobs; None unless asked for."""


class PolicyLogprobs(nn.Module):
    """A causal LM as a module that returns logprobs, so that DDP and FSDP wrap the whole computation."""

    def __init__(
        self, model: Any, *, chunk_size: int, images: RowImages | None = None, packing: Packing = Packing.AUTO
    ) -> None:
        """Check on a few ids, and on a picture if there are `images`, that the logits are those of `model.forward`. The
        model is left in training mode, which gradient checkpointing requires.

        Raises:
            InvalidInputError: the model has no output embeddings, changes its logits in an unknown way, has other
                logits in training mode (dropout), does not take the inputs of `images`, or must be packed
                (`Packing.ONE_LANE`) and does not keep rows apart.
        """
        super().__init__()
        causal = causal_lm(model)
        if causal.get_output_embeddings() is None:
            raise InvalidInputError(
                f"{type(causal).__name__} has no output embeddings: a causal language model is needed"
            )
        self.model = model
        self._no_split_modules = _find_block_classes(causal)  # for accelerate: FSDP2 gathers one block at a time
        self.vocab_size: int = causal.get_input_embeddings().weight.shape[0]
        self._chunk_size = chunk_size
        self._scaling = LogitScaling.from_config(causal.config.get_text_config())
        self._is_float32 = causal.get_output_embeddings().weight.dtype == torch.float32
        device = causal.get_input_embeddings().weight.device
        self._check_against_forward(torch.arange(NUM_PROBE_IDS, device=device).remainder(self.vocab_size)[None], None)
        if images is not None:
            self._check_against_forward(*images.example(device))
        self.layout = _choose_layout(causal, packing, has_images=images is not None)
        self._hidden_size: int = causal.get_input_embeddings().weight.shape[1]

    @property
    def causal(self) -> Any:
        """The Hugging Face model without PEFT's wrapper."""
        return causal_lm(self.model)

    def forward(
        self,
        token_ids_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        temperature: float,
        pixels: PixelInputs | None = None,
        position_ids_BT: torch.Tensor | None = None,
        entropy: Entropy = Entropy.NONE,
    ) -> TokenScores:
        """The logprobs of the ids where the mask is true, row by row, each given the ids before it in its row.

        Lanes are padded on the right with any id. If rows share a lane, `position_ids_BT` start at 0 in each row. The
        mask must be false for the first id of a row. An image may end a row, so with `pixels` the last id is fed too,
        though no logprob depends on it.

        Every trainable parameter gets a gradient, zero if it was not used: DDP waits for all of them, so a process
        whose rows have no image would let the others wait forever for its vision tower's. Hence the result depends, by
        an empty sum, on the parameters that text does not use. This costs no forward pass of a dummy image, and covers
        parameters that no image uses either, such as the last layer of LLaVA's tower.
        """
        picked_BT = mask_BT[:, 1:]
        if pixels is None:
            positions_BT = None if position_ids_BT is None else position_ids_BT[:, :-1]
            hidden_BTD = hidden_states(self.causal, token_ids_BT[:, :-1], position_ids_BT=positions_BT)
        else:
            hidden_BTD = hidden_states(self.causal, token_ids_BT, pixels)[:, :-1]
        scores = chunked_scores(
            hidden_BTD[picked_BT],
            token_ids_BT[:, 1:][picked_BT],
            self._logits,
            temperature=temperature,
            chunk_size=self._chunk_size,
            entropy=entropy,
        )
        unused = [parameter.reshape(-1)[:0].sum() for parameter in parameters_beside_text(self.causal)]
        return scores._replace(logprobs_N=scores.logprobs_N + torch.stack(unused).sum()) if unused else scores

    def tie_weights(self) -> None:
        """Tie parameters again; accelerate calls it if only the first process has loaded weights."""
        self.causal.tie_weights()

    def plan(self, lengths: Sequence[int], tokens_per_pass: int) -> list[Pass]:
        """Put rows of these lengths into lanes and passes."""
        return plan_passes(lengths, tokens_per_pass, self.layout, free_length=self._hidden_size)

    def _logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, V] float32 even if the rest is computed in bfloat16, which would round a logit of 20 by up to 0.06."""
        head = self.causal.get_output_embeddings()
        with torch.autocast(hidden_ND.device.type, enabled=False):
            if self._is_float32 and head.weight.dtype != torch.float32:  # rounded by FSDP2
                whole = {name: parameter.float() for name, parameter in head.named_parameters()}
                return self._scaling.apply(functional_call(head, whole, (hidden_ND.float(),)))
            return self._scaling.apply(head(hidden_ND.to(head.weight.dtype)).float())

    @torch.no_grad()
    def _check_against_forward(self, probe_BT: torch.Tensor, pixels: PixelInputs | None) -> None:
        name = type(self.causal).__name__
        inputs = {} if pixels is None else accepted_inputs(self.causal, pixels)
        try:
            expected_BTV = self.model.eval()(input_ids=probe_BT, use_cache=False, **inputs).logits.float()
        except Exception as error:
            if pixels is None:
                raise
            raise InvalidInputError(
                f"{name} must take what the image processor makes of one image, {sorted(inputs)} for "
                f"{probe_BT.shape[1]} ids, got {type(error).__name__}: {error}"
            ) from error
        if (off := self._distance_from(expected_BTV, probe_BT, pixels)) > PROBE_TOLERANCE:
            raise InvalidInputError(
                f"{name}'s logits are not its output embeddings on its decoder's last hidden state: they differ by "
                f"{off:.2g} of the largest logit. Its forward changes them in a way that is not supported; supported "
                f"are {', '.join(LogitScaling.CONFIG_NAMES)}"
            )
        self.model.train()
        if (off := self._distance_from(expected_BTV, probe_BT, pixels)) > PROBE_TOLERANCE:
            raise InvalidInputError(
                f"{name} gives other logits in training mode (by {off:.2g} of the largest): its logprobs would not be "
                "those of the policy that sampled. Set every dropout and jitter in its config to 0"
            )

    def _distance_from(self, expected: torch.Tensor, probe_BT: torch.Tensor, pixels: PixelInputs | None) -> float:
        logits = self._logits(hidden_states(self.causal, probe_BT, pixels))
        return float((logits - expected).abs().max() / expected.abs().max())


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


def _choose_layout(model: Any, packing: Packing, *, has_images: bool) -> Layout:
    if packing is Packing.NEVER or (packing is Packing.AUTO and has_images):
        return Layout.PADDED
    layout = Layout.ONE_LANE if packing is Packing.ONE_LANE else Layout.LANES
    reason = "it takes images" if has_images else find_packing_obstacle(model, layout)
    if reason is not None and packing is Packing.ONE_LANE:
        raise InvalidInputError(
            f"{type(model).__name__} cannot be packed: {reason}. TrainerConfig.packing must be auto or never"
        )
    return layout if reason is None else Layout.PADDED


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
    logprobs, entropies = zip(*scores, strict=True)
    return TokenScores(torch.cat(logprobs), None if entropy is Entropy.NONE else torch.cat(entropies))


def _compute_chunk(
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    temperature: float,
    entropy: Entropy,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The entropy comes last: without gradient, checkpointing stops before it when it computes the chunk again."""
    logprobs_NV = torch.log_softmax(logits_of(hidden_ND).float() / temperature, dim=-1)
    logprobs_N = logprobs_NV.gather(-1, targets_N[:, None])[:, 0]
    match entropy:
        case Entropy.NONE:
            return logprobs_N, None
        case Entropy.MEASURED:
            with torch.no_grad():
                probabilities_NV = logprobs_NV.exp()  # the only new tensor of this size
                return logprobs_N, torch.special.entr(probabilities_NV, out=probabilities_NV).sum(-1)
        case Entropy.TRAINED:
            # An id that is impossible (logprob -inf) adds nothing, and has no gradient.
            finite_NV = logprobs_NV.clamp(min=torch.finfo(logprobs_NV.dtype).min)
            return logprobs_N, -(logprobs_NV.exp() * finite_NV).sum(-1)


def _find_block_classes(model: Any) -> list[str]:
    """The class names of the model's blocks, which FSDP must not split."""
    classes = {type(module).__name__ for module in model.modules()}
    return sorted(classes.intersection(getattr(model, "_no_split_modules", None) or ()))
