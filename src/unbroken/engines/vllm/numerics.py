"""The same bits in vLLM and in a trainer, in bfloat16 on Hopper: both run transformers' modules, by the same kernels.

What vLLM would compute otherwise is switched off: its own models, the compiler, and kernels that choose by the shapes
of a step (`VLLM_BATCH_INVARIANT`). The trainer takes vLLM's attention (`_attend`), its settings of products, and its
means and softmaxes (`share_kernels`). vLLM takes the trainer's norms, products, log_softmax and temperature: torch's,
which on Hopper with these settings do not depend on the number of rows. cuBLASLt has the bits of vLLM's own products in
Triton, at a third of their time for few rows.
"""

from __future__ import annotations

import os
import re
from copy import copy
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig

from unbroken.decoder_config import DecoderConfig
from unbroken.errors import InvalidInputError, missing_extra
from unbroken.exactness import find_other_bits

_AS_VLLM = "unbroken_as_vllm"
"""The name for `set_attn_implementation`."""
_HEADS = (64, 128, 256)
"""Sizes of heads for which FlashAttention 3 was measured to give a row the same bits in any step."""
_LEAST_QUERIES = 129
"""With heads of 64 it takes tiles of another size for steps of few queries."""
_PAGE = 16
_DEGREES = (1, 2, 4)
"""Of tensor parallelism, that were measured."""


