"""The output folder of a run. It belongs to one recipe with one config; the same command continues the run in it.

While a run writes into it, its first process holds a lock on a file in it, which the system frees when that process
ends, however it ends. Processes that it forks do not hold the lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from unbroken.errors import InvalidInputError
from unbroken.ledger.store.sqlite import is_running
from unbroken.runs.process_file import PROCESS_FILE
from unbroken.runs.records.notes import NOTES_FILE
from unbroken.untrusted import MAX_FACTS_BYTES, open_inside, read_json_file

RECIPE_FILE = "recipe.json"
RECIPE_PART = f"{RECIPE_FILE}.part"
LOCK_FILE = "run.lock"
_EVALUATIONS = "evaluation.jsonl"
_SHOWN_DIGITS = 12
"""Of a digest of 64."""
_MAX_DIFFERENCES = 4
"""Besides the first; of a run with other settings altogether, all would be a page."""
FIT = "unbroken.fit"
"""The recipe's name of a run that `unbroken.fit` makes: its options are keywords, not those of a command."""
FOLLOWER = "follow"
"""Of `unbroken eval --follow`: its lock, and what its engine writes."""
_CLUSTER = "cluster"
"""Of `unbroken cluster run`, which is there first."""
TASK_FILE = "task.jsonl"
"""The data set of `unbroken agent`, whose task is its only row."""
TRACEBACK = "traceback.txt"
"""Of an exception in the user's code that ended the run."""
DIAGNOSIS_FILE = "diagnosis.json"
"""What the run has found out about itself (`runs.diagnosis`)."""
_FILES_OF_A_RUN = (
    *("metrics", "checkpoints", _EVALUATIONS, "final", "best", "models", "rollouts", "profiles"),
    *("sessions", "agents", "samplers", "timeline", "evaluations", FOLLOWER, TRACEBACK, PROCESS_FILE, DIAGNOSIS_FILE),
    NOTES_FILE,
)
"""What an earlier run of a recipe left."""
_BEFORE_A_STEP = frozenset(
    {RECIPE_FILE, RECIPE_PART, LOCK_FILE, "metrics", "server.log", "weights", "timeline", "rollouts", "evaluations"}
    | {_EVALUATIONS, _CLUSTER, "sessions", "agents", "samplers", FOLLOWER, TRACEBACK, PROCESS_FILE, DIAGNOSIS_FILE}
    | {NOTES_FILE}
)
_MAY_CHANGE = (
    "output",
    "engine.",
    "sessions.",
    "teacher.api_key_file",
    "rollouts.samplers",
    "rollouts.listen",
    "rollouts.key_file",
    "loop.num_steps",
    "loop.num_zero_variance_scored",
    "loop.outages.",
    "loop.max_empty_steps",
    "checkpoints.",
    "export.",
    "trainer.parallel.",
    "trainer.warn_of_inexact",
    "trainer.max_policy_k3",
    "evaluation.",
    "rollout_log.",
    "log_completions",
    "trackers.",
    "profile_steps",
)
"""Fields, and parts of the config (with a dot), that do not affect what a step trains on."""
TEACHERS = "teacher.models"
"""The setting whose folders are compared with their weights, of which no checkpoint knows."""
DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")
COMPRESSED = ".gz"
_CODE_FILES = (".py", ".sh", ".js", ".mjs", ".ts", ".jinja")
_FOLDER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "data-*.arrow",
    "*/data-*.arrow",
)
"""Of a model's folder what makes ids of messages, and of one of `save_to_disk` the rows."""
_WEIGHT_FILES = ("config.json", "adapter_config.json", "*.safetensors", "*.bin")
_PROCESS, _MAX_LOCK_BYTES = re.compile(r"\d{1,9}", re.ASCII), 1000
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredRecipe:
    """What the folder of a run says of its recipe."""

    name: str
    settings: Mapping[str, Any]
    """By dotted names, without secrets."""
    files: Mapping[str, str | None] = field(default_factory=dict)
    """Digests of the files that the settings name (`digest_files`)."""
    code: str = ""
    """The user's own Python recipe, where it was; empty for a built-in one."""
    curriculum: str | None = None
    """The name of the curriculum that its code gave (`Task.curriculum`), which is in no setting; empty without any.
    None: the code has made no task yet."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other runs out of `folder` during the block; of several processes of a run, only the first calls this.

    Raises:
        InvalidInputError: another run writes into the folder, or it cannot be written.
    """
    path = folder / LOCK_FILE
    descriptor = _open_locked(path)
    held = [descriptor]
    os.register_at_fork(after_in_child=lambda: _close(held))
    try:
        with suppress(OSError):  # on a full disk the lock does not say whose it is
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        if held:
            path.unlink(missing_ok=True)  # while it is locked: whoever waits for it finds that it is gone (`_is_at`)
        _close(held)


