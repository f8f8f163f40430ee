"""Loads renderers by name, as in `--renderer`.

    auto, template    the model's own chat template: `TemplateRenderer`
    pkg:NAME          the renderer NAME of the PyPI package `renderers`, e.g. `pkg:qwen3.5`: `PackageRenderer`

renderer = load_renderer("path/to/model", renderer="pkg:qwen3.5", template_kwargs={"enable_thinking": False})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from unbroken.errors import InvalidInputError, missing_extra
from unbroken.images.processor import ImageInputs
from unbroken.integrations.renderers.renderer import PackageRenderer
from unbroken.rendering.base import HistoryPolicy, Renderer, parse_history_policy
from unbroken.rendering.loader import load_template_renderer, load_tokenizer

_PACKAGE_PREFIX = "pkg:"
_TEMPLATE_NAMES = ("auto", "template")
_NOT_RENDERERS = ("auto", "custom")
"""Not renderers: one looks up models by name, one imports a caller's class."""
_FALLBACK = "default"
"""The package's fallback: renders the template with transformers and any variable, without bridges."""


def is_package_renderer(renderer: str) -> bool:
    """Whether `renderer` names a renderer of the package."""
    return renderer.startswith(_PACKAGE_PREFIX)


def load_renderer(
    model_or_tokenizer: Any,
    *,
    renderer: str = "auto",
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    stop_token_ids: Sequence[int] = (),
    history: HistoryPolicy | str = HistoryPolicy.EXACT,
    parser: str | None = None,
    images: ImageInputs | None = None,
) -> Renderer:
    """Load the renderer of this name for a model. All arguments belong to its identity: see `docs/renderers.md`.

    `renderer` is `auto`, `template`, or `pkg:` and one of `package_renderer_names()`. The other arguments are those of
    `load_template_renderer`. With `pkg:`, `chat_template`, `parser` and `images` must be left out, `template_kwargs`
    are those that the renderer knows, `stop_token_ids` are not used, and the history `exact` is the package's
    `thinking_retention="all"`.

    Raises:
        InvalidInputError: a name is unknown, the package is missing, the model has no fast tokenizer, or the renderer
            does not take an option.
        TemplateError: the model has no chat template, or it does not compile.
    """
    if renderer in _TEMPLATE_NAMES:
        return load_template_renderer(
            model_or_tokenizer,
            chat_template=chat_template,
            template_kwargs=template_kwargs,
            stop_token_ids=stop_token_ids,
            history=history,
            parser=parser,
            images=images,
        )
    if not is_package_renderer(renderer):
        raise InvalidInputError(
            f"renderer must be one of {list(_TEMPLATE_NAMES)} or {_PACKAGE_PREFIX!r} and a name, got {renderer!r}: "
            f"{_list_names()}"
        )
    _refuse_option(renderer, "chat_template", chat_template)
    _refuse_option(renderer, "parser", parser)
    _refuse_option(renderer, "images", images)
    name = renderer.removeprefix(_PACKAGE_PREFIX)
    config = _build_config(name, template_kwargs or {}, parse_history_policy(history))
    return _build_package_renderer(name, config, load_tokenizer(model_or_tokenizer))


def package_renderer_names() -> tuple[str, ...]:
    """The names of the installed package's renderers, for use after `pkg:`.

    Raises:
        InvalidInputError: the package is not installed.
    """
    return tuple(sorted(_get_config_classes()))


def _list_names() -> str:
    try:
        return f"the package `renderers` has {list(package_renderer_names())}"
    except InvalidInputError as error:
        return str(error)


def _refuse_option(renderer: str, option: str, value: object) -> None:
    if value is not None:
        raise InvalidInputError(
            f"{option} must be left out with renderer={renderer!r}, got {value!r}: the package's renderers have "
            "their own template and parser, and support text only. Use renderer='template'"
        )


def _import_package() -> Any:
    try:
        import renderers
    except ImportError as error:
        raise missing_extra(error, "renderer 'pkg:...' needs the package `renderers`", "renderers") from error
    return renderers


def _get_config_classes() -> dict[str, Any]:
    """The package's config classes, which define its options, by name of the renderer."""
    union = get_args(_import_package().RendererConfig)[0]
    classes = {cls.model_fields["name"].default: cls for cls in get_args(union)}
    return {name: cls for name, cls in classes.items() if name not in _NOT_RENDERERS}


def _build_config(name: str, template_kwargs: Mapping[str, Any], history: HistoryPolicy) -> Any:
    classes = _get_config_classes()
    if name not in classes:
        raise InvalidInputError(
            f"the package `renderers` has no {name!r} (got {_PACKAGE_PREFIX + name!r}), it has {sorted(classes)}"
        )
    known = classes[name].template_field_names()
    unknown = sorted(set(template_kwargs) - known)
    if unknown and name != _FALLBACK:
        raise InvalidInputError(
            f"template_kwargs must be among {sorted(known)} with renderer='pkg:{name}', got {unknown}"
        )
    options = dict(template_kwargs)
    if history is not HistoryPolicy.TEMPLATE and name != _FALLBACK:
        options["thinking_retention"] = "all"
    try:
        return classes[name](**options)
    except ValueError as error:
        raise InvalidInputError(
            f"renderer='pkg:{name}' does not take template_kwargs={dict(template_kwargs)!r} with "
            f"history={history.value!r} ('exact' is its thinking_retention='all', 'template' leaves that to the "
            f"template_kwargs): {_describe(error)}"
        ) from None


def _describe(error: Any) -> str:
    """Pydantic's message for each field."""
    return "; ".join(f"{'.'.join(map(str, part['loc']))} {part['msg']}".strip() for part in error.errors())


def _build_package_renderer(name: str, config: Any, tokenizer: Any) -> Renderer:
    try:
        return PackageRenderer(_import_package().create_renderer(tokenizer, config), tokenizer)
    except (AssertionError, ValueError, TypeError, RuntimeError, OSError) as error:
        # An AssertionError means that a control token is missing; gpt-oss downloads its own vocabulary.
        raise InvalidInputError(
            f"renderer='pkg:{name}' cannot be built for this tokenizer: {type(error).__name__}: {error}. "
            "Use the renderer of the tokenizer's family, or renderer='template'"
        ) from None
