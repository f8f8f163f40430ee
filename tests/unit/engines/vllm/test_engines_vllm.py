"""What vLLM does for us beyond the contract, on the engine that all tests share."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from support.images import image_span
from support.waits import wait_until
from unbroken.engines.base import AdapterEngine
from unbroken.errors import EngineError, InvalidInputError, SamplingError, WeightsError
from unbroken.types import FinishReason, SampledSequence, SampleRequest, SamplingParams, StructuredOutput, token_ids
from unbroken.weights.sources import TensorSource

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT_IDS = token_ids([1, 2, 3, 4, 5])


def ask(request_id: str = "a", *, n: int = 1, adapter: str | None = None, **params: Any) -> SampleRequest:
    return SampleRequest(
        request_id=request_id, prompt_ids=PROMPT_IDS, n=n, adapter=adapter, params=SamplingParams(**params)
    )


async def sample_one(engine: Any, request: SampleRequest) -> SampledSequence:
    result = await engine.sample(request)
    result.check_answers(request)
    return result.sequences[0]


def logprobs_of(model: Any, ids: list[int], *, temperature: float = 1.0) -> np.ndarray:
    """[T - 1] of each id after the first, by a plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


async def renew(shared: Any, seed: int) -> Any:
    """Give the engine the weights of `seed`, and return the model that has them."""
    from support.vllm_engines import tiny_vllm_model

    model = tiny_vllm_model(seed)
    await shared.engine.update_weights(
        TensorSource(model.named_parameters()), policy_version=shared.engine.policy_version + 1
    )
    return model


@pytest.fixture
def text_of() -> Any:
    from support.vllm_engines import character_tokenizer

    tokenizer = character_tokenizer()
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 8}])
async def test_sets_that_vllm_may_not_return_whole_are_refused_by_name(shared_vllm: Any, cut: dict[str, Any]) -> None:
    (named,) = (f"{name} {value}" for name, value in cut.items())
    with pytest.raises(SamplingError, match=rf"return_kept_ids with {named} needs top_k in \[1, 8\), below vLLM's"):
        await shared_vllm.engine.sample(ask(return_kept_ids=True, **cut))
    assert (await sample_one(shared_vllm.engine, ask(max_tokens=3, **cut))).kept_ids is None


async def test_seeded_requests_whose_prompts_exceed_a_step_are_answered_as_alone(shared_vllm: Any) -> None:
    rng = np.random.default_rng(0)
    requests = [
        SampleRequest(
            request_id=f"seeded-{number}",
            prompt_ids=token_ids(rng.integers(0, 64, 150).tolist()),
            params=SamplingParams(max_tokens=4, seed=number),
        )
        for number in range(60)
    ]
    together = await asyncio.gather(*(sample_one(shared_vllm.engine, request) for request in requests))
    for number in (0, 29, 59):
        alone = await sample_one(shared_vllm.engine, requests[number])
        assert alone.completion_ids.tolist() == together[number].completion_ids.tolist()


async def test_a_paused_engine_stays_paused_over_an_update(shared_vllm: Any) -> None:
    await shared_vllm.engine.pause()
    running = asyncio.create_task(sample_one(shared_vllm.engine, ask(max_tokens=5)))
    await renew(shared_vllm, 1)
    await asyncio.sleep(0.05)
    assert not running.done()
    await shared_vllm.engine.resume()
    assert set((await running).policy_versions) == {shared_vllm.engine.policy_version}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"lm_bias": torch.zeros(3)}, "no weight named 'lm_bias'"),
        (lambda w: w | {"model.norm.weight": torch.zeros(3)}, r"must have shape \(32,\), got \(3,\)"),
        (lambda w: dict(list(w.items())[:-1]), "1 of .* are missing, first 'model.norm.weight'"),
        (lambda w: {}, "used up before"),
        (lambda w: w | {"lm_head.weight": torch.zeros(64, 32)}, "tied in the model, but their values differ"),
        (lambda w: w | {"lm_head.weight": torch.zeros(64, 31)}, r"must have shape \(64, 32\)"),
    ],
)
async def test_weights_that_are_not_the_models_are_refused_and_nothing_is_loaded(
    shared_vllm: Any, change: Any, message: str
) -> None:
    from support.vllm_engines import tiny_vllm_model

    before = await shared_vllm.engine.score(PROMPT_IDS)
    version = shared_vllm.engine.policy_version
    weights = change(dict(tiny_vllm_model(8).named_parameters()))
    with pytest.raises((SamplingError, WeightsError), match=message):
        await shared_vllm.engine.update_weights(TensorSource(weights.items()), policy_version=version + 1)
    assert shared_vllm.engine.policy_version == version
    assert (await shared_vllm.engine.score(PROMPT_IDS)).logprobs.tolist() == before.logprobs.tolist()