def claim_folder(
    folder: Path,
    recipe: str,
    settings: Mapping[str, Any],
    *,
    files: Mapping[str, str] | None = None,
    code: str = "",
    anew: bool = False,
) -> bool:
    """Write the recipe's name and settings into `folder`; returns whether the folder holds a run already.

    `files` are digests of the files that the settings name (`digest_files`), `code` the user's own Python recipe.

    A run that trained no step begins anew with any config; without an evaluation, its folder is any recipe's. With
    `anew`, an earlier run of the recipe is removed, and any config accepted.

    Raises:
        InvalidInputError: the folder holds the run of another recipe, config or files, or other files.
    """
    path = folder / RECIPE_FILE
    code = code and str(Path(code).absolute())
    new = _StoredRecipe(name=recipe, settings=settings, files=dict(files or {}), code=code, curriculum=None)
    _check_no_other_files(folder)
    if not path.exists():
        _write(path, new)
        return False
    stored = read_recipe(folder)
    all_files = {**stored.files, **new.files}  # one that cannot be read today is compared again
    is_other = (stored.name, stored.settings, stored.files) != (recipe, settings, all_files)
    has_no_step = is_other and _has_trained_nothing(folder)
    if stored.name != recipe and not (has_no_step and not (folder / _EVALUATIONS).exists()):
        raise InvalidInputError(
            f"output must be a folder without a run of another recipe: {folder} holds a run of {stored.name}, not of "
            f"{recipe}"
        )
    if anew or has_no_step:
        for file in _FILES_OF_A_RUN:
            shutil.rmtree(folder / file, ignore_errors=True)
            (folder / file).unlink(missing_ok=True)
        _write(path, new)
        return False
    option = _name_output(recipe)
    _check_same(folder, stored.settings, settings, option)
    _check_same_files(folder, stored.files, new.files, option)
    new = replace(new, files=all_files, curriculum=stored.curriculum)
    if stored != new:  # of several processes, only the first writes
        _write(path, new)
    return True


def record_curriculum(folder: Path, name: str) -> None:
    """Write which curriculum the code of a claimed folder's recipe gave, empty without any: no setting names it, and it
    is known only once that code has made the task.

    Raises:
        InvalidInputError: the run in the folder has trained with another one.
    """
    stored = read_recipe(folder)
    if name == stored.curriculum:
        return
    if stored.curriculum is not None and not _has_trained_nothing(folder):
        raise InvalidInputError(
            f"curriculum must be {stored.curriculum or 'none'} as in the run in {folder}, got {name or 'none'}: the "
            "Task of the recipe's code has it, and it chose the problems. Give that one, or another "
            f"{_name_output(stored.name)}"
        )
    _write(folder / RECIPE_FILE, replace(stored, curriculum=name))


def _name_output(recipe: str) -> str:
    """How the user of a recipe names the output folder."""
    return "output=" if recipe == FIT else "--output"


def read_recipe(folder: Path) -> _StoredRecipe:
    """Read what the folder of a run says of its recipe; raises `InvalidInputError` if it does not say it."""
    path = folder / RECIPE_FILE
    try:
        contents = read_json_file(path, max_bytes=MAX_FACTS_BYTES, is_finite=False)
        return _StoredRecipe(
            name=contents["recipe"],
            settings=dict(contents["settings"]),
            files=dict(contents["files"]),
            code=contents["code"],
            curriculum=contents.get("curriculum"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path} must hold the recipe and settings of the run in its folder: {type(error).__name__}: {error}"
        ) from None


