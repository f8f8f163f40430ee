"""What a run needs of a GPU is estimated before anything is loaded; the table of docs/models.md is the estimate."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.adapted import with_lora
from support.models import tiny_qwen3
from unbroken.training.config import OptimizerConfig, OptimizerName, TrainerConfig
from unbroken.training.memory import (
    GIB,
    Layout,
    ModelSizes,
    describe_shortage,
    estimate_memory,
    fits_beside_engine,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
SHAPES = {
    "Qwen3-0.6B": (1024, 28, 16, 3072, True),
    "Qwen3-1.7B": (2048, 28, 16, 6144, True),
    "Qwen3-4B": (2560, 36, 32, 9728, True),
    "Qwen3-8B": (4096, 36, 32, 12_288, False),
    "Qwen3-14B": (5120, 40, 40, 17_408, False),
    "Qwen3-32B": (5120, 64, 64, 25_600, False),
}
"""Hidden size, layers, heads, width of the MLP, and whether embeddings are tied."""
PLAIN, CHECKPOINTED = TrainerConfig(), TrainerConfig(gradient_checkpointing=True)
WHOLE, LORA = Layout(), Layout(lora_rank=32)
H100, H200 = 79 * GIB, 139 * GIB
WAYS = [
    (device, config, layout) for device in (H100, H200) for layout in (WHOLE, LORA) for config in (PLAIN, CHECKPOINTED)
] + [(H100, CHECKPOINTED, Layout(fsdp=8))]


@cache
def sizes_of(name) -> ModelSizes:
    hidden_size, num_layers, heads, mlp, is_tied = SHAPES[name]
    with torch.device("meta"):
        model = Qwen3ForCausalLM(
            Qwen3Config(
                hidden_size=hidden_size,
                num_hidden_layers=num_layers,
                num_attention_heads=heads,
                num_key_value_heads=8,
                head_dim=128,
                intermediate_size=mlp,
                vocab_size=151_936,
                tie_word_embeddings=is_tied,
            )
        )
    return ModelSizes.of(model)


def cell(name, device, config, layout) -> str:
    found = estimate_memory(sizes_of(name), config, layout, device_bytes=device)
    return f"{found.total / GIB:.0f} ({found.num_ids:,})" if found.total <= device else "-"


def test_the_table_of_the_documentation_is_the_estimate():
    lines = ["| " + " | ".join([name, *(cell(name, *way) for way in WAYS)]) + " |" for name in SHAPES]
    assert "\n".join(lines) in DOCUMENT.read_text("utf-8"), "\n".join(lines)


MEASURED = [
    ("Qwen3-4B", PLAIN, WHOLE, 6_144, 107.1),
    ("Qwen3-4B", CHECKPOINTED, WHOLE, 12_288, 75.4),
    ("Qwen3-8B", CHECKPOINTED, LORA, 32_768, 41.8),
    ("Qwen3-8B", CHECKPOINTED, replace(LORA, sequence=2), 32_768, 29.0),
    ("Qwen3-8B", CHECKPOINTED, replace(LORA, sequence=2), 131_072, 68.1),
]
"""GiB at the peak of a step, of 8B without its optimizer's, on each of the H200s (docs/lab-notes)."""


@pytest.mark.parametrize(("name", "config", "layout", "num_ids", "gib"), MEASURED)
def test_the_estimate_is_within_a_tenth_of_what_was_measured(name, config, layout, num_ids, gib):
    found = estimate_memory(sizes_of(name), config, layout, device_bytes=H200, num_ids=num_ids)
    assert found.total / GIB == pytest.approx(gib, rel=0.1)


def test_an_id_of_a_4b_model_needs_what_was_measured():
    few, many = (
        estimate_memory(sizes_of("Qwen3-4B"), PLAIN, WHOLE, device_bytes=H200, num_ids=number)
        for number in (1_000, 2_000)
    )
    assert (many.of_pass - few.of_pass) / 1_000 / 2**20 == pytest.approx(5.69, rel=0.02)