def make_exact(args: Any) -> Any:
    """Options of vLLM (`AsyncEngineArgs`) with exact numerics; sets a variable that its processes inherit.

    Raises:
        InvalidInputError: an option, the model or this machine cannot be exact, with its name.
    """
    from vllm.config import CompilationMode

    refused = {
        "tensor_parallel_size": args.tensor_parallel_size not in _DEGREES,
        "pipeline_parallel_size": args.pipeline_parallel_size > 1,
        "data_parallel_size": args.data_parallel_size > 1,
        "quantization": args.quantization is not None,
        "enable_lora": bool(args.enable_lora),
        "speculative_config": args.speculative_config is not None,
        "kv_cache_dtype": args.kv_cache_dtype != "auto",
        "block_size": args.block_size not in (None, _PAGE),
        "dtype": args.dtype not in ("auto", "bfloat16", torch.bfloat16),
        "model_impl": args.model_impl not in ("auto", "transformers"),
        "hf_overrides": bool(args.hf_overrides),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise InvalidInputError(f"numerics must be fast with vLLM's {name} = {getattr(args, name)}, got exact")
    own = {"revision": args.revision, "trust_remote_code": args.trust_remote_code}
    config = AutoConfig.from_pretrained(args.model, **own)
    _check_config(config)
    _check_machine()
    if config.get_text_config() is not config:  # its text alone: the trainer takes no images, so vLLM takes none
        args = replace(args, limit_mm_per_prompt={"image": 0, "video": 0})
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    compilation = copy(args.compilation_config)
    compilation.mode = CompilationMode.NONE  # what the compiler makes of the modules has other bits
    args = replace(args, dtype="bfloat16", model_impl="transformers", block_size=_PAGE, compilation_config=compilation)
    return replace(args, worker_extension_cls=f"{__name__}.ExactWorkerExtension")


def _check_config(config: Any) -> None:
    """Check by its config that trainer and vLLM can compute a model with the same bits.

    Raises:
        InvalidInputError: they cannot, or it is not known, with the part of the config.
    """
    text, size = DecoderConfig(config), DecoderConfig(config).head_size
    rope = (text.get("rope_parameters") or {}).get("rope_type")
    others = sorted(text.layer_kinds - {"full_attention"})
    refused = {
        "an encoder": config.get_text_config() is not config and not hasattr(config, "vision_config"),
        # vLLM ties the head if either says so, transformers if the whole one does
        "tie_word_embeddings in its text_config alone": text.is_tied and not text.is_tied_as_whole,
        "experts": text.num_chosen_experts > 0 or text.num_experts > 0,
        f"layers of {', '.join(others)}": bool(others),
        "a sliding_window": not text.layer_kinds and text.window is not None,
        f"rotary factors of type {rope}": rope in ("longrope", "dynamic"),
        "attn_logit_softcapping": bool(text.get("attn_logit_softcapping")),
        "quantization_config": text.is_quantized,
        f"attention heads of {size}, not of 64, 128 or 256": size not in _HEADS,
    }
    if found := [name for name, is_refused in refused.items() if is_refused]:
        raise InvalidInputError(f"numerics must be fast with vLLM for {config.model_type}, which has {found[0]}")


def _check_machine() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or not current_platform.is_device_capability_family(90):
        raise InvalidInputError(
            f"numerics must be fast in bfloat16 with vLLM on this {current_platform.device_type} device, got exact: "
            "its products and attention were seen to have the same bits in any step only on Hopper GPUs (H100, H200)"
        )


def share_kernels() -> None:
    """Let this process compute by vLLM's batch-invariant products, means and softmaxes; again is harmless.

    cuBLAS reads its settings once, so this comes before the process's first product.

    Raises:
        InvalidInputError: this machine has not the kernels.
    """
    try:
        from vllm.model_executor.determinism.batch_invariant import init_batch_invariance
    except ModuleNotFoundError as error:
        raise missing_extra(error, "exact numerics in bfloat16 need vLLM", "vllm") from error
    _check_machine()
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    init_batch_invariance()


def __getattr__(name: str) -> Any:
    """`ExactWorkerExtension`, which vLLM's worker asks for before it loads the model: ours, of a patched worker."""
    if name != "ExactWorkerExtension":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unbroken.engines.vllm.workers import WorkerExtension

    _patch_worker()
    return WorkerExtension


def _patch_worker() -> None:
    """Let this worker run transformers' modules by the trainer's kernels, and FlashAttention take one kind of tiles.

    Only products of the same input are merged, which changes no bit.
    """
    from vllm.model_executor.layers import layernorm
    from vllm.model_executor.layers import linear as layers
    from vllm.model_executor.layers import vocab_parallel_embedding as head
    from vllm.model_executor.models.transformers import fuser
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder as Builder
    from vllm.v1.worker.gpu.sample import logprob, states

    fuser.FUSERS = (fuser.QKVFuser, fuser.MergedColumnParallelFuser, fuser.RMSNormFuser, fuser.AttentionFuser)
    fuser.RMSNormFuser.validate = _is_plain_norm
    layernorm.rms_norm_batch_invariant = lambda x, w, eps, residual=None: rms_norm(x, tuple(w.shape), w, eps)
    layers.linear_batch_invariant = head.linear_batch_invariant = linear
    logprob.compute_token_logprobs = _compute_logprobs
    states.apply_temperature = _divide
    plain = Builder.build

    def build(self: Any, *arguments: Any, **options: Any) -> Any:
        built = plain(self, *arguments, **options)
        built.max_query_len = max(built.max_query_len, _LEAST_QUERIES)
        built.max_seq_len = self.vllm_config.model_config.max_model_len
        return built

    Builder.build = build


def _compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """As the trainer: vLLM's kernel adds in another order where logits are bfloat16, or part of a wider tensor."""
    return torch.log_softmax(logits.float().contiguous(), dim=-1).gather(1, token_ids.long())


def _divide(logits: torch.Tensor, rows: torch.Tensor, temperatures: torch.Tensor) -> None:
    """As torch divides by a number, in place: vLLM's kernel has a quotient that is not rounded."""
    own = temperatures[rows[: len(logits)]]
    logits.mul_(torch.where(own == 0, 1, own).reciprocal()[:, None])


def _is_plain_norm(self: Any, module: Any, _: Any) -> bool:
    """Whether the trainer has one kernel for it too (`round_norms`): others stay transformers' on both sides."""
    return not self.zero_centered and "weight" in dict(module.named_parameters(recurse=False))


def attend_as_vllm(model: Any, num_parts: int) -> None:
    """Switch a model to vLLM's attention and to products in `num_parts`, its degree of tensor parallelism, and check
    that a row in bfloat16 has the same bits beside another.

    Raises:
        InvalidInputError: it has not, with the name of the module; or its config cannot have them.
    """
    _check_config(model.config)
    if num_parts > 1:
        multiply_in_parts(model, num_parts)
    _compute_rotary_here(model)
    AttentionInterface.register(_AS_VLLM, _attend)
    AttentionMaskInterface.register(_AS_VLLM, _make_no_mask)
    model.set_attn_implementation(_AS_VLLM)
    if model.config.get_text_config()._attn_implementation != _AS_VLLM:
        raise InvalidInputError(f"numerics must be fast for {type(model).__name__}, whose attention is code of its own")
    if (found := find_other_bits(model.get_decoder(), torch.bfloat16)) is not None:
        raise InvalidInputError(
            f"numerics must be fast for {type(model).__name__} in bfloat16: {found} has other bits beside a longer row"
        )


def multiply_in_parts(model: Any, num_parts: int) -> None:
    """Let layers that tensor parallelism cuts by their inputs compute as so many processes of vLLM do.

    Raises:
        InvalidInputError: the model does not say which these are.
    """
    decoder = model.get_decoder()
    plan = "|".join(name for name, style in (decoder.tp_plan or {}).items() if style.startswith("rowwise"))
    if not plan:
        raise InvalidInputError(
            f"numerics must be fast with tensor_parallel_size = {num_parts}: {type(model).__name__} has no tp_plan"
        )
    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Linear) and re.fullmatch(plan, name.removesuffix(".base_layer")):
            module.forward = partial(_add_parts, module, num_parts)  # type: ignore[method-assign]


