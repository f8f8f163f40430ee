"""Renderers by name, as a command line's `--renderer` gives them.

    auto, template    the model's own chat template: `TemplateRenderer`
    pkg:NAME          the renderer NAME of the PyPI package `renderers`, e.g. `pkg:qwen3.5`: `PackageRenderer`

renderer = load_renderer("path/to/model", renderer="pkg:qwen3.5", template_kwargs={"enable_thinking": False})
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from unbroken.errors import InvalidInputError
from unbroken.images.inputs import ImageInputs
from unbroken.images.processing import load_image_processor
from unbroken.rendering.base import HistoryPolicy, Renderer
from unbroken.rendering.package import PackageRenderer
from unbroken.rendering.template import TemplateRenderer

PACKAGE_PREFIX = "pkg:"
_TEMPLATE_NAMES = ("auto", "template")
_NOT_BY_NAME = ("auto", "custom")
"""Entries of the package that are no renderer: one looks models up by name, one imports a caller's class."""
_OPAQUE = "default"
"""The package's fallback: the template through transformers, with any variable, and no bridges."""


def load_renderer(
    model_or_tokenizer: Any,
    *,
    renderer: str = "auto",
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    history: HistoryPolicy | str = HistoryPolicy.EXACT,
    parser: str | None = None,
    images: ImageInputs | None = None,
) -> Renderer:
    """The renderer of this name for a model. All arguments are part of its identity: see `docs/renderers.md`.

    Args:
        model_or_tokenizer: a folder or the hub's name of a model, of which only the tokenizer is loaded, or a
            `PreTrainedTokenizerFast`. A model's generation config adds its stop ids, a tokenizer's is not known.
        renderer: `auto` or `template`, or `pkg:` and a name of `package_renderer_names()`.
        chat_template: for `template`: the text, or the name of one of the tokenizer's, in place of its own.
        template_kwargs: variables of the template, such as `enable_thinking`; for `pkg:` those its renderer knows.
        history: what happens where a template rewrites earlier turns, for `pkg:` too (there `exact` is the package's
            `thinking_retention="all"`).
        parser: for `template`: the format to read completions in, in place of the one found.
        images: for `template`: how images come in. Where this is not given, a model's folder or name tells: its own
            processor, if it has one that can be loaded.

    Raises:
        InvalidInputError: a name is unknown, the package is missing, the model has no fast tokenizer, or the renderer
            does not take an option.
        TemplateError: the model has no chat template, or it does not compile.
    """
    policy = _policy(history)
    name = renderer.removeprefix(PACKAGE_PREFIX) if renderer.startswith(PACKAGE_PREFIX) else None
    if name is None and renderer not in _TEMPLATE_NAMES:
        raise InvalidInputError(
            f"renderer must be one of {list(_TEMPLATE_NAMES)} or {PACKAGE_PREFIX!r} and a name, got {renderer!r}: "
            f"{_known_names()}"
        )
    if name is not None:
        _refuse_option(renderer, "chat_template", chat_template)
        _refuse_option(renderer, "parser", parser)
        _refuse_option(renderer, "images", images)
        config = _package_config(name, template_kwargs or {}, policy)
        return _build_package_renderer(name, config, load_tokenizer(model_or_tokenizer))
    tokenizer = load_tokenizer(model_or_tokenizer)
    no_images_because = "the model takes none"
    if images is None:
        try:
            images = load_image_inputs(model_or_tokenizer)
        except InvalidInputError as error:  # a model may be used for text alone: its images say it when there are some
            no_images_because = str(error)
    return TemplateRenderer(
        tokenizer,
        chat_template=chat_template,
        template_kwargs=template_kwargs,
        stop_token_ids=load_stop_token_ids(model_or_tokenizer),
        history=policy,
        parser=parser,
        images=images,
        no_images_because=no_images_because,
    )


def load_image_inputs(model_or_tokenizer: Any) -> ImageInputs | None:
    """What a model's folder or hub name says about its images; None for a text model, or a tokenizer.

    Raises:
        InvalidInputError: it has an image processor that cannot be loaded.
    """
    if not isinstance(model_or_tokenizer, (str, Path)):
        return None
    processor = load_image_processor(model_or_tokenizer)
    return None if processor is None else ImageInputs(processor=processor)


def load_tokenizer(model_or_tokenizer: Any) -> Any:
    """The fast tokenizer of a model's folder or hub name, or the one that is given.

    Raises:
        InvalidInputError: there is none.
    """
    tokenizer = model_or_tokenizer
    if isinstance(model_or_tokenizer, (str, Path)):
        from transformers import AutoTokenizer

        try:
            # No code of the model's folder is run, and nobody is asked whether it should be.
            tokenizer = AutoTokenizer.from_pretrained(model_or_tokenizer, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"model must be a folder or the hub's name of a model with a tokenizer, got "
                f"{str(model_or_tokenizer)!r}: {error}"
            ) from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InvalidInputError(
            f"tokenizer must be a fast tokenizer of transformers, got {type(tokenizer).__name__}: load it with "
            "AutoTokenizer, or wrap a tokenizers.Tokenizer in PreTrainedTokenizerFast(tokenizer_object=...)"
        )
    return tokenizer


