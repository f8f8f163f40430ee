"""Renderers by name, and what is said where a name or an option is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.package_renderers import package_tokenizer
from support.templates import CHATML, QWEN
from support.tokenizers import make_tokenizer
from unbroken.errors import InvalidInputError, TemplateError
from unbroken.integrations.renderers.registry import load_renderer, package_renderer_names
from unbroken.integrations.renderers.renderer import PackageRenderer
from unbroken.rendering.base import Bridge, Refusal
from unbroken.rendering.template import TemplateRenderer

QUESTION: Any = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return package_tokenizer("qwen3.8", template="trl/qwen3_8")


@pytest.mark.parametrize("name", ["auto", "template"])
def test_without_a_name_the_template_is_the_renderer(name: str) -> None:
    renderer = load_renderer(make_tokenizer(QWEN), renderer=name)
    assert isinstance(renderer, TemplateRenderer)


def test_a_name_of_the_package_gives_its_renderer(tokenizer: Any) -> None:
    assert "qwen3.8" in package_renderer_names()
    renderer = load_renderer(tokenizer, renderer="pkg:qwen3.8")
    assert isinstance(renderer, PackageRenderer)
    assert renderer.render(QUESTION).token_ids.tolist() == load_renderer(tokenizer).render(QUESTION).token_ids.tolist()


def test_variables_of_the_template_reach_the_renderer(tokenizer: Any) -> None:
    for name in ("template", "pkg:qwen3.8"):
        renderer = load_renderer(tokenizer, renderer=name, template_kwargs={"enable_thinking": False})
        assert tokenizer.decode(renderer.render(QUESTION).token_ids).endswith("<think>\n\n</think>\n\n"), name


def test_another_template_takes_the_place_of_the_tokenizers(tokenizer: Any) -> None:
    renderer = load_renderer(tokenizer, chat_template=CHATML)
    expected = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(renderer.render(QUESTION).token_ids) == expected


def test_a_parser_and_a_history_policy_reach_the_templates_renderer(tokenizer: Any) -> None:
    text = '</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    assert load_renderer(tokenizer).parse_response(ids).failures
    assert not load_renderer(tokenizer, parser="hermes").parse_response(ids).failures
    with pytest.raises(InvalidInputError, match=r"parser must be one of .*'hermes'"):
        load_renderer(tokenizer, parser="hermit")
    qwen = package_tokenizer("qwen3", template="trl/qwen3")
    turn: Any = {"role": "assistant", "content": "3", "reasoning_content": "hm"}
    for name, kinds in (("template", (Bridge, Refusal)), ("pkg:qwen3", (Bridge, Refusal))):
        for history, kind in zip(("exact", "template"), kinds, strict=True):
            renderer = load_renderer(qwen, renderer=name, history=history)
            prompt_ids = renderer.render(QUESTION).token_ids
            ids = np.array(qwen.encode("<think>hm</think>3<|im_end|>", add_special_tokens=False), dtype=np.int32)
            outcome = renderer.bridge_to_next_turn(prompt_ids, ids, QUESTION, assistant=turn, earlier=QUESTION)
            assert isinstance(outcome, kind), (name, history, outcome)


def test_a_folder_gives_its_tokenizer_and_the_stop_ids_of_its_generation_config(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(QWEN, control_tokens=["<|other|>"])
    tokenizer.save_pretrained(tmp_path)
    other = tokenizer.convert_tokens_to_ids("<|other|>")
    without = load_renderer(tmp_path)
    assert other not in without.get_stop_token_ids()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [other]}), encoding="utf-8")
    renderer = load_renderer(str(tmp_path))
    assert set(renderer.get_stop_token_ids()) == {other, *without.get_stop_token_ids()}
    assert renderer.render(QUESTION).token_ids.tolist() == without.render(QUESTION).token_ids.tolist()


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="model must be a folder or hub name of a model"):
        load_renderer(tmp_path)


def test_a_broken_generation_config_is_an_error(tmp_path: Path) -> None:
    make_tokenizer(QWEN).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1", encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"generation_config\.json must be a JSON object"):
        load_renderer(tmp_path)


def test_what_is_no_fast_tokenizer_is_an_error() -> None:
    for name in ("auto", "pkg:qwen3"):
        with pytest.raises(InvalidInputError, match="must be a fast tokenizer of transformers, got dict"):
            load_renderer({}, renderer=name)


def test_a_tokenizer_without_a_template_is_an_error() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        load_renderer(make_tokenizer(None))


@pytest.mark.parametrize("name", ["qwen3", "pkg:qwen4", "pkg:", "pkg:auto", "pkg:custom", ""])
def test_an_unknown_name_is_an_error_that_lists_the_names(tokenizer: Any, name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"got '.*'glm-4\.5'.*'qwen3'"):
        load_renderer(tokenizer, renderer=name)


def test_an_option_that_the_packages_renderer_does_not_take_is_an_error_that_lists_those_it_takes(
    tokenizer: Any,
) -> None:
    with pytest.raises(InvalidInputError, match=r"among \[.*'reasoning_effort'\] .* got \['builtin_tools'\]"):
        load_renderer(tokenizer, renderer="pkg:qwen3.8", template_kwargs={"builtin_tools": 1})


def test_a_value_that_the_packages_renderer_does_not_take_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(InvalidInputError, match="reasoning_effort Input should be 'xhigh', 'medium' or 'low'"):
        load_renderer(tokenizer, renderer="pkg:qwen3.8", template_kwargs={"reasoning_effort": "most"})


def test_an_option_against_the_history_policy_is_an_error(tokenizer: Any) -> None:
    options = {"preserve_thinking": False}
    load_renderer(tokenizer, renderer="pkg:qwen3.8", template_kwargs=options, history="template")
    with pytest.raises(InvalidInputError, match=r"history='exact' .* conflicts"):
        load_renderer(tokenizer, renderer="pkg:qwen3.8", template_kwargs=options)


@pytest.mark.parametrize("option", ["chat_template", "parser"])
def test_a_template_or_parser_for_a_renderer_that_has_its_own_is_an_error(tokenizer: Any, option: str) -> None:
    options: Any = {option: "hermes"}
    with pytest.raises(InvalidInputError, match=f"{option} must be left out with renderer='pkg:qwen3'"):
        load_renderer(tokenizer, renderer="pkg:qwen3", **options)


def test_an_unknown_history_policy_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"history must be one of \[.*\], got 'all'"):
        load_renderer(tokenizer, history="all")


def test_a_renderer_of_another_family_is_an_error_that_names_the_missing_token(tokenizer: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot be built for this tokenizer: .*\[gMASK\]"):
        load_renderer(tokenizer, renderer="pkg:glm-5")


def test_a_missing_package_is_an_error_that_says_what_to_install(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)  # as Python notes a module that cannot be imported
    with pytest.raises(InvalidInputError, match=r"pip install 'unbroken\[renderers\]'"):
        load_renderer(tokenizer, renderer="pkg:qwen3")
    with pytest.raises(InvalidInputError, match=r"must be one of .*pip install 'unbroken\[renderers\]'"):
        load_renderer(tokenizer, renderer="qwen3")


def test_the_package_is_not_imported_until_it_is_named() -> None:
    code = (
        "import sys; import unbroken.integrations.renderers.registry; "
        "sys.exit(sorted({'renderers', 'torch'} & set(sys.modules)) != [])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
