import numpy as np

from support.models import tiny_qwen3
from unbroken.engines.transformers import TransformersEngine
from unbroken.types import SampleRequest, SamplingParams


async def test_completions_of_one_prompt_compute_it_once_and_stay_exact() -> None:
    engine = TransformersEngine(tiny_qwen3())
    prompt_ids = np.arange(1, 41) % 16
    request = SampleRequest(request_id="a", prompt_ids=prompt_ids, params=SamplingParams(max_tokens=4, seed=1), n=8)
    result = await engine.sample(request)
    assert engine.stats.num_prefilled == len(prompt_ids) - 1
    for sequence in result.sequences:
        scored = (await engine.score(np.concatenate([request.prompt_ids, sequence.completion_ids]))).logprobs
        assert np.abs(scored[len(prompt_ids) - 1 :] - sequence.rollout_logprobs).max() < 1e-5
    await engine.close()
