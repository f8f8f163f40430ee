"""Loads the renderer of a model by its folder or hub name, with tokenizer, stop ids and image processor.

    renderer = load_renderer("path/to/model", template_kwargs={"enable_thinking": False})

transformers alone knows which tokenizer a model's files mean: 94 of its 96 classes make parts of it themselves. But it
imports torch, which takes 6 CPU seconds and 700 MB with it. So a process that has not imported it yet has another one
load the tokenizer, once: what comes out (`TokenizerFacts`) is kept in the user's cache, under a digest of all files
that transformers may have read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.images.processor import ImageInputs, find_model_file, load_image_processor
from unbroken.model_source import check_model_source
from unbroken.rendering.base import HistoryPolicy
from unbroken.rendering.encoding.tokenizer import TokenizerFacts
from unbroken.rendering.template import TemplateRenderer
from unbroken.untrusted import MAX_FACTS_BYTES, read_json_file

_logger = logging.getLogger(__name__)


def load_renderer(
    model_or_tokenizer: Any,
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    stop_token_ids: Sequence[int] = (),
    history: HistoryPolicy | str = HistoryPolicy.EXACT,
    parser: str | None = None,
    images: ImageInputs | None = None,
) -> TemplateRenderer:
    """Load the renderer of a model's own chat template. All arguments belong to its identity: see `docs/renderers.md`.

    Args:
        model_or_tokenizer: folder or hub name of a model, its `TokenizerFacts`, or a `PreTrainedTokenizerFast`. A
            model's generation config adds its stop ids; a tokenizer has none.
        chat_template: a template, or the name of one of the tokenizer's, instead of the default one.
        template_kwargs: variables of the template, such as `enable_thinking`.
        stop_token_ids: more ids that end a turn.
        history: the policy where the template rewrites earlier turns.
        parser: the call format of completions, instead of the detected one.
        images: how images are loaded and expanded; by default with the model's own processor, if it can be loaded.

    A warning is logged if calls that the template renders are not read back (`TemplateRenderer.unread_calls`).

    Raises:
        InvalidInputError: the model has no fast tokenizer, or an option is unknown.
        TemplateError: the model has no chat template, or it does not compile.
    """
    tokenizer = load_tokenizer_facts(model_or_tokenizer)
    no_images_because = "the model takes none"
    if images is None:
        try:
            images = _load_image_inputs(tokenizer.model)
        except InvalidInputError as error:  # text works without it; an image raises this reason
            no_images_because = str(error)
    renderer = TemplateRenderer(
        tokenizer,
        chat_template=chat_template,
        template_kwargs=template_kwargs,
        stop_token_ids=(*stop_token_ids, *load_stop_token_ids(tokenizer.model)),
        history=history,
        parser=parser,
        images=images,
        no_images_because=no_images_because,
    )
    if renderer.unread_calls:
        _logger.warning("%s", renderer.unread_calls)
    return renderer


def _load_image_inputs(model: str | Path | None) -> ImageInputs | None:
    """Load the image processor of a model's folder or hub name; None for a text model, and without a model.

    Raises:
        InvalidInputError: it has an image processor that cannot be loaded.
    """
    processor = None if model is None else load_image_processor(model)
    return None if processor is None else ImageInputs(processor=processor)


def load_tokenizer(model_or_tokenizer: Any) -> Any:
    """Load the transformers tokenizer of a model's folder or hub name; a fast one that is given is returned as it is.

    Raises:
        InvalidInputError: there is no fast tokenizer, or a package that it needs is missing.
    """
    tokenizer = model_or_tokenizer
    if isinstance(tokenizer, TokenizerFacts) and tokenizer.model is not None:
        tokenizer = model_or_tokenizer = tokenizer.model
    if isinstance(tokenizer, (str, Path)):
        check_model_source(tokenizer)
        from transformers import AutoTokenizer

        try:
            # False, not None: transformers would ask on the terminal whether to run code of the folder.
            tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
            if (
                type(tokenizer).__name__ == _MISTRAL
                and find_model_file(model_or_tokenizer, "tokenizer.json") is not None
            ):
                # transformers prefers mistral_common's where it is installed, whatever else the model has.
                tokenizer = AutoTokenizer.from_pretrained(
                    model_or_tokenizer, trust_remote_code=False, mistral_format=False
                )
        except (OSError, ValueError, ImportError) as error:
            raise InvalidInputError(
                f"model must be a folder or hub name of a model with a tokenizer, got "
                f"{str(model_or_tokenizer)!r}: {error}"
            ) from None
    tokenizer = _convert_tekken(tokenizer)
    TokenizerFacts.of(tokenizer)  # raises if it is not a fast one
    return tokenizer


_MISTRAL = "MistralCommonBackend"
"""transformers' class for models with a `tekken.json`, which has no fast tokenizer: mistral_common makes its ids."""