async def test_the_ids_that_spell_a_stop_string_are_kept(shared_vllm: Any, text_of: Any) -> None:
    free = text_of((await sample_one(shared_vllm.engine, ask(max_tokens=40, seed=3))).completion_ids)
    stop = free[19:22]
    stopped = await sample_one(shared_vllm.engine, ask(max_tokens=40, seed=3, stop_strings=(stop,)))
    assert stopped.finish_reason is FinishReason.STOP
    assert text_of(stopped.completion_ids) == free[: free.index(stop) + 3]


async def test_the_models_own_end_of_text_ends_nothing_unless_asked_for(shared_vllm: Any) -> None:
    sequences = (await shared_vllm.engine.sample(ask(n=8, max_tokens=100))).sequences
    assert any(0 in sequence.completion_ids[:-1] for sequence in sequences)
    assert {sequence.finish_reason for sequence in sequences} == {FinishReason.LENGTH}


async def test_a_regex_forces_the_text(shared_vllm: Any, text_of: Any) -> None:
    form = StructuredOutput(regex="[0-9]{3}-[a-f]{2}")
    request = ask(n=4, max_tokens=30, structured_output=form)
    for sequence in (await shared_vllm.engine.sample(request)).sequences:
        assert re.fullmatch("[0-9]{3}-[a-f]{2}", text_of(sequence.completion_ids))
        assert sequence.finish_reason is FinishReason.STOP
        assert sequence.completion_ids[-1] == 0


async def test_under_a_regex_the_kept_ids_are_those_that_the_form_and_the_cut_leave(
    shared_vllm: Any, text_of: Any
) -> None:
    """So a trainer follows a structured output as it follows top-k."""
    from support.vllm_engines import tiny_vllm_model

    engine, model = shared_vllm.engine, tiny_vllm_model(8)
    await engine.update_weights(TensorSource(model.named_parameters()), policy_version=engine.policy_version + 1)
    form = StructuredOutput(regex="[0-9]{3}-[a-f]{2}")
    request = ask(n=4, max_tokens=30, top_k=3, temperature=0.7, return_kept_ids=True, structured_output=form)
    result = await engine.sample(request)
    result.check_answers(request)
    for sequence in result.sequences:
        ids = torch.tensor([*PROMPT_IDS.tolist(), *sequence.completion_ids.tolist()])
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double() / 0.7
        for position, kept in enumerate(sequence.kept_ids.to_lists()):
            scores = logits[len(PROMPT_IDS) + position - 1]
            expected = scores[ids[len(PROMPT_IDS) + position]] - scores[kept].logsumexp(0)
            assert abs(float(expected) - sequence.rollout_logprobs[position]) < 1e-5
            assert 1 <= len(kept) <= 3
        assert text_of([token_id for kept in sequence.kept_ids.to_lists()[:1] for token_id in kept]).isdigit()
    with pytest.raises(SamplingError, match="return_kept_ids with structured_output needs top_k in"):
        await engine.sample(ask(return_kept_ids=True, structured_output=form))


