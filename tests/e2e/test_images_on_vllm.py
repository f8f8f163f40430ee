"""A rollout with images on real vLLM: the engine saw what the trajectory holds, and transformers computes the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from support.scripted_env import ScriptedEnv
from support.vision import picture, vision_tokenizer
from support.vision_engines import VisionEngine, load_vision_model, model_logprobs, start_vision_vllm
from unbroken.images.processor import ImageInputs
from unbroken.ledger.tree import export_samples
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.env import Continue
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import Trajectory
from unbroken.types import ImageSpan, SampleRequest, SampleResult, SamplingParams, TrainingSample

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore:Passing .min_pixels. and .max_pixels. to a processor call:FutureWarning"),
]

EXACT = 1e-4
SEED = 3
"""One with which the random model samples no image placeholder."""
FIRST, SECOND, THIRD = picture(56, 56, seed=1), picture(56, 56, seed=2), picture(84, 112, seed=3)
QUESTION = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Is this "},
            {"type": "image", "image": FIRST},
            {"type": "text", "text": " also on "},
            {"type": "image", "image": SECOND},
            {"type": "text", "text": "?"},
        ],
    }
]
TOOL_REPLY = [
    {"role": "tool", "content": [{"type": "text", "text": "A crop <|image_pad|>: "}, {"type": "image", "image": THIRD}]}
]
MORE = [{"role": "user", "content": "And now?"}]


class Recording:
    """An engine that notes what it was asked and what it answered."""

    def __init__(self, engine: Any) -> None:
        self.turns: list[tuple[SampleRequest, SampleResult]] = []
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def sample(self, request: SampleRequest) -> SampleResult:
        result = await self._engine.sample(request)
        self.turns.append((request, result))
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A finished rollout, and what the engine was asked for it."""

    vision: VisionEngine
    model: Any
    trajectory: Trajectory
    turns: list[tuple[SampleRequest, SampleResult]]
    row: TrainingSample

    def largest_difference(self, images: tuple[ImageSpan, ...]) -> float:
        """Of the sampler's logprobs and those of transformers, if the row had these images."""
        expected = model_logprobs(self.model, self.vision.processor, self.row.token_ids, images)
        sampled = np.flatnonzero(self.row.sampled_mask)
        return float(np.abs(self.row.rollout_logprobs[sampled] - expected[sampled - 1]).max())


async def play(vision: VisionEngine) -> Played:
    engine = Recording(vision.engine)
    trajectory = await run_rollout(
        ScriptedEnv(
            [Continue(messages=TOOL_REPLY), Continue(messages=MORE), Continue(messages=MORE)], messages=QUESTION
        ),
        engine=engine,
        renderer=TemplateRenderer(vision_tokenizer(), images=ImageInputs(processor=vision.processor)),
        sampling=SamplingParams(max_tokens=12, seed=SEED),
        limits=Limits(),
    )
    if trajectory.error is not None:
        raise trajectory.error
    (row,) = export_samples(trajectory.tree, 1.0)
    model = load_vision_model(vision.folder)
    return Played(vision=vision, model=model, trajectory=trajectory, turns=engine.turns, row=row)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def qwen_played(vision_vllm: Any) -> Played:
    return await play(vision_vllm)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def llava_played(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Played]:
    vision = await start_vision_vllm(tmp_path_factory.mktemp("llava"), "llava")
    yield await play(vision)
    await vision.engine.close()


@pytest.fixture(params=["qwen_played", "llava_played"])
def played(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


async def test_i1_i3_the_engine_saw_what_the_trajectory_holds_at_each_turn(played: Played) -> None:
    assert [len(request.images) for request, _ in played.turns] == [2, 3, 3, 3]
    for request, result in played.turns:
        assert result.prompt_ids.tolist() == request.prompt_ids.tolist()
        assert result.image_sha256s == tuple(span.sha256 for span in request.images)
        assert played.row.token_ids[: len(request.prompt_ids)].tolist() == request.prompt_ids.tolist()
        assert played.row.images[: len(request.images)] == request.images
    assert len(played.trajectory.turns) == 4
    assert {name for name in played.trajectory.counters.as_dict() if name.startswith("forks")} == set()
    assert played.trajectory.counters["bridges/derived"] == 3


async def test_i5_a_placeholder_that_a_tool_wrote_is_text(played: Played) -> None:
    placeholder_id = played.vision.processor.placeholder_id
    is_placeholder = played.row.token_ids == placeholder_id
    assert is_placeholder.sum() == sum(span.length for span in played.row.images)
    assert "A crop <|image_pad|>: " in vision_tokenizer().decode(played.row.token_ids[~is_placeholder])


async def test_i2_logprobs_of_the_trajectory_are_those_of_a_forward_pass_of_transformers(played: Played) -> None:
    difference = played.largest_difference(played.row.images)
    print(f"largest difference of a logprob: {difference:.3g}")
    assert played.row.sampled_mask.sum() >= 40
    assert difference < EXACT


async def test_images_of_one_size_that_the_trainer_swaps_show_in_the_logprobs(played: Played) -> None:
    first, second, third = played.row.images
    swapped = (replace(first, image=second.image), replace(second, image=first.image), third)
    difference = played.largest_difference(swapped)
    print(f"largest difference of a logprob: {difference:.3g}")
    assert difference > 0.1
