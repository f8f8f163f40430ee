"""What every Renderer promises, held against each implementation."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from support.corpus import corpus_template
from support.templates import GLM, GLM_CONTROL_TOKENS, LLAMA, QWEN, QWEN_THINKING
from support.tokenizers import make_tokenizer
from unbroken.errors import MessagesError, ToolDefinitionError
from unbroken.rendering.base import Bridge, PartKind, Refusal, RefusalReason, Renderer
from unbroken.rendering.loader import load_renderer
from unbroken.rendering.template import TemplateRenderer

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 2?"}]
TURN: Any = {"role": "assistant", "content": "three"}
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


def _template(template: str, *control_tokens: str) -> tuple[Renderer, Any]:
    tokenizer = make_tokenizer(template, control_tokens=control_tokens)
    return TemplateRenderer(tokenizer), tokenizer


def _corpus(name: str) -> tuple[Renderer, Any]:
    tokenizer = corpus_template(name).tokenizer()
    return load_renderer(tokenizer), tokenizer


IMPLEMENTATIONS: dict[str, Callable[[], tuple[Renderer, Any]]] = {
    "template: qwen": lambda: _template(QWEN),
    "template: qwen that reasons": lambda: _template(QWEN_THINKING),
    "template: llama": lambda: _template(LLAMA),
    "template: glm": lambda: _template(GLM, *GLM_CONTROL_TOKENS),
    **{
        f"template: {name}": partial(_corpus, f"trl/{name}")
        for name in ("cohere2", "gemma4_v5", "gptoss", "lfm2_2_5", "deepseekv3", "qwen3_8")
    },
}


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> tuple[Renderer, Any]:
    return IMPLEMENTATIONS[request.param]()


@pytest.fixture
def renderer(implementation: tuple[Renderer, Any]) -> Renderer:
    return implementation[0]


@pytest.fixture
def tokenizer(implementation: tuple[Renderer, Any]) -> Any:
    return implementation[1]


def test_it_has_the_methods_of_a_renderer(renderer: Renderer) -> None:
    assert isinstance(renderer, Renderer)


def test_a_prompt_is_the_conversation_with_the_generation_prompt(renderer: Renderer) -> None:
    prompt = renderer.render(MESSAGES, tools=[TOOL])
    assert prompt.token_ids.dtype == np.int32
    ids = renderer.render_ids(MESSAGES, tools=[TOOL], add_generation_prompt=True)
    assert prompt.token_ids.tolist() == ids.tolist()
    without = renderer.render_ids(MESSAGES, tools=[TOOL])
    assert len(without) < len(ids)
    assert ids[: len(without)].tolist() == without.tolist()


def test_ids_that_spell_a_message_are_its_text(renderer: Renderer, tokenizer: Any) -> None:
    prompt = renderer.render(MESSAGES)
    assert len(prompt.message_indices) == len(prompt.token_ids)
    for index, message in enumerate(MESSAGES):
        spelled = prompt.token_ids[prompt.message_indices == index].tolist()
        # The last id of a text may spell the template's line break too.
        assert tokenizer.decode(spelled).removesuffix("\n") == message["content"]


def test_the_callers_messages_are_not_changed(renderer: Renderer) -> None:
    messages = copy.deepcopy(MESSAGES)
    renderer.render(messages)
    assert messages == MESSAGES


def test_no_messages_are_an_error(renderer: Renderer) -> None:
    with pytest.raises(MessagesError):
        renderer.render([])


BROKEN_MESSAGES: Any = {
    "half of a surrogate pair": {"role": "user", "content": "a\ud83d"},
    "calls that are no list": {"role": "assistant", "content": "", "tool_calls": 5},
    "a text part without a text": {"role": "user", "content": [{"type": "text"}]},
}


@pytest.mark.parametrize("broken", BROKEN_MESSAGES)
def test_a_malformed_message_is_an_error_and_refused_after_a_turn(
    renderer: Renderer, tokenizer: Any, broken: str
) -> None:
    message = BROKEN_MESSAGES[broken]
    with pytest.raises(MessagesError, match=r"messages\[0\]"):
        renderer.render([message])
    prompt_ids = renderer.render(MESSAGES).token_ids
    ids = np.array(tokenizer.encode("three", add_special_tokens=False), dtype=np.int32)
    outcome = renderer.bridge_to_next_turn(prompt_ids, ids, [message], assistant=TURN, earlier=MESSAGES)
    assert isinstance(outcome, Refusal)
    assert outcome.reason is RefusalReason.BAD_EXTENSION


@pytest.mark.parametrize("tools", ["abc", [{**TOOL, "function": {**TOOL["function"], "description": "\udc00"}}]])
def test_malformed_tools_are_an_error(renderer: Renderer, tools: Any) -> None:
    with pytest.raises(ToolDefinitionError, match="tools"):
        renderer.render(MESSAGES, tools=tools)


def test_the_stop_ids_are_in_the_vocabulary(renderer: Renderer, tokenizer: Any) -> None:
    stops = renderer.get_stop_token_ids()
    assert stops
    assert all(0 <= token_id < len(tokenizer) for token_id in stops)


def test_a_completion_parses_to_its_text(renderer: Renderer, tokenizer: Any) -> None:
    prompt_ids = renderer.render(MESSAGES).token_ids
    ids = np.array([*tokenizer.encode("three", add_special_tokens=False), renderer.get_stop_token_ids()[-1]], np.int32)
    parsed = renderer.parse_response(ids, prompt_ids=prompt_ids)
    assert parsed.tool_calls == ()
    is_opened = "<think" in tokenizer.decode(prompt_ids[-20:].tolist()).rpartition("</think")[2]
    if is_opened:
        assert (parsed.reasoning, parsed.content, parsed.reasoning_complete) == ("three", "", False)
    else:
        assert (parsed.reasoning, parsed.content, parsed.reasoning_complete) == ("", "three", True)


def test_i1_whatever_was_sampled_is_parsed_and_extended_or_refused(renderer: Renderer, tokenizer: Any) -> None:
    rng = random.Random(0)
    prompt_ids = renderer.render(MESSAGES).token_ids
    new: Any = [{"role": "user", "content": "Go on."}]
    for _ in range(200):
        ids = np.array([rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 20))], dtype=np.int32)
        parsed = renderer.parse_response(ids, prompt_ids=prompt_ids)
        message = parsed.to_message([f"call{k:05d}" for k in range(len(parsed.tool_calls))])
        outcome = renderer.bridge_to_next_turn(prompt_ids, ids, new, assistant=message, earlier=MESSAGES)
        assert isinstance(outcome, (Bridge, Refusal))
        if isinstance(outcome, Bridge):
            assert "Go on." in tokenizer.decode(outcome.bridge_ids.tolist())


def test_a_completion_read_id_by_id_is_the_same_as_read_whole(renderer: Renderer, tokenizer: Any) -> None:
    rng = random.Random(1)
    prompt_ids = renderer.render(MESSAGES).token_ids
    for _ in range(50):
        ids = np.array([rng.randrange(len(tokenizer)) for _ in range(rng.randrange(20))], dtype=np.int32)
        parsed = renderer.parse_response(ids, prompt_ids=prompt_ids, tools=[TOOL])
        reader = renderer.open_response(prompt_ids=prompt_ids, tools=[TOOL])
        deltas = [delta for token_id in ids for delta in reader.feed([int(token_id)])] + list(reader.close())
        assert reader.finish() == parsed
        assert "".join(delta.text for delta in deltas if delta.kind is PartKind.CONTENT) == parsed.content
        assert "".join(delta.text for delta in deltas if delta.kind is PartKind.REASONING) == parsed.reasoning
        assert tuple(delta.tool_call for delta in deltas if delta.tool_call is not None) == parsed.tool_calls
        assert [part.span for part in parsed.parts][-1:] == ([(parsed.parts[-1].span[0], len(ids))] if len(ids) else [])


@pytest.mark.parametrize("new", [[], [TURN]], ids=["nothing", "an assistant message"])
def test_what_extends_no_turn_is_refused(renderer: Renderer, tokenizer: Any, new: list[Any]) -> None:
    prompt_ids = renderer.render(MESSAGES).token_ids
    ids = np.array(tokenizer.encode("three", add_special_tokens=False), dtype=np.int32)
    outcome = renderer.bridge_to_next_turn(prompt_ids, ids, new, assistant=TURN, earlier=MESSAGES)
    assert isinstance(outcome, Refusal)
    assert outcome.reason is RefusalReason.BAD_EXTENSION
