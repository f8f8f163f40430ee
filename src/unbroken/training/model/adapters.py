"""LoRA adapters of PEFT: checks, the base model, and weights with the adapters merged.

    in memory    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight          W [32, 32]
                 base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight      A [4, 32]
                 base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight      B [32, 4]
    merged       model.layers.0.self_attn.q_proj.weight                                      W + scaling * B A

PEFT is imported only for a `peft.PeftModel`.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import linear
from transformers.integrations import PeftAdapterMixin

from unbroken.errors import InvalidInputError
from unbroken.training.model.lanes import RowPass
from unbroken.training.model.tree import Ids
from unbroken.weights.adapters import A, B

_BLOCK = 4 << 20
"""Elements that a checksum adds at a time: 32 MB as int64."""

_WRAPPERS = ("_checkpoint_wrapped_module.",)
ADAPTER_NAMES = ("lora_", ".modules_to_save.")
"""Parts of the names of all parameters that PEFT adds."""
_UNCHANGED_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `LoraConfig.init_lora_weights` that leave the base unchanged; PiSSA and others subtract from it."""

_PLAIN = {"use_dora": False, "lora_bias": False, "fan_in_fan_out": False, "bias": "none"}
"""Options of `LoraConfig` with which an adapter is B A alone."""


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def strip_wrappers(name: str) -> str:
    """The name of a parameter or module without the parts that wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_adapted(model: Any) -> bool:
    """Whether the model is a `peft.PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def causal_lm(model: Any) -> Any:
    """The Hugging Face model that PEFT wraps, with the layers that it replaced."""
    return model.get_base_model() if is_adapted(model) else model


def check_adapters(model: Any) -> None:
    """Check that the merged weights of a model with adapters are exactly those that are trained.

    Raises:
        InvalidInputError: an adapter that is not a LoRA on linear layers and embeddings or a whole module
            (`modules_to_save`), dropout, a quantised base, or adapters on tied embeddings.
    """
    if not is_adapted(model):
        if isinstance(model, PeftAdapterMixin) and model._hf_peft_config_loaded:
            raise InvalidInputError(
                f"{type(model).__name__} has adapters from add_adapter: give the trainer "
                "peft.get_peft_model(model, config) instead"
            )
        return
    for name in model.active_adapters:
        _check_lora(name, model.peft_config[name])
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise InvalidInputError(f"{name} is {parameter.dtype}: adapters of a quantised base do not merge exactly")
    _check_tied(causal_lm(model))


def _check_lora(name: str, config: Any) -> None:
    from peft import PeftType

    if config.peft_type != PeftType.LORA:
        raise InvalidInputError(f"adapter {name!r} must be a LoRA, got {config.peft_type.value}")
    for option in ("alora_invocation_tokens", "target_parameters", "trainable_token_indices"):
        if getattr(config, option):
            raise InvalidInputError(f"adapter {name!r} must not have LoraConfig.{option}: how it merges is untested")
    if config.lora_dropout > 0:
        raise InvalidInputError(
            f"adapter {name!r} must have LoraConfig.lora_dropout 0, got {config.lora_dropout}: its logprobs would "
            "not be those of the policy that sampled"
        )


def check_base(model: Any) -> None:
    """Check that the model without its adapters is the policy before training.

    Raises:
        InvalidInputError: there are no adapters, the base is trained too, or creating the adapters changed it.
    """
    if not is_adapted(model):
        raise InvalidInputError(
            f"reference must be a model for a {type(model).__name__}: Reference.BASE is the base of a peft.PeftModel"
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not any(part in name for part in ADAPTER_NAMES):
            raise InvalidInputError(
                f"{name} must not be trained with Reference.BASE, because it belongs to the base "
                "(LoraConfig.bias and requires_grad_ decide that)"
            )
    for name in model.active_adapters:
        if (start := model.peft_config[name].init_lora_weights) not in _UNCHANGED_BASE:
            raise InvalidInputError(
                f"adapter {name!r} must not change the base with Reference.BASE, and "
                f"LoraConfig.init_lora_weights {start!r} changes its weights: give a copy of the model as reference"
            )


class BasePolicy:
    """The `PolicyLogprobs` of a model, sharded or not, with its adapters switched off; only for scoring."""

    def __init__(self, policy: Any, model: Any) -> None:
        self._policy = policy
        self._model = model

    def __call__(self, *inputs: Any) -> Any:
        """Compute the `TokenScores` that `PolicyLogprobs.forward` computes."""
        with _disable_adapters(self._model):
            return self._policy(*inputs)

    def plan_rows(self, rows: Sequence[Ids], tokens_per_pass: int) -> list[RowPass]:
        """Put rows into lanes and passes."""
        passes: list[RowPass] = self._policy.plan_rows(rows, tokens_per_pass)
        return passes


def fuse_adapters(model: Any) -> int:
    """Let plain LoRA layers compute under autocast in its type alone, and return how many; again is harmless.

        PEFT    x to float32, to bfloat16 for A, B(A x) times scaling, added: 3 passes over x and 3 over the result
        here    x to bfloat16 once for all layers that get it; scaling and sum are in the product with B (`addmm`)

    A and B stay float32 where they are trained; the sum is rounded once. Without autocast, merged, switched off, or
    with several adapters, DoRA or hooks on the base layer, PEFT's own code computes.
    """
    if not is_adapted(model):
        return 0
    from peft.tuners.lora.layer import Linear

    found = [m for m in model.modules() if type(m) is Linear and type(m.get_base_layer()) is nn.Linear]
    inputs = _RoundedInputs()
    for module in found:
        module._rounded_inputs = inputs
        module.forward = MethodType(_forward_fused, module)
    return len(found)


def merge_in_passes(model: Any, *, scales_b: bool = False) -> int:
    """Let LoRA layers compute with W + scaling * B A, as a sampler with merged weights does; returns how many.

    With `scales_b` it is W + (scaling B) A, as a sampler has it that got the adapter alone and has merged it: the last
    bit is another one where the scaling is no power of two.

    Raises:
        InvalidInputError: an adapter changes another layer than a linear one, is more than A and B (DoRA, a bias of B),
            or is merged already; or there are several.
    """
    if not is_adapted(model):
        return 0
    from peft.tuners.lora.layer import Linear

    if len(model.active_adapters) != 1:
        raise InvalidInputError(f"numerics must be fast with several active adapters, got {model.active_adapters}")
    (active,) = model.active_adapters
    layers = list(_adapted_layers(model))
    for name, layer in layers:
        if type(layer) is not Linear or type(layer.get_base_layer()) is not nn.Linear:
            raise InvalidInputError(f"numerics must be fast with an adapter of {name}, which is no linear layer")
        if layer.merged or active in layer.lora_variant or layer.lora_B[active].bias is not None:
            raise InvalidInputError(
                f"numerics must be fast with the adapter of {name}: it is merged, or more than A and B"
            )
        layer.forward = partial(_forward_merged, layer, scales_b=scales_b)
    return len(layers)


def _forward_merged(self: Any, x: torch.Tensor, *, scales_b: bool) -> torch.Tensor:
    base = self.get_base_layer()
    names = () if self.disable_adapters else self.active_adapters
    with torch.no_grad():
        changes = [
            _scale_b(self, name) @ self.lora_A[name].weight if scales_b else self.get_delta_weight(name)
            for name in names
        ]
    merged = {**dict(base.named_parameters()), "weight": sum(changes, base.weight)}
    output: torch.Tensor = functional_call(base, {name: each.to(x.dtype) for name, each in merged.items()}, (x,))
    for name in names:
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        output = _LowRankGradient.apply(output, x, a, b, self.scaling[name])  # type: ignore[no-untyped-call]
    return output


class _LowRankGradient(torch.autograd.Function):
    """Lets the gradient of outputs [..., E] by W + scaling B A of inputs [..., D] reach A [R, D] and B [E, R].

    By products of rank R: through the sum, W's own gradient would be computed first, a product as large as the others.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *given: Any) -> torch.Tensor:
        *tensors, ctx.scaling = given
        ctx.save_for_backward(*tensors)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        x_ND, out_NE = x.flatten(0, -2), gradient.flatten(0, -2)
        of_a = (out_NE @ b.to(x.dtype)).T @ x_ND
        of_b = out_NE.T @ (x_ND @ a.to(x.dtype).T)
        return gradient, None, of_a.to(a.dtype) * ctx.scaling, of_b.to(b.dtype) * ctx.scaling, None


class _RoundedInputs:
    """The last input of a layer in a smaller type, for the next layers that get it too (queries, keys, values)."""

    def __init__(self) -> None:
        self._exact: Any = None
        self._rounded: torch.Tensor | None = None

    def round(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The input in this type, kept as long as `x` is in use."""
        if x.dtype == dtype or torch.compiler.is_compiling():  # the compiler finds equal casts itself
            return x.to(dtype)
        last = self._rounded if self._exact is not None and self._exact() is x else None
        if last is None or last.dtype != dtype or last.requires_grad != (x.requires_grad and torch.is_grad_enabled()):
            last = x.to(dtype)
            self._exact, self._rounded = weakref.ref(x, self._forget), last
        return last

    def _forget(self, exact: Any) -> None:
        if exact is self._exact:
            self._exact = self._rounded = None


def _forward_fused(self: Any, x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    kind, base, names = x.device.type, self.get_base_layer(), self.active_adapters
    if arguments or options or not torch.is_autocast_enabled(kind) or not _is_plain(self, base, names):
        own: torch.Tensor = type(self).forward(self, x, *arguments, **options)
        return own
    (name,) = names
    a_RD, b_ER = self.lora_A[name].weight, self.lora_B[name].weight
    rounded = self._rounded_inputs.round(x, torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):
        fused: torch.Tensor = _AdaptedLinear.apply(rounded, base.weight, base.bias, a_RD, b_ER, self.scaling[name])  # type: ignore[no-untyped-call]
        return fused


def _is_plain(layer: Any, base: nn.Linear, names: Sequence[str]) -> bool:
    """Whether the layer's result is base(x) + scaling * B A x, and its base is frozen and not looked at by hooks."""
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] not in layer.lora_A:
        return False
    name = names[0]
    if name in layer.lora_variant or layer.lora_B[name].bias is not None:
        return False
    if type(layer.lora_dropout[name]) is not nn.Identity or any(own.requires_grad for own in base.parameters()):
        return False
    parts = (base, layer.lora_A[name], layer.lora_B[name])
    return not any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in parts)


class _AdaptedLinear(torch.autograd.Function):
    """x W' + bias + scaling * (x A') B' in the type of x. Shapes: N inputs, D wide; E outputs; R the rank."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_ED: torch.Tensor,
        bias_E: torch.Tensor | None,
        a_RD: torch.Tensor,
        b_ER: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        x_ND = x.reshape(-1, x.shape[-1])
        rounded_a, rounded_b = a_RD.to(x.dtype), b_ER.to(x.dtype)
        inner_NR = torch.mm(x_ND, rounded_a.T)
        out_NE = linear(x_ND, weight_ED.to(x.dtype), None if bias_E is None else bias_E.to(x.dtype))
        out_NE = torch.addmm(out_NE, inner_NR, rounded_b.T, alpha=scaling)
        ctx.save_for_backward(x_ND, weight_ED, rounded_a, rounded_b, inner_NR)
        ctx.scaling, ctx.shape, ctx.dtypes = scaling, x.shape, (a_RD.dtype, b_ER.dtype)
        return out_NE.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_ND, weight_ED, rounded_a, rounded_b, inner_NR = ctx.saved_tensors
        gradient_NE = gradient.reshape(-1, gradient.shape[-1])
        of_inner_NR = torch.mm(gradient_NE, rounded_b).mul_(ctx.scaling)
        of_a = torch.mm(of_inner_NR.T, x_ND).to(ctx.dtypes[0])
        of_b = torch.mm(gradient_NE.T, inner_NR).to(ctx.dtypes[1]).mul_(ctx.scaling)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.mm(gradient_NE, weight_ED.to(x_ND.dtype))
            of_x = torch.addmm(of_x, of_inner_NR, rounded_a).view(ctx.shape)
        return of_x, None, None, of_a, of_b, None


def keep_residual_exact(model: Any) -> None:
    """Let a model whose embeddings are bfloat16 add up its layers in float32 under autocast, as one does whose weights
    are float32: only products are rounded, and logprobs are those of the same weights in float32. Again is harmless.
    """
    embeddings = causal_lm(model).get_input_embeddings()
    if embeddings.weight.dtype != torch.float32 and _to_exact not in embeddings._forward_hooks.values():
        embeddings.register_forward_hook(_to_exact)


def _to_exact(module: Any, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
    return embedded.float() if torch.is_autocast_enabled(embedded.device.type) else embedded


def merge_parameters(model: Any, *, gather: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter of the base once, by the base's own name, with the active adapters merged into copies, one layer
    at a time. `gather` gathers a sharded parameter.
    """
    seen: set[int] = set()
    for name, parameter, tensor in _merge_module(causal_lm(model), "", gather):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, tensor


def check_adapter_alone(model: Any) -> None:
    """Check that an engine's base with the adapter on top is exactly the model that is trained.

    Raises:
        InvalidInputError: the model has no adapters or several active ones, one that is not a plain LoRA of linear
            layers or that changes the base, or parameters of the base are trained too.
    """
    rule = "with lora_updates adapter"
    if not is_adapted(model):
        raise InvalidInputError(
            f"model must be a peft.PeftModel {rule}, got a {type(model).__name__}: it has no adapter"
        )
    if len(model.active_adapters) != 1:
        raise InvalidInputError(f"the model must have one active adapter {rule}, got {list(model.active_adapters)}")
    (active,) = model.active_adapters
    _check_adds_alone(active, model.peft_config[active], rule)
    parts = {f"{name}.{part}.{active}.weight" for name, _ in _adapted_layers(model) for part in ("lora_A", "lora_B")}
    for name, parameter in causal_lm(model).named_parameters():
        if parameter.requires_grad and strip_wrappers(name) not in parts:
            raise InvalidInputError(
                f"{name} must not be trained {rule}: engines get the matrices of linear layers alone. Publish merged "
                "weights"
            )


def _check_adds_alone(name: str, config: Any, rule: str) -> None:
    """Refuse an adapter that does more than add B A to weights, which is all that an engine does."""
    for option, plain in _PLAIN.items():
        if (value := getattr(config, option)) != plain:
            raise InvalidInputError(
                f"adapter {name!r} must have LoraConfig.{option} {plain!r} {rule}, got {value!r}: an engine adds B A "
                "to a weight and nothing else. Publish merged weights"
            )
    if config.init_lora_weights not in _UNCHANGED_BASE:
        raise InvalidInputError(
            f"adapter {name!r} must not change the base {rule}, and LoraConfig.init_lora_weights "
            f"{config.init_lora_weights!r} changes its weights, which engines do not get: publish merged weights"
        )


def gather_adapter(model: Any, *, gather: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of the active adapter as `weights.adapters` names them; see `merge_parameters`."""
    (active,) = model.active_adapters
    for name, layer in _adapted_layers(model):
        yield name + A, gather(layer.lora_A[active].weight)
        yield name + B, _scale_b(layer, active, gather=gather)


def _scale_b(layer: Any, name: str, *, gather: Any = _itself) -> Any:
    """B as engines get it."""
    return gather(layer.lora_B[name].weight) * layer.scaling[name]


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The layers that have the active adapter, by the base's own names of them."""
    from peft.tuners.lora import LoraLayer

    (active,) = model.active_adapters
    for name, module in causal_lm(model).named_modules():
        if isinstance(module, LoraLayer) and active in module.lora_A:
            yield strip_wrappers(name), module


def checksum_of_frozen(model: Any, *, gather: Any = _itself) -> str:
    """A checksum of all parameters that are not trained: whether a checkpoint of adapters is of this base.

    Sums of the bits of each parameter, where it is: a GPU reads 33 GB in a fraction of a second, and one core
    took 20 seconds for their CRC-32. Any changed bit changes it, and so do rows or columns that change places. `gather`
    gathers a sharded parameter.
    """
    others = [f".{name}." for name in _list_idle(model)]
    frozen = [
        (strip_wrappers(name), own)
        for name, own in model.named_parameters()
        if not own.requires_grad and not any(other in name for other in others)
    ]
    return checksum_of(frozen, gather=gather)


def _list_idle(model: Any) -> list[str]:
    """The adapters that are not active: of other policies, which are trained in their turns."""
    return [name for name in model.peft_config if name not in model.active_adapters] if is_adapted(model) else []


@contextmanager
@torch.no_grad()
def with_matrices(model: Any, matrices: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let the active adapter compute with others of its matrices, which are those of `gather_adapter`."""
    (active,) = model.active_adapters
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    scalings: list[tuple[dict[str, float], float]] = []
    for name, layer in _adapted_layers(model):
        a, b = layer.lora_A[active].weight, layer.lora_B[active].weight
        own += [(a, a.clone()), (b, b.clone())]
        scalings.append((layer.scaling, layer.scaling[active]))
        a.copy_(matrices[name + A])
        b.copy_(matrices[name + B])
        layer.scaling[active] = 1.0  # it is in these already, and B / scaling * scaling would have other bits
    try:
        yield
    finally:
        for parameter, values in own:
            parameter.copy_(values)
        for scaling, value in scalings:
            scaling[active] = value


def checksum_of(named: Sequence[tuple[str, torch.Tensor]], *, gather: Any = _itself) -> str:
    """A checksum of tensors by sums of their bits, as `checksum_of_frozen` says."""
    digest = hashlib.sha256()
    sums = [_sum_bits(gather(tensor.detach())) for _, tensor in named]
    totals = torch.stack(sums).tolist() if sums else []
    for (name, tensor), of_tensor in zip(named, totals, strict=True):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {of_tensor}".encode())
    return digest.hexdigest()[:16]


def _sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """[4] sums of the bits as integers, modulo 2^64: of all, and of rows and columns, each times its number.

    A block at a time, because torch adds copies in int64: of a whole tensor these have 2 to 8 times its bytes.
    """
    rows = tensor.contiguous().view(len(tensor) if tensor.dim() > 1 else 1, -1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = rows.view(kinds[tensor.element_size()])
    num_rows, num_columns = bits.shape
    height = max(1, _BLOCK // max(1, num_columns))
    totals = torch.zeros(4, dtype=torch.int64, device=tensor.device)
    for top in range(0, num_rows, height):
        for left in range(0, num_columns, _BLOCK):
            block = bits[top : top + height, left : left + _BLOCK].to(torch.int64)
            of_rows, of_columns = block.sum(-1), block.sum(0)
            places = torch.arange(top + 1, top + 1 + len(of_rows), device=tensor.device)
            columns = torch.arange(left + 1, left + 1 + len(of_columns), device=tensor.device)
            by_place = of_rows * places
            sums = [of_rows.sum(), by_place.sum(), (by_place * places).sum(), (of_columns * columns).sum()]
            totals += torch.stack(sums)
    return totals


def _merge_module(module: Any, prefix: str, gather: Any) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Names, their parameters, and merged values; a tied parameter comes under each of its names."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        yield from _merge_module(module.modules_to_save[module.active_adapters[0]], prefix, gather)
    elif isinstance(module, BaseTunerLayer):
        originals = dict(module.get_base_layer().named_parameters())
        for name, tensor in _copy_and_merge(module, gather).named_parameters():
            yield prefix + name, originals[name], tensor.detach()
    else:
        for name, parameter in module.named_parameters(recurse=False):
            yield prefix + name, parameter, gather(parameter)
        for name, child in module.named_children():
            yield from _merge_module(child, f"{prefix}{name}.", gather)


def _copy_and_merge(layer: Any, gather: Any) -> Any:
    """The base layer of a copy of `layer`, with the adapters merged into it by PEFT."""
    base = {id(parameter) for parameter in layer.get_base_layer().parameters()}
    copies: dict[int, Any] = {}
    for parameter in layer.parameters():
        tensor = gather(parameter)
        tensor = tensor.clone() if id(parameter) in base else tensor  # PEFT merges into the base in place
        copies[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
    copied = copy.deepcopy(layer, copies)
    copied.merge()
    return copied.get_base_layer()


@contextmanager
def _disable_adapters(model: Any) -> Iterator[None]:
    """PEFT's `disable_adapter`, without changing requires_grad, which sharded parameters do not allow."""
    requires_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    def restore() -> None:
        for name, parameter in model.named_parameters():
            if name in requires_grad:  # FSDP2 has gathered tied parameters apart
                parameter.requires_grad_(requires_grad[name])

    try:
        with model.disable_adapter():
            restore()
            yield
    finally:
        restore()


def _check_tied(causal: Any) -> None:
    """Check that adapters leave tied embeddings alone: an engine has one weight for both."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if not causal.config.get_text_config().tie_word_embeddings:
        return
    for part in (causal.get_input_embeddings(), causal.get_output_embeddings()):
        if isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise InvalidInputError(
                f"adapters must leave the tied embeddings of {type(causal).__name__} alone: merged, input and output "
                "embeddings would differ, and an engine has one weight for both. Remove them from "
                "LoraConfig.target_modules and modules_to_save, or untie them before"
            )
