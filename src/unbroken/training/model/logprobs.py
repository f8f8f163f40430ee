"""Logprobs of given ids under a Hugging Face causal LM, without the logits of a whole batch in memory.

Shapes: B rows, T ids (right-padded), N picked tokens, D hidden size, V vocabulary. A batch of 32 x 4096 ids over a
vocabulary of 150k has 79 GB of float32 logits; here only the picked tokens are projected, `chunk_size` at a time, and
the backward pass computes each chunk again instead of keeping it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.functional import linear, pad
from torch.nn.modules.dropout import _DropoutNd

from unbroken.decoder_config import DecoderConfig
from unbroken.errors import InvalidInputError
from unbroken.exactness import (
    attend_exactly,
    attending_by,
    call_rounded,
    choose_attention,
    choose_probe_ids,
    find_length_dependence,
    get_tolerance,
)
from unbroken.routing import LIVE, Routers
from unbroken.training.config import LoraUpdates, Packing, SharedPrefixes
from unbroken.training.model.adapters import causal_lm, fuse_adapters, keep_residual_exact, merge_in_passes
from unbroken.training.model.backbone import (
    accepted_inputs,
    fuse_norms,
    get_backbone,
    hidden_states,
    parameters_beside_text,
    round_norms,
)
from unbroken.training.model.images import PixelInputs, RowImages
from unbroken.training.model.lanes import (
    CPU_COSTS,
    GPU_COSTS,
    MIN_SHARED,
    Costs,
    Pass,
    RowLayout,
    RowPass,
    estimate_cost,
    plan_cheapest,
    plan_passes,
    plan_trees_by_cost,
)
from unbroken.training.model.probes import (
    choose_mask,
    find_difference,
    find_packing_obstacle,
    find_tree_obstacle,
    is_exact_by_rows,
)
from unbroken.training.model.routing import balance_loss, count_choices, flatten_experts
from unbroken.training.model.scores import (
    Entropy,
    KeptTokens,
    LogitScaling,
    RoundedHead,
    Targets,
    TokenScores,
    chunked_scores,
    is_plain_matrix,
    rounded_scores,
    to_float32,
)
from unbroken.training.model.sequence import SequenceGroup
from unbroken.training.model.sharding import is_split, make_root
from unbroken.training.model.tree import Ids, TreeInputs
from unbroken.training.model.tree_attention import MaskKind, count_filling, make_mask
from unbroken.training.model.varlen import attention_by_rows, can_attend_by_rows
from unbroken.types import Numerics

_logger = logging.getLogger(__name__)
NUM_PROBE_IDS = 8


class PolicyLogprobs(nn.Module):
    """A causal LM as a module that returns logprobs, so that DDP and FSDP2 wrap the whole computation."""

    num_top: int = 0
    """How many of the most likely ids below `top_below` are scored beside the rows' own, for a teacher."""
    top_below: int = 0

    def __init__(
        self,
        model: Any,
        *,
        chunk_size: int,
        images: RowImages | None = None,
        packing: Packing = Packing.AUTO,
        routers: Routers | None = None,
        shared_prefixes: SharedPrefixes = SharedPrefixes.NEVER,
        counts_choices: bool = False,
        numerics: Numerics = Numerics.FAST,
        lora_updates: LoraUpdates = LoraUpdates.MERGED,
    ) -> None:
        """Check on a few ids, and on a picture if there are `images`, that the logits are those of `model.forward` with
        `eager` attention, which a model gets whose config `sdpa` does not follow. The model is left in training mode,
        which gradient checkpointing requires, without dropout. `routers` are the model's, to replay recorded experts.
        `counts_choices` says whether passes count how often experts are chosen. With exact `numerics` each row has a
        lane to itself and shares no ids, and adapters are merged in each pass, as a sampler by `lora_updates` has them.

        Raises:
            InvalidInputError: the model has no output embeddings, changes its logits in an unknown way, has other
                logits in training mode or next to longer rows, does not take the inputs of `images`, or must be packed
                (`Packing.ONE_LANE`) and does not keep rows apart; or its experts cannot be counted.
        """
        super().__init__()
        causal = causal_lm(model)
        if causal.get_output_embeddings() is None:
            raise InvalidInputError(
                f"{type(causal).__name__} has no output embeddings: a causal language model is needed"
            )
        self.model = model
        self._is_split = is_split(model)
        make_root(self)
        _disable_dropout(causal)
        embeddings_VD = causal.get_input_embeddings().weight
        self.vocab_size: int = embeddings_VD.shape[0]
        self.hidden_size: int = embeddings_VD.shape[1]
        self._chunk_size = chunk_size
        self._scaling = LogitScaling.from_config(DecoderConfig(causal.config))
        self._is_float32 = causal.get_output_embeddings().weight.dtype == torch.float32
        self._is_tied = causal.get_output_embeddings().weight is causal.get_input_embeddings().weight
        if self._is_split and not is_plain_matrix(causal.get_output_embeddings()):
            raise InvalidInputError(
                f"{type(causal).__name__} must have output embeddings that are a matrix alone with trainer.parallel"
            )
        choose_attention(causal)
        is_exact = numerics is Numerics.EXACT
        self._row_multiple = 1
        self._is_as_vllm = False
        if is_exact:
            merge_in_passes(model, scales_b=lora_updates is LoraUpdates.ADAPTER)
            self._row_multiple = attend_exactly(causal, takes_images=images is not None)
        self._check_on_few_ids(embeddings_VD.device, images, counts_choices=counts_choices)
        if (reason := find_length_dependence(causal)) is not None:
            raise InvalidInputError(f"{type(causal).__name__} computes a row otherwise beside a longer one: {reason}")
        fuse_norms(causal)
        if not is_exact:
            fuse_adapters(model)
        keep_residual_exact(model)
        self._packing = packing
        self.routers = routers
        self._shared_prefixes = SharedPrefixes.NEVER if is_exact else shared_prefixes
        self._has_images = images is not None
        self._has_tried_trees = False
        self.tree_mask: MaskKind | None = None
        """What the nodes of a tree are attended with; None: each row is computed whole."""
        self.sequence: SequenceGroup | None = None
        """The processes that share the ids of each lane; None: each has its own rows."""
        self.layout = RowLayout.PADDED if is_exact else _choose_layout(causal, packing, has_images=images is not None)

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
        experts_BTLK: torch.Tensor | None = None,
        tree: TreeInputs | None = None,
        counted_BT: torch.Tensor | None = None,
        kept: KeptTokens | None = None,
        targets: Targets | None = None,
    ) -> TokenScores:
        """The logprobs of ids, or of `targets`, where the mask is true, row by row, each given the ids before it in its
        row; or of those that `tree` names, if the one lane has the nodes of a tree.

        Lanes are padded on the right with any id. If rows share a lane, `position_ids_BT` start at 0 in each row. The
        mask must be false for the first id of a row. An image may end a row, so with `pixels` the last id is fed too,
        though no logprob depends on it. `experts_BTLK` are recorded ones to replay (`lay_out_experts`), and the softmax
        is over the ids that the sampler `kept`. Choices of experts are counted for the ids of `counted_BT`, if any.

        Every trainable parameter gets a gradient, zero if it was not used: DDP and FSDP2 wait for all of them, so a
        process whose rows have no image would let the others wait forever for its vision tower's. Hence the result
        depends, by an empty sum, on those that text does not use, or no image does, such as the last layer of LLaVA's
        tower.
        """
        if tree is not None:
            assert position_ids_BT is not None, "a tree has depths"
            hidden_BTD = self._hidden_of_tree(token_ids_BT, position_ids_BT, tree.ends_T)
            places: tuple[torch.Tensor, ...] = (torch.zeros_like(tree.nodes_U), tree.nodes_U)
            scores = self._score_at(hidden_BTD, places, tree.targets_U, temperature, entropy, kept).pick(tree.places_N)
        else:
            if missing := (1 - token_ids_BT.shape[1]) % self._row_multiple:  # the last id is not fed
                token_ids_BT, mask_BT = pad(token_ids_BT, (0, missing)), pad(mask_BT, (0, missing))
            with self._replaying(experts_BTLK, token_ids_BT if pixels is not None else token_ids_BT[:, :-1]):
                router_logits: list[torch.Tensor] | None = None if counted_BT is None else []
                hidden_BTD = self._hidden_of_rows(token_ids_BT, pixels, position_ids_BT, router_logits)
            places = mask_BT[:, 1:].nonzero(as_tuple=True)
            own_N = token_ids_BT[:, 1:][places]
            scores = self._score_rows(hidden_BTD, places, own_N, targets, temperature, entropy, kept)
            if counted_BT is not None and router_logits is not None:
                if self.sequence is not None:
                    counted_BT = self.sequence.split(counted_BT[:, :-1])
                counted_N = counted_BT[:, : len(router_logits[0]) // len(token_ids_BT)].flatten()
                scores = scores._replace(choices_2E=count_choices(router_logits, counted_N, self._top_k))
        unused = [parameter.reshape(-1)[:0].sum() for parameter in parameters_beside_text(self.causal)]
        return scores._replace(logprobs_N=scores.logprobs_N + torch.stack(unused).sum()) if unused else scores

    def plan(self, lengths: Sequence[int], tokens_per_pass: int) -> list[Pass]:
        """Put rows of these lengths into lanes and passes: padded, unless packing them costs less."""
        if self._packing is not Packing.AUTO:
            return plan_passes(lengths, tokens_per_pass, self.layout)
        return plan_cheapest(lengths, tokens_per_pass, self.layout, width=self.hidden_size, costs=self._costs)

    def plan_rows(self, rows: Sequence[Ids], tokens_per_pass: int) -> list[RowPass]:
        """Put rows into lanes and passes; where allowed and cheaper, rows that begin with the same ids into trees."""
        lengths = [len(row) for row in rows]
        whole = self.plan(lengths, tokens_per_pass)
        passes = [RowPass(lanes=lanes) for lanes in whole]
        if self.tree_mask is None or not rows:
            return passes
        in_blocks = self.tree_mask is MaskKind.BLOCKS
        width, costs = self.hidden_size, self._costs
        trees, cost = plan_trees_by_cost(rows, tokens_per_pass, width=width, costs=costs, in_blocks=in_blocks)
        if self._shared_prefixes is SharedPrefixes.ALWAYS:
            return trees
        of_rows = estimate_cost(whole, lengths, self.layout, width=width, costs=costs) + costs.per_pass * len(whole)
        saves = sum(each.num_shared for each in trees) >= MIN_SHARED * sum(lengths)
        return trees if saves and cost < of_rows else passes

    def check_trees(self) -> None:
        """Check by rule alone whether rows of this model may share the ids that they begin with.

        Raises:
            InvalidInputError: they may not, and `SharedPrefixes.ALWAYS` asks for it.
        """
        self._refuse_trees(self._find_tree_obstacle())

    def allow_trees(self) -> None:
        """Let rows share the ids that they begin with, if it is proven here that each has the logprobs and the gradient
        that it has alone. Again is harmless.

        For a model that is where it is trained, under the autocast of its passes, that has no gradients, and has memory
        for them. All processes call it.

        Raises:
            InvalidInputError: it is not proven, and `SharedPrefixes.ALWAYS` asks for it.
        """
        if self._has_tried_trees or self._shared_prefixes is SharedPrefixes.NEVER:
            return
        self._has_tried_trees = True
        reason = self._find_tree_obstacle() or self._find_untried_kernel() or self._try_trees()
        self._refuse_trees(reason)
        if reason is not None:
            _logger.info("rows of %s do not share prefixes: %s", type(self.causal).__name__, reason)

    def _find_tree_obstacle(self) -> str | None:
        if self._has_images:
            return "it takes images"
        if self.routers is not None:
            return "recorded experts are replayed, which rows have of their own for equal ids"
        return find_tree_obstacle(self.causal)

    def _find_untried_kernel(self) -> str | None:
        if self._shared_prefixes is SharedPrefixes.AUTO and choose_mask(self.causal) is MaskKind.BLOCKS:
            return "FlexAttention was not measured against rows yet, so auto leaves them alone on a GPU"
        return None

    def _refuse_trees(self, reason: str | None) -> None:
        if reason is not None and self._shared_prefixes is SharedPrefixes.ALWAYS:
            raise InvalidInputError(
                f"{type(self.causal).__name__} cannot have shared prefixes: {reason}. TrainerConfig.shared_prefixes "
                "must be auto or never"
            )

    def _try_trees(self) -> str | None:
        """Allow trees, unless they differ from rows; the reason why they do."""
        self.tree_mask = choose_mask(self.causal)
        with attention_by_rows(self.causal) if self.tree_mask is MaskKind.BLOCKS else nullcontext() as keep:
            reason = find_difference(self)
            if reason is not None:
                self.tree_mask = None
            elif keep is not None:
                keep()
        return reason

    def compute_as_vllm(self, tensor_parallel: int) -> None:
        """Compute in bfloat16, from weights that are rounded as a publisher rounds them, what vLLM of this degree of
        tensor parallelism computes with exact numerics, to the bit. For a model that is where it will be trained,
        before its first pass.

        Raises:
            InvalidInputError: this model cannot be computed so.
        """
        from unbroken.engines.vllm.numerics import attend_as_vllm

        if self._scaling != LogitScaling() or not is_plain_matrix(self.causal.get_output_embeddings()):
            name = type(self.causal).__name__
            raise InvalidInputError(f"numerics must be fast for {name} in bfloat16, which changes its head's logits")
        merge_in_passes(self.model)
        round_norms(self.causal)
        attend_as_vllm(self.causal, tensor_parallel)
        self._is_as_vllm, self._shared_prefixes, self.layout = True, SharedPrefixes.NEVER, RowLayout.PADDED

    def allow_by_rows(self) -> None:
        """Let attention be within rows by their borders, if it is proven here to be what it is without others.

        For a model that is where it will be trained, under the autocast of its passes. All processes call it.
        """
        before = self.layout
        if before not in (RowLayout.LANES, RowLayout.ONE_LANE) or not can_attend_by_rows(self.causal):
            return
        with attention_by_rows(self.causal) as keep:
            self.layout = RowLayout.BY_ROWS
            if is_exact_by_rows(self, self.vocab_size, self.causal.device):
                keep()
            else:
                self.layout = before

    def _replaying(self, experts_BTLK: torch.Tensor | None, fed_BT: torch.Tensor) -> AbstractContextManager[None]:
        if self.routers is None:
            return nullcontext()
        if self.sequence is not None:
            fed_BT = self.sequence.split(fed_BT)
            if experts_BTLK is not None:  # they have one id more than is fed
                experts_BTLK = self.sequence.split(experts_BTLK[:, :-1], fill=LIVE)
        return self.routers.replaying(flatten_experts(experts_BTLK, fed_BT.shape, fed_BT.device))

    def _score_at(
        self,
        hidden_BTD: torch.Tensor,
        places: tuple[torch.Tensor, ...],
        targets_N: torch.Tensor,
        temperature: float,
        entropy: Entropy,
        kept: KeptTokens | None,
    ) -> TokenScores:
        """The scores by the hidden states at `places`, lanes [N] and ids [N], each computed where its id is."""
        if self.sequence is None:
            return self._score(hidden_BTD[places], targets_N, temperature, entropy, kept)
        lanes_N, ids_N = places
        length = hidden_BTD.shape[1]
        owners_N = ids_N // length
        is_own_N = owners_N == self.sequence.rank
        own_ND = hidden_BTD[lanes_N[is_own_N], ids_N[is_own_N] % length]
        own_kept = None if kept is None else kept.pick(is_own_N)
        return self.sequence.gather(self._score(own_ND, targets_N[is_own_N], temperature, entropy, own_kept), owners_N)

    def _score_rows(
        self,
        hidden_BTD: torch.Tensor,
        places: tuple[torch.Tensor, ...],
        own_N: torch.Tensor,
        targets: Targets | None,
        temperature: float,
        entropy: Entropy,
        kept: KeptTokens | None,
    ) -> TokenScores:
        """The scores of the rows' own ids; of targets, in place of them or beside them; or of the most likely ids."""
        if targets is None and self.num_top:
            return self._score_top(hidden_BTD, places, own_N, temperature)
        if targets is None:
            return self._score_at(hidden_BTD, places, own_N, temperature, entropy, kept)
        if targets.is_beside:
            return self._score_beside(hidden_BTD, places, own_N, targets.ids_N, temperature, entropy)
        return self._score_targets(hidden_BTD, places, targets, temperature)

    def _score_beside(
        self,
        hidden_BTD: torch.Tensor,
        places: tuple[torch.Tensor, ...],
        own_N: torch.Tensor,
        beside_N: torch.Tensor,
        temperature: float,
        entropy: Entropy,
    ) -> TokenScores:
        """The scores of the rows' own ids [N], and of others [N, K] at the same places."""
        ids_N = torch.cat([own_N[:, None], beside_N], dim=1)
        scores = self._score_at(hidden_BTD, places, ids_N, temperature, entropy, None)
        return scores._replace(logprobs_N=scores.logprobs_N[:, 0], beside_N=scores.logprobs_N[:, 1:])

    @torch.no_grad()
    def _score_top(
        self, hidden_BTD: torch.Tensor, places: tuple[torch.Tensor, ...], own_N: torch.Tensor, temperature: float
    ) -> TokenScores:
        """The scores of the rows' own ids, and of the most likely ones.

        These are found first and then scored as a policy's targets are, so that equal models give equal bits.
        """
        weight_VD = self._head_weight()
        found = [
            self._logits(hidden_ND, weight_VD)[:, : self.top_below].topk(self.num_top).indices
            for hidden_ND in torch.split(hidden_BTD[places], self._chunk_size)
        ]
        top_N = torch.cat(found)
        scores = self._score_beside(hidden_BTD, places, own_N, top_N, temperature, Entropy.NONE)
        return scores._replace(top_ids_N=top_N)

    def _score_targets(
        self, hidden_BTD: torch.Tensor, places: tuple[torch.Tensor, ...], targets: Targets, temperature: float
    ) -> TokenScores:
        """The scores of given ids, those without gradient after the others."""
        found, numbers = [], []
        for chosen_N, scoring in ((targets.trained_N, nullcontext()), (~targets.trained_N, torch.no_grad())):
            numbers.append(chosen_N.nonzero()[:, 0])
            with scoring:
                chosen = tuple(place_N[chosen_N] for place_N in places)
                ids_N = targets.ids_N[chosen_N]
                found.append(self._score_at(hidden_BTD, chosen, ids_N, temperature, Entropy.NONE, None).logprobs_N)
        return TokenScores(torch.cat(found)[torch.cat(numbers).argsort()], None)

    def _score(
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        entropy: Entropy,
        kept: KeptTokens | None,
    ) -> TokenScores:
        """On tensor cores if the layers are too, by autocast; otherwise in the head's own precision."""
        head = self.causal.get_output_embeddings()
        if self._is_as_vllm or not (self._rounds_products(hidden_ND.device) and is_plain_matrix(head)):
            return chunked_scores(
                hidden_ND,
                targets_N,
                partial(self._logits, weight_VD=self._head_weight()),
                temperature=temperature,
                chunk_size=self._chunk_size,
                entropy=entropy,
                kept=kept,
            )
        how = RoundedHead(
            scaling=self._scaling,
            temperature=temperature,
            chunk_size=self._chunk_size,
            entropy=entropy,
            dtype=torch.get_autocast_dtype(hidden_ND.device.type),
            kept=kept,
        )
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return rounded_scores(hidden_ND, self._head_weight(), targets_N, how)

    def _hidden_of_rows(
        self,
        token_ids_BT: torch.Tensor,
        pixels: PixelInputs | None,
        position_ids_BT: torch.Tensor | None,
        router_logits: list[torch.Tensor] | None,
    ) -> torch.Tensor:
        """[B, T - 1, D] those of all ids of a lane but the last."""
        if self._is_as_vllm:
            inputs = {"input_ids": token_ids_BT[:, :-1], "use_cache": False}
            rounded: torch.Tensor = call_rounded(get_backbone(self.causal), torch.bfloat16, **inputs).last_hidden_state
            return rounded
        if pixels is not None:
            return hidden_states(self.causal, token_ids_BT, pixels, router_logits=router_logits)[:, :-1]
        return hidden_states(
            self.causal,
            token_ids_BT[:, :-1],
            position_ids_BT=None if position_ids_BT is None else position_ids_BT[:, :-1],
            by_rows=self.layout is RowLayout.BY_ROWS and len(token_ids_BT) == 1,
            router_logits=router_logits,
            sequence=self.sequence,
        )

    def _hidden_of_tree(
        self, token_ids_BT: torch.Tensor, position_ids_BT: torch.Tensor, ends_T: torch.Tensor
    ) -> torch.Tensor:
        """[1, T, D] those of all nodes. Blocks, and parts, are filled up with nodes that have no relatives."""
        assert self.tree_mask is not None, "plan_rows makes trees only where they are allowed"
        num_nodes = len(ends_T)
        if num_filled := count_filling(num_nodes, self.tree_mask, 1 if self.sequence is None else self.sequence.size):
            token_ids_BT, position_ids_BT = (pad(each, (0, num_filled)) for each in (token_ids_BT, position_ids_BT))
            ends_T = torch.cat([ends_T, torch.arange(num_nodes, num_nodes + num_filled, device=ends_T.device) + 1])
        mask = make_mask(ends_T, self.tree_mask, self.causal.dtype)
        return hidden_states(
            self.causal, token_ids_BT, position_ids_BT=position_ids_BT, mask=mask, sequence=self.sequence
        )

    @property
    def _costs(self) -> Costs:
        return GPU_COSTS if self.causal.device.type == "cuda" else CPU_COSTS

    @staticmethod
    def _rounds_products(device: torch.device) -> bool:
        """Whether products that are not rounded would be slow compared with the others: a CPU has no tensor cores."""
        return device.type == "cuda" and torch.is_autocast_enabled("cuda")

    def _head_weight(self) -> torch.Tensor:
        """The output embeddings' weight, gathered; FSDP2 has the input embeddings' at hand if both are one."""
        causal = self.causal
        head = causal.get_input_embeddings() if self._is_split and self._is_tied else causal.get_output_embeddings()
        weight_VD: torch.Tensor = head.weight
        return weight_VD.full_tensor() if isinstance(weight_VD, DTensor) else weight_VD

    def _logits(self, hidden_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """[N, V] float32 even if the rest is computed in bfloat16, which would round a logit of 20 by up to 0.06."""
        if missing := -hidden_ND.shape[-2] % self._row_multiple:
            return self._logits(pad(hidden_ND, (0, 0, 0, missing)), weight_VD)[..., :-missing, :]
        head, kind = self.causal.get_output_embeddings(), hidden_ND.device.type
        is_exact = self._is_float32 or torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False):
            if self._is_as_vllm:  # which rounds logits, of a vocabulary that it fills up: odd products have other bits
                rounded_VD = weight_VD.to(torch.bfloat16)
                if missing := -len(rounded_VD) % 64:
                    rounded_VD = pad(rounded_VD, (0, 0, 0, missing))
                return to_float32(linear(hidden_ND, rounded_VD)[..., : len(weight_VD)])
            if self._is_split:  # calling the head would gather it again
                dtype = torch.float32 if is_exact else weight_VD.dtype
                return self._scaling.apply(to_float32(linear(hidden_ND.to(dtype), weight_VD.to(dtype))))
            if is_exact and head.weight.dtype != torch.float32:  # below adapters
                whole = {name: parameter.float() for name, parameter in head.named_parameters()}
                return self._scaling.apply(functional_call(head, whole, (hidden_ND.float(),)))
            return self._scaling.apply(to_float32(head(hidden_ND.to(head.weight.dtype))))

    @torch.no_grad()
    def _check_on_few_ids(self, device: torch.device, images: RowImages | None, *, counts_choices: bool) -> None:
        token_ids_1T = choose_probe_ids(NUM_PROBE_IDS, self.vocab_size, device)[None]
        self._check_against_forward(token_ids_1T, None)
        if images is not None:
            self._check_against_forward(*images.example(device))
        if counts_choices:
            self._check_choices(token_ids_1T)

    def _check_against_forward(self, probe_BT: torch.Tensor, pixels: PixelInputs | None) -> None:
        name = type(self.causal).__name__
        inputs = {} if pixels is None else accepted_inputs(self.causal, pixels)
        try:
            with attending_by(self.causal, "eager"):
                logits_BTV = self.model.eval()(input_ids=probe_BT, use_cache=False, **inputs).logits
        except Exception as error:
            if pixels is None:
                raise
            raise InvalidInputError(
                f"{name} must take what the image processor makes of one image, {sorted(inputs)} for "
                f"{probe_BT.shape[1]} ids, got {type(error).__name__}: {error}"
            ) from error
        expected_BTV, tolerance = logits_BTV.float(), get_tolerance(self.causal.dtype, logits_BTV.dtype)
        if (off := self._distance_from(expected_BTV, probe_BT, pixels)) > tolerance:
            raise InvalidInputError(
                f"{name}'s logits are not its output embeddings on its decoder's last hidden state: they differ by "
                f"{off:.2g} of the largest logit. Its forward changes them in a way that is not supported; supported "
                f"are {', '.join(LogitScaling.CONFIG_NAMES)}. Or its attention "
                f"({self.causal.config.get_text_config()._attn_implementation}) differs from eager"
            )
        self.model.train()
        if (off := self._distance_from(expected_BTV, probe_BT, pixels)) > tolerance:
            raise InvalidInputError(
                f"{name} gives other logits in training mode (by {off:.2g} of the largest): its logprobs would not be "
                "those of the policy that sampled. Set every jitter in its config to 0"
            )

    @property
    def _top_k(self) -> int:
        return DecoderConfig(self.causal.config).num_chosen_experts

    @torch.no_grad()
    def _check_choices(self, probe_BT: torch.Tensor) -> None:
        """Check that the balance of experts is the model's own."""
        found = expected = math.nan
        router_logits: list[torch.Tensor] = []
        if self._top_k and hasattr(self.causal.config.get_text_config(), "output_router_logits"):
            outputs = self.causal(input_ids=probe_BT, output_router_logits=True, use_cache=False)
            expected = float(outputs.get("aux_loss") or math.nan)
            hidden_states(self.causal, probe_BT, router_logits=router_logits)
        if router_logits:
            choices_2E = count_choices(router_logits, probe_BT[0] >= 0, self._top_k)
            found = float(balance_loss(choices_2E, choices_2E[1]))
        if not math.isclose(found, expected, rel_tol=get_tolerance(self.causal.dtype)):
            raise InvalidInputError(
                f"{type(self.causal).__name__} must be a mixture of experts with the aux_loss of Mixtral, with "
                "TrainerConfig.router_loss_weight above 0"
            )

    def _distance_from(self, expected: torch.Tensor, probe_BT: torch.Tensor, pixels: PixelInputs | None) -> float:
        hidden_BTD = hidden_states(self.causal, probe_BT, pixels)
        logits = self._logits(hidden_BTD, self._head_weight())
        return float((logits - expected).abs().max() / expected.abs().max())


def _disable_dropout(model: Any) -> None:
    """Set every rate of dropout to 0: logprobs would be those of other policies than the one that sampled."""
    found = [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0 and ("drop" in name or isinstance(module, _DropoutNd))
    ]
    for module, name in found:
        setattr(module, name, 0.0)
    if found:
        _logger.warning("dropout of %s is off, in %d modules: samplers have none", type(model).__name__, len(found))


def _choose_layout(model: Any, packing: Packing, *, has_images: bool) -> RowLayout:
    if packing is Packing.NEVER or (packing is Packing.AUTO and has_images):
        return RowLayout.PADDED
    layout = RowLayout.ONE_LANE if packing is Packing.ONE_LANE else RowLayout.LANES
    reason = "it takes images" if has_images else find_packing_obstacle(model, layout)
    if reason is not None and packing is Packing.ONE_LANE:
        raise InvalidInputError(
            f"{type(model).__name__} cannot be packed: {reason}. TrainerConfig.packing must be auto or never"
        )
    return layout if reason is None else RowLayout.PADDED
