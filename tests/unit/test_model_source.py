"""A model's name that leads nowhere is one sentence, before any library looks for it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from support.hub import serve_hub
from unbroken.errors import InvalidInputError
from unbroken.model_source import check_model_folder, check_model_source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runs/demo/model").mkdir(parents=True)
    (tmp_path / "runs/demo/model/config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "runs/demo/model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", ["runs/demo/model", "link", "gpt2", "Qwen/Qwen3-0.6B", "s3://bucket/model"])
def test_a_folder_with_a_model_and_what_may_be_a_name_on_the_hub_pass(folder: Path, model: str) -> None:
    check_model_folder(model)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("runs/demo/modl", "'runs/demo/modl': there is no such folder: did you mean runs/demo/model?"),
        ("runs/nope", "'runs/nope': there is no such folder"),
        ("./nope", "there is no such folder"),
        ("/nope/model", "there is no such folder"),
        ("runs", "'runs': the folder has no config.json: did you mean runs/demo/model?"),
        ("runs/demo/model/config.json", "got the file 'runs/demo/model/config.json'"),
    ],
)
def test_what_is_neither_is_named_with_what_lies_near(folder: Path, model: str, words: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        check_model_folder(model, name="--model")
    assert str(refused.value).startswith("--model must be a folder or the hub's name of a model, got ")
    assert words in str(refused.value)


PATHS = "/{repo_id}/resolve/{revision}/{filename}"


def test_a_name_that_the_hub_does_not_know_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serve_hub() as hub:
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        with pytest.raises(InvalidInputError, match=r"the hub (has no such model|does not answer)"):
            check_model_source("owner/nope")


def test_a_hub_that_is_away_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        away = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", away + PATHS)
        with pytest.raises(InvalidInputError, match="the hub does not answer"):
            check_model_source("owner/nope")


def test_without_the_hub_the_sentence_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidInputError, match="HF_HUB_OFFLINE forbids"):
        check_model_source("owner/nope")


def test_a_name_that_the_hub_cannot_have_is_no_folder_either() -> None:
    with pytest.raises(InvalidInputError, match="a name on the hub is NAME or OWNER/NAME"):
        check_model_source("a/b/c")