def find_other_token(own: Any, other: Any) -> str | None:
    """How `other` differs from a tokenizer, at the first token that has another id there, or none; None if nowhere.

    Further tokens of `other` are no difference: compare both ways if they must have the same ones.
    """
    ids = other.get_vocab()
    for token, token_id in sorted(own.get_vocab().items(), key=lambda each: each[1]):
        if ids.get(token) != token_id:
            found = f"the id {ids[token]}" if token in ids else "no id"
            return f"{found} for the token {token!r}, which is {token_id}"
    return None


def _convert_tekken(tokenizer: Any) -> Any:
    """The fast tokenizer of one of mistral_common; any other is returned as it is.

    It is transformers' own conversion of `tekken.json`: it has the same ids, and the chat template that the model has
    or that mistral_common writes for its version.
    """
    if type(tokenizer).__name__ != _MISTRAL:
        return tokenizer
    from transformers.integrations.mistral import convert_tekken_tokenizer

    file = tokenizer.tokenizer.instruct_tokenizer.tokenizer.file_path
    if file.suffix != ".json":
        raise InvalidInputError(
            f"model must have a tekken.json or a tokenizer.json, got {file.name}: convert it with transformers, and "
            "save that (tokenizer.json)"
        )
    return convert_tekken_tokenizer(str(file))


def load_stop_token_ids(model: str | Path | None) -> tuple[int, ...]:
    """Load the stop ids of the model's generation config, which may differ from the template's for turns with calls.

    Raises:
        InvalidInputError: the file is not a generation config.
    """
    file = None if model is None else find_model_file(model, "generation_config.json")
    if file is None:
        return ()
    try:
        ids = dict(read_json_file(file, max_bytes=MAX_FACTS_BYTES)).get("eos_token_id")
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInputError(f"generation_config.json must be a JSON object ({file}): {error}") from None
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token_id) is int for token_id in listed):
        raise InvalidInputError(f"eos_token_id must be an id or a list of ids, got {ids!r} ({file})")
    return tuple(listed)


def load_tokenizer_facts(model_or_tokenizer: Any) -> TokenizerFacts:
    """Load the facts of a tokenizer from a model's folder or hub name, or get those of a tokenizer.

    In a process with transformers it loads them, with the classes that were registered there. In any other process it
    is not imported, unless the other process fails: its errors are raised here.

    Raises:
        InvalidInputError: there is no fast tokenizer.
    """
    if not isinstance(model_or_tokenizer, (str, Path)):
        return TokenizerFacts.of(_convert_tekken(model_or_tokenizer))
    check_model_source(model_or_tokenizer)
    facts = None if "transformers" in sys.modules else _load_elsewhere(model_or_tokenizer)
    if facts is None:
        facts = TokenizerFacts.of(load_tokenizer(model_or_tokenizer), model=model_or_tokenizer)
    return facts