async def test_a_json_schema_forces_the_text(shared_vllm: Any, text_of: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    form = StructuredOutput(json_schema=json.dumps(schema))
    sequence = await sample_one(shared_vllm.engine, ask(max_tokens=60, structured_output=form))
    assert json.loads(text_of(sequence.completion_ids))["a"] in ("x", "y")


@pytest.mark.parametrize("form", [{"regex": "[0-9"}, {"json_schema": '{"type": "nothing"}'}, {"json_schema": "{"}])
async def test_a_form_that_is_none_is_refused_and_harms_nobody(shared_vllm: Any, form: dict[str, str]) -> None:
    running = asyncio.create_task(sample_one(shared_vllm.engine, ask("b", max_tokens=60)))
    with pytest.raises(SamplingError, match="vLLM refuses the request"):
        await shared_vllm.engine.sample(ask(structured_output=StructuredOutput(**form)))
    assert len((await running).completion_ids) == 60
    await shared_vllm.engine.sample(ask(max_tokens=2))


async def test_an_adapter_comes_and_goes_while_the_engine_runs(shared_vllm: Any) -> None:
    engine = shared_vllm.engine
    with pytest.raises(InvalidInputError, match="'pirate', which is loaded"):
        await engine.load_adapter("pirate", shared_vllm.adapter_folder)
    with pytest.raises(InvalidInputError, match="adapter_config"):
        await engine.load_adapter("viking", shared_vllm.adapter_folder / "nothing")
    await engine.load_adapter("viking", shared_vllm.adapter_folder)
    assert isinstance(engine, AdapterEngine)
    assert engine.adapters == ("pirate", "viking")
    results = [await engine.sample(ask(max_tokens=20, seed=3, adapter=name)) for name in engine.adapters]
    pirate, viking = (result.sequences[0] for result in results)
    np.testing.assert_array_equal(pirate.completion_ids, viking.completion_ids)
    np.testing.assert_allclose(pirate.rollout_logprobs, viking.rollout_logprobs, atol=1e-4)
    with pytest.raises(InvalidInputError, match="at most 2 adapters"):  # on a CPU
        await engine.load_adapter("another", shared_vllm.adapter_folder)
    await engine.unload_adapter("viking")
    with pytest.raises(SamplingError, match="'viking'"):
        await engine.sample(ask(adapter="viking"))
    with pytest.raises(InvalidInputError, match="to be unloaded"):
        await engine.unload_adapter("viking")


async def test_an_adapter_is_what_peft_means_by_it(shared_vllm: Any) -> None:
    from support.vllm_engines import with_adapter

    model = await renew(shared_vllm, 1)
    request = ask(max_tokens=20, adapter=shared_vllm.adapter)
    plain = ask("b", max_tokens=20)
    adapted, free = await asyncio.gather(*(sample_one(shared_vllm.engine, r) for r in (request, plain)))
    expected = logprobs_of(model, [*PROMPT_IDS, *free.completion_ids])[4:]
    np.testing.assert_allclose(free.rollout_logprobs, expected, atol=1e-5)
    ids = [*PROMPT_IDS, *adapted.completion_ids]
    assert np.abs(adapted.rollout_logprobs - logprobs_of(model, ids)[4:]).max() > 0.1
    expected = logprobs_of(with_adapter(model, shared_vllm.adapter_folder), ids)[4:]
    np.testing.assert_allclose(adapted.rollout_logprobs, expected, atol=2e-5)


async def test_what_cannot_be_answered_is_refused_by_name(shared_vllm: Any) -> None:
    image = image_span(offset=0, length=1, image="cat")
    cases = [
        (ask(adapter="viking"), r"adapter must be None or one of \['pirate'\], got 'viking'"),
        (ask(num_top_logprobs=9), r"num_top_logprobs must be a whole number in \[0, 8\], got 9"),
        (SampleRequest(request_id="a", prompt_ids=PROMPT_IDS, images=(image,)), "takes no images, got 1"),
    ]
    for request, message in cases:
        with pytest.raises(SamplingError, match=message):
            await shared_vllm.engine.sample(request)
    with pytest.raises(SamplingError, match=r"in \[0, 8\], got 9"):
        await shared_vllm.engine.score(PROMPT_IDS, num_top_logprobs=9)
    assert (await sample_one(shared_vllm.engine, ask(num_top_logprobs=8, max_tokens=2))).top_logprobs is not None


async def test_top_logprobs_that_a_filter_removed_are_minus_infinity(shared_vllm: Any) -> None:
    sequence = await sample_one(shared_vllm.engine, ask(top_k=2, num_top_logprobs=4, max_tokens=5))
    assert sequence.top_logprobs is not None
    assert np.isneginf(sequence.top_logprobs.logprobs[:, 2:]).all()
    assert np.isfinite(sequence.top_logprobs.logprobs[:, :2]).all()


async def test_the_prefix_cache_is_forgotten_while_requests_run(shared_vllm: Any) -> None:
    before = shared_vllm.engine.num_sampled
    running = asyncio.create_task(sample_one(shared_vllm.engine, ask(max_tokens=150, seed=1)))
    await wait_until(lambda: shared_vllm.engine.num_sampled > before)
    await shared_vllm.engine.reset_prefix_cache()
    assert not running.done()
    free = await sample_one(shared_vllm.engine, ask("b", max_tokens=150, seed=1))
    assert (await running).completion_ids.tolist() == free.completion_ids.tolist()


async def test_an_abort_ends_all_of_n_completions(shared_vllm: Any) -> None:
    before = shared_vllm.engine.num_sampled
    running = asyncio.create_task(shared_vllm.engine.sample(ask(n=3, max_tokens=250)))
    await wait_until(lambda: shared_vllm.engine.num_sampled > before)
    await shared_vllm.engine.abort("a")
    sequences = (await running).sequences
    assert [sequence.finish_reason for sequence in sequences] == [FinishReason.ABORT] * 3
    assert shared_vllm.engine.num_unfinished == 0


async def test_a_taken_worker_extension_is_refused(tmp_path: Any) -> None:
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    options = ["--model", str(tmp_path), "--worker-extension-cls", "a.B"]
    with pytest.raises(InvalidInputError, match=r"worker_extension_cls must be left out, got 'a\.B'"):
        await VllmEngine.start(parse_engine_args(options))


async def test_settings_of_images_for_the_whole_engine_are_refused(tmp_path: Any) -> None:
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    options = ["--model", str(tmp_path), "--mm-processor-kwargs", '{"max_pixels": 3136}']
    with pytest.raises(InvalidInputError, match=r"mm_processor_kwargs must be left out, got \{'max_pixels': 3136\}"):
        await VllmEngine.start(parse_engine_args(options))


async def test_a_model_that_is_not_there_does_not_start(tmp_path: Any) -> None:
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    with pytest.raises(EngineError, match="vLLM does not start"):
        await VllmEngine.start(parse_engine_args(["--model", str(tmp_path)]))
    with pytest.raises(InvalidInputError, match="vLLM refuses its options"):
        parse_engine_args(["--model", str(tmp_path / "nothing")])
