"""Agents that are known by name: how each is installed, pointed at a session, and started on a task.

To add one, add an entry to `KNOWN_AGENTS`.

KNOWN_AGENTS["codex"].start(session, instruction="Fix the test.", home=home)     its words, and its variables
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unbroken.errors import InvalidInputError

if TYPE_CHECKING:  # the names of agents are options of the command line, which needs no rollouts
    from unbroken.rollout.agents.session import AgentSession


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAgent:
    """An agent that works on one task and ends, without a question.

    `words`, `files` and `environment` have the placeholders of `AgentSession.fill`; `{instruction}` is the task.
    """

    program: str
    """Its name on PATH."""
    install: str
    """The command that installs it."""
    dialect: str
    """In which it asks the model."""
    words: tuple[str, ...]
    """After the program. Other users of the machine can see them: no URL and no key, which open the session."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What its home has, by paths: JSON or TOML, in which placeholders stand within quotes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """All that it gets in addition to what programs need to start (`CommandAgent`)."""

    def check(self, name: str) -> None:
        """Raise `InvalidInputError` if it cannot be started here as `agent.name`."""
        if shutil.which(self.program) is None:
            raise InvalidInputError(
                f"agent.name must be an agent that is installed, got {name!r}: there is no program {self.program} on "
                f"PATH. Install it: {self.install}"
            )

    def start(self, session: AgentSession, *, instruction: str, home: Path) -> tuple[list[str], dict[str, str]]:
        """Write the files into `home`, an empty folder; returns the words of the command and its variables."""
        filled = replace(session, task={"instruction": instruction})
        for name, text in self.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            file.write_text(filled.fill(text, quoted=True), "utf-8")
        words = [self.program, *(filled.fill(word) for word in self.words)]
        variables = {name: filled.fill(value) for name, value in self.environment.items()}
        return words, {**variables, "HOME": str(home), "NO_COLOR": "1"}


KNOWN_AGENTS: Mapping[str, KnownAgent] = {
    "claude-code": KnownAgent(
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        dialect="Messages",
        words=("-p", "--model", "{model}", "--", "{instruction}"),
        files={
            ".claude/settings.json": """{"permissions": {"defaultMode": "acceptEdits",
  "allow": ["Bash", "Read", "Edit", "Write", "NotebookEdit", "Glob", "Grep"], "deny": ["WebSearch", "WebFetch"]}}
"""
        },
        environment={
            "ANTHROPIC_BASE_URL": "{anthropic_base_url}",
            "ANTHROPIC_AUTH_TOKEN": "{api_key}",
            "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
    "cline": KnownAgent(
        program="cline",
        install="npm install -g cline",
        dialect="chat",
        words=("--provider", "openai-compatible", "--auto-approve", "true", "--", "{instruction}"),
        files={
            ".cline/data/settings/providers.json": """{"version": 1, "modes": {},
 "lastUsedProvider": "openai-compatible",
 "providers": {"openai-compatible": {"updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual", "settings":
  {"provider": "openai-compatible", "apiKey": "{api_key}", "model": "{model}", "baseUrl": "{openai_base_url}"}}}}
"""
        },
        environment={"CLINE_SESSION_BACKEND_MODE": "local"},  # else all attempts share a daemon at one port
    ),
    "codex": KnownAgent(
        program="codex",
        install="npm install -g @openai/codex",
        dialect="Responses",
        words=("exec", "--skip-git-repo-check", "--", "{instruction}"),
        files={
            # Its sandbox needs rights that a container does not have; the copy of the workspace is what it may change.
            ".codex/config.toml": """model = "{model}"
model_provider = "session"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.session]
name = "session"
base_url = "{openai_base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
        },
        environment={"OPENAI_API_KEY": "{api_key}"},
    ),
    "copilot-cli": KnownAgent(
        program="copilot",
        install="npm install -g @github/copilot",
        dialect="chat",
        words=("--allow-all-tools", "--no-color", "--prompt={instruction}"),
        environment={
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_BASE_URL": "{openai_base_url}",
            "COPILOT_PROVIDER_API_KEY": "{api_key}",
            "COPILOT_MODEL": "{model}",
            "COPILOT_OFFLINE": "true",
            "COPILOT_AUTO_UPDATE": "false",
        },
    ),
    "gemini-cli": KnownAgent(
        program="gemini",
        install="npm install -g @google/gemini-cli",
        dialect="Gemini",
        words=("--yolo", "--skip-trust", "--model", "{model}", "--prompt={instruction}"),
        files={
            ".gemini/settings.json": """{"security": {"auth": {"selectedType": "gemini-api-key"}},
 "privacy": {"usageStatisticsEnabled": false}, "general": {"enableAutoUpdate": false}}
"""
        },
        environment={"GOOGLE_GEMINI_BASE_URL": "{gemini_base_url}", "GEMINI_API_KEY": "{api_key}"},
    ),
    "mini-swe-agent": KnownAgent(
        program="mini",
        install="pip install mini-swe-agent",
        dialect="chat",
        words=("--model=openai/{model}", "--yolo", "--exit-immediately", "--task={instruction}"),
        environment={
            "OPENAI_API_BASE": "{openai_base_url}",
            "OPENAI_API_KEY": "{api_key}",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
        },
    ),
    "opencode": KnownAgent(
        program="opencode",
        install="npm install -g opencode-ai",
        dialect="chat",
        words=("run", "--model", "session/{model}", "--", "{instruction}"),
        files={
            # The context's length is not known here: the server refuses a prompt that is too long, by name.
            ".config/opencode/opencode.json": """{"autoupdate": false, "share": "disabled", "permission": "allow",
 "small_model": "session/{model}", "enabled_providers": ["session"],
 "provider": {"session": {"npm": "@ai-sdk/openai-compatible",
  "options": {"baseURL": "{openai_base_url}", "apiKey": "{api_key}"},
  "models": {"{model}": {"limit": {"context": 200000, "output": 8192}}}}}}
"""
        },
        environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "qwen-code": KnownAgent(
        program="qwen",
        install="npm install -g @qwen-code/qwen-code",
        dialect="chat",
        words=("--yolo", "--prompt={instruction}"),
        files={
            ".qwen/settings.json": """{"security": {"auth": {"selectedType": "openai"}},
 "privacy": {"usageStatisticsEnabled": false}, "general": {"enableAutoUpdate": false, "disableAutoUpdate": true},
 "memory": {"enableManagedAutoMemory": false, "enableManagedAutoDream": false}}
"""
        },
        environment={
            "OPENAI_BASE_URL": "{openai_base_url}",
            "OPENAI_API_KEY": "{api_key}",
            "OPENAI_MODEL": "{model}",
        },
    ),
}
"""By the names that `agent.name` and `unbroken agent` take."""
