"""What has no effect on a prompt is found: tools that a template does not show, and variables that it does not read."""

import pickle
from typing import Any

import pytest

from support import templates
from support.fake_renderer import FakeRenderer
from support.parsing import tool
from support.tokenizers import make_tokenizer
from unbroken.errors import InvalidInputError, ToolsNotShownError
from unbroken.rendering.effects import check_options_read, check_tools_shown, find_unread_options, shows_tools
from unbroken.rendering.template import TemplateRenderer

ADD, NOW = tool("add", a={"type": "integer"}), tool("now")
IN_SYSTEM = templates.CHATML.replace(
    "message.content", "message.content ~ (tools | tojson if tools and message.role == 'system' else '')"
)
REFUSES = "{%- if tools %}{{ raise_exception('no tools') }}{% endif %}" + templates.CHATML
NO_SYSTEM = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + templates.CHATML


def renderer_of(template: str, **options: Any) -> TemplateRenderer:
    return TemplateRenderer(make_tokenizer(template, eos_token="<|im_end|>"), template_kwargs=options)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (templates.QWEN, True),
        (templates.SCHEMAS_BEFORE_LAST_USER, True),
        (IN_SYSTEM, True),
        (REFUSES, True),
        (templates.CHATML, False),
        (NO_SYSTEM, False),
    ],
    ids=["shows", "shows before the question", "shows in a system message", "refuses", "ignores", "has no system"],
)
def test_tools_are_shown_if_they_change_a_prompt_or_are_refused(template: str, shown: bool) -> None:
    renderer = renderer_of(template)
    assert shows_tools(renderer, [ADD]) == shown
    check_tools_shown(renderer, [])
    if shown:
        check_tools_shown(renderer, [ADD, NOW])
        return
    with pytest.raises(ToolsNotShownError, match=r"without add, now\. .* rollouts\.tools_in_messages") as raised:
        check_tools_shown(renderer, [ADD, NOW])
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_renderer_that_is_no_template_is_asked_by_its_ids() -> None:
    class Shows(FakeRenderer):
        def render_ids(self, messages: Any, *, tools: Any = (), add_generation_prompt: bool = False) -> Any:
            system: Any = [{"role": "system", "content": str(len(tools))}] if tools else []
            return super().render_ids([*system, *messages], add_generation_prompt=add_generation_prompt)

    assert not shows_tools(FakeRenderer(), [ADD])
    assert shows_tools(Shows(), [ADD])
    assert find_unread_options(FakeRenderer(), ["any"]) == ()


def test_options_that_the_template_does_not_read_are_named_with_those_that_it_reads() -> None:
    renderer = renderer_of(templates.QWEN_THINKING, open_thinking=True)
    assert find_unread_options(renderer, ["open_thinking", "thinkng"]) == ("thinkng",)
    check_options_read(renderer, ["open_thinking"], name="template_kwargs")
    message = r"template_kwargs must have variables that .* got thinkng: it reads .*open_thinking"
    with pytest.raises(InvalidInputError, match=message):
        check_options_read(renderer, ["open_thinking", "thinkng"], name="template_kwargs")
