"""The format that is found for each template: a table written by hand from reading the templates."""

import pytest

from support.corpus import CorpusTemplate, corpus_templates
from support.format_templates import FORMAT_TEMPLATES, tokenizer_of
from support.templates import CHATML, LLAMA
from support.tokenizers import make_tokenizer
from unbroken.rendering.template import TemplateRenderer

EXPECTED = {
    "cohere": "cohere",
    "cohere2": "cohere2",
    "deepseek_r1_distill": "deepseek",
    "deepseekv3": "deepseek",
    "diffusion_gemma": "gemma4",
    "gemma": "none",
    "gemma3": "none",
    "gemma4": "gemma4",
    "gemma4_v2": "gemma4",
    "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "idefics3": "none",
    "lfm2": "lfm2",
    "lfm2_2_5": "lfm2",
    "lfm2_2_5_v2": "lfm2",
    "lfm2_2_5_vl": "lfm2",
    "lfm2_v2": "lfm2",
    "llama3": "llama3",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "llava_next": "mistral",
    "muse_glimmer": "muse",
    "nemotron_3_5_lightning": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder",
    "nemotron_3_super": "qwen3_coder",
    "nemotron_3_ultra": "qwen3_coder",
    "phi3": "phi",
    "phi3_5": "phi",
    "qwen2_5": "hermes",
    "qwen2_5_vl": "hermes",
    "qwen3": "hermes",
    "qwen3_5_nothink": "qwen3_coder",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "smolvlm": "hermes",
    "template_basic": "none",
    "template_blip2": "none",
    "template_chatml": "hermes",
    "template_deepseek_ocr": "none",
    "template_deepseek_vl2": "none",
    "template_kimi_audio": "none",
    "template_minicpmv45": "hermes",
}
"""By a template's file name; a `_training` variant has the format of its original."""


@pytest.mark.parametrize("template", corpus_templates(), ids=lambda template: template.name)
def test_each_shipped_template_gets_the_format_of_its_models(template: CorpusTemplate) -> None:
    file = template.name.partition("/")[2].removesuffix("_training")
    assert TemplateRenderer(template.tokenizer()).parser_name == EXPECTED[file]


@pytest.mark.parametrize("name", FORMAT_TEMPLATES)
def test_the_format_is_found_from_the_calls_that_a_template_renders(name: str) -> None:
    assert TemplateRenderer(tokenizer_of(name)).parser_name == name.partition(",")[0]


@pytest.mark.parametrize(("template", "expected"), [(CHATML, "hermes"), (LLAMA, "llama3")])
def test_a_template_without_calls_gets_the_format_of_its_family(template: str, expected: str) -> None:
    assert TemplateRenderer(make_tokenizer(template)).parser_name == expected
