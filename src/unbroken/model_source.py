"""Where a model comes from: a folder, or a name on the hub. What is neither is said before a library looks for it."""

from __future__ import annotations

import difflib
from pathlib import Path

from unbroken.errors import InvalidInputError

_MODEL_FILES = (
    "config.json", "tokenizer_config.json", "tokenizer.json", "tekken.json", "params.json", "adapter_config.json",
)  # fmt: skip
_MAX_DEPTH = 2
_MAX_NAMED = 3


def check_model_source(model: str | Path, *, name: str = "model") -> None:
    """Check that `model`, the setting or option `name`, is a folder with a model or the name of one on the hub.

    Raises:
        InvalidInputError: it is neither, or the hub cannot be reached.
    """
    check_model_folder(model, name=name)
    if not Path(model).exists() and "://" not in str(model):
        _check_on_hub(str(model), name=name)


def check_model_folder(model: str | Path, *, name: str = "model") -> None:
    """Check that `model`, the setting or option `name`, is a folder with a model, or may be a name on the hub.

    Nothing is asked of the hub. A text is a folder's path, whether the folder is there or not, if it begins like one
    (`.`, `/`, `~`) or if the folder that it would lie in is there: `runs/demo/modl` is a mistyped folder beside
    `runs/demo/model`, and the hub's client would ask for it five times.

    Raises:
        InvalidInputError: it is a folder without a model's files, a file, or a path to nothing.
    """
    path, text = Path(model), str(model)
    if path.is_dir():
        if not any((path / file).is_file() for file in _MODEL_FILES):
            raise InvalidInputError(
                f"{name} must be a folder or the hub's name of a model, got {text!r}: the folder has no config.json"
                + _suggest(_find_models(path))
            )
    elif path.exists() and path.suffix != ".gguf":  # vLLM serves such a file
        raise InvalidInputError(f"{name} must be a folder or the hub's name of a model, got the file {text!r}")
    elif (
        isinstance(model, Path) or text.startswith((".", "/", "~")) or (path.parent != Path() and path.parent.is_dir())
    ):
        beside = sorted(each.name for each in path.parent.iterdir()) if path.parent.is_dir() else []
        close = [str(path.parent / each) for each in difflib.get_close_matches(path.name, beside, n=_MAX_NAMED)]
        raise InvalidInputError(
            f"{name} must be a folder or the hub's name of a model, got {text!r}: there is no such folder"
            + _suggest(close)
        )


def _check_on_hub(model: str, *, name: str) -> None:
    """Ask the hub, or its cache on this machine, for a model of this name: one request without retries.

    Its client asks for each file five times, in a minute and a half, before it says that nobody answers.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    got = f"{name} must be a folder or the hub's name of a model, got {model!r}"
    try:
        if any(isinstance(try_to_load_from_cache(model, file), str) for file in _MODEL_FILES):
            return
        get_hf_file_metadata(hf_hub_url(model, "config.json"))
    except EntryNotFoundError:
        return  # a tokenizer alone, say
    except HFValidationError:
        raise InvalidInputError(
            f"{got}: there is no such folder, and a name on the hub is NAME or OWNER/NAME"
        ) from None
    except GatedRepoError:
        raise InvalidInputError(
            f"{got}: its owner asks for an agreement: accept it on the model's page, then `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise InvalidInputError(
            f"{got}: there is no such folder, and the hub has no such model, or a private one: `hf auth login`"
        ) from None
    except OfflineModeIsEnabled:
        raise InvalidInputError(
            f"{got}: there is no such folder, the hub's cache on this machine has no such model, and HF_HUB_OFFLINE "
            "forbids to ask the hub"
        ) from None
    except Exception as error:  # of the network: httpx's, the system's, the hub's own
        raise InvalidInputError(
            f"{got}: there is no such folder, the hub's cache on this machine has no such model, and the hub does not "
            f"answer ({type(error).__name__}: {error})"
        ) from None


def _lies_in_a_folder(path: Path) -> bool:
    """Whether a path has a folder before its last name, and that folder is there."""
    return path.parent != Path() and path.parent.is_dir()


def _find_models(folder: Path) -> list[str]:
    """The folders with a config.json, at most `_MAX_DEPTH` below this one."""
    patterns = ("/".join(["*"] * depth) + "/config.json" for depth in range(1, _MAX_DEPTH + 1))
    return sorted(str(file.parent) for pattern in patterns for file in folder.glob(pattern))[:_MAX_NAMED]


def _suggest(folders: list[str]) -> str:
    return f": did you mean {' or '.join(folders)}?" if folders else ""
