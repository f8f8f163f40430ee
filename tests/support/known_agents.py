"""A stand-in for Codex: a program of its name that reads its configuration from its home, and asks as that says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_CODEX = """#!{python}
import json, os, pathlib, subprocess, sys, tomllib, urllib.request

config = tomllib.loads((pathlib.Path.home() / ".codex" / "config.toml").read_text())
provider = config["model_providers"][config["model_provider"]]
assert (provider["wire_api"], sys.argv[1]) == ("responses", "exec"), sys.argv
print(json.dumps({{"words": sys.argv[1:], "variables": dict(os.environ), "here": sorted(os.listdir())}}))
task = sys.argv[-1]
if task == "Fail.":
    sys.exit("codex: no such model")
request = urllib.request.Request(
    provider["base_url"] + "/responses",
    json.dumps({{"model": config["model"], "input": task, "store": False}}).encode(),
    {{"Authorization": "Bearer " + os.environ[provider["env_key"]], "Content-Type": "application/json"}},
)
output = json.load(urllib.request.urlopen(request))["output"]
said = "".join(part["text"] for each in output if each["type"] == "message" for part in each["content"])
if said.startswith("$ "):
    subprocess.run(said[2:], shell=True, check=True)
else:
    pathlib.Path("said.txt").write_text(said)
sys.exit(3 if task == "Fail after a turn." else 0)
"""


def install_codex(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in on PATH: it asks once, and runs a reply that begins with `$ ` in a shell."""
    folder.mkdir(exist_ok=True)
    program = folder / "codex"
    program.write_text(_CODEX.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
