"""Agents as their users start them: programs of PyPI and npm, and how each is pointed at a server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.agent_players import QUESTION, TASK

VENVS = Path(sys.prefix) / "clients"
"""Where `make clients` and `make agents` install them; apart, as the dependencies of some exclude one another."""
_SCRIPTS = Path(__file__).parent.parent / "e2e" / "clients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An agent."""

    name: str
    dialect: str
    command: Callable[[str, Path], list[str]]
    """Its command line, for a URL and the folder that it works in."""
    environment: Callable[[str], dict[str, str]] = lambda url: {}
    read_version: Callable[[], str] | None = None
    """None if it prints its version."""


def script(name: str, dialect: str, *, venv: str | None = "agents") -> Program:
    """A script of `tests/e2e/clients`, which asks for a sum."""

    def command(url: str, folder: Path) -> list[str]:
        return [str(find_python(venv)), str(_SCRIPTS / f"{name}_client.py"), url]

    return Program(
        name=name.replace("_", "-"), dialect=dialect, command=command, environment=lambda url: {"QUESTION": QUESTION}
    )


def find_python(venv: str | None) -> Path:
    """The Python of one of the environments, or this one."""
    if venv is None:
        return Path(sys.executable)
    if not (VENVS / venv).exists():
        pytest.skip("`make clients` or `make agents` installs it")
    return VENVS / venv / "bin" / "python"


def mini_swe_agent(*, text: bool) -> Program:
    """mini-swe-agent, with calls of a tool or with commands in the text."""

    def command(url: str, folder: Path) -> list[str]:
        program = find_python("mini-swe-agent").with_name("mini")
        options = ("--model", "openai/any", "--yolo", "--exit-immediately", "--task", TASK)
        as_text = ("--config", "mini_textbased.yaml", "--model-class", "litellm_textbased") if text else ()
        return [str(program), *options, *as_text]

    return Program(
        name=f"mini-swe-agent, {'text' if text else 'calls'}",
        dialect="chat",
        command=command,
        environment=lambda url: {
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
        },
        read_version=_read_mini_version,
    )


def _read_mini_version() -> str:
    code = "from importlib.metadata import version; print(version('mini-swe-agent'))"
    return subprocess.check_output([str(find_python("mini-swe-agent")), "-c", code], text=True).strip()


def _codex(url: str, folder: Path) -> list[str]:
    provider = f'{{name="gateway", base_url="{url}/v1", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    settings = ("model=any", "model_provider=gateway", 'web_search="disabled"', f"model_providers.gateway={provider}")
    options = [part for setting in settings for part in ("-c", setting)]
    bypass = "--dangerously-bypass-approvals-and-sandbox"  # its sandbox needs rights that a container has not
    return [_find_npm("codex"), "exec", "--skip-git-repo-check", bypass, *options, TASK]


def _claude(url: str, folder: Path) -> list[str]:
    return [_find_npm("claude"), "-p", TASK, "--allowedTools", "Bash"]


def _opencode(url: str, folder: Path) -> list[str]:
    models = {"any": {"limit": {"context": 200_000, "output": 4096}}}
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    gateway = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    (folder / "opencode.json").write_text(json.dumps({"provider": {"gateway": gateway}}))
    return [_find_npm("opencode"), "run", "-m", "gateway/any", TASK]


def _gemini(url: str, folder: Path) -> list[str]:
    settings = folder / ".gemini" / "settings.json"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}}))
    return [_find_npm("gemini"), "--yolo", "-m", "any", "-p", TASK]


def _read_npm_version(package: str) -> str:
    version: str = json.loads((VENVS / "npm" / "node_modules" / package / "package.json").read_text())["version"]
    return version


def _find_npm(name: str) -> str:
    program = VENVS / "npm" / "node_modules" / ".bin" / name
    if not program.exists():
        pytest.skip("npm is not installed" if shutil.which("npm") is None else "`make agents` installs it")
    return str(program)


def _ai_sdk(url: str, folder: Path) -> list[str]:
    packages = VENVS / "npm"
    if not (packages / "node_modules" / "ai").exists():
        pytest.skip("npm is not installed" if shutil.which("npm") is None else "`make agents` installs it")
    return ["node", str(_SCRIPTS / "ai_sdk_client.mjs"), url, str(packages)]


AI_SDK = Program(name="AI SDK", dialect="Responses", command=_ai_sdk, environment=lambda url: {"QUESTION": QUESTION})
CODEX = Program(
    name="Codex",
    dialect="Responses",
    read_version=lambda: _read_npm_version("@openai/codex"),
    command=_codex,
    environment=lambda url: {"OPENAI_API_KEY": "none"},
)
CLAUDE_CODE = Program(
    name="Claude Code",
    dialect="Messages",
    read_version=lambda: _read_npm_version("@anthropic-ai/claude-code"),
    command=_claude,
    environment=lambda url: {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
)
OPENCODE = Program(
    name="opencode",
    dialect="chat",
    read_version=lambda: _read_npm_version("opencode-ai"),
    command=_opencode,
    environment=lambda url: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
)


GEMINI_CLI = Program(
    name="gemini-cli",
    dialect="Gemini",
    read_version=lambda: _read_npm_version("@google/gemini-cli"),
    command=_gemini,
    environment=lambda url: {
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": "none",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    },
)


def make_environment(program: Program, url: str, home: Path) -> dict[str, str]:
    """The environment of a program: with a home of its own, so that no setting of this machine's user counts."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT}
    return {**kept, "HOME": str(home), "NO_COLOR": "1", **program.environment(url)}


_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS")
