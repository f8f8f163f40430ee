"""One reading of configs in which families leave out different fields."""

import pytest
from transformers import GPT2Config, LlavaConfig, MistralConfig, MixtralConfig, Qwen2MoeConfig, Qwen3Config

from unbroken.decoder_config import DecoderConfig


def test_a_family_without_grouped_attention_has_as_many_heads_of_keys_as_of_queries():
    config = DecoderConfig(GPT2Config(n_head=4, n_embd=32, n_positions=64))
    assert (config.num_heads, config.num_key_heads, config.head_size, config.max_positions) == (4, 4, 8, 64)


def test_heads_may_have_another_size_than_their_part_of_the_hidden_states():
    config = DecoderConfig(Qwen3Config(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, head_dim=16))
    assert (config.num_key_heads, config.head_size) == (2, 16)


@pytest.mark.parametrize(("config", "window"), [(MistralConfig(sliding_window=8), 8), (Qwen2MoeConfig(), None)])
def test_a_window_of_none_and_one_of_zero_are_no_window(config, window):
    assert DecoderConfig(config).window == window


@pytest.mark.parametrize(
    ("config", "num_experts", "num_chosen"),
    [(MixtralConfig(num_local_experts=8, num_experts_per_tok=2), 8, 2), (Qwen3Config(), 0, 0)],
)
def test_experts_are_counted_by_whatever_name_the_family_has(config, num_experts, num_chosen):
    found = DecoderConfig(config)
    assert (found.num_experts, found.num_chosen_experts) == (num_experts, num_chosen)


def test_the_whole_config_of_an_image_model_and_that_of_its_text_are_told_apart():
    config = LlavaConfig(tie_word_embeddings=False)
    config.text_config.tie_word_embeddings = True
    found = DecoderConfig(config)
    assert (found.is_tied, found.is_tied_as_whole, found.is_quantized) == (True, False, False)


def test_a_field_that_no_family_has_is_none():
    assert DecoderConfig(Qwen3Config()).get("no_such_field") is None
