"""The lines of user code in the traceback of an exception, for error messages."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow.json
import pytest

from unbroken import integrations
from unbroken.errors import InvalidInputError, UnbrokenError
from unbroken.rollout.failures import format_frames
from unbroken.rollout.process.channel import pack
from unbroken.rollout.tools import tool
from unbroken.runs.python_files import load_module


def divide(number: int) -> float:
    return number / 0


def read(text: str) -> object:
    return json.loads(text)


def misuse() -> object:
    return tool(divide, timeout_s=-1)


def failure_of(function, *arguments) -> Exception:
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_the_lines_of_compiled_libraries_are_nobodys() -> None:
    """They have paths of the machine that built them, such as pyarrow/error.pxi."""
    text = format_frames(failure_of(lambda: pyarrow.json.read_json(io.BytesIO(b'{"a"'))))
    assert "lambda" in text
    assert ".px" not in text


def test_the_lines_of_the_user_are_shown_and_not_those_of_libraries() -> None:
    lines = format_frames(failure_of(read, "{")).splitlines()
    assert lines[1].endswith(f'File "{__file__}", line {failure_of.__code__.co_firstlineno + 2}, in failure_of')
    assert any(line.strip() == "return json.loads(text)" for line in lines)
    assert "raw_decode" not in "".join(lines)


def test_what_our_own_code_raises_is_no_failure_of_the_user() -> None:
    error = failure_of(misuse)
    assert "timeout_s=-1" in format_frames(error)
    assert format_frames(error, raised_there=True) == ""
    assert "number / 0" in format_frames(failure_of(divide, 1), raised_there=True)


def test_the_lines_of_a_cause_are_shown_if_the_error_has_none() -> None:
    error = InvalidInputError("wrapped")
    error.__cause__ = failure_of(divide, 1)
    assert "return number / 0" in format_frames(error)
    assert format_frames(InvalidInputError("alone")) == ""


def in_integration(error_type: type[Exception]) -> Exception:
    """An error whose last line, but for libraries', is in an integration of ours; below it is no file of the user's."""
    source = f"{Path(integrations.__file__).parent}/gym.py"
    names: dict[str, Any] = {"json": json, "error_type": error_type}
    exec(compile("def play(text):\n    return json.loads(text)\n", source, "exec"), names)
    exec(compile("def refuse(text):\n    raise error_type(text)\n", source, "exec"), names)
    called = names["refuse"] if issubclass(error_type, UnbrokenError) else names["play"]
    error = failure_of(called, "{")
    error.__traceback__ = error.__traceback__.tb_next  # from the integration on, as where a library of theirs calls
    return error


def test_an_error_inside_an_integration_has_file_and_line_like_the_users_own_code() -> None:
    error = in_integration(ValueError)
    assert 'integrations/gym.py", line 2, in play' in format_frames(error)
    assert "in play" in format_frames(error, raised_there=True)
    wrapped = RuntimeError("a rollout failed")
    wrapped.__cause__ = error
    assert "in play" in format_frames(wrapped)


def test_an_error_of_ours_from_an_integration_says_itself_what_is_wrong() -> None:
    error = in_integration(InvalidInputError)
    assert format_frames(error) == ""
    missing = InvalidInputError("it needs the package gymnasium")
    missing.__cause__ = in_integration(ValueError)
    assert format_frames(missing) == ""


def test_lines_and_traceback_come_from_another_process() -> None:
    error = failure_of(divide, 1)
    received = pickle.loads(pack(error))
    assert received.__traceback__ is None
    assert format_frames(received) == format_frames(error)
    assert "ZeroDivisionError: division by zero" in received.__notes__[0]


def test_a_file_that_cannot_be_loaded_is_named_with_its_line(tmp_path) -> None:
    (tmp_path / "rewards.py").write_text("x = 1\ny = x.nothing\n")
    with pytest.raises(InvalidInputError, match=r"AttributeError: .*\n  File .*rewards.py\", line 2.*\n    y = x.noth"):
        load_module(tmp_path / "rewards.py")
