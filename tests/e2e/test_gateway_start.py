"""Processes without transformers: they load tokenizers through another process once, then from the user's cache."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.servers import listening, make_app, scripted_engine, server_tokenizer
from unbroken.errors import InvalidInputError
from unbroken.rendering import loader
from unbroken.rendering.loader import load_tokenizer

pytestmark = [pytest.mark.e2e]

LOAD = """
import sys
from unbroken.errors import InvalidInputError
from unbroken.rendering.loader import load_tokenizer_facts
try:
    facts = load_tokenizer_facts(sys.argv[1])
    print(repr(facts.chat_template), facts.backend.encode("the file <|im_end|>").ids)
except InvalidInputError as error:
    print(error)
print("torch" in sys.modules or "transformers" in sys.modules)
"""
SERVE = """
import sys
from unbroken.cli import main
status = main(sys.argv[1:])
print("loaded", sorted({"torch", "transformers"} & sys.modules.keys()))
sys.exit(status)
"""


def run(model: str | Path, cache: Path, **variables: str) -> tuple[str, str]:
    """What a process prints of a tokenizer, and whether it has imported torch or transformers."""
    environment = {**os.environ, "HF_HOME": str(cache), **variables}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(model)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *printed, imported = done.stdout.splitlines()
    return "\n".join(printed), imported


def entries(cache: Path) -> dict[str, Any]:
    (folder,) = cache.glob("unbroken-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}


def show(tokenizer: Any) -> str:
    return f"{tokenizer.chat_template!r} {tokenizer.encode('the file <|im_end|>')}"


def test_an_entry_is_read_while_the_files_are_the_same_and_made_anew_if_it_is_damaged(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    server_tokenizer().save_pretrained(model)
    (model / "sitecustomize.py").write_text("raise SystemExit(9)")
    expected = show(load_tokenizer(str(model)))
    assert run(model, cache) == (expected, "False")
    first = entries(cache)
    assert len(first) == 1
    (model / "model.safetensors").write_bytes(b"weights")
    assert run(model, cache) == (expected, "False")
    assert entries(cache) == first
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    other = show(load_tokenizer(str(model)))
    assert other != expected
    assert run(model, cache) == (other, "False")
    both = entries(cache)
    (second,) = both.keys() - first.keys()
    (folder,) = cache.glob("unbroken-*")
    shutil.copyfile(folder / next(iter(first)), folder / second)  # whole, but of other files
    assert run(model, cache) == (other, "False")
    assert {name: content for name, (_, content) in entries(cache).items()} == {
        name: content for name, (_, content) in both.items()
    }


def test_a_name_of_the_hub_is_found_in_its_cache_without_a_network(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / commit
    server_tokenizer().save_pretrained(snapshot)
    (snapshot / "config.json").write_text('{"model_type": "qwen3"}')
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    expected = show(load_tokenizer(str(snapshot)))
    assert run("org/name", tmp_path, HF_HUB_OFFLINE="1") == (expected, "False")
    first = entries(tmp_path)
    assert len(first) == 1
    assert run("org/name", tmp_path, HF_HUB_OFFLINE="1") == (expected, "False")
    assert entries(tmp_path) == first


def test_a_cache_that_others_can_enter_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "new" / "cache"))
    folder = loader._open_cache()
    assert folder is not None
    for mode in (0o750, 0o701, 0o777):
        folder.chmod(mode)
        assert loader._open_cache() is None
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    assert loader._open_cache() is None


def test_the_error_of_a_broken_tokenizer_is_that_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidInputError) as caught:
        load_tokenizer(str(tmp_path))
    assert run(tmp_path, tmp_path / "cache") == (str(caught.value), "True")


async def test_a_gateway_over_an_upstream_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    server_tokenizer().save_pretrained(tmp_path / "model")
    async with listening(make_app(scripted_engine("Yes.<|im_end|>"))) as upstream:
        words = ["--port", "0", "--upstream", upstream, "--no-control-key"]
        words += ["--tokenizer", str(tmp_path / "model"), "--store", str(tmp_path / "store")]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SERVE, "gateway", *words),
            stdout=subprocess.PIPE,
            env={**os.environ, "HF_HOME": str(tmp_path / "cache")},
        )
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        url = line.split(" at ")[1].split()[0]
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            session = (await client.post("/v1/sessions", json={})).json()
            body = {"model": "any", "messages": [{"role": "user", "content": "Is it?"}]}
            answer = await client.post(f"{session['openai_base_url']}/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "Yes."
        process.terminate()
        rest, _ = await process.communicate()
    assert rest.decode().splitlines()[-1] == "loaded []"
    assert process.returncode == 0
