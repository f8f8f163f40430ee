"""A container for each command of an attempt: the image has the programs, and this machine's folders are mounted.

run --rm --name NAME --network host --mount WORK --mount HOME --workdir WORK --env KEY IMAGE codex exec ...

Folders have the same paths inside, so files and variables that name them hold, and the gateway is at the same URL.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import InvalidInputError

_log = logging.getLogger(__name__)
_PROGRAMS = ("docker", "podman")
_CALL_S = 60.0
_SYSTEM = tuple(map(Path, ("/bin", "/etc", "/lib", "/lib64", "/sbin", "/usr")))
"""What is in these folders is the image's own: this machine's would not run there."""
NOT_STARTED = 125
"""The exit status of `run` if docker or podman itself failed: nothing ran. A program that exits so is taken for it."""
NOT_FOUND = (126, 127)
"""Its status if the image does not have the program, or it cannot be executed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that docker or podman has on this machine. It is never pulled: attempts would wait for it."""

    name: str
    program: str
    """docker or podman."""

    @classmethod
    def find(cls, name: str) -> Image:
        """The image of this name; raises `InvalidInputError` if there is neither program, or none has it."""
        if not name or name.startswith("-"):
            raise InvalidInputError(f"agent.image must be the name of an image, got {name!r}")
        found = [program for program in _PROGRAMS if shutil.which(program)]
        if not found:
            raise InvalidInputError(
                f"agent.image needs docker or podman, and neither is on PATH, got {name!r}: install one or leave it out"
            )
        problems = []
        for program in found:
            done = _call(program, "image", "inspect", "--format", "{{.Id}}", name)
            if done.returncode == 0:
                return cls(name=name, program=program)
            problems.append(f"{program}: {done.stderr.strip()[-300:]}")
        raise InvalidInputError(
            f"agent.image must be an image that is on this machine, got {name!r} ({'; '.join(problems)}). Pull it "
            f"first: {found[0]} pull {name}"
        )

    def open(self, work: Path, home: Path | None) -> _Container:
        """A container that works in `work`; without a home it has the image's `/tmp` in its place."""
        return _Container(image=self, work=work, home=home)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Container:
    """One container, for one command."""

    image: Image
    work: Path
    home: Path | None
    name: str = field(default_factory=lambda: f"unbroken-{uuid.uuid4().hex}")

    def wrap(self, words: Sequence[str], variables: Collection[str]) -> list[str]:
        """The command that runs `words` inside, with variables of these names as they are outside.

        Only names are in it: other users can see the words of a command, and some values open the session. A file that
        a word names by an absolute path, such as a check beside the TOML file, can be read there.
        """
        # What it writes must be the user's, who removes it; podman's root is the user outside.
        user = "0:0" if self.image.program == "podman" else f"{os.getuid()}:{os.getgid()}"
        return [
            self.image.program, "run", "--rm", "--init", "--name", self.name, "--network", "host", "--user", user,
            "--security-opt", "label=disable", "--pull", "never", "--entrypoint", words[0],
            *(part for mount in self._list_mounts(words) for part in ("--mount", mount)),
            *(part for name in sorted({*variables} - {"HOME", "PATH"}) for part in ("--env", name)),
            "--env", f"HOME={self.home or '/tmp'}", "--workdir", str(self.work), self.image.name, *words[1:],
        ]  # fmt: skip

    def _list_mounts(self, words: Sequence[str]) -> list[str]:
        """Its folders, and the files that words name; those of the system are the image's."""
        folders = [self.work, *([] if self.home is None else [self.home])]
        files = [Path(word) for word in words if Path(word).is_absolute() and os.path.isfile(word)]  # noqa: PTH113
        own = {file for file in files if not any(map(file.is_relative_to, (*_SYSTEM, *folders)))}
        mounts = [f"type=bind,source={folder},target={folder}" for folder in folders]
        return mounts + [f"type=bind,source={file},target={file},readonly" for file in sorted(own)]

    def remove(self) -> None:
        """End what runs in it: a `run` that is killed leaves its container."""
        done = _call(self.image.program, "rm", "--force", self.name)
        if done.returncode and "no such container" not in done.stderr.lower():
            _log.warning("the container %s cannot be removed: %s", self.name, done.stderr.strip()[-300:])


def _call(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [program, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([], 1, "", f"no answer within {_CALL_S:g} s")
