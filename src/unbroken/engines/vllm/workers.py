"""What runs inside vLLM's worker processes: `VllmEngine` names this class as their extension and calls it by RPC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.engines.vllm.scoring import patch_prompt_logprobs

if TYPE_CHECKING:
    import torch

EXTENSION = "unbroken.engines.vllm.workers.WorkerExtension"


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def score_at_temperature(self) -> None:
        """Make prompt logprobs those of their request's temperature; once."""
        patch_prompt_logprobs(self.model_runner)

    def load_weight_files(self, folder: str) -> None:
        """Load the safetensors files in `folder`, which hold all weights under their checkpoint names."""
        self.model_runner.reload_weights(weights_iterator=_read(Path(folder)))
        _pack_heads_again(self.model_runner.get_model())


def _read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # the reader is no dict
                yield name, file.get_tensor(name)


def _pack_heads_again(model: Any) -> None:
    """Renew the packed copy of a tied output head, which vLLM 0.32 leaves as it was on a CPU.

    Its reload packs a layer whose weights came; a tied head's come under the embedding's name. On other devices a head
    multiplies by the embedding itself.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
