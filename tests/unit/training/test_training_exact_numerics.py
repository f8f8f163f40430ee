"""`Numerics.EXACT`: the trainer's logprobs have the sampler's bits, for any dense model, and each step proves it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from support.adapted import with_lora
from support.architectures import tiny_model
from support.gradients import SUBTRACT_GRADIENT
from support.models import tiny_qwen3
from support.rollouts import play_turns
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.errors import InvalidInputError, InvariantError
from unbroken.training.config import LoraUpdates, OptimizerConfig, Packing, SharedPrefixes, TrainerConfig
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.trainer import Trainer
from unbroken.types import Numerics, SamplingParams, TrainingSample
from unbroken.weights.base import InProcessPublisher

ARCHITECTURES = ("qwen3", "llama", "gemma", "mistral", "gpt_neox", "gpt2", "qwen3_moe")
PARAMS = SamplingParams(max_tokens=32, temperature=0.9)


def make_engine(model: Any) -> TransformersEngine:
    return TransformersEngine(
        model, config=TransformersEngineConfig(numerics=Numerics.EXACT, max_batch=6, max_prefill_tokens=64)
    )


def make_trainer(model: Any, **config: Any) -> Trainer:
    config = {"optimizer": SUBTRACT_GRADIENT, "numerics": Numerics.EXACT, "tokens_per_micro_batch": 400, **config}
    return Trainer(model, TrainerConfig(**config), accelerator=Accelerator())


def without_gates() -> Any:
    """A mixture that says of its experts that they have no gate."""
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("eager")  # which does not ask
    for layer in model.model.layers:
        layer.mlp.experts.has_gate = False
    return model


async def sample_rows(
    engine: TransformersEngine, params: SamplingParams = PARAMS, *, seed: int = 0
) -> list[TrainingSample]:
    return await play_turns(engine, params, seed=seed, num_agents=6)


async def sample_and_train(model: Any, trained: Any, *, num_steps: int = 2, **config: Any) -> list[dict[str, Any]]:
    """The metrics of steps on rows that an engine samples, which gets the weights of each."""
    engine, trainer = make_engine(model), make_trainer(trained, **config)
    publisher, metrics = InProcessPublisher(engine), []
    for step in range(num_steps):
        rows = await sample_rows(engine, seed=step)
        metrics.append(step_metrics(await asyncio.to_thread(trainer.step, rows)))
        await publisher.publish(trainer.named_weights(), policy_version=trainer.policy_version)
    await engine.close()
    return metrics


def check_equal(metrics: list[dict[str, Any]]) -> None:
    for of_step in metrics:
        assert of_step["mismatch/num_tokens"] > 150
        assert of_step["mismatch/max_abs"] == 0.0
        assert of_step["mismatch/k3"] == 0.0
        assert of_step["mismatch/equal_share"] == 1.0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_all_logprobs_are_equal_to_the_bit_at_every_step(architecture):
    check_equal(await sample_and_train(tiny_model(architecture), tiny_model(architecture)))


async def test_without_exact_numerics_some_differ():
    model = tiny_model("llama")
    engine, trainer = TransformersEngine(model), make_trainer(tiny_model("llama"), numerics=Numerics.FAST)
    metrics = step_metrics(trainer.step(await sample_rows(engine)))
    await engine.close()
    assert 0 < metrics["mismatch/max_abs"] < 1e-4
    assert metrics["mismatch/equal_share"] < 1


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2])
async def test_they_are_equal_with_one_thread_and_with_two_or_two_are_refused(threads, num_threads):
    """Two threads share the functions of one pass. Where they share the sums of products too, in passes of few rows,
    the model is refused: that depends on the machine.
    """
    threads(num_threads)
    sizes = {"hidden_size": 256, "intermediate_size": 1000}
    try:
        make_trainer(tiny_model("llama", **sizes))
    except InvalidInputError:
        is_refused = True
    else:
        is_refused = False
    if is_refused:
        assert num_threads == 2, "one thread shares nothing"
        with pytest.raises(InvalidInputError, match="beside a longer row with 2 threads; OMP_NUM_THREADS=1 may do"):
            make_engine(tiny_model("llama", **sizes))
    else:
        check_equal(await sample_and_train(tiny_model("llama", **sizes), tiny_model("llama", **sizes), num_steps=1))


def test_more_threads_are_refused(threads):
    threads(3)
    with pytest.raises(InvalidInputError, match=r"numerics must be fast with 3 threads: .* OMP_NUM_THREADS=2"):
        make_engine(tiny_qwen3())


async def test_adapters_that_the_sampler_has_merged_are_equal():
    check_equal(await sample_and_train(with_lora(tiny_qwen3()).merge_and_unload(), with_lora(tiny_qwen3())))


async def test_adapters_that_the_sampler_merges_itself_are_equal_also_with_a_scaling_of_three_quarters():
    """B comes with its scaling, so that W + (scaling B) A has other bits than PEFT's W + scaling (B A)."""
    settings = LoraConfig(r=4, lora_alpha=3, target_modules="all-linear", task_type="CAUSAL_LM")
    updates = {"lora_updates": LoraUpdates.ADAPTER, "optimizer": OptimizerConfig(learning_rate=3e-2)}
    check_equal(await sample_and_train(tiny_qwen3(), get_peft_model(tiny_qwen3(), settings), **updates))


