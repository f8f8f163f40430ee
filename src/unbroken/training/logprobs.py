"""Logprobs of given ids under a Hugging Face causal LM, without ever holding the logits of a whole batch.

Shapes: B rows, T ids (right-padded), N picked tokens, D hidden size, V vocabulary. A batch of 32 x 4096 ids over a
vocabulary of 150k has 79 GB of float32 logits; here only the picked tokens are projected, `chunk_size` at a time, and
the backward pass computes each chunk again instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unbroken.errors import InvalidInputError

NUM_PROBE_IDS = 8
PROBE_TOLERANCE = 1e-3
"""Largest difference allowed between our logits and the model's own, relative to the largest logit. Both come from the
same operations in the same dtype; a forgotten soft cap, scale or dropout is far beyond it."""


class PolicyLogprobs(nn.Module):
    """A causal LM as a module whose output is logprobs, so that wrapping it (DDP, FSDP) wraps all that it computes."""

    def __init__(self, model: Any, *, chunk_size: int) -> None:
        """Check once, on a few ids, that this gives the logits that `model.forward` gives.

        The model is left in training mode, which gradient checkpointing asks for.

        Raises:
            InvalidInputError: the model has no output embeddings, changes its logits in a way unknown here, or gives
                other logits in training mode (dropout), so that no ratio could be exact.
        """
        super().__init__()
        if model.get_output_embeddings() is None:
            raise InvalidInputError(
                f"{type(model).__name__} has no output embeddings: a causal language model is needed"
            )
        self.model = model
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]
        self._chunk_size = chunk_size
        self._scaling = LogitScaling.of(model.config.get_text_config())
        self._check_against_forward()

    def forward(self, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor, temperature: float) -> torch.Tensor:
        """[N] float32 logprobs of the ids where the mask is true, row by row, each given the ids before it in its row.

        Rows are padded on the right with any id. That needs no attention mask: a causal model never looks ahead.
        The mask's first column must be false, for no id comes before it.
        """
        picked_BT = mask_BT[:, 1:]
        hidden_BTD = self._hidden(token_ids_BT[:, :-1])
        return chunked_logprobs(
            hidden_BTD[picked_BT],
            token_ids_BT[:, 1:][picked_BT],
            self._logits,
            temperature=temperature,
            chunk_size=self._chunk_size,
        )

    def _hidden(self, token_ids_BT: torch.Tensor) -> torch.Tensor:
        hidden_BTD: torch.Tensor = self.model.get_decoder()(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        return hidden_BTD

    def _logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return self._scaling.apply(self.model.get_output_embeddings()(hidden_ND).float())

    @torch.no_grad()
    def _check_against_forward(self) -> None:
        device = self.model.get_input_embeddings().weight.device
        probe_BT = torch.arange(NUM_PROBE_IDS, device=device).remainder(self.vocab_size)[None]
        name = type(self.model).__name__
        expected_BTV = self.model.eval()(input_ids=probe_BT, use_cache=False).logits.float()
        if (off := _distance(self._logits(self._hidden(probe_BT)), expected_BTV)) > PROBE_TOLERANCE:
            raise InvalidInputError(
                f"{name}'s logits are not its output embeddings on its decoder's last hidden state: they differ by "
                f"{off:.2g} of the largest logit. Its forward does something to them that unbroken does not know; "
                f"known are {', '.join(LogitScaling.CONFIG_NAMES)}"
            )
        self.model.train()  # and so it stays
        if (off := _distance(self._logits(self._hidden(probe_BT)), expected_BTV)) > PROBE_TOLERANCE:
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


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())
