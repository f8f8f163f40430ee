"""Loads what a renderer needs from a model's folder or hub name: tokenizer, stop ids, image processor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.images.processor import ImageInputs, load_image_processor
from unbroken.rendering.base import HistoryPolicy
from unbroken.rendering.encoding.tokenizer import get_backend
from unbroken.rendering.template import TemplateRenderer


def load_template_renderer(
    model_or_tokenizer: Any,
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    stop_token_ids: Sequence[int] = (),
    history: HistoryPolicy | str = HistoryPolicy.EXACT,
    parser: str | None = None,
    images: ImageInputs | None = None,
) -> TemplateRenderer:
    """Load the renderer of a model's own chat template.

    Args:
        model_or_tokenizer: folder or hub name of a model, or a `PreTrainedTokenizerFast`. A model's generation config
            adds its stop ids; a tokenizer has none.
        chat_template: a template, or the name of one of the tokenizer's, instead of the default one.
        template_kwargs: variables of the template, such as `enable_thinking`.
        stop_token_ids: more ids that end a turn.
        history: the policy where the template rewrites earlier turns.
        parser: the call format of completions, instead of the detected one.
        images: how images are loaded and expanded; by default with the model's own processor, if it can be loaded.

    Raises:
        InvalidInputError: the model has no fast tokenizer, or an option is unknown.
        TemplateError: the model has no chat template, or it does not compile.
    """
    tokenizer = load_tokenizer(model_or_tokenizer)
    no_images_because = "the model takes none"
    if images is None:
        try:
            images = load_image_inputs(model_or_tokenizer)
        except InvalidInputError as error:  # text works without it; an image raises this reason
            no_images_because = str(error)
    return TemplateRenderer(
        tokenizer,
        chat_template=chat_template,
        template_kwargs=template_kwargs,
        stop_token_ids=(*stop_token_ids, *load_stop_token_ids(model_or_tokenizer)),
        history=history,
        parser=parser,
        images=images,
        no_images_because=no_images_because,
    )


def load_image_inputs(model_or_tokenizer: Any) -> ImageInputs | None:
    """Load the image processor of a model's folder or hub name; None for a text model or a tokenizer.

    Raises:
        InvalidInputError: it has an image processor that cannot be loaded.
    """
    if not isinstance(model_or_tokenizer, (str, Path)):
        return None
    processor = load_image_processor(model_or_tokenizer)
    return None if processor is None else ImageInputs(processor=processor)


def load_tokenizer(model_or_tokenizer: Any) -> Any:
    """Load the fast tokenizer of a model's folder or hub name; a tokenizer is returned as it is.

    Raises:
        InvalidInputError: there is no fast tokenizer.
    """
    tokenizer = model_or_tokenizer
    if isinstance(model_or_tokenizer, (str, Path)):
        from transformers import AutoTokenizer

        try:
            # False, not None: transformers would ask on the terminal whether to run code of the folder.
            tokenizer = AutoTokenizer.from_pretrained(model_or_tokenizer, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"model must be a folder or hub name of a model with a tokenizer, got "
                f"{str(model_or_tokenizer)!r}: {error}"
            ) from None
    get_backend(tokenizer)  # raises if it is not a fast one
    return tokenizer


def load_stop_token_ids(model_or_tokenizer: Any) -> tuple[int, ...]:
    """Load the stop ids of the model's generation config, which may differ from the template's for turns with calls.

    Raises:
        InvalidInputError: the file is not a generation config.
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