def _add_parts(module: Any, num_parts: int, x: torch.Tensor) -> torch.Tensor:
    """Each process has a part of the inputs and rounds its product, the first one with the bias; then all are added in
    float32 in the order of their ranks.
    """
    parts = zip(x.chunk(num_parts, -1), module.weight.chunk(num_parts, 1), strict=True)
    pairs = [(own.contiguous(), weight.contiguous()) for own, weight in parts]
    products = [linear(*pairs[0], module.bias), *(linear(*pair) for pair in pairs[1:])]
    return reduce(torch.add, (each.float() for each in products)).to(x.dtype)


@torch.no_grad()
def _compute_rotary_here(model: Any) -> None:
    """Compute the rotary frequencies where the model is, as vLLM does: powers of a CPU differ in their last bit."""
    for module in model.get_decoder().modules():
        if hasattr(module, "inv_freq"):
            with torch.device(model.device):
                same = type(module)(module.config)
            for name, buffer in same.named_buffers():
                module.get_buffer(name).copy_(buffer)


def _make_no_mask(*_: Any, **__: Any) -> None:
    """The kernel is causal, and each row has a lane to itself."""


def _attend(
    module: Any, query: Any, key: Any, value: Any, *_: Any, scaling: float | None = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention of whole rows by vLLM's kernel: [B, H, T, D] over [B, G, T, D], as [B, T, H, D]."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise InvalidInputError(f"numerics must be fast for {type(module).__name__}, whose attention has {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    states = (each.transpose(1, 2).contiguous() for each in (query, key, value))
    attended: torch.Tensor = _Attention.apply(*states, scale)  # type: ignore[no-untyped-call]
    return attended, None


class _Attention(torch.autograd.Function):
    """Forward vLLM's FlashAttention 3, without pages, which change no bit for these heads; backward torch's 2."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        borders, length = _borders(query), query.shape[1]
        attended, sums = flash_attn_varlen_func(
            *(each.flatten(0, 1) for each in (query, key, value)),
            cu_seqlens_q=borders,
            cu_seqlens_k=borders,
            max_seqlen_q=max(length, _LEAST_QUERIES),
            max_seqlen_k=length,
            softmax_scale=scale,
            causal=True,
            window_size=[-1, -1],
            return_softmax_lse=True,
            num_splits=1,
            fa_version=3,
        )
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, attended, sums)
        return attended.view_as(query)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, attended, sums = ctx.saved_tensors
        borders, length = _borders(query), query.shape[1]
        flat = (each.flatten(0, 1) for each in (gradient.contiguous(), query, key, value))
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is off
        found = torch.ops.aten._flash_attention_backward(
            *flat,
            attended,
            sums,
            borders,
            borders,
            length,
            length,
            0.0,
            True,
            state,
            query.new_empty(0),
            scale=ctx.scale,
        )
        return *(each.view_as(own) for each, own in zip(found, (query, key, value), strict=True)), None


def _borders(query: torch.Tensor) -> torch.Tensor:
    """Where each of B rows of T ids begins, and the last ends."""
    num_rows, length = query.shape[:2]
    return torch.arange(0, num_rows * length + 1, length, dtype=torch.int32, device=query.device)
