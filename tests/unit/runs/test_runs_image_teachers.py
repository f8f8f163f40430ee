"""Teachers of rows with images: the same ids and pixels as the policy, or a refusal with the setting that differs."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from support.gateways import CHAT
from support.gradients import SUBTRACT_GRADIENT
from support.image_rows import Vision
from support.image_servers import CAT, DOG, data_url, make_vision_app, user_message, vision_engine
from support.scripted_env import ScriptedEnv
from support.servers import listening
from support.vision import FAMILIES, picture, vision_tokenizer
from unbroken.client import AsyncClient
from unbroken.engines.scripted import ScriptedEngine
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError
from unbroken.gateway.app import create_gateway
from unbroken.images.decoder import encode_picture
from unbroken.images.loader import ImageLoader
from unbroken.images.processor import ImageInputs
from unbroken.ledger.store import open_store
from unbroken.ledger.tree import export_samples
from unbroken.rendering.base import Renderer
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.agents.runner import run_agent_group
from unbroken.rollout.agents.session import AgentSession
from unbroken.rollout.env import Continue
from unbroken.rollout.limits import Limits
from unbroken.rollout.runner import run_rollout
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.runs.config import RendererConfig, RunConfig, TeacherConfig
from unbroken.runs.models import load_model_renderer
from unbroken.runs.python_files import ModelName
from unbroken.runs.teachers import open_teachers
from unbroken.server.app import create_app
from unbroken.server.config import ServerConfig
from unbroken.server.process import host_app
from unbroken.training.config import LoopConfig, OldLogprobs, TrainerConfig
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.objective.policy_gradient import ALGORITHMS
from unbroken.training.objective.samples import TrajectoryRows
from unbroken.training.teachers import Teachers, TeacherTask, make_teacher_row
from unbroken.training.trainer import Trainer
from unbroken.types import SamplingParams, TrainingSample

pytest.importorskip("torchvision", reason="the image processors of transformers need it")

USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"


@pytest.fixture(scope="module", params=FAMILIES)
def vision(request, tmp_path_factory) -> Vision:
    return Vision.make(tmp_path_factory.mktemp(request.param) / "policy", request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Vision:
    return Vision.make(tmp_path_factory.mktemp("qwen") / "policy", "qwen2_5_vl")


def copy_model(vision: Vision, name: str, **changes: Any) -> Path:
    """The same model in another folder, with other settings of its image processor."""
    folder = vision.folder.parent / name
    shutil.copytree(vision.folder, folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


async def open_one(
    stack: AsyncExitStack, vision: Vision, teacher: Path | str, *, prompt: str | None = None
) -> Teachers:
    models = (ModelName(str(teacher)),)
    config = RunConfig(
        output=vision.folder.parent / "run",
        loop=LoopConfig(num_steps=1),
        teacher=TeacherConfig(models=models, prompt=prompt),
    )
    found = await open_teachers(
        stack, config, vision.folder, context_length=4096, images=ImageInputs(processor=vision.images)
    )
    assert found is not None
    return found


def make_trainer(vision: Vision, teachers: Teachers, **changes: Any) -> Trainer:
    config = TrainerConfig(optimizer=SUBTRACT_GRADIENT, teacher_weight=1.0, **changes)
    return Trainer(
        vision.model(), config, objective=ALGORITHMS["distillation"], teachers=teachers, images=vision.images
    )


def rows_of(vision: Vision, trainer: Trainer) -> list[TrainingSample]:
    """Rows as the own weights would have sampled them: with one picture, with two in two turns, and without any."""
    first, second = tuple(vision.encode("Noise." + END)), tuple(vision.encode("Yes." + END))
    rows = [
        vision.row(USER, picture(56, 84, seed=2), "What is this?", ASSISTANT, first),
        vision.row(USER, picture(28, 28, seed=3), ASSISTANT, first, USER, picture(112, 56, seed=1), ASSISTANT, second),
        vision.row(USER, "What is a tool?", ASSISTANT, second),
    ]
    return [replace(row, rollout_logprobs=own) for row, own in zip(rows, trainer.logprobs(rows), strict=True)]


# Numerics are fast with images: equal bits are those of equal passes, in which both sides are computed.
async def test_the_policy_itself_is_at_no_distance_from_itself_with_images(vision):
    async with AsyncExitStack() as stack:
        trainer = make_trainer(
            vision, await open_one(stack, vision, copy_model(vision, "itself")), old_logprobs=OldLogprobs.RECOMPUTE
        )
        rows = rows_of(vision, trainer)
        metrics = step_metrics(trainer.step(rows))
        assert metrics["teacher/kl"] == metrics["teacher/worse_share"] == 0
        assert metrics["teacher/token_share"] == 1


ASKED = "Which is larger?"
HINT = "It is the first. " + ASKED
FIRST, SECOND = (encode_picture(picture(56, 84, seed=seed)) for seed in (8, 9))


def image_of(picture_file: Any) -> Any:
    return {"type": "image", "image": picture_file}


async def play(vision: Vision, name: str, *pictures: Any, again: Any = None) -> Trajectory:
    """A question about pictures, and another picture from the environment after the first answer."""
    question: Any = [{"role": "user", "content": [*map(image_of, pictures), {"type": "text", "text": ASKED}]}]
    more: Any = [{"role": "user", "content": [{"type": "text", "text": "And it?"}, image_of(again)]}]
    trajectory = await run_rollout(
        ScriptedEnv([Continue(messages=more)] if again else [], messages=question),
        engine=ScriptedEngine(lambda prompt_ids: vision.encode("Yes." + END), vocab_size=len(vision_tokenizer())),
        renderer=load_renderer(vision),
        sampling=SamplingParams(max_tokens=60),
        limits=Limits(),
        trajectory_id=name,
    )
    assert trajectory.error is None, trajectory.error
    return trajectory


def load_renderer(vision: Vision) -> Renderer:
    images = ImageInputs(processor=vision.images)
    return load_model_renderer(vision.folder, RendererConfig(), SamplingParams(), images=images)


def make_group(cell: Any, *members: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group_id="0", trajectories=members, data={"columns": {"hint": cell}})


def check_same(row: TrainingSample, other: TrainingSample) -> None:
    for field in fields(TrainingSample):
        ours, theirs = getattr(row, field.name), getattr(other, field.name)
        same = np.array_equal(ours, theirs, equal_nan=True) if isinstance(ours, np.ndarray) else ours == theirs
        assert same, field.name


async def test_a_teacher_with_a_hint_sees_the_pictures_of_the_row(vision):
    """Its row is the own rendering of its conversation, and its logprobs are those of that row."""
    files = [picture(56, 84, seed=2), picture(28, 28, seed=3), picture(112, 56, seed=1)]
    trajectory = await play(vision, "a", *files[:2], again=files[2])
    async with AsyncExitStack() as stack:
        teachers = await open_one(stack, vision, vision.folder, prompt="hint")
        task = teachers.find_task(make_group(HINT, trajectory))
        own_task = teachers.find_task(make_group(ASKED, trajectory))
        trainer = make_trainer(vision, teachers, old_logprobs=OldLogprobs.RECOMPUTE)
        assert task is not None
        assert task.unproven == {}
        (row,) = export_samples(trajectory.tree, 0.0)
        own = make_teacher_row(row, task)
        conversation = trajectory.messages[:-1]
        first: Any = [{"role": "user", "content": [*map(image_of, files[:2]), {"type": "text", "text": HINT}]}]
        rendered = load_renderer(vision).render([*first, *conversation[1:]])
        assert own.token_ids[: len(rendered.token_ids)].tolist() == rendered.token_ids.tolist()
        assert own.images == rendered.images
        assert [span.image for span in own.images] == [encode_picture(each) for each in files]
        assert own_task is not None
        check_same(make_teacher_row(row, own_task), row)

        unit = TrajectoryRows(rows=(row,), group="0", trajectory="a", task=own_task)
        assert step_metrics(trainer.step([unit]))["teacher/kl"] == 0  # and so no update
        (ours, theirs) = (
            each.astype(np.float64)[sample.sampled_mask]
            for sample, each in zip((row, own), trainer.logprobs([row, own]), strict=True)
        )
        found = step_metrics(trainer.step([replace(unit, task=task)]))["teacher/kl"]
        assert found == pytest.approx((ours - theirs).mean(), abs=1e-5)
        assert abs(found) > 1e-3


async def show_twice(session: AgentSession) -> float:
    """An agent that asks about a picture, and about another one."""
    messages: list[Any] = [{"role": "system", "content": "Look."}, user_message("what", data_url(CAT), "is it?")]
    async with httpx.AsyncClient(base_url=session.anthropic_base_url) as client:
        for more in (user_message("and", data_url(DOG), "?"), None):
            answer = await client.post(CHAT, json={"messages": messages})
            assert answer.status_code == 200, answer.text
            messages += [answer.json()["choices"][0]["message"], more]
    return 0.0


async def run_agent(stack: AsyncExitStack, agent: Any, vision: Vision, folder: Path) -> TrajectoryGroup:
    """A session of an agent at a gateway that takes images."""
    inputs = ImageInputs(processor=vision.images, loader=ImageLoader(files=False))
    app = create_gateway(
        vision_engine(),
        lambda options: TemplateRenderer(vision_tokenizer(), template_kwargs=options, images=inputs),
        TextCodec(vision_tokenizer()),
        ServerConfig(model_name="tiny"),
        store=open_store(str(folder / "store")),
        image_processor=vision.images,
    )
    await stack.enter_async_context(app.router.lifespan_context(app))
    client = await stack.enter_async_context(AsyncClient(await stack.enter_async_context(host_app(app))))
    settings: Any = {"sampling": SamplingParams(max_tokens=9), "limits": Limits(), "group_id": "0"}
    group = await run_agent_group(agent, 1, gateway=client.sessions, task={}, **settings)
    assert [each.error for each in group.trajectories] == [None]
    return group


async def test_pictures_that_an_agent_sends_are_its_teachers_too(qwen, tmp_path):
    async with AsyncExitStack() as stack:
        group = await run_agent(stack, show_twice, qwen, tmp_path)
        teachers = await open_one(stack, qwen, qwen.folder, prompt="hint")
        task = teachers.find_task(replace(group, data={"columns": {"hint": HINT}}))
        assert task is not None
        assert task.unproven == {}
        (row,) = export_samples(group.trajectories[0].tree, 0.0)
        own = make_teacher_row(row, task)
        make_trainer(qwen, teachers).backend.check_rows([own])
    assert [span.image for span in own.images] == [span.image for span in row.images] == [CAT, DOG]
    text = vision_tokenizer().decode(own.token_ids)
    assert "Look." not in text
    assert text.count("It is the first.") == 1


async def replace_picture(session: AgentSession) -> float:
    """An agent that shows another picture of the same size in its first message, once that has an answer."""
    async with httpx.AsyncClient(base_url=session.anthropic_base_url) as client:
        messages: list[Any] = [user_message("what", data_url(FIRST), "is it?")]
        answer = await client.post(CHAT, json={"messages": messages})
        assert answer.status_code == 200, answer.text
        shown = user_message("what", data_url(SECOND), "is it?")
        messages = [shown, answer.json()["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        assert (await client.post(CHAT, json={"messages": messages})).status_code == 200
    return 0.0


async def test_a_picture_that_an_agent_replaced_by_one_of_the_same_size_is_a_fork(qwen, tmp_path):
    """Its ids continue the turn before: only the picture says that the second row had another prompt."""
    async with AsyncExitStack() as stack:
        group = await run_agent(stack, replace_picture, qwen, tmp_path)
        (trajectory,) = group.trajectories
        rows = export_samples(trajectory.tree, 0.0)
        assert [[span.image for span in row.images] for row in rows] == [[FIRST], [SECOND]]
        teachers = await open_one(stack, qwen, qwen.folder, prompt="hint")
        task = teachers.find_task(replace(group, data={"columns": {"hint": HINT}}))
        assert task is not None
        assert task.unproven == {trajectory.trajectory_id: "forked"}


async def test_the_places_of_a_prompt_get_the_pictures_in_their_order(qwen):
    files = [picture(56, 84, seed=2), picture(28, 28, seed=3)]
    trajectory, other = await play(qwen, "a", *files), await play(qwen, "b", *files[::-1])
    place = {"type": "image"}
    cell = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "text", "text": "1"}, place, {"type": "text", "text": "2"}, place]},
    ]
    async with AsyncExitStack() as stack:
        teachers = await open_one(stack, qwen, qwen.folder, prompt="hint")
        task = teachers.find_task(make_group(cell, trajectory, other))
        assert task is not None
        assert [span.image for span in task.prompt_images] == [encode_picture(each) for each in files]
        assert task.unproven == {"b": "other_images"}
        given = [{"role": "user", "content": [{"type": "image", "image": "solution.png"}]}]
        for refused, words in (
            (given, r"must have places for images, .* got an image of its own in messages\[0\]\.content\[0\]"),
            (cell[1:] * 2, "or one for each of the 2 of the policy's prompt, got 4"),
            ([{"role": "system", "content": "Look."}], "must have a user message for its 2 images"),
        ):
            with pytest.raises(InvalidInputError, match="group 0 cannot be rendered: a cell .* " + words):
                teachers.find_task(make_group(refused, trajectory))


async def test_a_prompt_whose_pictures_are_not_given_is_refused(qwen):
    async with AsyncExitStack() as stack:
        trainer = make_trainer(qwen, await open_one(stack, qwen, qwen.folder))
        (row,) = export_samples((await play(qwen, "a", picture(28, 28, seed=3))).tree, 1.0)
        task = TeacherTask(teacher="policy", prompt_ids=row.token_ids[: int(row.sampled_mask.argmax())])
        with pytest.raises(
            InvalidInputError, match=r"row 0 of teacher 'policy'\.token_ids\[\d+\] is the image placeholder"
        ):
            trainer.step([TrajectoryRows(rows=(row,), group="0", trajectory="a", task=task)])


async def test_an_adapter_sees_the_pictures_too(qwen):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(qwen.model(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=True))
    adapted.save_pretrained(qwen.folder.parent / "adapter")
    async with AsyncExitStack() as stack:
        trainer = make_trainer(
            qwen, await open_one(stack, qwen, qwen.folder.parent / "adapter"), old_logprobs=OldLogprobs.RECOMPUTE
        )
        assert step_metrics(trainer.step(rows_of(qwen, trainer)))["teacher/kl"] == 0


async def test_a_server_sees_the_same_pictures(qwen):
    engine = TransformersEngine(qwen.model(), image_processor=qwen.images)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(listening(make_vision_app(engine, images=qwen.images)))
        trainer = make_trainer(qwen, await open_one(stack, qwen, url))
        rows = rows_of(qwen, trainer)
        assert abs(step_metrics(await asyncio.to_thread(trainer.step, rows))["teacher/kl"]) < 1e-6


async def test_a_teacher_that_would_see_other_pictures_or_none_is_refused_by_name(qwen):
    other = copy_model(qwen, "other", image_mean=[0.4, 0.5, 0.5])
    blind = copy_model(qwen, "blind")
    (blind / "preprocessor_config.json").unlink()
    text = copy_model(qwen, "text")
    config = json.loads((text / "config.json").read_text())
    text_config = {**config["text_config"], "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    (text / "config.json").write_text(json.dumps(text_config))
    for folder, words in (
        (other, r"'.*other' has image_processor\.image_mean \[0\.4, .* where the policy has \[0\.5"),
        (blind, "'.*blind' takes no images"),
        (text, "'.*text' takes no images"),
    ):
        async with AsyncExitStack() as stack:
            with pytest.raises(InvalidInputError, match="must have the policy's image processor, and " + words):
                await open_one(stack, qwen, folder)


async def test_so_is_a_server(qwen):
    other = Vision.load(copy_model(qwen, "smaller", merge_size=1), "qwen2_5_vl").images
    async with listening(make_vision_app(vision_engine(), images=other)) as url, AsyncExitStack() as stack:
        with pytest.raises(
            InvalidInputError, match=rf"'{url}' has image_processor\.merge_size 1 where the policy has 2"
        ):
            await open_one(stack, qwen, url)
    text = create_app(
        vision_engine(),
        lambda options: TemplateRenderer(vision_tokenizer(), template_kwargs=options),
        TextCodec(vision_tokenizer()),
        ServerConfig(model_name="text"),
    )
    async with listening(text) as url, AsyncExitStack() as stack:
        with pytest.raises(InvalidInputError, match=rf"'{url}' takes no images, or does not say how"):
            await open_one(stack, qwen, url)
