"""Imports what test files import, before workers of xdist are forked: `support.forks.start_workers_as_forks`.

Not pytest's plugins, whose asserts pytest rewrites, nor vLLM, which changes torch. Nor Ray, which reads its variables
when it is imported: its tests set them first, and the cluster of a fork that had it already refused them.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from contextlib import suppress

import unbroken

_LIBRARIES = (
    "PIL.ImageFont", "accelerate", "aiohttp", "anthropic.types.beta", "cv2", "datasets", "fastapi.testclient", "httpx",
    "hypothesis.stateful", "jsonschema", "mcp.server.mcpserver", "mistral_common.tokens.tokenizers.mistral", "networkx",
    "openai.types", "peft", "psycopg", "schemathesis", "tensorboard.backend.event_processing.event_accumulator",
    "tinker", "torch", "torch._dynamo.testing", "torch._inductor.lowering", "torchvision", "transformers.trainer",
    "transformers.models.auto.processing_auto", "trl", "uvicorn", "websockets.asyncio.server", "xgrammar.testing",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in (
            "cohere", "gemma2", "gemma3", "gpt2", "gpt_neox", "granite", "idefics3", "internvl", "llama", "llava",
            "llava_next", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl",
            "qwen3", "qwen3_moe", "qwen3_vl",
        )
    ),
)  # fmt: skip

_OF_RAY = "unbroken.cluster."


def _import_all() -> None:
    """One that is not installed is missed by the tests that need it."""
    for name in _LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as where a test imports them first
        for module in pkgutil.walk_packages(unbroken.__path__, "unbroken."):
            if "vllm" not in module.name and not module.name.startswith(_OF_RAY) and "__main__" not in module.name:
                with suppress(ImportError):
                    importlib.import_module(module.name)


_import_all()