@pytest.mark.parametrize("cut", [{"top_k": 7}, {"top_p": 0.8, "temperature": 0.6}], ids=str)
async def test_cut_distributions_are_equal(cut):
    engine, trainer = make_engine(tiny_model("llama")), make_trainer(tiny_model("llama"))
    rows = await sample_rows(engine, replace(PARAMS, return_kept_ids=True, **cut))
    await engine.close()
    check_equal([step_metrics(trainer.step(rows))])


async def test_one_bit_of_difference_ends_the_step_with_the_position_and_both_numbers_or_is_warned_of(caplog):
    engine, trainer = make_engine(tiny_qwen3()), make_trainer(tiny_qwen3())
    rows = await sample_rows(engine)
    await engine.close()
    logprobs = rows[4].rollout_logprobs.copy()
    position = int(np.flatnonzero(rows[4].loss_mask)[3])
    right, wrong = logprobs[position], np.nextafter(logprobs[position], np.float32(0))
    logprobs[position] = wrong
    rows[4] = replace(rows[4], rollout_logprobs=logprobs)
    before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    with pytest.raises(
        InvariantError, match=rf"at position {position}, id {rows[4].token_ids[position]} has"
    ) as raised:
        trainer.step(rows)
    assert repr(wrong) in str(raised.value)
    assert repr(right) in str(raised.value)
    assert trainer.policy_version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_weights())

    logprobs[position] = right  # nothing of the refused step is left for the next one
    trainer.step([*rows[:4], replace(rows[4], rollout_logprobs=logprobs), *rows[5:]])
    other = make_trainer(tiny_qwen3())
    other.step([*rows[:4], replace(rows[4], rollout_logprobs=logprobs), *rows[5:]])
    after = dict(trainer.named_weights())
    assert all(torch.equal(after[name], tensor) for name, tensor in other.named_weights())

    caplog.clear()
    warns = make_trainer(tiny_qwen3(), warn_of_inexact=True)
    assert warns.step(rows).mismatch.equal_share < 1
    assert f"at position {position}, id" in caplog.text
    assert warns.policy_version == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"packing": Packing.ONE_LANE},
        {"shared_prefixes": SharedPrefixes.ALWAYS},
        {"compile": True},
        {"routing_replay": True},
    ],
    ids=str,
)
def test_settings_that_change_sums_are_refused(setting):
    (name,) = setting
    with pytest.raises(InvalidInputError, match=f"numerics must be fast with {name} = "):
        TrainerConfig(numerics=Numerics.EXACT, **setting)


@pytest.mark.parametrize("make", [make_engine, make_trainer])
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny_model("qwen2_moe"), r"model\.layers\.0\.mlp\.gate has 4 features, no multiple of 8"),
        (
            lambda: tiny_model("qwen3_moe", moe_intermediate_size=20),
            r"the experts of .* have 20 features, no multiple of 8",
        ),
        (without_gates, r"the experts of model\.layers\.0\.mlp\.experts have biases, transposed weights or no gate"),
    ],
    ids=["gate", "width", "kind"],
)
def test_mixtures_of_other_experts_are_refused(make, model, reason):
    with pytest.raises(InvalidInputError, match=f"numerics must be fast for .*{reason}"):
        make(model())


def test_adapters_that_do_not_merge_alike_are_refused():
    with pytest.raises(InvalidInputError, match=r"numerics must be fast with the adapter of .*more than A and B"):
        make_trainer(with_lora(tiny_qwen3(), use_dora=True))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"intermediate_size": 60}, "60 features, no multiple of 8"),
        ({"max_position_embeddings": 67}, "67 positions are no multiple of (4|8|16)"),
    ],
    ids=["width", "positions"],
)
def test_sizes_that_leave_something_over_are_refused(changes, reason):
    with pytest.raises(InvalidInputError, match=f"numerics must be fast for LlamaForCausalLM.*{reason}"):
        make_engine(tiny_model("llama", **changes))


def test_an_engine_in_half_precision_is_refused():
    with pytest.raises(
        InvalidInputError, match=r"numerics must be fast for LlamaForCausalLM on cpu in torch\.bfloat16"
    ):
        make_engine(tiny_model("llama").bfloat16())
