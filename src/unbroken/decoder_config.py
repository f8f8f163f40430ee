"""What the config of a model says of its decoder, with one reading for all families.

transformers gives each family the fields that it needs: Llama's config has no `layer_types`, GPT-2's no
`num_key_value_heads`. A field that is missing and one that is None mean the same, and this is the only place that asks
a config whether it has one.
"""

from __future__ import annotations

from typing import Any

_NUM_EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_CHOSEN_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts", "moe_k")


class DecoderConfig:
    """Reads a transformers config, which may be a whole model's or that of its text alone."""

    def __init__(self, config: Any) -> None:
        self._whole = config
        self._text = config.get_text_config()

    def get(self, name: str) -> Any:
        """A field that only some families have; None without it."""
        return _read(self._text, name)

    @property
    def layer_kinds(self) -> frozenset[str]:
        """As transformers names them, such as full_attention; empty if the config does not say."""
        return frozenset(self.get("layer_types") or ())

    @property
    def window(self) -> int | None:
        """How many ids back layers with a window attend; None without one, which Qwen2-MoE's config says by 0."""
        return self.get("sliding_window") or None

    @property
    def has_chunks(self) -> bool:
        """Whether layers attend within chunks of ids (Llama 4)."""
        return bool(self.get("attention_chunk_size"))

    @property
    def max_positions(self) -> int | None:
        """The longest row; None if positions have no end."""
        return self.get("max_position_embeddings") or None

    @property
    def num_layers(self) -> int:
        """Of the decoder."""
        return int(self._text.num_hidden_layers)

    @property
    def num_heads(self) -> int:
        """Of queries."""
        return int(self._text.num_attention_heads)

    @property
    def num_key_heads(self) -> int:
        """Of keys and values; as many as of queries without grouped attention."""
        return self.get("num_key_value_heads") or self.num_heads

    @property
    def head_size(self) -> int:
        """Numbers in an attention head."""
        return int(self.get("head_dim") or self._text.hidden_size // self.num_heads)

    @property
    def num_experts(self) -> int:
        """In each layer with a router; 0 without experts."""
        return self._find_number(_NUM_EXPERTS_NAMES)

    @property
    def num_chosen_experts(self) -> int:
        """How many a router chooses for each id; 0 without experts."""
        return self._find_number(_NUM_CHOSEN_NAMES)

    @property
    def is_tied(self) -> bool:
        """Whether the text's config says that the output embeddings are the input embeddings."""
        return bool(self.get("tie_word_embeddings"))

    @property
    def is_tied_as_whole(self) -> bool:
        """Whether the whole model's config says so, which transformers goes by."""
        return bool(_read(self._whole, "tie_word_embeddings"))

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint is quantised, which the whole model's config says."""
        return bool(_read(self._whole, "quantization_config"))

    def _find_number(self, names: tuple[str, ...]) -> int:
        values = (self.get(name) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _read(config: Any, name: str) -> Any:
    return getattr(config, name, None)
