"""`Numerics.EXACT` with vLLM, as far as a machine without a Hopper GPU goes: what is refused, how weights are rounded.

That the bits are equal is shown by tests/gpu/test_cuda_exact_numerics.py.
"""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch.nn.functional import linear
from transformers import (
    AutoModelForImageTextToText,
    GemmaConfig,
    LlamaConfig,
    LlavaNextConfig,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen3Config,
)

import support.vllm_session  # noqa: F401  # vLLM's environment
from support.adapted import with_lora
from support.architectures import tiny_model
from support.models import tiny_qwen3
from support.vision import save_vision_model
from support.vision_engines import own_processor
from unbroken.engines.vllm import numerics
from unbroken.errors import InvalidInputError
from unbroken.exactness import call_rounded
from unbroken.training.config import TrainerConfig
from unbroken.training.model.adapters import causal_lm, merge_in_passes
from unbroken.training.model.weights import gather_weights
from unbroken.training.trainer import Trainer
from unbroken.types import Numerics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", hidden_size=64, head_dim=64).save_pretrained(folder)
    return folder


async def start(folder, *options):
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    arguments = parse_engine_args(["--model", str(folder), "--skip-tokenizer-init", *options])
    return await VllmEngine.start(arguments, numerics=Numerics.EXACT)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--tensor-parallel-size", "3"], "tensor_parallel_size = 3"),
        (["--quantization", "fp8"], "quantization = fp8"),
        (["--enable-lora"], "enable_lora = True"),
        (["--dtype", "float32"], "dtype = float32"),
        (["--model-impl", "vllm"], "model_impl = vllm"),
        (["--block-size", "32"], "block_size = 32"),
        (["--hf-overrides", '{"rope_theta": 1.0}'], "hf_overrides = "),
    ],
)
async def test_options_of_vllm_that_cannot_be_exact_are_refused_by_name(options, refused, folder):
    with pytest.raises(InvalidInputError, match=f"numerics must be fast with vLLM's {refused}.*, got exact"):
        await start(folder, *options)


async def test_a_machine_without_a_hopper_gpu_is_refused_by_name(folder, fresh_accelerate):
    with pytest.raises(InvalidInputError, match=r"fast in bfloat16 with vLLM on this cpu device, got exact.*H100"):
        await start(folder)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(InvalidInputError, match=r"fast in bfloat16 with vLLM on this cpu device, got exact.*H100"):
        Trainer(tiny_qwen3(), TrainerConfig(numerics=Numerics.EXACT), accelerator=accelerator)


def test_gradient_checkpointing_is_refused(bfloat16):
    config = TrainerConfig(numerics=Numerics.EXACT, gradient_checkpointing=True)
    with pytest.raises(InvalidInputError, match="numerics must be fast with gradient_checkpointing in bfloat16"):
        Trainer(tiny_qwen3(), config, accelerator=bfloat16)


def tied_text():
    text = {"model_type": "llama", "tie_word_embeddings": True}
    return LlavaNextConfig(text_config=text, tie_word_embeddings=False)


def test_images_are_refused(bfloat16, tmp_path):
    images = own_processor(save_vision_model(tmp_path))
    config = TrainerConfig(numerics=Numerics.EXACT)
    with pytest.raises(InvalidInputError, match="fast with images, got exact: text is exact with images = false"):
        Trainer(AutoModelForImageTextToText.from_pretrained(tmp_path), config, accelerator=bfloat16, images=images)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (Qwen3Config(layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2), "layers of sliding_"),
        (Qwen3Config(head_dim=96), "attention heads of 96"),
        (LlamaConfig(hidden_size=64, num_attention_heads=2), "attention heads of 32"),
        (tiny_model("qwen3_moe").config, "experts"),
        (Qwen2AudioConfig(), "an encoder"),
        (tied_text(), "tie_word_embeddings in its text_config alone"),
        (tiny_model("mistral", sliding_window=64).config, "a sliding_window"),
    ],
)
async def test_models_that_are_not_known_to_be_exact_are_refused_by_name(config, refused, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match=f"numerics must be fast with vLLM for .*, which has {refused}"):
        await start(tmp_path)


