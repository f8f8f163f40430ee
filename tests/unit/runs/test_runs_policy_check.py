"""I9, one policy: engines that sample from other weights than the trainer's are found out; right ones pass."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.adapted import with_lora
from support.architectures import ARCHITECTURES, tiny_model
from support.models import tiny_qwen3
from support.planted_faults import FAULTS, make_check, make_model
from support.servers import listening, make_app, server_tokenizer
from unbroken.engines.http import HttpEngine
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import PolicyMismatchError
from unbroken.rendering.base import RenderedPrompt
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.policies import PoliciesConfig
from unbroken.runs import policy_check
from unbroken.runs.config import EngineConfig, EngineKind, RunConfig
from unbroken.runs.policy_check import (
    COARSE,
    FLOAT32,
    check_against_folder,
    check_surprise,
    choose_max_k3,
    find_surprise,
    sample_probes,
)
from unbroken.runs.run import _choose_training
from unbroken.runs.settings import build, section_of
from unbroken.training.model.row_scores import RowScores
from unbroken.types import SamplingParams, token_ids
from unbroken.weights.sources import TensorSource

DENSE_BOUND = policy_check.DENSE
SENTENCE = r"engine: sampler and trainer have two policies \(I9\): k3 is .* Nothing was trained"


@asynccontextmanager
async def embedded(model: Any) -> AsyncIterator[Any]:
    engine = TransformersEngine(model)
    yield engine
    await engine.close()


@asynccontextmanager
async def over_http(model: Any) -> AsyncIterator[Any]:
    async with embedded(model) as engine, listening(make_app(engine)) as url:
        client = await HttpEngine.connect([url])
        yield client
        await client.close()


ENGINES = {"embedded": (embedded, FLOAT32), "http": (over_http, DENSE_BOUND)}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("fault", FAULTS)
async def test_i9_a_planted_fault_is_found_with_both_numbers_before_anything_is_trained(kind, fault):
    start, max_k3 = ENGINES[kind]
    async with start(FAULTS[fault]()) as engine:
        with pytest.raises(PolicyMismatchError, match=SENTENCE) as raised:
            await make_check(engine, make_model(), max_k3=max_k3).run()
    words = str(raised.value)
    assert f"rounding explains up to {max_k3:g}" in words
    assert "torch 2." in words
    assert "transformers 5." in words
    assert "by policy version 0" in words


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_i9_an_engine_with_the_trainers_weights_passes_and_the_line_says_what_was_compared(kind, temperature):
    start, max_k3 = ENGINES[kind]
    async with start(make_model()) as engine:
        line = await make_check(engine, make_model(), max_k3=max_k3, temperature=temperature).run()
    assert line.startswith("engine: one policy with the trainer, k3 ")
    assert "over 288 ids" in line


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_i9_a_right_model_of_every_family_passes(architecture):
    model = tiny_model(architecture, vocab_size=len(server_tokenizer()))
    async with embedded(model) as engine:
        same = tiny_model(architecture, vocab_size=len(server_tokenizer()))
        assert "one policy" in await make_check(engine, same, max_k3=FLOAT32).run()


async def test_i9_an_update_that_did_not_arrive_is_found_although_both_say_the_same_version():
    stale, trained = make_model(), make_model(seed=1)
    async with embedded(stale) as engine:
        await engine.update_weights(TensorSource(make_model().named_parameters()), policy_version=1)
        with pytest.raises(PolicyMismatchError, match="by policy version 1"):
            await make_check(engine, trained, max_k3=DENSE_BOUND, version=1).run()


@pytest.mark.parametrize("are_swapped", [False, True])
async def test_i9_adapters_of_several_policies_that_changed_places_are_found(are_swapped: bool):
    policies = PoliciesConfig(names=("solver", "critic"), copy_every=1)
    model = with_lora(make_model(), adapter_name="solver")
    model.add_adapter("critic", model.peft_config["solver"])
    for name, matrix in model.named_parameters():
        if "lora_B" in name:
            matrix.data.normal_(std=0.1)
    async with embedded(make_model()) as engine:
        check = make_check(engine, model, max_k3=FLOAT32, version=2, policies=policies)
        weights = list(check.trainer.named_weights())
        assert {name.partition("/")[0] for name, _ in weights} == set(policies.list_adapters(2))
        await check.run()  # before the first update both are the base
        places = {"solver@1/": "critic@2/", "critic@2/": "solver@1/"} if are_swapped else {}
        given = [(f"{places.get(name[:9], name[:9])}{name[9:]}", each) for name, each in weights]
        await engine.update_weights(TensorSource(given), policy_version=2)
        if not are_swapped:
            assert "one policy" in await check.run()
            return
        with pytest.raises(PolicyMismatchError, match=r"engine, (solver@1|critic@2): .* two policies \(I9\)"):
            await check.run()


async def test_inf_leaves_the_check_out_and_says_so():
    async with embedded(FAULTS["another model"]()) as engine:
        assert "not compared" in await make_check(engine, make_model(), max_k3=math.inf).run()


async def test_prompts_that_leave_no_room_or_cannot_be_rendered_are_ids_of_no_text():
    class Refusing(TemplateRenderer):
        def render(self, *args: Any, **options: Any) -> RenderedPrompt:
            raise PolicyMismatchError("no")

    async with embedded(make_model()) as engine:
        refusing = Refusing(server_tokenizer())
        prompts, rows = await sample_probes(engine, refusing, None, SamplingParams(top_k=5))
    assert {len(prompt.token_ids) for prompt in prompts} == {16}
    assert all(row.kept_ids is not None for row in rows[: len(prompts)])
    assert {row.temperature for row in rows} == {1.0}


async def test_transformers_own_pass_of_the_folder_finds_the_fault_too():
    renderer = TemplateRenderer(server_tokenizer())
    async with embedded(make_model()) as engine:
        assert "one policy with transformers" in await check_against_folder(engine, make_model(), renderer)
        with pytest.raises(PolicyMismatchError, match="two policies"):
            await check_against_folder(engine, FAULTS["swapped layers"](), renderer)


PROMPT = RenderedPrompt(token_ids=token_ids(range(40)), message_indices=token_ids([0] * 40))


def scores_of(logprob: float, entropy: float) -> Any:
    def score(rows: Any) -> list[RowScores]:
        found = RowScores.empty(40)
        found.logprobs[1:], found.entropies[1:] = logprob, entropy
        return [found for _ in rows]

    return score


def test_ids_of_another_tokenizer_surprise_a_model_of_a_language():
    surprise = find_surprise([PROMPT], scores_of(-12.0, 6.0))
    assert surprise == pytest.approx(6.0)
    with pytest.raises(PolicyMismatchError, match=r"no text to this model .* Are tokenizer and chat template"):
        check_surprise(surprise, vocab_size=49_152)
    check_surprise(surprise, vocab_size=600)  # a home-made model: all text is new to it


@pytest.mark.parametrize(("logprob", "entropy"), [(-3.0, 2.0), (-11.0, 11.0)], ids=["text", "untrained"])
def test_text_and_models_that_expect_nothing_are_no_surprise(logprob, entropy):
    check_surprise(find_surprise([PROMPT], scores_of(logprob, entropy)), vocab_size=49_152)


def test_prompts_with_images_alone_are_not_judged():
    assert find_surprise([], scores_of(-12.0, 6.0)) == 0.0
    assert np.isfinite(find_surprise([replace(PROMPT, token_ids=token_ids([1]), message_indices=token_ids([0]))], None))


def config_of(**values: Any) -> RunConfig:
    given = {"output": "o", "loop.num_steps": 1, "trainer.optimizer.learning_rate": 1e-3, **values}
    return build(section_of(RunConfig), given)


def test_the_steps_of_a_run_that_keeps_old_keys_and_values_have_no_bound_but_the_users():
    engine = SimpleNamespace(adapt=lambda training: training)
    for given, expected in (
        ({}, FLOAT32),
        ({"engine.reuse_kv": True}, None),
        ({"engine.reuse_kv": True, "trainer.max_policy_k3": 0.5}, 0.5),
    ):
        config = config_of(**given)
        assert _choose_training(config, engine, tiny_qwen3()).max_policy_k3 == expected
    keeping = config_of(**{"engine.reuse_kv": True})
    assert choose_max_k3(keeping, keeping.engine, tiny_qwen3()) == COARSE, "at the start"


def test_the_bound_is_that_of_the_arithmetic():
    dense, experts = tiny_qwen3(), tiny_model("qwen3_moe")
    config = config_of()
    assert choose_max_k3(config, config.engine, dense) == FLOAT32
    colocated = EngineConfig(kind=EngineKind.COLOCATED)
    assert choose_max_k3(config, colocated, dense) == DENSE_BOUND
    assert choose_max_k3(config_of(precision="bfloat16"), config.engine, dense) == DENSE_BOUND
    quantised = EngineConfig(kind=EngineKind.COLOCATED, options=("--quantization", "fp8"))
    assert choose_max_k3(config, quantised, dense) == COARSE
    assert choose_max_k3(config, colocated, experts) == COARSE
    replayed = config_of(**{"trainer.routing_replay": True})
    assert choose_max_k3(replayed, colocated, experts) == DENSE_BOUND
    assert choose_max_k3(config_of(**{"trainer.max_policy_k3": 0.5}), quantised, dense) == 0.5
