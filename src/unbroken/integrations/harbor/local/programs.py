"""The program of an agent: where it is on this machine, and whether a sandbox shows it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from unbroken.errors import InvalidInputError
from unbroken.integrations.harbor.local.sandbox import Sandbox


def find_program(command: Sequence[str], sandbox: Sandbox) -> str:
    """The absolute path of a command's program.

    Raises:
        InvalidInputError: there is no such program, or it cannot be seen in the sandbox.
    """
    if not command:
        raise InvalidInputError("agent.command must be a list of words, the program first, got none")
    found = shutil.which(command[0])
    if found is None:
        raise InvalidInputError(f"agent.command must begin with a program, got {command[0]!r}: it is not installed")
    path = Path(found).absolute()
    hidden = [each for each in _list_needed(path) if sandbox.is_hidden(each)]
    if hidden:
        folders = ", ".join(repr(str(each)) for each in _suggest(hidden))
        raise InvalidInputError(
            f"agent.command needs {hidden[0]}, which the sandbox hides: add what it is installed in, such as "
            f"environment_arguments.readable = [{folders}]"
        )
    return str(path)


def _suggest(hidden: Sequence[Path]) -> list[Path]:
    """The folders that programs are installed in, and links that lie elsewhere."""
    places = [
        each.parent.parent if each.parent.name == "bin" else each.parent for each in hidden if not each.is_symlink()
    ]
    links = [each for each in hidden if each.is_symlink()]
    found: list[Path] = []
    for place in [*places, *links]:
        if not any(place.is_relative_to(each) for each in found):
            found.append(place)
    return found


def _list_needed(program: Path) -> Iterator[Path]:
    """The program, what it is a link to, and the interpreter of a script."""
    yield program
    yield program.resolve()
    with program.open("rb") as file:
        line = file.readline(1000)
    words = line.removeprefix(b"#!").decode(errors="replace").split()
    if line.startswith(b"#!") and words:
        interpreter = Path(words[0])
        yield interpreter
        yield interpreter.resolve()
