"""The other files of a model's folder, besides config and weights: of text and images, a card, and its origin.

Training changes none of the tokenizer's, chat template's and processor's files, so they are copied byte for byte.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers.utils import cached_file

from unbroken import __version__
from unbroken.errors import ExportError
from unbroken.rollout.failures import format_error
from unbroken.untrusted import MAX_FACTS_BYTES, read_json_file

INFO = "unbroken.json"
_TEMPLATES = "additional_chat_templates"
_TEXT_AND_IMAGES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tiktoken.model", "tekken.json", "chat_template.jinja", "chat_template.json", "processor_config.json",
    "preprocessor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Where a model came from; `unbroken.json` in its folder."""

    step: int
    """Training steps that it has behind it."""
    source: str
    """The model that was trained: a folder or a hub name."""
    merged: bool = False
    dtype: str | None = None
    """None: that of the files of the model that was trained; of adapters that in which they were trained."""
    evaluation: Mapping[str, float] | None = None
    """The evaluation that made it the best."""


def add_files(folder: Path, info: ModelInfo) -> None:
    """Copy the files of text and images of the model that was trained, and write the card and `unbroken.json`."""
    _copy_text_and_images(info.source, folder)
    (folder / INFO).write_text(json.dumps(asdict(info), indent=1) + "\n", "utf-8")
    (folder / "README.md").write_text(_make_card(folder, info), "utf-8")


def _copy_text_and_images(source: str, folder: Path) -> None:
    """Copy the files of tokenizer, chat templates and processor from a model's folder or hub name."""
    for name in _TEXT_AND_IMAGES:
        if (path := _find(source, name)) is not None:
            shutil.copyfile(path, folder / name)
    config = _find(source, "config.json")
    for path in [] if config is None else sorted((config.parent / _TEMPLATES).glob("*.jinja")):
        (folder / _TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / _TEMPLATES / path.name)


def read_info(folder: Path) -> ModelInfo | None:
    """Read `unbroken.json`; None if the folder has none that can be read."""
    try:
        return ModelInfo(**read_json_file(folder / INFO, max_bytes=MAX_FACTS_BYTES))
    except (OSError, ValueError, TypeError):
        return None


def _find(source: str, name: str) -> Path | None:
    found: Any = cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def _make_card(folder: Path, info: ModelInfo) -> str:
    """The model card. The hub refuses a card whose base model is a path."""
    is_adapter = (folder / "adapter_config.json").exists()
    is_on_hub = not Path(info.source).is_absolute()
    lines = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}"]
    lines += [f"base_model: {info.source}"] if is_on_hub else []
    lines += ["tags:", "- unbroken", "- reinforcement-learning", "---", ""]
    what = "A LoRA adapter" if is_adapter else "A model"
    base = info.source if is_on_hub else "a local model"
    lines += [f"{what}, trained from {base} by reinforcement learning with unbroken {__version__}: {info.step} steps."]
    return "\n".join(lines) + "\n"


def create_repository(name: str, *, private: bool) -> None:
    """Make sure that there is a repository that this machine's token may write to, before hours of training.

    Raises:
        ExportError: the name is wrong, there is no token, it has no right to it, or the hub does not answer.
    """
    try:
        HfApi().create_repo(name, private=private, exist_ok=True)
    except Exception as error:  # huggingface_hub documents many, and HTTP's in addition to its own
        raise ExportError(
            f"push_to_hub must be a repository that you may write to, got {name!r}: "
            f"{format_error(error, first_line=True)}. `hf auth login` sets your token"
        ) from error


def upload(folder: Path, name: str, *, message: str) -> str:
    """Upload a folder in one commit, and return its address. `unbroken.json` stays: it has paths of this machine.

    Raises:
        ExportError: it cannot be uploaded; the folder stays.
    """
    try:
        commit = HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message, ignore_patterns=[INFO])
    except Exception as error:
        raise ExportError(
            f"the model in {folder} cannot be sent to the repository {name!r}: {format_error(error, first_line=True)}. "
            f"The folder is whole: `hf upload {name} {folder}` sends it"
        ) from error
    return str(commit.commit_url)
