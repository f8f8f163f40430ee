"""Sequence parallelism by Ulysses (arXiv:2309.14509): the processes of a group share the ids of each lane.

All layers run on a process's own part of the ids; only attention needs the others. There two all-to-alls exchange ids
for heads, so attention sees whole lanes, and masks, row borders and trees are those of one process:

    4 heads, ids 0 to 5, 2 processes    layers: 0 1 2 | 3 4 5    attention: heads 0 1 of all ids | heads 2 3 of all ids

A model hands `SequenceGroup.attend` to its attention, as an input that it does not know: so a layer that is computed
again in the backward pass exchanges again, in any thread.

Shapes: B lanes, T ids of a whole lane, which are padded to a multiple of the P processes, H heads, N picked tokens.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from unbroken.decoder_config import DecoderConfig
from unbroken.errors import InvalidInputError
from unbroken.exactness import choose_long_length, choose_probe_ids, get_tolerance
from unbroken.training.model.scores import TokenScores
from unbroken.training.model.varlen import IMPLEMENTATION, register_attention

SETTING = "trainer.parallel.sequence"


class SequenceGroup:
    """The processes that compute the same lanes, each a part of the ids."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Parts are in the order of the ranks of the group."""
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def split(self, tensor_BT: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """[B, T / P, ...] this process's part of the ids, of which the last are `fill`."""
        missing = -tensor_BT.shape[1] % self.size
        whole = pad(tensor_BT, (0, 0) * (tensor_BT.dim() - 2) + (0, missing), value=fill)
        length = whole.shape[1] // self.size
        return whole[:, self.rank * length : (self.rank + 1) * length]

    def attend(
        self,
        attend: Callable[..., tuple[torch.Tensor, None]],
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """[B, H, T / P, D] queries, keys and values of a part of the ids to [B, T / P, H, D], by an attention function
        that gets a part of the heads of all ids.

        Fewer heads of keys than processes are repeated.
        """
        if reason := find_bad_heads(query.shape[1], key.shape[1], self.size):
            raise ValueError(reason)
        repeats = math.lcm(key.shape[1], self.size) // key.shape[1]
        key, value = (states.repeat_interleave(repeats, 1) if repeats > 1 else states for states in (key, value))
        query, key, value = _ToHeads.apply(self, query, key, value)  # type: ignore[no-untyped-call]
        groups = query.shape[1] // key.shape[1]
        # `is_causal` as transformers' own attention functions read it: modules without it are causal.
        part = SimpleNamespace(num_key_value_groups=groups, is_causal=getattr(module, "is_causal", True))
        states_BTHD, _ = attend(part, query, key, value, mask, **options)
        whole_BHTD: torch.Tensor = _ToIds.apply(self, states_BTHD.transpose(1, 2))  # type: ignore[no-untyped-call]
        return whole_BHTD.transpose(1, 2).contiguous(), None

    def gather(self, scores: TokenScores, owners_N: torch.Tensor) -> TokenScores:
        """The scores of all processes, in the order of `owners_N`, the ranks that have them.

        Every process computes the same loss of them, and gets its own gradients.
        """
        counts = torch.bincount(owners_N, minlength=self.size).tolist()
        order_N = torch.argsort(torch.argsort(owners_N, stable=True))
        own = {
            name: values_N for name, values_N in scores._asdict().items() if name[-2:] == "_N" and values_N is not None
        }
        return scores._replace(
            **{name: _Gather.apply(self, own_N, counts)[order_N] for name, own_N in own.items()}  # type: ignore[no-untyped-call]
        )

    def gather_parts(self, own_N: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The parts of all processes, which have as many entries as `counts` says, one after the other."""
        longest = max(counts)
        parts = [own_N.new_empty(longest) for _ in counts]
        dist.all_gather(parts, pad(own_N, (0, longest - len(own_N))).contiguous(), group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def to_heads(self, states_BHTD: torch.Tensor) -> torch.Tensor:
        """[B, H, T / P, D] all heads of a part of the ids to [B, H / P, T, D] a part of the heads of all ids."""
        lanes, heads, length, width = states_BHTD.shape
        sent = states_BHTD.reshape(lanes, self.size, heads // self.size, length, width).transpose(0, 1).contiguous()
        return self._exchange(sent).permute(1, 2, 0, 3, 4).reshape(lanes, heads // self.size, -1, width)

    def to_ids(self, states_BHTD: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_heads`."""
        lanes, heads, length, width = states_BHTD.shape
        sent = states_BHTD.reshape(lanes, heads, self.size, length // self.size, width).permute(2, 0, 1, 3, 4)
        return self._exchange(sent.contiguous()).transpose(0, 1).reshape(lanes, heads * self.size, -1, width)

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received


def add_parts(tensor: torch.Tensor, sequence: SequenceGroup | None) -> torch.Tensor:
    """The sum of what the processes of a group have; the tensor itself without a group."""
    if sequence is None:
        return tensor
    whole = tensor.detach().clone()
    dist.all_reduce(whole, group=sequence.group)
    return whole


def _find_sequence_obstacle(model: Any, size: int) -> str | None:
    """The reason by rule why processes of this number cannot share the ids of this model's lanes; None if they can."""
    config = model.config.get_text_config()
    if config is not model.config:
        return "it takes images"
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        return "its forward takes no position_ids"
    decoder = DecoderConfig(config)
    kinds = sorted(decoder.layer_kinds - {"full_attention"})
    if kinds or decoder.window or decoder.has_chunks:
        return f"it has layers of {', '.join(kinds) or 'attention in windows or chunks'}"
    if config._attn_implementation not in ("sdpa", IMPLEMENTATION):
        return f"it attends by {config._attn_implementation}, not by sdpa"
    return find_bad_heads(decoder.num_heads, decoder.num_key_heads, size)


def find_bad_heads(heads: int, key_heads: int, size: int) -> str | None:
    """Why this number of processes cannot have as many heads each, and heads of keys, shared by as many; None if so."""
    if heads % size:
        return f"its {heads} heads cannot be dealt out evenly"
    if key_heads % size and size % key_heads:
        return f"its {key_heads} heads of keys cannot be dealt out or repeated evenly"
    return None


@torch.no_grad()
def split_lanes(policy: Any, sequence: SequenceGroup) -> None:
    """Let the processes of a group share the ids of each lane of a `PolicyLogprobs`, after a check on a few ids that
    its logprobs stay the same. All processes call it, where the model is trained, under the autocast of its passes.

    Raises:
        InvalidInputError: the model cannot be split, or its logprobs are others then.
    """
    name = type(policy.causal).__name__
    reason = _find_sequence_obstacle(policy.causal, sequence.size)
    if reason is None:
        expected_N = _run_probe(policy)
        config = policy.causal.config.get_text_config()
        before, config._attn_implementation = config._attn_implementation, IMPLEMENTATION
        register_attention()
        policy.sequence = sequence
        try:
            off = float((_run_probe(policy) - expected_N).abs().max() / expected_N.abs().max())
            tolerance = get_tolerance(_get_precision(policy.causal))
            reason = None if off <= tolerance else f"its logprobs are off by {off:.2g} of the largest then"
        except Exception as error:  # models may raise anything for inputs that they do not expect
            reason = f"it fails with {type(error).__name__}: {error}"
        if reason is not None:
            policy.sequence, config._attn_implementation = None, before
    if reason is not None:
        raise InvalidInputError(
            f"{name} cannot share the ids of a row among {sequence.size} processes: {reason}. {SETTING} must be 1"
        )


def _run_probe(policy: Any) -> torch.Tensor:
    device, length = policy.causal.device, choose_long_length(policy.causal) - 1
    ids_BT = choose_probe_ids(2 * length, policy.vocab_size, device).view(2, length)
    logprobs_N: torch.Tensor = policy(ids_BT, torch.arange(length, device=device).expand(2, -1) > 0, 1.0).logprobs_N
    return logprobs_N


def _get_precision(model: Any) -> torch.dtype:
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


class _ToHeads(torch.autograd.Function):
    """One node for queries, keys and values: all processes exchange their gradients in the same order."""

    @staticmethod
    def forward(ctx: Any, sequence: SequenceGroup, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sequence = sequence
        return tuple(sequence.to_heads(each) for each in states)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *(ctx.sequence.to_ids(each) for each in gradients)


class _ToIds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sequence: SequenceGroup, states: torch.Tensor) -> torch.Tensor:
        ctx.sequence = sequence
        return sequence.to_ids(states)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, ctx.sequence.to_heads(gradient)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sequence: SequenceGroup, own_N: torch.Tensor, counts: list[int]) -> torch.Tensor:
        start = sum(counts[: sequence.rank])
        ctx.own = slice(start, start + counts[sequence.rank])
        return sequence.gather_parts(own_N, counts)

    @staticmethod
    def backward(ctx: Any, gradient_N: torch.Tensor) -> Any:
        return None, gradient_N[ctx.own], None