def read_trained_recipe(folder: Path, *, begins: bool) -> _StoredRecipe | None:
    """The recipe of the run in a folder that has trained a step, or that `begins`; None if there is no such run."""
    if not (folder / RECIPE_FILE).is_file() or (not begins and _has_trained_nothing(folder)):
        return None
    return read_recipe(folder)


def find_state(folder: Path) -> str:
    """Of a run: `ended`, `running`, or `died`: its process, which the lock's file names, is no more. Locks nothing."""
    try:
        with open_inside(folder, LOCK_FILE) as lock:
            words = lock.read(_MAX_LOCK_BYTES).decode("utf-8", "replace").split()
    except OSError:
        return "ended"
    if len(words) < 3 or _PROCESS.fullmatch(words[0]) is None or words[2] != socket.gethostname():
        return "running"
    return "running" if is_running(int(words[0])) else "died"


def _check_same(folder: Path, before: Mapping[str, Any], settings: Mapping[str, Any], option: str) -> None:
    """Compare all settings that may not change; `option` is how the user names the output folder."""
    names = {name for name in before.keys() | settings.keys() if not may_change(name)}
    numerics = "trainer.numerics"
    if (before.get(numerics), settings.get(numerics)) == ("exact", "fast"):
        # The other way round it would claim bits that the first steps have not; this way it claims none any more. A run
        # that ended by a logprob of other bits, as after a move to another machine, could continue nowhere else.
        names.remove(numerics)
    others = [each for name in sorted(names) for each in find_differences(name, before.get(name), settings.get(name))]
    if others:
        (name, old, new), *rest = others
        more = "".join(f", and {name} {old}, got {new}" for name, old, new in rest[:_MAX_DIFFERENCES])
        left = f", and {len(rest) - _MAX_DIFFERENCES} more" if len(rest) > _MAX_DIFFERENCES else ""
        raise InvalidInputError(
            f"{name} must be {old} as in the run in {folder}, got {new}{more}{left}: a run continues with the config "
            f"that it began with. Give that value, or another {option}"
        )


def find_differences(name: str, old: Any, new: Any) -> Iterator[tuple[str, str, str]]:
    """What differs of a setting: the name, the old and the new value; of tables and their lists only that part.

    Worked example: rewards of {function: a, weight: 1} and {function: a, weight: 2} give rewards[0].weight, 1, 2.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            yield from find_differences(f"{name}.{key}", old.get(key), new.get(key))
    elif _has_tables(old) and _has_tables(new):
        for number, pair in enumerate(zip(old, new, strict=False)):
            yield from find_differences(f"{name}[{number}]", *pair)
        if len(old) != len(new):
            yield name, f"a list of {len(old)}", f"a list of {len(new)}"
    elif old != new:
        yield name, repr(old), repr(new)


def _has_tables(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, Mapping) for each in value)


def _check_same_files(
    folder: Path, before: Mapping[str, str | None], files: Mapping[str, str | None], option: str
) -> None:
    for each in sorted(before.keys() & files.keys()):
        if before[each] not in (files[each], None):  # null: the user has said that it may be another one
            raise InvalidInputError(
                f"{each} must be {_shorten_digest(before[each])} as in the run in {folder}, got "
                f"{_shorten_digest(files[each])}: a run continues with "
                f"the files that it began with. Give that one, or another {option}; to go on with this one on purpose, "
                f"write null in its place in {folder / RECIPE_FILE}; rows to train on must stay the same"
            )


def _shorten_digest(digest: str | None) -> str:
    """Enough of it to see that two differ."""
    return "none" if digest is None else repr(digest[:_SHOWN_DIGITS])


def digest_files(settings: Mapping[str, Any], *, code: str = "") -> dict[str, str]:
    """The SHA-256 of each file that settings name, by the name: data, code, and the tokenizer in a model's folder.

    Settings that may change when a run continues name none that matter. `code` is the user's own Python recipe, if it
    is one, wherever it lies.
    """
    texts = _find_texts([value for name, value in settings.items() if not may_change(name)])
    paths = {str(path): path for text in texts for path in _list_files(text)}
    paths |= {str(path): path for folder in settings.get(TEACHERS) or () for path in _list_weights(folder)}
    if code:
        paths[f"{Path(code).name}, the recipe's code"] = Path(code)
    found = {}
    for name, path in paths.items():
        with suppress(OSError), path.open("rb") as file:  # the recipe says what is wrong with one that cannot be read
            found[f"the SHA-256 of {name}"] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _find_texts(each)


def _list_files(text: str) -> list[Path]:
    """The files that a setting names: a file, the one of `file.py:name`, or those of a folder."""
    file, _, _ = text.rpartition(":")
    path = Path(file if file.endswith(".py") else text)
    if text and os.path.isdir(path):  # noqa: PTH112  Path.is_dir may raise
        return sorted(each for pattern in _FOLDER_FILES for each in path.glob(pattern))
    is_known = path.name.removesuffix(COMPRESSED).endswith(DATA_FILES + _CODE_FILES)
    return [path] if is_known and os.path.isfile(path) else []  # noqa: PTH113


def _list_weights(folder: str) -> list[Path]:
    """The files that a model's folder is computed from, besides its tokenizer."""
    return sorted(each for pattern in _WEIGHT_FILES for each in Path(folder).glob(pattern)) if folder else []


