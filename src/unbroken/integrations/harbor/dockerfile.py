"""The instructions of a Dockerfile that can be followed without a container: COPY, WORKDIR, ENV, and RUN by choice."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from unbroken.errors import InvalidInputError
from unbroken.integrations.harbor.findings import Findings

_NO_EFFECT = frozenset({"LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "CMD", "VOLUME"})
"""They change no file, or Harbor replaces them too."""
_VARIABLE = re.compile(r"\\?\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_OTHER_VARIABLE = re.compile(r"(?<!\\)\$\{(?!\w+(?::-[^}]*)?\})[^}]*\}?")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are looked for, unless the Dockerfile says otherwise."""
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".txz", ".tbz2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Files from the task's `environment` folder."""

    sources: tuple[str, ...]
    """Paths and patterns relative to the folder."""
    destination: str
    """An absolute path; with a slash at its end, a folder."""
    mode: int | None = None
    """Their permissions; None: as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A command."""

    words: tuple[str, ...]
    workdir: str
    variables: Mapping[str, str]


Step: TypeAlias = Copy | Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How an environment is made."""

    steps: tuple[Step, ...] = ()
    workdir: str = "/"
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Reader:
    findings: Findings
    steps: list[Step] = field(default_factory=list)
    workdir: str = "/"
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": DEFAULT_PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    num_stages: int = 0

    def read(self, instruction: str, rest: str) -> None:
        method = getattr(self, f"_read_{instruction.lower()}", None)
        if method is not None and not rest:
            raise self.findings.fail(f"its Dockerfile has {instruction} without anything after it")
        if method is not None:
            try:
                method(rest)
            except InvalidInputError:
                raise
            except ValueError as error:  # quotes that do not end
                shown = f"{instruction} {rest[:60]}"
                raise self.findings.fail(f"its Dockerfile has {shown}, which cannot be read: {error}") from None
        elif instruction not in _NO_EFFECT:
            self.findings.refuse(instruction, f"the Dockerfile's instruction {instruction} {rest[:60]}")

    def _read_from(self, rest: str) -> None:
        self.num_stages += 1
        if self.num_stages > 1:
            raise self.findings.fail("its Dockerfile has several stages, which need a container")
        self.findings.note(f"FROM {rest}: the programs are this machine's")

    def _read_workdir(self, rest: str) -> None:
        self.workdir = posixpath.normpath(posixpath.join(self.workdir, self._substitute(rest)))

    def _read_arg(self, rest: str) -> None:
        name, has_default, value = rest.partition("=")
        if has_default:
            self.arguments[name.strip()] = self._substitute("".join(shlex.split(value)))
        else:
            self.arguments.setdefault(name.strip(), "")

    def _read_env(self, rest: str) -> None:
        first = rest.split(None, 1)
        if "=" not in first[0]:
            self.variables[first[0]] = self._substitute(first[1] if len(first) > 1 else "")
            return
        pairs = [pair.partition("=") for pair in shlex.split(rest)]
        self.variables.update({name: self._substitute(value) for name, _, value in pairs})

    def _read_user(self, rest: str) -> None:
        if rest not in ("root", "0", "0:0", "root:root"):
            self.findings.refuse("USER", f"all processes of a task have one user, and the Dockerfile has {rest!r}")

    def _read_copy(self, rest: str) -> None:
        options, words = _split_options(rest)
        mode = None
        for name, value in options.items():
            if name == "chmod" and re.fullmatch(r"[0-7]{3,4}", value):
                mode = int(value, 8)
            elif name == "chown":
                self.findings.note(f"COPY --chown={value}: all files of a task have one user")
            elif name != "link":
                self.findings.refuse(f"COPY --{name}", f"the Dockerfile has COPY --{name}={value}")
                return  # what it would copy is not there
        words = [self._substitute(word) for word in words]
        if len(words) < 2:
            raise self.findings.fail(f"its Dockerfile must name sources and a destination in COPY {rest}")
        destination = posixpath.join(self.workdir, words[-1])
        is_folder = len(words) > 2 or destination.endswith(("/", "/."))
        normal = posixpath.normpath(destination)
        self.steps.append(
            Copy(sources=tuple(words[:-1]), destination=f"{normal.rstrip('/')}/" if is_folder else normal, mode=mode)
        )

    def _read_add(self, rest: str) -> None:
        _, words = _split_options(rest)
        if any("://" in word or word.startswith("git@") or word.endswith(_ARCHIVES) for word in words[:-1]):
            self.findings.refuse("ADD", f"it fetches or unpacks in the Dockerfile's ADD {rest}")
        else:
            self._read_copy(rest)

    def _read_run(self, rest: str) -> None:
        if rest.startswith("--"):
            self.findings.refuse("RUN --", f"options of RUN need a container, and the Dockerfile has RUN {rest[:60]}")
            return
        words = _read_json_words(rest) or ("/bin/sh", "-c", rest)
        self.steps.append(Run(words=words, workdir=self.workdir, variables={**self.arguments, **self.variables}))

    def _substitute(self, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            if found[0].startswith("\\"):
                return found[0][1:]
            name = found[1] or found[3]
            return self.variables.get(name) or self.arguments.get(name) or found[2] or ""

        unread = _OTHER_VARIABLE.search(text)
        if unread is not None:
            raise self.findings.fail(f"its Dockerfile has {unread[0]}, a form of a variable that is not read")
        return _VARIABLE.sub(value, text)


def read_dockerfile(text: str, findings: Findings) -> Plan:
    """Read a Dockerfile.

    Raises:
        InvalidInputError: it has an instruction that cannot be followed without a container.
    """
    reader = _Reader(findings)
    for instruction, rest in _split_instructions(text, findings):
        reader.read(instruction, rest)
    return Plan(steps=tuple(reader.steps), workdir=reader.workdir, variables=reader.variables)


def _split_instructions(text: str, findings: Findings) -> Iterator[tuple[str, str]]:
    for joined in _join_lines(text, findings):
        instruction, *rest = joined.split(None, 1)
        if rest and re.search(r"<<-?[\"']?\w", rest[0]):
            raise findings.fail(f"its Dockerfile has a here-document in {joined[:60]!r}, which is not read")
        yield instruction.upper(), rest[0].strip() if rest else ""


def _join_lines(text: str, findings: Findings) -> Iterator[str]:
    """Each instruction as one line, without comments and empty lines."""
    joined = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            if re.match(r"#\s*escape\s*=", stripped):
                raise findings.fail("its Dockerfile sets another escape character, which is not read")
            continue
        if not stripped:
            continue
        joined += stripped
        if joined.endswith("\\"):
            joined = joined[:-1].rstrip() + " "
            continue
        yield joined
        joined = ""
    if joined.strip():
        yield joined


def _split_options(rest: str) -> tuple[dict[str, str], list[str]]:
    """The options of COPY or ADD, and its words."""
    options = {}
    while found := re.match(r"--([\w-]+)(?:=(\S+))?\s+", rest):
        options[found[1]] = found[2] or ""
        rest = rest[found.end() :]
    return options, list(_read_json_words(rest) or shlex.split(rest))


def _read_json_words(rest: str) -> tuple[str, ...] | None:
    if not rest.startswith("["):
        return None
    try:
        words = json.loads(rest)
    except ValueError:
        return None
    return tuple(words) if isinstance(words, list) and all(isinstance(word, str) for word in words) else None
