"""Subjects for tests of the audit: the test templates over local tokenizers."""

from pathlib import Path
from typing import Any

from support.templates import CHATML, QWEN
from support.tokenizers import make_tokenizer
from unbroken.audit.subject import Subject
from unbroken.rendering.template import TemplateRenderer

_DEFAULT_SYSTEM = "{%- else -%}\n  {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' -}}\n"
assert _DEFAULT_SYSTEM in QWEN
CHATML_WITH_TOOLS = QWEN.replace(_DEFAULT_SYSTEM, "")
"""Writes nothing between the turns but ChatML's own tokens."""

COUNTS_ITS_TURN = CHATML.replace(
    "'<|im_end|>\\n'",
    "'<|im_end|>' + (message.content | length | string if message.role == 'assistant' else '') + '\\n'",
)
"""Writes the length of an assistant's text after the end of its turn: no bridge can be shown to be right."""
assert COUNTS_ITS_TURN != CHATML


def subject_of(
    source: str,
    *,
    renderer: Any = None,
    options: dict[str, Any] | None = None,
    control_tokens: tuple[str, ...] = (),
    name: str = "test",
) -> Subject:
    """A template with a tokenizer that has its control tokens; `renderer` replaces the template's if given."""
    tokenizer = make_tokenizer(source, control_tokens=control_tokens)
    own = TemplateRenderer(tokenizer, template_kwargs=options or {})
    return Subject(
        name=name, tokenizer=tokenizer, renderer=renderer or own, template_renderer=own, options=options or {}
    )


def model_folder(folder: Path, source: str | None, **tokenizer_options: Any) -> Path:
    """A model folder with a tokenizer, whose generation config has a second stop id."""
    tokenizer = make_tokenizer(source, **tokenizer_options)
    tokenizer.save_pretrained(folder)
    stops = [tokenizer.eos_token_id, 5]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {stops}}}', encoding="utf-8")
    return folder