def open_private(path: Path, mode: str) -> BinaryIO:
    """Open a binary file that, if it is made now, only this user can read."""
    return cast(BinaryIO, open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600)))


def make_folder(folder: Path) -> None:
    """Make the folder of a run, which has prompts, replies and logs: for this user only. One that is there stays.

    Raises:
        InvalidInputError: it cannot be made.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _not_writable(folder, error) from error


def _has_trained_nothing(folder: Path) -> bool:
    """Whether the folder of a run has no more than what is there before its first step."""
    others = {each.name for each in folder.iterdir() if not each.is_dir() or any(each.iterdir())} - _BEFORE_A_STEP
    numbers = folder / "metrics" / "metrics.jsonl"
    return not others and not (numbers.exists() and numbers.stat().st_size)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _check_no_other_files(folder: Path) -> None:
    if not folder.is_dir() or (folder / RECIPE_FILE).exists():
        return
    if any(
        each.name not in (RECIPE_PART, LOCK_FILE, _CLUSTER, "timeline", TRACEBACK, TASK_FILE, PROCESS_FILE)
        for each in folder.iterdir()
    ):
        raise InvalidInputError(f"output must be an empty folder or that of a run, and {folder} holds other files")


def _open_locked(path: Path) -> int:
    """Open and lock the file; a file that its holder has removed does not count."""
    while True:
        make_folder(path.parent)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _not_writable(path.parent, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 300).decode(errors="replace").strip() or "of another run"
            os.close(descriptor)
            raise InvalidInputError(
                f"output must be a folder that no other run writes into, and process {holder} runs in {path.parent}: "
                "wait for its end, end it, or give another output folder"
            ) from None
        except OSError as error:
            _logger.warning("%s cannot be locked (%s): start no second run in this folder", path, error)
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _not_writable(folder: Path, error: OSError) -> InvalidInputError:
    return InvalidInputError(f"output must be a writable folder, got {folder}: {error}")


def _write(path: Path, stored: _StoredRecipe) -> None:
    part = path.with_name(RECIPE_PART)
    make_folder(path.parent)
    try:
        with open_private(part, "wb") as file:
            contents = {"recipe": stored.name, **{key: value for key, value in asdict(stored).items() if key != "name"}}
            file.write((json.dumps(contents, indent=1) + "\n").encode())
        part.replace(path)
    except OSError as error:
        raise _not_writable(path.parent, error) from error


def may_change(name: str) -> bool:
    """Whether a field of the config may have another value when the run continues."""
    return name in _MAY_CHANGE or name.startswith(tuple(each for each in _MAY_CHANGE if each.endswith(".")))
