"""Send a model's folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from unbroken.errors import ExportError
from unbroken.runs.export.files import INFO


def create_repository(name: str, *, private: bool, api: Any = None) -> None:
    """Make sure that there is a repository that this machine's token may write to, before hours of training.

    Raises:
        ExportError: the name is wrong, there is no token, it has no right to it, or the hub does not answer.
    """
    try:
        (api or HfApi()).create_repo(name, private=private, exist_ok=True)
    except Exception as error:  # huggingface_hub documents many, and HTTP's beside its own
        raise ExportError(
            f"push_to_hub must be a repository that you may write to, got {name!r}: {_first_line(error)}. "
            "`hf auth login` sets your token"
        ) from error


def upload(folder: Path, name: str, *, message: str, api: Any = None) -> str:
    """Upload a folder in one commit, and return its address. `unbroken.json` stays: it has paths of this machine.

    Raises:
        ExportError: it cannot be uploaded; the folder stays.
    """
    try:
        commit = (api or HfApi()).upload_folder(
            repo_id=name, folder_path=folder, commit_message=message, ignore_patterns=[INFO]
        )
    except Exception as error:
        raise ExportError(
            f"the model in {folder} cannot be sent to the repository {name!r}: {_first_line(error)}. The folder is "
            f"whole: `hf upload {name} {folder}` sends it"
        ) from error
    return str(commit.commit_url)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
