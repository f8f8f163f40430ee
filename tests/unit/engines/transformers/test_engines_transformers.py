"""The embedded engine: exact logprobs, prefix reuse, new weights."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, T5Config, T5ForConditionalGeneration

from support.architectures import ARCHITECTURES, tiny_model
from support.images import image_span
from support.reference_sampling import reference_logprobs
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.engines.transformers.batch import ContinuousBatch
from unbroken.engines.transformers.forward import SlotForward
from unbroken.engines.transformers.jobs import Job
from unbroken.engines.transformers.weights import load_into
from unbroken.engines.transformers.worker import Answer, Outbox
from unbroken.errors import EchoError, InvalidInputError, SamplingError
from unbroken.types import FinishReason, SampledSequence, SampleRequest, SamplingParams, TokenIds, token_ids
from unbroken.weights.sources import TensorSource

VOCAB_SIZE = 64
PROMPT_IDS = token_ids(range(3, 40))
PROCESSED = [
    SamplingParams(max_tokens=12, seed=1),
    SamplingParams(max_tokens=12, seed=2, temperature=0.7),
    SamplingParams(max_tokens=12, seed=3, temperature=0),
    SamplingParams(max_tokens=12, seed=4, temperature=1.3, top_k=5),
    SamplingParams(max_tokens=12, seed=5, top_p=0.6, min_p=0.05),
    SamplingParams(max_tokens=12, seed=6, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.2),
]


@torch.no_grad()
def plain_logits(model: Any, ids: TokenIds) -> Any:
    """[T, V] of one forward pass without a cache."""
    return model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0].numpy()


def assert_exact(model: Any, prompt_ids: TokenIds, sequence: SampledSequence, params: SamplingParams) -> None:
    completion_ids = sequence.completion_ids.tolist()
    logits = plain_logits(model, np.concatenate([prompt_ids, sequence.completion_ids]))[len(prompt_ids) - 1 :]
    for k, token_id in enumerate(completion_ids):
        expected = reference_logprobs(logits[k], params, prompt_ids.tolist(), completion_ids[:k])
        assert sequence.rollout_logprobs[k] == pytest.approx(expected[token_id], abs=1e-5)


def ask(request_id: str, prompt_ids: Any = PROMPT_IDS, n: int = 1, **params: Any) -> SampleRequest:
    return SampleRequest(request_id=request_id, prompt_ids=prompt_ids, n=n, params=SamplingParams(**params))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_logprobs_are_those_of_a_plain_forward_pass(architecture: str, attention: str) -> None:
    plain = tiny_model(architecture, attention=attention)
    engine = TransformersEngine(tiny_model(architecture, attention=attention))
    prompts = [PROMPT_IDS[: 5 + 6 * k] for k in range(len(PROCESSED))]
    results = await asyncio.gather(
        *(
            engine.sample(SampleRequest(request_id=str(k), prompt_ids=prompt_ids, params=params))
            for k, (prompt_ids, params) in enumerate(zip(prompts, PROCESSED, strict=True))
        )
    )
    for prompt_ids, params, result in zip(prompts, PROCESSED, results, strict=True):
        assert_exact(plain, prompt_ids, result.sequences[0], params)
    await engine.close()


async def test_attention_does_without_cudnn_which_compiles_for_every_new_shape() -> None:
    model, seen = tiny_model(), []
    engine = TransformersEngine(model)
    model.base_model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    await engine.sample(ask("a", max_tokens=2))
    await engine.score(PROMPT_IDS)
    assert seen == [False] * 4
    assert torch.backends.cuda.cudnn_sdp_enabled() is before is True
    await engine.close()


async def test_the_next_turn_feeds_only_its_new_ids() -> None:
    engine = TransformersEngine(tiny_model())
    first = (await engine.sample(ask("a/0", max_tokens=10, seed=0))).sequences[0]
    assert engine.stats.num_prefilled == len(PROMPT_IDS) - 1
    prompt_ids = np.concatenate([PROMPT_IDS, first.completion_ids, token_ids([7, 8, 9])])
    second = (await engine.sample(ask("a/1", prompt_ids, max_tokens=10, seed=1))).sequences[0]
    # The last sampled id was never fed, and the last id of a prompt is fed when it is sampled from.
    assert engine.stats.num_reused == len(prompt_ids) - 4
    assert engine.stats.num_prefilled == len(PROMPT_IDS) - 1 + 3
    assert_exact(tiny_model(), prompt_ids, second, SamplingParams())
    await engine.close()


async def test_a_long_and_a_short_new_part_are_computed_together() -> None:
    engine = TransformersEngine(tiny_model(), config=TransformersEngineConfig(context_length=96))
    long_ids = token_ids(np.arange(93) * 5 % VOCAB_SIZE)
    await engine.sample(ask("a", long_ids[:88], max_tokens=1))
    await engine.pause()
    calls = [
        engine.sample(ask("b", long_ids, max_tokens=2)),
        engine.sample(ask("c", long_ids[::-1][:60], max_tokens=2)),
    ]
    results = asyncio.gather(*calls)
    await asyncio.sleep(0.01)
    await engine.resume()
    for prompt_ids, result in zip((long_ids, long_ids[::-1][:60]), await results, strict=True):
        assert_exact(tiny_model(), prompt_ids, result.sequences[0], SamplingParams())
    assert engine.stats.num_reused == 88
    await engine.close()


async def test_a_new_prompt_waits_no_longer_than_two_steps_for_company() -> None:
    stepped = Stepped(tiny_model(), max_batch=16)
    crowd = [stepped.submit(ask(str(k), PROMPT_IDS[: 5 + k], max_tokens=50)) for k in range(12)]
    stepped.batch.step()
    stepped.submit(ask("late", PROMPT_IDS[::-1], max_tokens=50))
    sampled = []
    for _ in range(3):
        before = stepped.batch.stats.num_sampled
        stepped.batch.step()
        sampled.append(stepped.batch.stats.num_sampled - before)
    assert sampled == [len(crowd), len(crowd), len(crowd) + 1]


async def test_a_forgotten_prefix_is_computed_again() -> None:
    engine = TransformersEngine(tiny_model())
    await engine.sample(ask("a", max_tokens=2))
    await engine.reset_prefix_cache()
    await engine.sample(ask("b", max_tokens=2))
    assert engine.stats.num_reused == 0
    await engine.close()


async def test_more_rows_than_slots_wait_their_turn_and_are_exact() -> None:
    engine = TransformersEngine(tiny_model(), config=TransformersEngineConfig(max_batch=3, max_prefill_tokens=8))
    prompts = [PROMPT_IDS[: 20 + k] for k in range(12)]
    results = await asyncio.gather(
        *(engine.sample(ask(str(k), p, n=2, max_tokens=5, seed=k)) for k, p in enumerate(prompts))
    )
    for prompt_ids, result in zip(prompts, results, strict=True):
        for sequence in result.sequences:
            assert_exact(tiny_model(), prompt_ids, sequence, SamplingParams())
    await engine.close()


@pytest.mark.parametrize("row", range(3))
async def test_i3_the_prompt_of_every_row_is_compared_with_what_was_sent(row: int) -> None:
    outbox = Outbox()
    job = Job(ask("a", n=3), Answer(outbox))
    for index, each in enumerate(job.rows):
        fed = np.append(PROMPT_IDS, 7).astype(np.int32)
        fed[5] += index == row
        each.begin_version(0, 0)
        each.finish(fed, np.full(len(fed), -0.5, dtype=np.float32), FinishReason.LENGTH)
    outbox.flush()
    with pytest.raises(EchoError, match="first at position 5"):
        (await job.answer.future).check_answers(job.request)


class Stepped:
    """A batch that is stepped by hand, to change weights at an exact point."""

    def __init__(self, model: Any, *, max_batch: int = 4) -> None:
        self.model = model
        self.outbox = Outbox()
        with torch.inference_mode():
            forward = SlotForward(model, context_length=256)
        self.batch = ContinuousBatch(
            forward, max_batch=max_batch, context_length=256, max_prefill_tokens=4096, decode=None
        )

    def submit(self, request: SampleRequest) -> Job:
        job = Job(request, Answer(self.outbox))
        self.batch.submit(job)
        return job

    def load(self, source: Any, version: int, *, reuse_kv: bool = False) -> None:
        load_into(self.model, list(source.named_parameters()))
        self.batch.begin_version(version, reuse_kv=reuse_kv)

    async def finish(self, job: Job) -> SampledSequence:
        while self.batch.has_work:
            self.batch.step()
        self.outbox.flush()
        return (await job.answer.future).sequences[0]


async def test_i6_new_weights_drop_the_prefix_cache_unless_told_to_keep_it() -> None:
    for reuse_kv in (False, True):
        stepped = Stepped(tiny_model(seed=0))
        await stepped.finish(stepped.submit(ask("a", max_tokens=2, seed=0)))
        stepped.load(tiny_model(seed=1), 1, reuse_kv=reuse_kv)
        await stepped.finish(stepped.submit(ask("b", max_tokens=2, seed=0)))
        assert bool(stepped.batch.stats.num_reused) is reuse_kv


async def test_i6_versions_without_a_sampled_id_leave_no_span() -> None:
    stepped = Stepped(tiny_model(seed=0))
    job = stepped.submit(ask("a", max_tokens=4, seed=0))
    stepped.batch.step()
    stepped.load(tiny_model(seed=1), 1)
    stepped.load(tiny_model(seed=2), 2)
    assert (await stepped.finish(job)).policy_versions.tolist() == [0, 2, 2, 2]


BAD_WEIGHTS = {
    "is empty": lambda good: [],
    "no weight named 'nonsense'": lambda good: [*good, ("nonsense", good[0][1])],
    "must have shape": lambda good: [*good[:-1], (good[-1][0], torch.zeros(3))],
    "came twice": lambda good: [*good, good[0]],
    "are tied": lambda good: [*good, ("lm_head.weight", torch.zeros(VOCAB_SIZE, 32))],
}


@pytest.mark.parametrize("message", BAD_WEIGHTS)
async def test_weights_that_do_not_fit_change_nothing(message: str) -> None:
    engine = TransformersEngine(tiny_model(seed=0))
    before = (await engine.score(PROMPT_IDS)).logprobs
    bad = BAD_WEIGHTS[message](list(tiny_model(seed=1).named_parameters()))
    with pytest.raises(SamplingError, match=message):
        await engine.update_weights(TensorSource(bad), policy_version=1)
    assert engine.policy_version == 0
    np.testing.assert_array_equal((await engine.score(PROMPT_IDS)).logprobs, before)
    await engine.close()


def spell(ids: list[int]) -> str:
    return "".join(chr(ord("0") + i) for i in ids)


async def test_a_stop_string_ends_the_completion_that_spells_it() -> None:
    engine = TransformersEngine(tiny_model(), decode=spell)
    free = (await engine.sample(ask("a", max_tokens=12, seed=0))).sequences[0].completion_ids.tolist()
    stop = spell(free[4:7])
    sequence = (await engine.sample(ask("b", max_tokens=12, seed=0, stop_strings=("no", stop)))).sequences[0]
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.completion_ids.tolist() == free[:7]
    await engine.close()


async def test_what_needs_text_or_sight_is_refused() -> None:
    engine = TransformersEngine(tiny_model())
    with pytest.raises(SamplingError, match="stop_strings"):
        await engine.sample(ask("a", stop_strings=("x",)))
    image = image_span(offset=0, length=1, image="cat")
    with pytest.raises(SamplingError, match="images"):
        await engine.sample(SampleRequest(request_id="a", prompt_ids=PROMPT_IDS, images=(image,)))
    await engine.close()


async def test_weights_whose_iterator_raises_leave_the_engine_working() -> None:
    def raising() -> Any:
        yield next(iter(tiny_model().named_parameters()))
        raise OSError("disk")

    engine = TransformersEngine(tiny_model())
    with pytest.raises(OSError, match="disk"):
        await engine.update_weights(TensorSource(raising()), policy_version=1)
    await engine.sample(ask("a", max_tokens=1))
    await engine.close()


def test_one_engine_serves_two_event_loops_at_once() -> None:
    engine = TransformersEngine(tiny_model())
    found: dict[str, SampledSequence] = {}

    def run(name: str) -> None:
        found[name] = asyncio.run(engine.sample(ask(name, max_tokens=20, seed=1))).sequences[0]

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["a"].completion_ids.tolist() == found["b"].completion_ids.tolist()
    asyncio.run(engine.close())


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="max_position_embeddings"):
        TransformersEngine(tiny_model(), config=TransformersEngineConfig(context_length=257))


@pytest.mark.parametrize("field", ["max_batch", "context_length", "max_prefill_tokens"])
def test_a_bound_below_one_is_refused(field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{field} must be >= 1, got 0"):
        TransformersEngineConfig(**{field: 0})


def test_a_model_without_a_length_of_its_own_needs_one() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(InvalidInputError, match="set context_length"):
        TransformersEngine(bloom)


def test_a_window_shorter_than_the_context_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="sliding_attention"):
        TransformersEngine(tiny_model("mistral", sliding_window=16))


async def test_a_window_that_holds_the_context_is_exact() -> None:
    config = TransformersEngineConfig(context_length=64)
    engine = TransformersEngine(tiny_model("mistral", sliding_window=64), config=config)
    sequence = (await engine.sample(ask("a", max_tokens=64, seed=0))).sequences[0]
    assert len(sequence.completion_ids) == 64 - len(PROMPT_IDS)
    assert_exact(tiny_model("mistral", sliding_window=64), PROMPT_IDS, sequence, SamplingParams())
    await engine.close()


def test_other_kinds_of_models_are_refused_when_the_engine_is_made() -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(InvalidInputError, match="decoder-only"):
        TransformersEngine(t5, config=TransformersEngineConfig(context_length=64))
    # ALiBi derives positions from a padding mask, so its rows cannot stand at positions of their own.
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2))
    with pytest.raises(InvalidInputError, match="cache of slots"):
        TransformersEngine(bloom, config=TransformersEngineConfig(context_length=64))
