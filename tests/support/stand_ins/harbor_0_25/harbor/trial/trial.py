import asyncio
import json
import urllib.request
from types import SimpleNamespace
from typing import Any

from harbor.models.trial.config import TrialConfig
from harbor.trial.hooks import TrialEvent


class Trial:
    """Its agent asks the model once, with the instruction. The tests' file says how the trial ends."""

    def __init__(self, config: TrialConfig) -> None:
        self.config = config
        self._hooks: list[Any] = []

    def add_hook(self, event: TrialEvent, hook: Any) -> None:
        assert event is TrialEvent.AGENT_START
        self._hooks.append(hook)

    @classmethod
    async def create(cls, config: TrialConfig) -> "Trial":
        return cls(config)

    async def run(self) -> Any:
        folder = self.config.task.path
        end = json.loads((folder / "tests" / "end.json").read_text())
        await asyncio.sleep(end.get("creation_s", 0))
        if end.get("exception") == "EnvironmentStartTimeoutError":
            return self._end(end)
        for hook in self._hooks:
            await hook("an event")
        await asyncio.to_thread(self._ask, (folder / "instruction.md").read_text())
        return self._end(end)

    def _end(self, end: dict[str, Any]) -> Any:
        kind, rewards = end.get("exception"), end.get("rewards")
        return SimpleNamespace(
            exception_info=kind and SimpleNamespace(exception_type=kind, exception_message="so it ended"),
            verifier_result=None if rewards is None else SimpleNamespace(rewards=rewards),
        )

    def _ask(self, instruction: str) -> None:
        env = self.config.agent.env
        request = urllib.request.Request(
            env["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": instruction}]}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {env['OPENAI_API_KEY']}"},
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()