@pytest.mark.parametrize("config", [GemmaConfig(), Qwen3Config(head_dim=64), LlamaConfig(), Qwen2_5_VLConfig()])
async def test_models_of_other_sizes_and_the_text_of_image_models_are_not(config, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="on this cpu device"):
        await start(tmp_path)


def tiny_model_in(dtype):
    """As it is loaded: buffers stay float32."""
    model = tiny_qwen3()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def weigh(hidden):
    return torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_a_pass_with_rounded_weights_is_that_of_the_model_that_is_published(base):
    """With adapters, whose layers round W + scaling B A."""
    model = with_lora(tiny_model_in(base))
    merge_in_passes(model)
    published = tiny_model_in(torch.bfloat16)
    weights = {name: weight.to(torch.bfloat16) for name, weight in gather_weights(model)}
    published.load_state_dict(weights, strict=False)  # the head is tied
    ids, decoder = torch.arange(12)[None], causal_lm(model).model
    with torch.autocast("cpu", torch.bfloat16):
        hidden = call_rounded(decoder, torch.bfloat16, input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(hidden, published.model(input_ids=ids, use_cache=False).last_hidden_state)
    with model.disable_adapter(), torch.no_grad():
        alone = call_rounded(decoder, torch.bfloat16, input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(alone, tiny_model_in(torch.bfloat16).model(input_ids=ids, use_cache=False).last_hidden_state)


@pytest.mark.parametrize("adapt", [lambda model: model, with_lora])
def test_the_gradient_through_rounded_weights_is_close_to_that_without(adapt):
    """With adapters, where the sum W + scaling B A is rounded, in float32 for A and B."""
    model, ids = adapt(tiny_qwen3()), torch.arange(12)[None]
    decoder = causal_lm(model).model
    hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
    (hidden * weigh(hidden)).sum().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    model.zero_grad(set_to_none=True)
    merge_in_passes(model)
    rounded = call_rounded(decoder, torch.bfloat16, input_ids=ids, use_cache=False).last_hidden_state
    (rounded.float() * weigh(hidden)).sum().backward()
    for name, gradient in expected.items():
        found = model.get_parameter(name).grad
        assert found.dtype == torch.float32
        assert torch.cosine_similarity(found.flatten(), gradient.flatten(), dim=0) > 0.99, name


@pytest.mark.parametrize("num_parts", [2, 4])
def test_layers_that_processes_cut_by_their_inputs_round_each_part_and_add_all_in_float32(num_parts):
    model, seen = with_lora(tiny_model_in(torch.bfloat16)), {}
    decoder = causal_lm(model).model
    for name, module in decoder.named_modules():
        if name.endswith(("o_proj.base_layer", "down_proj.base_layer")):
            module.bias = torch.nn.Parameter(torch.randn(module.out_features).bfloat16())
            module.register_forward_hook(lambda own, x, got, name=name: seen.update({name: (own.bias, *x, got)}))
    merge_in_passes(model)
    numerics.multiply_in_parts(causal_lm(model), num_parts)
    call_rounded(decoder, torch.bfloat16, input_ids=torch.arange(12)[None], use_cache=False)
    assert len(seen) == 2 * len(decoder.layers)
    weights = dict(gather_weights(model))
    for name, (bias, x, got) in seen.items():
        weight = weights[f"model.{name.removesuffix('.base_layer')}.weight"].to(torch.bfloat16)
        parts = zip(x.chunk(num_parts, -1), weight.chunk(num_parts, 1), strict=True)
        first, *rest = ([each.contiguous() for each in part] for part in parts)
        total = sum((linear(*part).float() for part in rest), linear(*first, bias).float())
        assert torch.equal(got, total.to(torch.bfloat16)), name


def test_a_model_that_does_not_say_how_it_is_cut_is_refused():
    model = tiny_qwen3()
    model.get_decoder().tp_plan = {}
    with pytest.raises(InvalidInputError, match="tensor_parallel_size = 2: Qwen3ForCausalLM has no tp_plan"):
        numerics.multiply_in_parts(model, 2)
