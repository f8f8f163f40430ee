"""What callers see of vLLM's errors."""

from __future__ import annotations

import gc
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from unbroken.engines.vllm.causes import CauseHandler, read_cause
from unbroken.errors import EngineError, SamplingError


def test_what_vllm_refuses_for_a_time_is_a_failure_of_the_engine_and_not_of_the_request() -> None:
    from vllm.exceptions import RetryableRequestError

    from unbroken.engines.vllm.calls import translate_errors

    with pytest.raises(EngineError, match="RetryableRequestError: Generation is paused"), translate_errors():
        raise RetryableRequestError("Generation is paused")


def test_a_refusal_names_vllms_reason() -> None:
    from vllm.exceptions import VLLMValidationError

    from unbroken.engines.vllm.calls import translate_errors

    with pytest.raises(SamplingError, match="vLLM refuses the request: Token id 9 is out"), translate_errors():
        raise VLLMValidationError("Token id 9 is out of vocabulary")


def find_contexts() -> set[Any]:
    """The ZMQ contexts of this process; a shared engine has one too. Those of asyncio are shadows of them."""
    import zmq

    return {each for each in gc.get_objects() if type(each) is zmq.Context and not each.closed}


@pytest.mark.parametrize(
    ("options", "broken", "cause"),
    [
        (["--num-gpu-blocks-override", "2"], False, r"ValueError: To serve at least one request with the model's max"),
        ([], True, r"SafetensorError: "),
    ],
    ids=["its core", "its worker"],
)
async def test_an_engine_whose_process_fails_to_start_says_what_that_process_raised(
    options: list[str], broken: bool, cause: str, tmp_path: Path
) -> None:
    """vLLM's own error is `Engine core initialization failed. See root cause above`, wherever above is."""
    from support.vllm_engines import save_model, start_engine, tiny_vllm_model

    save_model(tmp_path, tiny_vllm_model())
    if broken:
        weights = tmp_path / "model.safetensors"
        os.truncate(weights, weights.stat().st_size - 4)
    others = find_contexts()
    with pytest.raises(EngineError, match=f"^vLLM does not start: {cause}") as raised:
        await start_engine(tmp_path, *options)
    assert "\n" not in str(raised.value)
    assert "root cause" not in str(raised.value)
    for context in find_contexts() - others:  # vLLM leaves them behind, and they say so when they go
        context.destroy()


def log_error(path: Path, message: str, error: Exception | None) -> None:
    """Log as a process of vLLM with our handler does."""
    info = None if error is None else (type(error), error, None)
    CauseHandler(str(path)).handle(logging.LogRecord("vllm", logging.ERROR, "core.py", 1, message, (), info))


def test_the_cause_is_the_error_of_the_process_that_failed_first(tmp_path: Path) -> None:
    path = tmp_path / "causes.jsonl"
    assert read_cause(path) is None
    log_error(path, "nothing was raised", None)
    assert read_cause(path) is None
    log_error(path, "Error in a part that is optional", KeyError("optional"))
    assert read_cause(path) is None
    log_error(path, "WorkerProc failed to start.", ValueError("no memory:\n  8 GiB"))
    log_error(path, "EngineCore failed to start.", RuntimeError("see the root cause above"))
    assert read_cause(path) == "ValueError: no memory: 8 GiB"


def test_an_error_after_the_start_is_logged_without_a_word_about_the_file_that_is_gone(tmp_path: Path, capfd) -> None:
    log_error(tmp_path / "gone" / "causes.jsonl", "EngineCore encountered a fatal error.", ValueError("late"))
    assert capfd.readouterr().err == ""


def test_logging_that_a_user_has_set_up_stays_as_it_is(tmp_path: Path) -> None:
    from unbroken.engines.vllm import parse_engine_args
    from unbroken.engines.vllm.startup import log_causes

    (tmp_path / "own.json").write_text('{"version": 1}')
    given = parse_engine_args(
        ["--model", str(tmp_path), "--logging-config.pylogging_config_file", str(tmp_path / "own.json")]
    )
    assert log_causes(given, tmp_path / "causes", settings=tmp_path / "settings.json") is given
    level = parse_engine_args(["--model", str(tmp_path), "--log-level", "ERROR"])
    changed = log_causes(level, tmp_path / "causes", settings=tmp_path / "settings.json").create_logging_config()
    written = json.loads((tmp_path / "settings.json").read_text())
    assert changed.pylogging_config_file == str(tmp_path / "settings.json")
    assert (changed.log_level, written["handlers"]["vllm"]["level"]) == ("ERROR", "ERROR")
    assert written["loggers"]["vllm"]["handlers"] == ["vllm", "unbroken"]
