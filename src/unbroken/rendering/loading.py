"""What a model's folder or hub name says about its renderer: the tokenizer, stop ids, images, the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.images.inputs import ImageInputs
from unbroken.images.processing import load_image_processor
from unbroken.rendering.base import HistoryPolicy
from unbroken.rendering.template import TemplateRenderer


def load_template_renderer(
    model_or_tokenizer: Any,
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    history: HistoryPolicy | str = HistoryPolicy.EXACT,
    parser: str | None = None,
    images: ImageInputs | None = None,
) -> TemplateRenderer:
    """Load the renderer of a model's own chat template.

    Args:
        model_or_tokenizer: a folder or the hub's name of a model, of which only the tokenizer is loaded, or a
            `PreTrainedTokenizerFast`. A model's generation config adds its stop ids, a tokenizer's is not known.
        chat_template: the text, or the name of one of the tokenizer's, in place of its own.
        template_kwargs: variables of the template, such as `enable_thinking`.
        history: what happens where the template rewrites earlier turns.
        parser: the format to read completions in, in place of the one found.
        images: how images come in. By default the model's own processor, if it has one that can be loaded.

    Raises:
        InvalidInputError: the model has no fast tokenizer, or an option is unknown.
        TemplateError: the model has no chat template, or it does not compile.
    """
    tokenizer = load_tokenizer(model_or_tokenizer)
    no_images_because = "the model takes none"
    if images is None:
        try:
            images = load_image_inputs(model_or_tokenizer)
        except InvalidInputError as error:  # the model may be used for text alone: an image raises this reason
            no_images_because = str(error)
    return TemplateRenderer(
        tokenizer,
        chat_template=chat_template,
        template_kwargs=template_kwargs,
        stop_token_ids=load_stop_token_ids(model_or_tokenizer),
        history=history,
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
