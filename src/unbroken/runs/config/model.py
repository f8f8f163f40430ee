"""How the model is trained, and how its prompts are rendered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.rendering.base import HistoryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA adapters, which are trained instead of the whole model; `trainer.lora_updates` is what engines get."""

    rank: int = 16
    alpha: float = 32.0
    """The adapters are scaled by alpha / rank."""
    modules: tuple[str, ...] = ()
    """Names of the modules to adapt, such as q_proj,v_proj; empty: all linear layers."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise InvalidInputError(f"rank must be >= 1 and alpha > 0, got {self.rank} and {self.alpha}")


class Precision(StrEnum):
    """A type of the model's layers."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Attention(StrEnum):
    """An implementation of attention in transformers."""

    EAGER = "eager"
    SDPA = "sdpa"
    FLEX = "flex_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """How the model is loaded, for the policy and its reference alike."""

    attn_implementation: Attention | None = None
    """None: transformers' choice (sdpa), and eager for a model with soft caps or sinks, which sdpa leaves out.
    flex_attention is compiled on a GPU; the embedded engine then has eager."""
    dtype: Precision = Precision.FLOAT32
    """The type of the weights. Those that are trained are float32; with lora, bfloat16 is for those below the adapters.
    """
    revision: str | None = None
    """The branch, tag or commit of a model on the hub, for its tokenizer and the started engine too."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of from_pretrained; with the embedded engine, fields of the model's config too."""

    def __post_init__(self) -> None:
        if refused := sorted(_NOT_KWARGS.intersection(self.kwargs)):
            raise InvalidInputError(
                f"kwargs must be without {', '.join(refused)}: model_settings has fields of its own for some, the "
                "trainer places the model and trains its weights as they are, and models are those that transformers "
                f"has, got {dict(self.kwargs)}"
            )


_NOT_KWARGS = frozenset(
    {"attn_implementation", "config", "device_map", "dtype", "quantization_config", "revision", "torch_dtype",
     "tp_plan", "trust_remote_code"}
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererConfig:
    """How messages become token ids; see docs/renderers.md."""

    name: str = "auto"
    """auto: the model's own chat template; pkg:NAME: a renderer of the package `renderers`."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, e.g. {enable_thinking = false}."""
    history: HistoryPolicy = HistoryPolicy.EXACT
    parser: str | None = None
    """The format of completions, instead of the one found in the template."""
    image_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the model's image processor, e.g. {max_pixels = 200704}."""
