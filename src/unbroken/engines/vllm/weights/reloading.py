"""Special cases of vLLM 0.32 when weights are loaded into a model that is in use."""

from __future__ import annotations

from typing import Any


def is_loaded_in_place(model: Any, vllm_config: Any) -> bool:
    """Whether the model's own `load_weights` may copy into the weights in use.

    On a GPU, dense layers without quantisation and plain attention keep weights as the checkpoint has them. Everything
    else needs vLLM's layerwise reload, which builds each layer anew from the checkpoint's form and copies it: right for
    all models, but slower, and it takes the memory of one more layer.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or vllm_config.lora_config is not None:
        return False
    if vllm_config.model_config.quantization is not None:
        return False
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in plain:
            return False
        if hasattr(module, "process_weights_after_loading") and type(module) is not Attention:
            return False
    return True


def pack_heads_again(model: Any) -> None:
    """Renew the packed copy of a tied output head, which vLLM 0.32 does not renew on a CPU.

    Its reload packs layers whose weights came; those of a tied head come under the embedding's name. On other devices
    the head multiplies by the embedding itself.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def pack_experts_again(model: Any) -> None:
    """Pack the experts of each layer, which vLLM 0.32 does at the first load only (`_setup_kernel`).

    On a CPU its kernel would read the new weights as if they were packed. Other devices have nothing to pack then.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
