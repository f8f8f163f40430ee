"""Logprobs of given ids under a Hugging Face causal LM, without ever holding the logits of a whole batch.

Shapes: B rows, T ids (right-padded), N picked tokens, D hidden size, V vocabulary. A batch of 32 x 4096 ids over a
vocabulary of 150k has 79 GB of float32 logits; here only the picked tokens are projected, `chunk_size` at a time, and
the backward pass computes each chunk again instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
from unbroken.training.model.packing import why_not_packed

NUM_PROBE_IDS = 8
PROBE_TOLERANCE = 1e-3
"""Largest difference allowed between our logits and the model's own, relative to the largest logit. Both come from the
same operations in the same dtype; a forgotten soft cap, scale or dropout is far beyond it."""


class PolicyLogprobs(nn.Module):
    """A causal LM as a module whose output is logprobs, so that wrapping it (DDP, FSDP) wraps all that it computes."""

    def __init__(
        self, model: Any, *, chunk_size: int, images: RowImages | None = None, packing: Packing = Packing.AUTO
    ) -> None:
        """Check once, on a few ids and on a picture if there are `images`, that this gives `model.forward`'s logits.

        The model is left in training mode, which gradient checkpointing asks for.

        Raises:
            InvalidInputError: the model has no output embeddings, changes its logits in a way unknown here, gives
                other logits in training mode (dropout), so that no ratio could be exact, does not take the inputs of
                `images`, or must be packed (`Packing.ONE_LANE`) and does not keep rows apart.
        """
        super().__init__()
        causal = causal_lm(model)
        if causal.get_output_embeddings() is None:
            raise InvalidInputError(
                f"{type(causal).__name__} has no output embeddings: a causal language model is needed"
            )
        self.model = model
        self._no_split_modules = _blocks_of(causal)  # accelerate asks for it: FSDP2 gathers one block at a time
        self.vocab_size: int = causal.get_input_embeddings().weight.shape[0]
        self._chunk_size = chunk_size
        self._scaling = LogitScaling.of(causal.config.get_text_config())
        self._is_float32 = causal.get_output_embeddings().weight.dtype == torch.float32
        device = causal.get_input_embeddings().weight.device
        self._check_against_forward(torch.arange(NUM_PROBE_IDS, device=device).remainder(self.vocab_size)[None], None)
        if images is not None:
            self._check_against_forward(*images.example(device))
        self.layout = _layout(causal, packing, has_images=images is not None)
        self._hidden_size: int = causal.get_input_embeddings().weight.shape[1]

    @property
    def causal(self) -> Any:
        """The Hugging Face model, below any adapters of PEFT."""
        return causal_lm(self.model)

    def forward(
        self,
        token_ids_BT: torch.Tensor,
        mask_BT: torch.Tensor,
        temperature: float,
        pixels: PixelInputs | None = None,
        position_ids_BT: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[N] float32 logprobs of the ids where the mask is true, row by row, each given the ids before it in its row.

        Lanes are padded on the right with any id. That needs no attention mask: a causal model never looks ahead.
        Where rows share a lane, `position_ids_BT` begin again with each. The mask must be false where a row begins,
        for no id comes before it. An image may end a row, so with `pixels` the
        last id is fed as well, though no logprob depends on it.

        Every trainable parameter gets a gradient, zero if nothing depends on it. DDP exchanges gradients in the
        backward pass, as they come, and waits for each of them on every process: one whose rows have no image would
        leave the others waiting for its vision tower forever. So the result also depends, by an empty sum, on the
        parameters that text does not use. This costs no forward pass of a made-up image, and covers parameters that
        no image uses either, such as the last layer of LLaVA's tower, whose output is thrown away.
        """
        picked_BT = mask_BT[:, 1:]
        if pixels is None:
            positions_BT = None if position_ids_BT is None else position_ids_BT[:, :-1]
            hidden_BTD = hidden_states(self.causal, token_ids_BT[:, :-1], position_ids_BT=positions_BT)
        else:
            hidden_BTD = hidden_states(self.causal, token_ids_BT, pixels)[:, :-1]
        logprobs_N = chunked_logprobs(
            hidden_BTD[picked_BT],
            token_ids_BT[:, 1:][picked_BT],
            self._logits,
            temperature=temperature,
            chunk_size=self._chunk_size,
        )
        unused = [parameter.reshape(-1)[:0].sum() for parameter in parameters_beside_text(self.causal)]
        return logprobs_N + torch.stack(unused).sum() if unused else logprobs_N

    def tie_weights(self) -> None:
        """Make tied parameters one again; accelerate asks for it where only the first process has loaded any."""
        self.causal.tie_weights()

    def plan(self, lengths: Sequence[int], tokens_per_pass: int) -> list[Pass]:
        """Which rows of these lengths go into which lanes of which passes."""
        return plan_passes(lengths, tokens_per_pass, self.layout, free_length=self._hidden_size)

    def _logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, V] float32, also where the rest is computed in bfloat16: that rounds a logit of 20 by up to 0.06."""
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
        if (
            off := _distance(self._logits(hidden_states(self.causal, probe_BT, pixels)), expected_BTV)
        ) > PROBE_TOLERANCE:
            raise InvalidInputError(
                f"{name}'s logits are not its output embeddings on its decoder's last hidden state: they differ by "
                f"{off:.2g} of the largest logit. Its forward does something to them that unbroken does not know; "
                f"known are {', '.join(LogitScaling.CONFIG_NAMES)}"
            )
        self.model.train()  # and so it stays
        if (
            off := _distance(self._logits(hidden_states(self.causal, probe_BT, pixels)), expected_BTV)
        ) > PROBE_TOLERANCE:
            raise InvalidInputError(
                f"{name} gives other logits in training mode (by {off:.2g} of the largest): its logprobs would not be "
                "those of the policy that sampled. Set every dropout and jitter in its config to 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScaling:
    """What an architecture does to its logits after the output embeddings, as its config says."""

    CONFIG_NAMES = ("final_logit_softcapping", "logit_scale", "logits_scaling")

    factor: float = 1.0
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap) (Gemma)."""

    @classmethod
    def of(cls, config: Any) -> LogitScaling:
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


