"""The subject of an audit: a tokenizer, a chat template with its options, a renderer. No code of a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.audit.config import AuditTarget
from unbroken.audit.report import Token
from unbroken.audit.stand_in import BEGIN, END, make_stand_in
from unbroken.errors import InvalidInputError, TemplateError
from unbroken.rendering.base import Renderer
from unbroken.rendering.effects import find_unread_options
from unbroken.rendering.loader import load_stop_token_ids, load_tokenizer
from unbroken.rendering.template import TemplateRenderer
from unbroken.retokenising.comparison import TemplateTexts
from unbroken.untrusted import read_text

_MAX_TEMPLATE_BYTES = 4_000_000
_TOKEN_OPTIONS = ("bos_token", "eos_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject(TemplateTexts):
    """One template over one tokenizer, with the renderer under audit."""

    name: str
    """A folder, a hub's name, or a template file."""
    is_stand_in: bool = False
    """The tokenizer was made by the audit, as there is no model."""
    options: Mapping[str, Any]
    renderer: Renderer
    """Whose bridges are judged by `template_renderer`: the same one, but in tests of the audit."""

    @property
    def renders_reasoning(self) -> bool:
        """Whether the template has a key for reasoning."""
        return self.facts.message_format.reasoning_key is not None

    def find_unread_options(self) -> tuple[str, ...]:
        """Find the options that the template never reads: misspelled, or meant for another model."""
        return find_unread_options(self.template_renderer, self.options)

    def get_tokens(self, token_ids: Sequence[int]) -> tuple[Token, ...]:
        """The ids, each with its text."""
        return tuple(Token(token_id=int(i), text=self.get_text(int(i))) for i in token_ids)


def load_subject(target: AuditTarget) -> Subject:
    """Load the tokenizer and the template, and build the renderer under audit.

    Raises:
        InvalidInputError: a model, file or option of the target does not exist or is of the wrong kind.
        TemplateError: the template does not compile, or goes over a limit.
    """
    if target.model is None:
        assert target.template is not None
        return _load_template_alone(target, Path(target.template))
    model = target.model
    if (model.startswith(("/", ".", "~")) or model.count("/") > 1) and not Path(model).exists():
        raise InvalidInputError(f"model must be a folder that exists or a model's name on the hub, got {model!r}")
    tokenizer = load_tokenizer(model)
    return _make_subject(
        model,
        tokenizer,
        _read_template_of(tokenizer, target.template),
        target,
        stop_token_ids=load_stop_token_ids(model),
    )


def read_template(file: Path) -> str:
    """Read a template file; raises `InvalidInputError` if it cannot be read, is too large, or is not a template."""
    try:
        source = read_text(file, max_bytes=_MAX_TEMPLATE_BYTES)
    except OSError as error:
        raise InvalidInputError(f"template {file} cannot be read: {error.strerror or error}") from None
    except InvalidInputError as error:
        raise InvalidInputError(f"template {error}: is this a template?") from None
    if "{{" not in source and "{%" not in source:
        raise InvalidInputError(
            f"template {file} must be a Jinja template, got a text without {{{{ or {{%: is this the right file?"
        )
    return source


def _load_template_alone(target: AuditTarget, file: Path) -> Subject:
    source = read_template(file)
    begin, end = (_read_token(target.options, key, usual) for key, usual in (("bos_token", BEGIN), ("eos_token", END)))
    tokenizer = make_stand_in(source, begin=begin, end=end)
    # The stand-in already has these tokens.
    options = {key: value for key, value in target.options.items() if key not in _TOKEN_OPTIONS}
    return _make_subject(file.name, tokenizer, source, replace(target, options=options))


def _make_subject(
    name: str, tokenizer: Any, source: str, target: AuditTarget, *, stop_token_ids: Sequence[int] = ()
) -> Subject:
    own = TemplateRenderer(
        tokenizer,
        chat_template=source,
        template_kwargs=target.options,
        stop_token_ids=stop_token_ids,
        parser=target.parser,
    )
    return Subject(
        name=name,
        tokenizer=tokenizer,
        renderer=own,
        template_renderer=own,
        options=target.options,
        is_stand_in=target.model is None,
    )


def _read_template_of(tokenizer: Any, template: str | None) -> str:
    if template is not None and Path(template).is_file():
        return read_template(Path(template))
    names = sorted(tokenizer.chat_template) if isinstance(tokenizer.chat_template, dict) else []
    if template is not None and template not in names:
        raise InvalidInputError(
            f"--template must be a file, or one of the tokenizer's templates {names}, got {template!r}"
        )
    try:
        source: str = tokenizer.get_chat_template(template)
    except ValueError as error:
        known = f"one of {names}" if names else "a file"
        raise TemplateError(
            f"the tokenizer has no chat template to audit: give {known} as --template ({str(error).split('!')[0]})"
        ) from None
    return source


def _read_token(options: Mapping[str, Any], key: str, usual: str) -> str:
    value = options.get(key, usual)
    if not isinstance(value, str) or not value.strip():
        raise InvalidInputError(f"--option {key} must be the text of a token, got {value!r}")
    return value
