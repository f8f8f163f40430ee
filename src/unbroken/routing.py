"""The routers of a mixture-of-experts model of transformers: which experts they choose is recorded and replayed.

transformers has about fifty classes of routers, and nearly all choose by one call of `torch.topk` over the scores of
all experts; what follows (softmax, renormalisation, a gather of unbiased scores, scaling) is each family's own. So only
that call is replaced: in place of the best experts it returns the given ones, with the scores that *this* pass computed
for them. The gates are hence the family's own function of live scores, with their gradients.

    scores of 4 experts          .1 .4 .3 .2
    topk, K = 2                  values .4 .3    indices 1 2
    topk replaying 3 1           values .2 .4    indices 3 1

Which modules are routers is found by a probe of a few ids, which also shows that other experts give other results.

Shapes: N ids of a forward pass, L layers, K experts of an id in a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from unbroken.decoder_config import DecoderConfig
from unbroken.errors import InvalidInputError, InvariantError

LIVE = -1
"""In place of an expert to replay: the id takes those that the router chooses now."""
_NUM_PROBE_IDS = 6
_TOLERANCE = 1e-3
"""Maximum difference of two passes with the same experts, relative to the largest result: kernels may add in any order.
"""
_TOP_K_FUNCTIONS = (torch.topk, torch.Tensor.topk)


@dataclass(slots=True, kw_only=True)
class ReplayCounts:
    """How often the routers chose other experts than those replayed; each counts ids times layers."""

    num_replayed: int = 0
    num_different: int = 0


@dataclass(slots=True, kw_only=True)
class _Pass:
    """What the routers do in one forward pass."""

    experts_NLK: torch.Tensor | None = None
    """Experts to replay, `LIVE` where there are none."""
    chosen: dict[int, torch.Tensor] | None = None
    """The experts [N, K] of each layer, if they are recorded."""
    counts: list[torch.Tensor] | None = field(default=None)
    """One [2] for each router that ran: ids that were replayed, and those whose live ones differ. None: uncounted."""


class Routers:
    """Hooks on the routers of one model, which do nothing outside of `recording` and `replaying`."""

    def __init__(self, by_layer: Mapping[int, nn.Module], *, num_layers: int, num_experts: int, top_k: int) -> None:
        """`by_layer` has the router of each layer that has one. Use `find`."""
        self.layers = tuple(sorted(by_layer))
        """The layers that have experts."""
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.top_k = top_k
        self._pass: _Pass | None = None
        self._counted: torch.Tensor | None = None
        for layer, router in by_layer.items():
            _hook(router, _TopK(self, layer))

    @classmethod
    @torch.no_grad()
    def find(cls, model: Any) -> Routers:
        """Find a model's routers and prove on a few ids that their choice can be replaced.

        Raises:
            InvalidInputError: the model has no experts, or a router that does not choose by one `torch.topk`.
        """
        name = type(model).__name__
        config = DecoderConfig(model.config)
        num_experts, top_k = config.num_experts, config.num_chosen_experts
        if num_experts == 0 or top_k == 0:
            raise InvalidInputError(f"{name} has no routers: its config has no number of experts (num_experts)")
        found = _find_modules(model, num_experts, top_k)
        if not found:
            raise InvalidInputError(
                f"the routers of {name} cannot be replayed: none of its modules chooses {top_k} of {num_experts} "
                "experts by torch.topk"
            )
        by_layer: dict[int, nn.Module] = {}
        for module_name, (module, num_calls) in found.items():
            layer = _find_layer(module_name)
            if layer is None or layer in by_layer or num_calls != 1:
                raise InvalidInputError(
                    f"the routers of {name} cannot be replayed: {module_name} must be the only one of its layer and "
                    f"choose once in a pass, got {num_calls} times"
                )
            by_layer[layer] = module
        routers = cls(by_layer, num_layers=config.num_layers, num_experts=num_experts, top_k=top_k)
        routers._check_on_probe(model)
        return routers

    @contextmanager
    def recording(self) -> Iterator[dict[int, torch.Tensor]]:
        """Record the experts [N, K] of each layer in the passes of the block; the last pass counts."""
        chosen: dict[int, torch.Tensor] = {}
        with self._during(_Pass(chosen=chosen)):
            yield chosen

    @contextmanager
    def replaying(self, experts_NLK: torch.Tensor | None) -> Iterator[None]:
        """Take these experts in the pass of the block, whose N ids are in the order of the model's input, flattened.

        [N, L, K] int16, `LIVE` in all K places where an id shall take the experts that the router chooses. None changes
        nothing.
        """
        if experts_NLK is None:
            yield
            return
        if experts_NLK.shape[1:] != (self.num_layers, self.top_k):
            raise InvariantError(
                f"experts to replay must have the shape [N, {self.num_layers}, {self.top_k}], got "
                f"{tuple(experts_NLK.shape)}: they are of another model"
            )
        counts: list[torch.Tensor] = []
        with self._during(_Pass(experts_NLK=experts_NLK, counts=counts)):
            yield
        if counts:
            of_pass = torch.stack(counts).sum(0)
            self._counted = of_pass if self._counted is None else self._counted + of_pass

    def take_counts(self) -> ReplayCounts:
        """The counts of all passes since the last call."""
        if self._counted is None:
            return ReplayCounts()
        num_replayed, num_different = self._counted.tolist()
        self._counted = None
        return ReplayCounts(num_replayed=num_replayed, num_different=num_different)

    def make_checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The `context_fn` of `torch.utils.checkpoint`: a layer that is computed again takes its pass's experts."""
        current = self._pass
        again = None if current is None else _Pass(experts_NLK=current.experts_NLK)
        return nullcontext(), self._during(again)

    @contextmanager
    def _during(self, current: _Pass | None) -> Iterator[None]:
        before, self._pass = self._pass, current
        try:
            yield
        finally:
            self._pass = before

    def _choose(self, layer: int, scores_NE: torch.Tensor, live: Any) -> Any:
        """The result of a router's `topk`: its own, `live`, or the experts to replay and their scores."""
        current = self._pass
        if current is None:
            return live
        if current.chosen is not None:
            current.chosen[layer] = live.indices
        if current.experts_NLK is None:
            return live
        if len(current.experts_NLK) != len(scores_NE):
            raise InvariantError(
                f"the router of layer {layer} chooses for {len(scores_NE)} ids, and there are experts of "
                f"{len(current.experts_NLK)} to replay"
            )
        given_NK = current.experts_NLK[:, layer].to(live.indices)
        is_given_N1 = given_NK[:, :1] != LIVE
        indices_NK = torch.where(is_given_N1, given_NK, live.indices)
        if current.counts is not None:
            current.counts.append(_compare(given_NK, live.indices, is_given_N1[:, 0]))
        return torch.return_types.topk((scores_NE.gather(-1, indices_NK), indices_NK))

    def _check_on_probe(self, model: Any) -> None:
        with self.recording() as chosen:
            expected = _run_probe(model)
        live_NLK = self.stack(chosen)
        other_NLK = torch.where(live_NLK == LIVE, live_NLK, (live_NLK + 1) % self.num_experts)
        with self.replaying(live_NLK):
            same = _run_probe(model)
        with self.replaying(other_NLK):
            other = _run_probe(model)
        self._counted = None
        off = [float((found - expected).abs().max() / expected.abs().max()) for found in (same, other)]
        tolerance = max(_TOLERANCE, 8 * torch.finfo(expected.dtype).eps)
        if not off[0] <= tolerance or (self.top_k < self.num_experts and not off[1] > off[0]):
            raise InvalidInputError(
                f"the routers of {type(model).__name__} cannot be replayed: with the experts that they chose, results "
                "must be the same, and with others, others; they differ by {off[0]:.2g} and {off[1]:.2g} of the largest"
            )

    def stack(self, chosen: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """[N, L, K] int16 what `recording` found; zeros in layers without experts."""
        first = chosen[self.layers[0]]
        stacked = torch.zeros(len(first), self.num_layers, self.top_k, dtype=torch.int16, device=first.device)
        for layer in self.layers:
            stacked[:, layer] = chosen[layer].to(torch.int16)
        return stacked


class _TopK(TorchFunctionMode):
    """Sees the calls of one router."""

    def __init__(self, routers: Routers, layer: int) -> None:
        super().__init__()
        self._routers = routers
        self._layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        scores = _get_scores(func, args, kwargs, result, self._routers.num_experts, self._routers.top_k)
        return result if scores is None else self._routers._choose(self._layer, scores, result)


class _Finder(TorchFunctionMode):
    """Finds the innermost modules that choose experts, and how often each does."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.stack: list[tuple[str, nn.Module]] = []
        self.found: dict[str, tuple[nn.Module, int]] = {}
        self._sizes = num_experts, top_k

    def leave(self, *_: Any) -> None:
        """A hook: the innermost module has ended."""
        self.stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.stack and _get_scores(func, args, kwargs, result, *self._sizes) is not None:
            name, module = self.stack[-1]
            self.found[name] = module, self.found.get(name, (module, 0))[1] + 1
        return result


def _find_modules(model: Any, num_experts: int, top_k: int) -> dict[str, tuple[nn.Module, int]]:
    finder = _Finder(num_experts, top_k)
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda own, _, name=name: finder.stack.append((name, own))))
        handles.append(module.register_forward_hook(finder.leave, always_call=True))
    try:
        with finder:
            _run_probe(model)
    finally:
        for handle in handles:
            handle.remove()
    return finder.found


def _get_scores(func: Any, args: Any, kwargs: Any, result: Any, num_experts: int, top_k: int) -> torch.Tensor | None:
    """The scores [N, E] if this is the call that chooses K experts; None for all others, such as that of groups."""
    if func not in _TOP_K_FUNCTIONS:
        return None
    scores: torch.Tensor = args[0] if args else kwargs["input"]
    is_choice = scores.dim() == 2 and scores.shape[-1] == num_experts and result.indices.shape[-1] == top_k
    return scores if is_choice else None


def _compare(given_NK: torch.Tensor, live_NK: torch.Tensor, is_given_N: torch.Tensor) -> torch.Tensor:
    """[2] the number of ids that were given experts, and of those whose live ones are others, in any order."""
    with torch.no_grad():
        differs_N = (given_NK.sort(-1).values != live_NK.sort(-1).values).any(-1)
        return torch.stack([is_given_N.sum(), (differs_N & is_given_N).sum()])


def _hook(router: nn.Module, mode: TorchFunctionMode) -> None:
    """Enter `mode` while `router` runs, in any thread, also if it fails or is left early.

    A deep copy of the router has copies of the hooks, which do nothing: it belongs to another model.
    """

    def enter(module: nn.Module, _: Any) -> None:
        if module is router:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, *_: Any) -> None:
        if module is router:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    router.register_forward_pre_hook(enter)
    router.register_forward_hook(leave, always_call=True)


def _run_probe(model: Any) -> torch.Tensor:
    embeddings = model.get_input_embeddings().weight
    ids = torch.arange(1, 1 + _NUM_PROBE_IDS, device=embeddings.device).remainder(len(embeddings))[None]
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _find_layer(module_name: str) -> int | None:
    """`model.layers.3.mlp.gate` is of layer 3."""
    match = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", module_name)
    return None if match is None else int(match[1])