_FORMAT = "unbroken tokenizer 2"
_LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "protobuf", "mistral-common")
"""Decide what a tokenizer's files become."""
_IRRELEVANT = frozenset({"generation_config.json", "preprocessor_config.json", "processor_config.json"})
_IRRELEVANT_TYPES = frozenset(
    {
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".distcp",
        ".gguf",
        ".h5",
        ".msgpack",
        ".onnx",
        ".npz",
        ".npy",
        ".md",
        ".py",
        ".png",
        ".jpg",
        ".log",
    }
)
"""Weights and what else no tokenizer is made of."""
_TEMPLATES = "additional_chat_templates"
_OF_THE_HUB = (
    "tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
"""Files that transformers asks the hub for."""
_MAX_ENTRIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """The files of a model's tokenizer."""

    folder: Path
    key: str
    """A digest of their names and contents, of the model's name, and of the libraries' versions."""


def _load_elsewhere(model: str | Path) -> TokenizerFacts | None:
    """Load the facts from the cache, or have another process load the tokenizer; None if that fails."""
    files, cache = _find_files(model), _open_cache()
    if files is None:
        return None
    if cache is not None and (body := _read_entry(cache, files.key)) is not None:
        return TokenizerFacts.from_bytes(body, model=model)
    # -P: a module in the current folder is not imported.
    words = [sys.executable, "-P", "-m", __name__, str(model)]
    try:
        loaded = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    except (OSError, TypeError):  # TypeError: sys.executable is None where Python is embedded
        return None
    if loaded.returncode != 0:
        return None
    now = _find_files(model)
    if cache is not None and now is not None and _are_same(model, files, now):
        _write_entry(cache, now.key, loaded.stdout)
    return TokenizerFacts.from_bytes(loaded.stdout, model=model)


def _are_same(model: str | Path, before: _Files, now: _Files) -> bool:
    """Whether a tokenizer was made of these files. A folder's may have changed since.

    The hub's folder is that of a commit, so files were added, at most. transformers takes one that could not be loaded
    for one that is not there: the hub must have said of each whether it is.
    """
    if Path(model).is_dir():
        return now == before
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return now.folder == before.folder and (
        HF_HUB_OFFLINE
        or all(try_to_load_from_cache(str(model), name, revision=now.folder.name) is not None for name in _OF_THE_HUB)
    )


def _find_files(model: str | Path) -> _Files | None:
    """Find the files on this machine, and the hub's newest if it answers; None if there are none that can be read."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    digest = hashlib.sha256(json.dumps([_FORMAT, str(model), HF_HUB_OFFLINE, *_list_versions()]).encode())
    found = (find_model_file(model, name) for name in ("tokenizer_config.json", "config.json", "tokenizer.json"))
    try:
        folder = next(file for file in found if file is not None).parent
        for path in sorted([*folder.iterdir(), *folder.joinpath(_TEMPLATES).glob("*.jinja")]):
            if path.is_file() and path.name not in _IRRELEVANT and path.suffix not in _IRRELEVANT_TYPES:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(json.dumps([str(path.relative_to(folder)), content]).encode())
    except (OSError, StopIteration):
        return None
    return _Files(folder=folder, key=digest.hexdigest())


def _list_versions() -> Iterator[str]:
    for name in _LIBRARIES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"no {name}"


def _open_cache() -> Path | None:
    """Open the folder of entries in the Hugging Face cache (`HF_HOME`); None if it is not this user's alone."""
    from huggingface_hub.constants import HF_HOME

    try:
        folder = Path(HF_HOME, f"unbroken-{os.getuid()}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except (OSError, AttributeError):  # AttributeError: Windows
        return None
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return folder if is_private else None


def _read_entry(cache: Path, key: str) -> bytes | None:
    """Read the entry of a key; None if there is none, or it is damaged, or is another key's."""
    try:
        seal, _, body = (cache / key).read_bytes().partition(b"\n")
    except OSError:
        return None
    return body if seal == _seal(key, body) else None


def _write_entry(cache: Path, key: str, body: bytes) -> None:
    """Write an entry whole or not at all, and remove the oldest."""
    part = cache / f"{key}.{os.getpid()}"
    with suppress(OSError):
        part.write_bytes(_seal(key, body) + b"\n" + body)
        part.replace(cache / key)
        newest_first = sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in newest_first[_MAX_ENTRIES:]:
            path.unlink()


def _seal(key: str, body: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(body)
    return digest.hexdigest().encode()


def _main(model: str) -> int:
    """Load a tokenizer with transformers, and write its facts to the standard output. Returns the exit status."""
    with redirect_stdout(sys.stderr):
        try:
            body = TokenizerFacts.of(load_tokenizer(model)).to_bytes()
            if TokenizerFacts.from_bytes(body).to_bytes() != body:
                return 1
        except Exception:  # the caller tries it again, and has the error
            return 1
    sys.stdout.buffer.write(body)
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
