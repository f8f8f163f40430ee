"""Where the processes of a task run: in a sandbox of bubblewrap, or, if that is chosen by name, in none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from unbroken.errors import InvalidInputError
from unbroken.integrations.harbor.local.files import make_folder, make_link

SYSTEM_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
"""Folders of this machine that a task sees, read-only: its programs."""
_MASKED = ("/etc/shadow", "/etc/gshadow", "/etc/ssh")
_PROBE_S = 30


class SandboxKind(StrEnum):
    """How the processes of a task are kept from this machine."""

    BUBBLEWRAP = "bubblewrap"
    """By the program bwrap: a root folder of their own, this machine's programs read-only, no other process."""
    NONE = "none"
    """Not at all: they run as any program of this user. Only for tasks and models that are trusted."""


class Sandbox(Protocol):
    """Makes the command line that runs a command for a task."""

    def wrap(self, words: Sequence[str], *, root: Path, workdir: str, has_network: bool) -> tuple[list[str], Path]:
        """The words that run `words` in `workdir` of the task, and the folder of this machine to start them in."""
        ...

    def locate(self, root: Path, path: str) -> str:
        """The path by which the task's processes know the absolute path `path` of the task."""
        ...

    def is_hidden(self, file: Path) -> bool:
        """Whether a file of this machine cannot be seen by the task's processes."""
        ...

    @property
    def python(self) -> str:
        """A Python that they can run."""
        ...

    @property
    def own_network(self) -> bool:
        """Whether `has_network=False` leaves the processes with a loopback of their own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """The task's root folder as `/`, with namespaces of its own for users, processes, IPC, names and network."""

    program: str
    readable: tuple[Path, ...]
    """Files and folders of this machine that are seen too, read-only, at their own paths."""
    resolver: Path = Path("/etc/resolv.conf")
    """What host names are looked up with. With a network, the file that it is a link to is seen too."""

    @classmethod
    def find(cls, readable: Sequence[Path]) -> Bubblewrap:
        """Find bwrap, and try it.

        Raises:
            InvalidInputError: bubblewrap is not installed, or the kernel does not let it make namespaces.
        """
        program = shutil.which("bwrap")
        if program is None:
            raise InvalidInputError(
                "terminal tasks run in a sandbox of bubblewrap, which is not installed: apt-get install bubblewrap. On "
                'a machine that may be harmed, environment_arguments.sandbox = "none" runs them without any'
            )
        missing = [str(path) for path in readable if not path.exists()]
        if missing:
            raise InvalidInputError(f"environment_arguments.readable must name what exists, got {', '.join(missing)}")
        python = Path(sys.base_prefix)
        found = cls(program=program, readable=(*readable, *(() if _is_of_system(python) else (python,))))
        command = [program, "--ro-bind", "/", "/", *_NAMESPACES, "--unshare-net", *_KERNEL, "true"]
        try:
            tried = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)
        except subprocess.TimeoutExpired:
            raise InvalidInputError(f"bwrap must work on this machine, but took longer than {_PROBE_S} s") from None
        if tried.returncode != 0:
            raise InvalidInputError(
                f"bwrap must be able to make namespaces, but failed: {tried.stderr.strip()[-500:]}. In a container "
                "they need --security-opt seccomp=unconfined or --privileged; with AppArmor, a profile for bwrap. Or "
                'environment_arguments.sandbox = "none", on a machine that may be harmed'
            )
        return found

    @property
    def python(self) -> str:
        """The Python that this one's packages lie on."""
        return os.path.realpath(getattr(sys, "_base_executable", sys.executable))

    @property
    def own_network(self) -> bool:
        """See `Sandbox`."""
        return True

    def wrap(self, words: Sequence[str], *, root: Path, workdir: str, has_network: bool) -> tuple[list[str], Path]:
        """See `Sandbox`. Raises `TaskError` if the working folder cannot be made."""
        options = ["--bind", str(root), "/"]
        for name in SYSTEM_FOLDERS:
            host = Path("/", name)
            if host.is_symlink():
                make_link(root, f"/{name}", host.readlink())
            elif host.exists():
                make_folder(root, f"/{name}")
                options += ["--ro-bind", str(host), str(host)]
        for path in _MASKED:
            if Path(path).exists():
                options += ["--tmpfs" if Path(path).is_dir() else "--ro-bind", *_mask(path)]
        for readable in (*self.readable, *(self._find_resolver() if has_network else ())):
            target = readable.absolute()
            place = make_folder(root, str(target.parent)) / target.name
            if target.is_dir():
                make_folder(root, str(target))
            elif place.is_symlink():
                place.unlink()
            options += ["--ro-bind", str(readable.resolve()), str(target)]
        for name in ("/dev", "/proc", "/tmp", "/root", workdir):
            make_folder(root, name)
        network = [] if has_network else ["--unshare-net"]
        command = [self.program, *_NAMESPACES, *network, *options, *_KERNEL, "--chdir", workdir, "--", *words]
        return command, root

    def _find_resolver(self) -> Iterator[Path]:
        found = self.resolver.resolve()
        if found.is_file() and not _is_of_system(found):
            yield found

    def locate(self, root: Path, path: str) -> str:
        """See `Sandbox`: the task's root is `/`."""
        return path

    def is_hidden(self, file: Path) -> bool:
        """See `Sandbox`."""
        return not (_is_of_system(file) or any(file.is_relative_to(each.absolute()) for each in self.readable))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsandboxed:
    """The task's root is a folder of this machine, and its absolute paths are this machine's.

    So only tasks whose scripts begin each path with `$UNBROKEN_TASK_ROOT` can be run.
    """

    @property
    def python(self) -> str:
        """The running one."""
        return sys.executable

    @property
    def own_network(self) -> bool:
        """See `Sandbox`."""
        return False

    def wrap(self, words: Sequence[str], *, root: Path, workdir: str, has_network: bool) -> tuple[list[str], Path]:
        """See `Sandbox`."""
        for name in ("/tmp", "/root"):
            make_folder(root, name)
        return list(words), make_folder(root, workdir)

    def locate(self, root: Path, path: str) -> str:
        """See `Sandbox`: below the task's root."""
        return str(root / path.lstrip("/"))

    def is_hidden(self, file: Path) -> bool:
        """See `Sandbox`: nothing is."""
        return False


def open_sandbox(kind: SandboxKind, *, readable: Sequence[Path] = ()) -> Sandbox:
    """The sandbox of this kind; raises as `Bubblewrap.find` does."""
    return Bubblewrap.find(readable) if kind is SandboxKind.BUBBLEWRAP else Unsandboxed()


_NAMESPACES = (
    "--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--unshare-ipc", "--unshare-uts",
    "--unshare-cgroup-try", "--hostname", "task", "--die-with-parent",
)  # fmt: skip
_KERNEL = ("--dev", "/dev", "--proc", "/proc")


def _mask(path: str) -> list[str]:
    return [path] if Path(path).is_dir() else ["/dev/null", path]


def _is_of_system(path: Path) -> bool:
    return path.is_absolute() and path.parts[1:2] != () and path.parts[1] in SYSTEM_FOLDERS
