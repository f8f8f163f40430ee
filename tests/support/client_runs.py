"""Runs with the Python of one of the environments of `make clients`, which borrows the other packages from this one."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

from support.agent_programs import find_python

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "e2e" / "clients"
_START = """
import runpy, site, sys
site.addsitedir(sys.argv.pop(1))
sys.argv.pop(0)
if sys.argv[0] == "unbroken":
    from unbroken.cli import main
    sys.exit(main(sys.argv[1:]))
if sys.argv[0] == "-m":
    sys.argv.pop(0)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.exit()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def client_command(venv: str, *words: str) -> list[str]:
    """The command line of `unbroken ...`, of `-m MODULE ...` or of a script, with the Python of `venv`."""
    return [str(find_python(venv)), "-c", _START, sysconfig.get_paths()["purelib"], *words]


def client_environment(venv: str, cache: Path) -> dict[str, str]:
    """The variables of its process; programs of `venv` are found first."""
    paths = [ROOT / "src", ROOT / "tests", CLIENTS / "environments"]
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(find_python(venv).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_DATASETS_CACHE": str(cache),
    }


def run_with_client(folder: Path, venv: str, *words: str) -> str:
    """Run a `client_command` to its end; returns what it printed. `folder` is where it writes, and may not exist."""
    done = subprocess.run(
        client_command(venv, *words),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=client_environment(venv, folder.with_name(f"{folder.name}-cache")),
    )
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-4000:]
    return done.stdout