def load_stop_token_ids(model_or_tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a turn by the model's generation config: with calls they may be others than the template's.

    Raises:
        InvalidInputError: the file is no generation config.
    """
    if not isinstance(model_or_tokenizer, (str, Path)):
        return ()
    from transformers.utils import cached_file

    file = cached_file(
        model_or_tokenizer,
        "generation_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return ()
    try:
        ids = dict(json.loads(Path(file).read_text("utf-8"))).get("eos_token_id")
    except (ValueError, TypeError) as error:
        raise InvalidInputError(f"generation_config.json must be a JSON object ({file}): {error}") from None
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token_id) is int for token_id in listed):
        raise InvalidInputError(f"eos_token_id must be an id or a list of ids, got {ids!r} ({file})")
    return tuple(listed)


def package_renderer_names() -> tuple[str, ...]:
    """The names that `pkg:` can be followed by, as the installed package has them.

    Raises:
        InvalidInputError: the package is not installed.
    """
    return tuple(sorted(_config_classes()))


def _policy(history: HistoryPolicy | str) -> HistoryPolicy:
    try:
        return HistoryPolicy(history)
    except ValueError:
        names = [policy.value for policy in HistoryPolicy]
        raise InvalidInputError(f"history must be one of {names}, got {history!r}") from None


def _known_names() -> str:
    try:
        return f"the package `renderers` has {list(package_renderer_names())}"
    except InvalidInputError as error:
        return str(error)


def _refuse_option(renderer: str, option: str, value: object) -> None:
    if value is not None:
        raise InvalidInputError(
            f"{option} must be left out with renderer={renderer!r}, got {value!r}: the package's renderers have "
            "template and parser of their own, and take text only. Use renderer='template'"
        )


def _import_package() -> Any:
    try:
        import renderers
    except ImportError as error:
        raise InvalidInputError(
            f"renderer 'pkg:...' needs the package `renderers`, which cannot be imported ({error}): "
            "pip install 'unbroken[renderers]'"
        ) from None
    return renderers


def _config_classes() -> dict[str, Any]:
    """The package's config classes, which say what each renderer takes, by the renderer's name."""
    union = get_args(_import_package().RendererConfig)[0]
    classes = {cls.model_fields["name"].default: cls for cls in get_args(union)}
    return {name: cls for name, cls in classes.items() if name not in _NOT_BY_NAME}


def _package_config(name: str, template_kwargs: Mapping[str, Any], history: HistoryPolicy) -> Any:
    classes = _config_classes()
    if name not in classes:
        raise InvalidInputError(
            f"the package `renderers` must have the renderer that is named, got {PACKAGE_PREFIX + name!r}: it has "
            f"{sorted(classes)}"
        )
    known = classes[name].template_field_names()
    unknown = sorted(set(template_kwargs) - known)
    if unknown and name != _OPAQUE:
        raise InvalidInputError(
            f"template_kwargs must be some of {sorted(known)} with renderer='pkg:{name}', got {unknown}"
        )
    options = dict(template_kwargs)
    if history is HistoryPolicy.EXACT and name != _OPAQUE:
        options["thinking_retention"] = "all"
    try:
        return classes[name](**options)
    except ValueError as error:
        raise InvalidInputError(
            f"renderer='pkg:{name}' does not take template_kwargs={dict(template_kwargs)!r} with "
            f"history={history.value!r} ('exact' is its thinking_retention='all', 'template' leaves that to the "
            f"template_kwargs): {_told(error)}"
        ) from None


def _told(error: Any) -> str:
    """What pydantic, which the package's configs are made of, says about each field."""
    return "; ".join(f"{'.'.join(map(str, part['loc']))} {part['msg']}".strip() for part in error.errors())


def _build_package_renderer(name: str, config: Any, tokenizer: Any) -> Renderer:
    try:
        return PackageRenderer(_import_package().create_renderer(tokenizer, config), tokenizer)
    except (AssertionError, ValueError, TypeError, RuntimeError, OSError) as error:
        # An assert says that a control token is missing; gpt-oss loads a vocabulary of its own from the network.
        raise InvalidInputError(
            f"renderer='pkg:{name}' cannot be built for this tokenizer: {type(error).__name__}: {error}. "
            "Name the renderer of the tokenizer's own family, or use renderer='template'"
        ) from None