def _layout(model: Any, packing: Packing, *, has_images: bool) -> Layout:
    if packing is Packing.NEVER or (packing is Packing.AUTO and has_images):
        return Layout.PADDED
    layout = Layout.ONE_LANE if packing is Packing.ONE_LANE else Layout.LANES
    reason = "it takes images" if has_images else why_not_packed(model, layout)
    if reason is not None and packing is Packing.ONE_LANE:
        raise InvalidInputError(
            f"{type(model).__name__} cannot be packed: {reason}. TrainerConfig.packing must be auto or never"
        )
    return layout if reason is None else Layout.PADDED


def chunked_logprobs(
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    temperature: float,
    chunk_size: int,
) -> torch.Tensor:
    """[N] logprob of each target under softmax(logits_of(hidden) / temperature), in float32.

    Equal to doing it at once, in value and in gradient. An empty N gives an empty result that is still connected to
    the parameters, with gradients of zero.
    """
    pieces = zip(torch.split(hidden_ND, chunk_size), torch.split(targets_N, chunk_size), strict=True)
    return torch.cat(
        [
            checkpoint(_logprobs, h, t, logits_of, temperature, use_reentrant=False, preserve_rng_state=False)
            for h, t in pieces
        ]
    )


def _logprobs(
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    temperature: float,
) -> torch.Tensor:
    logprobs_NV = torch.log_softmax(logits_of(hidden_ND).float() / temperature, dim=-1)
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0]


def _blocks_of(model: Any) -> list[str]:
    """The classes of the model's blocks, of which each is computed as a whole."""
    there = {type(module).__name__ for module in model.modules()}
    return sorted(there.intersection(getattr(model, "_no_split_modules", None) or ()))


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())
