"""Rows with images in the trainer: logprobs against a model called on its own, and images that do not fit refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch

from support.gradients import SUBTRACT_GRADIENT, step_gradient
from support.image_rows import Vision, moved
from support.models import tiny_qwen3
from support.vision import FAMILIES, PAD, picture
from unbroken.errors import ImageError, InvalidInputError, InvariantError
from unbroken.images.processor import HfImageProcessor, ProcessedImage
from unbroken.training.config import Packing, TrainerConfig
from unbroken.training.model.backbone import accepted_inputs
from unbroken.training.model.images import PixelInputs, RowImages
from unbroken.training.model.lanes import RowLayout
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.training.trainer import Trainer
from unbroken.types import EncodedImage, KeptIds, TrainingSample

pytest.importorskip("torchvision", reason="the image processors of transformers need it")

WIDE, TALL, SMALL = picture(112, 56, seed=1), picture(56, 84, seed=2), picture(28, 28, seed=3)
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
IMAGE = f"<|vision_start|>{PAD}<|vision_end|>"


@pytest.fixture(scope="module", params=FAMILIES)
def vision(request, tmp_path_factory) -> Vision:
    return Vision.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Vision:
    return Vision.make(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


def make_trainer(vision: Vision, images: Any = None, **config: Any) -> Trainer:
    return Trainer(vision.model(), TrainerConfig(**config), images=images or vision.images)


FEWER_PIXELS = '{"size":{"longest_edge":3136,"shortest_edge":784}}'

CONVERSATIONS = (
    ([USER, "What is a tool?", ASSISTANT], "A function that I may call." + END, [], ""),
    ([USER, TALL, "What is this?", ASSISTANT], "Noise." + END, [], ""),
    (
        [USER, WIDE, "and", SMALL, "differ?", ASSISTANT],
        "Let me look again." + END,
        [USER, TALL, ASSISTANT],
        "Yes." + END,
    ),
    ([USER, "Draw something", ASSISTANT], "Here it is:" + END, [USER, "A tool says", WIDE, ASSISTANT], "Thanks!" + END),
)
"""Given parts, a sampled text, then perhaps more given parts and another sampled text."""


def row_of(vision: Vision, conversation: tuple) -> TrainingSample:
    first, said, then, said_then = conversation
    return vision.row(*first, tuple(vision.encode(said)), *then, *([tuple(vision.encode(said_then))] if then else []))


def reference_logprobs(vision: Vision, conversation: tuple) -> tuple[list[int], np.ndarray]:
    """The row's ids and the logprob of each after the first, by transformers alone: its processor on the whole text
    with all pictures, and the model's own forward. No row beside it, no padding."""
    first, said, then, said_then = conversation
    parts = [*first, said, *then, *([said_then] if then else [])]
    pictures = [part for part in parts if not isinstance(part, str)]
    text = "".join(part if isinstance(part, str) else IMAGE for part in parts)
    inputs = vision.processor(
        text=[text],
        images=[pictures] if pictures else None,
        add_special_tokens=False,
        return_mm_token_type_ids=vision.family == "qwen2_5_vl",
        return_tensors="pt",
    )
    with torch.no_grad():
        logprobs_TV = vision.model()(**inputs, use_cache=False).logits[0].float().log_softmax(-1)
    ids = inputs["input_ids"][0]
    return ids.tolist(), logprobs_TV[:-1].gather(-1, ids[1:, None])[:, 0].numpy()