def test_processes_that_share_the_ids_of_rows_need_a_part_of_a_pass_and_all_of_the_rest():
    sizes, number = sizes_of("Qwen3-8B"), 65_536

    def estimate(sequence, num_ids=number):
        layout = replace(LORA, sequence=sequence)
        return estimate_memory(sizes, PLAIN, layout, device_bytes=H200, num_ids=num_ids)

    def of_id(sequence):
        """Bytes of an id of the whole pass; of logits there are as many as before."""
        return estimate(sequence, 2 * number).of_pass - estimate(sequence).of_pass

    alone, two = estimate(1), estimate(2)
    assert replace(two, of_pass=0) == replace(alone, of_pass=0)
    result = 2 * sizes.queries * sizes.num_layers * number  # of attention, by heads and by ids
    assert of_id(2) == (of_id(1) + result) / 2
    assert of_id(4) == of_id(2) / 2
    repeated = 2 * 2 * sizes.keys * sizes.num_layers * number  # sixteen processes have a head of keys each, of eight
    assert of_id(16) == of_id(8) / 2 + repeated / 16


def test_adapters_are_counted_as_peft_makes_them():
    model = with_lora(tiny_qwen3(), target_modules="all-linear", r=4)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert ModelSizes.of(tiny_qwen3()).adapter_widths * 4 == trained
    some = with_lora(tiny_qwen3(), target_modules=["q_proj"], r=4)
    trained = sum(parameter.numel() for parameter in some.parameters() if parameter.requires_grad)
    assert ModelSizes.of(tiny_qwen3(), modules=["q_proj"]).adapter_widths * 4 == trained


def test_a_shortage_names_the_numbers_and_the_settings_that_help_most_first():
    text = describe_shortage(sizes_of("Qwen3-8B"), PLAIN, WHOLE, device_bytes=H100)
    assert text is not None
    assert text.startswith(
        "about 149.1 GiB are needed on a GPU of 79.0 GiB: weights 30.5, gradients 30.5, optimizer 61.0"
    )
    places = [
        text.index(name) for name in ("lora.rank = 16", "trainer.optimizer.name", "trainer.gradient_checkpointing")
    ]
    assert places == sorted(places)
    assert describe_shortage(sizes_of("Qwen3-8B"), PLAIN, LORA, device_bytes=H100) is None


def test_an_engine_that_samples_needs_its_share_beside_weights_and_optimizer():
    layout = replace(WHOLE, engine_share=0.9)
    found = estimate_memory(sizes_of("Qwen3-1.7B"), PLAIN, layout, device_bytes=H100)
    assert found.total > H100
    text = describe_shortage(sizes_of("Qwen3-1.7B"), PLAIN, layout, device_bytes=H100)
    assert text is not None
    assert 'engine.options = ["--gpu-memory-utilization", "0.3"]' in text


@pytest.mark.parametrize(
    ("name", "share", "longest_row", "fits"),
    [
        ("Qwen3-0.6B", 0.3, 8_192, True),
        ("Qwen3-0.6B", 0.6, 8_192, False),  # the engine's share
        ("Qwen3-0.6B", 0.3, 65_536, False),  # a row that is a pass by itself
        ("Qwen3-4B", 0.2, 8_192, False),  # weights and optimizer
    ],
)
def test_an_engine_may_stay_awake_where_a_step_fits_beside_it(name, share, longest_row, fits):
    layout = replace(WHOLE, engine_share=share)
    assert fits_beside_engine(sizes_of(name), PLAIN, layout, device_bytes=H100, longest_row=longest_row) == fits


def test_each_choice_needs_what_it_says():
    sizes = sizes_of("Qwen3-8B")

    def estimate(config=PLAIN, layout=LORA):
        return estimate_memory(sizes, config, layout, device_bytes=H200)

    assert estimate(layout=replace(LORA, is_base_exact=True)).weights > 1.9 * estimate().weights
    assert estimate(layout=replace(LORA, num_copies=1)).copies == pytest.approx(2 * sizes.num_parameters)
    whole, eighth = estimate(layout=WHOLE), estimate(layout=Layout(fsdp=8))
    assert eighth.optimizer == pytest.approx(whole.optimizer / 8)
    small = OptimizerConfig(name=OptimizerName.ADAMW_8BIT)
    assert estimate(TrainerConfig(optimizer=small), WHOLE).optimizer == pytest.approx(whole.optimizer / 4)
    assert estimate(TrainerConfig(tokens_per_micro_batch=1_000)).num_ids == 1_000
