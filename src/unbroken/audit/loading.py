"""The subject of an audit from what the command line names. Of a model only the tokenizer is loaded, and no code."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unbroken.audit.stand_in import BEGIN, END, make_stand_in
from unbroken.audit.subject import Subject
from unbroken.errors import InvalidInputError, TemplateError
from unbroken.integrations.renderers.loading import is_package_renderer, load_renderer
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.loading import load_stop_token_ids, load_tokenizer
from unbroken.rendering.template import TemplateRenderer

_MOST_TEMPLATE_BYTES = 4_000_000
_SLOWEST_RENDERING_S = 0.5
_TOKEN_OPTIONS = ("bos_token", "eos_token")


def load_subject(
    *,
    model: str | None,
    template: str | None,
    options: Mapping[str, Any],
    renderer: str = "auto",
    parser: str | None = None,
) -> Subject:
    """Load what is audited.

    Args:
        model: a folder or a hub's name; None for a template alone.
        template: a file, or the name of one of the tokenizer's templates.
        options: variables of the template.
        renderer: `auto`, `template`, or `pkg:` and a name.
        parser: a format's name.

    Raises:
        InvalidInputError: something named is not there, or not what it should be.
        TemplateError: the template does not compile, or goes over a limit.
    """
    if model is None:
        assert template is not None
        source = read_template(Path(template))
        _check_speed(source, options)
        begin, end = (_token(options, key, usual) for key, usual in (("bos_token", BEGIN), ("eos_token", END)))
        tokenizer = make_stand_in(source, begin=begin, end=end)
        return _subject(Path(template).name, tokenizer, source, (), options, renderer, parser, is_stand_in=True)
    if (model.startswith(("/", ".", "~")) or model.count("/") > 1) and not Path(model).exists():
        raise InvalidInputError(f"model must be a folder that exists or a model's name on the hub, got {model!r}")
    tokenizer = load_tokenizer(model)
    source = _template_of(tokenizer, template)
    _check_speed(source, {**tokenizer.special_tokens_map, **options})
    return _subject(model, tokenizer, source, load_stop_token_ids(model), options, renderer, parser)


def read_template(file: Path) -> str:
    """The text of a template file.

    Raises:
        InvalidInputError: it is not there, too large, or no text.
    """
    try:
        size = file.stat().st_size
        if size > _MOST_TEMPLATE_BYTES:
            raise InvalidInputError(f"template {file} must have at most {_MOST_TEMPLATE_BYTES} bytes, got {size}")
        source = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"template {file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"template {file} must be a text in UTF-8, got byte {error.start} that is none: is this a template?"
        ) from None
    if "{{" not in source and "{%" not in source:
        raise InvalidInputError(
            f"template {file} must be a Jinja template, got a text without {{{{ or {{%: is this the right file?"
        )
    return source


def _subject(
    name: str,
    tokenizer: Any,
    source: str,
    stops: tuple[int, ...],
    options: Mapping[str, Any],
    renderer: str,
    parser: str | None,
    *,
    is_stand_in: bool = False,
) -> Subject:
    if is_stand_in:
        # They are the stand-in's own tokens by now.
        options = {key: value for key, value in options.items() if key not in _TOKEN_OPTIONS}
    own = TemplateRenderer(
        tokenizer, chat_template=source, template_kwargs=options, stop_token_ids=stops, parser=parser
    )
    is_package = is_package_renderer(renderer) or renderer not in ("auto", "template")
    return Subject.of(
        name=name,
        tokenizer=tokenizer,
        source=source,
        renderer=load_renderer(tokenizer, renderer=renderer, template_kwargs=options) if is_package else own,
        template_renderer=own,
        options=options,
        renderer_name=renderer if is_package else "template",
        is_stand_in=is_stand_in,
    )


def _check_speed(source: str, variables: Mapping[str, Any]) -> None:
    """An audit renders thousands of conversations: find a template out that is slow on one short question."""
    template = ChatTemplate(source, variables)
    start = time.perf_counter()
    with suppress(TemplateError):
        template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    duration_s = time.perf_counter() - start
    if duration_s > _SLOWEST_RENDERING_S:
        raise TemplateError(
            f"the chat template must render one short message within {_SLOWEST_RENDERING_S:g} s, as an audit renders "
            f"thousands of conversations; it took {duration_s:.1f} s. Look for loops in it that do not go over messages"
        )


def _template_of(tokenizer: Any, template: str | None) -> str:
    if template is not None and Path(template).is_file():
        return read_template(Path(template))
    known = tokenizer.chat_template
    names = sorted(known) if isinstance(known, dict) else []
    if template is not None and template not in names:
        raise InvalidInputError(
            f"--template must be a file, or one of the tokenizer's templates {names}, got {template!r}"
        )
    try:
        source: str = tokenizer.get_chat_template(template)
    except ValueError as error:
        told = f"one of {names}" if names else "a file"
        raise TemplateError(
            f"the tokenizer has no chat template of its own to audit: give {told} as --template "
            f"({str(error).split('!')[0]})"
        ) from None
    return source


def _token(options: Mapping[str, Any], key: str, usual: str) -> str:
    value = options.get(key, usual)
    if not isinstance(value, str) or not value.strip():
        raise InvalidInputError(f"--option {key} must be the text of a token, got {value!r}")
    return value
