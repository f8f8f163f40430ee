"""A stand-in for Codex: a program of its name that reads its configuration from its home, and asks as that says."""

from __future__ import annotations

import os
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


_ENGINE = """#!{python}
import json, os, pathlib, sys

log = pathlib.Path({log!r})
words = sys.argv[1:]
with log.open("a") as file:
    file.write(json.dumps(words) + "\\n")
if words[:2] == ["image", "inspect"]:
    sys.exit(0 if words[-1] == "box" else "no such image: " + words[-1])
if words[0] == "rm":
    sys.exit(0)
assert words.pop(0) == "run", words
flags, mounts, names = {{"--rm": 0, "--init": 0}}, [], dict(PATH=os.environ["PATH"])
while words[0].startswith("--"):
    name = words.pop(0)
    if name in flags:
        continue
    value = words.pop(0)
    if name == "--env":
        key, equals, given = value.partition("=")
        names[key] = given if equals else os.environ[key]
    elif name == "--mount":
        mounts.append(dict(part.partition("=")[::2] for part in value.split(",")))
    else:
        flags[name] = value
assert words.pop(0) == "box"
assert all(each["type"] == "bind" and each["source"] == each["target"] for each in mounts)
assert flags["--workdir"] in [each["target"] for each in mounts]
if "BROKEN" in names:
    print("no room", file=sys.stderr)
    sys.exit(125)
os.chdir(flags["--workdir"])
os.execvpe(flags["--entrypoint"], [flags["--entrypoint"], *words], names)
"""


def install_engine(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for docker or podman on PATH, which has the image `box`; its log has the words of each call.

    It runs what it is told to run here, with the variables that a container would have.
    """
    folder.mkdir(exist_ok=True)
    program, log = folder / name, folder.parent / f"{name}.log"
    program.write_text(_ENGINE.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    if str(folder) not in os.environ["PATH"].split(":"):
        monkeypatch.setenv("PATH", str(folder), prepend=":")
    return log