def check_against_reference(vision: Vision, found: list, conversations=CONVERSATIONS) -> None:
    for conversation, logprobs in zip(conversations, found, strict=True):
        row = row_of(vision, conversation)
        ids, expected = reference_logprobs(vision, conversation)
        assert row.token_ids.tolist() == ids
        np.testing.assert_array_equal(np.isfinite(logprobs), row.sampled_mask)
        np.testing.assert_allclose(logprobs[row.sampled_mask], expected[row.sampled_mask[1:]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("tokens_per_micro_batch", [1, 100, 10_000])
def test_logprobs_of_a_mixed_batch_are_those_of_the_model_called_on_each_row_alone(vision, tokens_per_micro_batch):
    trainer = make_trainer(vision, tokens_per_micro_batch=tokens_per_micro_batch)
    check_against_reference(vision, trainer.logprobs([row_of(vision, c) for c in CONVERSATIONS]))


def test_rows_with_images_have_the_distribution_over_their_kept_ids(vision):
    """For parts S and C of the vocabulary and an id t: 1 / p(t in S + t) + 1 / p(t in C + t) = 1 / p(t) + 1."""
    rows, trainer = [row_of(vision, c) for c in CONVERSATIONS], make_trainer(vision)
    parts = np.array_split(np.random.default_rng(0).permutation(trainer.backend.vocab_size), 2)

    def keep(row: TrainingSample, part: np.ndarray) -> TrainingSample:
        masked = zip(row.token_ids, row.sampled_mask, strict=True)
        return replace(row, kept_ids=KeptIds.of([np.union1d(part, [t]) if sampled else [] for t, sampled in masked]))

    whole, *cut = (trainer.logprobs(each) for each in (rows, *([keep(row, part) for row in rows] for part in parts)))
    for row, expected, first, second in zip(rows, whole, *cut, strict=True):
        mask = row.sampled_mask
        found = 1 / np.exp(first[mask]) + 1 / np.exp(second[mask]) - 1
        np.testing.assert_allclose(found, 1 / np.exp(expected[mask]), rtol=1e-3)


def test_logprobs_depend_on_the_picture(vision):
    rows = [vision.row(USER, picture(56, 56, seed=seed), ASSISTANT, (5, 6, 7)) for seed in (0, 1)]
    assert rows[0].token_ids.tolist() == rows[1].token_ids.tolist()
    first, second = make_trainer(vision).logprobs(rows)
    assert np.nanmax(np.abs(first - second)) > 1e-3


def test_a_row_may_end_with_an_image(vision):
    """Its last id is fed too: without it the model would find fewer ids than the image has features."""
    whole = vision.row(USER, TALL, ASSISTANT, (5, 6), WIDE)
    span = whole.images[-1]
    cut = replace(whole, **{name: getattr(whole, name)[: span.stop] for name in ROW_ARRAYS})
    without = replace(
        whole, images=whole.images[:1], **{name: getattr(whole, name)[: span.offset] for name in ROW_ARRAYS}
    )
    trainer = make_trainer(vision)
    (found,), (expected,) = trainer.logprobs([cut]), trainer.logprobs([without])
    np.testing.assert_allclose(found[: span.offset], expected, atol=1e-5)


ROW_ARRAYS = ("token_ids", "sampled_mask", "loss_mask", "rollout_logprobs", "policy_versions", "advantages")


def test_the_embeddings_run_once_for_any_ids(vision):
    """Processes gather sharded ones together, each time that they run."""
    model, calls = vision.model(), []
    model.get_input_embeddings().register_forward_hook(lambda *_: calls.append(1))
    trainer = Trainer(model, TrainerConfig(), images=vision.images)
    for sampled in ((5, 6), (5, vision.images.placeholder_id)):
        calls.clear()
        trainer.logprobs([vision.row(USER, SMALL, ASSISTANT, sampled)])
        assert len(calls) == 1


def test_a_sampled_placeholder_id_is_text_as_it_was_for_the_sampler(vision):
    """Against sampling as engines do it: the prompt with its image first, then one id at a time, without pixels."""
    completion = (5, vision.images.placeholder_id, 6, vision.images.placeholder_id, 7)
    row = vision.row(USER, TALL, ASSISTANT, completion)
    num_prompt = len(row.token_ids) - len(completion)
    model = vision.model()
    cache_name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # before 5.24
    pixels = RowImages(vision.images, max_bytes=0).inputs([row.images], (1, num_prompt), torch.device("cpu"))
    expected = []
    with torch.no_grad():
        prompt_BT = torch.tensor(row.token_ids[None, :num_prompt].astype(np.int64))
        out = model(input_ids=prompt_BT, use_cache=True, **accepted_inputs(model, pixels))
        for token_id in completion:
            expected.append(float(out.logits[0, -1].log_softmax(-1)[token_id]))
            out = model(input_ids=torch.tensor([[token_id]]), use_cache=True, **{cache_name: out[cache_name]})
    beside = row_of(vision, CONVERSATIONS[2])
    for found in (make_trainer(vision).logprobs([row])[0], make_trainer(vision).logprobs([beside, row])[1]):
        np.testing.assert_allclose(found[num_prompt:], expected, atol=1e-5, rtol=0)


def test_rows_together_have_the_gradient_of_rows_apart(vision):
    rows = [row_of(vision, conversation) for conversation in CONVERSATIONS]
    together, apart = (gradient_of(vision, rows, budget) for budget in (100_000, 1))
    largest = max(float(gradient.abs().max()) for gradient in together.values())
    for name, gradient in together.items():
        assert (gradient - apart[name]).abs().max() < 1e-4 * largest, name
    for tower in ("vis", "language_model"):
        assert max(float(gradient.abs().max()) for name, gradient in together.items() if tower in name) > 1e-2 * largest


def gradient_of(vision: Vision, rows: list[TrainingSample], tokens_per_micro_batch: int) -> dict[str, torch.Tensor]:
    """The gradient of one step."""
    trainer = make_trainer(vision, optimizer=SUBTRACT_GRADIENT, tokens_per_micro_batch=tokens_per_micro_batch)
    return step_gradient(trainer, rows)[1]


def test_a_pass_without_images_has_no_pixel_inputs_and_one_with_images_no_positions_of_ours(qwen):
    passed = []
    model = qwen.model()
    trainer = Trainer(model, TrainerConfig(tokens_per_micro_batch=1), images=qwen.images)
    model.model.register_forward_pre_hook(lambda _module, _args, inputs: passed.append(set(inputs)), with_kwargs=True)
    trainer.logprobs([row_of(qwen, CONVERSATIONS[0])])
    trainer.logprobs([row_of(qwen, CONVERSATIONS[1])])
    text = {"input_ids", "use_cache"}
    assert passed == [text, text | {"pixel_values", "image_grid_thw", "mm_token_type_ids"}]


def test_inputs_that_the_model_does_not_name_are_not_passed(vision):
    pixels = PixelInputs(
        token_types_BT=torch.zeros(1, 2), tensors={"pixel_values": torch.zeros(1), "of_another_kind": torch.zeros(1)}
    )
    names = set(accepted_inputs(vision.model(), pixels))
    assert names == {"pixel_values"} | ({"mm_token_type_ids"} if vision.family == "qwen2_5_vl" else set())


class CountingProcessor:
    """A processor that counts what it processes."""

    def __init__(self, processor: HfImageProcessor) -> None:
        self._processor = processor
        self.placeholder_id = processor.placeholder_id
        self.setting_names = processor.setting_names
        self.expand = processor.expand
        self.seen: Counter[tuple[str, str]] = Counter()

    def process(self, image: EncodedImage, settings: str = "{}", *, name: str = "image") -> ProcessedImage:
        self.seen[image.sha256, settings] += 1
        return self._processor.process(image, settings, name=name)


def group_of(vision: Vision) -> list[TrainingSample]:
    return [vision.row(USER, TALL, WIDE, ASSISTANT, (k, k + 1)) for k in range(4)]


@pytest.mark.parametrize("old_logprobs", ["sampler", "recompute"])
def test_an_image_of_many_rows_is_processed_once_in_a_step_and_again_in_the_next(qwen, old_logprobs):
    counting = CountingProcessor(qwen.images)
    trainer = make_trainer(qwen, counting, tokens_per_micro_batch=1, num_minibatches=2)
    counting.seen.clear()  # of the trial at construction
    trainer.step(group_of(qwen))
    assert list(counting.seen.values()) == [1, 1]
    trainer.step(group_of(qwen))
    assert list(counting.seen.values()) == [2, 2]


def test_without_room_to_remember_images_are_processed_again_and_nothing_else_changes(qwen):
    counting = CountingProcessor(qwen.images)
    forgetful = make_trainer(qwen, counting, image_cache_bytes=0, tokens_per_micro_batch=1)
    counting.seen.clear()
    found = forgetful.logprobs(group_of(qwen))
    assert list(counting.seen.values()) == [8, 8], "four times to check, four times to compute"
    for mine, expected in zip(
        found, make_trainer(qwen, tokens_per_micro_batch=1).logprobs(group_of(qwen)), strict=True
    ):
        np.testing.assert_array_equal(mine, expected)


def test_what_is_remembered_stays_within_its_bytes(qwen):
    counting = CountingProcessor(qwen.images)
    row = qwen.row(USER, TALL, WIDE, SMALL, ASSISTANT, (5,))
    sizes = [sum(t.nbytes for t in qwen.images.process(span.image).inputs.values()) for span in row.images]
    images = RowImages(counting, max_bytes=sizes[1] + sizes[2])
    images.check(row, name="row")
    images.check(replace(row, images=row.images[1:], token_ids=without(row, 0)), name="row")
    assert list(counting.seen.values()) == [1, 1, 1], "the last two are remembered"
    images.check(row, name="row")
    assert counting.seen[row.images[0].sha256, "{}"] == 2, "the first was forgotten to make room for the third"


def without(row: TrainingSample, k: int) -> np.ndarray:
    """The row's ids with another id in place of one image."""
    ids = row.token_ids.copy()
    ids[row.images[k].offset : row.images[k].stop] = 1
    return ids


def test_i3_an_image_sampled_with_other_settings_is_refused_and_named(qwen):
    row = qwen.row(USER, SMALL, WIDE, ASSISTANT, (5,), settings=FEWER_PIXELS)
    wrong = replace(row, images=tuple(replace(span, settings="{}") for span in row.images))
    assert np.isfinite(make_trainer(qwen).logprobs([row])[0][-1])
    with pytest.raises(
        InvariantError,
        match=r"samples\[1\]\.images\[1\] \(sha256 [0-9a-f]{12}\.\.\., settings \{\}\) has 2 ids in the row, at \d+, "
        r"and 8 by the trainer's processor",
    ):
        make_trainer(qwen).step([row, wrong])


def test_i3_images_in_the_wrong_order_are_refused(qwen):
    row = qwen.row(USER, TALL, WIDE, ASSISTANT, (5,))
    first, second = row.images
    swapped = (replace(first, image=second.image), replace(second, image=first.image))
    with pytest.raises(InvariantError, match=r"samples\[0\]\.images\[0\] .* has 6 ids in the row, at .* and 8 by"):
        make_trainer(qwen).step([replace(row, images=swapped)])


def test_i3_ids_that_are_not_the_images_are_refused_though_they_are_as_many(qwen):
    row = qwen.row(USER, TALL, ASSISTANT, (5,))
    with pytest.raises(InvariantError, match=r"images\[0\] .* has 6 ids in the row, at \d+, and as many others by"):
        make_trainer(qwen).step([replace(row, token_ids=without(row, 0))])


def test_a_row_that_lost_an_image_is_refused(vision):
    row = vision.row(USER, TALL, WIDE, ASSISTANT, (5,))
    placeholder = vision.images.placeholder_id
    with pytest.raises(
        InvalidInputError,
        match=rf"samples\[0\]\.token_ids\[\d+\] is the image placeholder {placeholder}, .* none of the row's 1 images",
    ):
        make_trainer(vision).step([replace(row, images=row.images[:1])])


def test_a_refused_row_changes_no_weights(qwen):
    trainer = make_trainer(qwen)
    before = {name: weight.clone() for name, weight in trainer.named_weights()}
    good = qwen.row(USER, TALL, ASSISTANT, (5,))
    with pytest.raises(ImageError, match=r"samples\[1\]\.images\[0\] must be an image file"):
        trainer.step([good, replace(good, images=(replace(good.images[0], image=EncodedImage(b"no image")),))])
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.named_weights())
    assert trainer.policy_version == 0


def test_images_without_a_processor_are_refused(qwen):
    with pytest.raises(InvalidInputError, match=r"samples\[0\] has 1 images: give the trainer the model"):
        Trainer(qwen.model(), TrainerConfig()).step([qwen.row(USER, TALL, ASSISTANT, (5,))])


def test_a_row_cannot_be_cut_inside_an_image(qwen):
    row = qwen.row(USER, TALL, ASSISTANT, (5,))
    middle = row.images[0].offset + 2
    with pytest.raises(
        InvariantError, match=r"images\[0\] must start after the previous image and end within the \d+ tok"
    ):
        replace(row, **{name: getattr(row, name)[:middle] for name in ROW_ARRAYS})


def test_images_out_of_order_and_sampled_images_make_no_row(qwen):
    row = qwen.row(USER, TALL, WIDE, ASSISTANT, (5,))
    with pytest.raises(InvariantError, match=r"images\[1\] must start after the previous image"):
        replace(row, images=row.images[::-1])
    with pytest.raises(InvariantError, match=r"images\[1\] must not cover sampled ids, got some in \[\d+, \d+\)"):
        replace(row, images=(row.images[0], moved(row.images[1], by=len(row.token_ids) - row.images[1].stop)))


def test_a_text_model_with_a_processor_is_refused(qwen):
    with pytest.raises(InvalidInputError, match=r"Qwen3ForCausalLM must take at least one of the image inputs"):
        Trainer(tiny_qwen3(vocab_size=640), TrainerConfig(), images=qwen.images)


def test_the_processor_of_another_model_is_refused(qwen, tmp_path):
    llava = Vision.make(tmp_path / "llava", "llava")
    with pytest.raises(
        InvalidInputError, match=r"Qwen2_5_VLForConditionalGeneration must take what the image processor"
    ):
        Trainer(qwen.model(), TrainerConfig(), images=llava.images)


def test_dropout_in_the_vision_tower_is_switched_off(tmp_path):
    vision = Vision.make(tmp_path, "llava")
    model = vision.model()
    layers = [module for module in model.model.vision_tower.modules() if hasattr(module, "dropout")]
    assert layers
    for layer in layers:
        layer.dropout = 0.5
    PolicyLogprobs(model, chunk_size=8, images=RowImages(vision.images, max_bytes=0))
    assert [layer.dropout for layer in layers] == [0.0] * len(layers)


def test_rows_that_may_have_images_are_padded_and_not_packed(vision):
    images = RowImages(vision.images, max_bytes=0)
    assert PolicyLogprobs(vision.model(), chunk_size=8, images=images).layout is RowLayout.PADDED
    with pytest.raises(InvalidInputError, match="cannot be packed: it takes images"):
        PolicyLogprobs(vision.model(), chunk_size=8, images=images, packing=Packing.ONE_LANE)


def test_every_parameter_gets_a_gradient_in_a_pass_without_images(vision):
    """Zero where nothing depends on it: processes that exchange gradients wait for each of them."""
    policy = PolicyLogprobs(vision.model(), chunk_size=8)
    ids_BT = torch.tensor([[1, 2, 3]])
    policy(ids_BT, torch.tensor([[False, True, True]]), 1.0).logprobs_N.sum().backward()
    gradients = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    beside = {name for name, gradient in gradients.items() if not gradient.any()}
    assert any("vis" in name for name in beside)
    assert not any("language_model.layers" in name for name in beside)
