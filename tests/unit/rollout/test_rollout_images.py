"""Rollouts with images: in the question and in tools' answers, one sequence with its spans."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from support.images import PAD, dot, dot_file, few_ids, image_renderer, said
from support.rollouts import play
from support.scripted_env import ScriptedEnv
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import ImageError, MessagesError
from unbroken.ledger.tree import export_samples
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.env import Continue, Rewrite
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.tools import tool
from unbroken.rollout.trajectory import Trajectory, TrajectoryStatus


class CountedPicture:
    """A picture that notes by which threads it was written into a file."""

    def __init__(self, seed: int) -> None:
        self.saved_by: list[threading.Thread] = []
        self._seed = seed

    def getbands(self) -> Any:
        return dot(self._seed).getbands()

    def save(self, file: Any, **options: Any) -> None:
        self.saved_by.append(threading.current_thread())
        dot(self._seed).save(file, **options)


def image(picture: Any) -> Any:
    return {"type": "image", "image": picture}


def script(tokenizer: Any, *texts: str, allow_forks: bool = False) -> ScriptedEngine:
    replies = [tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in texts]
    return ScriptedEngine(replies, allow_forks=allow_forks)


def call(name: str) -> str:
    return f'\n<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'


def check_against_rendering(trajectory: Trajectory, renderer: TemplateRenderer, engine: ScriptedEngine) -> None:
    """Each prompt was the whole rendering of the conversation before it, images and all."""
    turns = [k for k, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    for request, position in zip(engine.requests, turns, strict=True):
        rendered = renderer.render(trajectory.messages[:position], tools=trajectory.tools)
        assert request.prompt_ids.tolist() == rendered.token_ids.tolist()
        assert request.images == rendered.images


async def test_i1_images_in_the_question_and_in_a_tools_answer_stay_one_sequence() -> None:
    renderer, tokenizer = image_renderer()
    picture = CountedPicture(3)

    @tool
    def look() -> list[Any]:
        """Look at it."""
        return ["It is:", picture]

    @tool
    def count() -> int:
        """Count them."""
        return 3

    question: Any = [{"role": "user", "content": [image(dot(1)), {"type": "text", "text": f"or {PAD}"}, image(dot(2))]}]
    engine = script(tokenizer, call("look"), call("count"), "three")
    env = ToolEnv(question, [look, count], lambda messages: 1.0)
    trajectory = await play(env, engine, renderer=renderer)
    assert trajectory.error is None
    assert trajectory.counters.as_dict() == {"bridges/derived": 2, "history/kept": 2, "status/completed": 1}
    assert [len(request.images) for request in engine.requests] == [2, 3, 3]
    check_against_rendering(trajectory, renderer, engine)
    (leaf,) = trajectory.tree.leaves()
    path = trajectory.tree.path(leaf)
    assert [span.image for span in path.images] == [dot_file(1), dot_file(2), dot_file(3)]
    assert [span.length for span in path.images] == [few_ids(span.image, "{}") for span in path.images]
    pads = np.flatnonzero(path.token_ids == tokenizer.convert_tokens_to_ids(PAD))
    assert pads.tolist() == [k for span in path.images for k in range(span.offset, span.stop)]
    owners = [set(path.message_indices[span.offset : span.stop].tolist()) for span in path.images]
    assert owners == [{0}, {0}, {2}]
    assert trajectory.messages[2]["content"] == [{"type": "text", "text": "It is:"}, image(dot_file(3))]
    assert [thread is threading.main_thread() for thread in picture.saved_by] == [False]
    (sample,) = export_samples(trajectory.tree, 1.0)
    assert [span.image for span in sample.images] == [dot_file(1), dot_file(2), dot_file(3)]


async def test_an_image_that_is_heard_again_is_the_same_image_and_shares_its_ids() -> None:
    renderer, tokenizer = image_renderer()
    question = {"role": "user", "content": [image(dot(1)), {"type": "text", "text": "a"}]}
    rewritten = Rewrite(messages=[question, {"role": "user", "content": [image(dot(2))]}])
    more = Continue(messages=[{"role": "user", "content": [image(dot(1))]}])
    engine = script(tokenizer, "one", "two", "three", allow_forks=True)
    env = ScriptedEnv([rewritten, more], messages=[question])
    trajectory = await play(env, engine, renderer=renderer)
    assert trajectory.error is None
    assert trajectory.counters.as_dict()["forks/rewritten_history"] == 1
    check = [[span.image for span in request.images] for request in engine.requests]
    assert check == [[dot_file(1)], [dot_file(1), dot_file(2)], [dot_file(1), dot_file(2), dot_file(1)]]
    first, second = (trajectory.tree.path(leaf) for leaf in trajectory.tree.leaves())
    (shared,) = set(first.images) & set(second.images)
    assert shared.image == dot_file(1)
    assert first.segments[0].node == second.segments[0].node


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        ([image(b"nothing")], ImageError, r"messages\[0\].content\[0\] must be an image file"),
        ([{"type": "image"}], MessagesError, r"messages\[0\].content\[0\] must have its image under 'image'"),
        (["a part"], MessagesError, r"messages\[0\].content\[0\] must be a part with a type"),
    ],
)
async def test_an_image_that_cannot_be_used_fails_the_rollout_with_its_place(
    content: Any, error: Any, says: str
) -> None:
    renderer, tokenizer = image_renderer()
    engine = script(tokenizer, "one", "two")
    env = ScriptedEnv([Continue(messages=[{"role": "user", "content": content}])])
    trajectory = await play(env, engine, renderer=renderer)
    assert trajectory.status is TrajectoryStatus.FAILED
    assert len(engine.requests) == 1
    with pytest.raises(error, match=says):
        raise trajectory.error


async def test_an_image_for_a_text_model_fails_the_rollout() -> None:
    _, tokenizer = image_renderer()
    env = ScriptedEnv(messages=[said("user", 1)])
    trajectory = await play(env, script(tokenizer), renderer=TemplateRenderer(tokenizer))
    assert isinstance(trajectory.error, MessagesError)
    assert "the model takes none" in str(trajectory.error)
